"""The loop of a worker, a thread or a process: take a job, make its batches, and answer.

A worker process does not import torch, which takes 1.5 s and 150 MB, unless a stage or a user's function imports it.
"""

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

from wdskit.engine.batch import Batch, BatchFactory
from wdskit.engine.outcome import Outcome
from wdskit.engine.threads import JOIN_S, Threads
from wdskit.loader.shared_memory import Message, Ring, SharedBlock, can_pack, keep_freed_memory, pack
from wdskit.loader.watch import print_stack_on_signal
from wdskit.processes import end_with_parent, when_imported
from wdskit.stages.progress import BOARD_BYTES, Board

BOARD_BLOCK = -1
"""Number of the block that holds the `Board` of a worker process; other blocks are numbered from 0."""


class ReceivedJob:
    """A job that a worker received, with its outcome. The job can be cancelled.

    Args:
        ticket: Number of the job.
        job: Result of `BatchFactory.open` for the job.
    """

    def __init__(self, ticket: int, job: Any) -> None:
        self.ticket = ticket
        self.job = job
        self.cancelled = threading.Event()
        self.done = threading.Event()
        self._outcome: Outcome[list[Batch]] = Outcome()

    def finish(self, outcome: Outcome[list[Batch]]) -> None:
        """Store the outcome for `take`, or drop it if the job is cancelled. Set `done` in both cases."""
        self._outcome = outcome
        if self.cancelled.is_set():  # another thread may have cancelled the job just now
            self.take()
        self.done.set()

    def take(self) -> Outcome[list[Batch]]:
        """Return the outcome. Later calls return an empty outcome."""
        outcome, self._outcome = self._outcome, Outcome()
        return outcome

    def cancel(self) -> None:
        """Cancel the job: its thread stops after the current sample, and the outcome is dropped. Does not wait."""
        self.cancelled.set()
        self.take()  # the traceback of an error refers to this object


def work(
    next_job: Callable[[], ReceivedJob | None],
    factory: BatchFactory,
    memory: Ring,
    answer: Callable[[ReceivedJob, Outcome[list[Batch]]], None],
) -> None:
    """Run the loop of a worker until `next_job` returns None: make the batches of a job, and answer. After a cancelled
    job, the memory that no batch uses is freed.

    Args:
        next_job: Waits for the next job and returns it; None ends the loop.
        factory: Makes the batches.
        memory: The memory of the batches.
        answer: Called with each job and its outcome. The outcome of a cancelled job is empty.
    """
    while (received := next_job()) is not None:
        outcome: Outcome[list[Batch]] = Outcome()
        if not received.cancelled.is_set():
            outcome = factory(received.job, memory, received.cancelled.is_set)
        if received.cancelled.is_set():
            del outcome
            memory.free_pages()
            outcome = Outcome()
        answer(received, outcome)
        del received, outcome  # while this worker waits, it holds no batch


class Request(NamedTuple):
    """A message from the main process to a worker.

    Attributes:
        forgotten: Tickets of cancelled jobs.
        returned: Numbers of memory blocks that the worker can use again.
        ticket: Ticket of the new job; 0 if the message has no new job.
        job: The new job; None if the message has no new job.
        frees_memory: Whether the worker frees the memory that no batch uses. True after an epoch.
    """

    forgotten: tuple[int, ...]
    returned: tuple[int, ...]
    ticket: int = 0
    job: Any = None
    frees_memory: bool = False


class Reply(NamedTuple):
    """A message from a worker to the main process. The worker then sends the file descriptors of the `new` blocks.

    Attributes:
        ticket: Ticket of the job.
        message: The outcome of the job, packed by `pack_outcome`.
        new: (number, size in bytes) of each memory block that the main process does not have yet.
        dropped: Numbers of memory blocks that the worker has released.
    """

    ticket: int
    message: Message
    new: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]


class WorkerSetup(NamedTuple):
    """The settings that are the same for each worker process: the program, the function that makes the `BatchFactory`
    of the program, and the number of workers.
    """

    program: Any
    make_factory: Callable[[Any], BatchFactory]
    num_workers: int


def ignore_signals() -> None:
    """Ignore SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. A cluster sends such signals to all processes of a
    job.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def serve(connection: Connection, start: WorkerSetup, number: int, environment: dict[str, str]) -> None:
    """Run a worker process until the main process sends None or ends.

    Args:
        connection: The worker's end of its pipe to the main process.
        start: The program, the function that makes its `BatchFactory`, and the number of workers.
        number: Number of the worker, from 0.
        environment: The environment variables of the process; all other variables are removed.
    """
    program, make_factory, num_workers = start
    end_with_parent()
    os.environ.clear()  # under forkserver, they are the variables at the start of the server
    os.environ.update(environment)
    ignore_signals()
    print_stack_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    keep_freed_memory()
    run = program.run
    run.worker, run.num_workers = number, num_workers
    seed_worker(program, number, num_workers)
    block = SharedBlock(BOARD_BLOCK, BOARD_BYTES)
    run.board = Board(block.memory)
    with contextlib.suppress(ConnectionError):
        connection.send(Reply(0, Message(b"", ()), ((BOARD_BLOCK, BOARD_BYTES),), ()))  # the worker has started
        block.send(connection)
    factory = make_factory(program)
    channel = _Channel(connection, factory, number)
    others = Threads(factory.num_loops - 1, "batches")
    for _ in range(factory.num_loops - 1):
        others.submit(_work_or_exit, channel, factory)
    work(channel.next_job, factory, channel.memory, channel.answer)
    deadline_s = time.monotonic() + JOIN_S
    others.close(deadline_s)
    factory.close(deadline_s)


def _work_or_exit(channel: _Channel, factory: BatchFactory) -> None:
    try:
        work(channel.next_job, factory, channel.memory, channel.answer)
    except BaseException:  # noqa: BLE001 (otherwise the main process would wait for ever)
        traceback.print_exc()
        os._exit(1)


def seed_worker(program: Any, number: int, num_workers: int) -> None:
    """Seed the generators of `random`, numpy and torch, and set torch's `get_worker_info`, as torch's DataLoader does.

    The seeds depend on the seed, the rank and the epoch of `program.run`, and on the number of the worker. Torch is
    also limited to one thread. If torch is not imported yet, torch is prepared in this way when it is imported.
    """
    run = program.run
    words = np.random.SeedSequence([run.seed, run.rank_info.rank, number, run.epoch]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 (users may draw from the global generator)

    def prepare_torch() -> None:
        import torch
        from torch.utils.data._utils import worker as torch_worker

        torch.set_num_threads(1)
        torch.manual_seed(int(words[2]))
        info = {"id": number, "num_workers": num_workers, "seed": int(words[2]), "dataset": program}
        torch_worker._worker_info = torch_worker.WorkerInfo(**info)  # noqa: SLF001 (torch has no public way)

    when_imported("torch", prepare_torch)


class _Channel:
    """A worker's end of its pipe: receives jobs and sends batches. All threads of the worker use one channel.

    Attributes:
        memory: The memory of the batches.
    """

    def __init__(self, connection: Connection, factory: BatchFactory, number: int) -> None:
        self.memory = Ring(SharedBlock)
        self._connection = connection
        self._factory = factory
        self._where = f"worker {number}"
        self._receiving = threading.Lock()
        self._received: dict[int, ReceivedJob] = {}  # waiting and running jobs, by ticket
        self._waiting: deque[ReceivedJob] = deque()
        self._is_closed = False
        self._sending = threading.Lock()
        self._known: set[int] = set()  # blocks that the main process has

    def next_job(self) -> ReceivedJob | None:
        """Wait for the next job that is not cancelled and return it; None if the worker has to end."""
        with self._receiving:
            while not self._is_closed and (not self._waiting or self._connection.poll()):
                self._receive()
                while self._waiting and self._waiting[0].cancelled.is_set():
                    self._waiting.popleft()
            return None if self._is_closed else self._waiting.popleft()

    def _receive(self) -> None:
        try:
            request: Request | None = self._connection.recv()
        except (EOFError, ConnectionError):  # the main process has ended
            request = None
        if request is None:
            self._is_closed = True
            for received in [*self._received.values()]:
                received.cancel()
            return
        for number in request.returned:
            self.memory.give_back(number)
        for ticket in request.forgotten:
            cancelled = self._received.pop(ticket, None)  # another thread may be answering it
            if cancelled is not None:
                cancelled.cancel()
        if request.frees_memory:
            self.memory.free_pages()
        if request.job is not None:
            received = self._received[request.ticket] = ReceivedJob(request.ticket, self._factory.open(request.job))
            self._waiting.append(received)

    def answer(self, received: ReceivedJob, outcome: Outcome[list[Batch]]) -> None:
        """Send the outcome of a job, packed by `pack_outcome`. If the job is cancelled, or the main process has ended,
        send nothing.

        Raises:
            OSError: A block cannot be sent. The connection cannot be used any more.
        """
        self._received.pop(received.ticket, None)
        if received.cancelled.is_set():
            return
        outcome.where = self._where
        message = pack_outcome(outcome, self.memory)
        with (
            self._sending,
            contextlib.suppress(ConnectionError),
        ):  # the main process has ended; `next_job` then returns None
            new = {number: self.memory.hold(number) for number in message.blocks - self._known}
            dropped = [self.memory.dropped.popleft() for _ in range(len(self.memory.dropped))]
            known = self._known.intersection(dropped)
            sizes = tuple((number, block.num_bytes) for number, block in new.items())
            self._connection.send(Reply(received.ticket, message, sizes, tuple(known)))
            self._known = (self._known - known) | new.keys()
            for number, block in new.items():
                assert isinstance(block, SharedBlock)
                block.send(self._connection)
                self.memory.give_back(number)


def pack_outcome(outcome: Outcome[list[Batch]], memory: Ring) -> Message:
    """Return the outcome of a job as a message. Large tensors and arrays are in blocks of `memory`.

    If a batch cannot be pickled, the message has the batches before it and the error. If no memory or file descriptor
    is left, the message has only the error.
    """
    try:
        return pack(outcome, memory)
    except OSError as err:  # no memory or no descriptors are left
        return Message(pickle.dumps(Outcome(error=err, where=outcome.where)), ())
    except BaseException as err:  # noqa: BLE001 (the consumer receives every error of a worker)
        good = list(itertools.takewhile(can_pack, outcome.value or ()))
        return pack(Outcome(good, err, outcome.where), memory)
