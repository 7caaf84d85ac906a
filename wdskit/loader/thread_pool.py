"""The threads of one process that make batches: each takes a few samples at a time, of the oldest batch first."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.loader.shared_memory import Ring
from wdskit.processes import block_sigint, refuse_fork

_JOBS_AT_WORK = 2  # while the last samples of one are made, those of the next are begun
_JOIN_S = 5.0  # a thread is in the midst of a sample, unless a function of the user's hangs


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


class ThreadPool:
    """Threads of this process.

    Args:
        make: Does the jobs.
        num_threads: How many work on samples.
        memory: Where batches are written.
    """

    def __init__(self, make: Maker, num_threads: int, memory: Ring | None = None) -> None:
        self._make = make
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
            PipelineError: This process was forked from the one that has the threads.
        """
        refuse_fork(self._owner)
        ticket.is_done.wait()
        return ticket.taken()

    def forget(self, tickets: Sequence[ThreadTask]) -> None:
        """See `Pool`: the threads leave them within the present sample."""
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        """See `Pool`."""
        self._closing()
        self._threads, self._closing = None, _nothing


def _nothing() -> None: ...


def _close(jobs: Threads, chunks: Threads, tasks: weakref.WeakSet[ThreadTask], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no threads
        return
    with block_sigint():
        for task in [*tasks]:
            task.cancel()
        jobs.close()  # which needs the others
        chunks.close()


def _run(
    make: Maker,
    task: ThreadTask,
    memory: Ring,
    done: Callable[[ThreadTask], None] | None,
) -> None:
    task.make(make, memory)
    if done is not None:
        done(task)
    task.is_done.set()


class Threads:
    """Threads that call functions, which raise nothing, in the order in which these come.

    Args:
        number: How many.
        name: For debuggers.
    """

    def __init__(self, number: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        before = torch.get_num_threads()
        ready = threading.Barrier(number + 1)
        self._threads = [
            threading.Thread(target=_work, args=(self._calls, ready), name=f"wdskit-{name}-{at}", daemon=True)
            for at in range(number)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # there can be no more of them
            ready.abort()
            raise
        ready.wait()
        torch.set_num_threads(before)  # those that were just started keep theirs

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Call it behind the others."""
        self._calls.put((function, *args))

    def close(self) -> None:
        """End the threads behind all calls."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)


def _work(calls: SimpleQueue[tuple[Any, ...] | None], ready: threading.Barrier) -> None:
    torch.set_num_threads(1)  # of this thread: several images at a time instead of several threads an image
    torch.get_num_threads()  # torch looks at the number again where a thread first asks, which may be later
    with contextlib.suppress(threading.BrokenBarrierError):  # another could not start
        ready.wait()
        _call_all(calls)


def _call_all(calls: SimpleQueue[tuple[Any, ...] | None]) -> None:
    while (call := calls.get()) is not None:
        function, *args = call
        del call
        function(*args)
        del function, args  # while this thread waits, it holds no batch
