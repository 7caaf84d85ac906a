"""Lanes and windows: shuffle a long sequence without holding it in memory.

A sequence of n places is cut into L consecutive pieces, the cuts, and each of L lanes reads one cut. Position p is in
lane p mod L, so neighbouring positions read different cuts. Each lane is shuffled in windows of w places.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from wdskit.order.base import Ints, group_indices
from wdskit.order.keys import permutation

DEFAULT_LANES = 240
DEFAULT_WINDOW = 4096

_MIN_PER_LANE = 64  # samples, for the default number of lanes
_ENDLESS = -1  # size of an endless lane
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
        purpose: Part of the random key: orders with different purposes get different shuffles.
        seed: Seed of the order.

    Raises:
        ValueError: `num_lanes` or `window` is below 1.
    """

    def __init__(self, num_lanes: int, window: int, *, purpose: str, seed: int) -> None:
        if num_lanes < 1 or window < 1:
            msg = f"lanes and window must be 1 or more, not {num_lanes} and {window}"
            raise ValueError(msg)
        self.num_lanes = num_lanes
        self.window = window
        self._purpose = purpose
        self._seed = seed
        self._make_buffers()

    def _make_buffers(self) -> None:
        # The last even and the last odd window of each lane, because a batch may extend over the end of a window.
        # Unused rows take no memory; used rows take 2 bytes per place with windows of 4096.
        self._shuffles = np.empty((2, self.num_lanes, self.window), dtype=np.min_scalar_type(self.window - 1))
        self._keys = np.full((3, 2, self.num_lanes), -1, dtype=np.int64)  # pass, window and size of each row
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_shuffles", "_keys", "_lock"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_buffers()

    def shuffle(self, pass_number: int, lanes: Ints, places: Ints, sizes: Ints | None) -> Ints:
        """Return the new place of each place after the shuffle. A place stays in its window and its lane.

        Args:
            pass_number: Number of the pass; each pass has a different shuffle.
            lanes: Lane of each place, (n,).
            places: Places before the shuffle, counted in their lanes, (n,).
            sizes: Number of places of the lane of each place, (n,). None: the lanes are endless.

        Returns:
            New places, counted in their lanes, int64 (n,).
        """
        numbers, within = np.divmod(places, self.window)
        odd = numbers & 1
        lane_sizes = np.full_like(lanes, _ENDLESS) if sizes is None else sizes
        shuffled = np.empty_like(places)
        with self._lock:
            pass_known, number_known, size_known = self._keys[:, odd, lanes]
            missing = (pass_known != pass_number) | (number_known != numbers) | (size_known != lane_sizes)
            if not missing.any():
                shuffled[:] = self._shuffles[odd, lanes, within]
            else:
                self._shuffle_windows(pass_number, lanes, numbers, within, lane_sizes, shuffled)
        return numbers * self.window + shuffled

    def _shuffle_windows(
        self, pass_number: int, lanes: Ints, numbers: Ints, within: Ints, sizes: Ints, shuffled: Ints
    ) -> None:
        """Write the new place in the window, for each place, to `shuffled`. Make the permutations that are not cached.

        `numbers` has the number of each place's window in its lane. `within` has the place in the window. `sizes` has
        the size of the lane, or `_ENDLESS`. The caller holds the lock.
        """
        for window, at in group_indices(numbers * self.num_lanes + lanes):
            number, lane = divmod(window, self.num_lanes)
            lane_size = int(sizes[at[0]])
            key, row = (pass_number, number, lane_size), self._shuffles[number & 1, lane]
            if tuple(self._keys[:, number & 1, lane].tolist()) != key:
                size = self.window if lane_size == _ENDLESS else min(self.window, lane_size - number * self.window)
                row[:size] = permutation(size, self._purpose, self._seed, pass_number, lane, number)
                self._keys[:, number & 1, lane] = key
            shuffled[at] = row[within[at]]

    def near_position(self, position: int, attempt: int, num_positions: int | None = None) -> int | None:
        """Return a position near `position`. With a rising `attempt`, these are the other positions of the same window
        and lane, and then the positions after `position`, of all lanes.

        After the end of the sequence, the positions continue at its start.

        Args:
            position: Position in the sequence of all lanes.
            attempt: 1 for the first near position, 2 for the second, and so on.
            num_positions: Length of the sequence; None for an endless sequence.

        Returns:
            The near position. None if no near position is left: at most `DEFAULT_WINDOW` positions after `position`
            are used.
        """
        place, lane = divmod(position, self.num_lanes)
        first = place - place % self.window
        size = self.window
        if num_positions is not None:
            size = min(size, (num_positions - lane + self.num_lanes - 1) // self.num_lanes - first)
        if attempt < size:
            return (first + (place - first + attempt) % size) * self.num_lanes + lane
        step = attempt - size + 1  # the window is used up: with little data, a lane has one or two samples
        if num_positions is None:
            return position + step if step <= DEFAULT_WINDOW else None
        return (position + step) % num_positions if step < min(num_positions, DEFAULT_WINDOW) else None
