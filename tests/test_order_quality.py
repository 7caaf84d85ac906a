"""How far batches are from a uniform draw: the measures are right, and see what is not uniform."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder
from wdskit.order.quality import SortedData, expected_classes, mixing, seen_again
from wdskit.order.sequential import SequentialOrder
from wdskit.order.steps import Steps

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@given(size=st.integers(1, 12), num_classes=st.integers(1, 12), batch=st.integers(1, 150))
def test_expected_classes_are_those_of_the_hypergeometric_law(size, num_classes, batch):
    total = size * num_classes
    none = math.comb(total - size, batch) / math.comb(total, batch) if batch <= total else 0
    assert expected_classes(num_classes, total, batch) == pytest.approx(num_classes * (1 - none))


def test_expected_classes_stay_exact_for_a_billion_samples():
    with_replacement = 1000 * (1 - (1 - 1 / 1000) ** 256)
    assert expected_classes(1000, 10**9, 256) == pytest.approx(with_replacement, rel=1e-5)


@given(counts=COUNTS, num_classes=st.integers(1, 9))
def test_sorted_data_have_classes_of_equal_size_from_the_first_sample_to_the_last(counts, num_classes):
    total = sum(counts)
    num_classes = min(num_classes, total)
    data = SortedData([counts], num_classes)
    taken = SequentialOrder(counts).take(np.arange(total))
    classes = data.classes(*taken)
    assert (np.diff(classes) >= 0).all()
    sizes = np.bincount(classes, minlength=num_classes)
    assert sizes.max() - sizes.min() <= 1
    assert data.depths(*taken) == pytest.approx(np.arange(total) / total)


def test_each_part_of_a_mixture_has_all_classes():
    data = SortedData([[4, 4], [2]], 2)
    assert data.classes(np.array([0, 1, 2, 2]), np.array([3, 0, 0, 1])).tolist() == [0, 1, 0, 1]


def test_mixing_counts_the_classes_of_each_ranks_batch():
    counts = [5, 0, 30, 16]
    order, steps = ExactOrder(counts, seed=3, lanes=3, window=4), Steps(51, 4, 3, "drop")
    data = SortedData([counts], 10)
    found = mixing(order, data, steps, 51 * 7)
    assert found.steps.tolist() == [0, 1, 2, 3]
    for step in range(4):
        of_ranks = [set(data.classes(*order.take(51 * 7 + steps.positions(rank, step))).tolist()) for rank in range(3)]
        assert found.of_ranks[step].tolist() == [len(classes) for classes in of_ranks]
        assert found.of_all[step] == len(set.union(*of_ranks))


def test_mixing_looks_at_few_of_many_steps_and_at_first_and_last():
    found = mixing(SequentialOrder([10**6]), SortedData([[10**6]], 10), Steps(10**6, 64, 8, "pad"), 0)
    assert (found.steps[0], found.steps[-1]) == (0, 10**6 // 512 - 1)
    assert len(found.steps) <= 24
    assert mixing(SequentialOrder([5]), SortedData([[5]], 5), Steps(5, 4, 2, "pad"), 0) is None


def test_a_uniform_permutation_is_as_good_as_uniform_and_a_small_window_is_not():
    """One lane and one window of everything is a uniform permutation; the measure tells it from a poor shuffle."""
    counts, steps = [100] * 50, Steps(5000, 40, 5, "drop")
    data = SortedData([counts], 100)
    ideal = expected_classes(100, 5000, 40)

    def mean(lanes, window):
        found = [mixing(ExactOrder(counts, seed=s, lanes=lanes, window=window), data, steps, 0) for s in range(5)]
        return np.mean([each.of_ranks.mean() for each in found])

    assert mean(1, 5000) == pytest.approx(ideal, rel=0.01)
    assert mean(1, 200) < 0.5 * ideal
    assert mean(1, 250) < 0.5 * mean(4, 250)


def brute(order, world_size, *, is_cut):
    """Per rank, the share of its samples of pass 0 that it sees again in pass 1."""
    n = order.num_samples
    places = np.arange(n)
    ranks = []
    for number in (0, 1):
        shards, samples = order.take(places + number * n)
        rank = (places + (number * n if is_cut else 0)) % world_size
        ranks.append(dict(zip(zip(shards.tolist(), samples.tolist(), strict=True), rank.tolist(), strict=True)))
    again = [
        [ranks[1][sample] == rank for sample, rank in ranks[0].items() if rank == mine] for mine in range(world_size)
    ]
    return [np.mean(each) for each in again], np.mean([ranks[1][sample] == rank for sample, rank in ranks[0].items()])


@given(counts=COUNTS, lanes=st.integers(1, 24), window=st.integers(1, 40), seed=st.integers(0, 5), is_cut=st.booleans())
def test_what_ranks_see_again_follows_from_the_cuts(counts, lanes, window, seed, is_cut):
    """Exactly, where each rank has its lanes to itself."""
    order = ExactOrder(counts, seed=seed, lanes=lanes, window=window)
    for world_size in range(1, lanes + 1):
        if lanes % world_size == 0 and order.num_samples >= world_size:
            told = seen_again(order, 0, world_size, is_cut=is_cut)
            of_ranks, mean = brute(order, world_size, is_cut=is_cut)
            assert told == pytest.approx((min(of_ranks), mean, max(of_ranks)))


def test_what_ranks_that_share_lanes_see_again_is_expected():
    counts = [30, 70, 5, 95, 40]
    orders = [ExactOrder(counts, seed=seed, lanes=4, window=20) for seed in range(200)]
    told = np.mean([seen_again(order, 0, 6, is_cut=False).mean for order in orders])
    assert told == pytest.approx(np.mean([brute(order, 6, is_cut=False)[1] for order in orders]), rel=0.02)
    assert told == pytest.approx(1 / 6, rel=0.05)


def test_an_order_that_never_changes_is_seen():
    """A mutant that orders each pass as the first."""
    order = ExactOrder([10] * 30, seed=0, lanes=6, window=10)
    order.pieces = lambda number, pieces=order.pieces: pieces(0)
    assert seen_again(order, 0, 6, is_cut=False) == (1, 1, 1)
