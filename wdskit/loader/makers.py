"""Who makes the batches of a planned loader: this thread, threads, or worker processes; and how far ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from wdskit.engine.by_columns import begin
from wdskit.engine.jobs import Job, Made
from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.read_ahead import ReadAhead
from wdskit.loader.crew import Crew
from wdskit.loader.memory import Ring
from wdskit.loader.threads import Task, Threads, run_here


class Maker(Protocol):
    """Makes batches of jobs, in any order."""

    def submit(self, job: Job) -> Any:
        """Begin with a job; gives its ticket."""
        ...

    def wait(self, ticket: Any) -> Made:
        """The batch of a ticket, once; raises what went wrong with it."""
        ...

    def is_ready(self, ticket: Any) -> bool:
        """Whether nobody would have to wait for that batch, as far as is known."""
        ...

    def forget(self, tickets: Sequence[Any]) -> None:
        """Do without batches that nobody has got."""
        ...

    def close(self) -> None:
        """Let go of threads and processes; the next job brings new ones."""
        ...


class InThisThread:
    """Makes a batch when it is waited for; the small samples of the next ones may be read along."""

    def __init__(self, pipeline: PlannedPipeline) -> None:
        self._pipeline = pipeline
        self._ring = Ring()
        self._read_ahead = ReadAhead(pipeline)
        self._submitted: deque[Job] = deque()

    @property
    def num_ahead(self) -> int:
        """How many jobs are best submitted beside the one that is waited for."""
        return self._read_ahead.num_jobs - 1

    def submit(self, job: Job) -> Job:
        """See `Maker`."""
        self._submitted.append(job)
        return job

    def wait(self, ticket: Job) -> Made:
        """See `Maker`."""
        self._submitted.remove(ticket)
        read = self._read_ahead.take(ticket, tuple(self._submitted))
        return run_here(begin(self._pipeline, ticket, self._ring, read))

    def is_ready(self, ticket: Job) -> bool:  # noqa: ARG002 (none ever is)
        """See `Maker`."""
        return False

    def forget(self, tickets: Sequence[Job]) -> None:
        """See `Maker`."""
        for ticket in tickets:
            if ticket in self._submitted:
                self._submitted.remove(ticket)

    def close(self) -> None:
        """See `Maker`."""
        self._submitted.clear()


class InThreads:
    """Threads of this process."""

    def __init__(self, pipeline: PlannedPipeline) -> None:
        self._pipeline = pipeline
        self._ring = Ring()
        self._threads: Threads | None = None

    def submit(self, job: Job) -> Task:
        """See `Maker`."""
        if self._threads is None:
            self._threads = Threads(self._pipeline.run.num_threads)
        task = Task(begin(self._pipeline, job, self._ring))
        self._threads.submit(task)
        return task

    def wait(self, ticket: Task) -> Made:
        """See `Maker`."""
        ticket.is_done.wait()
        return ticket.result()

    def is_ready(self, ticket: Task) -> bool:
        """See `Maker`."""
        return ticket.is_done.is_set()

    def forget(self, tickets: Sequence[Task]) -> None:
        """See `Maker`."""
        if self._threads is not None:
            self._threads.forget(tickets)

    def close(self) -> None:
        """See `Maker`."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def make_maker(pipeline: PlannedPipeline, num_workers: int, start_method: Any) -> Maker:
    """The one for so many processes and the pipeline's threads."""
    if num_workers:
        return Crew(pipeline, num_workers, start_method)
    return InThreads(pipeline) if pipeline.run.num_threads > 1 else InThisThread(pipeline)


class Ahead:
    """Batches in the order of their jobs, made ahead of who takes them.

    What is ahead when a pass ends is the beginning of the next one; if that turns out to be another, it is forgotten.

    Args:
        maker: Who makes them.
        num_ahead: How many jobs are at work or ready beside the one that is waited for.

    Attributes:
        num_ready: How many batches were there when the last one was asked for.
    """

    def __init__(self, maker: Maker, num_ahead: int) -> None:
        self._maker = maker
        self._num_ahead = num_ahead
        self.num_ready = 0
        self._waiting: deque[tuple[Job, Any]] = deque()

    def take(self, jobs: Iterator[Job], number: int) -> Iterator[Made]:
        """The batches of the first `number` jobs; those behind are begun with."""
        jobs = self._go_on(jobs)
        for _ in range(number):
            self._fill(jobs, 1)
            _, ticket = self._waiting.popleft()
            try:
                self._fill(jobs, self._num_ahead)
                self.num_ready = sum(map(self._maker.is_ready, (ticket, *(each for _, each in self._waiting))))
                made = self._maker.wait(ticket)
            except BaseException:
                self._forget(ticket)
                raise
            del ticket
            yield made
            del made  # while the next one is made, this one may be let go

    def close(self) -> None:
        """Forget what is ahead, and end threads and processes."""
        self._forget()
        self._maker.close()

    def _go_on(self, jobs: Iterator[Job]) -> Iterator[Job]:
        first = list(itertools.islice(jobs, len(self._waiting)))
        if first == [job for job, _ in self._waiting]:
            return jobs
        self._forget()
        return itertools.chain(first, jobs)

    def _fill(self, jobs: Iterator[Job], number: int) -> None:
        for job in itertools.islice(jobs, max(0, number - len(self._waiting))):
            self._waiting.append((job, self._maker.submit(job)))

    def _forget(self, *others: Any) -> None:
        tickets = [*others, *(ticket for _, ticket in self._waiting)]
        self._waiting.clear()
        self._maker.forget(tickets)
