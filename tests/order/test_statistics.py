"""The randomness of orders: uniform starts, even use of each shard's start and end, even shares, no key used twice."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from shards import write_numbers

from wdskit import Pipeline
from wdskit.order import base
from wdskit.order.base import PositionRng, ShardOffsets
from wdskit.order.exact import ExactOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.shards.index import index_folder
from wdskit.stages.sources import Exact, MixturePart


def chi_square(found, expected):
    """Return the chi-square value of the cells, in standard deviations from the mean; degrees of freedom: cells - 1."""
    degrees = len(found) - 1
    return (((found - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_start_at_every_sample_alike(seed):
    """Chi-square of 120,000 starts in 200 cells: a uniform draw exceeds five deviations once in a million."""
    counts = [700, 0, 1, 299, 1000]
    order = ResampledOrder(counts, seed=seed, chunk=1, lanes=4, window=300)
    shards, samples = order.take(np.arange(120_000))
    starts = ShardOffsets(counts).starts(shards) + samples
    cells = np.bincount(starts // 10, minlength=200)
    assert abs(chi_square(cells, 600)) < 5


def test_a_skewed_start_is_seen():
    """The mutant never starts in the last hundredth of a shard."""
    starts = np.random.default_rng(0).integers(0, 1980, 120_000)
    assert chi_square(np.bincount(starts // 10, minlength=200), 600) > 5


@pytest.mark.parametrize("chunk", [1, 4, 6])
def test_tails_of_shards_come_as_often_as_heads(chunk):
    """The numbers differ by at most one percent over 400,000 chunks: three standard deviations."""
    counts = np.array([64, 40, 100])
    order = ResampledOrder(counts, seed=1, chunk=chunk, lanes=8, window=4096)
    shards, samples = order.take(np.arange(400_000 * chunk))
    halves = samples < counts[shards] // 2
    assert abs(halves.sum() / (~halves).sum() - 1) < 0.01
    first, last = (samples < 8).sum(), (samples >= counts[shards] - 8).sum()
    assert abs(first / last - 1) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_exact_places_samples_alike(seed):
    """The place of one sample in a pass is uniform over passes: chi-square over 20 parts of the pass."""
    order = ExactOrder([30, 50, 40], seed=seed, lanes=6, window=10)
    num = 1000
    shards, samples = order.take(np.arange(120 * num))
    at = np.flatnonzero((shards == 1) & (samples == 7)) % 120
    assert len(at) == num
    assert abs(chi_square(np.bincount(at // 6, minlength=20), num / 20)) < 5


@pytest.fixture
def used_keys(monkeypatch):
    """All keys of random numbers that are made while the test runs."""
    used = []
    entropy = base._entropy

    def collecting(purpose, words):
        used.append(tuple(entropy(purpose, words)))
        return list(used[-1])

    monkeypatch.setattr(base, "_entropy", collecting)
    return used


def test_no_two_seeds_epochs_lanes_and_purposes_share_a_key(used_keys, tmp_path):
    """The keys of all kinds of runs, with two seeds and two epochs: the expected number, all different."""
    counts, lanes, window = [500, 300, 200, 1000], 16, 25
    num_windows = 2 * 2000 // window  # for two passes
    shards = write_numbers(tmp_path / "s", [1] * 40)
    for seed in (3, 4):
        ExactOrder(counts, seed=seed, lanes=lanes, window=window).take(np.arange(4000))
        ResampledOrder(counts, seed=seed, lanes=lanes, window=window).take(np.arange(4000))
        for resampled, num_draws in ((False, 80), (True, 80 * 64)):
            stream = Pipeline().stream(shards, seed=seed, resampled=resampled).to_tuple("__url__")
            source = stream.with_epoch(num_draws).build(rank=0, world_size=1).pipeline[0]
            assert len([*itertools.islice(source(), num_draws)]) == num_draws
        for stage in ("0:map", "1:map", "0:random_flip"):
            PositionRng(seed, stage)
    exact = 1 + 2 * 2 + num_windows  # homes, then the shards and an offset for each pass
    resampled = 2 * num_windows
    stream = 2 + 80 * 64 // 40  # two passes; draws with replacement take a word for each of the 40 shards at once
    assert len(used_keys) == 2 * (exact + resampled + stream + 3)
    assert len(set(used_keys)) == len(used_keys)
    words = {tuple(np.random.Philox(np.random.SeedSequence(key)).random_raw(2).tolist()) for key in used_keys}
    assert len(words) == len(used_keys)


def test_added_keys_would_meet(used_keys, monkeypatch):
    """The same collection finds a mutant that adds seed and epoch, as other code does."""
    entropy = base._entropy
    monkeypatch.setattr(base, "_entropy", lambda purpose, words: entropy(purpose, (sum(words),)))
    for seed in (3, 4):
        ExactOrder([50, 30], seed=seed, lanes=2, window=20).take(np.arange(160))
    assert len(set(used_keys)) < len(used_keys)


def test_parts_of_a_mixture_over_the_same_shards_differ(tmp_path):
    """Otherwise a batch would have the same sample several times."""
    write_numbers(tmp_path, [40, 25])
    index_folder(tmp_path, workers=1)
    parts = tuple(MixturePart(shards=str(tmp_path)) for _ in range(4))
    orders = [order for seed in range(25) for order in Exact(mixture=parts, seed=seed).plan().order.parts]
    assert len({tuple(np.concatenate(order.take(np.arange(65))).tolist()) for order in orders}) == 100


def test_threads_that_share_an_order_get_what_one_gets():
    """Several threads make windows, and remove them from memory, at once."""
    counts = [200, 50, 300]
    for make in (ExactOrder, ResampledOrder):
        alone, shared = (make(counts, seed=2, lanes=3, window=4) for _ in range(2))
        batches = [np.arange(first, first + 40) for first in range(0, 6000, 40)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(shared.take, batches))
        for batch, got in zip(batches, found, strict=True):
            assert np.array_equal(got, alone.take(batch))
