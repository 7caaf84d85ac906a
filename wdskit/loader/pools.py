"""Pools make the batches of jobs: in this thread, in threads or in worker processes.

A loader gives a job to a pool (`submit`) and takes its batches later (`take`). A worker is a thread of this process or
a process. It takes jobs in a loop (`loader.worker`), makes the batches with the `BatchFactory` of its process, and
answers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Protocol

import torch.multiprocessing  # registers how tensors of a program are pickled for other processes

from wdskit.engine.batch import Batch, BatchFactory, never
from wdskit.engine.outcome import Outcome
from wdskit.engine.threads import JOIN_S, Threads
from wdskit.errors import PipelineError
from wdskit.loader.shared_memory import Bytes, Message, Ring, borrow, keep_freed_memory, receive_block, unpack
from wdskit.loader.start_method import (
    StartMethod,
    check_guard,
    explain_exit,
    start_fork_server,
)
from wdskit.loader.watch import Watch
from wdskit.loader.worker import BOARD_BLOCK, ReceivedJob, Reply, Request, WorkerSetup, serve, work
from wdskit.processes import GUARD, block_sigint, refuse_fork, without_script
from wdskit.stages.progress import Board, slots_in

_PATIENCE_S = 0.5  # a worker that still makes a batch after this time is killed


class Pool(Protocol):
    """Makes the batches of jobs."""

    def submit(self, job: Any, worker: int | None = None) -> Any:
        """Start a job and return its ticket, for `take`.

        `job` is an argument of `BatchFactory.open`. `worker` is the number of the worker that must do the job; None for
        any worker.
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
        """Cancel the jobs of these tickets. The tickets become invalid for `take`."""
        ...

    def free_memory(self) -> None:
        """Free the memory that no batch uses, so that other processes can use it. Called at the end of an epoch."""
        ...

    def close(self) -> None:
        """End the threads and processes, within a second. All tickets become invalid.

        The next job starts new threads and processes.
        """
        ...


def make_pool(
    program: Any,
    make_factory: Callable[[Any], BatchFactory],
    num_workers: int,
    start_method: Callable[[], StartMethod],
    timeout_s: float | None,
) -> Pool:
    """Return a `ProcessPool` if `num_workers` is at least 1. If its start method needs a fork server, start the server.

    If `num_workers` is 0, return an `InlinePool` if the factory has one loop (`num_loops`) and the wait has no limit;
    otherwise a `ThreadPool`.

    Args:
        program: A `Program`, or a `StreamPipeline`.
        make_factory: Called with the program in each process. Returns the factory that makes the batches.
        num_workers: Number of worker processes, 0 for none.
        start_method: Returns the start method of the processes. Called now, so that its errors come early, and each
            time that the processes start. Not called without worker processes.
        timeout_s: The longest wait for a batch in seconds; None or 0 for no limit.

    Raises:
        PipelineError: The error of `start_method`.
    """
    if num_workers:
        start_fork_server(start_method())
    keep_freed_memory()
    watch = Watch(program.describe, timeout_s or 0.0)
    if num_workers:
        return ProcessPool(program, make_factory, num_workers, start_method, watch)
    factory = make_factory(program)
    if factory.num_loops == 1 and not watch.timeout_s:
        return InlinePool(factory)
    return ThreadPool(factory, watch, program.run.board)


class InlinePool:
    """A `Pool` that makes the batches of a job in this thread, when the job is taken."""

    def __init__(self, factory: BatchFactory) -> None:
        self._factory = factory
        self._memory = Ring()

    def submit(self, job: Any, worker: int | None = None) -> Any:  # noqa: ARG002 (there is one worker)
        """Open a job and return the open job as its ticket. `worker` has no effect."""
        return self._factory.open(job)

    def take(self, ticket: Any) -> Outcome[list[Batch]]:
        """Make the batches of a job now and return its outcome. Meanwhile torch is limited to one thread."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # several threads for small images only wait for each other
        try:
            return self._factory(ticket, self._memory, never)
        finally:
            torch.set_num_threads(before)

    def is_ready(self, ticket: Any) -> bool:  # noqa: ARG002 (a job is made when it is taken)
        """Return False, because a job is made only when it is taken."""
        return False

    def forget(self, tickets: Sequence[Any]) -> None:
        """Do nothing, because no job has started."""

    def free_memory(self) -> None:
        """Free the memory that no batch uses, so that other processes can use it."""
        self._memory.free_pages()

    def close(self) -> None:
        """End the threads of the factory. The next job starts new threads."""
        self._factory.close()


class ThreadPool:
    """A `Pool` of threads of this process. They start with the first job.

    Args:
        factory: Makes the batches.
        watch: Reports long waits for batches.
        board: The board in which the factory's threads note their samples.
    """

    def __init__(self, factory: BatchFactory, watch: Watch, board: Board) -> None:
        self._factory = factory
        self._watch = watch
        self._board = board
        self._memory = Ring()
        self._owner = os.getpid()
        self._queue: SimpleQueue[ReceivedJob | None] | None = None
        self._received: weakref.WeakSet[ReceivedJob] = weakref.WeakSet()
        self._closing: Callable[[], object] | None = None

    def submit(self, job: Any, worker: int | None = None) -> ReceivedJob:  # noqa: ARG002 (any thread)
        """Queue a job for the next free thread. The ticket is a `ReceivedJob`. `worker` has no effect.

        Raises:
            PipelineError: This process was forked from the process that has the threads.
        """
        if self._queue is None:
            self._queue = self._start()
        refuse_fork(self._owner)
        received = ReceivedJob(0, self._factory.open(job))
        self._received.add(received)
        self._queue.put(received)
        return received

    def _start(self) -> SimpleQueue[ReceivedJob | None]:
        queue: SimpleQueue[ReceivedJob | None] = SimpleQueue()
        factory, self._owner = self._factory, os.getpid()
        with block_sigint():  # so that `close` knows every thread
            loops = Threads(factory.num_loops, "batches")
            arguments = (loops, factory.num_loops, queue, factory, self._received, self._owner)
            self._closing = weakref.finalize(self, _close_threads, *arguments)
        for _ in range(factory.num_loops):
            loops.submit(work, queue.get, factory, self._memory, ReceivedJob.finish)
        return queue

    def take(self, ticket: ReceivedJob) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. Later calls with the same ticket return an empty outcome.

        Raises:
            PipelineError: The wait has lasted for the `timeout`; the pool is closed then. Or this process was forked
                from the process that has the threads.
        """
        refuse_fork(self._owner)
        if not ticket.done.is_set():
            self._watch.begin()
            while not ticket.done.wait(self._watch.step_s):
                try:
                    self._watch.look("this process", os.getpid(), self._board.slots)
                except PipelineError:
                    self.close()
                    raise
        return ticket.take()

    def is_ready(self, ticket: ReceivedJob) -> bool:
        """Return True if `take(ticket)` would not wait."""
        return ticket.done.is_set()

    def forget(self, tickets: Sequence[ReceivedJob]) -> None:
        """Cancel jobs and drop their outcomes. The threads that work on the jobs stop after their current sample."""
        for ticket in tickets:
            ticket.cancel()

    def free_memory(self) -> None:
        """Free the memory that no batch uses, so that other processes can use it."""
        self._memory.free_pages()

    def close(self) -> None:
        """Cancel all jobs and end the threads, within a second. The next job starts new threads."""
        if self._closing is not None:
            self._closing()
        self._queue, self._closing = None, None
        self._factory.close()


def _close_threads(
    loops: Threads,
    num_loops: int,
    queue: SimpleQueue[ReceivedJob | None],
    factory: BatchFactory,
    jobs: weakref.WeakSet[ReceivedJob],
    owner: int,
) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the pool, but no threads
        return
    with block_sigint():
        for received in [*jobs]:
            received.cancel()
        for _ in range(num_loops):
            queue.put(None)
        deadline_s = time.monotonic() + JOIN_S
        loops.close(deadline_s)  # before the factory's threads, which the loops use
        factory.close(deadline_s)


class _Worker:
    """What the main process knows about one worker process."""

    def __init__(self, context: Any, start: WorkerSetup, number: int) -> None:
        self.number = number
        self.has_started = context.get_start_method() == "fork"
        self.connection, worker_end = context.Pipe()
        arguments = (worker_end, start, number, dict(os.environ))
        self.process = context.Process(target=serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        worker_end.close()
        self.tickets: set[int] = set()  # of jobs that were sent, without a reply
        self.forgotten: list[int] = []  # tickets of cancelled jobs, not sent yet
        self.blocks: dict[int, Any] = {}
        self.returned: deque[int] = deque()  # numbers of free blocks, filled by finalizers at any time
        self._poll = select.poll()
        self._poll.register(self.connection.fileno(), select.POLLOUT)

    @property
    def can_send(self) -> bool:
        """True if the worker's pipe has room, so that sending does not block."""
        return bool(self._poll.poll(0))

    def send(self, ticket: int = 0, job: Any = None, *, frees_memory: bool = False) -> None:
        """Send a request to the worker. The request also has the tickets of cancelled jobs and the numbers of free
        blocks that were not sent yet.

        Args:
            ticket: Ticket of the job.
            job: The new job; None to send no job.
            frees_memory: Whether the worker shall free the memory that no batch uses.

        Raises:
            OSError: The worker has ended.
        """
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        forgotten, self.forgotten = tuple(self.forgotten), []
        self.connection.send(Request(forgotten, returned, ticket, job, frees_memory))
        if job is not None:
            self.tickets.add(ticket)

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets. Ignore tickets of jobs that this worker does not have.

        If the pipe is full, the worker gets the tickets with the next request.
        """
        left = self.tickets.intersection(tickets)
        self.tickets -= left
        self.forgotten += left
        self._send_if_open()

    def free_memory(self) -> None:
        """Ask the worker to free the memory that no batch uses. Do nothing if the pipe is full."""
        self._send_if_open(frees_memory=True)

    def _send_if_open(self, *, frees_memory: bool = False) -> None:
        if self.can_send:
            with contextlib.suppress(OSError):  # the worker died, which the next `take` reports
                self.send(frees_memory=frees_memory)

    def receive(self) -> Reply:
        """Wait for the next reply, map the new blocks that follow it in the pipe, and return the reply.

        Raises:
            EOFError, OSError: The worker has ended, or a block cannot be mapped.
        """
        reply: Reply = self.connection.recv()
        self.has_started = True
        for number, num_bytes in reply.new:
            self.blocks[number] = receive_block(self.connection, num_bytes)
        for number in reply.dropped:
            del self.blocks[number]
        return reply

    def look(self, watch: Watch) -> None:
        """Call `watch.look` for this worker, while the main process waits for the worker.

        Raises:
            PipelineError: The wait has lasted for the `timeout`.
        """
        hint = "It may be running the script's own code, such as init_process_group: put that under " + GUARD
        memory = self.blocks.get(BOARD_BLOCK)
        watch.look(
            f"worker {self.number} (pid {self.process.pid})",
            self.process.pid,
            None if memory is None else slots_in(memory),
            start_hint="" if self.has_started else f"{hint}.",
        )

    def borrow(self, block: int) -> Bytes:
        """Return all bytes of block number `block`. The worker may reuse the block after the result is
        garbage-collected.
        """
        return borrow(self.blocks[block], self.returned, block)

    @property
    def death(self) -> str:
        """A text for messages: the worker, how the worker ended, and the likely reason.

        Waits up to 0.5 s for the end of the worker.
        """
        self.process.join(_PATIENCE_S)
        how = explain_exit(self.process.exitcode)
        return f"worker {self.number} (pid {self.process.pid}) {how}"


class ProcessPool:
    """A `Pool` of worker processes. They start with the first job.

    Args:
        program: A `Program`, or a `StreamPipeline`.
        make_factory: Called with the program in each process. Returns the factory that makes the batches.
        num_workers: Number of processes.
        start_method: Returns the start method of the processes. Called when they start.
        watch: Reports long waits for batches.
    """

    def __init__(
        self,
        program: Any,
        make_factory: Callable[[Any], BatchFactory],
        num_workers: int,
        start_method: Callable[[], StartMethod],
        watch: Watch,
    ) -> None:
        self._setup = WorkerSetup(program, make_factory, num_workers)
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._replies: dict[int, tuple[_Worker, Message]] = {}
        self._next_ticket = 0
        self._owner = 0
        self._watch = watch
        self._closing: Any = None

    def submit(self, job: Any, worker: int | None = None) -> int:
        """Send a job to a worker and return its ticket. The first job starts the processes.

        `worker` is the number of the worker; with None, the worker with the fewest jobs gets the job.

        Raises:
            PipelineError: A worker died or cannot be started, a reply cannot be received, or the wait for room in a
                pipe has lasted for the `timeout`; the pool is closed then. Or this process was forked from the process
                that has the workers.
        """
        if not self._workers:
            self._start()
        refuse_fork(self._owner)
        self._receive_all(timeout_s=0)
        chosen = self._workers[worker] if worker is not None else min(self._workers, key=lambda each: len(each.tickets))
        if not chosen.can_send:
            self._watch.begin()
        while not chosen.can_send:  # the worker may wait until this process takes its replies
            self._receive_all(timeout_s=0.01)
            self._look(chosen)
        self._next_ticket += 1
        try:
            chosen.send(self._next_ticket, job)
        except OSError:
            self._raise_death(chosen)
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. A ticket is valid for one call.

        Raises:
            PipelineError: A worker died, a reply cannot be received, or the wait has lasted for the `timeout`; the pool
                is closed then. Or this process was forked from the process that has the workers.
        """
        refuse_fork(self._owner)
        if ticket not in self._replies:
            self._watch.begin()
        while ticket not in self._replies:
            assigned = next((worker for worker in self._workers if ticket in worker.tickets), None)
            assert assigned is not None, "the job was forgotten"
            self._receive_all(self._watch.step_s)
            if ticket not in self._replies:
                self._look(assigned)
        worker, message = self._replies.pop(ticket)
        outcome: Outcome[list[Batch]] = unpack(message, worker.borrow)
        return outcome

    def is_ready(self, ticket: int) -> bool:
        """Return True if `take(ticket)` would not wait.

        Raises:
            PipelineError: A worker died or a reply cannot be received; the pool is closed then. Or this process was
                forked from the process that has the workers.
        """
        refuse_fork(self._owner)
        if ticket not in self._replies:
            self._receive_all(timeout_s=0)
        return ticket in self._replies

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets and drop their outcomes. Do nothing in a forked process."""
        if not self._workers or self._owner != os.getpid():  # after the pool has ended; at exit `os` may be gone
            return
        for ticket in tickets:
            self._drop(self._replies.pop(ticket, None))
        for worker in self._workers:
            worker.forget(tickets)

    def free_memory(self) -> None:
        """Ask the workers to free the memory that no batch uses. Do nothing in a forked process."""
        if self._workers and self._owner == os.getpid():
            for worker in self._workers:
                worker.free_memory()

    def close(self) -> None:
        """End the processes, within a second; a worker that hangs is killed. The next job starts new processes."""
        if self._closing is not None:
            self._closing()
        self._workers, self._replies, self._closing = [], {}, None

    def _start(self) -> None:
        if multiprocessing.current_process().daemon:
            msg = "worker processes cannot be started: this is a daemon process, which may have no children."
            raise PipelineError(f"{msg}\n  Use workers: 0, with `threads`.")
        method = self._start_method()
        check_guard(method)
        start_fork_server(method)
        context = torch.multiprocessing.get_context(method.name)
        self._owner = os.getpid()
        skips = contextlib.nullcontext() if method.runs_script or method.name == "fork" else without_script()
        with block_sigint(), skips:  # so that `close` knows every process
            # When Python exits, this comes before multiprocessing's SIGTERM, which workers ignore.
            self._closing = Finalize(self, _close_workers, (self._workers, self._owner), exitpriority=0)
            try:
                for number in range(self._setup.num_workers):
                    self._workers.append(_Worker(context, self._setup, number))
            except (OSError, EOFError) as err:  # EOFError: of the fork server
                self.close()
                msg = f"worker processes cannot be started: {str(err) or type(err).__name__}."
                raise PipelineError(f"{msg}\n  Often too many files are open: see `ulimit -n`.") from err
            except BaseException:
                self.close()
                raise

    def _look(self, worker: _Worker) -> None:
        """Call `worker.look`. If the wait has lasted for the `timeout`, close the pool and raise its PipelineError."""
        try:
            worker.look(self._watch)
        except PipelineError:
            self.close()
            raise

    def _receive_all(self, timeout_s: float) -> None:
        """Receive all replies that the workers have sent. Wait up to `timeout_s` for the first reply.

        Raises:
            PipelineError: A worker died, or a reply cannot be received. The pool is closed then.
        """
        by_handle: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_handle[worker.connection] = by_handle[worker.process.sentinel] = worker
        # A child that a worker forked keeps the pipe and the sentinel open, so the exit status is read too.
        ready = connections.wait(list(by_handle), timeout_s)
        dead = [each for each in self._workers if not ready and each.process.exitcode is not None]
        for worker in dead:
            self._raise_death(worker)
        for worker in dict.fromkeys(by_handle[handle] for handle in ready):
            try:
                while worker.connection.poll():  # a reply that a worker sent before it died is valid
                    self._keep(worker, worker.receive())
            except (EOFError, ConnectionError):
                self._raise_death(worker)
            except OSError as err:
                self.close()
                msg = f"a batch of worker {worker.number} cannot be received: {err}."
                raise PipelineError(f"{msg}\n  Often too many files are open: see `ulimit -n`.") from err
            if worker.process.sentinel in ready:
                self._raise_death(worker)

    def _keep(self, worker: _Worker, reply: Reply) -> None:
        """Keep a reply until `take`. If its job was cancelled, drop the reply."""
        if reply.ticket in worker.tickets:
            worker.tickets.remove(reply.ticket)
            self._replies[reply.ticket] = worker, reply.message
        else:
            self._drop((worker, reply.message))

    def _drop(self, reply: tuple[_Worker, Message] | None) -> None:
        """Return the blocks of a reply to its worker, with the next request. If `reply` is None, do nothing."""
        if reply is not None:
            worker, message = reply
            worker.returned.extend(message.blocks)

    def _raise_death(self, worker: _Worker) -> None:
        """Close the pool, and raise the PipelineError that a worker died."""
        death = worker.death
        self.close()
        raise PipelineError(f"a worker process died: {death}")


def _close_workers(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the pool, but no workers
        return
    with block_sigint():
        for worker in workers:
            with contextlib.suppress(OSError):  # the worker has ended
                if worker.can_send:
                    worker.connection.send(None)
            worker.connection.close()
        deadline = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            with contextlib.suppress(ValueError):  # the program has reaped it, or ignores SIGCHLD
                worker.process.close()
    workers.clear()
