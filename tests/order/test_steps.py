"""The steps of an epoch, and the positions of each rank: each position once, for any ranks and nodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps, rank_positions

UNEVEN = [[n] for n in (1, 2, 3, 7)] + [[0, 5], [3, 0, 4], [1, 2, 3, 4], [9, 1, 0, 0, 6], [2] * 12, list(range(12))]
NODES = [(ranks, size) for ranks in range(1, 13) for size in range(1, ranks + 1) if ranks % size == 0]


def all_ranks(order, start, steps, step, size):
    """Return the positions of all ranks at a step, (R, B)."""
    ranks = range(steps.world_size)
    return np.stack([rank_positions(order, start, steps, step, rank=rank, ranks_per_node=size) for rank in ranks])


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_every_position_of_a_step_is_dealt_once(counts):
    """With pad each sample comes once, with drop all but the tail; from any step of the epoch on, on any nodes."""
    order = ExactOrder(counts, seed=4, lanes=5, window=3, homes=2)
    num = order.num_samples
    for (world_size, size), batch, tail in itertools.product(NODES, range(1, 5), ("drop", "pad")):
        for consumed in {0, 1, num // 2}:
            steps = Steps(num, batch, world_size, tail, consumed)
            for step in range(len(steps)):
                taken = all_ranks(order, 2 * num, steps, step, size)
                first = steps.first(step)
                assert taken.shape == (world_size, batch)
                assert (np.diff(taken) >= 0).all()
                whole = np.minimum(np.arange(first, first + world_size * batch), num)
                assert np.sort(taken.ravel()).tolist() == whole.tolist()


def test_padded_rows_stand_behind_each_ranks_samples_and_are_shared_evenly():
    order = SequentialOrder([50])
    for world_size, batch, consumed in itertools.product(range(1, 9), range(1, 6), range(0, 50, 7)):
        steps = Steps(50, batch, world_size, "pad", consumed)
        for step in range(len(steps)):
            taken = all_ranks(order, 0, steps, step, 1)
            valid = taken < 50
            assert taken[valid].tolist() == list(range(steps.first(step), min(50, steps.first(step + 1))))
            assert np.ptp(valid.sum(axis=1)) <= 1
            assert (np.diff(valid.astype(int)) <= 0).all()


@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    weights=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    nodes=st.sampled_from(NODES),
    batch=st.integers(1, 9),
    kind=st.sampled_from([ExactOrder, ResampledOrder]),
)
def test_mixtures_and_draws_are_dealt_once_too(counts, weights, nodes, batch, kind):
    parts = [kind(counts, seed=seed, lanes=7, window=5) for seed in (1, 2)]
    order = MixtureOrder(parts, [len(counts)] * 2, weights)
    steps = Steps(10 * batch * nodes[0], batch, nodes[0], "drop", 3)
    for step in range(min(4, len(steps))):
        first = steps.first(step)
        taken = all_ranks(order, 100, steps, step, nodes[1])
        assert np.sort(taken.ravel()).tolist() == list(range(first, first + batch * nodes[0]))


def shares(weights, world_size, size, batch, num_steps=60):
    """Return, for each rank, the share of each part in its samples, over whole epochs."""
    parts = [ExactOrder([1000] * 20, seed=seed) for seed in range(len(weights))]
    order = MixtureOrder(parts, [20] * len(weights), weights)
    steps = Steps(num_steps * batch * world_size, batch, world_size, "drop")
    taken = np.concatenate([all_ranks(order, 0, steps, step, size) for step in range(num_steps)], axis=1)
    return np.stack([np.bincount(order.locate(each)[0], minlength=len(weights)) / len(each) for each in taken])


@pytest.mark.parametrize(("world_size", "size"), [(2, 1), (2, 2), (8, 4), (8, 8), (12, 3)])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (7, 1), (1, 1, 1, 1), (50, 30, 20)], ids=str)
@pytest.mark.parametrize("batch", [4, 8, 32])
def test_each_rank_has_its_share_of_every_part(weights, world_size, size, batch):
    """The parts do not alternate in the same rhythm as the ranks."""
    found = shares(weights, world_size, size, batch, num_steps=-(-960 // batch))
    ideal = np.array(weights) / sum(weights)
    assert np.abs(found - ideal).max() < (0.1 if batch == 4 else 0.06)


def find_nodes(order, start, steps, step, size):
    """Return the node that takes each position of a step with `tail: drop`. `size` is the number of ranks per node."""
    depths = order.locate(np.arange(steps.global_batch) + steps.first(step) + start)[1]
    nodes = np.empty(steps.global_batch, dtype=np.int64)
    nodes[np.argsort(depths, kind="stable")] = np.arange(steps.global_batch) // (steps.batch * size)
    return nodes


def downloads(order, world_size, size, batch, epochs, part=80):
    """Return, for each epoch, the bytes that all nodes download divided by the bytes of the data. A node keeps what it
    had in the previous epoch, and downloads `part` neighbouring samples at once. Each shard has 1,000 samples.
    """
    num = order.num_samples
    counts = np.full(num // 1000, 1000)
    steps = Steps(num, batch, world_size, "drop")
    firsts = np.concatenate([[0], np.cumsum(-(-counts // part))])
    kept, found = np.zeros((world_size // size, firsts[-1]), bool), []
    for epoch in range(epochs):
        wanted = np.zeros_like(kept)
        for step in range(len(steps)):
            positions = steps.first(step) + np.arange(steps.global_batch) + epoch * num
            shards, samples = order.take(positions)
            nodes = find_nodes(order, epoch * num, steps, step, size)
            wanted[nodes, firsts[shards] + samples // part] = True
        found.append((wanted & ~kept).sum() / firsts[-1])
        kept = wanted
    return found


@pytest.mark.parametrize("size", [1, 3, 12])
def test_what_a_node_takes_is_what_its_ranks_take(size):
    order = ExactOrder([100] * 10, seed=3)
    steps = Steps(1000, 8, 12, "drop")
    for step in range(len(steps)):
        nodes = find_nodes(order, 0, steps, step, size)
        taken = all_ranks(order, 0, steps, step, size)
        for node in range(12 // size):
            own = taken[size * node : size * (node + 1)].ravel()
            assert sorted(own[own < 1000]) == (steps.first(step) + np.flatnonzero(nodes == node)).tolist()


@pytest.mark.parametrize(
    ("num_shards", "world_size", "batch", "lanes", "homes", "most"),
    [
        (1281, 8, 64, 240, 16, (1.1, 0.15)),
        (1281, 64, 64, 240, 16, (1.1, 0.15)),
        (1281, 1024, 16, 256, 512, (1.1, 0.15)),
    ],
)
def test_nodes_together_download_the_data_about_once(num_shards, world_size, batch, lanes, homes, most):
    """Shards of 1,000 photos in parts of 8 MB, nodes of 2 and 8 ranks."""
    order = ExactOrder([1000] * num_shards, seed=7, lanes=lanes, homes=homes)
    first, second = downloads(order, world_size, min(8, world_size // 4), batch, 2)
    assert 1 <= first < most[0]
    assert second < most[1]


def test_steps_hold_every_position_and_count_what_is_dropped_or_padded():
    for num, world_size, batch, tail in itertools.product(range(40), range(1, 9), range(1, 7), ("drop", "pad")):
        steps, size = Steps(num, batch, world_size, tail), batch * world_size
        assert [steps.first(step) for step in range(len(steps))] == list(range(0, len(steps) * size, size))
        kept = num if tail == "pad" else num - num % size
        assert len(steps) * size == kept + steps.num_padded
        assert steps.num_padded == (-num % size if tail == "pad" else 0)
        assert steps.num_dropped == num - kept


def test_a_resume_goes_on_behind_what_was_consumed():
    for world_size, batch, after in itertools.product(range(1, 7), range(1, 5), range(1, 7)):
        whole = Steps(50, batch, world_size, "pad")
        for step in range(len(whole)):
            rest = Steps(50, batch, after, "pad", whole.consumed_after(step))
            assert rest.first(0) == min(50, whole.first(step + 1))
            assert rest.consumed_after(len(rest) - 1) == 50
