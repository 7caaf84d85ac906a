"""Lanes and windows: shuffle a long sequence without holding it in memory.

A sequence of n places is cut into L consecutive pieces, the cuts, and each of L lanes reads one cut. Position p is in
lane p mod L, so neighbouring positions read different cuts. Each lane is shuffled in windows of w places.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.order.base import Ints, group_indices
from wdskit.order.keys import permutation

DEFAULT_LANES = 240
DEFAULT_WINDOW = 4096

_MIN_PER_LANE = 64  # samples, for the default number of lanes
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def default_lanes(num_samples: int) -> int:
    """Return the default number of lanes: 240, or one per 64 samples if that is less, but at least 1."""
    return min(DEFAULT_LANES, max(1, num_samples // _MIN_PER_LANE))


def lane_cuts(num_lanes: int, offset: int = 0) -> Ints:
    """Return the number of the cut that each lane reads: int64 (num_lanes,), a permutation.

    Neighbouring lanes read cuts that are far apart. Lane 0 reads cut `offset` mod `num_lanes`.
    """
    middle = round(_GOLDEN_RATIO * num_lanes)
    near = (middle + sign * distance for distance in range(num_lanes) for sign in (-1, 1))
    stride = next(each for each in near if each > 0 and math.gcd(each, num_lanes) == 1)
    cuts: Ints = (np.arange(num_lanes, dtype=np.int64) * stride + offset) % num_lanes
    return cuts


class Lanes:
    """Shuffles each lane in windows. Threads may share a `Lanes`.

    Args:
        num_lanes: Number of lanes, at least 1.
        window: Number of consecutive places of a lane that are shuffled with each other, at least 1.
        num_positions: Number of positions of all lanes together. None: the lanes are endless.
        purpose: Part of the random key: orders with different purposes get different shuffles.
        seed: Seed of the order.
    """

    def __init__(self, num_lanes: int, window: int, num_positions: int | None, *, purpose: str, seed: int) -> None:
        self.num_lanes = num_lanes
        self.window = window
        self.num_positions = num_positions
        self._purpose = purpose
        self._seed = seed
        self._copy = functools.partial(Lanes, num_lanes, window, num_positions, purpose=purpose, seed=seed)
        # Row 2 * lane + number % 2 has the last even or the last odd window of each lane, because a batch may extend
        # over the end of a window. Unused rows take no memory; used rows take 2 bytes per place with windows of 4096.
        num_rows = 2 * self.num_lanes
        self._shuffles = np.empty((num_rows, self.window), dtype=np.min_scalar_type(self.window - 1))
        self._passes = np.full(num_rows, -1, dtype=np.int64)
        self._windows = np.full(num_rows, -1, dtype=np.int64)
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return self._copy, ()  # without the buffers

    def shuffle(self, pass_number: int, lanes: Ints, places: Ints) -> Ints:
        """Return the new place of each place after the shuffle. A place stays in its window and its lane.

        Args:
            pass_number: Number of the pass; each pass has a different shuffle.
            lanes: Lane of each place, (n,).
            places: Places before the shuffle, counted in their lanes, (n,).

        Returns:
            New places, counted in their lanes, int64 (n,).
        """
        numbers, within = np.divmod(places, self.window)
        rows = 2 * lanes + (numbers & 1)
        with self._lock:
            if (self._passes.take(rows) == pass_number).all() and (self._windows.take(rows) == numbers).all():
                shuffled = self._shuffles.reshape(-1).take(rows * self.window + within)
            else:
                shuffled = np.empty_like(places)
                for window, at in group_indices(numbers * self.num_lanes + lanes):
                    shuffled[at] = self._window(pass_number, *divmod(window, self.num_lanes))[within[at]]
        return numbers * self.window + shuffled

    def _window(self, pass_number: int, number: int, lane: int) -> NDArray[Any]:
        """Return the permutation of a lane's window with this number. The caller holds the lock."""
        row = 2 * lane + (number & 1)
        if (self._passes[row], self._windows[row]) != (pass_number, number):
            size = self._window_size(number, lane)
            self._windows[row] = -1  # until the row is whole: Ctrl-C may come in between
            self._shuffles[row, :size] = permutation(size, self._purpose, self._seed, pass_number, lane, number)
            self._passes[row] = pass_number
            self._windows[row] = number
        shuffle: NDArray[Any] = self._shuffles[row]
        return shuffle

    def _window_size(self, number: int, lane: int) -> int:
        """Return the number of places in a lane's window with this number."""
        if self.num_positions is None:
            return self.window
        lane_size = (self.num_positions - lane + self.num_lanes - 1) // self.num_lanes
        return min(self.window, lane_size - number * self.window)
