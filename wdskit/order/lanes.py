"""Lanes and their windows: how a long sequence is shuffled without ever being held.

A sequence of n places is cut into L lanes; position p stands in lane p mod L, so a rank that takes every R-th position
stays in L / gcd(R, L) of them and reads those parts of the shards only. Each lane is shuffled in windows of w places.
"""

from __future__ import annotations

import itertools

import numpy as np

from wdskit.order.base import Ints, Recent, looked_up
from wdskit.order.keys import permutation

DEFAULT_LANES = 240
DEFAULT_WINDOW = 4096

_ENDLESS = -1  # size of a lane that has no end


class Lanes:
    """Windowed shuffles of lanes.

    Args:
        num_lanes: L >= 1.
        window: w >= 1, places that are shuffled with each other.
        purpose: Tag of the random keys.
        seed: Of the order.
    """

    def __init__(self, num_lanes: int, window: int, *, purpose: str, seed: int) -> None:
        if num_lanes < 1 or window < 1:
            msg = f"lanes and window are 1 or more, not {num_lanes} and {window}"
            raise ValueError(msg)
        self.num_lanes = num_lanes
        self.window = window
        self._purpose = purpose
        self._seed = seed
        # A position of each lane is in use at a time, and the next window of a few: 2 bytes a place for 4096.
        self._permutations = Recent(self._permutation, 2 * num_lanes + 16)

    def shuffle(self, pass_number: int, lanes: Ints, places: Ints, sizes: Ints | None) -> Ints:
        """Where the windowed shuffle of its lane puts each place.

        Args:
            pass_number: Part of the key.
            lanes: Lane of each place, (n,).
            places: Place in the lane, (n,).
            sizes: Places of that lane, (n,), where the last window is cut to them; None for endless lanes.

        Returns:
            Place in the lane, (n,), a permutation within each window.
        """
        numbers, within = np.divmod(places, self.window)
        windows = numbers * self.num_lanes + lanes
        lane_sizes = itertools.repeat(_ENDLESS) if sizes is None else sizes.tolist()
        wanted = dict(zip(windows.tolist(), lane_sizes, strict=False))  # each once
        found = self._permutations.many([(pass_number, *one) for one in wanted.items()])
        return numbers * self.window + looked_up(windows, within, dict(zip(wanted, found, strict=True)))

    def beside(self, position: int, attempt: int, num_positions: int | None = None) -> int | None:
        """A position near another: first those of its window, around its end, then those behind it in all lanes.

        Args:
            position: Of the sequence of all lanes.
            attempt: Which of them, from 1 on.
            num_positions: Of that sequence; None where it has no end.

        Returns:
            None where there are no more, or where the next ones are no longer near.
        """
        place, lane = divmod(position, self.num_lanes)
        first = place - place % self.window
        size = self.window
        if num_positions is not None:
            size = min(size, (num_positions - lane + self.num_lanes - 1) // self.num_lanes - first)
        if attempt < size:
            return (first + (place - first + attempt) % size) * self.num_lanes + lane
        step = attempt - size + 1  # small data: a lane holds a sample or two
        if num_positions is None:
            return position + step if step <= DEFAULT_WINDOW else None
        return (position + step) % num_positions if step < min(num_positions, DEFAULT_WINDOW) else None

    def _permutation(self, pass_number: int, window: int, lane_size: int) -> Ints:
        number, lane = divmod(window, self.num_lanes)
        size = self.window if lane_size == _ENDLESS else min(self.window, lane_size - number * self.window)
        order = permutation(size, self._purpose, self._seed, pass_number, lane, number)
        return order.astype(np.min_scalar_type(size))
