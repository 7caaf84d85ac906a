"""From the description of a pipeline with a planned source to what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.program import Plan, Program
from wdskit.engine.sample import SampleStages
from wdskit.engine.shard_cache import ShardCache
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec
from wdskit.stages.base import Context, Find, Place, Run, Step
from wdskit.stages.batching import Batcher
from wdskit.stages.images.fused import fuse
from wdskit.stages.sources import PlannedData, epoch_length


def compose_planned(
    specs: Sequence[Any], *, place: Place, num_threads: int, find: Find, errors: ErrorsSpec, cache: CacheSpec
) -> PlannedPipeline:
    """Make the running form of a pipeline with a planned source.

    Args:
        specs: One planned source, then stages, as `rules.check_order` accepts them.
        place: Rank and world size.
        num_threads: Threads for one-to-one stages, in each process.
        find: The user's function of a name.
        errors: What becomes of bad samples.
        cache: Where parts of remote shards are kept.

    Raises:
        PipelineError: A function is unknown, or an epoch does not come out even.
        StorageError, FolderIndexError: The shards cannot be listed, or have no index.
    """
    source = specs[0]
    data = source.plan()
    run = Run(place, source.seed, num_threads)
    in_parts = [spec for part in source.mixture or () for spec in part.stages]
    context = Context(run, find, [*in_parts, *specs])
    parts = tuple(tuple(spec.step(context) for spec in fuse(part.stages)) for part in source.mixture or ())
    before: list[Step] = []
    behind: list[Step] = []
    batched = None
    for spec in fuse(specs[1:]):
        if spec.kind == "each":
            (before if batched is None else behind).append(spec.step(context))
        elif spec.kind == "batch":
            batched = spec.bind(context)
    return PlannedPipeline(
        Program(
            shards=ShardCache(data.tables, data.parts, cache.open()),
            stages=SampleStages(tuple(before), parts if any(parts) else ()),
            batched=batched,
            behind=SampleStages(tuple(behind)) if behind else None,
            run=run,
            plan=_plan(specs, data, place, batched, errors),
        )
    )


def _plan(specs: Sequence[Any], data: PlannedData, place: Place, batched: Batcher | None, errors: ErrorsSpec) -> Plan:
    length = epoch_length(specs, data.num_samples, place.world_size)
    # There without one too: torch.distributed.checkpoint loads the names that the loader has, and only those.
    with_epoch = {"with_epoch": length.with_epoch}
    return Plan(
        order=data.order,
        tail=specs[0].tail,
        batch=length.batch,
        epoch_samples=length.num_samples,
        is_batched=batched is not None,
        fingerprint={**data.fingerprint, **with_epoch},
        forgives=errors.max_bad != 0,
        forgives_functions=errors.transforms,
    )
