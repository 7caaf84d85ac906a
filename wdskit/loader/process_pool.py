"""Worker processes that make batches: they are asked for jobs, and send what came of them through shared memory."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import connection as connections
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing
from torch.utils.data._utils import worker as torch_worker

from wdskit.engine.batch import Batch, Here
from wdskit.engine.outcome import Outcome
from wdskit.errors import PipelineError
from wdskit.loader.shared_memory import Bytes, Message, Ring, SharedBlock, borrow, pack, unpack
from wdskit.loader.thread_pool import ThreadPool, ThreadTask
from wdskit.processes import block_sigint, end_with_parent

_PATIENCE_S = 1.0  # for a worker that is in the midst of a batch when it is asked to end; then it is killed


class Request(NamedTuple):
    """What the main process sends: a job under a number; numbers that are not wanted any more; blocks that are free."""

    ticket: int
    job: Any
    forgotten: tuple[int, ...]
    returned: tuple[int, ...]


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
        self.connection, theirs = context.Pipe()
        arguments = (theirs, pipeline, number, num_workers)
        self.process = context.Process(target=_serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        theirs.close()
        self.tickets: set[int] = set()
        self.blocks: dict[int, mmap.mmap] = {}
        self.returned: deque[int] = deque()  # filled in the midst of anything

    def send(self, ticket: int, job: Any, forgotten: Sequence[int] = ()) -> None:
        """Ask it for a job, or say what it need not do."""
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        self.connection.send(Request(ticket, job, tuple(forgotten), returned))
        if job is not None:
            self.tickets.add(ticket)

    def receive(self) -> Reply:
        """Its next reply; waits for it. New blocks are mapped."""
        reply: Reply = self.connection.recv()
        for number, num_bytes in reply.new:
            file = reduction.recv_handle(self.connection)
            self.blocks[number] = mmap.mmap(file, num_bytes)
            os.close(file)
        for number in reply.dropped:
            del self.blocks[number]
        return reply

    def borrow(self, block: int) -> Bytes:
        """All bytes of a block of a message, until they are collected."""
        return borrow(self.blocks[block], self.returned, block)

    @property
    def death(self) -> str:
        """How it ended."""
        self.process.join(_PATIENCE_S)
        code = self.process.exitcode
        how = "is gone" if code is None else f"exited with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"worker {self.number} (pid {self.process.pid}) {how}"


class ProcessPool:
    """Worker processes. They start with the first job.

    Args:
        pipeline: Its `start` gives in each process what makes batches; its threads are those of each process.
        num_workers: How many processes.
        start_method: How they start, asked when they do.
    """

    def __init__(self, pipeline: Any, num_workers: int, start_method: Callable[[], str]) -> None:
        self._pipeline = pipeline
        self._num_workers = num_workers
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._replies: dict[int, tuple[_Worker, Message]] = {}
        self._next_ticket = 0
        self._closing: Any = None

    def submit(self, job: Any, worker: int | None = None) -> int:
        """See `Pool`; the job is for one worker, or for that which has least to do."""
        if not self._workers:
            self._start()
        self._receive_all(timeout_s=0)
        found = self._workers[worker] if worker is not None else min(self._workers, key=lambda each: len(each.tickets))
        self._next_ticket += 1
        try:
            found.send(self._next_ticket, job)
        except OSError:
            self._raise_death(found)
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """See `Pool`.

        Raises:
            PipelineError: A worker died.
        """
        while ticket not in self._replies:
            self._receive_all(timeout_s=None)
        worker, message = self._replies.pop(ticket)
        outcome: Outcome[list[Batch]] = unpack(message, worker.borrow)
        return outcome

    def forget(self, tickets: Sequence[int]) -> None:
        """See `Pool`."""
        for ticket in tickets:
            self._drop(self._replies.pop(ticket, None))
        for worker in self._workers:
            left = worker.tickets.intersection(tickets)
            worker.tickets -= left
            try:
                worker.send(-1, None, tuple(left))
            except OSError:
                self._raise_death(worker)

    def close(self) -> None:
        """See `Pool`."""
        if self._closing is not None:
            self._closing()
        self._workers, self._replies, self._closing = [], {}, None

    def _start(self) -> None:
        context = torch.multiprocessing.get_context(self._start_method())
        with block_sigint():  # what has begun is known to who ends it
            self._closing = weakref.finalize(self, _close, self._workers, os.getpid())
            try:
                for number in range(self._num_workers):
                    self._workers.append(_Worker(context, self._pipeline, number, self._num_workers))
            except BaseException:
                self.close()
                raise

    def _receive_all(self, timeout_s: float | None) -> None:
        """Take what has come, and wait for something if there is time."""
        by_handle: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_handle[worker.connection] = by_handle[worker.process.sentinel] = worker
        ready = connections.wait(list(by_handle), timeout_s)
        for worker in dict.fromkeys(by_handle[handle] for handle in ready):
            try:
                while worker.connection.poll():  # what a worker sent before it died counts
                    self._keep(worker, worker.receive())
            except (EOFError, OSError):
                self._raise_death(worker)
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
        msg = f"a worker process died: {death}."
        raise PipelineError(f"{msg}\n  Often memory ran out: try fewer workers, a smaller shuffle, or smaller batches.")


def _close(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no workers
        return
    with block_sigint():
        for worker in workers:
            try:
                worker.connection.send(None)
                worker.connection.close()
            except OSError:
                pass  # it is gone
        deadline = time.monotonic() + _PATIENCE_S
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
            worker.process.close()


# In the worker process.


def _serve(connection: Connection, pipeline: Any, number: int, num_workers: int) -> None:
    """Work until the other side says None or is gone."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    _seed(pipeline, number, num_workers)
    make = pipeline.start(number, num_workers)
    with contextlib.suppress(EOFError, OSError):  # the main process is gone, or does not want any more
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
        """Send what came of a job; the error instead, where that does not pickle.

        Raises:
            OSError: The main process is gone.
        """
        outcome.where = self._where
        try:
            message = pack(outcome, self.memory)
        except BaseException as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            message = pack(Outcome(error=err, where=self._where), self.memory)
        with self._lock:
            new = {number: self.memory.hold(number) for number in message.blocks - self._known}
            dropped = [self.memory.dropped.popleft() for _ in range(len(self.memory.dropped))]
            known = self._known.intersection(dropped)
            sizes = tuple((number, block.num_bytes) for number, block in new.items())
            self._connection.send(Reply(ticket, message, sizes, tuple(known)))
            self._known = (self._known - known) | new.keys()
            for number, block in new.items():
                assert isinstance(block, SharedBlock)
                assert block.file is not None
                reduction.send_handle(self._connection, block.file, None)
                block.close_file()
                self.memory.give_back(number)


def _serve_alone(channel: _Channel, make: Callable[..., Outcome[list[Batch]]]) -> None:
    requests: deque[tuple[int, Any]] = deque()
    task = Here()
    while True:
        while not requests or channel.has_request():
            request = channel.request()
            if request is None:
                return
            if request.forgotten:
                requests = deque(kept for kept in requests if kept[0] not in request.forgotten)
            if request.job is not None:
                requests.append((request.ticket, request.job))
        ticket, job = requests.popleft()
        channel.answer(ticket, make(job, channel.memory, task))


def _serve_threads(channel: _Channel, make: Callable[..., Outcome[list[Batch]]], num_threads: int) -> None:
    pool = ThreadPool(make, num_threads, channel.memory)
    tasks: dict[int, ThreadTask] = {}

    def finish(ticket: int, task: ThreadTask) -> None:
        tasks.pop(ticket, None)
        if not task.is_cancelled:
            with contextlib.suppress(OSError):  # the main process is gone, which the other thread sees too
                channel.answer(ticket, task.taken())

    while (request := channel.request()) is not None:
        forgotten = [tasks.pop(ticket, None) for ticket in request.forgotten]  # a thread may be about to take it out
        pool.forget([task for task in forgotten if task is not None])
        if request.job is not None:
            tasks[request.ticket] = pool.submit(request.job, functools.partial(finish, request.ticket))
    pool.close()
