"""How fast a pipeline reads, and decodes what is in memory, in processes of threads without a loader; and how fast a
loader is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from wdskit.dataset.columns import Ints, Spans
from wdskit.engine.batch import make_batches
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Job, Program
from wdskit.engine.shard_cache import ManySamples
from wdskit.errors import PipelineError
from wdskit.loader.planned import PlannedLoader
from wdskit.loader.shared_memory import Ring
from wdskit.order.steps import Steps
from wdskit.processes import block_sigint, cpu_s_of_tree, end_with_parent

HELD_SAMPLES = 256
HELD_BYTES = 32 << 20  # they are sent to each process where that is not forked

Sample = tuple[str, str, int, dict[str, bytes]]
"""What `ShardCache.read` gives: path, key, part, fields."""


class Part(NamedTuple):
    """What is measured, and by how many at the same time."""

    what: Literal["read", "decode"]
    processes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.what}, {self.processes} x {self.threads}"


class PartRate(NamedTuple):
    """Of all threads of all processes together; CPU milliseconds of a sample."""

    samples_per_s: float
    cpu_ms: float


class HeldSamples:
    """Stands in for `ShardCache`: whatever sample is asked for, one of a few in memory comes, in turns."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self._next = itertools.count()

    def __reduce__(self) -> Any:
        return HeldSamples, (self.samples,)

    def read(self, *_: object) -> Sample:
        """One of the samples."""
        return self.samples[next(self._next) % len(self.samples)]

    def read_many(self, shards: Ints, _: Ints, **__: object) -> ManySamples | None:
        """Several of them, if they have the same fields."""
        paths, keys, _parts, fields = zip(*(self.read() for _ in shards), strict=True)
        if any(each.keys() != fields[0].keys() for each in fields):
            return None
        columns = {name: [each[name] for each in fields] for name in fields[0]}
        spans = {name: Spans(data, [0] * len(data), [*map(len, data)]) for name, data in columns.items()}
        return ManySamples([*paths], [*keys], spans)

    def part(self, _: object) -> int:
        """Of every sample."""
        return 0

    def mean_bytes(self, _: object) -> int:
        """Nothing is read."""
        return 0

    def has_large_samples(self) -> bool:
        """They are in memory."""
        return False


class Parts:
    """Processes that read and decode on demand. Use it with `with`.

    Args:
        program: Of one thread, with an epoch without end.
        processes: How many at most.
        start_method: How they start.

    Attributes:
        sample_bytes: Mean bytes of the fields of the samples that are decoded.

    Raises:
        ShardError: A shard is invalid.
    """

    def __init__(self, program: Program, processes: int, start_method: str) -> None:
        samples: list[Sample] = []
        sizes: list[int] = []
        for shard, sample in zip(*program.plan.order.take(np.arange(HELD_SAMPLES)), strict=True):
            if sum(sizes) > HELD_BYTES:
                break
            samples.append(program.shards.read(int(shard), int(sample)))
            sizes.append(sum(map(len, samples[-1][3].values())))
        self.sample_bytes = sum(sizes) / len(sizes)
        self._step = 0
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        context: Any = multiprocessing.get_context(start_method)
        try:
            with block_sigint():  # this process hears it and kills them
                for _ in range(processes):
                    here, there = context.Pipe()
                    self._pipes.append(here)
                    process = context.Process(target=_serve, args=(there, program, HeldSamples(samples)), daemon=True)
                    process.start()
                    self._processes.append(process)
                    there.close()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def run(self, part: Part, seconds: float) -> PartRate:
        """Let some of the processes work at the same time; they go on with the steps behind those of the last run.

        Raises:
            PipelineError: A process died.
            Exception: What reading or decoding raised.
        """
        pipes = self._pipes[: part.processes]
        num_threads = part.processes * part.threads
        try:
            for number, pipe in enumerate(pipes):
                pipe.send((part, seconds, self._step + number * part.threads, num_threads))
            found = [pipe.recv() for pipe in pipes]
        except (EOFError, BrokenPipeError, ConnectionResetError) as err:
            msg = "a process that measured died."
            raise PipelineError(
                f"{msg}\n  Often memory ran out: try smaller batches, or fewer CPUs (taskset)."
            ) from err
        rates, samples, cpu_s, steps = zip(*(each.result() for each in found), strict=True)
        self._step = max(steps)
        return PartRate(sum(rates), sum(cpu_s) * 1000 / sum(samples))


def _serve(pipe: Any, program: Program, held: HeldSamples) -> None:
    """A process: one measurement after the other, until it is killed."""
    end_with_parent()
    torch.set_num_threads(1)
    decoding = replace(program, shards=held)  # type: ignore[arg-type]  # it stands in for the shards
    while True:
        try:
            part, seconds, first, every = pipe.recv()
        except EOFError:
            return
        chosen = program if part.what == "read" else decoding
        pipe.send(Outcome.of(_measure, chosen, part, seconds, first, every))


def _measure(program: Program, part: Part, seconds: float, first: int, every: int) -> tuple[float, int, float, int]:
    """Samples/s, samples and CPU seconds of the threads of this process, and the step behind the last of all processes.

    Thread t begins with step `first + t` and goes on with every `every`-th.
    """
    plan, place = program.plan, program.run.place
    steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)

    def run(step: int) -> tuple[int, float]:
        torch.set_num_threads(1)  # of this thread
        ring, num_samples, elapsed, start = Ring(), 0, 0.0, time.perf_counter()
        while elapsed < seconds:
            if part.what == "read":
                _read(program, steps.positions(place.rank, step))
            else:
                job = Job(0, steps.range(place.rank, step, step + 1), steps.num_samples)
                make_batches(program, job, ring).result()
            num_samples += plan.batch
            step += every
            elapsed = time.perf_counter() - start
        return num_samples, elapsed

    cpu_s = time.process_time()
    with ThreadPoolExecutor(part.threads) as pool:
        found = list(pool.map(run, range(first, first + part.threads)))
    cpu_s = time.process_time() - cpu_s
    most = max(num_samples for num_samples, _ in found) // plan.batch
    rate = sum(num_samples / elapsed for num_samples, elapsed in found)
    return rate, sum(num_samples for num_samples, _ in found), cpu_s, first + every * (1 + most)


def _read(program: Program, positions: Ints) -> None:
    """The fields of a batch, by columns where the pipeline makes its batches so."""
    shards, samples = program.plan.order.take(positions)
    is_by_columns = program.columns is not None
    if is_by_columns and program.shards.read_many(shards, samples, viewed=lambda _: False) is not None:
        return
    for shard, sample in zip(shards.tolist(), samples.tolist(), strict=True):
        program.shards.read(shard, sample)


class LoaderRate(NamedTuple):
    """One measurement of a loader."""

    samples_per_s: float
    cpu_ms: float | None
    first_batch_s: float


def measure_loader(loader: PlannedLoader, seconds: float) -> LoaderRate:
    """Run a loader that was not iterated yet and has an epoch without end."""
    plan, workers = loader.pipeline.program.plan, loader.spec.workers
    round_size = max(1, workers)  # batches of several workers come in bursts of as many
    items = iter(loader)
    try:
        start = time.perf_counter()
        next(items)
        first_batch_s = time.perf_counter() - start
        start, left = time.perf_counter(), max(loader.spec.prefetch, 2 * workers)  # what was made ahead meanwhile
        while left and time.perf_counter() - start < seconds:
            next(items)
            left -= 1
        count, elapsed, cpu_s, start = 0, 0.0, cpu_s_of_tree(), time.perf_counter()
        while elapsed < seconds:
            for _ in range(round_size):
                next(items)
            count += round_size * (plan.batch if plan.is_batched else 1)
            elapsed = time.perf_counter() - start
        cpu_s_now = cpu_s_of_tree()
        cpu_ms = None if cpu_s is None or cpu_s_now is None else (cpu_s_now - cpu_s) * 1000 / count
        return LoaderRate(count / elapsed, cpu_ms, first_batch_s)
    finally:
        items.close()  # type: ignore[attr-defined]  # a generator
