"""What ranks read and hold, from the cuts of lanes: the same as what reading every position finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder
from wdskit.order.reads import (
    Share,
    exact_held,
    exact_reads,
    resampled_held,
    resampled_reads,
    sequential_held,
    sequential_reads,
    shared,
)
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def found(order, positions, sample_bytes):
    """Different shards, and bytes, of what stands at positions."""
    shards, _ = order.take(positions)
    return len(set(shards.tolist())), sample_bytes[shards].sum()


def sizes_of(counts):
    return np.arange(1.0, len(counts) + 1) * 10


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


@given(data=st.data(), counts=COUNTS, num_ranks=st.integers(1, 6), factor=st.integers(1, 5), window=st.integers(1, 40))
def test_a_rank_that_has_its_lanes_to_itself_reads_what_the_cuts_say(data, counts, num_ranks, factor, window):
    """Exactly, shards and bytes, in any whole passes."""
    order = ExactOrder(counts, seed=1, lanes=num_ranks * factor, window=window)
    first = data.draw(st.integers(0, 3))
    stop = first + data.draw(st.integers(1, 3))
    sample_bytes = sizes_of(counts)
    ends = first * order.num_samples, stop * order.num_samples
    reads = exact_reads(order, *ends, shared(order.num_lanes, num_ranks), sample_bytes)
    for rank in range(num_ranks):
        positions = np.concatenate(
            [
                np.arange(number * order.num_samples + rank, (number + 1) * order.num_samples, num_ranks)
                for number in range(first, stop)
            ]
        )
        num_shards, num_bytes = found(order, positions, sample_bytes)
        assert reads.num_shards[rank] == pytest.approx(num_shards, abs=1e-9)
        assert reads.num_bytes[rank] == pytest.approx(num_bytes)


@pytest.mark.parametrize(("world_size", "stop"), [(6, 3000), (64, 3000), (40, 1234), (9, 2000)])
def test_ranks_that_share_lanes_read_what_is_expected(world_size, stop):
    """Their mean over many seeds, and in a pass of which the end is left out."""
    counts = [7, 1, 0, 30, 300, 4] * 8 + [264]
    sample_bytes = sizes_of(counts)
    told, there = [], []
    for seed in range(40):
        order = ExactOrder(counts, seed=seed, lanes=8, window=100)
        share = shared(8, world_size)
        reads = exact_reads(order, 0, stop, share, sample_bytes)
        ranks = range(world_size)
        told.append((reads.num_shards.mean(), reads.num_bytes.mean()))
        there.append(np.mean([found(order, np.arange(rank, stop, world_size), sample_bytes) for rank in ranks], axis=0))
    assert np.mean(told, axis=0) == pytest.approx(np.mean(there, axis=0), rel=0.01)


def test_many_passes_reach_nearly_every_shard():
    """A tenth of the shards in each of 40 passes, of which the first few are looked at."""
    order = ExactOrder([10] * 50, seed=0, lanes=10, window=10)
    reads = exact_reads(order, 0, 500 * 40, shared(10, 10), sizes_of([0] * 50))
    assert reads.num_shards == pytest.approx(np.full(10, 50 * (1 - 0.9**40)), abs=0.5)
    assert reads.num_bytes.sum() == pytest.approx(40 * 10 * sizes_of([0] * 50).sum(), rel=0.01)


@given(counts=COUNTS, lanes=st.integers(1, 8), window=st.integers(1, 20))
def test_windows_reach_into_the_shards_that_are_held(counts, lanes, window):
    """The most of all moments, found by looking at each."""
    order = ExactOrder(counts, seed=2, lanes=lanes, window=window)
    sample_bytes = sizes_of(counts)
    moments = []
    for first in range(0, order.num_samples, lanes * order.window):
        stop = min(order.num_samples, first + lanes * order.window)
        moments.append(found(order, np.arange(first, stop), sample_bytes))
    held = exact_held(order, 0, [np.arange(lanes)], sample_bytes)
    assert held.num_bytes == pytest.approx(max(num_bytes for _, num_bytes in moments))
    most = max(num for num, _ in moments)
    assert held.num_shards <= most  # lanes that meet in a shard can make another moment the worst
    assert held.num_shards == most or held.num_shards >= most - lanes


def test_the_worst_of_several_sets_of_lanes_counts():
    order = ExactOrder([1] * 40, seed=0, lanes=4, window=5)
    some = exact_held(order, 0, [np.array([0]), np.array([1, 2])], np.ones(40))
    assert some == (10, 10)


@pytest.mark.parametrize("world_size", [1, 4, 10])
def test_resampled_ranks_read_what_is_expected(world_size):
    """The mean over many seeds, within four of its deviations and a percent."""
    counts = [40, 0, 3, 200, 90] * 6
    sample_bytes = sizes_of(counts)
    there = []
    for seed in range(60):
        order = ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=64)
        there.append(found(order, np.arange(0, 2000, world_size), sample_bytes))
    reads = resampled_reads(order, 2000, shared(4, world_size), sample_bytes)
    assert np.mean(there, axis=0) == pytest.approx([reads.num_shards[0], reads.num_bytes[0]], rel=0.03)


def test_resampled_windows_reach_into_what_is_expected():
    counts = [40, 0, 3, 200, 90] * 6
    sample_bytes = sizes_of(counts)
    there = [
        found(ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=20), np.arange(80), sample_bytes)
        for seed in range(300)
    ]
    held = resampled_held(ResampledOrder(counts, seed=0, chunk=8, lanes=4, window=20), 4, sample_bytes)
    assert np.mean(there, axis=0) == pytest.approx(held, rel=0.03)


@given(counts=COUNTS, world_size=st.integers(1, 20), data=st.data())
@settings(max_examples=60)
def test_sequential_ranks_read_what_the_index_says(counts, world_size, data):
    order = SequentialOrder(counts)
    sample_bytes = sizes_of(counts)
    stop = data.draw(st.integers(1, order.num_samples))
    reads = sequential_reads(order, stop, world_size, sample_bytes)
    for rank in range(world_size):
        there = found(order, np.arange(rank, stop, world_size), sample_bytes)
        assert (reads.num_shards[rank], reads.num_bytes[rank]) == pytest.approx(there)


@given(counts=COUNTS, global_batch=st.integers(1, 40))
def test_a_sequential_batch_holds_the_shards_it_reaches_into(counts, global_batch):
    order = SequentialOrder(counts)
    sample_bytes = sizes_of(counts)
    batches = [
        found(order, np.arange(first, min(first + global_batch, order.num_samples)), sample_bytes)
        for first in range(0, order.num_samples, global_batch)
    ]
    held = sequential_held(order, global_batch, 0.5, sample_bytes)
    assert held.num_shards == max(num for num, _ in batches)
    assert held.num_bytes == pytest.approx(max(num_bytes for _, num_bytes in batches) / 2)


def test_ranks_touch_the_lanes_of_their_group():
    for world_size, num_lanes in itertools.product(range(1, 13), range(1, 13)):
        share = shared(num_lanes, world_size)
        assert isinstance(share, Share)
        for rank in range(world_size):
            touched = set((np.arange(rank, rank + world_size * num_lanes, world_size) % num_lanes).tolist())
            assert set(np.flatnonzero(share.groups == rank % share.num_groups).tolist()) == touched
        assert share.taken * world_size == share.num_groups
