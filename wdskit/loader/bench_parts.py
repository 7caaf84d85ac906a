"""What a loader is made of, measured without one: reading, and decoding what is in memory, in processes of threads."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from wdskit.dataset.columns import Ints, Spans
from wdskit.errors import PipelineError
from wdskit.loader.failures import Failure
from wdskit.loader.memory import Ring
from wdskit.order.steps import Steps
from wdskit.pipeline.columns import columns_of
from wdskit.pipeline.jobs import Job
from wdskit.pipeline.planned import PlannedPipeline
from wdskit.pipeline.shards import ManySamples
from wdskit.processes import block_sigint, end_with_parent

HELD_SAMPLES = 256
HELD_BYTES = 32 << 20  # they are sent to each process where that is not forked

What = Literal["read", "decode"]
Sample = tuple[str, str, int, dict[str, bytes]]
"""What `OpenShards.read` gives: path, key, part, fields."""


class Task(NamedTuple):
    """What the processes are told to do.

    Attributes:
        what: "read" or "decode".
        threads: In each process.
        seconds: How long.
        first: The step that the first thread begins with, and
        every: how many threads there are in all processes, so that together they take step after step.
    """

    what: What
    threads: int
    seconds: float
    first: int
    every: int


class Done(NamedTuple):
    """What a process did: samples/s of its threads together, samples, their bytes, its CPU time, the step it is at."""

    samples_per_s: float
    num_samples: int
    num_bytes: int
    cpu_s: float
    step: int


class HeldShards:
    """Stands in for `OpenShards`: whatever sample is asked for, one of those in memory comes, in turns."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self._next = itertools.count()

    def __getstate__(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["samples"])  # type: ignore[misc]  # a counter does not pickle

    def read(self, _: int, __: int, ___: object = None) -> Sample:
        """One of the samples."""
        return self.samples[next(self._next) % len(self.samples)]

    def read_many(self, shards: Ints, _: Ints, *, viewed: object) -> ManySamples | None:  # noqa: ARG002 (as OpenShards)
        """Several of them, if they have the same fields."""
        found = [self.read(0, 0) for _ in shards]
        paths, keys, __, samples = zip(*found, strict=True)
        if any(sample.keys() != samples[0].keys() for sample in samples):
            return None
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        spans = {name: Spans(data, [0] * len(data), [*map(len, data)]) for name, data in columns.items()}
        return ManySamples([*paths], [*keys], spans)

    def part(self, _: int) -> int:
        """Of every sample."""
        return 0

    def mean_bytes(self, _: Ints) -> int:
        """Nothing is read."""
        return 0


def hold_samples(pipeline: PlannedPipeline) -> HeldShards:
    """The first samples of the pipeline's order, in memory.

    Raises:
        ShardError: A shard is not right.
    """
    held: list[Sample] = []
    num_bytes = 0
    for shard, sample in zip(*(column.tolist() for column in _take(pipeline, range(HELD_SAMPLES))), strict=True):
        if num_bytes > HELD_BYTES:
            break
        found = pipeline.shards.read(shard, sample)
        held.append(found)
        num_bytes += _size(found)
    return HeldShards(held)


def _take(pipeline: PlannedPipeline, positions: range) -> Any:
    return pipeline.plan.order.take(np.arange(positions.start, positions.stop, positions.step, dtype=np.int64))


def _size(sample: Sample) -> int:
    return sum(map(len, sample[3].values()))


@dataclass
class _Counter:
    """What one thread has done."""

    samples: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: BaseException | None = None


class PartRunner:
    """Runs tasks in this process.

    Args:
        pipeline: Of one thread.
        held: For "decode".
    """

    def __init__(self, pipeline: PlannedPipeline, held: HeldShards) -> None:
        self.reading = pipeline
        self.decoding = _with_shards(pipeline, held)
        plan, place = pipeline.plan, pipeline.run.place
        self.steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)
        self.mean_bytes = sum(map(_size, held.samples)) / len(held.samples)

    def run(self, task: Task, number: int) -> Done:
        """Do a task as process `number`."""
        counters = [_Counter() for _ in range(task.threads)]
        first = task.first + number * task.threads
        works = [(task, first + at, counter) for at, counter in enumerate(counters)]
        threads = [threading.Thread(target=self._thread, args=work) for work in works[1:]]
        cpu_s = time.process_time()
        for thread in threads:
            thread.start()
        self._thread(*works[0])
        for thread in threads:
            thread.join()
        for counter in counters:
            if counter.error is not None:
                raise counter.error
        num_samples = sum(counter.samples for counter in counters)
        num_bytes = sum(counter.num_bytes for counter in counters)
        return Done(
            sum(counter.samples / counter.seconds for counter in counters),
            num_samples,
            num_bytes if task.what == "read" else round(num_samples * self.mean_bytes),
            time.process_time() - cpu_s,
            task.first + task.every * (1 + max(counter.samples for counter in counters) // self.steps.batch),
        )

    def _thread(self, task: Task, step: int, counter: _Counter) -> None:
        torch.set_num_threads(1)  # of this thread
        work = self._read if task.what == "read" else self._decode
        ring = Ring()
        start = time.perf_counter()
        try:
            while counter.seconds < task.seconds:
                counter.num_bytes += work(step, ring)
                counter.samples += self.steps.batch
                counter.seconds = time.perf_counter() - start
                step += task.every
        except BaseException as err:  # noqa: BLE001 (raised by who waits for the thread)
            counter.error = err

    def _read(self, step: int, _: Ring) -> int:
        positions = self.steps.positions(self.reading.run.place.rank, step)
        shards, samples = self.reading.plan.order.take(positions)
        if self.reading.columns is not None:
            many = self.reading.shards.read_many(shards, samples, viewed=lambda _: False)
            if many is not None:
                return sum(sum(spans.stops) - sum(spans.starts) for spans in many.fields.values())
        found = zip(shards.tolist(), samples.tolist(), strict=True)
        return sum(_size(self.reading.shards.read(shard, sample)) for shard, sample in found)

    def _decode(self, step: int, ring: Ring) -> int:
        positions = self.steps.range(self.decoding.run.place.rank, step, step + 1)
        self.decoding.make(Job(0, positions, self.steps.num_samples), ring)
        return 0


def _with_shards(pipeline: PlannedPipeline, shards: Any) -> PlannedPipeline:
    changed = PlannedPipeline.__new__(PlannedPipeline)
    columns = columns_of(shards, pipeline.each, pipeline.batched)
    changed.__dict__.update(pipeline.__getstate__() | {"shards": shards, "columns": columns})
    return changed


class Parts:
    """Processes that read and decode on demand. Use it with `with`.

    Args:
        pipeline: Of one thread.
        processes: How many at most.
        start_method: How they start.
    """

    def __init__(self, pipeline: PlannedPipeline, processes: int, start_method: str) -> None:
        held = hold_samples(pipeline)
        self.sample_bytes = sum(map(_size, held.samples)) / len(held.samples)
        self._step = 0
        context: Any = multiprocessing.get_context(start_method)
        self._ways: list[Any] = []
        self._processes: list[Any] = []
        try:
            with block_sigint():
                for number in range(processes):
                    self._start(context, number, pipeline, held)
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any, number: int, pipeline: PlannedPipeline, held: HeldShards) -> None:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, number, pipeline, held), daemon=True)
        process.start()
        there.close()
        self._ways.append(here)
        self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for way, process in zip(self._ways, self._processes, strict=True):
            process.join()
            way.close()

    def run(self, what: What, *, processes: int, threads: int, seconds: float) -> Done:
        """Let some of the processes work at the same time, and sum up what they did.

        Raises:
            PipelineError: A process died.
            Exception: What reading or decoding raised.
        """
        ways = self._ways[:processes]
        try:
            for way in ways:
                way.send(Task(what, threads, seconds, self._step, processes * threads))
            answers = [way.recv() for way in ways]
        except (EOFError, BrokenPipeError, ConnectionResetError) as err:
            msg = "a process that measured died."
            raise PipelineError(
                f"{msg}\n  Often memory ran out: try smaller batches, or fewer CPUs (taskset)."
            ) from err
        for answer in answers:
            if isinstance(answer, Failure):
                answer.throw()
        self._step = max(done.step for done in answers)
        rates, samples, num_bytes, cpu_s, _ = zip(*answers, strict=True)
        return Done(sum(rates), sum(samples), sum(num_bytes), sum(cpu_s), self._step)


def _serve(way: Any, number: int, pipeline: PlannedPipeline, held: HeldShards) -> None:
    """A process: task after task, until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process hears Ctrl-C and ends this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    torch.set_num_threads(1)
    runner = PartRunner(pipeline, held)
    while True:
        try:
            task = way.recv()
        except EOFError:
            return
        try:
            answer: Any = runner.run(task, number)
        except BaseException as err:  # noqa: BLE001 (every error is the main process's to see)
            answer = Failure.of(err, number)
        way.send(answer)
