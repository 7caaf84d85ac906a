"""Where the ends of shards, lanes and windows cut a pass of `exact`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@given(counts=COUNTS, lanes=st.integers(1, 30), window=st.integers(1, 40), number=st.integers(0, 2))
def test_pieces_are_the_pass(counts, lanes, window, number):
    """Laid end to end they hold each sample once, and each piece's samples stand in its window of its lane."""
    order = ExactOrder(counts, seed=3, lanes=lanes, window=window)
    pieces = order.pieces(number)
    assert np.bincount(pieces.shards[pieces.turns], pieces.sizes, minlength=len(counts)).tolist() == counts
    positions = np.arange(order.num_samples)
    shards, _ = order.take(positions + number * order.num_samples)
    places = list(zip((positions % lanes).tolist(), (positions // lanes // order.window).tolist(), strict=True))
    there = sorted((*place, shard) for place, shard in zip(places, shards.tolist(), strict=True))
    of_windows = [column[pieces.at].tolist() for column in pieces.windows]
    columns = (*of_windows[:2], pieces.shards[pieces.turns].tolist(), pieces.sizes.tolist())
    told = sorted((lane, at, shard) for lane, at, shard, size in zip(*columns, strict=True) for _ in range(size))
    assert told == there
    sizes = {place: places.count(place) for place in set(places)}
    assert of_windows[2] == [sizes[place] for place in zip(*columns[:2], strict=True)]
