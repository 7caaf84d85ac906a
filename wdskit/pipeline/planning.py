"""From the description of a pipeline with a planned source to what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.program import Plan, Program
from wdskit.engine.sample import SampleStages
from wdskit.engine.shard_cache import ShardCache
from wdskit.errors import PipelineError
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec
from wdskit.stages.base import Context, Find, Place, Run, Step
from wdskit.stages.batching import Batcher
from wdskit.stages.images.fused import fuse
from wdskit.stages.sources import PlannedData, epoch_length
from wdskit.text import format_bytes


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
        PipelineError: A function is unknown, an epoch does not come out even, or the cache is too small.
        StorageError, FolderIndexError: The shards cannot be listed, or have no index.
    """
    source = specs[0]
    data = source.plan()
    if cache.size is not None and cache.small == "refuse":
        _check_size(data, place, cache.size)
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


def _check_size(data: PlannedData, place: Place, num_bytes: int) -> None:
    """Refuse a cache that is smaller than the windows of a node's lanes, to which it comes back again and again: what
    it drops it would fetch many times over.
    """
    orders = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    needed = 0.0
    for number, order in enumerate(orders):
        if isinstance(order, (ExactOrder, ResampledOrder)):
            tables = data.tables if len(orders) == 1 else data.tables[number : number + 1]
            whole = sum(float(table.counts @ table.sample_bytes()) for table in {*tables} if table.is_remote)
            needed += whole * min(1.0, order.num_lanes * order.window / order.num_samples)
    needed = needed * place.ranks_per_node / place.world_size
    if needed > num_bytes:
        size, least = format_bytes(num_bytes), format_bytes(needed)
        msg = f"cache.size is {size}, but a node of this run must keep {least} of its shards at once."
        way = f"Set `cache.size: {least.replace(' ', '')}` or more, a smaller `window`, or `cache.small: ranges`."
        raise PipelineError(f"{msg}\n  {way}")


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
