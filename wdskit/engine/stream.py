"""The running pipeline of a stream: a `webdataset.DataPipeline` with epochs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import webdataset
from torch.utils.data import get_worker_info

from wdskit.config.types import StageSpec
from wdskit.errors import PipelineError, SampleError
from wdskit.stages.base import Context, PerSampleStage, lives
from wdskit.stages.batching import Batched
from wdskit.stages.collate import Batcher, Collate, as_tensors
from wdskit.stages.images.fused import fuse
from wdskit.stages.run import Origin, SampleStages
from wdskit.stages.streaming import Select, Shuffle, StreamRun, StreamSource

_MASK = (1 << 32) - 1
_Pair: TypeAlias = tuple[Any, Origin]


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
        fixed_length: The length that `with_length` sets; None without `with_length`.
    """

    def __init__(self, stages: Sequence[Any], run: StreamRun, context: Context) -> None:
        self.run = run
        self._named = {getattr(stage, "name", ""): stage for stage in stages}
        run.num_items = getattr(self._named.get("with_epoch"), "n", None)
        self.fixed_length: int | None = getattr(self._named.get("with_length"), "n", None)
        # The epoch of the next iteration, in the low half of one word, which all processes of a DataLoader share, and
        # which is read and written at once. In the high half is the tag of the iteration that began last.
        self._clock = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._num_begun = 0  # iterations in this process
        self._open: dict[int, Iterator[Any]] = {}  # the stream that the epoch of the key continues, in this process
        self.source = StreamSource(run, stages[0])  # it also divides the shards, as the splitters say
        super().__init__(self.source, *self._bind(fuse(stages[1:]), context), functools.partial(_values, run))

    def _bind(self, stages: Sequence[Any], context: Context) -> Iterator[Any]:
        """Yield the running stages after the source. Each maps an iterator over pairs of a value and its origin."""
        for stage, live in zip(stages, lives(stages)[1:], strict=True):
            if isinstance(stage, PerSampleStage | Select):
                step, context = stage.step(replace(context, live=live))
                yield functools.partial(_each, self.run, SampleStages((step,)), is_filter=isinstance(stage, Select))
            elif isinstance(stage, StageSpec):
                if isinstance(stage, Batched):
                    yield functools.partial(_batches, stage.make_batcher(context), keeps_last=stage.partial)
                elif isinstance(stage, Shuffle):
                    yield functools.partial(stage.shuffled, self.run, context.label(stage))
                context = context.after(stage)
            else:
                yield functools.partial(_foreign, self.run, stage)
                context = replace(context, roles=replace(context.roles.after_function(), places=None))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration runs."""
        return int(self._clock[0]) & _MASK

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration runs, in every worker of a torch DataLoader."""
        if epoch != self.epoch:  # otherwise workers of the running iteration that start late still find its tag
            self._clock[0] = epoch

    def _begin(self) -> int:
        """Count an iteration of this process, and return its epoch. Workers of one iteration of a DataLoader get the
        same number: the first one to begin moves the clock on, and the others find the tag of the iteration.
        """
        info = get_worker_info()
        self._num_begun += 1
        iteration = (0 if info is None else info.seed - info.id) + self._num_begun
        tag, word = iteration % (_MASK >> 1) + 1, int(self._clock[0])
        if word >> 32 != tag:
            word = tag << 32 | (word & _MASK) + 1
            self._clock[0] = word
        return (word & _MASK) - 1

    def check(self, num_workers: int) -> None:
        """Check that the stream can be divided among the ranks and `num_workers` workers each.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps.
        """
        world_size = self.run.rank_info.world_size
        for name, num, readers in (("split_by_node", world_size, "ranks"), ("split_by_worker", num_workers, "workers")):
            if num > 1 and name not in self._named:
                msg = f"{num} {readers} would each read every shard: {name} is missing."
                raise PipelineError(f"{msg}\n  Add it after the source.")
        if world_size > 1 and self.run.num_items is None and not self.source.settings.resampled:
            msg = f"a stream over {world_size} ranks ends at a different step on each rank, and DDP hangs."
            advice = "Add with_epoch: n, which counts per rank and continues where the last epoch ended."
            raise PipelineError(f"{msg}\n  {advice}")

    def iterator1(self) -> Iterator[Any]:
        """Return an iterator over this worker's values of the next epoch.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps.
        """
        run, epoch = self.run, self._begin()
        values = self._open.pop(epoch, None) or self.values(epoch)
        self.check(run.num_workers)
        if run.num_items is None:
            yield from values
            return
        run.epoch = epoch
        yield from itertools.islice(values, len(range(run.worker, run.num_items, run.num_workers)))
        self._open = {epoch + 1: values}

    def values(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over this worker's values from the first one of an epoch on: without end if `with_epoch`
        is set, otherwise to the end of the epoch.
        """
        run, info = self.run, get_worker_info()
        run.worker, run.num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        run.epoch, run.bad = epoch, []
        return iter(super().iterator1())


def _each(run: StreamRun, stages: SampleStages, source: Iterable[_Pair], *, is_filter: bool) -> Iterator[_Pair]:
    """Yield the result of the stages for each value, or with `is_filter` each value for which the result is true. Bad
    samples are skipped, as `run.skips` says.

    Raises:
        SampleError: A stage failed on a value that is not skipped. The message names the sample, or the first and the
            last sample of a batch.
    """
    for value, origin in source:
        try:
            made = stages.apply(value, origin)
        except SampleError as err:
            if not run.skips(err, origin):
                raise
            continue
        if not is_filter or made:  # a value may have no truth, such as an array
            yield value if is_filter else made, origin


def _batches(batcher: Batcher, source: Iterator[_Pair], *, keeps_last: bool) -> Iterator[_Pair]:
    """Yield each batch of consecutive values as soon as it is full, and with `keeps_last` a last, smaller batch. The
    default collate makes tensors.
    """
    while rows := [*itertools.islice(source, batcher.size)]:
        if len(rows) < batcher.size and not keeps_last:
            return
        values, origins = map(list, zip(*rows, strict=True))
        batch, origin = batcher.collated(values, origins)
        yield as_tensors(batch) if isinstance(batcher.collate, Collate) else batch, origin


def _foreign(run: StreamRun, stage: Any, source: Iterable[_Pair]) -> Iterator[_Pair]:
    """Yield the values of a stage that is not wdskit's. Shard and key of an origin are `__url__` and `__key__` of the
    value, empty if the value is not a dict or lacks them. The positions count the values of this process.
    """
    epoch, part = run.epoch, run.rank_info.rank << 32 | run.worker
    values = getattr(stage, "run", stage)(value for value, _ in source)  # stages of webdataset may have a method `run`
    for number, value in enumerate(values):
        url, key = (value.get("__url__", ""), value.get("__key__", "")) if isinstance(value, dict) else ("", "")
        yield value, Origin(str(url), str(key), number, epoch, part, epoch=run.epoch)


def _values(run: StreamRun, source: Iterable[_Pair]) -> Iterator[Any]:
    for value, origin in source:
        run.num_samples = len(origin.members) or 1
        yield value
