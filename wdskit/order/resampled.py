"""The order of `resampled`: chunks of neighbours, drawn with replacement."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEPTHS, Ints, Stack, looked_up, one_of
from wdskit.order.keys import philox
from wdskit.order.lanes import DEFAULT_LANES, DEFAULT_WINDOW, Lanes, cuts_of

DEFAULT_CHUNK = 64


class ResampledOrder:
    """Chunks of consecutive samples, each starting at a uniformly drawn one, without end.

    A chunk wraps around inside its shard, so every sample is as likely as every other, the last of a shard too.
    The sequence runs in lanes as that of `exact` does, and each lane is shuffled in windows.

    Args:
        counts: Samples of each shard, (num_shards,).
        seed: 0 <= seed < 2**64.
        chunk: Samples of a chunk, >= 1.
        lanes: L >= 1.
        window: Samples of a lane that are shuffled with each other, >= 1.

    Attributes:
        num_samples: Samples of what counts as a pass: as many as there are, though not each once.
        counts: As given, int64.
        chunk: Samples of a chunk.
        num_lanes: L.
        window: w.

    Raises:
        ValueError: There is no sample, or an argument is out of range.
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
        if chunk < 1:
            msg = f"a chunk has 1 sample or more, not {chunk}"
            raise ValueError(msg)
        self._stack = Stack(counts)
        self._seed = seed
        self.counts: Ints = np.asarray(counts, dtype=np.int64)
        self.chunk, self.num_lanes, self.window = chunk, lanes, window
        self._lanes = Lanes(lanes, window, purpose="resampled-window", seed=seed)
        self.num_samples = self._stack.num_samples

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """The samples at positions of the endless sequence; see `order.base.Order`."""
        num_lanes, window = self._lanes.num_lanes, self._lanes.window
        places, lanes = np.divmod(np.asarray(positions, dtype=np.int64), num_lanes)
        numbers, within = np.divmod(self._lanes.shuffle(0, lanes, places, None), window)
        chunks, steps = np.divmod(within, self.chunk)

        windows = numbers * num_lanes + lanes
        wanted = dict.fromkeys(windows.tolist())
        num_chunks = -(-window // self.chunk)
        starts = (_draw(self._seed, *divmod(each, num_lanes), num_chunks, self.num_samples) for each in wanted)
        firsts = looked_up(windows, chunks, dict(zip(wanted, starts, strict=True)))
        shards, samples = self._stack.find(firsts)
        return shards, (samples + steps) % self._stack.counts(shards)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Where positions stand; see `order.base.Order`. Each lane draws from all the data, so its number counts: the
        neighbours that are drawn together are read on one node.
        """
        cuts = cuts_of(self.num_lanes)[positions % self.num_lanes]
        return np.zeros_like(cuts), cuts * DEPTHS // self.num_lanes

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """Another sample for a bad one; see `order.base.Order`."""
        other = self._lanes.beside(position, attempt)
        return None if other is None else one_of(self, other)


@functools.lru_cache(maxsize=1 << 13)  # 8 bytes a chunk; each lane comes back to its window until the next one begins
def _draw(seed: int, number: int, lane: int, num_chunks: int, num_samples: int) -> Ints:
    """First sample of each chunk of a window, as running numbers: uniform up to one part in 2**53 / num_samples."""
    words = philox("resampled-chunks", seed, lane, number).random_raw(num_chunks)
    starts: Ints = ((words >> np.uint64(11)) * 2.0**-53 * num_samples).astype(np.int64)
    return starts
