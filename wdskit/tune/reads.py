"""What the ranks of an epoch read, and from how many shards at once, from the cuts of an order's lanes: no position is
looked at.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.pieces import Pieces, cut
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.stages.sources import PlannedData

Floats = NDArray[np.float64]

_MAX_PASSES = 64  # of an epoch; later ones of a data set that repeats so often reach no further shard
_MAX_MOMENTS = 1 << 20  # of a sequential pass; where it has more steps, a moment is some of them, of the mean bytes


class Reads(NamedTuple):
    """What is read in an epoch.

    Ranks whose positions are alike modulo gcd(R, L) take from the same lanes: they are a group.

    Attributes:
        shards: Shards into which the lanes of each group reach, (num_groups,): counted; expected of `resampled`.
        num_bytes: Bytes of the samples that a rank of each group reads, (num_groups,).
        rank_open: The most shards into which the windows of a rank reach at once.
        node_open: The same of all ranks of a node together, and
        node_bytes: the most bytes of all samples of these windows.
    """

    shards: Floats
    num_bytes: Floats
    rank_open: float
    node_open: float
    node_bytes: float


def read_epoch(data: PlannedData, steps: Steps, start: int, node_size: int) -> tuple[Reads, list[int]]:
    """What is read in an epoch, and how many of its samples are of each part.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        node_size: Ranks of a node, at most R.
    """
    stop = start + steps.num_samples - steps.num_dropped
    sizes = [table.sample_bytes() for table in data.tables]
    order = data.order
    if not isinstance(order, MixtureOrder):
        num_groups = math.gcd(getattr(order, "num_lanes", 1), steps.world_size)
        reads = read_order(order, start, stop, np.concatenate(sizes), num_groups, node_size, steps.global_batch)
        weights = np.bincount(data.parts, [float(table.counts.sum()) for table in data.tables])
        of_parts = [round(each) for each in (weights / weights.sum() * (stop - start)).tolist()]
        return reads._replace(num_bytes=reads.num_bytes * num_groups / steps.world_size), of_parts
    found = []
    firsts, stops = (order.shares.before(each).tolist() for each in (start, stop))
    of_parts = [behind - first for first, behind in zip(firsts, stops, strict=True)]
    for part, sample_bytes, first, num in zip(order.parts, sizes, firsts, of_parts, strict=True):
        if num:  # ranks take from all lanes of each part
            batch = max(1, round(steps.global_batch * num / (stop - start)))
            found.append(read_order(part, first, first + num, sample_bytes, 1, 1, batch))
    shards, num_bytes, *at_once = (sum(each) for each in zip(*found, strict=True))
    return Reads(shards, num_bytes / steps.world_size, *at_once), of_parts


def read_order(
    order: Any, start: int, stop: int, sample_bytes: Floats, num_groups: int, node_size: int, batch: int
) -> Reads:
    """What groups of ranks read of positions `start` to `stop` of one order; lane l is of group l mod `num_groups`.

    Args:
        order: Exact, resampled or sequential.
        start: First position of the endless sequence, >= 0.
        stop: The one behind the last, above `start`.
        sample_bytes: Mean size of a sample of each shard, (num_shards,).
        num_groups: A divisor of the number of lanes; 1 for a sequential order.
        node_size: Groups of a node.
        batch: Positions of a step, into which a sequential order reaches at once.

    Returns:
        With the bytes of each group.
    """
    if isinstance(order, ResampledOrder):
        return _expect(order, stop - start, sample_bytes, num_groups, node_size)
    size, num_seen, found = order.num_samples, 0, []
    num_bytes, of_ranks, of_nodes = np.zeros(num_groups), (0, 0.0), (0, 0.0)
    for number in range(start // size, -(-stop // size))[:_MAX_PASSES]:
        pieces, num_lanes, window, share = _cut(order, number, batch)
        first, last = (min(max(each - number * size, 0), size) for each in (start, stop))
        num_seen += last - first
        lanes, moments, sizes = pieces.windows
        ends = (-(-(each - lanes) // num_lanes) - moments * window for each in (first, last))  # places before each
        before, behind = (np.clip(each, 0, sizes) for each in ends)
        ratios = (behind - before) / sizes
        at, shards = pieces.at, pieces.shards[pieces.turns]
        groups, weights = lanes % num_groups, pieces.sizes * sample_bytes[shards]
        is_read = (ratios > 0)[at]
        found.append(_distinct((shards * num_groups + groups[at])[is_read]))
        num_bytes += np.bincount(groups[at], weights * ratios[at], minlength=num_groups)
        if not of_nodes[0]:
            of_ranks = _most_at_once(moments * num_groups + groups, pieces, weights)
            of_nodes = _most_at_once(moments * num_groups + groups // node_size, pieces, weights * share)
    num_shards = np.bincount(_distinct(np.concatenate(found)) % num_groups, minlength=num_groups)
    scale = (stop - start) / num_seen
    return Reads(num_shards.astype(np.float64), num_bytes * scale, of_ranks[0], *of_nodes)


def _cut(order: ExactOrder | SequentialOrder, number: int, batch: int) -> tuple[Pieces, int, int, float]:
    """A pass cut into pieces, its lanes, the window, and the share of a window that is at hand at once. The windows of
    one number of all lanes are a moment. A sequential order is one lane, whose windows are steps.
    """
    if isinstance(order, ExactOrder):
        return order.pieces(number), order.num_lanes, order.window, 1.0
    length = batch * -(-order.num_samples // (batch * _MAX_MOMENTS))
    first, size = np.zeros(1, np.int64), np.array([order.num_samples])
    return cut(order.stops, np.arange(len(order.stops)), first, size, length), 1, length, batch / length


def _most_at_once(owners: Ints, pieces: Pieces, weights: Floats) -> tuple[int, float]:
    """The most shards, and the most bytes, of one owner of windows: a group of ranks at a moment."""
    num_shards = len(pieces.shards)
    found = _distinct(owners[pieces.at] * num_shards + pieces.turns)  # two lanes can meet in a shard
    return int(np.bincount(found // num_shards).max()), float(np.bincount(owners[pieces.at], weights).max())


def _distinct(numbers: Ints) -> Ints:
    """Each number once, ascending: `np.unique` of numpy 2.3 hashes, which takes ten times as long."""
    in_order = np.sort(numbers)
    distinct: Ints = in_order[np.diff(in_order, prepend=-1) != 0]
    return distinct


def _expect(order: ResampledOrder, num: int, sample_bytes: Floats, num_groups: int, node_size: int) -> Reads:
    """What is expected over all seeds: chunks start at each sample alike."""
    lanes = order.num_lanes // num_groups
    of_node = min(num_groups, node_size) * lanes
    chunks = -(-order.window // order.chunk)
    likely = np.minimum(order.counts / order.num_samples, 1 - 1e-15)
    in_epoch, of_rank, of_nodes = (
        float(-np.expm1(num_chunks * np.log1p(-likely)).sum())
        for num_chunks in (lanes * math.ceil(num / order.num_lanes / order.chunk), lanes * chunks, of_node * chunks)
    )
    mean_bytes = float(order.counts @ sample_bytes) / order.num_samples
    of_groups = np.full(num_groups, num / num_groups * mean_bytes)
    return Reads(np.full(num_groups, in_epoch), of_groups, of_rank, of_nodes, of_node * order.window * mean_bytes)
