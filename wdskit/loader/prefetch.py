"""Batches in the order of their jobs, made ahead of who takes them, by any pool."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from wdskit.engine.batch import Batch, Here, Maker
from wdskit.engine.outcome import Outcome
from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.stream import StreamItems, StreamPipeline
from wdskit.loader.process_pool import ProcessPool
from wdskit.loader.shared_memory import Ring
from wdskit.loader.thread_pool import ThreadPool


class Pool(Protocol):
    """Makes the batches of jobs: in this thread, in threads, or in worker processes."""

    def submit(self, job: Any, worker: int | None = None) -> Any:
        """Begin with a job; gives its ticket. `worker` is who has to do it; None leaves that to the pool."""
        ...

    def take(self, ticket: Any) -> Outcome[list[Batch]]:
        """What came of a job, once; waits for it."""
        ...

    def forget(self, tickets: Sequence[Any]) -> None:
        """Do without jobs that nobody has taken."""
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

    def forget(self, tickets: Sequence[Any]) -> None:
        """See `Pool`: none has been begun with."""

    def close(self) -> None:
        """See `Pool`."""
        if isinstance(self._make, StreamItems):
            self._make.close()


def make_pool(pipeline: PlannedPipeline | StreamPipeline, num_workers: int, start_method: Callable[[], str]) -> Pool:
    """The one for so many processes and the pipeline's threads.

    Args:
        pipeline: Whose batches are made.
        num_workers: Worker processes, 0 for none.
        start_method: How they start, asked when they do.
    """
    if num_workers:
        return ProcessPool(pipeline, num_workers, start_method)
    make = pipeline.start(0, 1)
    return ThreadPool(make, pipeline.num_threads) if pipeline.num_threads > 1 else InlinePool(make)


class Prefetch:
    """What is ahead when a pass ends is the beginning of the next one; if that is another, it is forgotten.

    Args:
        pool: Makes the batches.
        num_ahead: How many jobs are at work or ready beside the one that is waited for.
    """

    def __init__(self, pool: Pool, num_ahead: int) -> None:
        self._pool = pool
        self._num_ahead = num_ahead
        self._waiting: deque[tuple[Any, Any]] = deque()  # jobs and their tickets

    def take(self, jobs: Iterator[Any], number: int) -> Iterator[Batch]:
        """The batches of the first `number` jobs; those behind are begun with.

        Raises:
            BaseException: What went wrong with a batch, behind those before it.
        """
        jobs = self._go_on(jobs)
        for _ in range(number):
            self._fill(jobs, 1)
            _, ticket = self._waiting.popleft()
            try:
                self._fill(jobs, self._num_ahead)
                outcome = self._pool.take(ticket)
            except BaseException:
                self._forget(ticket)
                raise
            del ticket
            error = outcome.error
            batches, outcome.value = deque(outcome.value or ()), None
            while batches:
                yield batches.popleft()  # not held here while it is used, nor while the next one is made
            if error is not None:
                self._forget()
                del error
                outcome.result()

    def close(self) -> None:
        """Forget what is ahead, and end threads and processes."""
        self._forget()
        self._pool.close()

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
        self._pool.forget(tickets)
