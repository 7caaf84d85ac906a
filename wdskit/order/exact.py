"""The order of `exact`: each sample once a pass, shuffled across shards and lanes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wdskit.order.base import DEPTHS, Ints, Stack, grouped, one_of
from wdskit.order.keys import permutation, philox
from wdskit.order.lanes import DEFAULT_WINDOW, Lanes, cuts_of, default_lanes


class _Pass(NamedTuple):
    """One pass: its shards in their order, the cut that each lane is, and where in their samples it starts."""

    shards: Ints
    stack: Stack
    cuts: Ints
    lane_starts: Ints


class ExactOrder:
    """Each sample exactly once a pass.

    The shards of a pass are permuted, laid end to end, and cut at sample granularity into lanes whose sizes differ by
    at most one; each lane is shuffled in windows. Position p of a pass stands in lane p mod L. Which cut is which lane
    is `lanes.cuts_of`, with an offset of each pass: neighbouring positions come from cuts that are far apart.

    With homes, shards are dealt to H groups once and for all. A pass permutes them inside their group only and lays
    the groups end to end, so that each stretch of a pass holds the samples that it held in the pass before.

    Args:
        counts: Samples of each shard, (num_shards,).
        seed: 0 <= seed < 2**64.
        lanes: L >= 1; without, 240, or one for each 64 samples where that is less.
        window: Most samples of a lane that are shuffled with each other, >= 1.
        homes: H >= 1.

    Attributes:
        num_samples: Samples of a pass.
        counts: As given, int64.
        num_lanes: L.
        window: How many are: as many windows as that takes are of one size, up to the rounding. With a remnant as the
            last one, the end of each pass would be shuffled less than the rest.

    Raises:
        ValueError: There is no sample, or an argument is out of range.
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
        # Two passes, because a batch can extend over the end of one. Without `self`: that would be a reference cycle.
        make = functools.partial(_make_pass, self.counts, self._home_of, self._sizes, self._seed)
        self._passes = functools.lru_cache(maxsize=2)(make)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_passes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._remember()

    def take(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """The samples at positions of the endless sequence of passes; see `order.base.Order`."""
        passes, places = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        if len(places) and passes[0] == passes.min() == passes.max():
            return self._take_pass(int(passes[0]), places)
        shards, samples = np.empty_like(places), np.empty_like(places)
        for number, at in grouped(passes):
            shards[at], samples[at] = self._take_pass(number, places[at])
        return shards, samples

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Where in the data positions stand; see `order.base.Order`."""
        passes, places = np.divmod(positions, self.num_samples)
        cuts = np.empty_like(places)
        for number, at in grouped(passes):
            order = self._passes(number)
            cuts[at] = order.cuts[places[at] % self.num_lanes]
        return np.zeros_like(cuts), cuts * DEPTHS // self.num_lanes

    def substitute(self, position: int, attempt: int) -> tuple[int, int] | None:
        """Another sample for a bad one; see `order.base.Order`."""
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
