"""An order over some of the samples of shards, some of them several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import Ints, Order


class Picks(Protocol):
    """Some samples of shards, as `dataset.subset.Subset` holds them."""

    counts: Ints

    def take(self, shards: Ints, places: Ints) -> Ints:
        """Return the number in its shard of each of many picked samples."""
        ...


class PickedOrder:
    """Maps an order of picked samples to the samples of the shards.

    Args:
        order: Over the samples of the subsets, one after the other: its shards are those of the first subset, then
            those of the second, and so on.
        subsets: Of the same shards. A sample that is in n of them is n times in a pass.

    Attributes:
        num_samples: Length of a pass.
        num_lanes: Of the order; 0 for one without lanes.
        window: Of the order; 0 for one without windows.
    """

    def __init__(self, order: Order, subsets: Sequence[Picks]) -> None:
        self._order = order
        self.num_lanes, self.window = getattr(order, "num_lanes", 0), getattr(order, "window", 0)
        self._subsets = list(subsets)
        self._num_shards = len(subsets[0].counts)
        self.num_samples = int(sum(int(subset.counts.sum()) for subset in subsets))

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """See `order.base.Order`."""
        return self._map(*self._order.take(positions))

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """See `order.base.Order`."""
        return self._order.locate(positions)

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """See `order.base.Order`."""
        other = self._order.substitute(position, attempt)
        if other is None:
            return None
        [shard], [sample] = self._map(*(np.array([number]) for number in other))
        return int(shard), int(sample)

    def _map(self, shards: Ints, places: Ints) -> tuple[Ints, Ints]:
        if len(self._subsets) == 1:
            return shards, self._subsets[0].take(shards, places)
        layers, inner = np.divmod(shards, self._num_shards)
        samples = np.empty_like(places)
        for layer in np.unique(layers).tolist():
            rows = np.flatnonzero(layers == layer)
            samples[rows] = self._subsets[layer].take(inner[rows], places[rows])
        return inner, samples
