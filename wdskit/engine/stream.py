"""The running pipeline of a stream: a `webdataset.DataPipeline` with epochs."""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import webdataset
from torch.utils.data import get_worker_info

from wdskit.config.types import StageSpec
from wdskit.errors import PipelineError, SampleError
from wdskit.stages.base import Context, PerSampleStage, lives
from wdskit.stages.batching import Batched
from wdskit.stages.collate import Batcher, Collate, as_tensors
from wdskit.stages.images.fused import fuse
from wdskit.stages.run import Origin, SampleStages, Step
from wdskit.stages.streaming import (
    Select,
    Shuffle,
    StreamRun,
    StreamSource,
    WithEpoch,
    WithLength,
)

_MASK = (1 << 32) - 1


class EpochClock:
    """The epoch of a stream, in memory that all processes of a torch DataLoader share: one number for all workers."""

    def __init__(self) -> None:
        # Number of new starts; and in one word, which is read and written at once, the tag of the iteration that began
        # last (in the high half) and the epoch of the next iteration.
        self._words = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._num_begun = 0  # in this process

    @property
    def num_starts(self) -> int:
        """Number of new starts so far. A stream that was opened before the last new start does not continue."""
        return int(self._words[0])

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration runs."""
        return int(self._words[1]) & _MASK

    def set(self, epoch: int, *, is_start: bool) -> None:
        """Set `epoch`. `is_start` says whether all streams start anew."""
        self._words[1] = epoch
        self._words[0] += is_start

    def begin(self) -> int:
        """Count an iteration of this process, and return its epoch. Workers of one iteration of a DataLoader get the
        same number: the first one to begin moves the clock on, and the others find the tag of the iteration.
        """
        info = get_worker_info()
        self._num_begun += 1
        iteration = os.getpid() if info is None else info.seed - info.id, self._num_begun
        tag = zlib.crc32(repr(iteration).encode()) >> 1 | 1
        word = int(self._words[1])
        if word >> 32 != tag:
            word = tag << 32 | (word & _MASK) + 1
            self._words[1] = word
        return (word & _MASK) - 1


class StreamPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with the source `stream`.

    It is an `IterableDataset`, so torch's DataLoader and webdataset's WebLoader take it, with `batch_size=None`.

    Each iteration is one epoch, and the next iteration has the next epoch number; `set_epoch` sets another number.
    Without `with_epoch`, an epoch reads each shard once, or never ends if the source is resampled. With `with_epoch`,
    the stream continues where the last epoch ended, as long as the process lives. After an unfinished epoch, such as
    after a `break`, the stream starts with the first shard of its next epoch.

    Args:
        stages: The stages of the pipeline, as for `build_pipeline`.
        run: The state that the running stages share.
        context: The context of the first stage.

    Attributes:
        source: The source.
        num_items: Number of items of an epoch of this rank, which `with_epoch` sets; None without `with_epoch`.
        fixed_length: The length that `with_length` sets; None without `with_length`.
        clock: The number of the epoch.
    """

    def __init__(self, stages: Sequence[Any], run: StreamRun, context: Context) -> None:
        self.run = run
        self.clock = EpochClock()
        self.num_items = next((stage.n for stage in stages if isinstance(stage, WithEpoch)), None)
        self.fixed_length = next((stage.n for stage in stages if isinstance(stage, WithLength)), None)
        self._names = {getattr(stage, "name", "") for stage in stages}
        self._open: dict[Any, Iterator[Any]] = {}  # at most one stream, which the epoch of the key continues
        run.is_endless = self.num_items is not None
        self.source: StreamSource = stages[0].bind(run)  # it also divides the shards, as the splitters say
        super().__init__(self.source, *self._bind(fuse(stages[1:]), context), functools.partial(_values, run))

    def _bind(self, stages: Sequence[Any], context: Context) -> Iterator[Any]:
        """Yield the running stages after the source. Neighbouring one-to-one stages, and `batched` among them,
        become one running stage.
        """
        pairs = zip(stages, lives(stages)[1:], strict=True)
        for is_made, group in itertools.groupby(pairs, lambda pair: isinstance(pair[0], (PerSampleStage, Batched))):
            if is_made:
                samples = Samples(self.run)
                for stage, live in group:
                    context = samples.add(stage, replace(context, live=live))
                yield samples
                continue
            for stage, _ in group:
                if isinstance(stage, Select):
                    yield Samples(self.run, [stage.step(context)], is_filter=True)
                elif isinstance(stage, Shuffle):
                    yield stage.bind(self.run, context)
                elif not isinstance(stage, StageSpec):
                    yield functools.partial(_foreign, self.run, stage)
                    context = replace(context, roles=replace(context.roles.after_function(), places=None))
                    continue
                context = context.after(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration runs, in every worker of a torch DataLoader."""
        if epoch != self.clock.epoch:
            self.clock.set(epoch, is_start=True)

    def check(self, num_workers: int) -> None:
        """Check that the stream can be divided among the ranks and `num_workers` workers each.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps.
        """
        world_size = self.run.rank_info.world_size
        for name, num, readers in (("split_by_node", world_size, "ranks"), ("split_by_worker", num_workers, "workers")):
            if num > 1 and name not in self._names:
                raise PipelineError(
                    f"{num} {readers} would each read every shard: {name} is missing.\n  Add it after the source."
                )
        if world_size > 1 and self.num_items is None and not self.source.settings.resampled:
            msg = f"a stream over {world_size} ranks ends at a different step on each rank, and DDP hangs."
            raise PipelineError(
                f"{msg}\n  Add with_epoch: n, which counts per rank and continues where the last epoch ended."
            )

    def iterator1(self) -> Iterator[Any]:
        """Return an iterator over the values of the next epoch of this worker; `items` has the errors."""
        return self.items(self.clock.begin())

    def items(self, epoch: int) -> Iterator[Any]:
        """Yield the values of one epoch of this worker.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps.
        """
        run, info = self.run, get_worker_info()
        run.worker, run.num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.check(run.num_workers)
        run.epoch, run.bad = epoch, []
        process = os.getpid(), self.clock.num_starts
        values = self._open.pop((process, epoch), None) or iter(super().iterator1())
        self._open.clear()
        if self.num_items is None:
            yield from values
            return
        yield from itertools.islice(values, len(range(run.worker, self.num_items, run.num_workers)))
        self._open[process, epoch + 1] = values

    def close(self) -> None:
        """Close the stages that continue from epoch to epoch."""
        self._open.clear()


class Samples:
    """Runs one-to-one stages on each value of a stream. With a batcher, it makes batches of consecutive values, and
    runs further one-to-one stages on each batch.

    Args:
        run: The state that all stages of the stream share.
        steps: The stages for each value, in their order.
        is_filter: Whether the result of the stages says if a value is kept. Otherwise the result replaces the value.

    Attributes:
        batcher: Makes the batches; None without batches.
    """

    def __init__(self, run: StreamRun, steps: Sequence[Step] = (), *, is_filter: bool = False) -> None:
        self.run = run
        self.batcher: Batcher | None = None
        self.steps = [*steps]
        self._batch_steps: list[Step] = []
        self._is_filter = is_filter

    def add(self, stage: PerSampleStage | Batched, context: Context) -> Context:
        """Add the next stage, and return the context of the stage after it. PipelineError: The stage cannot run in this
        pipeline.
        """
        if isinstance(stage, Batched):
            self.batcher = stage.make_batcher(context)
            return context.after(stage)
        step, context = stage.step(context)
        (self.steps if self.batcher is None else self._batch_steps).append(step)
        return context

    def __call__(self, source: Iterable[tuple[Any, Origin]]) -> Iterator[tuple[Any, Origin]]:
        """Yield each value or batch after all stages. Bad samples are skipped, up to `run.max_bad` in an epoch.

        Raises:
            SampleError: A stage failed on a sample that `StreamRun.skips` does not skip, or on a batch, or the values
                of a batch cannot be collated. The message names the sample, or the first and the last of the batch.
            BaseException: `source` raised this error, or a stage raised this error, which is not an Exception.
        """
        made = self._made(source)
        if self.batcher is None:
            return made
        stages = SampleStages(tuple(self._batch_steps))
        return ((stages.apply(batch, origin), origin) for batch, origin in self._batches(made, self.batcher))

    def _made(self, source: Iterable[tuple[Any, Origin]]) -> Iterator[tuple[Any, Origin]]:
        stages = SampleStages(tuple(self.steps))
        for value, origin in source:
            try:
                made = stages.apply(value, origin)
            except SampleError as err:
                if not self.run.skips(err, origin):
                    raise
                continue
            if not self._is_filter:
                yield made, origin
            elif made:
                yield value, origin

    def _batches(self, made: Iterator[tuple[Any, Origin]], batcher: Batcher) -> Iterator[tuple[Any, Origin]]:
        """Yield each batch as soon as it is full, and its origin. The default collate makes tensors."""
        while rows := [*itertools.islice(made, batcher.size)]:
            if len(rows) < batcher.size and not batcher.partial:
                return
            values, origins = map(list, zip(*rows, strict=True))
            batch, origin = batcher.collated(values, origins)
            yield as_tensors(batch) if isinstance(batcher.collate, Collate) else batch, origin


def _foreign(run: StreamRun, stage: Any, source: Iterable[tuple[Any, Origin]]) -> Iterator[tuple[Any, Origin]]:
    """Yield the values of a stage that is not wdskit's. Shard and key of an origin are `__url__` and `__key__` of the
    value, empty if the value is not a dict or lacks them. The positions count the values of this process.
    """
    epoch, part = run.epoch, run.rank_info.rank << 32 | run.worker
    values = getattr(stage, "run", stage)(value for value, _ in source)  # stages of webdataset may have a method `run`
    for number, value in enumerate(values):
        url, key = (value.get("__url__", ""), value.get("__key__", "")) if isinstance(value, dict) else ("", "")
        yield value, Origin(str(url), str(key), number, epoch, part, epoch=run.epoch)


def _values(run: StreamRun, source: Iterable[tuple[Any, Origin]]) -> Iterator[Any]:
    for value, origin in source:
        run.num_samples = len(origin.members) or 1
        yield value
