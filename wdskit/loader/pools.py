"""Pools make the batches of jobs: in this thread, in threads or in worker processes; `loader.ray` has a third one.

A loader gives a job to a pool (`submit`) and takes its batches later (`take`). In each process, the threads of
`loader.worker.JobThreads` make the batches with the process's `BatchMaker`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import connection as connections
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch.multiprocessing  # registers how tensors of a program are pickled for other processes
from numpy.typing import NDArray

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.loader.memory import borrow, receive_memory, unpack
from wdskit.loader.start_method import check_guard, explain_exit, prepare_start
from wdskit.loader.worker import STDERR, JobThreads, serve
from wdskit.pipeline.settings import LoaderSpec
from wdskit.processes import GUARD, block_sigint, refuse_fork, without_script
from wdskit.stages import run

logger = logging.getLogger(__name__)

_LOOK_S = 0.1  # longest wait between two looks at what makes a batch
_PATIENCE_S = 0.5  # a worker that still makes a batch after this time is killed


class Pool(ABC):
    """Makes the batches of jobs. One thread at a time calls a pool, but any thread may call `close`.

    Only the process whose first job started the threads and processes of a pool may use them. An exception of a method,
    also a KeyboardInterrupt, leaves the pool in an unknown state: only `close` may follow.

    Args:
        program: The program of the pipeline.
        spec: The settings: number and start method of the processes, and the longest wait for a batch.
    """

    def __init__(self, program: Program, spec: LoaderSpec) -> None:
        self._program, self._spec = program, spec
        self._timeout_s = spec.timeout or 0.0
        self._events: SimpleQueue[Any] = SimpleQueue()  # arguments of `_handle`, from other threads
        self._answers: dict[int, Callable[[], Outcome[list[Batch]]] | None] = {}  # by ticket; None: not come yet
        self._last_ticket = 0
        self._owner = 0  # the process that started the pool
        self._ending: Any = None  # ends the threads and processes; multiprocessing ignores it in a forked process

    def submit(self, job: Any) -> int:
        """Start a job, an argument of `BatchMaker.open`, and return its ticket, for `take`. The first job starts the
        threads and processes.

        Raises:
            PipelineError: The threads and processes cannot start or work on, or belong to another process.
            OSError: A process cannot be started, or an answer cannot be received, because too many files are open.
        """
        if self._ending is None:
            with block_sigint():  # so that `close` knows every thread and process
                self._start()
                self._owner = os.getpid()
        self._receive(0.0)
        self._last_ticket += 1
        self._answers[self._last_ticket] = None
        self._send(self._last_ticket, job)
        return self._last_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome: the batches, or an error and the batches before it.

        A ticket is valid for one call. The errors are those of `submit`, or a PipelineError: the wait has lasted for
        the timeout. If the pool is closed during the wait, the error is any Exception.
        """
        self._started_s = self._reported_s = time.monotonic()
        while (answer := self._answers[ticket]) is None:
            if not self._receive(_LOOK_S):
                self._look(ticket)
        del self._answers[ticket]
        return answer()

    def is_ready(self, ticket: int) -> bool:
        """Return True if `take(ticket)` would not wait. The errors are those of `submit`."""
        self._receive(0.0)
        return self._answers[ticket] is not None

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets, which become invalid for `take`, and free the memory that no batch uses, so
        that other processes can use it. Called at the end of an epoch. Do nothing in a forked process.
        """
        if self._owner == os.getpid():
            for ticket in tickets:
                self._answers.pop(ticket, None)
            self._forget(tickets)

    def close(self) -> None:
        """End the threads and processes, within a second. All tickets become invalid.

        The next job starts new threads and processes.
        """
        ending, self._ending = self._ending, None
        if ending is not None:
            ending()
        self._answers, self._events = {}, SimpleQueue()

    def _receive(self, timeout_s: float) -> bool:
        """Handle all answers that have come. Wait up to `timeout_s` for the first one. Return False if none came."""
        refuse_fork(self._owner)
        num_events = 0
        with contextlib.suppress(Empty):
            while True:
                event = self._events.get(timeout=0.0 if num_events else timeout_s)
                num_events += 1
                self._handle(*event)
        return num_events > 0

    def _handle(self, *event: Any) -> None:
        """Handle an event; here, an event is (ticket, answer)."""
        self._keep(*event)

    def _keep(self, ticket: int, answer: Callable[[], Outcome[list[Batch]]]) -> None:
        """Keep the answer to a job, unless the job was cancelled. An answer returns the outcome of its job."""
        if ticket in self._answers:
            self._answers[ticket] = answer

    def _report(
        self, who: str, pid: int | None = None, slots: NDArray[np.int64] | None = None, *, start_hint: str = ""
    ) -> None:
        """At most once a minute, log the samples that a process works on, and let it print its stack. Raise if the wait
        for its batch is too long.

        Args:
            who: Name of the process that makes the batch, for messages.
            pid: Id of the process; None if the process runs on another machine.
            slots: The slots of the process's `Board`; None if the process runs on another machine.
            start_hint: Likely reason why the process has not started, for messages; empty if the process has started.

        Raises:
            PipelineError: The wait has lasted for the timeout.
        """
        now_s = time.monotonic()
        waited_s = now_s - self._started_s
        is_over = 0 < self._timeout_s <= waited_s
        if not is_over and now_s < self._reported_s + run.REPORT_S:
            return
        self._reported_s = now_s
        what = f"no batch has come from {who} for {waited_s:.0f} s."
        if start_hint:
            what += f" It has not started. {start_hint}"
        elif slots is not None:
            busy = np.unique(slots[slots[:, 1] != run.IDLE], axis=0).tolist()
            what += f" It is at {', '.join(self._program.describe(*each) for each in busy) or 'no sample'}."
            if pid == os.getpid():
                faulthandler.dump_traceback(STDERR)
            elif pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
        logger.warning("%s", what)
        if is_over:
            msg = f"no batch came within {self._timeout_s:g} s (timeout): {what}"
            raise PipelineError(f"{msg}\n  Correct what hangs, or raise `timeout`; 0 is no limit.")

    @abstractmethod
    def _start(self) -> None:
        """Set `_ending`, and start the threads and processes."""

    @abstractmethod
    def _send(self, ticket: int, job: Any) -> None:
        """Give a job to a thread or process."""

    @abstractmethod
    def _look(self, ticket: int) -> None:
        """Call `_report` for the thread or process that makes a job. Called every `_LOOK_S` while `take` waits."""

    @abstractmethod
    def _forget(self, tickets: Sequence[int]) -> None:
        """Cancel jobs, whose answers were dropped, and free the memory that no batch uses."""


class LocalPool(Pool):
    """A `Pool` of threads of this process. With one thread, the consumer's thread makes the batches of a job when it
    takes the job.
    """

    def _start(self) -> None:
        events, num_threads = self._events, self._program.run.num_threads
        jobs = self._jobs = JobThreads(self._program, lambda ticket, outcome, _: events.put((ticket, lambda: outcome)))
        self._ending = Finalize(self, _end_threads, (jobs,), exitpriority=0)
        self._is_inline = num_threads == 1
        if not self._is_inline:
            ready = threading.Barrier(num_threads + 1)
            with _one_thread():  # each thread works on another batch, not all on one image
                # A thread keeps the number that it reads when it first asks for it.
                jobs.start(num_threads, lambda: (torch.get_num_threads(), ready.wait()))
                ready.wait()

    def _send(self, ticket: int, job: Any) -> None:
        self._jobs.submit(ticket, job)

    def _receive(self, timeout_s: float) -> bool:
        if self._is_inline and timeout_s:
            with _one_thread():  # several threads for small images only wait for each other
                self._jobs.make_next()
        return super()._receive(0.0 if self._is_inline else timeout_s)

    def _look(self, ticket: int) -> None:  # noqa: ARG002 (the board has all threads)
        self._report("this process", os.getpid(), self._program.run.board.slots)

    def _forget(self, tickets: Sequence[int]) -> None:
        self._jobs.forget(tickets)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Return a context in which torch's functions use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end_threads(jobs: JobThreads) -> None:
    with block_sigint():
        if not jobs.end():  # perhaps in a user's function, whose lock the next epoch needs
            run.renew_turn()


class _Worker:
    """What the main process knows about one worker process."""

    def __init__(self, context: Any, program: Program, number: int, num_workers: int) -> None:
        self.board = context.RawArray("b", run.BOARD_BYTES)
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, self.board, program, number, num_workers, dict(os.environ))
        self.process = context.Process(target=serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        worker_end.close()
        self.name = f"worker {number} (pid {self.process.pid})"
        self.tickets: set[int] = set()  # of jobs that were sent, without an answer
        self.blocks: dict[int, Any] = {}
        self.returned: deque[int] = deque()  # numbers of free blocks, filled by finalizers at any time

    def send(self, ticket: int = 0, job: Any = None, *, forgotten: Sequence[int] = ()) -> None:
        """Send a request to the worker, with a new job or without one, and with the numbers of free blocks. Do nothing
        if the worker has died, which the next `ProcessPool.take` reports.
        """
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        with contextlib.suppress(ConnectionError):
            # This does not wait for long: a thread of the worker always reads its pipe.
            self.connection.send((tuple(forgotten), returned, ticket, job))

    def receive(self) -> tuple[int, Callable[[], Any]]:
        """Receive the next answer, and map the new block that follows it in the pipe. Return (ticket, answer). The
        worker may use the block again after the answer and all views of the block are garbage-collected.

        Raises:
            EOFError, OSError: The worker has ended, or a block cannot be mapped.
        """
        ticket, message, dropped = self.connection.recv()
        self.tickets.discard(ticket)
        for number in dropped:
            self.blocks.pop(number, None)
        if message.block < 0:
            return ticket, partial(unpack, message, None)
        if message.block not in self.blocks:
            self.blocks[message.block] = receive_memory(self.connection)
        block = borrow(self.blocks[message.block], self.returned, message.block)
        return ticket, partial(unpack, message, block)


class ProcessPool(Pool):
    """A `Pool` of worker processes.

    Raises:
        PipelineError: The processes cannot start in this way: see `prepare_start`.
    """

    def __init__(self, program: Program, spec: LoaderSpec) -> None:
        super().__init__(program, spec)
        self._workers: list[_Worker] = []
        settings = {"reads_store": program.reader.is_remote, "needs_torch": program.needs_torch}
        self._prepare_start = partial(prepare_start, program.parts, spec.start_method, **settings)
        self._prepare_start()

    def _start(self) -> None:
        method = self._prepare_start()
        check_guard(method)
        self._program.run.needs_torch = method.needs_torch
        context = torch.multiprocessing.get_context(method.name)
        self._workers = []
        # When Python exits, this comes before multiprocessing's SIGTERM, which workers ignore.
        self._ending = Finalize(self, _close_workers, (self._workers,), exitpriority=0)
        with contextlib.nullcontext() if method.runs_script or method.name == "fork" else without_script():
            num = self._spec.workers
            self._workers.extend(_Worker(context, self._program, number, num) for number in range(num))

    def _send(self, ticket: int, job: Any) -> None:
        """Send a job to the worker with the fewest jobs."""
        chosen = min(self._workers, key=lambda each: len(each.tickets))
        chosen.tickets.add(ticket)
        chosen.send(ticket, job)

    def _receive(self, timeout_s: float) -> bool:
        refuse_fork(self._owner)
        by_connection = {each.connection: each for each in self._workers}
        ready = connections.wait(by_connection, timeout_s)
        for connection in ready:
            worker = by_connection[connection]
            try:
                while worker.connection.poll():  # an answer that a worker sent before it died is valid
                    self._keep(*worker.receive())
            except (EOFError, ConnectionError):
                self._raise_death(worker)
        for worker in self._workers:  # a child that a worker forked keeps the pipe open
            if not ready and worker.process.exitcode is not None:
                self._raise_death(worker)
        return bool(ready)

    def _raise_death(self, worker: _Worker) -> None:
        worker.process.join(_PATIENCE_S)
        raise PipelineError(f"a worker process died: {worker.name} {explain_exit(worker.process.exitcode)}")

    def _look(self, ticket: int) -> None:
        worker = next(each for each in self._workers if ticket in each.tickets)
        slots, hint = run.slots_in(worker.board), ""
        if not slots.any():  # a worker that starts writes `IDLE` into its slots
            hint = f"It may still run the script's own code, such as init_process_group: put that under {GUARD}."
        self._report(worker.name, worker.process.pid, slots, start_hint=hint)

    def _forget(self, tickets: Sequence[int]) -> None:
        for worker in self._workers:
            forgotten = worker.tickets.intersection(tickets)
            worker.tickets -= forgotten
            worker.send(forgotten=[*forgotten])


def _close_workers(workers: list[_Worker]) -> None:
    with block_sigint():
        for worker in workers:
            with contextlib.suppress(OSError):  # the worker has ended
                worker.connection.send(None)
            worker.connection.close()
        deadline_s = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            worker.process.kill()
            worker.process.join()
    workers.clear()
