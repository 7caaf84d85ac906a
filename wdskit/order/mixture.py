"""The order of a mixture: several orders that share the positions in proportion to weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import Ints, Order, group_indices
from wdskit.order.interleave import PartInterleaver, Schedule


class MixtureOrder:
    """An order that mixes several parts in proportion to weights. Implements `order.base.Order`.

    Shards are numbered consecutively: first the shards of the first part, then of the second, and so on. Each part
    starts a new pass when its samples are used up; the mixture itself has no passes.

    Args:
        parts: The order of each part.
        num_shards: Number of shards of each part.
        weights: Weight of each part: a number, or a mapping of positions to the weights from these positions on.

    Attributes:
        parts: The order of each part.
        interleaver: Finds the part at each position.
        first_shards: Number of the first shard of each part, int64 (num_parts,).

    Raises:
        ValueError: `weights` is empty, a weight is negative or not finite, a mapping does not start at position 0, or
            all weights are 0 at a position.
    """

    def __init__(self, parts: Sequence[Order], num_shards: Sequence[int], weights: Sequence[float | Schedule]) -> None:
        self.parts = tuple(parts)
        schedules = [weight if isinstance(weight, Mapping) else {0: weight} for weight in weights]
        self.interleaver = PartInterleaver(schedules)
        self.first_shards: Ints = np.cumsum([0, *num_shards])[:-1]

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        parts, indices = self.interleaver.take(positions)
        shards, samples = np.empty_like(parts), np.empty_like(parts)
        for part, at in group_indices(parts):
            shards[at], samples[at] = self.parts[part].take(indices[at])
            shards[at] += self.first_shards[part]
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part and the depth of each position: int64 (n,) each.

        The depth is the place in the part's data, 0 <= depth < 2**20. Positions of one part with close depths mostly
        read the same shards.
        """
        parts, indices = self.interleaver.take(positions)
        depths = np.empty_like(parts)
        for part, at in group_indices(parts):
            depths[at] = self.parts[part].locate(indices[at])[1]
        return parts, depths
