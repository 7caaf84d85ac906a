"""Workers on a Ray cluster: `loader: {workers: 32, on: "ray"}`.

A worker is an actor (`loader.node.NodeWorker`) that makes batches as a worker process does. Its answers travel through
Ray's object store, whose memory is read-only. A thread of this process (`_Crew.receive`) copies each answer into reused
memory and then frees the object.

If an actor dies, the thread replaces it, and other actors run its jobs again. The consumer still receives each batch
once, in order.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import os
import pickle
import re
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.engine.batch import Batch, BatchFactory
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Program
from wdskit.errors import PipelineError
from wdskit.loader.node import ActorStart, Answer, NodeWorker, find_versions, lacks_module, pickle_by_reference
from wdskit.loader.shared_memory import Bytes, Ring, keep_freed_memory
from wdskit.loader.watch import Watch
from wdskit.pipeline.ray_connection import connect, import_ray, last_line
from wdskit.processes import block_sigint, refuse_fork
from wdskit.text import plural

_MOST_DEATHS = 10
"""Limit for the deaths of workers while they make the same job. At this number, the pool fails."""

_MOST_STARTS = 20
"""Limit for the deaths of a worker before it has started. A start is long, so lost nodes often interrupt it."""

_STORE_RATIO = 0.5
"""Share of the smallest node's object store that the batches in flight of all ranks of a machine may take."""

_JOIN_S = 0.5
_BEGIN, _SLOTS, _LIVE = 0, -1, -2  # in place of a ticket, for answers of these methods of `NodeWorker`

logger = logging.getLogger(__name__)


class _Actor:
    """What the training process knows about one actor.

    Attributes:
        handle: Ray's handle.
        node: Name of its node; empty until the actor has started.
        tickets: Tickets of the jobs that the actor has not answered yet.
        slots: The last answer of `NodeWorker.slots`; None before the first answer.
    """

    def __init__(self, number: int, handle: Any) -> None:
        self.number = number
        self.handle = handle
        self.node = ""
        self.tickets: set[int] = set()
        self.slots: NDArray[np.int64] | None = None


@dataclass
class _SubmittedJob:
    """A job whose outcome was not taken yet.

    Attributes:
        job: The argument of `NodeWorker.make`.
        num_deaths: Number of actors that died while this job was their oldest job.
    """

    job: Any
    num_deaths: int = 0


class _Crew:
    """The actors of a pool and their jobs, from the first job until `close`. A thread runs `receive`.

    Args:
        connection: Ray's module, and a function that ends the connection to the cluster.
        pickled: The program and its `make_factory`, for `NodeWorker.begin`.
        num_workers: Number of actors.
        num_loops: How many jobs an actor makes at the same time.
        program: Gives the number of threads of an actor, and the number of ranks of this machine.
        on: The address of the cluster, for messages.

    Attributes:
        changed: A Condition, whose lock protects the attributes. Notified after each answer or error of an actor.
        done: Maps the ticket of each finished job to its outcome.
        failure: The error that ends the pool; None without an error.
        is_closed: Whether `close` was called.
    """

    def __init__(
        self,
        connection: tuple[ModuleType, Callable[[], None]],
        pickled: bytes,
        num_workers: int,
        num_loops: int,
        program: Program,
        on: str,
    ) -> None:
        # A crew has no reference to its pool, so that a pool without references is collected and closes its crew.
        self._ray, self._disconnect = connection
        self.on, self.num_cpus = on, program.run.num_threads
        self._most_jobs = num_loops + 1  # of one actor: one job waits while the others are made
        self._most_bytes = _store_bytes(self._ray) * _STORE_RATIO / program.run.rank_info.ranks_per_node
        self._owner = os.getpid()
        self.changed = threading.Condition()
        self.done: dict[int, Outcome[list[Batch]]] = {}
        self.failure: BaseException | None = None
        self.is_closed = False
        self._jobs: dict[int, _SubmittedJob] = {}  # the oldest first
        self._queue: list[int] = []  # a heap of tickets that no actor has
        self._job_bytes = 0  # of the largest answer
        self._memory = Ring()
        self._failed_starts = [0] * num_workers
        self._events: SimpleQueue[tuple[_Actor, int, Future[Any]] | None] = SimpleQueue()
        self._kind = self._ray.remote(
            num_cpus=self.num_cpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self._most_jobs + 3,
            scheduling_strategy="SPREAD",
        )(NodeWorker)
        self._pickled = self._ray.put(pickled)
        self.actors = [self._start(number) for number in range(num_workers)]
        self._thread = threading.Thread(target=self.receive, name="wdskit-ray", daemon=True)
        self._thread.start()

    def _start(self, number: int) -> _Actor:
        actor = _Actor(number, self._kind.remote())
        start = ActorStart(number, len(self._failed_starts), socket.gethostname(), str(Path.cwd()), find_versions())
        self._call(actor, _BEGIN, actor.handle.begin, self._pickled, start)
        return actor

    def _call(self, actor: _Actor, ticket: int, method: Any, *given: Any) -> None:
        future = method.remote(*given).future()
        future.add_done_callback(lambda done: self._events.put((actor, ticket, done)))

    def submit(self, ticket: int, job: Any) -> None:
        """Queue a job for the next free actor. The caller holds `changed`."""
        self._jobs[ticket] = _SubmittedJob(job)
        heapq.heappush(self._queue, ticket)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send queued jobs to free actors, the oldest first, as long as their answers fit into the object stores. The
        oldest job of the crew is sent even if its answer does not fit. Before the first answer, whose size is unknown,
        each actor gets one job. The caller holds `changed`.
        """
        most_jobs = self._most_jobs if self._job_bytes else 1
        while self._queue and not self.is_closed:
            free = [each for each in self.actors if each.node and len(each.tickets) < most_jobs]
            ticket = self._queue[0]
            if ticket in self._jobs:
                num_out = len(self._jobs) - len(self._queue)
                has_room = (num_out + 1) * self._job_bytes <= self._most_bytes or ticket == next(iter(self._jobs))
                if not free or not has_room:
                    return
                actor = min(free, key=lambda each: len(each.tickets))
                actor.tickets.add(ticket)
                self._call(actor, ticket, actor.handle.make, ticket, self._jobs[ticket].job)
            heapq.heappop(self._queue)

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Return the outcome of a job in `done`, and remove the job from the crew. The caller holds `changed`."""
        del self._jobs[ticket]
        outcome = self.done.pop(ticket)
        self._dispatch()
        return outcome

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets and drop their outcomes. Unknown tickets have no effect. The caller holds
        `changed`.
        """
        for ticket in tickets:
            self._jobs.pop(ticket, None)
            self.done.pop(ticket, None)
        for actor in self.actors:
            if found := actor.tickets.intersection(tickets):
                with contextlib.suppress(Exception):  # the program has ended its connection
                    actor.handle.cancel.remote(list(found))
        with contextlib.suppress(Exception):  # the next `submit` raises it again
            self._dispatch()

    def free_memory(self) -> None:
        """Free the memory that no batch uses, here and on the nodes."""
        self._memory.free_pages()
        with contextlib.suppress(Exception):  # the program has ended its connection
            for actor in self.actors:
                actor.handle.free_memory.remote()

    def receive(self) -> None:
        """Run the crew's thread: handle the answers of the actors until `close`. An error of this thread is stored in
        `failure`.
        """
        while (event := self._events.get()) is not None:
            try:
                self._receive(*event)
                with self.changed:
                    if not self.is_closed:
                        self._dispatch()
            except Exception as err:  # noqa: BLE001 (otherwise the consumer would wait for ever)
                with self.changed:
                    self._fail(err if self._ray.is_initialized() else _cannot_send(err))
            with self.changed:
                self.changed.notify_all()
            del event

    def _receive(self, actor: _Actor, ticket: int, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            with self.changed:
                if not self.is_closed and ticket != _SLOTS:  # another answer reports a death
                    self._lose(actor, ticket, error)
        elif ticket == _BEGIN:
            outcome: Outcome[str] = future.result()
            with self.changed:
                actor.node, self._failed_starts[actor.number] = outcome.value or "", 0
                if outcome.error is not None:
                    self._fail(outcome.error)
                elif not self.is_closed:
                    self._call(actor, _LIVE, actor.handle.live)  # so that the death of an idle actor is known too
        elif ticket == _SLOTS:
            actor.slots = future.result()
        else:
            with self.changed:
                actor.tickets.discard(ticket)
                self._dispatch()
                sent = self._jobs.get(ticket)
            if sent is None or ticket in self.done:
                return
            found, num_bytes = self._unpack(future.result())
            with self.changed:
                self._job_bytes = max(self._job_bytes, num_bytes)
                if ticket in self._jobs:
                    self.done[ticket] = found

    def _unpack(self, answer: Answer) -> tuple[Outcome[list[Batch]], int]:
        """Return (outcome, size of the answer in bytes). The arrays of the outcome are copied to reused memory.

        If the answer cannot be unpickled, the outcome has this error.
        """
        pickled, arrays = answer
        buffers = [self._copy(array) for array in arrays]
        # The pickle is from our own actor.
        found = Outcome.of(functools.partial(pickle.loads, memoryview(pickled), buffers=buffers))
        return found.value or Outcome(error=found.error), len(pickled) + sum(array.nbytes for array in arrays)

    def _copy(self, array: Bytes) -> Bytes:
        copy: Bytes = self._memory.empty(array.shape, np.uint8)
        copy[:] = array
        return copy

    def _lose(self, actor: _Actor, ticket: int, error: BaseException) -> None:
        """Handle an error that came in place of an answer. If Ray lost the answer or the actor died, queue the job
        again. If the actor died, replace the actor. For any other error, or after too many deaths, set `failure`.
        """
        known = self._ray.exceptions
        who = actor.node or "a node of the cluster"
        is_fatal = isinstance(error, (known.RayTaskError, known.RuntimeEnvSetupError, known.ActorUnschedulableError))
        missing = re.search(r"No module named '([\w.]+)'", str(error))
        if is_fatal or missing or not isinstance(error, known.RayError):
            msg = f"on: a worker on {who} cannot run: {last_line(error)}."
            self._fail(lacks_module(who, missing[1]) if missing else PipelineError(msg))
            return
        oldest = min(actor.tickets, default=ticket)
        actor.tickets.discard(ticket)
        if ticket in self._jobs:
            heapq.heappush(self._queue, ticket)
        is_alive = isinstance(error, known.ObjectLostError) and ticket != _BEGIN
        if is_alive or self.actors[actor.number] is not actor:
            return
        with contextlib.suppress(Exception):
            self._ray.kill(actor.handle)
        if actor.node:
            sent = self._jobs.get(oldest, _SubmittedJob(None))
            sent.num_deaths += 1
            num_deaths, most, when = sent.num_deaths, _MOST_DEATHS, "while it made the same batches"
        else:
            self._failed_starts[actor.number] += 1
            num_deaths, most, when = self._failed_starts[actor.number], _MOST_STARTS, "while it started"
        logger.warning("worker %d on %s died and is replaced: %s.", actor.number, who, last_line(error))
        if num_deaths >= most:
            msg = f"on: a worker died {num_deaths} times {when}, last on {who}: {last_line(error)}."
            advice = "Often memory ran out, or one of your functions ended the process: see the logs of Ray."
            self._fail(PipelineError(f"{msg}\n  {advice}"))
        else:
            self.actors[actor.number] = self._start(actor.number)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def look(self, ticket: int, watch: Watch) -> None:
        """Call `watch.look` for the worker that has the job, or for all workers if none has the job. The caller holds
        `changed`.

        Raises:
            PipelineError: The wait has lasted for the `timeout`.
        """
        actor = next((each for each in self.actors if ticket in each.tickets), None)
        if actor is not None:
            self._call(actor, _SLOTS, actor.handle.slots)
            watch.look(f"worker {actor.number} on {actor.node}", os.getpid(), actor.slots)
        elif any(each.node for each in self.actors):
            watch.look(f"the workers on {self.on}", os.getpid(), None)
        else:
            total, free = (
                each().get("CPU", 0) for each in (self._ray.cluster_resources, self._ray.available_resources)
            )
            asked = f"one of {plural(len(self.actors), 'worker')} on {self.on} ({plural(self.num_cpus, 'CPU')} each)"
            has = f"The cluster has {plural(round(total), 'CPU')}, {free:g} of them free."
            watch.look(asked, os.getpid(), None, start_hint=has)

    def close(self) -> None:
        """End the actors, the thread and the connection to the cluster. Do nothing in a forked process."""
        if os.getpid() != self._owner:  # a forked process has a copy of the crew, but no connection
            return
        with block_sigint():
            with self.changed:
                self.is_closed = True
                self._jobs.clear()
                self.done.clear()
            self._events.put(None)
            if self._ray.is_initialized():  # at the end of the program Ray may be closed already
                for actor in self.actors:
                    with contextlib.suppress(Exception):
                        self._ray.kill(actor.handle)
            if self._thread is not threading.current_thread():  # this thread may collect a pool without references
                self._thread.join(_JOIN_S)
            self.actors, self._pickled, self._kind = [], None, None
            self._disconnect()


def _cannot_send(err: Exception) -> PipelineError:
    """Return the PipelineError for a job that Ray did not take. `err` is Ray's error."""
    msg = f"on: a job cannot be sent to the cluster: {last_line(err)}."
    return PipelineError(f"{msg}\n  Iterate the loader again: it connects anew.")


def _store_bytes(ray: ModuleType) -> float:
    """Return the size in bytes of the smallest object store of a node that is alive; infinity if no size is known."""
    sizes = [node["Resources"].get("object_store_memory", 0.0) for node in ray.nodes() if node["Alive"]]
    return min(filter(None, sizes), default=float("inf"))


class RayPool:
    """A `Pool` of workers on a Ray cluster. They start with the first job.

    Args:
        program: The program of the pipeline.
        make_factory: Called with the program in each actor. Returns the factory that makes the batches.
        num_workers: Number of actors.
        on: "ray" or the address of the cluster.
        watch: Reports long waits for batches.

    Raises:
        PipelineError: Ray is not installed, or a part of the program cannot be sent to other machines.
    """

    def __init__(
        self, program: Program, make_factory: Callable[[Any], BatchFactory], num_workers: int, on: str, watch: Watch
    ) -> None:
        import_ray(PipelineError)
        keep_freed_memory()
        pickled = pickle_by_reference((program, make_factory))
        self._given = (pickled, num_workers, make_factory(program).num_loops, program, on)
        self._watch = watch
        self._next_ticket = 0
        self._owner = os.getpid()
        self._crew: _Crew | None = None
        self._closing: Callable[[], object] | None = None

    def submit(self, job: Any, worker: int | None = None) -> int:  # noqa: ARG002 (any actor)
        """Queue a job for the next free actor and return its ticket. `worker` has no effect.

        Raises:
            PipelineError: The cluster cannot be reached, or the job cannot be sent; the pool is closed then. Or this
                process was forked from the process that has the actors.
        """
        if self._crew is None:
            connection = connect(self._given[-1], PipelineError, starts_cluster=False)
            with block_sigint():  # so that `close` knows every actor
                self._crew, self._owner = _Crew(connection, *self._given), os.getpid()
                self._closing = weakref.finalize(self, self._crew.close)
        refuse_fork(self._owner)
        self._next_ticket += 1
        try:
            with self._crew.changed:
                self._crew.submit(self._next_ticket, job)
        except Exception as err:
            self.close()
            raise _cannot_send(err) from err
        return self._next_ticket

    def take(self, ticket: int) -> Outcome[list[Batch]]:
        """Wait for a job and return its outcome. A ticket is valid for one call.

        Raises:
            PipelineError: The actors cannot run the pipeline, the program has ended the connection to the cluster, or
                the wait has lasted for the `timeout`; the pool is closed then. Or this process was forked from the
                process that has the actors.
            Exception: The thread that handles the answers failed with this error; the pool is closed then.
        """
        refuse_fork(self._owner)
        crew = self._crew
        assert crew is not None
        try:
            with crew.changed:
                self._watch.begin()
                while ticket not in crew.done and crew.failure is None:
                    if not crew.changed.wait(self._watch.step_s):
                        crew.look(ticket, self._watch)
                if ticket in crew.done:
                    return crew.take(ticket)
        except PipelineError:  # the wait was too long
            self.close()
            raise
        except Exception as err:
            self.close()
            raise _cannot_send(err) from err
        self.close()
        assert crew.failure is not None
        raise crew.failure

    def is_ready(self, ticket: int) -> bool:
        """Return True if `take(ticket)` would not wait.

        Raises:
            PipelineError: This process was forked from the process that has the actors.
        """
        refuse_fork(self._owner)
        return self._crew is not None and ticket in self._crew.done

    def forget(self, tickets: Sequence[int]) -> None:
        """Cancel the jobs of these tickets and drop their outcomes. Do nothing in a forked process."""
        if self._crew is not None and not self._crew.is_closed and self._owner == os.getpid():
            with self._crew.changed:
                self._crew.forget(tickets)

    def free_memory(self) -> None:
        """Free the memory that no batch uses, here and on the nodes. Do nothing in a forked process."""
        if self._crew is not None and not self._crew.is_closed and self._owner == os.getpid():
            self._crew.free_memory()

    def close(self) -> None:
        """End the actors, within a second. The next job starts new actors."""
        if self._closing is not None:
            self._closing()
        self._crew, self._closing = None, None
