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

from wdskit.engine.batch import Batch, Maker
from wdskit.engine.outcome import Outcome
from wdskit.loader.memory import Arena, Arenas, Block, Message, can_pack, keep_freed_memory, pack
from wdskit.loader.watch import print_stack_on_signal
from wdskit.processes import end_with_parent, when_imported
from wdskit.stages.progress import BOARD_BYTES, Board

BOARD_BLOCK = -1
"""Number of the block that holds the `Board` of a worker process; other blocks are numbered from 0."""


JOIN_S = 0.5
"""Longest time that the end of a pool waits for the samples on which threads work."""


class ReceivedJob:
    """A job that a worker received, with its outcome. The job can be cancelled.

    Args:
        ticket: Number of the job.
        job: Result of `Maker.open` for the job.
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
    maker: Maker,
    arenas: Arenas,
    answer: Callable[[ReceivedJob, Outcome[list[Batch]], Arena], None],
) -> None:
    """Run the loop of a worker until `next_job` returns None: make the batches of a job, and answer. After a cancelled
    job, the memory that no batch uses is freed.

    Args:
        next_job: Waits for the next job and returns it; None ends the loop.
        maker: Makes the batches.
        arenas: The memory of the batches.
        answer: Called with each job, its outcome, and the memory of its batches. The outcome of a cancelled job is
            empty.
    """
    while (received := next_job()) is not None:
        outcome: Outcome[list[Batch]] = Outcome()
        arena = Arena(arenas)
        if not received.cancelled.is_set():
            outcome = maker(received.job, arena, received.cancelled.is_set)
        if received.cancelled.is_set():
            del outcome
            arenas.free_pages()
            outcome = Outcome()
        answer(received, outcome, arena)
        arena.end()
        del received, outcome, arena  # while this worker waits, it holds no batch


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
    """A message from a worker to the main process. The worker then sends the file descriptor of the new block, if there
    is one.

    Attributes:
        ticket: Ticket of the job.
        message: The outcome of the job, packed by `pack_outcome`.
        new_bytes: Size of the block of the message, if the main process does not have the block yet; else 0.
        dropped: Numbers of memory blocks that the worker has released.
    """

    ticket: int
    message: Message
    new_bytes: int = 0
    dropped: tuple[int, ...] = ()


class WorkerSetup(NamedTuple):
    """The settings that are the same for each worker process: the program, the function that makes the `Maker` of the
    program, and the number of workers.
    """

    program: Any
    make_maker: Callable[[Any], Maker]
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
        start: The program, the function that makes its `Maker`, and the number of workers.
        number: Number of the worker, from 0.
        environment: The environment variables of the process; all other variables are removed.
    """
    program, make_maker, num_workers = start
    end_with_parent()
    os.environ.clear()  # under forkserver, they are the variables at the start of the server
    os.environ.update(environment)
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    print_stack_on_signal()
    keep_freed_memory()
    run = program.run
    run.worker, run.num_workers = number, num_workers
    seed_worker(program, number, num_workers)
    block = Block(BOARD_BLOCK, BOARD_BYTES, is_shared=True)
    run.board = Board(block.memory)
    with contextlib.suppress(ConnectionError):
        connection.send(Reply(0, Message(b"", BOARD_BLOCK, ()), BOARD_BYTES))  # the worker has started
        block.send(connection)
    channel = _Channel(connection, make_maker(program), number)
    threads = [
        threading.Thread(target=channel.work, name=f"wdskit-{at}", daemon=True) for at in range(1, run.num_threads)
    ]
    for thread in threads:
        thread.start()
    channel.work()
    deadline_s = time.monotonic() + JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


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
    """A worker's end of its pipe: receives jobs and sends batches. All threads of the worker use one channel."""

    def __init__(self, connection: Connection, maker: Maker, number: int) -> None:
        self._arenas = Arenas(is_shared=True)
        self._connection = connection
        self._maker = maker
        self._where = f"worker {number}"
        self._receiving = threading.Lock()
        self._received: dict[int, ReceivedJob] = {}  # waiting and running jobs, by ticket
        self._waiting: deque[ReceivedJob] = deque()
        self._is_closed = False
        self._sending = threading.Lock()
        self._known: set[int] = set()  # blocks that the main process has

    def work(self) -> None:
        """Make jobs until the main process sends None or ends. If the pipe fails, end this process."""
        try:
            work(self._next_job, self._maker, self._arenas, self._answer)
        except BaseException:  # noqa: BLE001 (otherwise the main process would wait for ever)
            traceback.print_exc()
            os._exit(1)

    def _next_job(self) -> ReceivedJob | None:
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
        self._arenas.returned.extend(request.returned)
        for ticket in request.forgotten:
            cancelled = self._received.pop(ticket, None)  # another thread may be answering it
            if cancelled is not None:
                cancelled.cancel()
        if request.frees_memory:
            self._arenas.free_pages()
        if request.job is not None:
            received = self._received[request.ticket] = ReceivedJob(request.ticket, self._maker.open(request.job))
            self._waiting.append(received)

    def _answer(self, received: ReceivedJob, outcome: Outcome[list[Batch]], arena: Arena) -> None:
        """Send the outcome of a job, packed by `pack_outcome`. If the job is cancelled, or the main process has ended,
        send nothing.

        Raises:
            OSError: A block cannot be sent. The connection cannot be used any more.
        """
        self._received.pop(received.ticket, None)
        if received.cancelled.is_set():
            return
        outcome.where = self._where
        message, block = pack_outcome(outcome, arena), arena.block
        with self._sending, contextlib.suppress(ConnectionError):  # `_next_job` returns None if the main process ended
            dropped = {self._arenas.dropped.popleft() for _ in range(len(self._arenas.dropped))} & self._known
            new = block if block is not None and message.block >= 0 and message.block not in self._known else None
            self._connection.send(
                Reply(received.ticket, message, new.num_bytes if new is not None else 0, tuple(dropped))
            )
            self._known -= dropped
            if new is not None:
                self._known.add(new.number)
                new.send(self._connection)


def pack_outcome(outcome: Outcome[list[Batch]], arena: Arena) -> Message:
    """Return the outcome of a job as a message. Large tensors and arrays are in the arena.

    If a batch cannot be pickled, the message has the batches before it and the error. If no memory or file descriptor
    is left, the message has only the error.
    """
    try:
        return pack(outcome, arena)
    except OSError as err:  # no memory or no descriptors are left
        return Message(pickle.dumps(Outcome(error=err, where=outcome.where)), -1, ())
    except BaseException as err:  # noqa: BLE001 (the consumer receives every error of a worker)
        good = list(itertools.takewhile(can_pack, outcome.value or ()))
        return pack(Outcome(good, err, outcome.where), arena)
