"""Build the running form of a pipeline from its description: a `Program` or a `StreamPipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wdskit.config.types import StageSpec
from wdskit.engine.program import Program
from wdskit.engine.reader import SampleReader
from wdskit.engine.sample import SampleStages, StreamStages
from wdskit.engine.stream import Layout, StreamPipeline
from wdskit.errors import PipelineError
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, describe_small_cache, measure_cache
from wdskit.stages.base import Context, FunctionLookup, PerSampleStage, RankInfo, Run, Step, bind_steps, lives
from wdskit.stages.batching import Unbatched
from wdskit.stages.epoch import plan_epoch
from wdskit.stages.foreign import Renumber, is_webdatasets, opens_shards, takes_shards
from wdskit.stages.images.fused import fuse
from wdskit.stages.registry import resolve
from wdskit.stages.roles import merged
from wdskit.stages.shard_reader import TarfileToSamples
from wdskit.stages.stream_source import SplitByNode, SplitByWorker, Stream
from wdskit.stages.streaming import EpochCut, Select, StreamContext, StreamStage
from wdskit.stages.vision import Torchvision


def build_pipeline(
    stages: Sequence[Any],
    *,
    rank_info: RankInfo,
    num_threads: int = 1,
    max_workers: int = 16,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    errors: ErrorsSpec | None = None,
    cache: CacheSpec | None = None,
) -> StreamPipeline | Program:
    """Build the running form of a pipeline: a `Program` for a planned source, a `StreamPipeline` for any other source.

    Args:
        stages: One source, then stages, in an order that `rules.check_order` accepts. A callable is a stage that is not
            wdskit's.
        rank_info: Rank and world size.
        num_threads: Threads for one-to-one stages, in each process.
        max_workers: The largest number of worker processes that will run the pipeline.
        functions: The caller's functions by name, used before registered functions.
        errors: The settings `errors`; None for the defaults.
        cache: The settings `cache`, for a planned source; None for the defaults. A stream ignores them.

    Raises:
        PipelineError: A function is unknown, a setting cannot be used with these shards or threads, an epoch is not a
            whole number of batches, or the cache is too small.
        StorageError, FolderIndexError: The shards cannot be listed, a planned source has no index, two folders use a
            label for different classes, or the folder of the cache cannot be used.
        SelectionError: A split, condition or column of a planned source is missing or invalid.
    """
    errors = errors or ErrorsSpec()
    parts = [stage for part in getattr(stages[0], "mixture", None) or () for stage in part.stages]
    has_vision = any(isinstance(stage, Torchvision) for stage in (*stages, *parts))
    if has_vision and num_threads > 1 and not max_workers:
        msg = "torchvision: without workers, several threads would draw from the generators of your program."
        raise PipelineError(f"{msg}\n  Use workers, or `threads: 1`.")
    find = partial(resolve, extra=functions or {})
    if getattr(stages[0], "is_planned", False):
        return _build_planned(
            stages, rank_info=rank_info, num_threads=num_threads, find=find, errors=errors, cache=cache or CacheSpec()
        )
    run = Run(rank_info, stages[0].seed if isinstance(stages[0], Stream) else 0, num_threads)
    if isinstance(errors.max_bad, str):
        msg = f"errors.max_bad: {errors.max_bad} of a stream is unknown before it ends."
        raise PipelineError(f"{msg}\n  Write a number of samples, or use the source `exact`.")
    run.max_bad, run.forgives_functions = errors.max_bad, errors.transforms
    known = Context(run, find)
    return _StreamBuilder(stages, StreamContext(known)).build(max_workers)


def _build_planned(
    specs: Sequence[Any],
    *,
    rank_info: RankInfo,
    num_threads: int,
    find: FunctionLookup,
    errors: ErrorsSpec,
    cache: CacheSpec,
) -> Program:
    """Build the `Program` of a pipeline whose source knows all samples before the run, such as `exact`.

    `specs` are the stages of the pipeline, the source first. Raises the errors of `build_pipeline`.
    """
    source = specs[0]
    data, layout = plan_epoch(specs, rank_info.world_size)
    num_ahead = 0
    if cache.size is not None:
        needed, ahead = measure_cache(data, rank_info)
        if needed > cache.size and cache.small == "refuse":
            raise PipelineError(describe_small_cache(cache.size, needed, rank_info.ranks_per_node))
        num_ahead = ahead if 2 * needed <= cache.size else 0  # more parts would displace parts that are still read
    run = Run(rank_info, source.seed, num_threads)
    context = Context(run, find, buckets=layout.buckets)
    stages = [stage for stage in fuse(specs[1:]) if stage.kind in ("each", "batch")]
    at = next((at for at, spec in enumerate(stages) if spec.kind == "batch"), len(stages))
    of_part = replace(context, live=lives(stages[:at])[0])
    parts = [
        bind_steps(fuse(part.stages), replace(of_part, part=number)) for number, part in enumerate(source.mixture or ())
    ] or [((), context)]
    starts = [after.roles for _, after in parts]
    different = [roles for number, roles in enumerate(starts) if roles not in starts[:number]]
    bound = [bind_steps(stages[:at], replace(context, roles=roles)) for roles in different]
    # Parts whose samples the stages treat alike share their steps, so that one step writes a whole batch.
    alike = [(roles.at_run(), after.roles.at_run()) for roles, (_, after) in zip(different, bound, strict=True)]
    steps_of = [bound[alike.index(alike[different.index(roles)])][0] for roles in starts]
    context = replace(bound[0][1], roles=merged([after.roles for _, after in bound]))
    collate = stages[at].make_batcher(context) if at < len(stages) else None
    batch_steps, _ = bind_steps(stages[at + 1 :], context)
    return Program(
        reader=SampleReader(data.tables, data.parts, cache.open()),
        stages=tuple(SampleStages((*steps, *steps_of[number])) for number, (steps, _) in enumerate(parts)),
        collate=collate,
        order=data.order,
        batch_stages=SampleStages(batch_steps) if batch_steps else None,
        epoch=layout,
        run=run,
        forgives=errors.max_bad != 0,
        forgives_functions=errors.transforms,
        num_ahead=num_ahead,
    )


class _StreamBuilder:
    """Turns the settings of a stream's stages into running stages, one stage after the other.

    Attributes:
        bound: The running stages so far.
        steps: One-to-one stages that `_flush` adds to `bound`, together as one running stage.
        is_open: Whether the stages in `bound` yield samples. Before that, they yield shards.
        batch: Samples per batch of the first `batched`; 0 before `batched`.
        cut: Index of `with_epoch` in `bound`; None before `with_epoch`.
        counted: `with_epoch` and all later stages except one-to-one stages. A foreign stage is None.
        is_batched: Whether the next stage gets batches.
        uneven: See `Layout.uneven`.
    """

    def __init__(self, stages: Sequence[Any], context: StreamContext) -> None:
        self.stages = fuse(stages)
        self.context = context
        self.run = context.run
        self.bound: list[Any] = []
        self.steps: list[Step] = []
        self.is_open = False
        self.batch = 0
        self.cut: int | None = None
        self.counted: list[StageSpec | None] = []
        self.is_batched = False
        self.uneven = ""

    def build(self, max_workers: int) -> StreamPipeline:
        """Build all stages and return the pipeline, for at most `max_workers` worker processes. Call this once. Raises
        the errors of `build_pipeline`.
        """
        for at, (stage, live) in enumerate(zip(self.stages, lives(self.stages)[1:], strict=True)):
            if not isinstance(stage, StageSpec):
                self._add_foreign(stage, at)
                continue
            if stage.kind not in ("source", "splitter", "open"):
                self._open_before(at)
            if isinstance(stage, StreamStage):
                self._add(stage)
            elif isinstance(stage, PerSampleStage):
                step, self.context.stage_context = stage.step(replace(self.context.stage_context, live=live))
                self.steps.append(step)
        self._open_before(len(self.stages))
        self._flush()
        layout = Layout(
            draws=self.context.draws,
            cut=self.cut,
            split_none=getattr(self.stages[0], "split", None) == "none",
            count=self._count(),
            uneven=self.uneven,
            length=self.context.length,
            batch=self.batch or 1,
            fingerprint=self._fingerprint(),
        )
        return StreamPipeline(self.bound, self.run, layout, max_workers)

    def _add(self, stage: StreamStage) -> None:
        """Add the running form of a stage of wdskit to `bound`, after the collected one-to-one stages. For a stage
        without a running form, such as `with_length`, nothing is added.
        """
        self._flush()
        running: Any = stage.bind(self.context)
        self.context.stage_context = self.context.stage_context.after(stage)
        if isinstance(running, EpochCut):
            self.cut = len(self.bound)
        if self.cut is not None:
            self.counted.append(stage)
            if isinstance(stage, Select):
                self.uneven = "`select` drops values"
        if stage.kind == "batch":
            self.batch = self.batch or running.size
            self.is_batched = True
        elif isinstance(stage, Unbatched):
            self.batch, self.is_batched = 0, False
        self.is_open = self.is_open or stage.kind == "open"
        if running is not None:
            self.bound.append(running)

    def _flush(self) -> None:
        """Add the collected one-to-one stages as one stage."""
        if self.steps:
            self.bound.append(StreamStages(self.run, self.steps))
            self.steps = []
            if self.cut is not None and self.run.max_bad and not self.is_batched:
                self.uneven = "`errors.max_bad` skips bad samples"

    def _add_foreign(self, stage: Any, at: int) -> None:
        """Add a foreign stage, which is not wdskit's. `at` is its index in the pipeline.

        A stage that opens the shards is added before the foreign stage if the foreign stage needs samples. If the
        foreign stage yields samples, a `Renumber`, which numbers them again, is added after it. Instead of a splitter
        of webdataset, the splitter of wdskit is added (see `_own_splitter`).
        """
        if self.cut is not None:
            self.counted.append(None)
        if at and not self.is_open and takes_shards(stage):
            self.bound.append(self._own_splitter(stage) or stage)
            return
        opens = opens_shards(stage)
        if at and not opens:
            self._open_before(at)
        self.is_open = self.is_open or opens or (at == 0 and not any(map(opens_shards, self.stages)))
        self._flush()
        self.bound.append(stage)
        known = self.context.stage_context
        self.context.stage_context = replace(known, roles=replace(known.roles.after_function(), places=None))
        if self.is_open:
            self.bound.append(Renumber(self.run, each_epoch=self.context.is_after_with_epoch))

    def _own_splitter(self, stage: Any) -> Any:
        """Return a running splitter of wdskit to use in place of webdataset's `split_by_node` or `split_by_worker`.

        Return None if `stage` is another stage, or if the source is not a source of wdskit.
        """
        # webdataset's splitters count from the first shard that a process receives, not from draw 0, and do not find
        # the rank in spawned workers.
        if self.context.draws is None or not is_webdatasets(stage):
            return None
        ours = {SplitByNode.name: SplitByNode, SplitByWorker.name: SplitByWorker}.get(getattr(stage, "__name__", ""))
        return ours and ours().bind(self.context)

    def _open_before(self, at: int) -> None:
        """Add a stage that opens the shards, unless the shards are open or a stage from index `at` on opens them."""
        if not self.is_open and not any(map(opens_shards, self.stages[at:])):
            self._add(TarfileToSamples())

    def _count(self) -> Callable[[int, int], int] | None:
        """Return a function that takes a worker's number and the number of workers, and returns the number of items
        that this worker yields in an epoch. Return None if the number of items is unknown.
        """
        counted = [stage for stage in self.counted if isinstance(stage, StreamStage) and stage.is_counted]
        if not counted or len(counted) < len(self.counted):
            return None
        return partial(_count_items, tuple(counted), self.run.rank_info.world_size)

    def _fingerprint(self) -> dict[str, Any]:
        """Return the settings that decide the order of samples, as plain JSON; empty if the source is not wdskit's."""
        if self.context.shards is None:
            return {}
        kinds = ("splitter", "open", "stream", "batch", "epoch")
        sizes = [getattr(stage, "size", getattr(stage, "n", None)) for stage in self.bound]
        return {
            **self.stages[0].fingerprint(self.context.shards),
            "stages": [stage.name for stage in self.stages[1:] if getattr(stage, "kind", None) in kinds],
            "sizes": [size for size in sizes if size is not None],
        }


def _count_items(stages: Sequence[StreamStage], world_size: int, worker: int, num_workers: int) -> int:
    """Return the number of items that a worker of a rank yields in an epoch.

    Args:
        stages: `with_epoch` and the later stages.
        world_size: Number of ranks.
        worker: Number of the worker among the workers of its rank.
        num_workers: Number of workers of each rank.
    """
    count = 0
    for stage in stages:
        count = stage.num_items(count, worker, num_workers, world_size)
    return count
