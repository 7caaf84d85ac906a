"""How many batches are made ahead of the consumer, and in which order they come."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from wdskit.engine.batch import Batch
from wdskit.engine.program import Program
from wdskit.loader.pools import Pool
from wdskit.pipeline.settings import DEFAULT_PREFETCH, LoaderSpec

MOST_FOLLOWING_BYTES = 256 << 20
"""Batches of the next epoch that a loader keeps while another loader runs."""


def jobs_ahead(spec: LoaderSpec, program: Program) -> tuple[int, int]:
    """Return the batches that a worker makes together, and how many such jobs are ahead of the consumer.

    `prefetch` is the most batches that are ahead, at least two per worker; of shards in a store, those that are being
    fetched too. Without `prefetch`, workers make small batches together because that takes half the time.
    """
    size, workers = program.batches_a_job, spec.workers
    if not workers and program.run.num_threads == 1 and not program.reader.is_remote:
        return size, 0
    most = max(spec.prefetch or DEFAULT_PREFETCH, 2 * workers)
    if spec.prefetch is None:
        return size, most
    size = min(size, max(1, most // (2 * max(1, workers) + 1)))  # one job is in the consumer's hands
    return size, (most + 1 - size) // size


class Prefetch:
    """Keeps `num_ahead` jobs running ahead of the consumer.

    Near the end of an epoch it begins the first jobs of the next one, as many as hold `MOST_FOLLOWING_BYTES`. It
    discards them if another epoch is asked for.

    Args:
        pool: Makes the batches.
        num_ahead: How many jobs are at work or ready besides the one that the consumer waits for.
    """

    def __init__(self, pool: Pool, num_ahead: int) -> None:
        self._pool = pool
        self._num_ahead = num_ahead
        self._waiting: deque[tuple[Any, Any]] = deque()  # jobs and their tickets
        self._made: deque[Batch] = deque()  # of the job that was taken last
        self._job_bytes: int | None = None  # of the first job of the last epoch

    def take(self, jobs: Iterator[Any], number: int) -> Iterator[Batch]:
        """The batches of the first `number` jobs. The later jobs, of the next epoch, are begun but not taken.

        Raises:
            BaseException: What went wrong with a batch, behind those before it.
        """
        jobs = self._go_on(jobs)
        for left in reversed(range(number)):
            self._fill(jobs, 1)
            _, ticket = self._waiting.popleft()
            try:
                self._fill(jobs, min(self._num_ahead, left + self._num_following()))
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
                yield self._made.popleft()  # not held here while it is used, nor while the next one is made
            if error is not None:
                self._forget()
                del error
                outcome.result()

    def is_ready(self) -> bool:
        """Whether the next batch of `take` comes without a wait."""
        return bool(self._made) or (bool(self._waiting) and self._pool.is_ready(self._waiting[0][1]))

    def rest(self, *, is_left: bool) -> None:
        """Free memory after an epoch.

        Args:
            is_left: Whether the consumer left the epoch before its end, so that no batch ahead will be used.
        """
        if is_left:
            self._forget()
        self._pool.rest()

    def close(self) -> None:
        """Forget what is ahead, and end threads and processes."""
        self._forget()
        self._pool.close()

    def _num_following(self) -> int:
        """Jobs of the next epoch that may be begun in this one."""
        return 1 if self._job_bytes is None else MOST_FOLLOWING_BYTES // max(1, self._job_bytes)

    def _go_on(self, jobs: Iterator[Any]) -> Iterator[Any]:
        first = list(itertools.islice(jobs, len(self._waiting)))
        if first == [job for job, _ in self._waiting]:
            return jobs
        self._forget()
        return itertools.chain(first, jobs)

    def _fill(self, jobs: Iterator[Any], number: int) -> None:
        for job in itertools.islice(jobs, max(0, number - len(self._waiting))):
            self._waiting.append((job, self._pool.submit(job)))

    def _forget(self, *others: Any) -> None:
        tickets = [*others, *(ticket for _, ticket in self._waiting)]
        self._waiting.clear()
        self._made.clear()
        self._pool.forget(tickets)


def num_bytes_of(value: Any) -> int:
    """About how much memory a batch takes; each object is counted once, so that it may refer to itself."""
    total, seen, pending = 0, set[int](), [value]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (torch.Tensor, np.ndarray)):
            total += part.nbytes
        elif isinstance(part, Mapping):
            pending += part.values()
        elif isinstance(part, (list, tuple)):
            pending += part
        elif not isinstance(part, (type, ModuleType)):
            total += sys.getsizeof(part)
            pending += getattr(part, "__dict__", {}).values()
    return total
