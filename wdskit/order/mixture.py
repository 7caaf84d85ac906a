"""The order of a mixture: several orders, each with its share of the positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import Ints, Order, grouped
from wdskit.order.shares import Change, Schedule, Shares


class MixtureOrder:
    """An endless sequence of samples of several parts, in proportion to weights. Each part repeats at its own pace.

    Shards are numbered consecutively: first the shards of the first part, then of the second, and so on. A mixture has
    no pass of its own.

    Args:
        parts: The order of each part.
        num_shards: Number of shards of each part.
        weights: Weight of each part: a number, or a schedule over positions.
        change: How weights of a schedule change.

    Raises:
        ValueError: The weights are invalid, see `order.shares.Shares`.
    """

    def __init__(
        self,
        parts: Sequence[Order],
        num_shards: Sequence[int],
        weights: Sequence[float | Schedule],
        *,
        change: Change = "step",
    ) -> None:
        self.parts = tuple(parts)
        schedules = [weight if isinstance(weight, Mapping) else {0: weight} for weight in weights]
        self.shares = Shares(schedules, change=change)
        self.first_shards: Ints = np.cumsum([0, *num_shards])[:-1]

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """See `order.base.Order`."""
        parts, indices = self.shares.take(positions)
        shards, samples = np.empty_like(parts), np.empty_like(parts)
        for part, at in grouped(parts):
            shards[at], samples[at] = self.parts[part].take(indices[at])
            shards[at] += self.first_shards[part]
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """See `order.base.Order`."""
        parts, indices = self.shares.take(positions)
        depths = np.empty_like(parts)
        for part, at in grouped(parts):
            depths[at] = self.parts[part].locate(indices[at])[1]
        return parts, depths

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """See `order.base.Order`. The substitute is of the same part."""
        parts, indices = self.shares.take([position])
        part = int(parts[0])
        found = self.parts[part].substitute(int(indices[0]), attempt)
        return found and (found[0] + int(self.first_shards[part]), found[1])
