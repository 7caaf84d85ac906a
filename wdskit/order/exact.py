"""The order of `exact`: each sample once per pass, shuffled across shards and lanes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEFAULT_WINDOW, DEPTHS, Ints, Lanes, ShardOffsets, group_indices, permutation, philox


class _Pass(NamedTuple):
    """One pass of an `ExactOrder`.

    Attributes:
        shards: The shards in the order of the pass.
        stack: Numbers the samples of `shards` consecutively.
        cuts: For each lane, the number of the cut that the lane reads.
        lane_starts: For each lane, the number in `stack` of the first sample of its cut.
    """

    shards: Ints
    stack: ShardOffsets
    cuts: Ints
    lane_starts: Ints


class ExactOrder:
    """An order that has each sample exactly once per pass. Implements `order.base.Order`.

    Each pass permutes the shards and concatenates them. The samples are then divided into L consecutive pieces, the
    cuts, whose sizes differ by at most one. Each of L lanes reads one cut, shuffled in windows. Position p of a pass is
    in lane p mod L. Neighbouring lanes read cuts that are far apart.

    If H > 1, the shards are divided into H groups, which are the same in every pass. A pass permutes the shards inside
    each group, and concatenates the groups. So each group keeps its place in the pass.

    Args:
        counts: Number of samples of each shard, (num_shards,).
        seed: 0 <= seed < 2**64.
        lanes: L >= 1, the number of lanes. None: 240, or the number of samples divided by 64 if that is less.
        window: Largest number of samples of a lane that are shuffled with each other, >= 1.
        homes: H >= 1, the number of groups. With 1, a pass permutes all shards.

    Attributes:
        num_samples: Number of samples of a pass.
        num_lanes: L.
        window: Number of samples of a window, at most the argument `window`. All windows of a lane have about equal
            sizes.

    Raises:
        ValueError: All counts are 0.
    """

    def __init__(
        self, counts: ArrayLike, *, seed: int, lanes: int | None = None, window: int = DEFAULT_WINDOW, homes: int = 1
    ) -> None:
        counts = np.asarray(counts, dtype=np.int64)
        self.num_samples = ShardOffsets(counts).num_samples
        lanes = Lanes.default_number(self.num_samples) if lanes is None else lanes
        longest = -(-self.num_samples // lanes)
        self.num_lanes, self.window = lanes, -(-longest // -(-longest // window))
        self._lanes = Lanes(lanes, self.window, self.num_samples, purpose="exact-window", seed=seed)
        least, num_longer = divmod(self.num_samples, lanes)
        home_of: Ints = np.empty_like(counts)
        home_of[permutation(len(counts), "exact-homes", seed)] = np.arange(len(counts)) * homes // len(counts)
        # Two passes, because a batch can extend over the end of a pass. Caching a method would make a reference cycle.
        make = functools.partial(_make_pass, counts, home_of, least + (np.arange(lanes) < num_longer), seed)
        self._passes = functools.lru_cache(maxsize=2)(make)
        self._copy = functools.partial(ExactOrder, counts, seed=seed, lanes=lanes, window=window, homes=homes)

    def __reduce__(self) -> Any:
        return self._copy, ()  # without the passes

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return (shard, number in the shard) of the sample at each position: int64 (n,) each.

        Each position is at least 0.
        """
        passes, places = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        shards, samples = np.empty_like(places), np.empty_like(places)
        for number, at in group_indices(passes):
            order = self._passes(number)
            rows, lanes = np.divmod(places[at], self.num_lanes)
            shuffled = self._lanes.shuffle(number, lanes, rows)
            stacked, samples[at] = order.stack.find(order.lane_starts[lanes] + shuffled)
            shards[at] = order.shards[stacked]
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part (always 0) and the depth of each position: int64 (n,) each.

        The depth is the place of the lane's cut in the pass, 0 <= depth < 2**20. Positions of one pass with close
        depths mostly read the same shards.
        """
        passes, places = np.divmod(positions, self.num_samples)
        cuts = np.empty_like(places)
        for number, at in group_indices(passes):
            order = self._passes(number)
            cuts[at] = order.cuts[places[at] % self.num_lanes]
        return np.zeros_like(cuts), cuts * DEPTHS // self.num_lanes


def _make_pass(counts: Ints, home_of: Ints, lane_sizes: Ints, seed: int, number: int) -> _Pass:
    """Return the pass with this number. `home_of` has the group of each shard, `lane_sizes` the size of each lane."""
    shards = permutation(len(counts), "exact-shards", seed, number)
    shards = shards[np.argsort(home_of[shards], kind="stable")]
    num_lanes = len(lane_sizes)
    offset = int(philox("exact-lanes", seed, number).random_raw()) % num_lanes
    cuts = Lanes.cuts(num_lanes, offset)
    sizes = np.empty_like(cuts)
    sizes[cuts] = lane_sizes
    starts = np.cumsum(sizes) - sizes
    return _Pass(shards, ShardOffsets(counts[shards]), cuts, starts[cuts])
