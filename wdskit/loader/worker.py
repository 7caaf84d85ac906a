"""A worker is a loop: it takes a job, makes its batches, and answers. It is a thread, or a process."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from wdskit.engine.batch import Batch, BatchFactory
from wdskit.engine.outcome import Outcome
from wdskit.engine.threads import JOIN_S, Threads
from wdskit.loader.shared_memory import Message, Ring, SharedBlock, pack
from wdskit.processes import end_with_parent
from wdskit.stages.progress import BOARD_BYTES, Board

BOARD_BLOCK = -1
"""Number of the block in which a worker process says what it works on; others are numbered from 0."""


class Task:
    """A job in a worker.

    Args:
        ticket: Its number.
        job: As `BatchFactory.open` returns it.
    """

    def __init__(self, ticket: int, job: Any) -> None:
        self.ticket = ticket
        self.job = job
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self._outcome: Outcome[list[Batch]] = Outcome()

    def finish(self, outcome: Outcome[list[Batch]]) -> None:
        """Keep the outcome for `take`."""
        self._outcome = outcome
        if self.cancelled.is_set():  # perhaps since a moment
            self.take()
        self.done.set()

    def take(self) -> Outcome[list[Batch]]:
        """Return the outcome, once."""
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def cancel(self) -> None:
        """Let the job end with its present sample. Its error goes too: the error's traceback refers to this task."""
        self.cancelled.set()
        self.take()


def work(
    next_task: Callable[[], Task | None],
    factory: BatchFactory,
    memory: Ring,
    answer: Callable[[Task, Outcome[list[Batch]]], None],
) -> None:
    """A worker: make the batches of one job after the other, and answer, until there are no more jobs."""
    while (task := next_task()) is not None:
        outcome: Outcome[list[Batch]] = Outcome()
        if not task.cancelled.is_set():
            outcome = factory(task.job, memory, task.cancelled.is_set)
        if task.cancelled.is_set():
            del outcome
            memory.free_pages()
            outcome = Outcome()
        answer(task, outcome)
        del task, outcome  # while this worker waits, it holds no batch


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


class Start(NamedTuple):
    """What each worker process receives, apart from its number and the environment."""

    program: Any
    make_factory: Callable[[Any], BatchFactory]
    num_workers: int


def serve(connection: Connection, start: Start, number: int, environment: dict[str, str]) -> None:
    """Work until the main process says None or is gone."""
    program, make_factory, num_workers = start
    end_with_parent()
    os.environ.clear()  # under forkserver it is the one with which the server started: without the keys that came later
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    run = program.run
    run.worker, run.num_workers = number, num_workers
    _seed(program, number, num_workers)
    block = SharedBlock(BOARD_BLOCK, BOARD_BYTES)
    run.board, run.is_watched = Board(block.memory), True
    with contextlib.suppress(ConnectionError):
        connection.send(Reply(0, Message(b"", ()), ((BOARD_BLOCK, BOARD_BYTES),), ()))  # it has started
        block.send(connection)
    factory = make_factory(program)
    channel = _Channel(connection, factory, number)
    others = Threads(factory.num_loops - 1, "batches")
    for _ in range(factory.num_loops - 1):
        others.submit(_work_or_exit, channel, factory)
    work(channel.next_task, factory, channel.memory, channel.answer)
    deadline_s = time.monotonic() + JOIN_S
    others.close(deadline_s)
    factory.close(deadline_s)


def _work_or_exit(channel: _Channel, factory: BatchFactory) -> None:
    try:
        work(channel.next_task, factory, channel.memory, channel.answer)
    except BaseException:  # noqa: BLE001 (or the main process would wait for ever)
        traceback.print_exc()
        os._exit(1)


def _seed(program: Any, number: int, num_workers: int) -> None:
    """Global generators differ from worker to worker, and `get_worker_info` says which it is, as in torch's loader."""
    run = program.run
    words = np.random.SeedSequence([run.seed, run.rank_info.rank, number]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 (the global one is meant)
    torch.manual_seed(int(words[2]))
    info = {"id": number, "num_workers": num_workers, "seed": int(words[2]), "dataset": program}
    torch_worker._worker_info = torch_worker.WorkerInfo(**info)  # noqa: SLF001 (torch has no public way)


class _Channel:
    """A worker's end of its pipe: jobs come in, batches go out. The loops of the worker share it.

    Attributes:
        memory: Where batches are written.
    """

    def __init__(self, connection: Connection, factory: BatchFactory, number: int) -> None:
        self.memory = Ring(SharedBlock)
        self._connection = connection
        self._factory = factory
        self._where = f"worker {number}"
        self._receiving = threading.Lock()
        self._tasks: dict[int, Task] = {}  # by ticket: those that wait, and those at work
        self._waiting: deque[Task] = deque()
        self._is_closed = False
        self._sending = threading.Lock()
        self._known: set[int] = set()  # blocks that the main process has

    def next_task(self) -> Task | None:
        """Wait for the next job that is not cancelled; None if no more are wanted. All jobs that have come are opened
        first, so that what they need from a store is on its way.
        """
        with self._receiving:
            while not self._is_closed and (not self._waiting or self._connection.poll()):
                self._receive()
                while self._waiting and self._waiting[0].cancelled.is_set():
                    self._waiting.popleft()
            return None if self._is_closed else self._waiting.popleft()

    def _receive(self) -> None:
        try:
            request: Request | None = self._connection.recv()
        except (EOFError, ConnectionError):  # the main process is gone
            request = None
        if request is None:
            self._is_closed = True
            for task in [*self._tasks.values()]:
                task.cancel()
            return
        for number in request.returned:
            self.memory.give_back(number)
        for ticket in request.forgotten:
            cancelled = self._tasks.pop(ticket, None)  # another loop may be about to answer it
            if cancelled is not None:
                cancelled.cancel()
        if request.rests:
            self.memory.free_pages()
        if request.job is not None:
            task = self._tasks[request.ticket] = Task(request.ticket, self._factory.open(request.job))
            self._waiting.append(task)

    def answer(self, task: Task, outcome: Outcome[list[Batch]]) -> None:
        """Send the outcome of a job that was not cancelled; if a batch does not pickle, those before it and the error.

        Raises:
            OSError: A block cannot be sent: nothing more can be.
        """
        self._tasks.pop(task.ticket, None)
        if task.cancelled.is_set():
            return
        outcome.where = self._where
        try:
            message = pack(outcome, self.memory)
        except OSError as err:  # there is no more memory or no more descriptors
            message = Message(pickle.dumps(Outcome(error=err, where=self._where)), ())
        except BaseException as err:  # noqa: BLE001 (every error of a worker is the consumer's to see)
            good = list(itertools.takewhile(_pickles, outcome.value or ()))
            message = pack(Outcome(good, err, self._where), self.memory)
        with self._sending, contextlib.suppress(ConnectionError):  # the main process is gone, as the next request shows
            new = {number: self.memory.hold(number) for number in message.blocks - self._known}
            dropped = [self.memory.dropped.popleft() for _ in range(len(self.memory.dropped))]
            known = self._known.intersection(dropped)
            sizes = tuple((number, block.num_bytes) for number, block in new.items())
            self._connection.send(Reply(task.ticket, message, sizes, tuple(known)))
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
