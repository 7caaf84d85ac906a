"""What ranks read and hold, from the cuts of lanes: the same as what a look at every position finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.tune.reads import lane_reads, read_at_once

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def found(order, positions, sample_bytes):
    """Different shards, and bytes, of what stands at positions."""
    shards, _ = order.take(positions)
    return len(set(shards.tolist())), sample_bytes[shards].sum()


def sizes_of(counts):
    return np.arange(1.0, len(counts) + 1) * 10


def groups_of(num_lanes, world_size):
    return np.arange(num_lanes) % math.gcd(num_lanes, world_size)


@given(data=st.data(), counts=COUNTS, num_ranks=st.integers(1, 6), factor=st.integers(1, 5), window=st.integers(1, 40))
def test_a_rank_that_has_its_lanes_to_itself_reads_what_the_cuts_say(data, counts, num_ranks, factor, window):
    """Exactly, shards and bytes, in any whole passes."""
    order = ExactOrder(counts, seed=1, lanes=num_ranks * factor, window=window)
    first = data.draw(st.integers(0, 3))
    stop = first + data.draw(st.integers(1, 3))
    sample_bytes = sizes_of(counts)
    ends = first * order.num_samples, stop * order.num_samples
    num_shards, num_bytes = lane_reads(order, *ends, groups_of(order.num_lanes, num_ranks), sample_bytes)
    for rank in range(num_ranks):
        positions = np.concatenate(
            [
                np.arange(number * order.num_samples + rank, (number + 1) * order.num_samples, num_ranks)
                for number in range(first, stop)
            ]
        )
        shards, size = found(order, positions, sample_bytes)
        assert num_shards[rank] == shards
        assert num_bytes[rank] == pytest.approx(size)


@given(counts=COUNTS, lanes=st.integers(1, 12), window=st.integers(1, 40), data=st.data())
def test_no_rank_reads_a_shard_beyond_those_of_its_lanes(counts, lanes, window, data):
    """In any stretch of positions, on any number of ranks; and the bytes of all ranks together are those that are read,
    up to the windows at the ends of the stretch.
    """
    order = ExactOrder(counts, seed=4, lanes=lanes, window=window)
    world_size = data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, 2 * order.num_samples))
    stop = start + data.draw(st.integers(1, 2 * order.num_samples))
    groups = groups_of(lanes, world_size)
    num_shards, num_bytes = lane_reads(order, start, stop, groups, np.ones(len(counts)))
    assert num_bytes.sum() == pytest.approx(stop - start)
    positions = np.arange(start, stop)
    for rank in range(world_size):
        within = positions % order.num_samples % world_size == rank
        shards, _ = found(order, positions[within], np.ones(len(counts)))
        assert shards <= num_shards[rank % (max(groups) + 1)]


def test_ranks_that_share_lanes_of_shards_of_a_usual_size_read_from_each():
    """Then the most that a rank can read from is what it does."""
    counts = [300, 250, 0, 400] * 8
    order = ExactOrder(counts, seed=0, lanes=8, window=100)
    num_shards, num_bytes = lane_reads(order, 0, order.num_samples, groups_of(8, 12), sizes_of(counts))
    there = [found(order, np.arange(rank, order.num_samples, 12), sizes_of(counts)) for rank in range(12)]
    assert [num_shards[rank % 4] for rank in range(12)] == pytest.approx([shards for shards, _ in there], rel=0.05)
    assert [num_bytes[rank % 4] / 3 for rank in range(12)] == pytest.approx([size for _, size in there], rel=0.05)


def test_an_epoch_of_very_many_passes_is_planned_from_the_first_ones():
    order = ExactOrder([10] * 50, seed=0, lanes=10, window=10)
    num_shards, num_bytes = lane_reads(order, 0, 500 * 10**6, np.arange(10), np.ones(50))
    assert num_shards == pytest.approx(np.full(10, 50), abs=0.5)
    assert num_bytes.sum() == pytest.approx(500 * 10**6)


@given(counts=COUNTS, lanes=st.integers(1, 8), window=st.integers(1, 20), num_groups=st.integers(1, 4))
def test_windows_reach_into_the_shards_that_are_counted(counts, lanes, window, num_groups):
    """The most of all moments and groups, found by looking at each."""
    order = ExactOrder(counts, seed=2, lanes=lanes, window=window)
    sample_bytes = sizes_of(counts)
    groups = np.arange(lanes) % num_groups
    moments = []
    for first in range(0, order.num_samples, lanes * order.window):
        positions = np.arange(first, min(order.num_samples, first + lanes * order.window))
        of_group = groups[positions % lanes]
        moments += [found(order, positions[of_group == each], sample_bytes) for each in range(num_groups)]
    num_shards, most_bytes = read_at_once(order, 0, groups, sample_bytes, 1)
    assert num_shards == max(num for num, _ in moments)
    assert most_bytes == pytest.approx(max(num_bytes for _, num_bytes in moments))


@pytest.mark.parametrize("world_size", [1, 4])
def test_resampled_ranks_read_what_is_expected(world_size):
    """The mean over many seeds, within four of its deviations and a percent."""
    counts = [40, 0, 3, 200, 90] * 6
    sample_bytes = sizes_of(counts)
    there = []
    for seed in range(60):
        order = ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=64)
        there.append(found(order, np.arange(0, 2000, world_size), sample_bytes))
    num_shards, num_bytes = lane_reads(order, 0, 2000, groups_of(4, world_size), sample_bytes)
    assert np.mean(there, axis=0) == pytest.approx([num_shards[0], num_bytes[0]], rel=0.03)


def test_resampled_windows_reach_into_what_is_expected():
    counts = [40, 0, 3, 200, 90] * 6
    sample_bytes = sizes_of(counts)
    there = [
        found(ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=20), np.arange(80), sample_bytes)
        for seed in range(300)
    ]
    order = ResampledOrder(counts, seed=0, chunk=8, lanes=4, window=20)
    assert np.mean(there, axis=0) == pytest.approx(read_at_once(order, 0, np.zeros(4, int), sample_bytes, 1), rel=0.03)


@given(counts=COUNTS, data=st.data())
def test_a_sequential_order_reads_from_each_shard_that_it_comes_to(counts, data):
    order = SequentialOrder(counts)
    stop = data.draw(st.integers(1, order.num_samples))
    num_shards, num_bytes = lane_reads(order, 0, stop, np.zeros(1, int), sizes_of(counts))
    assert (num_shards[0], num_bytes[0]) == pytest.approx(found(order, np.arange(stop), sizes_of(counts)))


@given(counts=COUNTS, global_batch=st.integers(1, 40))
def test_a_sequential_batch_reaches_into_the_shards_that_are_counted(counts, global_batch):
    order = SequentialOrder(counts)
    sample_bytes = sizes_of(counts)
    batches = [
        found(order, np.arange(first, min(first + global_batch, order.num_samples)), sample_bytes)
        for first in range(0, order.num_samples, global_batch)
    ]
    num_shards, num_bytes = read_at_once(order, 0, np.zeros(1, int), sample_bytes, global_batch)
    assert num_shards == max(num for num, _ in batches)
    assert num_bytes == pytest.approx(max(num_bytes for _, num_bytes in batches))
