"""The draws of a stream: an endless sequence of shards.

Draw d depends only on (seed, d). If n workers on all ranks together share a stream, each worker takes the draws of one
remainder d mod n, a different one for each worker. So each draw is taken once, for any number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wdskit.order.keys import permutation, philox

_EPOCH_SHIFT = 32  # an endless epoch has 2**32 draws


class Draws:
    """The endless sequence of shards that a stream reads. Draw d, from 0, is the d-th shard of the sequence.

    Only one thread may use a `Draws`, because `shard` stores the order of the last epoch.

    Args:
        num_shards: At least 1.
        seed: 0 <= seed < 2**64.
        shuffled: Whether each epoch has a seeded random order of the shards. If False, the shards are in listed order.
            Ignored if `resampled`.
        resampled: Whether each draw is independent of all other draws. If False, an epoch has each shard once.
        weights: Weight of each shard, used only if `resampled`; at least 0, not all 0. None: equal weights.

    Attributes:
        num_shards: `num_shards`.
        resampled: `resampled`.
    """

    def __init__(
        self,
        num_shards: int,
        *,
        seed: int,
        shuffled: bool = True,
        resampled: bool = False,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.num_shards = num_shards
        self.resampled = resampled
        self._seed = seed
        self._shuffled = shuffled
        self._bounds = np.cumsum(np.ones(num_shards) if weights is None else np.asarray(weights, dtype=np.float64))
        self._last = int(np.searchsorted(self._bounds, self._bounds[-1]))  # the last shard with a weight above 0
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(num_shards)

    def shard(self, draw: int) -> int:
        """Return the number of the shard of a draw: 0 <= number < num_shards."""
        if self.resampled:
            word = int(philox("draw", self._seed, draw).random_raw())
            at = (word >> 11) * 2.0**-53 * self._bounds[-1]
            return min(int(np.searchsorted(self._bounds, at, side="right")), self._last)  # `at` may be rounded up
        epoch, place = divmod(draw, self.num_shards)
        if self._shuffled and epoch != self._epoch:
            self._order = permutation(self.num_shards, "shard-order", self._seed, epoch)
            self._epoch = epoch
        return int(self._order[place])

    def first(self, epoch: int) -> int:
        """Return the first draw of an epoch: epoch * num_shards, or epoch * 2**32 if `resampled`."""
        return epoch << _EPOCH_SHIFT if self.resampled else epoch * self.num_shards

    def stop(self, epoch: int) -> int | None:
        """Return the draw after the last draw of an epoch; None for an endless epoch."""
        return None if self.resampled else self.first(epoch + 1)


def share(total: int, part: int, num_parts: int) -> int:
    """Return how many of `total` items belong to `part`, if item i belongs to part i mod `num_parts`."""
    return (total - part + num_parts - 1) // num_parts
