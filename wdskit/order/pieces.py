"""A pass of `exact` in pieces: where the ends of shards, lanes and windows cut its sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wdskit.order.base import Ints


class Windows(NamedTuple):
    """The windows of all lanes, in the order of the pass; (num_windows,) each.

    Attributes:
        lanes: Lane of each.
        numbers: Its number in the lane.
        sizes: Its places.
    """

    lanes: Ints
    numbers: Ints
    sizes: Ints


class Pieces(NamedTuple):
    """Stretches of neighbouring samples of one shard in one window of one lane, in the order of the pass.

    Attributes:
        windows: The windows.
        shards: The shards of the pass in its order.
        at: Which of `windows` each piece is of, (num_pieces,), ascending.
        turns: Which of `shards` it is of, (num_pieces,), ascending.
        sizes: Its samples, (num_pieces,), at least 1.
    """

    windows: Windows
    shards: Ints
    at: Ints
    turns: Ints
    sizes: Ints


def cut(stops: Ints, shards: Ints, lane_starts: Ints, lane_sizes: Ints, window: int) -> Pieces:
    """Cut a pass.

    Args:
        stops: Where each shard of the pass ends, ascending, (num_shards,).
        shards: Numbers of these shards.
        lane_starts: Where each lane starts, (num_lanes,).
        lane_sizes: Places of each lane; together they are as many as the shards' samples.
        window: Places of a window.
    """
    in_turn = np.argsort(lane_starts, kind="stable")
    in_turn = in_turn[lane_sizes[in_turn] > 0]
    nums = -(-lane_sizes[in_turn] // window)
    lanes = np.repeat(in_turn, nums)
    numbers = np.arange(len(lanes)) - np.repeat(np.cumsum(nums) - nums, nums)
    firsts = lane_starts[lanes] + numbers * window
    cuts = np.concatenate([firsts, stops])
    cuts.sort()
    sizes = np.diff(cuts)
    cuts, sizes = cuts[:-1][sizes > 0], sizes[sizes > 0]
    at = np.searchsorted(firsts, cuts, side="right") - 1
    turns = np.searchsorted(stops, cuts, side="right")
    window_sizes = np.minimum(window, lane_sizes[lanes] - numbers * window)
    return Pieces(Windows(lanes, numbers, window_sizes), shards, at, turns, sizes)
