"""What ranks read of an order, in closed form: from the cuts of its lanes and not from its positions.

A rank takes every R-th position, so it takes an even share of the places of each lane it touches. In a lane that it
shares with others these places lie at random in each window, and what is told here is the expectation; where R divides
the number of lanes a rank has its lanes to itself, and the expectation is what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints
from wdskit.order.exact import ExactOrder
from wdskit.order.pieces import Pieces
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder

Floats = NDArray[np.float64]

MAX_PASSES = 4
"""Passes of an epoch that are looked at; further ones are taken to be like them."""
_NEVER = -40.0  # logarithm of a probability that is as good as 0


class Share(NamedTuple):
    """Who takes what of an order's lanes.

    Attributes:
        groups: For each lane, number of the group of ranks that take from it; -1 where those looked at do not.
        num_groups: Number of groups. The ranks of a group read the same lanes.
        taken: Of the places of a lane, the share that one rank of its group takes, 0..1.
    """

    groups: Ints
    num_groups: int
    taken: float


class Reads(NamedTuple):
    """What one rank of each group reads, float64 (num_groups,): shards, and bytes of samples."""

    num_shards: Floats
    num_bytes: Floats


class Held(NamedTuple):
    """What some lanes' windows reach into at one moment: shards, and bytes of samples."""

    num_shards: float
    num_bytes: float


def shared(num_lanes: int, world_size: int) -> Share:
    """Who takes what where rank r takes the positions p with p mod R == r: ranks alike mod gcd(R, L) are a group."""
    num_groups = int(np.gcd(num_lanes, world_size))
    return Share(np.arange(num_lanes) % num_groups, num_groups, num_groups / world_size)


def exact_reads(order: ExactOrder, start: int, stop: int, share: Share, sample_bytes: Floats) -> Reads:
    """What a rank of each group reads of positions `start` to `stop` of the endless sequence.

    Args:
        order: The order.
        start: First position, >= 0.
        stop: The one behind the last, above `start`.
        share: Who takes what.
        sample_bytes: Mean size of a sample of each shard, (num_shards,).
    """
    passes = range(start // order.num_samples, -(-stop // order.num_samples))
    looked_at = passes[:MAX_PASSES]
    keys, logs = [], []
    num_bytes = np.zeros(share.num_groups)
    for number in looked_at:
        pieces = order.pieces(number)
        windows = pieces.windows
        ends = (_places(each - number * order.num_samples, order)[windows.lanes] for each in (start, stop))
        before, behind = (np.clip(each - windows.numbers * order.window, 0, windows.sizes) for each in ends)
        chosen = (behind - before) * share.taken
        groups = share.groups[windows.lanes]
        if (groups < 0).any():
            pieces = _only(pieces, groups >= 0)
        of_turn = sample_bytes[pieces.shards]
        weights = pieces.sizes * (chosen / windows.sizes)[pieces.at] * of_turn[pieces.turns]
        of_piece = groups[pieces.at]
        num_bytes += np.bincount(of_piece, weights, minlength=share.num_groups)
        # In the order of the pass where that is enough: what is nearly sorted is sorted quickly.
        ids = pieces.turns if len(looked_at) == 1 else pieces.shards[pieces.turns]
        keys.append(ids * share.num_groups + of_piece)
        logs.append(_log_of_none(windows.sizes[pieces.at], pieces.sizes, chosen[pieces.at]))
    scale = max(1.0, (stop - start) / (looked_at.stop * order.num_samples - start))
    num_shards = _some(np.concatenate(keys), np.concatenate(logs), share.num_groups)
    if scale > 1:
        total = np.count_nonzero(order.counts)
        num_shards = total - total * np.clip(1 - num_shards / total, 0, 1) ** scale
    return Reads(num_shards, num_bytes * scale)


def exact_held(order: ExactOrder, number: int, places: Sequence[Ints], sample_bytes: Floats) -> Held:
    """The most that a set of lanes' windows reach into at one moment of pass `number`.

    All lanes are in windows of one number at a time, but for the moment in which they change over.

    Args:
        order: The order.
        number: Of the pass.
        places: Sets of lanes, of which the one with most shards counts.
        sample_bytes: Mean size of a sample of each shard, (num_shards,).
    """
    pieces = order.pieces(number)
    windows = pieces.windows
    shape = (order.num_lanes, int(windows.numbers.max()) + 1)
    counts, num_bytes = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    counts[windows.lanes, windows.numbers] = np.bincount(pieces.at, minlength=len(windows.sizes))
    weights = pieces.sizes * sample_bytes[pieces.shards][pieces.turns]
    num_bytes[windows.lanes, windows.numbers] = np.bincount(pieces.at, weights, minlength=len(windows.sizes))
    sums = [counts[lanes].sum(axis=0) for lanes in places]
    worst = int(np.argmax([each.max() for each in sums]))
    window = int(sums[worst].argmax())
    here = ((windows.numbers == window) & np.isin(windows.lanes, places[worst]))[pieces.at]
    most_bytes = max(float(num_bytes[lanes].sum(axis=0).max()) for lanes in places)
    return Held(float(len(np.unique(pieces.turns[here]))), most_bytes)  # two lanes can meet in a shard


def resampled_reads(order: ResampledOrder, num_positions: int, share: Share, sample_bytes: Floats) -> Reads:
    """What a rank of each group is expected to read, over all seeds, of so many positions; see `exact_reads`."""
    num_windows, rest = divmod(num_positions / len(share.groups), order.window)
    touched = num_windows * _touched(order, share.taken * order.window) + _touched(order, share.taken * rest)
    num_lanes = np.bincount(share.groups[share.groups >= 0], minlength=share.num_groups).astype(np.float64)
    different, at = np.unique(num_lanes, return_inverse=True)  # one, unless the order is a part of a mixture
    num_shards = np.array([_drawn(order, each * touched) for each in different.tolist()])[at]
    per_lane = num_positions / len(share.groups) * share.taken * _mean_bytes(order, sample_bytes)
    return Reads(num_shards, num_lanes * per_lane)


def resampled_held(order: ResampledOrder, num_lanes: int, sample_bytes: Floats) -> Held:
    """The shards that a window of each of so many lanes is expected to reach into, and the bytes of its samples."""
    num_chunks = -(-order.window // order.chunk)
    return Held(_drawn(order, num_lanes * num_chunks), num_lanes * order.window * _mean_bytes(order, sample_bytes))


def sequential_reads(order: SequentialOrder, num_positions: int, world_size: int, sample_bytes: Floats) -> Reads:
    """What each rank reads of the first `num_positions`, exactly; where they are several passes, shards of the first.

    Returns:
        Arrays of (world_size,).
    """
    looked_at = min(num_positions, order.num_samples)
    stops = np.minimum(order.stops, looked_at)
    starts = np.concatenate([[0], stops[:-1]])
    counts = stops - starts
    num_shards = _around(starts, np.minimum(counts, world_size), np.ones(len(counts)), world_size)
    whole = float((counts // world_size) @ sample_bytes)
    num_bytes = whole + _around(starts, counts % world_size, sample_bytes, world_size)
    return Reads(num_shards, num_bytes * (num_positions / looked_at))


def sequential_held(order: SequentialOrder, global_batch: int, taken: float, sample_bytes: Floats) -> Held:
    """The most that a global batch reaches into: its shards, and the bytes of a share `taken` of its samples."""
    edges = np.minimum(np.arange(0, order.num_samples + global_batch, global_batch), order.num_samples)
    counts = np.diff(order.stops, prepend=0)
    starts = (order.stops - counts)[counts > 0]
    # Shards that begin inside a batch, and the one that goes on from the batch before.
    began = np.searchsorted(starts, edges, side="left")
    goes_on = np.searchsorted(starts, edges[:-1], side="right") == began[:-1]
    heights = np.concatenate([[0.0], np.cumsum(counts * sample_bytes)])
    grown = np.diff(np.interp(edges, np.concatenate([[0], order.stops]), heights))
    return Held(float((np.diff(began) + goes_on).max()), float(grown.max()) * taken)


def _only(pieces: Pieces, wanted: NDArray[np.bool_]) -> Pieces:
    """The pieces of those windows only."""
    mine = wanted[pieces.at]
    return pieces._replace(at=pieces.at[mine], turns=pieces.turns[mine], sizes=pieces.sizes[mine])


def _places(position: int, order: ExactOrder) -> Ints:
    """How many of a pass's first `position` positions stand in each lane."""
    bounded = min(max(position, 0), order.num_samples)
    places: Ints = (bounded - np.arange(order.num_lanes) + order.num_lanes - 1) // order.num_lanes
    return places


def _log_of_none(sizes: Ints, marked: Ints, chosen: Floats) -> Floats:
    """Logarithm of how likely it is that none of `marked` places is among `chosen` of `sizes` (hypergeometric).

    `chosen` between two whole numbers is one or the other.
    """
    with np.errstate(divide="ignore"):
        logs = np.log1p(-chosen / sizes)
    logs *= marked  # that is with replacement: never too low, and for nearly all as good as never
    unsure = np.flatnonzero(logs > _NEVER)
    logs[logs <= _NEVER] = -np.inf
    if not len(unsure):
        return logs
    sizes, marked, chosen = sizes[unsure], marked[unsure], chosen[unsure]
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, int(sizes.max()) + 1)))])
    left = sizes - marked
    fewer = np.floor(chosen).astype(np.int64)
    more_often = chosen - fewer

    def none(num: Ints) -> Floats:
        can = num <= left
        num = np.where(can, num, 0)
        each = log_factorials[left] + log_factorials[sizes - num] - log_factorials[left - num] - log_factorials[sizes]
        likely: Floats = np.where(can, np.exp(each), 0.0)
        return likely

    with np.errstate(divide="ignore"):
        logs[unsure] = np.log((1 - more_often) * none(fewer) + more_often * none(fewer + 1))
    return logs


def _some(keys: Ints, logs: Floats, num_groups: int) -> Floats:
    """How many keys of each group are expected where `logs` are the logarithms of their absence, added up by key."""
    in_turn = np.argsort(keys, kind="stable")
    keys = keys[in_turn]
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    present = -np.expm1(np.add.reduceat(logs[in_turn], firsts))
    return np.bincount(keys[firsts] % num_groups, present, minlength=num_groups).astype(np.float64)


def _touched(order: ResampledOrder, chosen: float) -> float:
    """Chunks of a window of which at least one place is among `chosen`, as expected."""
    num_chunks = -(-order.window // order.chunk)
    whole = min(order.chunk, order.window)
    none = np.exp(_log_of_none(np.array([order.window]), np.array([whole]), np.array([chosen])))
    return num_chunks * (1 - float(none[0]))


def _drawn(order: ResampledOrder, num_draws: float) -> float:
    """Different shards among so many starts of chunks, as expected."""
    likely = np.minimum(order.counts / order.num_samples, 1 - 1e-15)
    return float(-np.expm1(num_draws * np.log1p(-likely)).sum())


def _mean_bytes(order: ResampledOrder, sample_bytes: Floats) -> float:
    return float(order.counts / order.num_samples @ sample_bytes)


def _around(starts: Ints, lengths: Ints, weights: Floats, size: int) -> Floats:
    """Sum of `weights` at each place of a circle of `size`; each stands at `lengths` places from its start on."""
    first = starts % size
    stop = first + lengths
    line = np.bincount(first, weights, minlength=2 * size + 1) - np.bincount(stop, weights, minlength=2 * size + 1)
    heights = np.cumsum(line)
    around: Floats = heights[:size] + heights[size : 2 * size]
    return around
