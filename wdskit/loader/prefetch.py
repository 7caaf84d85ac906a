"""Batches in the order of their jobs, made ahead of their consumer by any pool."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from wdskit.engine.batch import Batch, Here, Maker
from wdskit.engine.outcome import Outcome
from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.stream import StreamPipeline
from wdskit.loader.process_pool import ProcessPool
from wdskit.loader.shared_memory import Ring
from wdskit.loader.thread_pool import ThreadPool, Watched
from wdskit.loader.watch import Watch

MOST_FOLLOWING_BYTES = 256 << 20
"""Batches of the next epoch that a loader keeps while another loader runs."""


class Pool(Protocol):
    """Makes the batches of jobs: in this thread, in threads, or in worker processes."""

    def submit(self, job: Any, worker: int | None = None) -> Any:
        """Begin with a job; gives its ticket. `worker` is who has to do it; None leaves that to the pool."""
        ...

    def take(self, ticket: Any) -> Outcome[list[Batch]]:
        """What came of a job, once; waits for it."""
        ...

    def is_ready(self, ticket: Any) -> bool:
        """Whether `take` would not wait."""
        ...

    def forget(self, tickets: Sequence[Any]) -> None:
        """Do without jobs that nobody has taken."""
        ...

    def rest(self) -> None:
        """Return the memory that no batch uses to the system. Called at the end of an epoch."""
        ...

    def close(self) -> None:
        """Let go of threads and processes; the next job brings new ones."""
        ...


class InlinePool:
    """Does a job in this thread when it is taken.

    Args:
        make: Does the jobs.
    """

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._memory = Ring()

    def submit(self, job: Any, worker: int | None = None) -> Any:  # noqa: ARG002 (there is one)
        """See `Pool`."""
        return self._make.begin(job)

    def take(self, ticket: Any) -> Outcome[list[Batch]]:
        """See `Pool`: with one thread of torch's, as in images of this size more only wait for each other."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._make(ticket, self._memory, Here())
        finally:
            torch.set_num_threads(before)

    def is_ready(self, ticket: Any) -> bool:  # noqa: ARG002 (it is made when it is taken)
        """See `Pool`."""
        return False

    def forget(self, tickets: Sequence[Any]) -> None:
        """See `Pool`: none has been begun with."""

    def rest(self) -> None:
        """See `Pool`."""
        self._memory.free_pages()

    def close(self) -> None:
        """See `Pool`."""
        self._make.close()


def make_pool(
    pipeline: PlannedPipeline | StreamPipeline,
    num_workers: int,
    start_method: Callable[[], str],
    timeout_s: float | None,
) -> Pool:
    """Return the pool for this number of processes and the pipeline's threads. With a timeout, one thread makes the
    batches if there are neither processes nor threads, because a wait in this thread could not end early.

    Args:
        pipeline: Whose batches are made.
        num_workers: Worker processes, 0 for none.
        start_method: How they start, asked when they do.
        timeout_s: The longest wait for a batch; None or 0 for no limit.
    """
    watch = Watch(pipeline.describe, timeout_s or 0.0)
    if num_workers:
        return ProcessPool(pipeline, num_workers, start_method, watch)
    make = pipeline.start(0, 1)
    if pipeline.num_threads == 1 and not watch.timeout_s:
        return InlinePool(make)
    pipeline.run.is_watched = True
    return ThreadPool(make, pipeline.num_threads, watched=Watched(watch, pipeline.run.board))


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
