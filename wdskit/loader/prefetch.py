"""Prefetch: make the next batches before the consumer asks for them, and yield them in order."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from wdskit.engine.batch import Batch
from wdskit.engine.program import Program
from wdskit.loader.pools import Pool
from wdskit.pipeline.settings import DEFAULT_PREFETCH, LoaderSpec
from wdskit.stages.collate import is_tensor

_JOBS_A_WORKER = 4  # at least, in an epoch with enough batches, so that all workers have work up to its end

MOST_FOLLOWING_BYTES = 256 << 20
"""Limit for the next epoch's batches that a loader makes at the end of an epoch, and keeps while other loaders run."""


def jobs_ahead(spec: LoaderSpec, program: Program) -> tuple[int, int]:
    """Return (number of batches in a job, number of jobs that are made before the consumer asks for them).

    Without workers, with one thread and local shards, the number of jobs is 0. Otherwise, if `spec.prefetch` is set,
    all these jobs together have at most `spec.prefetch` batches, or two per worker if this is more. If `spec.prefetch`
    is None, a job has several batches if the batches are small and the epoch has many, and the number of jobs is
    `DEFAULT_PREFETCH`, or two per worker if this is more.
    """
    size, workers = program.batches_a_job, spec.workers
    if not workers and program.run.num_threads == 1 and not program.reader.is_remote:
        return size, 0
    if not program.reader.is_remote:  # jobs with fewer samples would request some bytes of a store several times
        num_steps = len(program.epoch.steps(program.run.rank_info.world_size))
        size = max(1, min(size, num_steps // (_JOBS_A_WORKER * max(1, workers))))
    default = max(DEFAULT_PREFETCH, max(1, workers) * (program.run.num_threads + 1))  # a thread makes one batch
    most = max(spec.prefetch or default, 2 * workers)
    if spec.prefetch is None:
        return size, most
    size = min(size, max(1, most // (2 * max(1, workers) + 1)))  # the consumer has one more job
    return size, (most + 1 - size) // size


class Prefetch:
    """Keeps `num_ahead` jobs running before the consumer asks for their batches.

    Near the end of an epoch, the first jobs of the next epoch start. Together, their batches have at most about
    `MOST_FOLLOWING_BYTES`. These jobs are discarded if the consumer then asks for another epoch.

    Args:
        pool: Makes the batches.
        num_ahead: Number of jobs that run or are ready, besides the job that the consumer waits for.
    """

    def __init__(self, pool: Pool, num_ahead: int) -> None:
        self._pool = pool
        self._num_ahead = num_ahead
        self._waiting: deque[tuple[Any, Any]] = deque()  # jobs and their tickets
        self._made: deque[Batch] = deque()  # of the current job, not yielded yet
        self._job_bytes: int | None = None  # size of the first job of the last epoch that had a job

    def take(self, jobs: Iterator[Any], number: int) -> Iterator[Batch]:
        """Yield the batches of one epoch.

        Args:
            jobs: The jobs of the epoch, then the jobs of the next epoch. The latter are only started.
            number: Number of jobs of the epoch.

        Raises:
            BaseException: The error of a batch, after the batches before it. Or an error of the pool, such as
                PipelineError. In both cases all started jobs are discarded.
        """
        jobs = self._skip_started(jobs)
        for left in reversed(range(number)):
            self._fill(jobs, 1)
            _, ticket = self._waiting.popleft()
            # As many jobs of the next epoch as have `MOST_FOLLOWING_BYTES` together; 1 if the size is unknown.
            following = 1 if self._job_bytes is None else MOST_FOLLOWING_BYTES // max(1, self._job_bytes)
            try:
                self._fill(jobs, min(self._num_ahead, left + following))
                outcome = self._pool.take(ticket)
            except BaseException:
                self._forget(ticket)
                raise
            del ticket
            error = outcome.error
            self._made, outcome.value = deque(outcome.value or ()), None
            if left == number - 1:
                self._job_bytes = sum(num_bytes_of(each.value) for each in self._made)
            while self._made:
                yield self._made.popleft().with_tensors()  # no reference is kept here
            if error is not None:
                self._forget()
                del error
                outcome.result()

    def is_ready(self) -> bool:
        """Return True if `take` yields the next batch without a wait. Raises the errors of `Pool.is_ready`."""
        return bool(self._made) or (bool(self._waiting) and self._pool.is_ready(self._waiting[0][1]))

    def free_memory(self, *, is_left_early: bool) -> None:
        """Free the memory that no batch uses, after an epoch.

        Args:
            is_left_early: Whether the consumer left the epoch early. If True, this call also discards all batches made
                ahead.
        """
        if is_left_early:
            self._forget()
        self._pool.free_memory()

    def close(self) -> None:
        """Discard the batches made ahead, and end the threads and processes of the pool."""
        self._forget()
        self._pool.close()

    def _skip_started(self, jobs: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the jobs of `jobs` that are not started.

        If `jobs` begins with all started jobs, the result leaves them out. Otherwise cancel the started jobs, drop
        their batches, and return all of `jobs`.
        """
        first = list(itertools.islice(jobs, len(self._waiting)))
        if first == [job for job, _ in self._waiting]:
            return jobs
        self._forget()
        return itertools.chain(first, jobs)

    def _fill(self, jobs: Iterator[Any], number: int) -> None:
        """Start the next jobs of `jobs`, until `number` started jobs wait for the consumer or `jobs` ends."""
        for job in itertools.islice(jobs, max(0, number - len(self._waiting))):
            self._waiting.append((job, self._pool.submit(job)))

    def _forget(self, *others: Any) -> None:
        """Cancel all started jobs and the jobs of the tickets `others`, and drop their batches."""
        tickets = [*others, *(ticket for _, ticket in self._waiting)]
        self._waiting.clear()
        self._made.clear()
        self._pool.forget(tickets)


def num_bytes_of(value: Any) -> int:
    """Return the approximate size of a batch in memory. An object that occurs several times counts once."""
    total, seen, pending = 0, set[int](), [value]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.ndarray) or is_tensor(part):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a sparse tensor does not tell its size
                total += part.nbytes
        elif isinstance(part, Mapping):
            pending += part.values()
        elif isinstance(part, (list, tuple)):
            pending += part
        elif not isinstance(part, (type, ModuleType)):
            total += sys.getsizeof(part)
            pending += getattr(part, "__dict__", {}).values()
    return total
