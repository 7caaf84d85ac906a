"""One function over many shards, in processes, results in order."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from wdskit.dataset.index import ShardEntry
from wdskit.errors import ShardError, WdskitError
from wdskit.limits import MAX_LISTED
from wdskit.processes import block_sigint, end_with_parent, hear_ctrl_c, usable_cores
from wdskit.storage.urls import LocalFile, is_local, local_path

S = TypeVar("S")
T = TypeVar("T")

Progress = Callable[[int, int | None], None]
"""Called while shards are read: bytes read so far, bytes in all or None where that is unknown (http)."""

WORKER_BYTES = 64 << 20
"""What a process must have to read before it is worth its start of a quarter of a second."""


def choose_workers(num_shards: int, num_bytes: int | None) -> int:
    """Return how many processes to use: at most one a shard and one a CPU that this process may run on.

    Args:
        num_shards: Shards to read.
        num_bytes: Their size, None where it is unknown.
    """
    num_cpus = usable_cores()
    num_wanted = num_cpus if num_bytes is None else num_bytes // WORKER_BYTES
    return max(1, min(num_cpus, num_shards, num_wanted))


def map_shards(
    function: Callable[[S], T], shards: Sequence[S], *, workers: int
) -> Generator[T | WdskitError, None, None]:
    """Call `function` on each shard and yield what it returned, or the `WdskitError` it raised, in the order of
    `shards`. Closed before its end, it waits for what is running, and begins nothing more.

    Args:
        function: With more than one worker it must be picklable, and so must what it takes and returns.
        shards: What stands for a shard: its URL, or what is to be packed into it.
        workers: Processes; with 1, or a single shard, it runs in this one. They are spawned, so a script that calls
            this needs the `if __name__ == "__main__":` of every Python program that spawns.

    Raises:
        WdskitError: A process died (memory, a signal), so that results are missing.
    """
    attempt = functools.partial(_attempt, function)
    if workers == 1 or len(shards) < 2:
        yield from map(attempt, shards)
        return
    pool = ProcessPoolExecutor(min(workers, len(shards)), mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        ahead = 4 * workers  # enough that nobody waits; a million futures at once would take gigabytes
        with block_sigint():  # they all start here
            pending: list[Future[T | WdskitError]] = [pool.submit(attempt, shard) for shard in shards[:ahead]]
        for number in range(len(shards)):
            result = pending.pop(0).result()
            if number + ahead < len(shards):
                pending.append(pool.submit(attempt, shards[number + ahead]))
            yield result
    except BrokenProcessPool as err:
        raise WdskitError(
            "a worker process was killed, perhaps because memory ran out. Try again with fewer workers."
        ) from err
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(function: Callable[[S], T], shard: S) -> T | WdskitError:
    try:
        return function(shard)
    except WdskitError as err:
        return err


def _start_worker() -> None:
    """End a worker at Ctrl-C without a traceback of its own, and with the main process, not to write beside another."""
    hear_ctrl_c()
    end_with_parent()


def read_shards(
    function: Callable[[S], T],
    shards: Sequence[S],
    sizes: Sequence[int | None],
    *,
    path: str,
    workers: int | None,
    progress: Progress | None,
    so: str = "are invalid",
    error: Callable[[str], WdskitError] = ShardError,
) -> Iterator[T]:
    """Yield what `function` returns for each shard, in their order. Behind the last, raise the fault of the one shard
    at fault, or an error that lists several.

    Args:
        function: As for `map_shards`, and so `shards`.
        shards: What is handed to it.
        sizes: Bytes of each, None where that is not known; a result has `num_bytes` then.
        path: What the shards were named by, for the error.
        workers: Processes; None for what `choose_workers` says.
        progress: Called after each shard.
        so: What follows the number of the shards at fault.
        error: Makes the error of several.
    """
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    num_workers = choose_workers(len(shards), num_bytes) if workers is None else workers
    num_done = 0
    faults: list[WdskitError] = []
    with contextlib.closing(map_shards(function, shards, workers=num_workers)) as results:
        for size, result in zip(sizes, results, strict=True):
            num_done += getattr(result, "num_bytes", 0) if size is None else size
            if progress:
                progress(num_done, num_bytes)
            if isinstance(result, WdskitError):
                faults.append(result)
            else:
                yield result
    if len(faults) == 1:
        raise faults[0]
    if faults:
        more = [f"... and {len(faults) - MAX_LISTED} more."] if len(faults) > MAX_LISTED else []
        lines = [f"{path}: {len(faults)} of {len(shards)} shards {so}.", *map(str, faults[:MAX_LISTED]), *more]
        raise error("\n".join(lines)) from faults[0]


def file_sizes(urls: Iterable[str], entries: Iterable[ShardEntry | None] = ()) -> list[int | None]:
    """Bytes of each file; of a remote one what its line in an index says, else None, as of one that cannot be asked:
    reading it says what is wrong.
    """
    sizes: list[int | None] = []
    for url, entry in itertools.zip_longest(urls, entries):
        try:
            known = entry.num_bytes if entry else None
            sizes.append(Path(local_path(url)).stat().st_size if is_local(url) else known)
        except OSError:
            sizes.append(None)
    return sizes


def open_path(path: str) -> LocalFile:
    """Open a path, also one that looks like a file URL."""
    return LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
