"""The order of `sequential`: position p is sample p of the index."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEPTHS, Ints, Stack, one_of
from wdskit.order.lanes import DEFAULT_WINDOW


class SequentialOrder:
    """Every pass in the order of the shards.

    Args:
        counts: Samples of each shard, (num_shards,).

    Attributes:
        num_samples: Samples of a pass.

    Raises:
        ValueError: There is no sample.
    """

    def __init__(self, counts: ArrayLike) -> None:
        self._stack = Stack(counts)
        self.num_samples = self._stack.num_samples

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """The samples at positions of the endless sequence of passes; see `order.base.Order`."""
        return self._stack.find(np.asarray(positions, dtype=np.int64) % self.num_samples)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Where in the data positions stand; see `order.base.Order`."""
        return np.zeros_like(positions), positions % self.num_samples * DEPTHS // self.num_samples

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """Another sample for a bad one; see `order.base.Order`. All are one lane here."""
        number, place = divmod(position, self.num_samples)
        first = place - place % DEFAULT_WINDOW
        size = min(DEFAULT_WINDOW, self.num_samples - first)
        if attempt >= size:
            return None
        return one_of(self, number * self.num_samples + first + (place - first + attempt) % size)
