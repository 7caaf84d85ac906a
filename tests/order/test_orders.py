"""Orders: the sample at each position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def pairs(taken):
    return list(zip(*(column.tolist() for column in taken), strict=True))


def all_samples(counts):
    return [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]


@given(counts=COUNTS, lanes=st.integers(1, 40), window=st.integers(1, 40), number=st.integers(0, 3))
def test_an_exact_pass_holds_each_sample_once(counts, lanes, window, number):
    order = ExactOrder(counts, seed=1, lanes=lanes, window=window)
    positions = np.arange(order.num_samples) + number * order.num_samples
    assert sorted(pairs(order.take(positions))) == all_samples(counts)


@given(counts=COUNTS, start=st.integers(0, 100))
def test_sequential_is_the_order_of_the_index(counts, start):
    order = SequentialOrder(counts)
    every = all_samples(counts)
    assert pairs(order.take(np.arange(start, start + 50))) == [every[p % len(every)] for p in range(start, start + 50)]


@pytest.mark.parametrize("make", [ExactOrder, ResampledOrder])
@given(data=st.data(), counts=COUNTS)
@settings(max_examples=40)
def test_a_sample_depends_on_its_position_only(make, data, counts):
    """This holds for one position, for any positions in any order, and for a new or a used object."""
    order = make(counts, seed=5, lanes=7, window=4)
    positions = np.array(data.draw(st.lists(st.integers(0, 5 * order.num_samples), min_size=1, max_size=30)))
    together = pairs(order.take(positions))
    assert together == [pairs(make(counts, seed=5, lanes=7, window=4).take([p]))[0] for p in positions]
    assert together == pairs(order.take(positions[::-1]))[::-1]


def test_far_positions_are_as_cheap_as_near_ones():
    """No state grows with the position: pass 10**9 of 10**6 samples is as good as the first."""
    order = ExactOrder([1000] * 1000, seed=0)
    last = 10**6 * 10**9 + 10**6
    assert len(set(pairs(order.take(np.arange(last - 5000, last))))) == 5000


def test_lanes_differ_by_at_most_one_sample():
    """With shards of one sample and a window of 1 (no shuffle), a lane is a run of the pass with its exact length."""
    for num_samples in range(1, 60):
        for lanes in range(1, 12):
            order = ExactOrder([1] * num_samples, seed=0, lanes=lanes, window=1)
            whole = [shard for shard, _ in pairs(order.take(np.arange(num_samples)))]
            runs = [whole[lane::lanes] for lane in range(lanes)]
            sizes = [len(run) for run in runs]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_windows_are_of_one_size():
    """There are as few windows as `window` allows, of equal size: the end of a pass is shuffled as well as the rest."""
    for longest in range(1, 60):
        for window in range(1, 60):
            order = ExactOrder([longest * 3], seed=0, lanes=3, window=window)
            num_windows = -(-longest // window)
            assert order.window <= window
            assert -(-longest // order.window) == num_windows
            assert order.window * num_windows - longest < num_windows


def test_resampled_chunks_are_neighbours():
    """In the order of a lane without shuffle, samples follow each other inside a shard."""
    order = ResampledOrder([1000], seed=3, chunk=10, lanes=1, window=10)
    for chunk in range(20):
        _, samples = order.take(np.arange(10 * chunk, 10 * chunk + 10))
        first = min(samples) if max(samples) - min(samples) == 9 else min(s for s in samples if s > 500)
        assert sorted(samples) == sorted((first + step) % 1000 for step in range(10))


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1, 2, 3.5], [1, 0, 5], [1e-3, 1, 1 / 3]])
def test_a_mixture_keeps_its_shares_within_two_samples_in_any_window(weights):
    parts = [ExactOrder([5, 7], seed=0), SequentialOrder([3]), ResampledOrder([9, 4], seed=1)]
    mixture = MixtureOrder(parts, [2, 1, 2], weights)
    found, indices = mixture.interleaver.take(np.arange(5000))
    for part, weight in enumerate(weights):
        share = weight / sum(weights)
        off = np.concatenate([[0], np.cumsum(found == part)]) - np.arange(5001) * share
        assert off.max() - off.min() < 2 + 5000 / (1 << 16)  # the last term is the rounding in a block of 2**16
        assert indices[found == part].tolist() == list(range((found == part).sum()))


def test_a_schedule_counts_samples():
    """Shares follow the schedule, and every sample of a part comes once, from any first position on."""
    weights = [{0: 1.0, 100_000: 0.2}, {0: 0.5}]
    shares = MixtureOrder([SequentialOrder([10])] * 2, [1, 1], weights).interleaver
    positions = np.arange(200_000)
    parts, indices = shares.take(positions)
    for part in (0, 1):
        assert indices[parts == part].tolist() == list(range((parts == part).sum()))
    late = np.random.default_rng(0).choice(positions, 500)
    assert np.array_equal(shares.take(late)[0], parts[late])
    begin, end, behind = (parts[at : at + 1000].mean() for at in (0, 99_000, 150_000))
    assert abs(begin - 0.5 / 1.5) < 0.005
    assert abs(behind - 0.5 / 0.7) < 0.005
    assert abs(end - 0.5 / 1.5) < 0.005


@pytest.mark.parametrize(
    "weights", [[0, 0], [-1, 2], [float("nan"), 1], [{5: 1.0}, 1], [{0: 1.0, 10: 0.0}, 0], [float("inf"), 1], []]
)
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match=r"weight"):
        MixtureOrder([SequentialOrder([1])] * len(weights), [1] * len(weights), weights)
