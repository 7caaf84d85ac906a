"""Call a function on many shards in worker processes; results come in order."""

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

from wdskit.dataset.binary import ShardEntry
from wdskit.errors import ShardError, WdskitError
from wdskit.limits import MAX_LISTED
from wdskit.processes import block_sigint, end_with_parent, hear_ctrl_c, usable_cores
from wdskit.storage.urls import LocalFile, is_local, local_path

S = TypeVar("S")
T = TypeVar("T")

Progress = Callable[[int, int | None], None]
"""Called while shards are read: bytes read so far, bytes in all or None where that is unknown (http)."""

WORKER_BYTES = 64 << 20
"""Bytes per process below which starting another process, a quarter of a second, costs more than it saves."""


def choose_workers(num_shards: int, num_bytes: int | None) -> int:
    """Return how many processes to use: at most one a shard and one a CPU that this process may run on.

    Args:
        num_shards: Shards to read.
        num_bytes: Their size, None if it is unknown.
    """
    num_cpus = usable_cores()
    num_wanted = num_cpus if num_bytes is None else num_bytes // WORKER_BYTES
    return max(1, min(num_cpus, num_shards, num_wanted))


def map_shards(
    function: Callable[[S], T], shards: Sequence[S], *, workers: int
) -> Generator[T | WdskitError, None, None]:
    """Call `function` on each shard, and yield its result or the `WdskitError` that it raised, in order.

    If the generator is closed early, it waits for the running calls and starts no more.

    Args:
        function: With more than one worker, the function, its argument and its result must be picklable.
        shards: The arguments of the calls: URLs, or descriptions of shards to fill.
        workers: Processes; 1, or a single shard, means this process. Processes are spawned, so a script that calls
            this needs the `if __name__ == "__main__":` of every Python program that spawns.

    Raises:
        WdskitError: A process died (memory, a signal), so that results are missing.
    """
    attempt = functools.partial(_catch_error, function)
    if workers == 1 or len(shards) < 2:
        yield from map(attempt, shards)
        return
    pool = ProcessPoolExecutor(min(workers, len(shards)), mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        ahead = 4 * workers  # enough to keep all workers busy; a million futures at once would take gigabytes
        with block_sigint():  # all workers start here
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


def _catch_error(function: Callable[[S], T], shard: S) -> T | WdskitError:
    try:
        return function(shard)
    except WdskitError as err:
        return err


def _start_worker() -> None:
    """Let a worker end at Ctrl-C without a traceback, and with the main process, so that no two runs write at once."""
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
    """Yield the result of `function` for each shard, in order. After the last shard, raise the error of the one invalid
    shard, or one error that lists several.

    Args:
        function: Called as by `map_shards`.
        shards: The arguments of the calls.
        sizes: Bytes of each shard, None if unknown; then the result has `num_bytes`.
        path: The path that the user named, for the error.
        workers: Processes; None lets `choose_workers` decide.
        progress: Called after each shard.
        so: The end of the sentence "2 of 5 shards ...", in the error.
        error: Makes the error that lists several shards.

    Raises:
        WdskitError: Shards are invalid.
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
    """Return the size of each file in bytes, of a remote file as its index entry says; None if unknown."""
    sizes: list[int | None] = []
    for url, entry in itertools.zip_longest(urls, entries):
        try:
            known = entry.num_bytes if entry else None
            sizes.append(Path(local_path(url)).stat().st_size if is_local(url) else known)
        except OSError:
            sizes.append(None)
    return sizes


def open_path(path: str) -> LocalFile:
    """Open a path, even one that looks like a file URL."""
    return LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
