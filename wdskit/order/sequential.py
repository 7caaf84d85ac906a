"""The order of `sequential`: position p is sample p of the index."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import Ints, Stack


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
