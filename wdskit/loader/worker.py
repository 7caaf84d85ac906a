"""Threads that make batches, and the worker process: it takes jobs from its pipe, and its threads answer them.

A worker process does not import torch, which takes 1.5 s and 150 MB, unless a stage or a user's function imports it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import numpy as np

from wdskit.engine.batch import Batch, BatchMaker
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Program
from wdskit.loader.memory import Arena, Arenas, keep_freed_memory, pack
from wdskit.processes import end_with_parent
from wdskit.stages.run import Board

STDERR = 2
"""The descriptor for stacks; a notebook's `sys.stderr` has none."""

JOIN_S = 0.5
"""Longest time that the end of a pool waits for the samples on which threads work."""


class JobThreads:
    """Threads that make the batches of jobs, in the order of the jobs. Each thread makes one job at a time.

    Args:
        program: The program of the pipeline.
        answer: Called in the thread that has made a job, with the ticket, the outcome and the memory of the batches.
        is_shared: Whether other processes can map the memory of the batches.

    Attributes:
        arenas: The memory of the batches.
    """

    def __init__(
        self, program: Program, answer: Callable[[int, Outcome[list[Batch]], Arena], None], *, is_shared: bool = False
    ) -> None:
        self.arenas = Arenas(is_shared=is_shared)
        self._maker, self._answer = BatchMaker(program), answer
        self._queue: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._live: set[int] = set()  # tickets of jobs that are neither answered nor cancelled
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

    def submit(self, ticket: int, job: Any) -> None:
        """Open a job, and queue it for the next free thread."""
        self._live.add(ticket)
        self._queue.put((ticket, self._maker.open(job)))

    def make_next(self) -> bool:
        """Wait for the next job, make it and answer. Return False if the threads have to end."""
        queued = self._queue.get()
        if queued is None:
            self._queue.put(None)  # for the next thread
            return False
        ticket, opened = queued
        if ticket in self._live:
            arena = Arena(self.arenas)
            self._answer(ticket, self._maker(opened, arena, lambda: ticket not in self._live), arena)
            self._live.discard(ticket)
            arena.end()
        return True

    def forget(self, tickets: Iterable[int]) -> None:
        """Cancel jobs, and free the memory that no batch uses. Threads that work on these jobs stop after the current
        sample, and answer.
        """
        self._live.difference_update(tickets)
        self.arenas.free_pages()

    def end(self) -> bool:
        """Cancel all jobs and end the threads. Return False if a thread still works on its sample after `JOIN_S`."""
        self._live.clear()
        self._answer = lambda *_: None  # the traceback of an error that was not received refers to this object
        self._queue.put(None)
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


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

    A request of the main process is (tickets of cancelled jobs, numbers of the memory blocks that the worker can use
    again, ticket of a new job, the job); without a job, the worker also frees the memory that no batch uses. An answer
    is (ticket, message with the outcome, numbers of the memory blocks that the worker has released); the file
    descriptor of a new block follows it.

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
    faulthandler.register(signal.SIGUSR2, STDERR)  # prints the stacks of all threads
    keep_freed_memory()
    program.run.board = Board(board)
    seed_worker(program, number, num_workers)
    sending = threading.Lock()
    lent: dict[int, Any] = {}  # the bytes of the blocks that the main process uses

    @_ending_process()
    def answer(ticket: int, outcome: Outcome[list[Batch]], arena: Arena) -> None:
        outcome.where = f"worker {number}"
        message = pack(outcome, arena)
        with sending, contextlib.suppress(ConnectionError):  # the main process has ended
            dropped = [jobs.arenas.dropped.popleft() for _ in range(len(jobs.arenas.dropped))]
            if message.block >= 0:
                lent[message.block] = arena.bytes
            connection.send((ticket, message, dropped))
            if message.block >= 0 and arena.block is not None:
                arena.block.send(connection)

    @_ending_process()
    def receive() -> None:
        with contextlib.suppress(EOFError, ConnectionError):  # the main process has ended
            while (request := connection.recv()) is not None:
                forgotten, returned, ticket, job = request
                for block in returned:
                    del lent[block]
                if job is None:
                    jobs.forget(forgotten)
                else:
                    jobs.submit(ticket, job)
        jobs.end()

    jobs = JobThreads(program, answer, is_shared=True)
    jobs.start(program.run.num_threads - 1)  # before `receive`, which may end them at once
    threading.Thread(target=receive, name="wdskit-receive", daemon=True).start()
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


def seed_worker(program: Any, number: int, num_workers: int) -> None:
    """Make this process a worker of `program.run`: seed the generators of `random`, numpy and torch, and set torch's
    `get_worker_info`, as torch's DataLoader does.

    The seeds depend on the seed, the rank and the epoch of `program.run`, and on the number of the worker. Torch is
    also limited to one thread. Torch is left out if it is not imported and `run.needs_torch` is False.
    """
    run = program.run
    run.worker, run.num_workers = number, num_workers
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
