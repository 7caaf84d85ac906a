"""What nodes read and hold, from the cuts of lanes: the same as what a look at every position finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.order.deal import dealt
from wdskit.order.exact import ExactOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps
from wdskit.tune.reads import Nodes, read_order

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def found(order, positions, sample_bytes):
    """Different shards, and bytes, of what stands at positions."""
    shards, _ = order.take(positions)
    return len(set(shards.tolist())), sample_bytes[shards].sum()


def sizes_of(counts):
    return np.arange(1.0, len(counts) + 1) * 10


def read(order, start, stop, *, num_nodes=1, batch=1):
    return read_order(order, start, stop, sizes_of(order.counts), Nodes(num_nodes, batch))


def dealt_to_nodes(order, start, num, batch, num_nodes):
    """Positions in the endless sequence of each node in an epoch of `num` samples, `batch` a step."""
    steps = Steps(num, batch // num_nodes, num_nodes, "drop")
    numbers = range(len(steps))
    return [
        start + np.concatenate([dealt(order, start, steps, step, rank=node) for step in numbers] or [np.empty(0, int)])
        for node in range(num_nodes)
    ]


@given(data=st.data(), counts=COUNTS, num_nodes=st.integers(1, 6), factor=st.integers(1, 5), window=st.integers(1, 40))
def test_a_node_that_has_its_lanes_to_itself_reads_what_the_cuts_say(data, counts, num_nodes, factor, window):
    """Exactly, shards and bytes, in any whole passes whose steps are rounds of all lanes."""
    lanes = num_nodes * factor
    counts = [*counts, -sum(counts) % lanes]  # whole rounds
    order = ExactOrder(counts, seed=1, lanes=lanes, window=window)
    first = data.draw(st.integers(0, 3))
    num = data.draw(st.integers(1, 3)) * order.num_samples
    start = first * order.num_samples
    reads = read(order, start, start + num, num_nodes=num_nodes, batch=lanes)
    for node, positions in enumerate(dealt_to_nodes(order, start, num, lanes, num_nodes)):
        shards, size = found(order, positions, sizes_of(counts))
        assert reads.shards[node] == shards
        assert reads.num_bytes[node] == pytest.approx(size)


@given(counts=COUNTS, lanes=st.integers(1, 12), window=st.integers(1, 40), data=st.data())
def test_no_node_reads_a_shard_beyond_those_of_its_lanes(counts, lanes, window, data):
    """In any stretch of a pass, on any number of nodes; and the bytes of all together are those that are read."""
    order = ExactOrder(counts, seed=4, lanes=lanes, window=window)
    num_nodes = data.draw(st.integers(1, 9))
    batch = num_nodes * data.draw(st.integers(1, 9))
    start = data.draw(st.integers(0, 2)) * order.num_samples
    num = data.draw(st.integers(1, order.num_samples))
    reads = read_order(order, start, start + num, np.ones(len(counts)), Nodes(num_nodes, batch))
    assert reads.num_bytes.sum() == pytest.approx(num)
    for node, positions in enumerate(dealt_to_nodes(order, start, num, batch, num_nodes)):
        shards, _ = found(order, positions, np.ones(len(counts)))
        assert shards <= reads.shards[node]


def test_nodes_that_share_lanes_of_shards_of_a_usual_size_read_from_each():
    """Then the most that a node can read from is what it does."""
    counts = [300, 250, 0, 400] * 8
    order = ExactOrder(counts, seed=0, lanes=8, window=100)
    num = order.num_samples // 24 * 24
    reads = read(order, 0, num, num_nodes=12, batch=24)
    there = [found(order, each, sizes_of(counts)) for each in dealt_to_nodes(order, 0, num, 24, 12)]
    assert reads.shards == pytest.approx([shards for shards, _ in there], rel=0.1)
    assert reads.num_bytes == pytest.approx([size for _, size in there], rel=0.05)


def test_an_epoch_of_very_many_passes_is_planned_from_the_first_ones():
    order = ExactOrder([10] * 50, seed=0, lanes=10, window=10)
    reads = read_order(order, 0, 500 * 10**6, np.ones(50), Nodes(10, 10))
    assert reads.shards == pytest.approx(np.full(10, 50), abs=0.5)
    assert reads.num_bytes.sum() == pytest.approx(500 * 10**6)


@given(counts=COUNTS, window=st.integers(1, 20), num_nodes=st.integers(1, 4), factor=st.integers(1, 3))
def test_windows_reach_into_the_shards_that_are_counted(counts, window, num_nodes, factor):
    """The most of all moments and nodes, found by looking at each."""
    lanes = num_nodes * factor
    order = ExactOrder(counts, seed=2, lanes=lanes, window=window)
    there = []
    for first in range(0, order.num_samples, lanes * order.window):
        positions = np.arange(first, min(order.num_samples, first + lanes * order.window))
        nodes = order.cuts(0)[positions % lanes] * num_nodes // lanes
        there += [found(order, positions[nodes == each], sizes_of(counts)) for each in range(num_nodes)]
    reads = read(order, 0, order.num_samples, num_nodes=num_nodes, batch=lanes)
    assert reads.open_shards == max(num for num, _ in there)
    assert reads.live_bytes == pytest.approx(max(num_bytes for _, num_bytes in there))


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_resampled_nodes_read_what_is_expected(num_nodes):
    """The mean over many seeds, within three percent."""
    counts = [40, 0, 3, 200, 90] * 6
    there = []
    for seed in range(60):
        order = ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=64)
        there.append(found(order, dealt_to_nodes(order, 0, 2000, 4, num_nodes)[0], sizes_of(counts)))
    reads = read(order, 0, 2000, num_nodes=num_nodes, batch=4)
    assert np.mean(there, axis=0) == pytest.approx([reads.shards[0], reads.num_bytes[0]], rel=0.03)


def test_resampled_windows_reach_into_what_is_expected():
    counts = [40, 0, 3, 200, 90] * 6
    orders = [ResampledOrder(counts, seed=seed, chunk=8, lanes=4, window=20) for seed in range(300)]
    there = [found(order, np.flatnonzero(np.arange(80) % 4 < 2), sizes_of(counts)) for order in orders]
    reads = read(orders[0], 0, 80, num_nodes=2, batch=4)
    assert np.mean(there, axis=0) == pytest.approx([reads.open_shards, reads.live_bytes], rel=0.03)


@given(counts=COUNTS, data=st.data(), num_nodes=st.integers(1, 5), batch=st.integers(1, 8))
def test_nodes_read_their_stretches_of_each_step_of_a_sequential_order(counts, data, num_nodes, batch):
    """Exactly: shards, those of a step, and bytes of all of them."""
    order, sample_bytes = SequentialOrder(counts), sizes_of(counts)
    steps = Steps(order.num_samples, batch, num_nodes, "pad")
    of_steps, of_nodes = [], []
    for node in range(num_nodes):
        taken = [dealt(order, 0, steps, step, rank=node) for step in range(len(steps))]
        taken = [each[each < order.num_samples] for each in taken]
        of_steps += [found(order, each, sample_bytes) for each in taken if len(each)]
        of_nodes.append(found(order, np.concatenate(taken), sample_bytes))
    nodes = Nodes(num_nodes, steps.global_batch, is_dealt=False)
    reads = read_order(order, 0, order.num_samples, sample_bytes, nodes)
    assert reads.shards.tolist() == [num for num, _ in of_nodes]
    assert reads.num_bytes.sum() == pytest.approx(sum(size for _, size in of_nodes))
    assert reads.open_shards == max(num for num, _ in of_steps)
    assert reads.live_bytes == pytest.approx(max(num_bytes for _, num_bytes in of_steps))
