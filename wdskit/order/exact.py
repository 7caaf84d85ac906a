"""The order of `exact`: each sample once per pass, shuffled across shards and lanes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEPTHS, Ints, Stack, grouped, one_of
from wdskit.order.keys import permutation, philox
from wdskit.order.lanes import DEFAULT_WINDOW, Lanes, cuts_of, default_lanes


class _Pass(NamedTuple):
    """One pass: its shards in order, the number of the cut of each lane, and the first sample number of each lane."""

    shards: Ints
    stack: Stack
    cuts: Ints
    lane_starts: Ints


class ExactOrder:
    """Each sample exactly once per pass.

    Each pass permutes the shards, concatenates them, and cuts the samples into lanes whose sizes differ by at most one.
    Each lane is shuffled in windows. Position p of a pass is in lane p mod L. `lanes.cuts_of` maps lanes to cuts, with
    another offset in each pass: neighbouring positions come from cuts that are far apart.

    With homes, shards are divided into H groups, which are the same in every pass. A pass permutes the shards inside
    each group and concatenates the groups, so that each part of a pass has the samples that it had in the pass before.

    Args:
        counts: Number of samples of each shard, (num_shards,).
        seed: 0 <= seed < 2**64.
        lanes: L >= 1. Default: 240, or the number of samples divided by 64 if that is less.
        window: Most samples of a lane that are shuffled with each other, >= 1.
        homes: H >= 1.

    Attributes:
        num_samples: Samples of a pass.
        counts: `counts` as int64.
        num_lanes: L.
        window: Size of the windows of a lane. All windows have this size, except for rounding. If the last one were a
            smaller rest, the end of each pass would be shuffled less.

    Raises:
        ValueError: All counts are 0, or an argument is out of range.
    """

    def __init__(
        self,
        counts: ArrayLike,
        *,
        seed: int,
        lanes: int | None = None,
        window: int = DEFAULT_WINDOW,
        homes: int = 1,
    ) -> None:
        self.counts: Ints = np.asarray(counts, dtype=np.int64)
        self._seed = seed
        self.num_samples = Stack(self.counts).num_samples
        lanes = default_lanes(self.num_samples) if lanes is None else lanes
        longest = -(-self.num_samples // max(1, lanes))
        self.num_lanes, self.window = lanes, -(-longest // -(-longest // window)) if window > 0 else window
        self._lanes = Lanes(self.num_lanes, self.window, purpose="exact-window", seed=seed)
        least, num_longer = divmod(self.num_samples, lanes)
        self._sizes = least + (np.arange(lanes) < num_longer)
        num_shards = len(self.counts)
        self._home_of: Ints = np.empty_like(self.counts)
        self._home_of[permutation(num_shards, "exact-homes", seed)] = np.arange(num_shards) * homes // num_shards
        self._remember()

    def _remember(self) -> None:
        # Two passes, because a batch can extend over the end of one. A method would make a reference cycle.
        make = functools.partial(_make_pass, self.counts, self._home_of, self._sizes, self._seed)
        self._passes = functools.lru_cache(maxsize=2)(make)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_passes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """See `order.base.Order`."""
        passes, places = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        if len(places) and passes[0] == passes.min() == passes.max():
            return self._take_pass(int(passes[0]), places)
        shards, samples = np.empty_like(places), np.empty_like(places)
        for number, at in grouped(passes):
            shards[at], samples[at] = self._take_pass(number, places[at])
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """See `order.base.Order`. The depth is the cut of the position's lane."""
        passes, places = np.divmod(positions, self.num_samples)
        cuts = np.empty_like(places)
        for number, at in grouped(passes):
            order = self._passes(number)
            cuts[at] = order.cuts[places[at] % self.num_lanes]
        return np.zeros_like(cuts), cuts * DEPTHS // self.num_lanes

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """See `order.base.Order`."""
        number, place = divmod(position, self.num_samples)
        other = self._lanes.beside(place, attempt, self.num_samples)
        return None if other is None else one_of(self, number * self.num_samples + other)

    def _take_pass(self, number: int, positions: Ints) -> tuple[Ints, Ints]:
        places, lanes = np.divmod(positions, self._lanes.num_lanes)
        order = self._passes(number)
        shuffled = self._lanes.shuffle(number, lanes, places, self._sizes[lanes])
        at, samples = order.stack.find(order.lane_starts[lanes] + shuffled)
        return order.shards[at], samples


def _make_pass(counts: Ints, home_of: Ints, lane_sizes: Ints, seed: int, number: int) -> _Pass:
    shards = permutation(len(counts), "exact-shards", seed, number)
    shards = shards[np.argsort(home_of[shards], kind="stable")]
    num_lanes = len(lane_sizes)
    offset = int(philox("exact-lanes", seed, number).random_raw()) % num_lanes
    cuts = cuts_of(num_lanes, offset)
    sizes = np.empty_like(cuts)
    sizes[cuts] = lane_sizes
    starts = np.cumsum(sizes) - sizes
    return _Pass(shards, Stack(counts[shards]), cuts, starts[cuts])
