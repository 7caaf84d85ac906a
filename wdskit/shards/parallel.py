"""One function over many shards, in processes, results in order, faults as values."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from wdskit.errors import WdskitError
from wdskit.processes import deaf_to_ctrl_c, end_with_parent, hear_ctrl_c

S = TypeVar("S")
T = TypeVar("T")

WORKER_BYTES = 64 << 20
"""What a process must have to read before it is worth its start of a quarter of a second."""


def choose_workers(num_shards: int, num_bytes: int | None) -> int:
    """How many processes to use: at most one a shard and one a CPU that this process may run on.

    Args:
        num_shards: Shards to read.
        num_bytes: Their size, None where it is unknown.
    """
    # macOS and Windows have no affinity.
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_wanted = num_cpus if num_bytes is None else num_bytes // WORKER_BYTES
    return max(1, min(num_cpus, num_shards, num_wanted))


def map_shards(
    function: Callable[[S], T], shards: Sequence[S], *, workers: int
) -> Generator[T | WdskitError, None, None]:
    """Call `function` on each shard and yield what it returned, or the `WdskitError` it raised, in the order of
    `shards`.

    Args:
        function: With more than one worker it must be picklable, and so must what it returns.
        shards: What stands for a shard: its URL, or what is to be packed into it. It must be picklable then too.
        workers: Processes; with 1, or a single shard, it runs in this one. They are spawned, so a script that calls
            this needs the `if __name__ == "__main__":` of every Python program that spawns.

    Closed before its end, it waits for what is running, and begins nothing more.

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
        with deaf_to_ctrl_c():  # they all start here
            pending: list[Future[T | WdskitError]] = [pool.submit(attempt, shard) for shard in shards[:ahead]]
        for number in range(len(shards)):
            result = pending.pop(0).result()
            if number + ahead < len(shards):
                pending.append(pool.submit(attempt, shards[number + ahead]))
            yield result
    except BrokenProcessPool as err:
        raise WdskitError("a worker process was killed, perhaps for its memory. Try again with fewer workers.") from err
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(function: Callable[[S], T], shard: S) -> T | WdskitError:
    try:
        return function(shard)
    except WdskitError as err:
        return err


def _start_worker() -> None:
    """Let Ctrl-C end a worker without a traceback of its own, as the main process tells the user; and let no worker
    outlive the main process, to write beside the next run.
    """
    hear_ctrl_c()
    end_with_parent()
