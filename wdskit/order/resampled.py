"""The order of `resampled`: chunks of consecutive samples, drawn with replacement."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEFAULT_LANES, DEFAULT_WINDOW, DEPTHS, Ints, Lanes, ShardOffsets, philox

DEFAULT_CHUNK = 64


class ResampledOrder:
    """An endless sequence of chunks of consecutive samples. The first sample of each chunk is drawn uniformly from all
    samples.

    Implements `order.base.Order`. A chunk that reaches the end of its shard continues at the shard's start, so all
    samples are equally likely. Position p is in lane p mod L, and each lane is shuffled in windows.

    Args:
        counts: Number of samples of each shard, (num_shards,).
        seed: 0 <= seed < 2**64.
        chunk: Number of samples of a chunk, >= 1. The last chunk of a window may be cut.
        lanes: L >= 1, the number of lanes.
        window: Number of samples of a lane that are shuffled with each other, >= 1.

    Attributes:
        num_samples: Length of a pass: the number of all samples. A pass can have a sample several times or never.
        num_lanes: L.
        window: `window`.

    Raises:
        ValueError: All counts are 0.
    """

    def __init__(
        self,
        counts: ArrayLike,
        *,
        seed: int,
        chunk: int = DEFAULT_CHUNK,
        lanes: int = DEFAULT_LANES,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self._stack = ShardOffsets(counts)
        self._seed = seed
        self._chunk = chunk
        self.num_lanes, self.window = lanes, window
        self._lanes = Lanes(lanes, window, None, purpose="resampled-window", seed=seed)
        self.num_samples = self._stack.num_samples

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        places, lanes = np.divmod(np.asarray(positions, dtype=np.int64), self.num_lanes)
        numbers, within = np.divmod(self._lanes.shuffle(0, lanes, places), self.window)
        chunks, steps = np.divmod(within, self._chunk)
        draw = functools.partial(_draw, self._seed, -(-self.window // self._chunk), self.num_samples)
        rows = zip(numbers.tolist(), lanes.tolist(), chunks.tolist(), strict=True)
        firsts = np.array([draw(number, lane).item(chunk) for number, lane, chunk in rows], dtype=np.int64)
        shards, samples = self._stack.find(firsts)
        return shards, (samples + steps) % self._stack.counts(shards)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part (always 0) and a depth of each position: int64 (n,) each; 0 <= depth < 2**20.

        The depth only tells the lanes apart: all positions of a lane have the same depth. It is not a place in the
        data, because each lane draws from all the data.
        """
        cuts = Lanes.cuts(self.num_lanes)[positions % self.num_lanes]
        return np.zeros_like(cuts), cuts * DEPTHS // self.num_lanes


@functools.lru_cache(maxsize=1 << 13)  # 8 bytes per chunk; each lane uses one window at a time
def _draw(seed: int, num_chunks: int, num_samples: int, number: int, lane: int) -> Ints:
    """Return the number, over all shards, of the first sample of each chunk of one window of a lane: int64
    (num_chunks,), drawn uniformly.

    `number` is the number of the window in the lane.
    """
    words = philox("resampled-chunks", seed, lane, number).random_raw(num_chunks)
    # Uniform but for num_samples / 2**53.
    starts: Ints = ((words >> np.uint64(11)) * 2.0**-53 * num_samples).astype(np.int64)
    return starts
