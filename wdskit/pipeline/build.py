"""Build the running form of a pipeline from its description: a `Program` or a `StreamPipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wdskit.config.types import VALID
from wdskit.engine.program import Program
from wdskit.engine.reader import SampleReader
from wdskit.engine.stream import StreamPipeline
from wdskit.errors import PipelineError
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, describe_small_cache, measure_cache
from wdskit.stages.base import Context, FunctionLookup, bind_steps, lives
from wdskit.stages.epoch import plan_epoch
from wdskit.stages.images.fused import fuse
from wdskit.stages.registry import resolve
from wdskit.stages.run import RankInfo, Run, SampleStages, merged
from wdskit.stages.streaming import Stream, StreamRun
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
        stages: One source, then stages, in an order that `config.order.check_order` accepts. A callable is a stage that
            is not wdskit's.
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
    if num_threads > 1:
        raise PipelineError("threads: a stream has one thread in each process. Use more workers.")
    if isinstance(errors.max_bad, str):
        msg = f"errors.max_bad: {errors.max_bad} of a stream is unknown before it ends."
        raise PipelineError(f"{msg}\n  Write a number of samples, or use the source `exact`.")
    seed = stages[0].seed if isinstance(stages[0], Stream) else 0
    run = StreamRun(rank_info, seed, max_bad=errors.max_bad, forgives_functions=errors.transforms)
    return StreamPipeline(stages, run, Context(run, find))


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
        if needed > cache.size:
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
    places = context.roles.places or ()
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
        mask_place=places.index(VALID) if VALID in places else None,
    )
