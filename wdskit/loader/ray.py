"""Workers on a Ray cluster: `loader: {workers: 32, on: "ray"}`.

A worker is an actor (`loader.node.NodeWorker`) that makes batches as a worker process does. Its answers travel through
Ray's object store, whose memory is read-only, so each answer is copied when the consumer takes it.

Ray starts an actor again if its process or node dies. The jobs that the actor had go to other actors: with Ray's own
retries they would wait for the actor, which has no place if the cluster has lost its node for good.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np

from wdskit.engine.batch import Batch
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.loader.memory import Arena, Arenas, Bytes, Message, unpack
from wdskit.loader.node import ActorStart, NodeWorker, describe_versions
from wdskit.loader.watch import Watch
from wdskit.pipeline.ray_connection import connect, import_ray, last_line
from wdskit.processes import Outcome, block_sigint
from wdskit.text import plural

logger = logging.getLogger(__name__)

_MOST_LOSSES = 10
"""Limit for the number of times that a job is lost with its actor. At this number, the pool fails."""

_MOST_RESTARTS = 100
"""Number of times that Ray starts an actor again. An actor that dies at each start takes minutes to reach it."""


_NEEDS = (
    "All nodes need the same versions, the modules of your functions, and the shards under the same path or URL. "
    "To send modules, call `ray.init(runtime_env=...)` before the loader is made"
)


@dataclass(eq=False)
class _Actor:
    """What the training process knows about an actor.

    Attributes:
        handle: Ray's handle.
        number: Number of the worker.
        host: Name of its machine; empty while the actor starts.
        num_jobs: Number of jobs that the actor has not answered yet.
    """

    handle: Any
    number: int
    host: str = ""
    num_jobs: int = 0


@dataclass(eq=False)
class _Job:
    """A job whose outcome was not taken yet.

    Attributes:
        job: The argument of `NodeWorker.make`.
        actor: The actor that has the job; None if the job waits for an actor.
        answer: The answer of the actor, when it has come.
        num_losses: Number of times that the job was lost with its actor.
    """

    job: Any
    actor: _Actor | None = None
    answer: tuple[Message, Bytes | None] | None = None
    num_losses: int = 0


class RayPool:
    """A `Pool` of workers on a Ray cluster. They start with the first job. All calls of Ray are in the consumer's
    thread.

    Args:
        program: The program of the pipeline.
        num_workers: Number of actors.
        on: "ray" or the address of the cluster.
        watch: Reports long waits for batches.

    Raises:
        PipelineError: Ray is not installed.
        Exception: A part of the program cannot be pickled.
    """

    def __init__(self, program: Program, num_workers: int, on: str, watch: Watch) -> None:
        self._ray = import_ray(PipelineError)
        self._pickled = self._ray.cloudpickle.dumps(program)
        self._num_workers, self._num_cpus = num_workers, program.run.num_threads
        self._most_jobs = program.run.num_threads + 1  # one job waits while the others are made
        self._on = on
        self._watch = watch
        self._arenas = Arenas()
        self._next_ticket = 0
        self._program: Any = None
        self._actors: list[_Actor] = []
        self._jobs: dict[int, _Job] = {}  # the oldest first
        self._events: SimpleQueue[tuple[_Actor, _Job | None, Future[Any]]] = SimpleQueue()
        self._closing: Callable[[], object] | None = None

    def submit(self, job: Any) -> int:
        """Queue a job for the next free actor and return its ticket.

        Raises:
            PipelineError: The cluster cannot be reached, or the actors cannot run the pipeline.
        """
        if not self._actors:
            self._start()
        self._next_ticket += 1
        self._jobs[self._next_ticket] = _Job(job)
        self._handle_events(0.0)
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. A ticket is valid for one call.

        Raises:
            PipelineError: The actors cannot run the pipeline, the program has ended the connection to the cluster, or
                the wait has lasted for the `timeout`.
        """
        self._watch.begin()
        while self._jobs[ticket].answer is None:
            if not self._handle_events(self._watch.step_s):
                self._look(self._jobs[ticket].actor)
        answer = self._jobs.pop(ticket).answer
        assert answer is not None
        message, block = answer
        if block is not None:  # Ray's memory is read-only
            arena = Arena(self._arenas)
            copied = arena.empty(block.shape, np.uint8)
            arena.end()
            copied[:] = block
            block = copied
        # The pickle is from our own actor. Its classes may not exist here.
        found: Outcome[Outcome[list[Batch]]] = Outcome.of(unpack, message, block)
        return found.value or Outcome(error=found.error)

    def is_ready(self, ticket: int) -> bool:
        """Return True if `take(ticket)` would not wait.

        Raises:
            PipelineError: The errors of `submit`.
        """
        self._handle_events(0.0)
        job = self._jobs.get(ticket)
        return job is not None and job.answer is not None

    def forget(self, tickets: Sequence[int]) -> None:
        """Drop the outcomes of these tickets, and free the memory that no batch uses, in this process. The actors still
        make the jobs that they have.
        """
        for ticket in tickets:
            self._jobs.pop(ticket, None)
        self._arenas.free_pages()

    def close(self) -> None:
        """End the actors, within a second. The next job starts new actors."""
        if self._closing is not None:
            self._closing()
        self._actors, self._jobs, self._events = [], {}, SimpleQueue()
        self._program = self._closing = None

    def _start(self) -> None:
        self._ray, _ = connect(self._on, PipelineError, starts_cluster=False)
        kind = self._ray.remote(
            num_cpus=self._num_cpus,
            max_restarts=_MOST_RESTARTS,
            max_task_retries=0,
            max_concurrency=self._most_jobs + 2,
            scheduling_strategy="SPREAD",
        )(NodeWorker)
        versions, cwd = describe_versions(), str(Path.cwd())
        self._program = self._ray.put(np.frombuffer(self._pickled, np.uint8))
        with block_sigint():  # so that `close` knows every actor
            self._closing = weakref.finalize(self, _kill, self._ray, self._actors, os.getpid())
            for number in range(self._num_workers):
                start = ActorStart(number, self._num_workers, socket.gethostname(), cwd, versions)
                self._actors.append(_Actor(kind.remote(start), number))
                self._begin(self._actors[-1])

    def _begin(self, actor: _Actor) -> None:
        """Ask an actor that starts for its host. Ray asks the next process of the actor if the process dies."""
        self._call(actor, None, actor.handle.begin.options(max_task_retries=-1))

    def _call(self, actor: _Actor, job: _Job | None, method: Any, *given: Any) -> None:
        events = self._events  # a callback has no reference to the pool, so that a dropped pool is closed
        method.remote(self._program, *given).future().add_done_callback(lambda answer: events.put((actor, job, answer)))

    def _handle_events(self, timeout_s: float) -> bool:
        """Handle the answers that have come, and send jobs to free actors. Wait up to `timeout_s` for the first answer.
        Return False if no answer came.
        """
        num_events = 0
        self._send_jobs()
        with contextlib.suppress(Empty):
            while True:
                self._handle(*self._events.get(timeout=0.0 if num_events else timeout_s))
                num_events += 1
        self._send_jobs()
        return num_events > 0

    def _send_jobs(self) -> None:
        """Send the jobs that wait to the actors with the fewest jobs, the oldest job first."""
        for job in self._jobs.values():
            if job.actor is None:
                free = [each for each in self._actors if each.host and each.num_jobs < self._most_jobs]
                if not free:
                    return
                job.actor = min(free, key=lambda each: each.num_jobs)
                job.actor.num_jobs += 1
                self._call(job.actor, job, job.actor.handle.make, job.job)

    def _handle(self, actor: _Actor, job: _Job | None, answer: Future[Any]) -> None:
        """Handle the answer of an actor to a job, or to `_begin` if `job` is None. A lost job waits for an actor again.

        Raises:
            PipelineError: The actor cannot run the pipeline, or the job was lost too often.
        """
        error, known = answer.exception(), self._ray.exceptions
        is_lost = isinstance(error, known.RayError) and not isinstance(error, known.RayTaskError)
        if error is not None and (job is None or not is_lost):
            where = actor.host or f"a node of {self._on}"
            raise PipelineError(f"on: a worker on {where} cannot run: {last_line(error)}.\n  {_NEEDS}.") from error
        if job is None:
            actor.host = answer.result()
            return
        actor.num_jobs -= 1
        if error is None:
            job.answer = answer.result()
            return
        job.actor = None
        job.num_losses += 1
        where = f"worker {actor.number}{actor.host and f' on {actor.host}'}"
        if job.num_losses >= _MOST_LOSSES:
            msg = (
                f"on: a worker died {job.num_losses} times while it made the same batches: {where}: {last_line(error)}."
            )
            advice = "Often memory ran out, or one of your functions ended the process: see the logs of Ray."
            raise PipelineError(f"{msg}\n  {advice}") from error
        if actor.host:
            logger.warning("%s died and starts again: %s.", where, last_line(error))
            actor.host = ""
            self._begin(actor)

    def _look(self, actor: _Actor | None) -> None:
        """Call `watch.look` for the worker that has a job, or for all workers if no worker has the job.

        Raises:
            PipelineError: The wait has lasted for the `timeout`.
        """
        if actor is not None:
            self._watch.look(f"worker {actor.number} on {actor.host}")
            return
        total, free = self._ray.cluster_resources().get("CPU", 0), self._ray.available_resources().get("CPU", 0)
        self._watch.look(
            f"one of {plural(self._num_workers, 'worker')} on {self._on} ({plural(self._num_cpus, 'CPU')} each)",
            start_hint=f"The cluster has {plural(round(total), 'CPU')}, {free:g} of them free.",
        )


def _kill(ray: ModuleType, actors: Sequence[_Actor], owner: int) -> None:
    if os.getpid() == owner and ray.is_initialized():  # a forked process has no connection; Ray may be closed already
        with block_sigint():
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor.handle)
