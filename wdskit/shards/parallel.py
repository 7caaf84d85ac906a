"""Call a function on many shards in worker processes. The results come in the order of the shards."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from wdskit.errors import StorageError, WdskitError, check_whole, error_text
from wdskit.files import describe_missing
from wdskit.processes import (
    GUARD,
    block_sigint,
    end_with_parent,
    exit_on_ctrl_c,
    find_unguarded_line,
    needs_script,
    usable_cores,
    without_script,
)
from wdskit.storage.urls import is_local, local_path

S = TypeVar("S")
T = TypeVar("T")

Progress = Callable[[int, int | None], None]
"""Called while shards are read, with the bytes read so far and the bytes of all shards (None if unknown: http)."""

WORKER_BYTES = 64 << 20
"""Bytes of shards for each process. For fewer bytes, the start of a process (0.25 s) takes longer than it saves."""


def choose_workers(num_shards: int, num_bytes: int | None) -> int:
    """Return the number of processes to use: 1 or more, at most one per shard and one per CPU of this process.

    Args:
        num_shards: Shards to read.
        num_bytes: Size of these shards together; None if unknown.
    """
    num_cpus = usable_cores()
    num_wanted = num_cpus if num_bytes is None else num_bytes // WORKER_BYTES
    return max(1, min(num_cpus, num_shards, num_wanted))


def map_shards(
    function: Callable[[S], T], shards: Iterable[S], *, workers: int, user: object = None
) -> Generator[T, None, None]:
    """Call `function` on each shard. Yield its results in the order of the shards.

    If the generator is closed early, or `function` raises an error, it cancels the calls that no process has received,
    and waits for the others.

    Args:
        function: Takes an element of `shards`. With several workers, function, argument and result must be picklable.
        shards: URLs, or descriptions of shards to write. At most `4 * workers` elements are taken from the iterable
            before their results are needed.
        workers: Number of processes. With 1 worker or 1 shard, `function` runs in this process. Processes are spawned.
        user: A function of the user that `function` calls; None if there is none. Only with one, the processes import
            the main script, so that its call needs `if __name__ == "__main__":`.

    Raises:
        WdskitError: `workers` is not a number of processes.
        WdskitError: The processes cannot import the user's function, or would run the calling line again.
        WdskitError: A process was killed (by a signal, or because memory ran out), so results are missing.
        Exception: `function` raised it for the first of the shards that have an error.
    """
    workers = check_whole("workers", workers, WdskitError, least=1)
    waiting = iter(shards)
    ahead = 4 * workers if workers > 1 else 0  # keeps all workers busy; a million futures at once would take gigabytes
    first = [*itertools.islice(waiting, ahead)]
    if len(first) < 2:
        yield from map(function, itertools.chain(first, waiting))
        return
    if user is not None:
        _check_script(user)
    pool = ProcessPoolExecutor(min(workers, len(first)), mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        try:
            skips = without_script() if user is None else contextlib.nullcontext()
            with block_sigint(), skips:  # all workers start here
                pending: deque[Future[T]] = deque(pool.submit(function, shard) for shard in first)
        except OSError as err:
            raise WdskitError(f"worker processes cannot start: {err.strerror or err}.\n  Use 1 worker.") from err
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(function, shard) for shard in itertools.islice(waiting, 1))
            yield result
    except BrokenProcessPool as err:
        raise WdskitError("a worker process was killed, perhaps because memory ran out.") from err
    finally:
        pool.shutdown(cancel_futures=True)


def _check_script(user: object) -> None:
    """Raise WdskitError if worker processes cannot import the user's function, or would run the calling line again."""
    try:
        needs_script(user)
    except Exception as err:
        msg = f"a function cannot reach worker processes: {error_text(err)}."
        raise WdskitError(f"{msg}\n  Define the function at the top of a module, or use 1 worker.") from err
    line = find_unguarded_line()
    if line:
        msg = f"{line}: each worker process would run this line again."
        raise WdskitError(f"{msg}\n  Put the line under {GUARD}, or use 1 worker.")


def _start_worker() -> None:
    """Make this worker process end without a traceback at Ctrl-C, and when the main process ends."""
    exit_on_ctrl_c()
    end_with_parent()  # otherwise two runs could write at once


def read_shards(
    function: Callable[[S], T],
    shards: Sequence[S],
    sizes: Sequence[int | None],
    *,
    workers: int | None,
    progress: Progress | None,
) -> Iterator[T]:
    """Call `function` on each shard, and yield its results in order.

    Args:
        function: Takes an element of `shards`. With several workers, function, argument and result must be picklable.
        shards: URLs, or descriptions of shards.
        sizes: Bytes of each shard, for `progress` and `choose_workers`. If a size is None (unknown), `progress` counts
            the `num_bytes` of the result.
        workers: Number of processes; None lets `choose_workers` decide.
        progress: Called after each shard, as `Progress` describes; None for no calls.

    Raises:
        WdskitError: `function` raised this error for the first invalid shard. Or a process was killed.
    """
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    num_workers = choose_workers(len(shards), num_bytes) if workers is None else workers
    num_done = 0
    with contextlib.closing(map_shards(function, shards, workers=num_workers)) as results:
        for size, result in zip(sizes, results, strict=True):
            num_done += getattr(result, "num_bytes", 0) if size is None else size
            if progress:
                progress(num_done, num_bytes)
            yield result


def file_size(url: str) -> int | None:
    """Return the size of a file in bytes; None for a remote file, and for a file that cannot be read."""
    with contextlib.suppress(OSError):
        return Path(local_path(url)).stat().st_size if is_local(url) else None
    return None


def local_folder(folder: str | Path) -> Path:
    """Return the path of a local folder. StorageError: The folder is remote, does not exist, or is a file."""
    if not is_local(str(folder)):
        raise StorageError(f"{folder}: this is not a local folder.", url=str(folder))
    path = Path(local_path(str(folder)))
    if not str(folder).strip() or not os.path.isdir(path):  # noqa: PTH112 (no error)
        shown = str(folder).strip() or "an empty path"
        raise StorageError(f"{shown}: {describe_missing(str(folder), 'folder')}", url=str(folder))
    return path
