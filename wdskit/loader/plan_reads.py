"""What a rank reads and what a node has open, for one order: who takes which lanes, then `order.reads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.loader.plan_types import Spread
from wdskit.order.base import Ints, Order
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.reads import (
    Held,
    Reads,
    Share,
    exact_held,
    exact_reads,
    resampled_held,
    resampled_reads,
    sequential_held,
    sequential_reads,
    shared,
)
from wdskit.order.resampled import ResampledOrder

_SAMPLED = 1 << 14  # positions of a rank that say which lanes of a mixture's parts it takes from
_MAX_SAMPLED_RANKS = 16


@dataclass(frozen=True)
class Reading:
    """What is read of one order in an epoch.

    Attributes:
        shards: Shards of which a rank reads at least one sample.
        num_bytes: Bytes of the samples that a rank reads.
        rank_held: What the windows of a rank reach into at once, on the rank with most, and
        node_held: those of all ranks of a node, on the node with most.
        lanes: Lanes from which a rank takes; None where the order has none.
    """

    shards: Spread
    num_bytes: Spread
    rank_held: Held
    node_held: Held
    lanes: int | None


class Takers(NamedTuple):
    """Who takes what of an order's lanes: its share, and the sets of lanes of ranks and of nodes."""

    share: Share
    ranks: list[Ints]
    nodes: list[Ints]


def takers(num_lanes: int, world_size: int, node_size: int) -> Takers:
    """Where rank r takes the positions p with p mod R == r, and a node has the ranks that follow each other."""
    share = shared(num_lanes, world_size)
    lanes = np.arange(num_lanes)
    first_ranks = range(0, world_size, node_size)
    node_groups = {
        tuple(sorted({rank % share.num_groups for rank in range(first, min(first + node_size, world_size))}))
        for first in first_ranks
    }
    return Takers(
        share,
        [lanes[share.groups == group] for group in range(share.num_groups)],
        [lanes[np.isin(share.groups, groups)] for groups in sorted(node_groups)],
    )


class MixtureSample(NamedTuple):
    """The first positions of a few ranks in a mixture: part of each, and index in the part; (num_ranks, n)."""

    parts: Ints
    indices: Ints

    def takers(self, part: int, num_lanes: int, world_size: int, node_size: int) -> Takers:
        """Who takes from the lanes of one part, as far as the sample tells; rank 0 stands for all ranks."""
        of_ranks = [
            np.unique(indices[parts == part] % num_lanes)
            for parts, indices in zip(self.parts, self.indices, strict=True)
        ]
        mine = of_ranks[0]
        groups = np.full(num_lanes, -1)
        groups[mine] = 0
        more = float((self.parts[0] == part).mean() / max(1e-9, (self.parts == part).mean()))  # than other ranks
        taken = min(1.0, more * num_lanes / (world_size * max(1, len(mine))))
        return Takers(Share(groups, 1, taken), [mine], [np.unique(np.concatenate(of_ranks[:node_size]))])

    def uneven_rank(self) -> tuple[int, int, float, float] | None:
        """(rank, part, its share there, its share in all) of the rank that differs most, None where none does."""
        num_parts = int(self.parts.max()) + 1
        shares = np.array([np.bincount(parts, minlength=num_parts) / len(parts) for parts in self.parts])
        whole = shares.mean(axis=0)
        off = np.abs(shares - whole)
        rank, part = divmod(int(off.argmax()), num_parts)
        if off[rank, part] <= max(0.005, 0.05 * whole[part]):
            return None
        return rank, part, float(shares[rank, part]), float(whole[part])


def sample_mixture(order: MixtureOrder, start: int, num_samples: int, world_size: int) -> MixtureSample:
    """Look at the positions that the first ranks take from `start` on, within an epoch of `num_samples`."""
    num = max(1, min(_SAMPLED, num_samples // world_size))
    ranks = np.arange(min(world_size, _MAX_SAMPLED_RANKS))
    positions = start + ranks[:, None] + world_size * np.arange(num)
    parts, indices = order.shares.take(positions.ravel())
    return MixtureSample(parts.reshape(positions.shape), indices.reshape(positions.shape))


def read_order(
    order: Order,
    start: int,
    stop: int,
    *,
    world_size: int,
    node_size: int,
    global_batch: float,
    sample_bytes: NDArray[np.float64],
    who: Takers | None = None,
) -> Reading:
    """What is read of positions `start` to `stop` of an order.

    Args:
        order: No mixture.
        start: First position.
        stop: The one behind the last, above `start`.
        world_size: R.
        node_size: Ranks of a node.
        global_batch: Positions of a step.
        sample_bytes: Mean bytes of a sample of each shard, (num_shards,).
        who: Who takes what; None where rank r takes the positions p with p mod R == r.
    """
    if not isinstance(order, (ExactOrder, ResampledOrder)):
        reads = sequential_reads(order, stop - start, world_size, sample_bytes)  # type: ignore[arg-type]  # what is left
        batch = max(1, round(global_batch))
        held = [
            sequential_held(order, batch, size / world_size, sample_bytes)  # type: ignore[arg-type]  # as above
            for size in (1, node_size)
        ]
        return Reading(*_spreads(reads), held[0], held[1], None)
    who = who or takers(order.num_lanes, world_size, node_size)
    if isinstance(order, ExactOrder):
        reads = exact_reads(order, start, stop, who.share, sample_bytes)
        number = start // order.num_samples
        rank_held, node_held = (exact_held(order, number, lanes, sample_bytes) for lanes in (who.ranks, who.nodes))
    else:
        reads = resampled_reads(order, stop - start, who.share, sample_bytes)
        most = [max(map(len, lanes)) for lanes in (who.ranks, who.nodes)]
        rank_held, node_held = (resampled_held(order, num, sample_bytes) for num in most)
    return Reading(*_spreads(reads), rank_held, node_held, max(map(len, who.ranks)))


def _spreads(reads: Reads) -> tuple[Spread, Spread]:
    shards, num_bytes = (
        Spread(float(each.min()), float(each.mean()), float(each.max())) for each in (reads.num_shards, reads.num_bytes)
    )
    return shards, num_bytes
