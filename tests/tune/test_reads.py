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
from wdskit.tune import reads as reads_module
from wdskit.tune.reads import read_order

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def found(order, positions, sample_bytes):
    """Different shards, and bytes, of what stands at positions."""
    shards, _ = order.take(positions)
    return len(set(shards.tolist())), sample_bytes[shards].sum()


def sizes_of(counts):
    return np.arange(1.0, len(counts) + 1) * 10


def read(order, start, stop, *, num_groups=1, node_size=1, batch=1):
    return read_order(order, start, stop, sizes_of(order.counts), num_groups, node_size, batch)


@given(data=st.data(), counts=COUNTS, num_ranks=st.integers(1, 6), factor=st.integers(1, 5), window=st.integers(1, 40))
def test_a_rank_that_has_its_lanes_to_itself_reads_what_the_cuts_say(data, counts, num_ranks, factor, window):
    """Exactly, shards and bytes, in any whole passes."""
    order = ExactOrder(counts, seed=1, lanes=num_ranks * factor, window=window)
    first = data.draw(st.integers(0, 3))
    stop = first + data.draw(st.integers(1, 3))
    sample_bytes = sizes_of(counts)
    ends = first * order.num_samples, stop * order.num_samples
    reads = read(order, *ends, num_groups=num_ranks)
    for rank in range(num_ranks):
        positions = np.concatenate(
            [
                np.arange(number * order.num_samples + rank, (number + 1) * order.num_samples, num_ranks)
                for number in range(first, stop)
            ]
        )
        shards, size = found(order, positions, sample_bytes)
        assert reads.shards[rank] == shards
        assert reads.num_bytes[rank] == pytest.approx(size)


@given(counts=COUNTS, lanes=st.integers(1, 12), window=st.integers(1, 40), data=st.data())
def test_no_rank_reads_a_shard_beyond_those_of_its_lanes(counts, lanes, window, data):
    """In any stretch of positions, on any number of ranks; and the bytes of all ranks together are those that are read,
    up to the windows at the ends of the stretch.
    """
    order = ExactOrder(counts, seed=4, lanes=lanes, window=window)
    world_size = data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, 2 * order.num_samples))
    stop = start + data.draw(st.integers(1, 2 * order.num_samples))
    num_groups = math.gcd(lanes, world_size)
    reads = read_order(order, start, stop, np.ones(len(counts)), num_groups, 1, 1)
    assert reads.num_bytes.sum() == pytest.approx(stop - start)
    positions = np.arange(start, stop)
    for rank in range(world_size):
        within = positions % order.num_samples % world_size == rank
        shards, _ = found(order, positions[within], np.ones(len(counts)))
        assert shards <= reads.shards[rank % num_groups]


def test_ranks_that_share_lanes_of_shards_of_a_usual_size_read_from_each():
    """Then the most that a rank can read from is what it does."""
    counts = [300, 250, 0, 400] * 8
    order = ExactOrder(counts, seed=0, lanes=8, window=100)
    num_shards, num_bytes, *_ = read(order, 0, order.num_samples, num_groups=4)
    there = [found(order, np.arange(rank, order.num_samples, 12), sizes_of(counts)) for rank in range(12)]
    assert [num_shards[rank % 4] for rank in range(12)] == pytest.approx([shards for shards, _ in there], rel=0.05)
    assert [num_bytes[rank % 4] / 3 for rank in range(12)] == pytest.approx([size for _, size in there], rel=0.05)


def test_an_epoch_of_very_many_passes_is_planned_from_the_first_ones():
    order = ExactOrder([10] * 50, seed=0, lanes=10, window=10)
    reads = read_order(order, 0, 500 * 10**6, np.ones(50), 10, 1, 1)
    assert reads.shards == pytest.approx(np.full(10, 50), abs=0.5)
    assert reads.num_bytes.sum() == pytest.approx(500 * 10**6)


@given(
    counts=COUNTS,
    window=st.integers(1, 20),
    num_groups=st.integers(1, 4),
    factor=st.integers(1, 3),
    node_size=st.integers(1, 4),
)
def test_windows_reach_into_the_shards_that_are_counted(counts, window, num_groups, factor, node_size):
    """The most of all moments, and groups or nodes, found by looking at each."""
    order = ExactOrder(counts, seed=2, lanes=num_groups * factor, window=window)
    of_ranks, of_nodes = [], []
    for first in range(0, order.num_samples, order.num_lanes * order.window):
        positions = np.arange(first, min(order.num_samples, first + order.num_lanes * order.window))
        groups = positions % num_groups
        of_ranks += [found(order, positions[groups == each], sizes_of(counts)) for each in range(num_groups)]
        nodes = groups // node_size
        of_nodes += [found(order, positions[nodes == each], sizes_of(counts)) for each in range(num_groups)]
    reads = read(order, 0, order.num_samples, num_groups=num_groups, node_size=node_size)
    assert reads.rank_open == max(num for num, _ in of_ranks)
    assert reads.node_open == max(num for num, _ in of_nodes)
    assert reads.node_bytes == pytest.approx(max(num_bytes for _, num_bytes in of_nodes))


@pytest.mark.parametrize("world_size", [1, 4])
def test_resampled_ranks_read_what_is_expected(world_size):
    """The mean over many seeds, within three percent."""
    counts = [40, 0, 3, 200, 90] * 6
    there = []
    for seed in range(60):
        order = ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=64)
        there.append(found(order, np.arange(0, 2000, world_size), sizes_of(counts)))
    reads = read(order, 0, 2000, num_groups=world_size)
    assert np.mean(there, axis=0) == pytest.approx([reads.shards[0], reads.num_bytes[0]], rel=0.03)


def test_resampled_windows_reach_into_what_is_expected():
    counts = [40, 0, 3, 200, 90] * 6
    orders = [ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=20) for seed in range(300)]
    of_ranks = [found(order, np.arange(0, 80, 4), sizes_of(counts))[0] for order in orders]
    of_nodes = [found(order, np.flatnonzero(np.arange(80) % 4 < 2), sizes_of(counts)) for order in orders]
    reads = read(orders[0], 0, 80, num_groups=4, node_size=2)
    assert np.mean(of_ranks) == pytest.approx(reads.rank_open, rel=0.03)
    assert np.mean(of_nodes, axis=0) == pytest.approx([reads.node_open, reads.node_bytes], rel=0.03)


@given(counts=COUNTS, data=st.data(), batch=st.integers(1, 40))
def test_a_sequential_order_reads_from_each_shard_that_it_comes_to(counts, data, batch):
    """In whole steps; and each step reaches into the shards that are counted."""
    order, sample_bytes = SequentialOrder(counts), sizes_of(counts)
    num_steps = data.draw(st.integers(1, -(-order.num_samples // batch)))
    stop = min(order.num_samples, num_steps * batch)
    steps = [
        found(order, np.arange(first, min(first + batch, order.num_samples)), sample_bytes)
        for first in range(0, order.num_samples, batch)
    ]
    reads = read_order(order, 0, stop, sample_bytes, 1, 1, batch)
    assert (reads.shards[0], reads.num_bytes[0]) == pytest.approx(found(order, np.arange(stop), sample_bytes))
    assert reads.rank_open == reads.node_open == max(num for num, _ in steps)
    assert reads.node_bytes == pytest.approx(max(num_bytes for _, num_bytes in steps))


def test_a_sequential_pass_of_very_many_steps_takes_little_memory(monkeypatch):
    """Then a moment is several steps, and has the mean bytes of one."""
    monkeypatch.setattr(reads_module, "_MAX_MOMENTS", 10)
    reads = read_order(SequentialOrder([100] * 10), 0, 1000, np.ones(10), 1, 1, 7)
    assert 1 <= reads.rank_open <= 3
    assert reads.node_bytes == pytest.approx(7)
