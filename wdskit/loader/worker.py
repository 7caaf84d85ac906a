"""A worker process: it makes the batches that it is told to, in one thread or several, and sends them as messages."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from wdskit.engine.by_columns import Work, begin
from wdskit.engine.jobs import Job, Made
from wdskit.engine.read_ahead import Read, ReadAhead
from wdskit.loader.failures import Failure
from wdskit.loader.memory import Ring, SharedBlock
from wdskit.loader.messages import Message, pack
from wdskit.loader.threads import Task, Threads, run_here
from wdskit.processes import end_with_parent


class Order(NamedTuple):
    """What the main process sends: a job under a number; numbers that are not wanted any more; blocks that are free."""

    ticket: int
    job: Job | None
    forgotten: tuple[int, ...]
    returned: tuple[int, ...]


class Reply(NamedTuple):
    """What a worker sends. The descriptors of `new` blocks, each a number and a size, follow it."""

    ticket: int
    content: Message | Failure
    new: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]


def serve(connection: Connection, pipeline: Any, number: int, num_workers: int) -> None:
    """Work until the other side says None or is gone.

    Args:
        connection: To the main process.
        pipeline: A PlannedPipeline.
        number: Of this worker.
        num_workers: How many there are.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    _seed(pipeline, number, num_workers)
    with contextlib.suppress(EOFError, OSError):  # the main process is gone, or does not want any more
        office = _Office(connection, pipeline, number)
        if pipeline.run.num_threads > 1:
            _serve_threads(office)
        else:
            _serve_alone(office)


def _seed(pipeline: Any, number: int, num_workers: int) -> None:
    """Global generators differ from worker to worker, and `get_worker_info` tells which it is, as in torch's loader."""
    run = pipeline.run
    words = np.random.SeedSequence([run.seed, run.place.rank, number]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 (the global one is meant)
    torch.manual_seed(int(words[2]))
    info = {"id": number, "num_workers": num_workers, "seed": int(words[2]), "dataset": pipeline}
    torch_worker._worker_info = torch_worker.WorkerInfo(**info)  # noqa: SLF001 (torch has no public way)


class _Office:
    """Takes orders and sends replies."""

    def __init__(self, connection: Connection, pipeline: Any, number: int) -> None:
        self.pipeline = pipeline
        self.ring = Ring(SharedBlock)
        self._connection = connection
        self._number = number
        self._known: set[int] = set()  # blocks that the main process has
        self._lock = threading.Lock()

    def has_order(self) -> bool:
        """Whether one waits."""
        return self._connection.poll()

    def order(self) -> Order | None:
        """The next one."""
        order: Order | None = self._connection.recv()
        for number in order.returned if order else ():
            self.ring.give_back(number)
        return order

    def making(self, job: Job, read: Read | None = None) -> Work:
        """A job of this pipeline in this memory; `read` are its samples, where they have been read."""
        return begin(self.pipeline, job, self.ring, read)

    def answer(self, ticket: int, make: Callable[[], Made]) -> None:
        """Send what is made, or the error in its place, also that of a value which does not pickle.

        Raises:
            OSError: The main process is gone.
        """
        try:
            message = pack(make(), self.ring)
        except BaseException as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            self._fail(ticket, err)
        else:
            self._send(ticket, message)

    def _send(self, ticket: int, message: Message) -> None:
        with self._lock:
            new = {number: self.ring.hold(number) for number in message.blocks - self._known}
            dropped = [self.ring.dropped.popleft() for _ in range(len(self.ring.dropped))]
            known = self._known.intersection(dropped)
            sizes = tuple((number, block.num_bytes) for number, block in new.items())
            self._connection.send(Reply(ticket, message, sizes, tuple(known)))
            self._known = (self._known - known) | new.keys()
            for number, block in new.items():
                assert isinstance(block, SharedBlock)
                assert block.file is not None
                reduction.send_handle(self._connection, block.file, None)
                block.close_file()
                self.ring.give_back(number)

    def _fail(self, ticket: int, err: BaseException) -> None:
        with self._lock:
            self._connection.send(Reply(ticket, Failure.of(err, self._number), (), ()))


def _serve_alone(office: _Office) -> None:
    orders: deque[tuple[int, Job]] = deque()
    read_ahead = ReadAhead(office.pipeline)
    while True:
        while not orders or office.has_order():
            order = office.order()
            if order is None:
                return
            if order.forgotten:
                orders = deque(kept for kept in orders if kept[0] not in order.forgotten)
            if order.job is not None:
                orders.append((order.ticket, order.job))
        ticket, job = orders.popleft()
        read = read_ahead.take(job, [following for _, following in orders])
        office.answer(ticket, functools.partial(run_here, office.making(job, read)))


def _serve_threads(office: _Office) -> None:
    threads = Threads(office.pipeline.run.num_threads)
    tasks: dict[int, Task] = {}

    def finish(ticket: int, task: Task) -> None:
        tasks.pop(ticket, None)
        with contextlib.suppress(OSError):  # the main process is gone, which the other thread sees too
            office.answer(ticket, task.result)

    while (order := office.order()) is not None:
        forgotten = [tasks.pop(ticket, None) for ticket in order.forgotten]  # a thread may be about to take it out
        threads.forget([task for task in forgotten if task is not None])
        if order.job is not None:
            task = Task(office.making(order.job), functools.partial(finish, order.ticket))
            tasks[order.ticket] = task
            threads.submit(task)
    threads.close()
