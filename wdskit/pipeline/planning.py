"""From the description of a pipeline with a planned source to what runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.program import EpochLayout, Program
from wdskit.engine.sample import SampleStages
from wdskit.engine.shard_cache import ShardCache
from wdskit.errors import PipelineError
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec
from wdskit.stages.base import Context, Find, Place, Run, Step, bind_steps, takes_masks
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
    ahead = 0 if cache.size is None else _fit_cache(data, place, cache)
    run = Run(place, source.seed, num_threads)
    context = Context(run, find, takes_masks(specs))
    parts = tuple(
        bind_steps(
            fuse(part.stages),
            replace(context, part=number, has_masks=context.has_masks or takes_masks(part.stages)),
        )[0]
        for number, part in enumerate(source.mixture or ())
    )
    before: list[Step] = []
    behind: list[Step] = []
    batched = None
    for spec in fuse(specs[1:]):
        if spec.kind == "each":
            step, context = spec.step(context)
            (before if batched is None else behind).append(step)
        elif spec.kind == "batch":
            batched = spec.make_batcher(context)
    return PlannedPipeline(
        Program(
            shards=ShardCache(data.tables, data.parts, cache.open()),
            stages=SampleStages(tuple(before), parts if any(parts) else ()),
            batched=batched,
            behind=SampleStages(tuple(behind)) if behind else None,
            run=run,
            plan=_plan(specs, data, place, batched, errors),
            ahead=ahead,
        )
    )


def _fit_cache(data: PlannedData, place: Place, cache: CacheSpec) -> int:
    """How many positions ahead parts are fetched: half a window of all lanes where the cache holds two windows of a
    node's lanes, else none, as the next ones would drive out those that are read.

    Raises:
        PipelineError: It does not hold one, to which a node comes back again and again: what the cache drops would be
            fetched many times over. `small: ranges` allows it.
    """
    orders = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    needed, ahead = 0.0, 0
    for number, order in enumerate(orders):
        if isinstance(order, (ExactOrder, ResampledOrder)):
            tables = data.tables if len(orders) == 1 else data.tables[number : number + 1]
            whole = sum(float(table.counts @ table.sample_bytes()) for table in {*tables} if table.is_remote)
            window = order.num_lanes * order.window
            needed += whole * min(1.0, window / order.num_samples)
            ahead = min(ahead or window // 2, window // 2)
    needed = needed * place.ranks_per_node / place.world_size
    num_bytes = cache.size or 0
    if needed > num_bytes and cache.small == "refuse":
        size, least = format_bytes(num_bytes), format_bytes(needed)
        msg = f"cache.size is {size}, but a node of this run must keep {least} of its shards at once."
        way = f"Set `cache.size: {least.replace(' ', '')}` or more, a smaller `window`, or `cache.small: ranges`."
        raise PipelineError(f"{msg}\n  {way}")
    return ahead if 2 * needed <= num_bytes else 0


def _plan(
    specs: Sequence[Any], data: PlannedData, place: Place, batched: Batcher | None, errors: ErrorsSpec
) -> EpochLayout:
    length = epoch_length(specs, data.num_samples, place.world_size)
    # There without one too: torch.distributed.checkpoint loads the names that the loader has, and only those.
    with_epoch = {"with_epoch": length.with_epoch}
    return EpochLayout(
        order=data.order,
        tail=specs[0].tail,
        batch=length.batch,
        epoch_samples=length.num_samples,
        is_batched=batched is not None,
        fingerprint={**data.fingerprint, **with_epoch},
        forgives=errors.max_bad != 0,
        forgives_functions=errors.transforms,
    )
