"""Threads that make batches, and the worker process: it takes jobs from its pipe, and its threads answer them.

A worker process does not import torch, which takes 1.5 s and 150 MB, unless a stage or a user's function imports it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from wdskit.engine.batch import Batch, BatchMaker
from wdskit.engine.program import Program
from wdskit.loader.memory import Arena, Arenas, Message, keep_freed_memory, pack
from wdskit.loader.watch import print_stack_on_signal
from wdskit.processes import Outcome, end_with_parent
from wdskit.stages.run import Board

JOIN_S = 0.5
"""Longest time that the end of a pool waits for the samples on which threads work."""


class JobThreads:
    """Threads that make the batches of jobs, in the order of the jobs. Each thread makes one job at a time.

    Args:
        maker: Makes the batches.
        arenas: The memory of the batches.
        answer: Called in the thread that has made a job, with the ticket, the outcome and the memory of the batches. It
            is not called for cancelled jobs.
    """

    def __init__(
        self,
        maker: BatchMaker,
        arenas: Arenas,
        answer: Callable[[Any, Outcome[list[Batch]], Arena], None],
    ) -> None:
        self._maker = maker
        self._arenas = arenas
        self._answer = answer
        self._queue: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
        self._live: set[Any] = set()  # tickets of jobs that are neither answered nor cancelled
        self._threads: list[threading.Thread] = []

    def start(self, number: int, begin: Callable[[], object] = lambda: None) -> None:
        """Start threads, each of which first calls `begin`."""

        def run() -> None:
            begin()
            while self.make_next():
                pass

        for at in range(number):
            self._threads.append(threading.Thread(target=run, name=f"wdskit-{at}", daemon=True))
            self._threads[-1].start()

    def submit(self, ticket: Hashable, job: Any) -> None:
        """Open a job, and queue it for the next free thread."""
        self._live.add(ticket)
        self._queue.put((ticket, self._maker.open(job)))

    def make_next(self) -> bool:
        """Wait for the next job, make it and answer. Return False if the threads have to end."""
        queued = self._queue.get()
        if queued is None:
            return False
        ticket, opened = queued
        if ticket in self._live:
            arena = Arena(self._arenas)
            outcome = self._maker(opened, arena, lambda: ticket not in self._live)
            if ticket in self._live:
                self._live.discard(ticket)
                self._answer(ticket, outcome, arena)
            arena.end()
            del outcome  # the traceback of its error refers to this frame
        return True

    def cancel(self, tickets: Iterable[Hashable]) -> None:
        """Cancel jobs: threads that work on them stop after the current sample, and their outcomes are dropped."""
        self._live.difference_update(tickets)

    def end(self) -> bool:
        """Cancel all jobs and end the threads. Return False if a thread still works on its sample after `JOIN_S`."""
        self._live.clear()
        for _ in range(len(self._threads) + 1):  # one more for a consumer who makes the jobs
            self._queue.put(None)
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class Request(NamedTuple):
    """A message from the main process to a worker. Without a job, it also asks the worker to free the memory that no
    batch uses.

    Attributes:
        forgotten: Tickets of cancelled jobs.
        returned: Numbers of memory blocks that the worker can use again.
        ticket: Ticket of the new job.
        job: The new job; None if the message has no new job.
    """

    forgotten: tuple[int, ...]
    returned: tuple[int, ...]
    ticket: int = 0
    job: Any = None


class Reply(NamedTuple):
    """A message from a worker to the main process. If the main process does not have the block of `message` yet, the
    block's file descriptor follows.

    Attributes:
        ticket: Ticket of the job.
        message: The outcome of the job.
        dropped: Numbers of memory blocks that the worker has released.
    """

    ticket: int
    message: Message
    dropped: tuple[int, ...]


def ignore_signals() -> None:
    """Ignore SIGINT (Ctrl-C), SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2. A cluster sends such signals to all processes of a
    job.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def serve(
    connection: Connection, board: Any, program: Program, number: int, num_workers: int, environment: dict[str, str]
) -> None:
    """Run a worker process until the main process sends None or ends.

    Args:
        connection: The worker's end of its pipe to the main process.
        board: The shared memory of its `Board`.
        program: The program of the pipeline.
        number: Number of the worker, from 0.
        num_workers: Number of all workers.
        environment: The environment variables of the process; all other variables are removed.
    """
    end_with_parent()
    os.environ.clear()  # under forkserver, they are the variables at the start of the server
    os.environ.update(environment)
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    print_stack_on_signal()
    keep_freed_memory()
    run = program.run
    run.worker, run.num_workers = number, num_workers
    run.board = Board(board)
    seed_worker(program, number, num_workers)
    arenas, sending = Arenas(is_shared=True), threading.Lock()
    lent: dict[int, Any] = {}  # the bytes of the blocks that the main process uses

    def answer(ticket: int, outcome: Outcome[list[Batch]], arena: Arena) -> None:
        outcome.where = f"worker {number}"
        message = pack_outcome(outcome, arena)
        with _ending_process(), sending, contextlib.suppress(ConnectionError):  # the main process has ended
            dropped = tuple(arenas.dropped.popleft() for _ in range(len(arenas.dropped)))
            if message.block >= 0:
                lent[message.block] = arena.bytes
            connection.send(Reply(ticket, message, dropped))
            if arena.block is not None and message.block >= 0 and not arena.block.is_sent:
                arena.block.send(connection)

    jobs = JobThreads(BatchMaker(program), arenas, answer)

    def receive() -> None:
        with _ending_process(), contextlib.suppress(EOFError, ConnectionError):  # the main process has ended
            while (request := connection.recv()) is not None:
                for block in request.returned:
                    del lent[block]
                jobs.cancel(request.forgotten)
                if request.job is None:
                    arenas.free_pages()
                else:
                    jobs.submit(request.ticket, request.job)
        jobs.end()

    threading.Thread(target=receive, name="wdskit-receive", daemon=True).start()
    jobs.start(run.num_threads - 1)
    while jobs.make_next():  # in the main thread, as users' functions expect
        pass
    jobs.end()


@contextlib.contextmanager
def _ending_process() -> Iterator[None]:
    """Return a context in which an error ends this process. Otherwise the main process would wait for ever."""
    try:
        yield
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)


def pack_outcome(outcome: Outcome[list[Batch]], arena: Arena) -> Message:
    """Return the outcome of a job as a message. If a batch cannot be pickled, the message has only the error."""
    try:
        return pack(outcome, arena)
    except BaseException as err:  # noqa: BLE001 (the consumer receives every error of a worker)
        return Message(pickle.dumps(Outcome(error=err, where=outcome.where)))


def seed_worker(program: Any, number: int, num_workers: int) -> None:
    """Seed the generators of `random`, numpy and torch, and set torch's `get_worker_info`, as torch's DataLoader does.

    The seeds depend on the seed, the rank and the epoch of `program.run`, and on the number of the worker. Torch is
    also limited to one thread. All this is left out if torch is not imported and `run.needs_torch` is False.
    """
    run = program.run
    words = np.random.SeedSequence([run.seed, run.rank_info.rank, number, run.epoch]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 (users may draw from the global generator)
    if "torch" not in sys.modules and not run.needs_torch:
        return
    import torch
    from torch.utils.data._utils import worker as torch_worker

    torch.set_num_threads(1)
    torch.manual_seed(int(words[2]))
    info = {"id": number, "num_workers": num_workers, "seed": int(words[2]), "dataset": program}
    torch_worker._worker_info = torch_worker.WorkerInfo(**info)  # noqa: SLF001 (torch has no public way)
