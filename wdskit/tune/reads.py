"""What the nodes of a run read in an epoch, and from how many shards at once, from the cuts of an order's lanes and
from the deal: no position is looked at.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints
from wdskit.order.exact import ExactOrder
from wdskit.order.lanes import cuts_of
from wdskit.order.mixture import MixtureOrder
from wdskit.order.pieces import Pieces
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.stages.sources import PlannedData

Floats = NDArray[np.float64]

_MAX_PASSES = 64  # of an epoch; later ones of a data set that repeats so often reach no further shard
_MAX_DEALT = 1 << 21  # positions after which the deal of lanes to nodes is known well enough
_MAX_DEALT_PASSES = 4  # whose deal is looked at
_MAX_NODES = 64  # of a sequential order that are looked at


class Reads(NamedTuple):
    """What is read in an epoch.

    Attributes:
        shards: Shards from which each node reads, (num_nodes,): into which its lanes reach; expected of `resampled`.
        num_bytes: Bytes of the samples that each reads, (num_nodes,).
        open_shards: The most shards into which the windows of a node reach at once.
        live_bytes: The most bytes of all samples of these windows: what a node comes back to within a window.
    """

    shards: Floats
    num_bytes: Floats
    open_shards: float
    live_bytes: float


def read_epoch(data: PlannedData, steps: Steps, start: int, node_size: int) -> tuple[Reads, list[int]]:
    """What is read in an epoch, and how many of its samples are of each part.

    Args:
        data: The shards and their order.
        steps: Of the epoch.
        start: Position of its first sample in the endless sequence.
        node_size: Ranks of a node, a divisor of R.
    """
    stop = start + steps.num_samples - steps.num_dropped
    sizes = [table.sample_bytes() for table in data.tables]
    num_nodes, is_dealt = steps.world_size // node_size, steps.tail == "drop"
    order = data.order
    if not isinstance(order, MixtureOrder):
        nodes = Nodes(num_nodes, steps.global_batch, is_dealt=is_dealt)
        reads = read_order(order, start, stop, np.concatenate(sizes), nodes)
        weights = np.bincount(data.parts, [float(table.counts.sum()) for table in data.tables])
        return reads, [round(each) for each in (weights / weights.sum() * (stop - start)).tolist()]
    found = []
    firsts, stops = (order.shares.before(each).tolist() for each in (start, stop))
    of_parts = [behind - first for first, behind in zip(firsts, stops, strict=True)]
    for part, sample_bytes, first, num in zip(order.parts, sizes, firsts, of_parts, strict=True):
        if num:
            nodes = Nodes(num_nodes, max(1, round(steps.global_batch * num / (stop - start))), is_dealt=is_dealt)
            found.append(read_order(part, first, first + num, sample_bytes, nodes))
    return Reads(*(sum(each) for each in zip(*found, strict=True))), of_parts


class Nodes(NamedTuple):
    """Who reads.

    Attributes:
        num: N.
        batch: Positions of a step.
        is_dealt: Whether these are dealt by their depth, or as they come.
    """

    num: int
    batch: int
    is_dealt: bool = True

    def shares(self, cuts: Ints, place: int = 0) -> Floats:
        """Which share of each cut's samples each node takes, (N, L), by the deal of the first steps.

        Args:
            cuts: The cut that each lane is, (L,).
            place: Of the pass, where the first step begins.
        """
        num_lanes = len(cuts)
        if self.num == 1:
            return np.ones((1, num_lanes))
        period = num_lanes // math.gcd(self.batch, num_lanes)  # of steps, after which the same lanes come
        num = min(period, -(-_MAX_DEALT // self.batch))
        taken = cuts[(place + np.arange(num * self.batch)).reshape(num, self.batch) % num_lanes]
        if self.is_dealt:
            taken.sort(axis=1)
        nodes = np.arange(self.batch) * self.num // self.batch
        counts = np.bincount((nodes * num_lanes + taken).ravel(), minlength=self.num * num_lanes)
        counts = counts.reshape(self.num, num_lanes)
        shares: Floats = counts / np.maximum(counts.sum(axis=0), 1)
        return shares


def read_order(order: Any, start: int, stop: int, sample_bytes: Floats, nodes: Nodes) -> Reads:
    """What nodes read of positions `start` to `stop` of one order.

    Args:
        order: Exact, resampled or sequential.
        start: First position of the endless sequence, >= 0.
        stop: The one behind the last, above `start`.
        sample_bytes: Mean size of a sample of each shard, (num_shards,).
        nodes: Who reads.
    """
    if isinstance(order, ResampledOrder):
        return _expect(order, start, stop, sample_bytes, nodes)
    if isinstance(order, SequentialOrder):
        return _read_in_order(order, start, stop, sample_bytes, nodes.num, nodes.batch)
    assert isinstance(order, ExactOrder)
    num_nodes, size, num_seen = nodes.num, order.num_samples, 0
    num_shards, num_bytes, num_open, live_bytes = len(sample_bytes), np.zeros(num_nodes), 0, 0.0
    shares: Floats = np.empty(0)
    found: list[Ints] = []
    for number in range(start // size, -(-stop // size))[:_MAX_PASSES]:
        pieces = order.pieces(number)
        first, last = (min(max(each - number * size, 0), size) for each in (start, stop))
        num_seen += last - first
        cut_of = order.cuts(number)
        if len(found) < _MAX_DEALT_PASSES:
            shares = nodes.shares(cut_of, first)
            cuts, takers = np.nonzero(shares.T)  # of each cut the nodes that take from it
            first_taker = np.searchsorted(cuts, np.arange(order.num_lanes + 1))
        lanes, moments, sizes = pieces.windows
        ends = (-(-(each - lanes) // order.num_lanes) - moments * order.window for each in (first, last))
        before, behind = (np.clip(each, 0, sizes) for each in ends)
        ratios = ((behind - before) / sizes)[pieces.at]
        # Each piece once for each node that takes from its cut.
        cut = cut_of[lanes[pieces.at]]
        num_takers = first_taker[cut + 1] - first_taker[cut]
        rows = np.repeat(np.arange(len(cut)), num_takers)
        node = takers[
            np.repeat(first_taker[cut] - np.cumsum(num_takers) + num_takers, num_takers) + np.arange(len(rows))
        ]
        shards = pieces.shards[pieces.turns]
        weights = pieces.sizes * sample_bytes[shards]
        found.append(_distinct((node * num_shards + shards[rows])[(ratios > 0)[rows]]))
        num_bytes += np.bincount(node, shares[node, cut[rows]] * (weights * ratios)[rows], minlength=num_nodes)
        if number == start // size:
            owners = moments[pieces.at][rows] * num_nodes + node
            num_open, live_bytes = _most_at_once(owners, pieces, rows, weights)
    counts = np.bincount(_distinct(np.concatenate(found)) // num_shards, minlength=num_nodes)
    return Reads(counts.astype(np.float64), num_bytes * ((stop - start) / num_seen), num_open, live_bytes)


def _most_at_once(owners: Ints, pieces: Pieces, rows: Ints, weights: Floats) -> tuple[int, float]:
    """The most shards, and the most bytes, of one owner of pieces: a node at a moment."""
    num_shards = len(pieces.shards)
    found = _distinct(owners * num_shards + pieces.turns[rows])  # two lanes can meet in a shard
    return int(np.bincount(found // num_shards).max()), float(np.bincount(owners, weights[rows]).max())


def _distinct(numbers: Ints) -> Ints:
    """Each number once, ascending: `np.unique` of numpy 2.3 hashes, which takes ten times as long."""
    in_order = np.sort(numbers)
    distinct: Ints = in_order[np.diff(in_order, prepend=-1) != 0]
    return distinct


def _read_in_order(
    order: SequentialOrder, start: int, stop: int, sample_bytes: Floats, num_nodes: int, batch: int
) -> Reads:
    """A node takes neighbouring samples of each step."""
    size, counts = order.num_samples, np.diff(order.stops, prepend=0)
    is_any = counts > 0
    stops, sample_bytes = order.stops[is_any], sample_bytes[is_any]
    shards, num_open, live_bytes = np.zeros(num_nodes), 1, 0.0
    depths = np.concatenate([[0.0], np.cumsum(counts[is_any] * sample_bytes)])  # bytes before a shard
    edges = np.concatenate([[0], stops])
    stop = min(stop, start + size)  # later passes reach no further
    steps = np.arange(start, stop, batch)
    nums = np.minimum(batch, stop - steps)
    nodes = np.linspace(0, num_nodes - 1, min(num_nodes, _MAX_NODES)).astype(np.int64)
    for node in nodes.tolist():
        first, last = steps + nums * node // num_nodes, steps + nums * (node + 1) // num_nodes - 1
        is_any = last >= first
        if not is_any.any():
            continue
        first, last = first[is_any] % size, last[is_any] % size
        last[last < first] = size - 1  # over the end of a pass
        firsts, lasts = (np.searchsorted(stops, each, side="right") for each in (first, last))
        shards[node] = _num_covered(firsts, lasts)
        num_open = max(num_open, int((lasts - firsts).max()) + 1)
        live_bytes = max(
            live_bytes, float((np.interp(last + 1, edges, depths) - np.interp(first, edges, depths)).max())
        )
    shards = np.interp(np.arange(num_nodes), nodes, shards[nodes])
    mean_bytes = float(depths[-1]) / size
    num_bytes = np.full(num_nodes, (stop - start) / num_nodes * mean_bytes)
    return Reads(shards, num_bytes, num_open, live_bytes)


def _num_covered(firsts: Ints, lasts: Ints) -> int:
    """Different numbers in stretches, each from a first to a last one."""
    by_first = np.argsort(firsts, kind="stable")
    firsts, lasts = firsts[by_first], np.maximum.accumulate(lasts[by_first])
    before = np.concatenate([[-1], lasts[:-1]])
    return int(np.maximum(0, lasts - np.maximum(firsts, before + 1) + 1).sum())


def _expect(order: ResampledOrder, start: int, stop: int, sample_bytes: Floats, nodes: Nodes) -> Reads:
    """What is expected over all seeds: chunks start at each sample alike."""
    num, shares = stop - start, nodes.shares(cuts_of(order.num_lanes), start % order.num_lanes)
    lanes = np.count_nonzero(shares, axis=1)
    chunks = -(-order.window // order.chunk)
    likely = np.minimum(order.counts / order.num_samples, 1 - 1e-15)

    def expected(num_chunks: float) -> float:
        return float(-np.expm1(num_chunks * np.log1p(-likely)).sum())

    a_lane = math.ceil(num / order.num_lanes / order.chunk)
    mean_bytes = float(order.counts @ sample_bytes) / order.num_samples
    of_lanes = {each: expected(each * a_lane) for each in np.unique(lanes).tolist()}
    most = int(lanes.max())
    return Reads(
        shards=np.array([of_lanes[each] for each in lanes.tolist()]),
        num_bytes=shares.sum(axis=1) * num / order.num_lanes * mean_bytes,
        open_shards=expected(most * chunks),
        live_bytes=most * order.window * mean_bytes,
    )
