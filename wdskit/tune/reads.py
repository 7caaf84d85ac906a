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
from wdskit.pipeline.planned_data import PlannedData

Floats = NDArray[np.float64]

_MAX_PASSES = 64  # of an epoch; later ones of a data set that repeats so often reach no further shard
_MAX_RANKS = 16  # of a mixture, and
_MAX_SAMPLED = 1 << 14  # positions of each of them, which show the lanes that it takes from


class Spread(NamedTuple):
    """A number that differs from rank to rank."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class EpochReads:
    """What is read in an epoch.

    Attributes:
        rank_shards: Shards into which the lanes of a rank reach, and
        rank_bytes: bytes of the samples that it reads.
        open_shards: Shards into which the windows of a rank reach at once, at most.
        node_shards: The same of all ranks of a node together, and
        node_bytes: the bytes of all samples of these windows.
        num_lanes: L; None for a sequential order.
        rank_lanes: Lanes from which a rank takes.
        samples_of_part: How many of the epoch's samples are of each part.
        uneven: (rank, part, its share of the rank's samples, its share of all ranks') of the rank that differs most
            where parts take turns in step with the ranks.
    """

    rank_shards: Spread
    rank_bytes: Spread
    open_shards: float
    node_shards: float
    node_bytes: float
    num_lanes: int | None
    rank_lanes: int
    samples_of_part: tuple[int, ...]
    uneven: tuple[int, int, float, float] | None = None


class _AtOnce(NamedTuple):
    """What windows reach into at one moment, or the sum of several parts."""

    shards: float
    num_bytes: float


def read_epoch(data: PlannedData, steps: Steps, start: int, node_size: int) -> EpochReads:
    """What is read of an epoch.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        node_size: Ranks of a node, at most R.
    """
    stop = start + steps.num_samples - steps.num_dropped
    if isinstance(data.order, MixtureOrder):
        return _read_mixture(data, data.order, steps, start, stop, node_size)
    sample_bytes = np.concatenate([table.sample_bytes() for table in data.tables])
    weights = np.bincount(data.parts, [float(table.counts.sum()) for table in data.tables])
    of_parts = tuple(round(each) for each in (weights / weights.sum() * (stop - start)).tolist())
    order, world_size = data.order, steps.world_size
    if isinstance(order, SequentialOrder):
        shards, num_bytes = sequential_reads(order, stop - start, world_size, sample_bytes)
        rank, node = sequential_at_once(order, steps.global_batch, world_size, node_size, sample_bytes)
        num_lanes, rank_lanes = None, 0
    else:
        assert isinstance(order, (ExactOrder, ResampledOrder))
        num_lanes = order.num_lanes
        # Rank r takes the positions p with p mod R == r: those that are alike mod gcd(R, L) take from the same lanes.
        num_groups = math.gcd(num_lanes, world_size)
        groups = np.arange(num_lanes) % num_groups
        rank_lanes = num_lanes // num_groups
        shards, of_lanes = lane_reads(order, start, stop, groups, sample_bytes)
        num_bytes = of_lanes * num_groups / world_size
        rank, node = (lanes_at_once(order, start, each, sample_bytes) for each in (groups, groups // node_size))
    return EpochReads(
        _spread(shards), _spread(num_bytes), rank.shards, node.shards, node.num_bytes, num_lanes, rank_lanes, of_parts
    )


def _read_mixture(
    data: PlannedData, order: MixtureOrder, steps: Steps, start: int, stop: int, node_size: int
) -> EpochReads:
    """As `read_epoch`, of some ranks, whose share of each part and whose lanes are sampled."""
    world_size = steps.world_size
    num = max(1, min(_MAX_SAMPLED, steps.num_samples // world_size))
    ranks = np.arange(min(world_size, _MAX_RANKS))
    places = start + ranks[:, None] + world_size * np.arange(num)
    parts, indices = (each.reshape(places.shape) for each in order.shares.take(places.ravel()))
    shares = np.array([np.bincount(mine, minlength=len(order.parts)) / num for mine in parts])
    before, behind = order.shares.before(start).tolist(), order.shares.before(stop).tolist()
    shards, num_bytes = np.zeros(len(ranks)), np.zeros(len(ranks))
    rank_held, node_held = [_AtOnce(0, 0)], [_AtOnce(0, 0)]
    num_lanes, rank_lanes = None, 0
    for number, (each, table) in enumerate(zip(order.parts, data.tables, strict=True)):
        first, last, sample_bytes = before[number], behind[number], table.sample_bytes()
        if first == last:
            continue
        mean_bytes = float(table.counts @ sample_bytes) / float(table.counts.sum())
        num_bytes += shares[:, number] * mean_bytes * (stop - start) / world_size
        if isinstance(each, SequentialOrder):
            shards += sequential_reads(each, last - first, 1, sample_bytes)[0]
            batch = max(1, round(steps.global_batch * (last - first) / (stop - start)))
            held = [*sequential_at_once(each, batch, world_size, node_size, sample_bytes)]
        else:
            assert isinstance(each, (ExactOrder, ResampledOrder))
            num_lanes = each.num_lanes
            lanes = [np.unique(indices[rank][parts[rank] == number] % num_lanes) for rank in ranks]
            groups = [_group_of(mine, num_lanes) for mine in (*lanes, np.unique(np.concatenate(lanes[:node_size])))]
            known = {
                mine.tobytes(): float(lane_reads(each, first, last, mine, sample_bytes)[0][0])
                for mine in {mine.tobytes(): mine for mine in groups[:-1]}.values()
            }
            shards += [known[mine.tobytes()] for mine in groups[:-1]]
            held = [lanes_at_once(each, first, mine, sample_bytes) for mine in (groups[0], groups[-1])]
            rank_lanes = max(rank_lanes, len(lanes[0]))
        rank_held.append(held[0])
        node_held.append(held[1])
    return EpochReads(
        _spread(shards),
        _spread(num_bytes),
        sum(each.shards for each in rank_held),
        sum(each.shards for each in node_held),
        sum(each.num_bytes for each in node_held),
        num_lanes,
        rank_lanes,
        tuple(last - first for first, last in zip(before, behind, strict=True)),
        _find_uneven(shares),
    )


def _spread(values: Floats) -> Spread:
    return Spread(float(values.min()), float(values.mean()), float(values.max()))


def _group_of(lanes: Ints, num_lanes: int) -> Ints:
    """0 for each of some lanes, -1 for all others."""
    groups = np.full(num_lanes, -1)
    groups[lanes] = 0
    return groups


def _find_uneven(shares: Floats) -> tuple[int, int, float, float] | None:
    """The rank and the part whose share differs most from that of all ranks, None where it hardly does."""
    whole = shares.mean(axis=0)
    off = np.abs(shares - whole)
    rank, part = divmod(int(off.argmax()), shares.shape[1])
    if off[rank, part] <= max(0.005, 0.05 * whole[part]):
        return None
    return rank, part, float(shares[rank, part]), float(whole[part])


def lane_reads(
    order: ExactOrder | ResampledOrder, start: int, stop: int, groups: Ints, sample_bytes: Floats
) -> tuple[Floats, Floats]:
    """What groups of lanes hold of positions `start` to `stop` of the endless sequence.

    Args:
        order: The order.
        start: First position, >= 0.
        stop: The one behind the last, above `start`.
        groups: Group of each lane, from 0 on, (num_lanes,); -1 for lanes that do not count.
        sample_bytes: Mean size of a sample of each shard, (num_shards,).

    Returns:
        Shards into which each group reaches, and bytes of their samples, float64 (num_groups,) each. Of `exact` they
        are counted; of `resampled` they are expected, over all seeds.
    """
    num_groups = max(0, int(groups.max())) + 1
    if isinstance(order, ResampledOrder):
        nums = np.bincount(groups[groups >= 0], minlength=num_groups)
        num_chunks = math.ceil((stop - start) / order.num_lanes / order.chunk)
        drawn = {num: _num_drawn(order, num * num_chunks) for num in set(nums.tolist())}
        mean_bytes = order.counts @ sample_bytes / order.num_samples
        return np.array([drawn[num] for num in nums.tolist()]), nums / order.num_lanes * (stop - start) * mean_bytes
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
        of_window = groups[lanes]
        counted = ((ratios > 0) & (of_window >= 0))[pieces.at]
        at, shards = pieces.at[counted], pieces.shards[pieces.turns[counted]]
        found.append(np.unique(shards * num_groups + of_window[at]))
        weights = pieces.sizes[counted] * ratios[at] * sample_bytes[shards]
        num_bytes += np.bincount(of_window[at], weights, minlength=num_groups)
    shards_of = np.bincount(np.unique(np.concatenate(found)) % num_groups, minlength=num_groups)
    return shards_of.astype(np.float64), num_bytes * (stop - start) / num_seen


def lanes_at_once(order: ExactOrder | ResampledOrder, start: int, groups: Ints, sample_bytes: Floats) -> _AtOnce:
    """The most that the windows of one group of lanes reach into at one moment of the pass of position `start`.

    All lanes are in windows of one number at a time, but for the moment in which they change over. Arguments as those
    of `lane_reads`.
    """
    if (groups < 0).all():
        return _AtOnce(0, 0)
    if isinstance(order, ResampledOrder):
        num = int(np.bincount(groups[groups >= 0]).max())
        mean_bytes = float(order.counts @ sample_bytes) / order.num_samples
        return _AtOnce(_num_drawn(order, num * -(-order.window // order.chunk)), num * order.window * mean_bytes)
    pieces = order.pieces(start // order.num_samples)
    of_piece = groups[pieces.windows.lanes][pieces.at]
    counted = of_piece >= 0
    moments = pieces.windows.numbers[pieces.at][counted] * (int(groups.max()) + 1) + of_piece[counted]
    turns = pieces.turns[counted]
    found = np.unique(moments * len(pieces.shards) + turns)  # two lanes can meet in a shard
    num_bytes = np.bincount(moments, pieces.sizes[counted] * sample_bytes[pieces.shards[turns]])
    return _AtOnce(float(np.bincount(found // len(pieces.shards)).max()), float(num_bytes.max()))


def _num_drawn(order: ResampledOrder, num_draws: int) -> float:
    """Different shards among so many starts of chunks, as expected."""
    likely = np.minimum(order.counts / order.num_samples, 1 - 1e-15)
    return float(-np.expm1(num_draws * np.log1p(-likely)).sum())


def sequential_reads(
    order: SequentialOrder, num_positions: int, world_size: int, sample_bytes: Floats
) -> tuple[Floats, Floats]:
    """Shards and bytes that each rank reads of the first `num_positions`, exactly, (world_size,) each; where they are
    several passes, shards of the first.
    """
    looked_at = min(num_positions, order.num_samples)
    counts = np.diff(np.minimum(order.stops, looked_at), prepend=0)
    first_ranks = (np.minimum(order.stops, looked_at) - counts) % world_size

    def around(lengths: Ints, weights: Floats) -> Floats:
        """Sum of the weights on each rank: a weight stands on `lengths` ranks, from the first rank of its shard on."""
        steps = np.bincount(first_ranks, weights, minlength=2 * world_size + 1)
        steps -= np.bincount(first_ranks + lengths, weights, minlength=2 * world_size + 1)
        sums: Floats = np.cumsum(steps)[:-1].reshape(2, world_size).sum(axis=0)
        return sums

    num_bytes = float((counts // world_size) @ sample_bytes) + around(counts % world_size, sample_bytes)
    num_shards = around(np.minimum(counts, world_size), np.ones(len(counts)))
    return num_shards, num_bytes * (num_positions / looked_at)


def sequential_at_once(
    order: SequentialOrder, global_batch: int, world_size: int, node_size: int, sample_bytes: Floats
) -> tuple[_AtOnce, _AtOnce]:
    """The most shards into which a global batch reaches, and the bytes of the share of a rank and of a node in it."""
    edges = np.minimum(np.arange(0, order.num_samples + global_batch, global_batch), order.num_samples)
    counts = np.diff(order.stops, prepend=0)
    firsts, lasts = (np.searchsorted(order.stops, each, side="right") for each in (edges[:-1], edges[1:] - 1))
    filled = np.cumsum(counts > 0, dtype=np.int64)
    most = float((filled[lasts] - filled[firsts]).max()) + 1
    heights = np.concatenate([[0.0], np.cumsum(counts * sample_bytes)])
    batch_bytes = float(np.diff(np.interp(edges, np.concatenate([[0], order.stops]), heights)).max())
    return _AtOnce(most, batch_bytes / world_size), _AtOnce(most, batch_bytes * node_size / world_size)
