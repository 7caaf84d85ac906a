"""The running pipeline of a stream: a `webdataset.DataPipeline` with epochs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import webdataset
from torch.utils.data import get_worker_info

from wdskit.config.types import StageSpec
from wdskit.engine.sample import SampleStages
from wdskit.errors import PipelineError, SampleError
from wdskit.stages.base import FOREIGN, Context, Origin, PerSampleStage, Step, lives
from wdskit.stages.batching import Batched, Batcher
from wdskit.stages.collate import Collate, as_tensors
from wdskit.stages.images.fused import fuse
from wdskit.stages.roles import EVERYTHING
from wdskit.stages.streaming import (
    EpochCut,
    Select,
    ShardOpener,
    SplitByNode,
    SplitByWorker,
    Stream,
    StreamRun,
    StreamSource,
    StreamStage,
    WithEpoch,
    WithLength,
    share,
)
from wdskit.text import as_int, plural

_SPLITTERS: dict[str, type[StreamStage]] = {each.name: each for each in (SplitByNode, SplitByWorker)}
_BY_NODE = {"split_by_node", "single_node_only"}
_TAKES_SHARDS = {*_BY_NODE, "split_by_worker", "non_empty"}
_OPENERS = {"tarfile_samples", "tarfile_to_samples"}
_MASK = (1 << 32) - 1


class EpochClock:
    """The epoch of a stream, in memory that all processes of a torch DataLoader share: one number for all workers."""

    def __init__(self) -> None:
        # Number of resets; and in one word, which is read and written at once, the tag of the iteration that began last
        # (in the high half) and the epoch of the next iteration.
        self._words = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._num_begun = 0  # in this process

    @property
    def num_resets(self) -> int:
        """How often `reset` was called. A stream that is open since an earlier reset does not continue."""
        return int(self._words[0])

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration runs."""
        return int(self._words[1]) & _MASK

    def set(self, epoch: int) -> None:
        """Set `epoch`."""
        self._words[1] = epoch

    def reset(self) -> None:
        """Let all streams start anew."""
        self._words[0] += 1

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
    """The running form of a `Pipeline` with a stream source.

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
        source: The source; None for another library's source.
        fixed_length: The length that `with_length` sets; None without `with_length`.
        batch: Number of samples in an item; 1 without batches.
        clock: The number of the epoch.
    """

    def __init__(self, stages: Sequence[Any], run: StreamRun, context: Context) -> None:
        self.run = run
        self.clock = EpochClock()
        self._stages = fuse(stages)
        self._names = [_name_of(stage) for stage in self._stages]
        cuts = [at for at, stage in enumerate(self._stages) if isinstance(stage, WithEpoch)]
        self._n = self._stages[cuts[0]].n if cuts else None
        self._last = self._stages[cuts[0] + 1 :] if cuts else []
        self.fixed_length = next((stage.n for stage in self._stages if isinstance(stage, WithLength)), None)
        self.batch = 1
        self.source: StreamSource | None = None
        self._open: dict[Any, Iterator[Any]] = {}  # at most one stream, which the epoch of the key continues
        self._token: object = None
        run.is_endless = bool(cuts)
        super().__init__(*self._bind(context))

    def _bind(self, context: Context) -> Iterator[Any]:
        """Yield the running stages. Neighbouring one-to-one stages become one running stage. The shards of a source of
        wdskit are opened before the first stage that needs samples, if no stage of webdataset opens them.
        """
        run, steps = self.run, list[Step]()
        is_ours = isinstance(self._stages[0], Stream)
        is_open = not is_ours and _OPENERS.isdisjoint(self._names)
        opens_here = is_ours and _OPENERS.isdisjoint(self._names)
        live_after = [*lives(self._stages)[1:], EVERYTHING]
        for stage, name, live in zip([*self._stages, None], [*self._names, ""], live_after, strict=True):
            if opens_here and not is_open and name not in {Stream.name, *_TAKES_SHARDS}:
                assert self.source is not None
                yield ShardOpener(run, self.source.shards, self.source.settings.check)
                is_open = True
            if isinstance(stage, PerSampleStage):
                step, context = stage.step(replace(context, live=live))
                steps.append(step)
                continue
            if steps:
                yield EachSample(run, steps)
                steps = []
            if isinstance(stage, StreamStage):
                running = stage.bind(run, context)
                self.source = running if isinstance(running, StreamSource) else self.source
                yield running
            elif isinstance(stage, Select):
                yield EachSample(run, [stage.step(context)], is_filter=True)
            elif isinstance(stage, Batched):
                batcher = stage.make_batcher(context)
                self.batch = batcher.size
                yield Batches(run, batcher)
            elif is_ours and not is_open and getattr(stage, "__name__", "") in _SPLITTERS:
                yield _SPLITTERS[name]().bind(run, context)  # webdataset's do not find the rank in spawned workers
            elif stage is not None and not isinstance(stage, StageSpec):
                yield stage
                is_open = is_open or name in _OPENERS
                context = replace(context, roles=replace(context.roles.after_function(), places=None))
                if is_open:
                    yield Renumber(run)
            if isinstance(stage, StageSpec):
                context = context.after(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_token": None}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration runs, in every worker of a torch DataLoader.

        Raises:
            PipelineError: `epoch` is not a whole number from 0 to 10**9.
        """
        epoch = as_int(epoch)
        if type(epoch) is not int or not 0 <= epoch <= 10**9:
            raise PipelineError(f"set_epoch({epoch!r}): an epoch is a whole number, 0 to {10**9}.")
        if epoch != self.clock.epoch:
            self.clock.set(epoch)
            self.clock.reset()

    def num_items(self, num_workers: int) -> int | None:
        """Return the number of items that an epoch of this rank yields; None if the stages do not define it.

        `num_workers` is the number of worker processes, or 0 for the main process.
        """
        known = (PerSampleStage, Batched, StreamStage, WithLength)
        if self._n is None or not all(isinstance(stage, known) for stage in self._last):
            return None
        counts = [share(self._n, worker, max(1, num_workers)) for worker in range(max(1, num_workers))]
        for stage in self._last:
            if isinstance(stage, Batched):
                counts = [-(-count // self.batch) if stage.partial else count // self.batch for count in counts]
        return sum(counts)

    def fingerprint(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as plain JSON; empty if the source is not wdskit's."""
        if self.source is None:
            return {}
        kinds = ("splitter", "stream", "batch", "epoch")
        sizes = [getattr(stage, "size", getattr(stage, "n", None)) for stage in self._stages]
        return {
            **self.source.settings.fingerprint(self.source.shards),
            "stages": [stage.name for stage in self._stages[1:] if getattr(stage, "kind", None) in kinds],
            "sizes": [size for size in sizes if size is not None],
        }

    def check(self, num_workers: int) -> None:
        """Check that the stream can be divided among the ranks and `num_workers` workers each. A source of another
        library, and `split: none`, are not checked.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps.
        """
        world_size = self.run.rank_info.world_size
        if self.source is None or self.source.settings.split is not None:
            return
        if world_size > 1 and _BY_NODE.isdisjoint(self._names):
            raise PipelineError(_no_splitter("split_by_node", f"{world_size} ranks"))
        if num_workers > 1 and "split_by_worker" not in self._names:
            raise PipelineError(_no_splitter("split_by_worker", f"{num_workers} workers"))
        if world_size == 1 or (self._n is None and self.source.settings.resampled):  # which has no end
            return
        if self._n is None:
            msg = f"a stream over {world_size} ranks ends at a different step on each rank, and DDP hangs."
            raise PipelineError(
                f"{msg}\n  Add with_epoch: n, which counts per rank and continues where the last epoch ended."
            )
        may_drop = (Select, PerSampleStage) if self.run.max_bad else Select
        if any(isinstance(stage, may_drop) for stage in self._last):
            msg = "a stage after with_epoch may drop values, so that ranks end at different steps, and DDP hangs."
            raise PipelineError(f"{msg}\n  Put with_epoch last; after `batched`, its n is a number of batches.")

    def iterator1(self) -> Iterator[Any]:
        """Yield the values of the next epoch of this worker; `items` has the errors."""
        return self.items(self.clock.begin())

    def items(self, epoch: int) -> Iterator[Any]:
        """Yield the values of one epoch of this worker.

        Raises:
            PipelineError: A splitter is missing, or ranks would end at different steps. Or the rank has one worker and
                the epoch has no values. Or another iteration has started.
        """
        run, info = self.run, get_worker_info()
        run.worker, run.num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        self.check(run.num_workers)
        run.epoch, run.num_bad = epoch, 0
        token = self._token = object()
        cut = next((at for at, stage in enumerate(self.pipeline) if isinstance(stage, EpochCut)), len(self.pipeline))
        reader = (os.getpid(), run.num_workers, self.clock.num_resets)
        head = self._open.pop((reader, epoch), None) or self._chain(self.pipeline[:cut], None)
        self._open.clear()
        taken = self._chain(self.pipeline[cut : cut + 1], head)
        is_empty = run.num_workers == 1
        for value in self._chain(self.pipeline[cut + 1 :], taken):
            is_empty = False
            yield value
            if self._token is not token:
                raise PipelineError("this pipeline was closed, or iterated again, before the epoch ended.")
        if is_empty:
            raise empty_epoch(epoch, num_bad=run.num_bad)
        for _ in taken:  # values that the last stages did not take
            pass
        if run.is_endless:
            self._open[reader, epoch + 1] = head

    def _chain(self, stages: Sequence[Any], values: Iterator[Any] | None) -> Iterator[Any]:
        """Return an iterator over the values after `stages`. `values` is the input of the first stage; None if it is a
        source.
        """
        for stage in stages:
            values = self.invoke(stage) if values is None else self.invoke(stage, values)
        assert values is not None
        return iter(values)

    def close(self) -> None:
        """Close the stages that continue from epoch to epoch. An iteration that is not finished raises PipelineError at
        its next value.
        """
        self._open.clear()
        self._token = None


class EachSample:
    """Runs one-to-one stages on each value of a stream.

    Args:
        run: The state that all stages of the stream share.
        steps: The stages, in their order.
        is_filter: Whether the result of the stages says if a value is kept. Otherwise the result replaces the value.
    """

    def __init__(self, run: StreamRun, steps: Sequence[Step], *, is_filter: bool = False) -> None:
        self.run = run
        self.stages = SampleStages(tuple(steps))
        self._is_filter = is_filter

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source` after all stages. Bad samples are skipped, up to `run.max_bad` in an epoch.

        Raises:
            SampleError: A stage failed on a sample that `StreamRun.skips` does not skip.
            BaseException: `source` raised this error, or a stage raised this error, which is not an Exception.
        """
        run = self.run
        for value in source:
            origin = run.origin
            try:
                done = self.stages.apply(value, origin)
                if self._is_filter:
                    if not done:
                        continue
                    done = value
            except SampleError as err:
                if not run.skips(err, origin):
                    raise
                continue
            run.origin = origin
            yield done


class Batches:
    """Makes batches of consecutive values of a stream, and yields each batch as soon as it is full."""

    def __init__(self, run: StreamRun, batcher: Batcher) -> None:
        self.run = run
        self._batcher = batcher

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the values of `source`. Before each batch, set `run.origin` to the origin of the batch.
        The default collate makes tensors.

        Raises:
            SampleError: The values cannot be collated, or the user's function fails. The message names the first and
                the last sample of the batch.
        """
        values: list[Any] = []
        origins: list[Origin] = []
        for value in source:
            values.append(value)
            origins.append(self.run.origin)
            if len(values) == self._batcher.size:
                yield self._collated(values, origins)
                values, origins = [], []
        if values and self._batcher.partial:
            yield self._collated(values, origins)

    def _collated(self, values: list[Any], origins: list[Origin]) -> Any:
        batch, self.run.origin = self._batcher.collated(values, origins)
        return as_tensors(batch) if isinstance(self._batcher.collate, Collate) else batch


class Renumber:
    """Gives each value that a foreign stage yields a new position."""

    def __init__(self, run: StreamRun) -> None:
        self.run = run

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source`. Before each value, set `run.origin` to the value's new position: the epoch, the
        rank, the worker, and the number of the value, counted from 0 in each call. The shard and the key of the origin
        are `__url__` and `__key__` of the value; empty if the value is not a dict or lacks them.
        """
        run = self.run
        epoch, part = run.epoch, FOREIGN | run.rank_info.rank << 31 | run.worker
        for number, value in enumerate(source):
            url, key = (value.get("__url__", ""), value.get("__key__", "")) if isinstance(value, dict) else ("", "")
            run.origin = Origin(str(url), str(key), number, epoch, part, epoch=run.epoch)
            yield value


def empty_epoch(epoch: int, *, num_bad: int = 0) -> PipelineError:
    """Return the error for an epoch without values, for the caller to raise. `num_bad` samples were bad."""
    if num_bad:
        msg = f"epoch {epoch} is empty: {plural(num_bad, 'sample')} of it {'are' if num_bad > 1 else 'is'} bad."
        return PipelineError(f"{msg}\n  Set `errors: {{max_bad: 0}}` to see the first error.")
    msg = f"epoch {epoch} is empty: the shards hold no samples, or the pipeline dropped all of them."
    return PipelineError(f"{msg}\n  Check its select stages, and run `wdskit info` on the shards.")


def _no_splitter(name: str, who: str) -> str:
    msg = f"{who} would each read every shard: {name} is missing."
    return f"{msg}\n  Add it after the source, or set `split: none` if this is intended."


def _name_of(stage: Any) -> str:
    """Return the name of a stage; for a stage of another library the name of the function that it calls, or ""."""
    inner = getattr(stage, "f", None) or getattr(stage, "func", None) or stage
    return str(getattr(stage, "name", None) or getattr(inner, "__name__", ""))
