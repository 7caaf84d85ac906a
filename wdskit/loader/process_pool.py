"""Worker processes that make batches: they are asked for jobs, and send what came of them through shared memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import random
import select
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing
from torch.utils.data._utils import worker as torch_worker

from wdskit.engine.batch import Batch, Here, Maker
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError
from wdskit.loader.shared_memory import Bytes, Message, Ring, SharedBlock, borrow, pack, receive_block, unpack
from wdskit.loader.starting import GUARD, check_guard, explain_exit, start_fork_server
from wdskit.loader.thread_pool import ThreadPool, ThreadTask
from wdskit.loader.watch import Watch
from wdskit.processes import block_sigint, end_with_parent, refuse_fork
from wdskit.stages.progress import BOARD_BYTES, Board, slots_in

_BOARD = -1  # number of the block in which a worker says what it works on; others are numbered from 0
_PATIENCE_S = 0.5  # for a worker that is in the midst of a batch when it is asked to end; then it is killed


class Request(NamedTuple):
    """What the main process sends.

    Attributes:
        forgotten: Tickets of jobs that are not wanted any more.
        returned: Blocks that nobody shares any more.
        ticket: Of the job that is asked for.
        job: What to make; None to ask for nothing.
        rests: Whether an epoch is over, so that the worker frees the memory that no batch uses.
    """

    forgotten: tuple[int, ...]
    returned: tuple[int, ...]
    ticket: int = 0
    job: Any = None
    rests: bool = False


class Reply(NamedTuple):
    """What a worker sends: a pickled Outcome. The descriptors of `new` blocks, each a number and a size, follow it."""

    ticket: int
    message: Message
    new: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]


class _Worker:
    """One process, as the main process sees it."""

    def __init__(self, context: Any, pipeline: Any, number: int, num_workers: int) -> None:
        self.number = number
        self.has_started = context.get_start_method() == "fork"
        self.connection, theirs = context.Pipe()
        arguments = (theirs, pipeline, number, num_workers, dict(os.environ))
        self.process = context.Process(target=_serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        theirs.close()
        self.tickets: set[int] = set()
        self.forgotten: list[int] = []
        self.blocks: dict[int, Any] = {}
        self.returned: deque[int] = deque()  # filled in the midst of anything
        self._poll = select.poll()
        self._poll.register(self.connection.fileno(), select.POLLOUT)

    @property
    def is_open_to(self) -> bool:
        """Whether a request would not have to wait for it, in the midst of a job, to read others."""
        return bool(self._poll.poll(0))

    def send(self, ticket: int = 0, job: Any = None, *, rests: bool = False) -> None:
        """Ask it for a job, or only say what it need not do."""
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        forgotten, self.forgotten = tuple(self.forgotten), []
        self.connection.send(Request(forgotten, returned, ticket, job, rests))
        if job is not None:
            self.tickets.add(ticket)

    def forget(self, tickets: Sequence[int]) -> None:
        """Do without jobs; if it cannot hear that now, it hears it with the next job."""
        left = self.tickets.intersection(tickets)
        self.tickets -= left
        self.forgotten += left
        self._send_if_open()

    def rest(self) -> None:
        """Let it free the memory that no batch uses; if it cannot hear that now, it keeps the memory."""
        self._send_if_open(rests=True)

    def _send_if_open(self, *, rests: bool = False) -> None:
        if self.is_open_to:
            with contextlib.suppress(OSError):  # it died, as will be seen
                self.send(rests=rests)

    def receive(self) -> Reply:
        """Its next reply; waits for it. New blocks are mapped."""
        reply: Reply = self.connection.recv()
        self.has_started = True
        for number, num_bytes in reply.new:
            self.blocks[number] = receive_block(self.connection, num_bytes)
        for number in reply.dropped:
            del self.blocks[number]
        return reply

    def look(self, watch: Watch) -> None:
        """See `Watch.look`."""
        hint = "It may be running the script's own code, such as init_process_group: put that under " + GUARD
        memory = self.blocks.get(_BOARD)
        watch.look(
            f"worker {self.number} (pid {self.process.pid})",
            self.process.pid,
            None if memory is None else slots_in(memory),
            start_hint="" if self.has_started else f"{hint}.",
        )

    def borrow(self, block: int) -> Bytes:
        """All bytes of a block of a message, until they are collected."""
        return borrow(self.blocks[block], self.returned, block)

    @property
    def death(self) -> str:
        """How it ended, and what that may mean."""
        self.process.join(_PATIENCE_S)
        how = explain_exit(self.process.exitcode, has_started=self.has_started)
        return f"worker {self.number} (pid {self.process.pid}) {how}"


class ProcessPool:
    """Worker processes. They start with the first job.

    Args:
        pipeline: Its `start` gives in each process what makes batches; its threads are those of each process.
        num_workers: How many processes.
        start_method: How they start, asked when they do.
        watch: Watches the waits for them.
    """

    def __init__(self, pipeline: Any, num_workers: int, start_method: Callable[[], str], watch: Watch) -> None:
        self._pipeline = pipeline
        self._num_workers = num_workers
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._replies: dict[int, tuple[_Worker, Message]] = {}
        self._next_ticket = 0
        self._owner = 0
        self._watch = watch
        self._closing: Any = None

    def submit(self, job: Any, worker: int | None = None) -> int:
        """See `Pool`; the job is for one worker, or for that which has least to do."""
        if not self._workers:
            self._start()
        refuse_fork(self._owner)
        self._receive_all(timeout_s=0)
        found = self._workers[worker] if worker is not None else min(self._workers, key=lambda each: len(each.tickets))
        if not found.is_open_to:
            self._watch.begin()
        while not found.is_open_to:  # it may wait for this process to take its replies
            self._receive_all(timeout_s=0.01)
            self._look(found)
        self._next_ticket += 1
        try:
            found.send(self._next_ticket, job)
        except OSError:
            self._raise_death(found)
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """See `Pool`.

        Raises:
            PipelineError: A worker died, the wait has lasted for the `timeout`, or this process was forked from the one
                that has the workers.
        """
        refuse_fork(self._owner)
        if ticket not in self._replies:
            self._watch.begin()
        while ticket not in self._replies:
            maker = next((worker for worker in self._workers if ticket in worker.tickets), None)
            assert maker is not None, "the job was forgotten"
            self._receive_all(self._watch.step_s)
            if ticket not in self._replies:
                self._look(maker)
        worker, message = self._replies.pop(ticket)
        outcome: Outcome[list[Batch]] = unpack(message, worker.borrow)
        return outcome

    def is_ready(self, ticket: int) -> bool:
        """See `Pool`."""
        refuse_fork(self._owner)
        if ticket not in self._replies:
            self._receive_all(timeout_s=0)
        return ticket in self._replies

    def forget(self, tickets: Sequence[int]) -> None:
        """See `Pool`."""
        if self._owner != os.getpid():
            return
        for ticket in tickets:
            self._drop(self._replies.pop(ticket, None))
        for worker in self._workers:
            worker.forget(tickets)

    def rest(self) -> None:
        """See `Pool`."""
        if self._owner == os.getpid():
            for worker in self._workers:
                worker.rest()

    def close(self) -> None:
        """See `Pool`."""
        if self._closing is not None:
            self._closing()
        self._workers, self._replies, self._closing = [], {}, None

    def _start(self) -> None:
        method = self._start_method()
        check_guard(method)
        start_fork_server(method)
        context = torch.multiprocessing.get_context(method)
        self._owner = os.getpid()
        with block_sigint():  # what has begun is known to who ends it
            self._closing = weakref.finalize(self, _close, self._workers, self._owner)
            try:
                for number in range(self._num_workers):
                    self._workers.append(_Worker(context, self._pipeline, number, self._num_workers))
            except BaseException:
                self.close()
                raise

    def _look(self, worker: _Worker) -> None:
        try:
            worker.look(self._watch)
        except PipelineError:
            self.close()
            raise

    def _receive_all(self, timeout_s: float) -> None:
        """Take what has come, and wait for something if there is time."""
        by_handle: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_handle[worker.connection] = by_handle[worker.process.sentinel] = worker
        # A process that a worker has forked holds its pipe and its sentinel open: look at the exit status too.
        ready = connections.wait(list(by_handle), timeout_s)
        dead = [each for each in self._workers if not ready and each.process.exitcode is not None]
        for worker in dead:
            self._raise_death(worker)
        for worker in dict.fromkeys(by_handle[handle] for handle in ready):
            try:
                while worker.connection.poll():  # what a worker sent before it died counts
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
        if reply.ticket in worker.tickets:
            worker.tickets.remove(reply.ticket)
            self._replies[reply.ticket] = worker, reply.message
        else:
            self._drop((worker, reply.message))

    def _drop(self, found: tuple[_Worker, Message] | None) -> None:
        if found is not None:
            found[0].returned.extend(found[1].blocks)

    def _raise_death(self, worker: _Worker) -> None:
        death = worker.death
        self.close()
        raise PipelineError(f"a worker process died: {death}")


def _close(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no workers
        return
    with block_sigint():
        for worker in workers:
            with contextlib.suppress(OSError):  # it is gone
                if worker.is_open_to:
                    worker.connection.send(None)
            worker.connection.close()
        deadline = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()


# In the worker process.


def _serve(connection: Connection, pipeline: Any, number: int, num_workers: int, environment: dict[str, str]) -> None:
    """Work until the other side says None or is gone."""
    end_with_parent()
    os.environ.clear()  # under forkserver it is the one with which the server started: without the keys that came later
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    _seed(pipeline, number, num_workers)
    block = SharedBlock(_BOARD, BOARD_BYTES)
    pipeline.run.board, pipeline.run.is_watched = Board(block.memory), True
    with contextlib.suppress(ConnectionError):
        connection.send(Reply(0, Message(b"", ()), ((_BOARD, BOARD_BYTES),), ()))  # it has started
        block.send(connection)
    make = pipeline.start(number, num_workers)
    with contextlib.suppress(EOFError, ConnectionError):  # the main process is gone, or does not want any more
        channel = _Channel(connection, number)
        if pipeline.num_threads > 1:
            _serve_threads(channel, make, pipeline.num_threads)
        else:
            _serve_alone(channel, make)


def _seed(pipeline: Any, number: int, num_workers: int) -> None:
    """Global generators differ from worker to worker, and `get_worker_info` says which it is, as in torch's loader."""
    run = pipeline.run
    words = np.random.SeedSequence([run.seed, run.place.rank, number]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 (the global one is meant)
    torch.manual_seed(int(words[2]))
    info = {"id": number, "num_workers": num_workers, "seed": int(words[2]), "dataset": pipeline}
    torch_worker._worker_info = torch_worker.WorkerInfo(**info)  # noqa: SLF001 (torch has no public way)


class _Channel:
    """Takes requests and sends replies."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.memory = Ring(SharedBlock)
        self._connection = connection
        self._where = f"worker {number}"
        self._known: set[int] = set()  # blocks that the main process has
        self._lock = threading.Lock()

    def has_request(self) -> bool:
        """Whether one waits."""
        return self._connection.poll()

    def request(self) -> Request | None:
        """The next one."""
        request: Request | None = self._connection.recv()
        for number in request.returned if request else ():
            self.memory.give_back(number)
        return request

    def answer(self, ticket: int, outcome: Outcome[list[Batch]]) -> None:
        """Send what came of a job; where a batch does not pickle, those before it and the error.

        Raises:
            ConnectionError: The main process is gone.
            OSError: A block cannot be sent: nothing more can be.
        """
        outcome.where = self._where
        try:
            message = pack(outcome, self.memory)
        except OSError as err:  # there is no more memory or no more descriptors
            message = Message(pickle.dumps(Outcome(error=err, where=self._where)), ())
        except BaseException as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            good = list(itertools.takewhile(_pickles, outcome.value or ()))
            message = pack(Outcome(good, err, self._where), self.memory)
        with self._lock:
            new = {number: self.memory.hold(number) for number in message.blocks - self._known}
            dropped = [self.memory.dropped.popleft() for _ in range(len(self.memory.dropped))]
            known = self._known.intersection(dropped)
            sizes = tuple((number, block.num_bytes) for number, block in new.items())
            self._connection.send(Reply(ticket, message, sizes, tuple(known)))
            self._known = (self._known - known) | new.keys()
            for number, block in new.items():
                assert isinstance(block, SharedBlock)
                block.send(self._connection)
                self.memory.give_back(number)


def _pickles(batch: Batch) -> bool:
    try:
        pickle.dumps(batch, protocol=5, buffer_callback=lambda _: False)
    except Exception:  # noqa: BLE001 (whatever a user's `__reduce__` raises)
        return False
    return True


def _serve_alone(channel: _Channel, make: Maker) -> None:
    asked: dict[int, Any] = {}
    begun: dict[int, Any] = {}
    made: dict[int, Outcome[list[Batch]]] = {}
    task = Here()
    while True:
        while channel.has_request() or not (asked or begun or made):
            request = channel.request()
            if request is None:
                return
            for ticket in request.forgotten:
                for jobs in (asked, begun, made):
                    jobs.pop(ticket, None)
            if request.job is not None:
                asked[request.ticket] = request.job
            if request.rests:
                channel.memory.free_pages()
        while made:  # after the requests: a batch that the main process has forgotten is not sent
            channel.answer(*made.popitem())
        begun |= {ticket: make.begin(job) for ticket, job in asked.items()}
        asked.clear()
        if begun:
            ticket = next(iter(begun))
            made[ticket] = make(begun.pop(ticket), channel.memory, task)


def _serve_threads(channel: _Channel, make: Maker, num_threads: int) -> None:
    pool = ThreadPool(make, num_threads, channel.memory)
    tasks: dict[int, ThreadTask] = {}

    def finish(ticket: int, task: ThreadTask) -> None:
        tasks.pop(ticket, None)
        if task.is_cancelled:
            return
        try:
            channel.answer(ticket, task.taken())
        except ConnectionError:
            pass  # the main process is gone, which the other thread sees too
        except BaseException:  # noqa: BLE001 (or the main process would wait for ever)
            traceback.print_exc()
            os._exit(1)

    while (request := channel.request()) is not None:
        forgotten = [tasks.pop(ticket, None) for ticket in request.forgotten]  # a thread may be about to take it out
        pool.forget([task for task in forgotten if task is not None])
        if request.rests:
            pool.rest()
        if request.job is not None:
            tasks[request.ticket] = pool.submit(request.job, done=functools.partial(finish, request.ticket))
    pool.close()
