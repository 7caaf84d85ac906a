"""The plan of an epoch of a planned source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wdskit.loader.plan_reads import MixtureSample, Reading, read_order, sample_mixture
from wdskit.loader.plan_types import EpochPlan, LanesPlan, PartPlan, Spread
from wdskit.order.base import Order
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.steps import Steps
from wdskit.pipeline.defaults import Crew
from wdskit.pipeline.planned_data import PlannedData, epoch_length, plan_data
from wdskit.pipeline.shards import USUAL_OPEN_SHARDS
from wdskit.pipeline.source_specs import PartSpec, PlannedSpec

_MUCH_DROPPED = 0.05  # of an epoch


class Epoch(NamedTuple):
    """An epoch of a planned source.

    Attributes:
        source: Its spec.
        data: Its shards and their order.
        steps: Those of the epoch.
        start: Position of its first sample in the order's endless sequence.
        is_cut: Whether `with_epoch` cuts epochs out of the sequence, so that they are no passes.
    """

    source: PlannedSpec
    data: PlannedData
    steps: Steps
    start: int
    is_cut: bool


def open_epoch(specs: Sequence[Any], world_size: int, number: int) -> Epoch:
    """Find the data of epoch `number` of a pipeline with a planned source, as `rules.check_order` accepts it."""
    source = specs[0]
    data = plan_data(source)
    length = epoch_length(specs, data.num_samples, world_size)
    steps = Steps(length.num_samples, length.batch, world_size, source.tail)
    return Epoch(source, data, steps, number * length.num_samples, length.with_epoch is not None)


def plan_epoch(epoch: Epoch, *, crew: Crew, node_size: int) -> EpochPlan:
    """Plan an epoch, for nodes of so many ranks (at most R) with such workers each."""
    source, data, steps, start, _ = epoch
    readings, counts, warnings = _read(epoch, node_size)
    lanes = _lanes(data.order, max(reading.lanes or 0 for reading in readings), steps.world_size)
    open_shards = math.ceil(sum(reading.rank_held.num_shards for reading in readings))
    parts = _parts(source, data, counts)
    return EpochPlan(
        source=source.name,
        world_size=steps.world_size,
        workers=crew.workers,
        threads_reason=crew.reason,
        gpus_per_node=node_size,
        epoch=start // steps.num_samples,
        num_samples=steps.num_samples,
        batch=steps.batch,
        global_batch=steps.global_batch,
        steps=len(steps),
        num_dropped=steps.num_dropped,
        num_padded=steps.num_padded,
        num_shards=sum(int(np.count_nonzero(table.counts)) for table in data.tables),
        num_bytes=sum(part.num_bytes for part in parts),
        lanes=lanes,
        rank_shards=_sum(reading.shards for reading in readings),
        rank_bytes=_sum(reading.num_bytes for reading in readings),
        open_shards=open_shards,
        node_shards=math.ceil(sum(reading.node_held.num_shards for reading in readings)),
        node_bytes=round(sum(reading.node_held.num_bytes for reading in readings)),
        parts=parts,
        warnings=(*_warnings(lanes, open_shards, steps), *warnings),
    )


def _read(epoch: Epoch, node_size: int) -> tuple[list[Reading], list[int], list[str]]:
    """What is read of each order, samples of each part, and warnings."""
    source, data, steps, start, _ = epoch
    stop = start + steps.num_samples - steps.num_dropped
    options: dict[str, Any] = {"world_size": steps.world_size, "node_size": node_size}
    if not isinstance(data.order, MixtureOrder):
        sample_bytes = np.concatenate([table.sample_bytes() for table in data.tables])
        reading = read_order(
            data.order, start, stop, global_batch=steps.global_batch, sample_bytes=sample_bytes, **options
        )
        weights = np.bincount(data.parts, [int(table.counts.sum()) for table in data.tables])
        return [reading], [round(each) for each in weights / weights.sum() * (stop - start)], []
    mixture = data.order
    sample = sample_mixture(mixture, start, steps.num_samples, steps.world_size)
    before, behind = mixture.shares.before(start).tolist(), mixture.shares.before(stop).tolist()
    readings = [
        read_order(
            order,
            first,
            last,
            global_batch=steps.global_batch * (last - first) / (stop - start),
            sample_bytes=table.sample_bytes(),
            who=sample.takers(number, order.num_lanes, **options) if hasattr(order, "num_lanes") else None,
            **options,
        )
        for number, (order, table, first, last) in enumerate(
            zip(mixture.parts, data.tables, before, behind, strict=True)
        )
        if last > first
    ]
    counts = [last - first for first, last in zip(before, behind, strict=True)]
    return readings, counts, _uneven(sample, source, steps.world_size)


def _parts(source: PlannedSpec, data: PlannedData, counts: Sequence[int]) -> tuple[PartPlan, ...]:
    specs = source.mixture or (PartSpec(shards=source.shards or "", split=source.split, range=source.range),)
    total = sum(counts)
    parts = []
    for number, (spec, count) in enumerate(zip(specs, counts, strict=True)):
        table = data.tables[data.parts.index(number)]
        num_samples = int(table.counts.sum())
        num_bytes = round(float(table.counts @ table.sample_bytes()))
        num_shards = int(np.count_nonzero(table.counts))
        parts.append(PartPlan(_name(spec), num_shards, num_samples, num_bytes, count / total, count / num_samples))
    return tuple(parts)


def _name(spec: PartSpec) -> str:
    shards = spec.shards if isinstance(spec.shards, str) else "::".join(spec.shards)
    split = f" split {spec.split}" if spec.split is not None else ""
    return shards + split + (f" range {spec.range[0]} to {spec.range[1]}" if spec.range is not None else "")


def _sum(spreads: Iterable[Spread]) -> Spread:
    return Spread(*(sum(each) for each in zip(*spreads, strict=True)))


def _lanes(order: Order, per_rank: int, world_size: int) -> LanesPlan | None:
    orders = order.parts if isinstance(order, MixtureOrder) else (order,)
    laned = [each for each in orders if isinstance(each, (ExactOrder, ResampledOrder))]
    if not laned:
        return None
    num_lanes = laned[0].num_lanes
    return LanesPlan(num_lanes, per_rank, fitting_lanes(num_lanes, world_size))


def fitting_lanes(num_lanes: int, world_size: int) -> tuple[int, ...]:
    """The numbers of lanes L nearest to `num_lanes`, below and above, of which a rank touches at most 2 L / R.

    A rank touches L / gcd(R, L), so the divisor must be R or half of it.
    """
    unit = world_size // 2 if world_size % 2 == 0 else world_size
    below = num_lanes - num_lanes % unit
    return tuple(dict.fromkeys(each for each in (below, -(-num_lanes // unit) * unit) if each))


def _warnings(lanes: LanesPlan | None, open_shards: int, steps: Steps) -> Iterable[str]:
    if lanes is not None and lanes.per_rank * steps.world_size > 2 * lanes.num_lanes:
        near = " or ".join(map(str, lanes.fitting))
        yield (
            f"a rank takes from {lanes.per_rank} of {lanes.num_lanes} lanes, more than twice "
            f"{lanes.num_lanes} / {steps.world_size}, and shares each with other ranks, which read the same shards.\n"
            f"  Before a run begins, set `lanes: {near}`: another number is another order."
        )
    if open_shards > USUAL_OPEN_SHARDS:
        yield (
            f"a rank reads from {open_shards:,} shards at a time, and a process keeps {USUAL_OPEN_SHARDS} open where "
            "`ulimit -n` is 1024: the others are opened again and again.\n"
            "  Raise that limit, or use larger shards, fewer lanes or a smaller window."
        )
    if steps.num_dropped > _MUCH_DROPPED * steps.num_samples:
        yield (
            f"{steps.num_dropped / steps.num_samples:.0%} of each epoch is dropped, since it fills no batch of "
            f"{steps.global_batch:,} on all ranks.\n  Use smaller batches or `tail: pad`."
        )


def _uneven(sample: MixtureSample, source: PlannedSpec, world_size: int) -> list[str]:
    found = sample.uneven_rank()
    if found is None:
        return []
    rank, part, there, whole = found
    name = _name((source.mixture or ())[part])
    msg = f"rank {rank} takes {there:.0%} of its samples from {name}, all ranks together {whole:.0%}: the parts "
    msg += "take turns in step with the ranks. Global batches have the right shares, those of one rank have not."
    way_out = f"Weights that add up to a number without a common factor with {world_size}, as 50 and 51, break it."
    return [f"{msg}\n  {way_out}"]
