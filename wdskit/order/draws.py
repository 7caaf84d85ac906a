"""Shard draws of a stream: an endless sequence of shards, each a pure function of its number.

Draw d depends on (seed, d) only. Ranks and workers take disjoint residues of d, so nothing is drawn twice and nothing
is lost, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wdskit.order.keys import permutation, philox

_EPOCH_SHIFT = 32  # an endless epoch starts this many bits further on: 4 billion draws to itself


class Draws:
    """Which shard the d-th draw of a stream opens.

    Args:
        num_shards: At least 1.
        seed: 0 <= seed < 2**64.
        shuffled: Whether the shards of an epoch come in a seeded order, or as listed.
        resampled: Whether each draw is independent of all others, or each epoch holds each shard once.
        weights: Of each shard, for resampled draws; at least 0, not all 0. None draws uniformly.
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
        self._last = int(np.searchsorted(self._bounds, self._bounds[-1]))  # of those with a weight
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(num_shards)

    def shard(self, draw: int) -> int:
        """Number of the shard that draw `draw` >= 0 opens, 0 <= number < num_shards."""
        if self.resampled:
            word = int(philox("draw", self._seed, draw).random_raw())
            at = (word >> 11) * 2.0**-53 * self._bounds[-1]
            return min(int(np.searchsorted(self._bounds, at, side="right")), self._last)  # `at` may be rounded up
        epoch, place = divmod(draw, self.num_shards)
        if not self._shuffled:
            return place
        if epoch != self._epoch:
            self._order = permutation(self.num_shards, "shard-order", self._seed, epoch)
            self._epoch = epoch
        return int(self._order[place])

    def first(self, epoch: int) -> int:
        """The first draw of a stream that begins with `epoch`. Exact epochs are `num_shards` draws long."""
        return epoch << _EPOCH_SHIFT if self.resampled else epoch * self.num_shards

    def stop(self, epoch: int) -> int | None:
        """The draw behind the last of a stream that is `epoch` and nothing else; None where it never ends."""
        return None if self.resampled else self.first(epoch + 1)


def share(total: int, part: int, num_parts: int) -> int:
    """How many of `total` items, dealt in turn, part `part` of `num_parts` gets."""
    return (total - part + num_parts - 1) // num_parts
