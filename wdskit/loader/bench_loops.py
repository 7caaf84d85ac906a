"""A loader under a stop watch: alone, beside a busy Python thread, beside training; and with batches that are free."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from wdskit.loader.planned import PlannedLoader
from wdskit.loader.threads import run_here
from wdskit.order.steps import Steps
from wdskit.pipeline.buffering import Batched
from wdskit.pipeline.by_columns import begin
from wdskit.pipeline.collate import Collate
from wdskit.pipeline.each import Each, Step
from wdskit.pipeline.jobs import Job
from wdskit.pipeline.layouts import NOTHING_KNOWN
from wdskit.pipeline.memory import FRESH, Memory
from wdskit.pipeline.planned import PlannedPipeline
from wdskit.processes import cpu_s_of_tree

STEP_SHARE = 0.5
"""A training step takes this share of the time in which a batch can be decoded: training waits for the loader."""


class Rates(NamedTuple):
    """One repeat of one loader; rates are samples/s."""

    first_batch_s: float
    alone: float
    cpu_ms: float | None
    beside_python: float | None
    beside_training: float | None


class Busy(NamedTuple):
    """Beside what a loader is measured: a thread that runs Python code, a step of training between two batches."""

    python: bool
    step: TrainingStep | None


class Watch:
    """One pass over a loader.

    Args:
        loader: Not iterated yet, with an epoch that does not end.
        seconds: Length of each measurement.
    """

    def __init__(self, loader: PlannedLoader, seconds: float) -> None:
        plan, spec, num_threads = loader.pipeline.plan, loader.spec, loader.pipeline.run.num_threads
        self._per_item = plan.batch if plan.is_batched else 1
        self._round = max(1, spec.workers)  # batches of several workers come in bursts of as many
        self._ahead = max(spec.prefetch, 2 * spec.workers) if spec.workers or num_threads > 1 else 0
        self._seconds = seconds
        self._items = iter(loader)

    def first(self) -> float:
        """Seconds to the first item."""
        start = time.perf_counter()
        next(self._items)
        return time.perf_counter() - start

    def rate(self, step: Callable[[], object] | None = None) -> tuple[float, float | None]:
        """Samples/s, and CPU milliseconds of a sample, once what was made ahead before is used up.

        Args:
            step: What is done with each item.
        """
        self._take(step, self._ahead, self._seconds)
        cpu_s, start = cpu_s_of_tree(), time.perf_counter()
        count, seconds = 0, 0.0
        while seconds < self._seconds:
            count += self._take(step, self._round)
            seconds = time.perf_counter() - start
        cpu_s_now = cpu_s_of_tree()
        num_samples = count * self._per_item
        cpu_ms = None if cpu_s is None or cpu_s_now is None else (cpu_s_now - cpu_s) * 1000 / num_samples
        return num_samples / seconds, cpu_ms

    def _take(self, step: Callable[[], object] | None, num: int, seconds: float = float("inf")) -> int:
        """Take `num` items, fewer where they take longer than `seconds`, and give their number."""
        start = time.perf_counter()
        item, count = None, 0
        while count < num and time.perf_counter() - start < seconds:
            item = next(self._items)
            if step is not None:
                step()
            count += 1
        del item
        return count

    def close(self) -> None:
        """End the pass."""
        self._items.close()  # type: ignore[attr-defined]  # a generator


def measure_loader(loader: PlannedLoader, seconds: float, busy: Busy) -> Rates:
    """One repeat.

    Args:
        loader: Not iterated yet, with an epoch that does not end.
        seconds: Length of each measurement.
        busy: What else is measured.
    """
    watch = Watch(loader, seconds)
    try:
        first_batch_s = watch.first()
        rate, cpu_ms = watch.rate()
        beside_python = beside_training = None
        if busy.python:
            with busy_python():
                beside_python = watch.rate()[0]
        if busy.step is not None:
            beside_training = watch.rate(busy.step)[0]
        return Rates(first_batch_s, rate, cpu_ms, beside_python, beside_training)
    finally:
        watch.close()


def measure_headspace(loader: PlannedLoader, item: Any, seconds: float) -> float:
    """Samples/s where an item costs nothing.

    Args:
        loader: Not iterated yet, with an epoch that does not end. It is of no other use behind that.
        item: From `ready_item`.
        seconds: Length of the measurement.
    """
    make_free(loader, item)
    watch = Watch(loader, seconds)
    try:
        watch.first()
        return watch.rate()[0]
    finally:
        watch.close()


@contextmanager
def busy_python() -> Iterator[None]:
    """A thread of this process runs Python code without a pause while the block runs, as a training loop does at its
    worst: each other thread has to wait for the interpreter's lock (GIL).
    """
    stop = threading.Event()

    def run() -> None:
        number = 1
        while not stop.is_set():
            for _ in range(1000):
                number = number * 31 % 1_000_003

    thread = threading.Thread(target=run, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class TrainingStep:
    """A step of training: matrices multiplied for a given time, on the GPU if there is one, else in one thread.

    Args:
        seconds: How long a step takes, about.
    """

    def __init__(self, seconds: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        size = 2048 if self.device.type == "cuda" else 256
        self._matrix = torch.full((size, size), 1 / size, device=self.device)
        self._times = 1
        self()  # the first one loads libraries
        start = time.perf_counter()
        for _ in range(5):
            self()
        self._times = max(1, round(seconds * 5 / (time.perf_counter() - start)))
        start = time.perf_counter()
        self()
        self.seconds = time.perf_counter() - start

    def __call__(self) -> None:
        """One step, waited for, as who logs the loss does."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            product = self._matrix
            for _ in range(self._times):
                product = product @ self._matrix
            product[0, 0].item()
        finally:
            torch.set_num_threads(before)


class FreeShards:
    """Stands in for `OpenShards`: every sample is empty."""

    def read(self, _: int, __: int) -> tuple[str, str, int, dict[str, bytes]]:
        """An empty sample."""
        return "", "", 0, {}

    def mean_bytes(self, _: object) -> int:
        """Nothing is read."""
        return 0


class FreeSample:
    """Stands in for the one-to-one stages: gives the sample that it has."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __call__(self, _: object, __: object) -> Any:
        """The sample."""
        return self.sample


class FreeBatch(Collate):
    """Stands in for what makes batches: memory as the batch that it has would lie in, with nothing written into it."""

    def __init__(self, batch: Any) -> None:
        super().__init__(NOTHING_KNOWN)
        self.batch = batch

    def __call__(  # of whatever values
        self, _samples: Sequence[Any], memory: Memory = FRESH, _ready: Mapping[Any, torch.Tensor] | None = None
    ) -> Any:
        """A batch."""
        return _unwritten(self.batch, memory)


def _unwritten(value: Any, memory: Memory) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        channels_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return memory.empty(value.shape, value.dtype, channels_last=channels_last)
    if isinstance(value, dict):
        return {name: _unwritten(item, memory) for name, item in value.items()}
    return tuple(_unwritten(item, memory) for item in value) if type(value) is tuple else value


def ready_item(pipeline: PlannedPipeline) -> Any:
    """The first item of a pipeline of one thread: a batch, or without `batched` a sample."""
    plan, place = pipeline.plan, pipeline.run.place
    steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)
    made = run_here(begin(pipeline, Job(0, steps.range(place.rank, 0, 1), plan.epoch_samples), FRESH))
    return made.value if plan.is_batched else made.value[0]


def make_free(loader: PlannedLoader, item: Any) -> None:
    """Let a loader that was not iterated yet hand out an item that costs nothing, again and again.

    Args:
        loader: It is of no other use behind that.
        item: From `ready_item`, to be like.
    """
    pipeline = loader.pipeline
    plan, run = pipeline.plan, pipeline.run
    pipeline.shards = FreeShards()  # type: ignore[assignment]
    pipeline.each = Each(run, "free", (Step("free", FreeSample(None if plan.is_batched else item)),))
    pipeline.batched = Batched(run, FreeBatch(item), plan.batch, partial=True) if plan.is_batched else None
    pipeline.behind = pipeline.columns = None
    pipeline.plan = dataclasses.replace(plan, tail="drop")  # the mask is there already
