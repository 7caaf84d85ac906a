"""The worker processes of a planned loader: they are told which batches to make, and are stateless otherwise."""

from __future__ import annotations

import mmap
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection as connections
from multiprocessing import reduction
from typing import Any

import torch.multiprocessing

from wdskit.engine.jobs import Job, Made
from wdskit.errors import PipelineError
from wdskit.loader.failures import Failure
from wdskit.loader.memory import Bytes, lent
from wdskit.loader.messages import Message, unpack
from wdskit.loader.worker import Order, Reply, serve
from wdskit.processes import block_sigint

_PATIENCE_S = 1.0  # for a worker that is in the midst of a batch when it is told to go; then it is killed


class _Worker:
    """One process, as the main process sees it."""

    def __init__(self, context: Any, pipeline: Any, number: int, num_workers: int) -> None:
        self.number = number
        self.connection, theirs = context.Pipe()
        arguments = (theirs, pipeline, number, num_workers)
        self.process = context.Process(target=serve, args=arguments, name=f"wdskit-worker-{number}", daemon=True)
        self.process.start()
        theirs.close()
        self.tickets: set[int] = set()
        self.blocks: dict[int, mmap.mmap] = {}
        self.returned: deque[int] = deque()  # filled in the midst of anything

    def send(self, ticket: int, job: Job | None, forgotten: Sequence[int] = ()) -> None:
        """Ask it to make a batch, or what it need not make."""
        returned = tuple(self.returned.popleft() for _ in range(len(self.returned)))
        self.connection.send(Order(ticket, job, tuple(forgotten), returned))
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

    def lend(self, block: int) -> Bytes:
        """All bytes of a block of a message, until they are collected."""
        return lent(self.blocks[block], self.returned, block)

    @property
    def death(self) -> str:
        """How it ended."""
        self.process.join(_PATIENCE_S)
        code = self.process.exitcode
        how = "is gone" if code is None else f"exited with status {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"worker {self.number} (pid {self.process.pid}) {how}"


class Crew:
    """Worker processes that make batches. They start with the first job.

    Args:
        pipeline: A PlannedPipeline; its threads are those of each process.
        num_workers: How many processes.
        start_method: How they start, asked when they do.
    """

    def __init__(self, pipeline: Any, num_workers: int, start_method: Any) -> None:
        self._pipeline = pipeline
        self._num_workers = num_workers
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._replies: dict[int, tuple[_Worker, Message | Failure]] = {}
        self._next_ticket = 0
        self._closing: Any = None

    def submit(self, job: Job) -> int:
        """Have a batch made by the worker that has least to do; gives its ticket."""
        if not self._workers:
            self._start()
        self._receive_all(timeout_s=0)
        worker = min(self._workers, key=lambda worker: len(worker.tickets))
        self._next_ticket += 1
        try:
            worker.send(self._next_ticket, job)
        except OSError:
            self._raise_death(worker)
        return self._next_ticket

    def wait(self, ticket: int) -> Made:
        """The batch of a ticket, once.

        Raises:
            PipelineError: A worker died.
            Exception: What was raised in its place.
        """
        while ticket not in self._replies:
            self._receive_all(timeout_s=None)
        worker, content = self._replies.pop(ticket)
        if isinstance(content, Failure):
            content.throw()
        made: Made = unpack(content, worker.lend)
        return made

    def is_ready(self, ticket: int) -> bool:
        """Whether that batch has come, as far as is known since the last was submitted."""
        return ticket in self._replies

    def forget(self, tickets: Sequence[int]) -> None:
        """Do without batches that nobody has got."""
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
        """End the processes."""
        if self._closing is not None:
            self._closing()
        self._workers, self._replies, self._closing = [], {}, None

    def _start(self) -> None:
        context = torch.multiprocessing.get_context(self._start_method())
        with block_sigint():
            for number in range(self._num_workers):
                self._workers.append(_Worker(context, self._pipeline, number, self._num_workers))
        self._closing = weakref.finalize(self, _close, self._workers, os.getpid())

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
            self._replies[reply.ticket] = worker, reply.content
        else:
            self._drop((worker, reply.content))

    def _drop(self, found: tuple[_Worker, Message | Failure] | None) -> None:
        if found is not None and isinstance(found[1], Message):
            found[0].returned.extend(found[1].blocks)

    def _raise_death(self, worker: _Worker) -> None:
        death = worker.death
        self.close()
        msg = f"a worker process died: {death}."
        raise PipelineError(f"{msg}\n  Often memory ran out: try fewer workers, or more threads in each.")


def _close(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a forked process has a copy, and no workers
        return
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
