"""An order over selected samples of shards. A sample can be selected several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import Ints, Order


class SampleSubset(Protocol):
    """Selected samples of shards, such as `dataset.subset.Subset`.

    Attributes:
        counts: Number of selected samples of each shard, (num_shards,).
    """

    counts: Ints

    def take(self, shards: Ints, places: Ints) -> Ints:
        """Return the number of each selected sample among all samples of its shard: int64 (n,).

        `shards` has the shard of each sample. `places` has the number of each sample among the selected samples of its
        shard, from 0.
        """
        ...


class PickedOrder:
    """An order over the selected samples of shards. Implements `order.base.Order`.

    `take` returns shards 0 to S - 1, and the number of the sample among the samples of the shard from which the subsets
    select.

    Args:
        order: An order over n x S shards, for n subsets of S shards. Shard k * S + s of `order` has the samples of
            shard s that subset k selects, numbered from 0.
        subsets: The n subsets, all of the same S shards. A sample comes once in a pass for each subset that selects it.

    Attributes:
        num_samples: Length of a pass.
        num_lanes: Number of lanes of `order`; 0 if it has no lanes.
        window: Window of `order`; 0 if it has no windows.
    """

    def __init__(self, order: Order, subsets: Sequence[SampleSubset]) -> None:
        self._order = order
        self.num_lanes, self.window = getattr(order, "num_lanes", 0), getattr(order, "window", 0)
        self._subsets = list(subsets)
        self._num_shards = len(subsets[0].counts)
        self.num_samples = sum(int(subset.counts.sum()) for subset in subsets)

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        shards, places = self._order.take(positions)
        if len(self._subsets) == 1:
            return shards, self._subsets[0].take(shards, places)
        layers, inner = np.divmod(shards, self._num_shards)
        samples = np.empty_like(places)
        for layer in sorted(set(layers.tolist())):
            rows = np.flatnonzero(layers == layer)
            samples[rows] = self._subsets[layer].take(inner[rows], places[rows])
        return inner, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part and the depth of each position: int64 (n,) each. Without a mixture, the part is 0.

        The depth is the place in the selected data, 0 <= depth < 2**20. Positions of one part with close depths mostly
        read the same shards.
        """
        return self._order.locate(positions)
