"""The order of `sequential`: position p of a pass is sample p of the index."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEPTHS, Ints, ShardOffsets


class SequentialOrder:
    """Each pass has all samples in the order of the shards. Implements `order.base.Order`.

    Args:
        counts: Number of samples of each shard, (num_shards,).

    Attributes:
        num_samples: Number of samples of a pass.

    Raises:
        ValueError: All counts are 0.
    """

    def __init__(self, counts: ArrayLike) -> None:
        self._stack = ShardOffsets(counts)
        self.num_samples = self._stack.num_samples

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        return self._stack.find(np.asarray(positions, dtype=np.int64) % self.num_samples)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part (always 0) and the depth of each position: int64 (n,) each.

        The depth is the place in the pass, 0 <= depth < 2**20. Positions with close depths mostly read the same shards.
        """
        return np.zeros_like(positions), positions % self.num_samples * DEPTHS // self.num_samples
