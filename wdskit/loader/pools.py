"""Pools make the batches of jobs: in this thread, in threads or in worker processes.

A loader gives a job to a pool (`submit`) and takes its batches later (`take`). A worker is a thread of this process or
a process. It takes jobs in a loop (`loader.worker`), makes the batches with the `Maker` of its process, and answers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, Protocol

import torch.multiprocessing  # registers how tensors of a program are pickled for other processes

from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError
from wdskit.loader.memory import Arena, Arenas, Bytes, Message, borrow, keep_freed_memory, receive_memory, unpack
from wdskit.loader.start_method import (
    StartMethod,
    check_guard,
    explain_exit,
    start_fork_server,
)
from wdskit.loader.watch import Watch
from wdskit.loader.worker import BOARD_BLOCK, JOIN_S, ReceivedJob, Reply, Request, WorkerSetup, serve, work
from wdskit.processes import GUARD, block_sigint, refuse_fork, without_script
from wdskit.stages.base import Run, renew_turn
from wdskit.stages.progress import slots_in

_PATIENCE_S = 0.5  # a worker that still makes a batch after this time is killed


class Pool(Protocol):
    """Makes the batches of jobs."""

    def submit(self, job: Any) -> Any:
        """Start a job, an argument of `Maker.open`, and return its ticket, for `take`."""
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
    make_maker: Callable[[Any], Maker],
    num_workers: int,
    start_method: Callable[[], StartMethod],
    timeout_s: float | None,
) -> Pool:
    """Return a `ProcessPool` if `num_workers` is at least 1, otherwise a `LocalPool`. If the start method of the
    processes needs a fork server, start the server.

    Args:
        program: The program of the pipeline.
        make_maker: Called with the program in each process. Returns the `Maker` of the batches.
        num_workers: Number of worker processes, 0 for none.
        start_method: Returns the start method of the processes. Called now, so that its errors come early, and each
            time that the processes start. Not called without worker processes.
        timeout_s: The longest wait for a batch in seconds; None or 0 for no limit. It has no effect with one thread of
            this process, the consumer's.

    Raises:
        PipelineError: The error of `start_method`.
    """
    keep_freed_memory()
    watch = Watch(program.describe, timeout_s or 0.0)
    if num_workers:
        start_fork_server(start_method())
        return ProcessPool(program, make_maker, num_workers, start_method, watch)
    return LocalPool(make_maker(program), program.run, watch)


class LocalPool:
    """A `Pool` of threads of this process. They start with the first job. With one thread, the consumer's thread makes
    the batches of a job when it takes the job.

    Args:
        maker: Makes the batches.
        run: The running pipeline, with the number of threads and their board.
        watch: Reports long waits for batches.
    """

    def __init__(self, maker: Maker, run: Run, watch: Watch) -> None:
        self._maker = maker
        self._run = run
        self._watch = watch
        self._arenas = Arenas()
        self._owner = os.getpid()
        self._queue: SimpleQueue[ReceivedJob | None] | None = None
        self._received: weakref.WeakSet[ReceivedJob] = weakref.WeakSet()
        self._closing: Callable[[], object] | None = None
        self._has_threads = run.num_threads > 1

    def submit(self, job: Any) -> ReceivedJob:
        """Queue a job for the next free thread. The ticket is a `ReceivedJob`.

        Raises:
            PipelineError: This process was forked from the process that has the threads.
        """
        if self._has_threads and self._queue is None:
            self._start()
        if self._has_threads:
            refuse_fork(self._owner)
        received = ReceivedJob(0, self._maker.open(job))
        self._received.add(received)
        if self._queue is not None:
            self._queue.put(received)
        return received

    def _start(self) -> None:
        queue: SimpleQueue[ReceivedJob | None] = SimpleQueue()
        self._owner, threads = os.getpid(), list[threading.Thread]()
        before = torch.get_num_threads()
        ready = threading.Barrier(self._run.num_threads + 1)
        with block_sigint():  # so that `close` knows every thread
            self._closing = weakref.finalize(self, _close_threads, threads, queue, self._received, self._owner)
            for at in range(self._run.num_threads):
                arguments = (ready, queue.get, self._maker, self._arenas)
                threads.append(threading.Thread(target=_work, args=arguments, name=f"wdskit-{at}", daemon=True))
            try:
                for thread in threads:
                    thread.start()
            except BaseException:  # the system allows no more threads
                ready.abort()
                raise
            ready.wait()
            torch.set_num_threads(before)  # the new threads keep 1
        self._queue = queue

    def take(self, ticket: ReceivedJob) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. Later calls with the same ticket return an empty outcome.

        Raises:
            PipelineError: The wait has lasted for the `timeout`; the pool is closed then. Or this process was forked
                from the process that has the threads.
        """
        if not self._has_threads:
            before = torch.get_num_threads()
            torch.set_num_threads(1)  # several threads for small images only wait for each other
            try:
                work([None, ticket].pop, self._maker, self._arenas, _finish)
            finally:
                torch.set_num_threads(before)
            return ticket.take()
        refuse_fork(self._owner)
        if not ticket.done.is_set():
            self._watch.begin()
            while not ticket.done.wait(self._watch.step_s):
                try:
                    self._watch.look("this process", os.getpid(), self._run.board.slots)
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
        self._arenas.free_pages()

    def close(self) -> None:
        """End the threads, within a second. A thread that hangs goes on, but does not keep this process alive."""
        if self._closing is not None:
            self._closing()
        self._queue, self._closing = None, None


def _finish(received: ReceivedJob, outcome: Outcome[list[Batch]], _: Arena) -> None:
    received.finish(outcome)


def _work(ready: threading.Barrier, next_job: Callable[[], ReceivedJob | None], maker: Maker, arenas: Arenas) -> None:
    torch.set_num_threads(1)  # of this thread: each thread works on another batch, not all on one image
    torch.get_num_threads()  # torch reads the process's number when a thread first asks, which may be later
    try:
        ready.wait()
    except threading.BrokenBarrierError:  # another thread could not start
        return
    work(next_job, maker, arenas, _finish)


def _close_threads(
    threads: list[threading.Thread],
    queue: SimpleQueue[ReceivedJob | None],
    jobs: weakref.WeakSet[ReceivedJob],
    owner: int,
) -> None:
    if os.getpid() != owner:  # a forked process has a copy of the pool, but no threads
        return
    with block_sigint():
        for received in [*jobs]:
            received.cancel()
        for _ in threads:
            queue.put(None)
        deadline_s = time.monotonic() + JOIN_S
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline_s - time.monotonic()))
                if thread.is_alive():  # perhaps in a user's function, whose lock the next epoch needs
                    renew_turn()


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
        """Wait for the next reply, map the new block that follows it in the pipe, and return the reply.

        Raises:
            EOFError, OSError: The worker has ended, or a block cannot be mapped.
        """
        reply: Reply = self.connection.recv()
        self.has_started = True
        for number in reply.dropped:
            del self.blocks[number]
        if reply.new_bytes:
            self.blocks[reply.message.block] = receive_memory(self.connection, reply.new_bytes)
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

    def unpack(self, message: Message) -> Outcome[list[Batch]]:
        """Return the outcome in a message. The worker may reuse the block of the message after all views of it are
        garbage-collected.
        """
        block: Bytes | None = None
        if message.block >= 0:
            block = borrow(self.blocks[message.block], self.returned, message.block)
        outcome: Outcome[list[Batch]] = unpack(message, block)
        return outcome

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
        program: The program of the pipeline.
        make_maker: Called with the program in each process. Returns the `Maker` of the batches.
        num_workers: Number of processes.
        start_method: Returns the start method of the processes. Called when they start.
        watch: Reports long waits for batches.
    """

    def __init__(
        self,
        program: Any,
        make_maker: Callable[[Any], Maker],
        num_workers: int,
        start_method: Callable[[], StartMethod],
        watch: Watch,
    ) -> None:
        self._setup = WorkerSetup(program, make_maker, num_workers)
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._replies: dict[int, tuple[_Worker, Message]] = {}
        self._next_ticket = 0
        self._owner = 0
        self._watch = watch
        self._closing: Any = None

    def submit(self, job: Any) -> int:
        """Send a job to the worker with the fewest jobs, and return its ticket. The first job starts the processes.

        Raises:
            PipelineError: A worker died or cannot be started, a reply cannot be received, or the wait for room in a
                pipe has lasted for the `timeout`; the pool is closed then. Or this process was forked from the process
                that has the workers.
        """
        if not self._workers:
            self._start()
        refuse_fork(self._owner)
        self._receive_all(timeout_s=0)
        chosen = min(self._workers, key=lambda each: len(each.tickets))
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
        return worker.unpack(message)

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
        """Return the block of a reply to its worker, with the next request. If `reply` is None, do nothing."""
        if reply is not None:
            worker, message = reply
            if message.block >= 0:
                worker.returned.append(message.block)

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
