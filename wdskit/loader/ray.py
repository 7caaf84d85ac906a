"""Workers on a Ray cluster: `loader: {workers: 32, on: "ray"}`.

A worker is an actor (`loader.node.NodeWorker`) that makes batches as a worker process does. Its answers travel through
Ray's object store, whose memory is read-only, so each answer is copied when the consumer takes it.

Ray starts an actor again if its process or node dies. The jobs that the actor had go to other actors: with Ray's own
retries they would wait for the actor, which has no place if the cluster has lost its node for good.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from wdskit.engine.batch import Batch
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.loader.memory import Arena, Arenas, Bytes, Message, unpack
from wdskit.loader.node import NodeWorker, describe_versions
from wdskit.loader.pools import Pool
from wdskit.pipeline.ray_connection import connect, import_ray, last_line
from wdskit.pipeline.settings import LoaderSpec
from wdskit.processes import block_sigint
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
    """A job without an answer.

    Attributes:
        job: The argument of `NodeWorker.make`.
        actor: The actor that has the job; None if the job waits for an actor.
        num_losses: Number of times that the job was lost with its actor.
    """

    job: Any
    actor: _Actor | None = None
    num_losses: int = 0


class RayPool(Pool):
    """A `Pool` of workers on a Ray cluster. All calls of Ray are in the consumer's thread.

    Raises:
        PipelineError: Ray is not installed.
        Exception: A part of the program cannot be pickled.
    """

    def __init__(self, program: Program, spec: LoaderSpec) -> None:
        super().__init__(program, spec)
        self._ray = import_ray(PipelineError)
        self._pickled = self._ray.cloudpickle.dumps(program)
        self._num_cpus = program.run.num_threads
        self._most_jobs = self._num_cpus + 1  # one job waits while the others are made
        self._on = str(spec.on)
        self._arenas = Arenas()
        self._actors: list[_Actor] = []
        self._jobs: dict[int, _Job] = {}  # by ticket, the oldest first

    def _start(self) -> None:
        self._ray, _ = connect(self._on, PipelineError, starts_cluster=False)
        kind = self._ray.remote(
            num_cpus=self._num_cpus,
            max_restarts=_MOST_RESTARTS,
            max_task_retries=0,
            max_concurrency=self._most_jobs + 2,
            scheduling_strategy="SPREAD",
        )(NodeWorker)
        start = self._spec.workers, socket.gethostname(), str(Path.cwd()), describe_versions()
        self._program_ref = self._ray.put(np.frombuffer(self._pickled, np.uint8))
        self._actors, self._jobs = [], {}
        self._ending = Finalize(self, _kill, (self._ray, self._actors), exitpriority=0)
        for number in range(self._spec.workers):
            self._actors.append(_Actor(kind.remote(number, *start), number))
            self._begin(self._actors[-1])

    def _begin(self, actor: _Actor) -> None:
        """Ask an actor that starts for its host. Ray asks the next process of the actor if the process dies."""
        self._call(actor, None, actor.handle.begin.options(max_task_retries=-1))

    def _call(self, actor: _Actor, ticket: int | None, method: Any, *given: Any) -> None:
        events = self._events  # a callback has no reference to the pool, so that a dropped pool is closed
        answer = method.remote(self._program_ref, *given).future()
        answer.add_done_callback(lambda answer: events.put((actor, ticket, answer)))

    def _send(self, ticket: int, job: Any) -> None:
        self._jobs[ticket] = _Job(job)
        self._send_jobs()

    def _send_jobs(self) -> None:
        """Send the jobs that wait to the actors with the fewest jobs, the oldest job first."""
        for ticket, job in self._jobs.items():
            if job.actor is None:
                free = [each for each in self._actors if each.host and each.num_jobs < self._most_jobs]
                if not free:
                    return
                job.actor = min(free, key=lambda each: each.num_jobs)
                job.actor.num_jobs += 1
                self._call(job.actor, ticket, job.actor.handle.make, job.job)

    def _handle(self, *event: Any) -> None:
        """Handle the answer of an actor to a job, or to `_begin` without a ticket. A lost job waits for an actor again.

        Raises:
            PipelineError: The actor cannot run the pipeline, or the job was lost too often.
        """
        actor, ticket, answer = event
        error, known = answer.exception(), self._ray.exceptions
        is_lost = isinstance(error, known.RayError) and not isinstance(error, known.RayTaskError)
        if error is not None and (ticket is None or not is_lost):
            where = actor.host or f"a node of {self._on}"
            raise PipelineError(f"on: a worker on {where} cannot run: {last_line(error)}.\n  {_NEEDS}.") from error
        if ticket is None:
            actor.host = answer.result()
        else:
            actor.num_jobs -= 1
            if error is None:
                self._jobs.pop(ticket, None)
                self._keep(ticket, partial(_unpack_copy, self._arenas, *answer.result()))
            else:
                self._lose(actor, self._jobs.get(ticket, _Job(None)), error)
        self._send_jobs()

    def _lose(self, actor: _Actor, job: _Job, error: Exception) -> None:
        """Let a job that was lost with its actor wait for an actor again. PipelineError: It was lost too often."""
        job.actor = None
        job.num_losses += 1
        where = f"worker {actor.number}{actor.host and f' on {actor.host}'}"
        if job.num_losses >= _MOST_LOSSES:
            msg = f"on: a worker died {job.num_losses} times at the same batches: {where}: {last_line(error)}."
            advice = "Often memory ran out, or one of your functions ended the process: see the logs of Ray."
            raise PipelineError(f"{msg}\n  {advice}") from error
        if actor.host:
            logger.warning("%s died and starts again: %s.", where, last_line(error))
            actor.host = ""
            self._begin(actor)

    def _forget(self, tickets: Sequence[int]) -> None:
        """Free the memory that no batch uses, in this process. The actors still make the jobs that they have."""
        for ticket in tickets:
            self._jobs.pop(ticket, None)
        self._arenas.free_pages()

    def _look(self, ticket: int) -> None:
        """Call `_report` for the worker that has a job, or for all workers if no worker has the job."""
        actor = self._jobs[ticket].actor
        if actor is not None:
            self._report(f"worker {actor.number} on {actor.host}")
            return
        total, free = self._ray.cluster_resources().get("CPU", 0), self._ray.available_resources().get("CPU", 0)
        self._report(
            f"one of {plural(self._spec.workers, 'worker')} on {self._on} ({plural(self._num_cpus, 'CPU')} each)",
            start_hint=f"The cluster has {plural(round(total), 'CPU')}, {free:g} of them free.",
        )


def _unpack_copy(arenas: Arenas, message: Message, block: Bytes | None) -> Outcome[list[Batch]]:
    """Return the outcome of a message. Its arrays are in memory of `arenas`, because Ray's memory is read-only."""
    if block is not None:
        arena = Arena(arenas)
        copied = arena.empty(block.shape, np.uint8)
        arena.end()
        copied[:] = block
        block = copied
    # The pickle is from our own actor. Its classes may not exist here.
    found: Outcome[Outcome[list[Batch]]] = Outcome.of(unpack, message, block)
    return found.value or Outcome(error=found.error)


def _kill(ray: ModuleType, actors: Sequence[_Actor]) -> None:
    if ray.is_initialized():  # the program may have closed Ray already
        with block_sigint():
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor.handle)
