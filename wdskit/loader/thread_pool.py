"""The threads of one process that make batches: each takes a few samples at a time, of the oldest batch first."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.engine.threads import JOIN_S, Threads
from wdskit.errors import PipelineError
from wdskit.loader.shared_memory import Ring
from wdskit.loader.watch import Watch
from wdskit.processes import block_sigint, refuse_fork
from wdskit.stages.progress import Board

_JOBS_AT_WORK = 2  # while the last samples of one are made, those of the next are begun


class ThreadTask:
    """A job at work, in the place of `engine.batch.Task`.

    Args:
        chunks: Threads for its samples.
        job: What is made, begun.

    Attributes:
        outcome: What came of it, once `is_done` is set.
    """

    def __init__(self, chunks: Threads, job: Any) -> None:
        self._chunks = chunks
        self.job = job
        self.is_cancelled = False
        self.is_done = threading.Event()
        self.outcome: Outcome[list[Batch]] = Outcome()

    def taken(self) -> Outcome[list[Batch]]:
        """What came of it, once."""
        outcome, self.outcome = self.outcome, Outcome()
        return outcome

    def make(self, make: Maker, memory: Ring) -> None:
        """Work on it."""
        if not self.is_cancelled:
            self.outcome = make(self.job, memory, self)
        if self.is_cancelled:  # which may have been said while it was made
            self.taken()

    def cancel(self) -> None:
        """Nobody wants it any more: an error goes too, as its traceback leads back to this."""
        self.is_cancelled = True
        self.taken()

    def map(self, function: Callable[[int], None], num: int) -> None:
        """See `engine.batch.Task`."""
        if num == 1:
            function(0)
            return
        done = threading.Semaphore(0)

        def run(number: int) -> None:
            try:
                if not self.is_cancelled:
                    function(number)
            finally:
                done.release()

        for number in range(num):
            self._chunks.submit(run, number)
        for _ in range(num):
            done.acquire()


class Watched(NamedTuple):
    """The watch of the threads of this process, and the board on which they note their samples."""

    watch: Watch
    board: Board


class ThreadPool:
    """Threads of this process.

    Args:
        make: Does the jobs.
        num_threads: How many work on samples.
        memory: Where batches are written.
        watched: Watches the waits of `take`, which only the pool of a main process has.
    """

    def __init__(
        self, make: Maker, num_threads: int, memory: Ring | None = None, watched: Watched | None = None
    ) -> None:
        self._make = make
        self._watched = watched
        self._memory = memory or Ring()
        self._num_threads = num_threads
        self._threads: tuple[Threads, Threads] | None = None  # of jobs, and of samples
        self._owner = os.getpid()
        self._tasks: weakref.WeakSet[ThreadTask] = weakref.WeakSet()
        self._closing: Callable[[], object] = _nothing

    def submit(
        self,
        job: Any,
        worker: int | None = None,  # noqa: ARG002 (there is one)
        *,
        done: Callable[[ThreadTask], None] | None = None,
    ) -> ThreadTask:
        """See `Pool`; `done` is called by the thread that has made it."""
        if self._threads is None:
            self._owner = os.getpid()
            with block_sigint():  # what has begun is known to who ends it
                self._threads = Threads(_JOBS_AT_WORK, "batches"), Threads(self._num_threads, "samples")
                self._closing = weakref.finalize(self, _close, *self._threads, self._tasks, self._owner)
        refuse_fork(self._owner)
        jobs, chunks = self._threads
        task = ThreadTask(chunks, self._make.begin(job))
        self._tasks.add(task)
        jobs.submit(_run, self._make, task, self._memory, done)
        return task

    def take(self, ticket: ThreadTask) -> Outcome[list[Batch]]:
        """See `Pool`.

        Raises:
            PipelineError: The wait has lasted for the `timeout`, or this process was forked from the one that has the
                threads.
        """
        refuse_fork(self._owner)
        if not ticket.is_done.is_set():
            assert self._watched is not None
            watch, board = self._watched
            watch.begin()
            while not ticket.is_done.wait(watch.step_s):
                try:
                    watch.look("this process", os.getpid(), board.slots)
                except PipelineError:
                    self.close()
                    raise
        return ticket.taken()

    def is_ready(self, ticket: ThreadTask) -> bool:
        """See `Pool`."""
        return ticket.is_done.is_set()

    def forget(self, tickets: Sequence[ThreadTask]) -> None:
        """See `Pool`: the threads leave them within the present sample."""
        for ticket in tickets:
            ticket.cancel()

    def rest(self) -> None:
        """See `Pool`."""
        self._memory.free_pages()

    def close(self) -> None:
        """See `Pool`."""
        self._closing()
        self._threads, self._closing = None, _nothing
        self._make.close()


def _nothing() -> None: ...


def _close(jobs: Threads, chunks: Threads, tasks: weakref.WeakSet[ThreadTask], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no threads
        return
    with block_sigint():
        for task in [*tasks]:
            task.cancel()
        deadline = time.monotonic() + JOIN_S
        jobs.close(deadline)  # which needs the others
        chunks.close(deadline)


def _run(
    make: Maker,
    task: ThreadTask,
    memory: Ring,
    done: Callable[[ThreadTask], None] | None,
) -> None:
    task.make(make, memory)
    if task.is_cancelled:
        memory.free_pages()
    if done is not None:
        done(task)
    task.is_done.set()
