"""Pools make the batches of jobs: in this thread, in threads or in worker processes.

A loader gives a job to a pool (`submit`) and takes its batches later (`take`). In each process, the threads of
`loader.worker.JobThreads` make the batches with the process's `BatchMaker`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch.multiprocessing  # registers how tensors of a program are pickled for other processes

from wdskit.engine.batch import Batch, BatchMaker
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.loader.memory import Arena, Arenas, Bytes, Message, borrow, receive_memory, unpack
from wdskit.loader.start_method import StartMethod, check_guard, explain_exit, start_fork_server, start_method_of
from wdskit.loader.watch import Watch
from wdskit.loader.worker import JobThreads, Reply, Request, serve
from wdskit.pipeline.settings import LoaderSpec
from wdskit.processes import GUARD, Outcome, block_sigint, without_script
from wdskit.stages.run import BOARD_BYTES, renew_turn, slots_in

_CLOSED = "the loader was closed during this wait."  # by a signal handler or another thread
_PATIENCE_S = 0.5  # a worker that still makes a batch after this time is killed


class Pool(Protocol):
    """Makes the batches of jobs. Only one thread calls a pool, in the process that made it.

    An exception of a method, also a KeyboardInterrupt, leaves the pool in an unknown state: only `close` may follow.
    """

    def submit(self, job: Any) -> Any:
        """Start a job, an argument of `BatchMaker.open`, and return its ticket, for `take`. The first job starts the
        threads and processes.
        """
        ...

    def take(self, ticket: Any) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome: the batches, or an error and the batches before it.

        A ticket is valid for one call. PipelineError: The worker cannot answer, or the wait lasted for the `timeout`.
        """
        ...

    def is_ready(self, ticket: Any) -> bool:
        """Return True if `take(ticket)` would not wait. PipelineError: The worker cannot answer."""
        ...

    def forget(self, tickets: Sequence[Any]) -> None:
        """Cancel the jobs of these tickets, which become invalid for `take`, and free the memory that no batch uses, so
        that other processes can use it. Called at the end of an epoch.
        """
        ...

    def close(self) -> None:
        """End the threads and processes, within a second. All tickets become invalid.

        The next job starts new threads and processes.
        """
        ...


class _Ticket:
    """A job of a `LocalPool`: its outcome, and whether the outcome has come."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.outcome: Outcome[list[Batch]] = Outcome()


def _finish(ticket: _Ticket, outcome: Outcome[list[Batch]], _: Arena) -> None:
    ticket.outcome = outcome
    ticket.done.set()


class LocalPool:
    """A `Pool` of threads of this process. With one thread, the consumer's thread makes the batches of a job when it
    takes the job.

    Args:
        program: The program of the pipeline.
        watch: Reports long waits for batches.
    """

    def __init__(self, program: Program, watch: Watch) -> None:
        self._maker = BatchMaker(program)
        self._run = program.run
        self._watch = watch
        self._arenas = Arenas()
        self._jobs: JobThreads | None = None
        self._closing: Callable[[], object] | None = None

    def submit(self, job: Any) -> _Ticket:
        """Queue a job for the next free thread."""
        jobs = self._jobs or self._start()
        ticket = _Ticket()
        jobs.submit(ticket, job)
        return ticket

    def _start(self) -> JobThreads:
        jobs = self._jobs = JobThreads(self._maker, self._arenas, _finish)
        num_threads = self._run.num_threads
        with block_sigint():  # so that `close` knows every thread
            self._closing = weakref.finalize(self, _end_threads, jobs, os.getpid())
            if num_threads > 1:
                before, ready = torch.get_num_threads(), threading.Barrier(num_threads + 1)
                torch.set_num_threads(1)  # each thread works on another batch, not all on one image
                # A thread keeps the number that it reads when it first asks for it.
                jobs.start(num_threads, lambda: (torch.get_num_threads(), ready.wait()))
                ready.wait()
                torch.set_num_threads(before)
        return jobs

    def take(self, ticket: _Ticket) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. PipelineError: The wait has lasted for the `timeout`."""
        if self._run.num_threads > 1:
            self._watch.begin()
            while not ticket.done.wait(self._watch.step_s):
                if self._jobs is None:
                    raise PipelineError(_CLOSED)
                self._watch.look("this process", os.getpid(), self._run.board.slots)
        elif self._jobs is not None:
            jobs = self._jobs
            before = torch.get_num_threads()
            torch.set_num_threads(1)  # several threads for small images only wait for each other
            try:
                while not ticket.done.is_set():
                    if not jobs.make_next():
                        raise PipelineError(_CLOSED)
            finally:
                torch.set_num_threads(before)
        outcome, ticket.outcome = ticket.outcome, Outcome()
        return outcome

    def is_ready(self, ticket: _Ticket) -> bool:
        """Return True if `take(ticket)` would not wait."""
        return ticket.done.is_set()

    def forget(self, tickets: Sequence[_Ticket]) -> None:
        """Cancel jobs, and free the memory that no batch uses."""
        if self._jobs is not None:
            self._jobs.cancel(tickets)
        for ticket in tickets:
            ticket.outcome = Outcome()  # the traceback of an error refers to the ticket
        self._arenas.free_pages()

    def close(self) -> None:
        """End the threads, within a second. A thread that hangs goes on, but does not keep this process alive."""
        if self._closing is not None:
            self._closing()
        self._jobs = self._closing = None


def _end_threads(jobs: JobThreads, owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the pool, but no threads
        return
    with block_sigint():
        if not jobs.end():  # perhaps in a user's function, whose lock the next epoch needs
            renew_turn()


class _Worker:
    """What the main process knows about one worker process."""

    def __init__(self, context: Any, program: Program, number: int, num_workers: int) -> None:
        self.board = context.RawArray("b", BOARD_BYTES)
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, self.board, program, number, num_workers, dict(os.environ))
        self.process = context.Process(target=serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        worker_end.close()
        self.name = f"worker {number} (pid {self.process.pid})"
        self.tickets: set[int] = set()  # of jobs that were sent, without a reply
        self.replies: dict[int, Message] = {}  # that were not taken yet, by ticket
        self.blocks: dict[int, Any] = {}
        self.returned: deque[int] = deque()  # numbers of free blocks, filled by finalizers at any time

    def send(self, ticket: int = 0, job: Any = None, *, forgotten: Sequence[int] = ()) -> None:
        """Send a request to the worker, with a new job or without one, and with the numbers of free blocks. Do nothing
        if the worker has died, which the next `ProcessPool.take` reports.
        """
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        if job is not None:
            self.tickets.add(ticket)
        with contextlib.suppress(ConnectionError):
            # This does not wait for long: a thread of the worker always reads its pipe.
            self.connection.send(Request(tuple(forgotten), returned, ticket, job))

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets, and let the worker free the memory that no batch uses. Ignore tickets of
        jobs that this worker does not have.
        """
        for ticket in self.replies.keys() & tickets:
            self._drop(self.replies.pop(ticket))
        forgotten = self.tickets.intersection(tickets)
        self.tickets -= forgotten
        self.send(forgotten=[*forgotten])

    def receive(self) -> None:
        """Receive the next reply, and map the new block that follows it in the pipe. If the job of the reply was
        cancelled, return the block to the worker, with the next request.

        Raises:
            EOFError, OSError: The worker has ended, or a block cannot be mapped.
        """
        reply: Reply = self.connection.recv()
        message = reply.message
        for number in reply.dropped:
            self.blocks.pop(number, None)
        if message.block >= 0 and message.block not in self.blocks:
            self.blocks[message.block] = receive_memory(self.connection, message.block_bytes)
        if reply.ticket in self.tickets:
            self.tickets.remove(reply.ticket)
            self.replies[reply.ticket] = message
        else:
            self._drop(message)

    def _drop(self, message: Message) -> None:
        if message.block >= 0:
            self.returned.append(message.block)

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Return the outcome of a received reply. The worker may reuse the block of its message after all views of the
        block are garbage-collected.
        """
        message = self.replies.pop(ticket)
        block: Bytes | None = None
        if message.block >= 0:
            block = borrow(self.blocks[message.block], self.returned, message.block)
        outcome: Outcome[list[Batch]] = unpack(message, block)
        return outcome


class ProcessPool:
    """A `Pool` of worker processes. They start with the first job.

    Args:
        program: The program of the pipeline.
        spec: The settings: number and start method of the processes.
        watch: Reports long waits for batches.

    Raises:
        PipelineError: The processes cannot start in this way: see `start_method_of`.
    """

    def __init__(self, program: Program, spec: LoaderSpec, watch: Watch) -> None:
        self._program = program
        self._spec = spec
        self._watch = watch
        self._prepare_start()
        self._workers: list[_Worker] = []
        self._next_ticket = 0
        self._closing: Any = None

    def submit(self, job: Any) -> int:
        """Send a job to the worker with the fewest jobs, and return its ticket.

        Raises:
            PipelineError: A worker died.
            OSError: A worker cannot be started, or a reply cannot be received, because too many files are open.
        """
        if not self._workers:
            self._start()
        self._receive(timeout_s=0)
        chosen = min(self._workers, key=lambda each: len(each.tickets))
        self._next_ticket += 1
        chosen.send(self._next_ticket, job)
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. A ticket is valid for one call.

        Raises:
            PipelineError: A worker died, or the wait has lasted for the `timeout`.
            OSError: A reply cannot be received, because too many files are open.
        """
        worker = next(each for each in self._workers if ticket in each.tickets or ticket in each.replies)
        self._watch.begin()
        while ticket not in worker.replies:
            if not self._workers:
                raise PipelineError(_CLOSED)
            if not self._receive(self._watch.step_s):
                self._look(worker)
        return worker.take(ticket)

    def _look(self, worker: _Worker) -> None:
        slots, hint = slots_in(worker.board), ""
        if not slots.any():  # a worker that starts writes `IDLE` into its slots
            hint = f"It may be running the script's own code, such as init_process_group: put that under {GUARD}."
        self._watch.look(worker.name, worker.process.pid, slots, start_hint=hint)

    def is_ready(self, ticket: int) -> bool:
        """Return True if `take(ticket)` would not wait. Raises the errors of `take`."""
        self._receive(timeout_s=0)
        return any(ticket in worker.replies for worker in self._workers)

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets, drop their outcomes, and free the memory that no batch uses."""
        for worker in self._workers:
            worker.forget(tickets)

    def close(self) -> None:
        """End the processes, within a second; a worker that hangs is killed."""
        if self._closing is not None:
            self._closing()
        self._workers, self._closing = [], None

    def _prepare_start(self) -> StartMethod:
        """Check that the workers can start, start the fork server if they need it, and return how they start."""
        program = self._program
        method = start_method_of(
            program.parts,
            self._spec.start_method,
            reads_store=program.reader.is_remote,
            needs_torch=program.needs_torch,
        )
        start_fork_server(method)
        return method

    def _start(self) -> None:
        method = self._prepare_start()
        check_guard(method)
        self._program.run.needs_torch = method.needs_torch
        context = torch.multiprocessing.get_context(method.name)
        skips = contextlib.nullcontext() if method.runs_script or method.name == "fork" else without_script()
        with block_sigint(), skips:  # so that `close` knows every process
            # When Python exits, this comes before multiprocessing's SIGTERM, which workers ignore.
            self._closing = Finalize(self, _close_workers, (self._workers, os.getpid()), exitpriority=0)
            for number in range(self._spec.workers):
                self._workers.append(_Worker(context, self._program, number, self._spec.workers))

    def _receive(self, timeout_s: float) -> bool:
        """Receive all replies that the workers have sent. Wait up to `timeout_s` for the first reply. Return False if
        no reply came.

        Raises:
            PipelineError: A worker died.
            OSError: A reply cannot be received, because too many files are open.
        """
        by_handle: dict[Any, _Worker] = {
            handle: worker for worker in self._workers for handle in (worker.connection, worker.process.sentinel)
        }
        ready = connections.wait(list(by_handle), timeout_s)
        for worker in dict.fromkeys(by_handle[handle] for handle in ready):
            try:
                while worker.connection.poll():  # a reply that a worker sent before it died is valid
                    worker.receive()
            except (EOFError, ConnectionError):
                self._raise_death(worker)
        # A child that a worker forked keeps the pipe and the sentinel open, so the exit status is read too.
        for worker in self._workers:
            if worker.process.sentinel in ready or (not ready and worker.process.exitcode is not None):
                self._raise_death(worker)
        return bool(ready)

    def _raise_death(self, worker: _Worker) -> None:
        worker.process.join(_PATIENCE_S)
        raise PipelineError(f"a worker process died: {worker.name} {explain_exit(worker.process.exitcode)}")


def _close_workers(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the pool, but no workers
        return
    with block_sigint():
        for worker in workers:
            with contextlib.suppress(OSError):  # the worker has ended
                worker.connection.send(None)
            worker.connection.close()
        deadline_s = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            with contextlib.suppress(ValueError):  # the program has reaped it, or ignores SIGCHLD
                worker.process.close()
    workers.clear()
