"""The order of `resampled` with weights: each position draws one sample, in proportion to the samples' weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.order.base import DEPTHS, Ints, ShardOffsets, group_indices, philox

Floats = NDArray[np.float64]
Weigh = Callable[[Ints], Floats]

_BLOCK = 64  # weights per stored sum; the sums of 10^8 weights take 13 MB
_DRAWN = 1 << 10  # positions whose random words are drawn together
_ROWS_AT_ONCE = 1 << 14  # blocks that are summed at once


class WeightedOrder:
    """An endless sequence of samples, drawn with replacement in proportion to their weights.

    Implements `order.base.Order`. The sample at position p depends only on the seed and p, not on earlier draws.

    Args:
        counts: Number of samples of each shard, (num_shards,).
        weigh: Takes sample numbers over all shards, int64 (n,), and returns their weights in a new array, float64
            (n,): finite, at least 0, not all 0. The weights are not kept, so `weigh` is also called at each draw.
        num_samples: Length of a pass.
        seed: 0 <= seed < 2**64.

    Attributes:
        num_samples: Length of a pass. A pass can have a sample several times or never.

    Raises:
        ValueError: All counts or all weights are 0, or the sum of the weights is not finite.
    """

    def __init__(self, counts: ArrayLike, weigh: Weigh, *, num_samples: int, seed: int) -> None:
        self._stack = ShardOffsets(counts)
        self._seed = seed
        self._weigh = weigh
        self.num_samples = num_samples
        num_blocks = -(-self._stack.num_samples // _BLOCK)
        sums = np.empty(num_blocks)
        with np.errstate(over="ignore"):
            for first in range(0, num_blocks, _ROWS_AT_ONCE):
                rows = self._rows(np.arange(first, min(num_blocks, first + _ROWS_AT_ONCE)))
                sums[first : first + len(rows)] = np.cumsum(rows, axis=1)[:, -1]  # rounded as in `_find`
            self._stops: Floats = np.cumsum(sums)
        if not 0 < self._stops[-1] < np.inf:
            raise ValueError("all weights are 0" if not self._stops[-1] else "the sum of the weights is too large")

    def _rows(self, blocks: Ints) -> Floats:
        """Return the weights of the samples in each block: float64 (n, _BLOCK). Weights after the last sample are 0."""
        numbers = blocks[:, None] * _BLOCK + np.arange(_BLOCK)
        rows = self._weigh(np.minimum(numbers, self._stack.num_samples - 1).reshape(-1)).reshape(numbers.shape)
        rows[numbers >= self._stack.num_samples] = 0
        return rows

    def numbers(self, positions: Ints) -> Ints:
        """Return the number, over all shards, of the sample at each of `positions`: int64 (n,)."""
        keys, places = np.divmod(positions, _DRAWN)
        shares = np.empty(len(positions))
        for key, at in group_indices(keys):
            shares[at] = _draw(self._seed, key)[places[at]]
        return self._find(shares)

    def _find(self, shares: Floats) -> Ints:
        """Return the number of one sample for each of `shares`: int64 (n,).

        A share, 0 <= share < 1, is a part of the total weight. Its sample is the first sample at which the cumulative
        weight is larger than this part.
        """
        wanted = shares * self._stops[-1]
        last = np.searchsorted(self._stops, self._stops[-1])  # last block with a weight above 0; rounding may exceed it
        blocks = np.minimum(np.searchsorted(self._stops, wanted, side="right"), last)
        before = np.where(blocks > 0, self._stops[blocks - 1], 0.0)
        stops = np.cumsum(self._rows(blocks), axis=1)
        inside = (stops <= (wanted - before)[:, None]).sum(axis=1)
        last_inside = (stops < stops[:, -1:]).sum(axis=1)  # last sample of the block with a weight above 0
        numbers: Ints = blocks * _BLOCK + np.minimum(inside, last_inside)
        return numbers

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        return self._stack.find(self.numbers(np.asarray(positions, dtype=np.int64)))

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part (always 0) and the depth of each position: int64 (n,) each.

        The depth is the place of the sample in the data, scaled to 0 <= depth < 2**20.
        """
        numbers = self.numbers(positions)
        return np.zeros_like(numbers), numbers * DEPTHS // self._stack.num_samples


@functools.lru_cache(maxsize=64)  # 8 bytes per position
def _draw(seed: int, key: int) -> Floats:
    """Return a random share, float64 in [0, 1), for each of the `_DRAWN` positions from `key * _DRAWN` on."""
    words = philox("weighted-draw", seed, key).random_raw(_DRAWN) >> np.uint64(11)
    shares: Floats = words.astype(np.float64) * 2.0**-53
    return shares
