"""A pass of `exact` in pieces: where the ends of shards, lanes and windows cut its sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wdskit.order.base import Ints


class Pieces(NamedTuple):
    """Stretches of neighbouring samples of one shard in one window of one lane, in the order of the pass.

    Attributes:
        lanes: Lane of each piece, (num_pieces,), as all that follow.
        windows: Number of the window in its lane.
        window_sizes: Places of that window.
        turns: Which shard of the pass it is, counted in the pass's order; ascending.
        shards: Number of that shard.
        sizes: Samples of the piece, at least 1.
    """

    lanes: Ints
    windows: Ints
    window_sizes: Ints
    turns: Ints
    shards: Ints
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
    return Pieces(lanes[at], numbers[at], window_sizes[at], turns, shards[turns], sizes)
