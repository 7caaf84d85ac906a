"""What the ranks of an epoch read, and into how many shards they reach at once, from the cuts of an order's lanes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.stages.sources import PlannedData

Floats = NDArray[np.float64]
OneOrder = ExactOrder | ResampledOrder | SequentialOrder

_MAX_PASSES = 64  # of an epoch; later ones of a data set that repeats so often reach no further shard
_MAX_RANKS = 16  # of a mixture whose shares are sampled, and
_MAX_SAMPLED = 1 << 14  # positions of each of them


class Spread(NamedTuple):
    """A number that differs from rank to rank."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Of at least one value."""
        return cls(float(values.min()), float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class EpochReads:
    """What is read in an epoch.

    Attributes:
        rank_shards: Shards into which the lanes of a rank reach, and
        rank_bytes: bytes of the samples that it reads.
        rank_open: The most shards into which the windows of a rank reach at once.
        node_open: The same of all ranks of a node together, and
        node_bytes: the bytes of all samples of these windows.
        num_lanes: L; None for a sequential order.
        rank_lanes: Lanes from which a rank takes.
        samples_of_part: How many of the epoch's samples are of each part.
    """

    rank_shards: Spread
    rank_bytes: Spread
    rank_open: float
    node_open: float
    node_bytes: float
    num_lanes: int | None
    rank_lanes: int
    samples_of_part: tuple[int, ...]


def read_epoch(data: PlannedData, steps: Steps, start: int, node_size: int) -> EpochReads:
    """What is read of an epoch.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        node_size: Ranks of a node, at most R.
    """
    stop = start + steps.num_samples - steps.num_dropped
    sizes = [table.sample_bytes() for table in data.tables]
    if isinstance(data.order, MixtureOrder):
        orders, num_groups = data.order.parts, 1  # ranks take from all lanes of each part
        ends = [data.order.shares.before(each).tolist() for each in (start, stop)]
        of_parts = [last - first for first, last in zip(*ends, strict=True)]
    else:
        orders, sizes, ends = (data.order,), [np.concatenate(sizes)], [[start], [stop]]
        # Rank r takes the positions p with p mod R == r: those that are alike mod gcd(R, L) take from the same lanes.
        num_groups = math.gcd(_num_lanes(data.order), steps.world_size)
        weights = np.bincount(data.parts, [float(table.counts.sum()) for table in data.tables])
        of_parts = [round(each) for each in (weights / weights.sum() * (stop - start)).tolist()]
    shards, num_bytes = np.zeros(num_groups), np.zeros(num_groups)
    rank_open = node_open = node_bytes = 0.0
    num_lanes = 1
    for order, sample_bytes, first, last in zip(orders, sizes, *ends, strict=True):
        if first < last:
            assert isinstance(order, OneOrder)
            num_lanes = _num_lanes(order)
            groups = np.arange(num_lanes) % num_groups
            of_lanes = lane_reads(order, first, last, groups, sample_bytes)
            shards += of_lanes[0]
            num_bytes += of_lanes[1] * num_groups / steps.world_size
            batch = max(1, round(steps.global_batch * (last - first) / (stop - start)))
            rank_open += read_at_once(order, first, groups, sample_bytes, batch)[0]
            of_node = read_at_once(order, first, groups // node_size, sample_bytes, batch)
            node_open += of_node[0]
            node_bytes += of_node[1]
    has_lanes = not isinstance(orders[0], SequentialOrder)
    return EpochReads(
        Spread.of(shards),
        Spread.of(num_bytes),
        rank_open,
        node_open,
        node_bytes,
        num_lanes if has_lanes else None,
        num_lanes // num_groups,
        tuple(of_parts),
    )


def _num_lanes(order: object) -> int:
    """A sequential order is one lane."""
    return getattr(order, "num_lanes", 1)


def find_uneven_rank(order: MixtureOrder, start: int, steps: Steps) -> tuple[int, int, float, float] | None:
    """Sample what the first ranks take of each part of a mixture: parts can take turns in step with the ranks.

    Returns:
        (rank, part, its share of the rank's samples, its share of all ranks') where they differ most; None where they
        hardly do.
    """
    num = max(1, min(_MAX_SAMPLED, steps.num_samples // steps.world_size))
    ranks = np.arange(min(steps.world_size, _MAX_RANKS))
    positions = start + ranks[:, None] + steps.world_size * np.arange(num)
    parts = order.shares.take(positions.ravel())[0].reshape(positions.shape)
    shares = np.array([np.bincount(mine, minlength=len(order.parts)) / num for mine in parts])
    whole = shares.mean(axis=0)
    off = np.abs(shares - whole)
    rank, part = divmod(int(off.argmax()), shares.shape[1])
    if off[rank, part] <= max(0.005, 0.05 * whole[part]):
        return None
    return rank, part, float(shares[rank, part]), float(whole[part])


def lane_reads(order: OneOrder, start: int, stop: int, groups: Ints, sample_bytes: Floats) -> tuple[Floats, Floats]:
    """What groups of lanes hold of positions `start` to `stop` of the endless sequence.

    Args:
        order: The order.
        start: First position, >= 0.
        stop: The one behind the last, above `start`.
        groups: Group of each lane, from 0 on, (num_lanes,).
        sample_bytes: Mean size of a sample of each shard, (num_shards,).

    Returns:
        Shards into which each group reaches, and bytes of their samples, float64 (num_groups,) each. Of `resampled`
        they are expected, over all seeds; else counted.
    """
    num_groups = int(groups.max()) + 1
    if isinstance(order, ResampledOrder):
        nums = np.bincount(groups, minlength=num_groups)
        num_chunks = math.ceil((stop - start) / order.num_lanes / order.chunk)
        drawn = {num: _num_drawn(order, num * num_chunks) for num in set(nums.tolist())}
        mean_bytes = order.counts @ sample_bytes / order.num_samples
        return np.array([drawn[num] for num in nums.tolist()]), nums / order.num_lanes * (stop - start) * mean_bytes
    if isinstance(order, SequentialOrder):
        num_seen = min(stop - start, order.num_samples)  # of several passes the first
        counts = np.diff(np.minimum(order.stops, num_seen), prepend=0)
        scale = (stop - start) / num_seen
        return np.array([float(np.count_nonzero(counts))]), np.array([counts @ sample_bytes * scale])
    size, num_seen = order.num_samples, 0
    found, num_bytes = [], np.zeros(num_groups)
    for number in range(start // size, -(-stop // size))[:_MAX_PASSES]:
        pieces = order.pieces(number)
        lanes, numbers, sizes = pieces.windows
        first, last = (min(max(each - number * size, 0), size) for each in (start, stop))
        num_seen += last - first
        ends = (-(-(each - lanes) // order.num_lanes) for each in (first, last))  # places of a lane before each
        before, behind = (np.clip(each - numbers * order.window, 0, sizes) for each in ends)
        ratios = (behind - before) / sizes
        counted = (ratios > 0)[pieces.at]
        at, shards = pieces.at[counted], pieces.shards[pieces.turns[counted]]
        of_piece = groups[lanes][at]
        found.append(_distinct(shards * num_groups + of_piece))
        weights = pieces.sizes[counted] * ratios[at] * sample_bytes[shards]
        num_bytes += np.bincount(of_piece, weights, minlength=num_groups)
    shards_of = np.bincount(_distinct(np.concatenate(found)) % num_groups, minlength=num_groups)
    return shards_of.astype(np.float64), num_bytes * (stop - start) / num_seen


def read_at_once(
    order: OneOrder, start: int, groups: Ints, sample_bytes: Floats, global_batch: int
) -> tuple[float, float]:
    """The most shards, and the most bytes of samples, that one group of lanes is in at one moment of a pass.

    All lanes are in windows of one number at a time, but for the moment in which they change over; a sequential order
    is in a global batch.

    Args:
        order: The order.
        start: A position of the pass.
        groups: As `lane_reads` takes them.
        sample_bytes: As `lane_reads` takes them.
        global_batch: Positions of a step.
    """
    if isinstance(order, ResampledOrder):
        num = int(np.bincount(groups).max())
        mean_bytes = float(order.counts @ sample_bytes) / order.num_samples
        return _num_drawn(order, num * -(-order.window // order.chunk)), num * order.window * mean_bytes
    if isinstance(order, SequentialOrder):
        edges = np.minimum(np.arange(0, order.num_samples + global_batch, global_batch), order.num_samples)
        firsts, lasts = (np.searchsorted(order.stops, each, side="right") for each in (edges[:-1], edges[1:] - 1))
        counts = np.diff(order.stops, prepend=0)
        filled = np.cumsum(counts > 0, dtype=np.int64)
        heights = np.concatenate([[0.0], np.cumsum(counts * sample_bytes)])
        num_bytes = np.diff(np.interp(edges, np.concatenate([[0], order.stops]), heights))
        return float((filled[lasts] - filled[firsts]).max()) + 1, float(num_bytes.max())
    pieces = order.pieces(start // order.num_samples)
    moments = (pieces.windows.numbers * (int(groups.max()) + 1) + groups[pieces.windows.lanes])[pieces.at]
    found = _distinct(moments * len(pieces.shards) + pieces.turns)  # two lanes can meet in a shard
    of_moments = np.bincount(moments, pieces.sizes * sample_bytes[pieces.shards[pieces.turns]])
    return float(np.bincount(found // len(pieces.shards)).max()), float(of_moments.max())


def _distinct(numbers: Ints) -> Ints:
    """Each number once, ascending: `np.unique` of numpy 2.3 hashes, which takes ten times as long."""
    in_order = np.sort(numbers)
    distinct: Ints = in_order[np.diff(in_order, prepend=-1) != 0]
    return distinct


def _num_drawn(order: ResampledOrder, num_draws: int) -> float:
    """Different shards among so many starts of chunks, as expected."""
    likely = np.minimum(order.counts / order.num_samples, 1 - 1e-15)
    return float(-np.expm1(num_draws * np.log1p(-likely)).sum())
