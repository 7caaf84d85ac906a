"""`stream` and its splitters: shards are drawn by weight, each draw for one rank and worker."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from shards import number_of, write_numbers

from wdskit import ConfigError, Pipeline, PipelineError
from wdskit.stages.streaming import share


def split(pattern, **options):
    return Pipeline().stream(pattern, **options).split_by_node().split_by_worker()


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


def test_ranks_and_workers_draw_disjointly(six):
    draws = []
    for rank, worker in itertools.product(range(2), repeat=2):
        built = split(six, seed=6).to_tuple("__url__").with_epoch(30).build(rank=rank, world_size=2)
        built.run.worker, built.run.num_workers = worker, 2
        source, by_node, by_worker = built.pipeline[:3]
        draws.append([item["draw"] for item in itertools.islice(by_worker(by_node(source())), 6)])
    assert sorted(itertools.chain(*draws)) == list(range(24))
    assert draws[1] == [2, 6, 10, 14, 18, 22]


def test_a_worker_without_a_shard_has_no_items(six):
    assert sorted(split(six).map(number_of).loader(workers=7)) == list(range(39))


def test_weights_draw_parts_by_their_shares(tmp_path):
    rare = write_numbers(tmp_path / "a", [5, 5])
    often = write_numbers(tmp_path / "b", [5])
    pipe = split(f"{rare}::{often}", resampled=True, weights=[1.0, 9.0]).to_tuple("__url__").with_epoch(3000)
    urls = Counter(url for (url,) in pipe.loader(workers=0))
    assert urls[str(tmp_path / "b" / "s-000.tar")] > 2400
    with pytest.raises(ConfigError, match="the sum of `weights` is too large for a float"):
        split(f"{rare}::{often}", resampled=True, weights=[1e308, 1e308])
    with pytest.raises(ConfigError, match="1 `weights` for 2 parts"):
        split(f"{rare}::{often}", resampled=True, weights=[1.0]).loader(workers=0)


def test_a_missing_splitter_is_refused_unless_it_is_meant(six):
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        Pipeline().stream(six).split_by_worker().with_epoch(3).loader(rank=0, world_size=2, workers=0)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        Pipeline().stream(six).split_by_node().with_epoch(3).loader(workers=2)
    loader = Pipeline().stream(six, split="none").map(number_of).loader(workers=2)
    assert Counter(loader) == Counter([*range(39), *range(39)])


def test_a_stream_over_ranks_needs_with_epoch(six):
    with pytest.raises(PipelineError, match="with_epoch"):
        split(six).map(number_of).loader(rank=0, world_size=2, workers=0)


@pytest.mark.parametrize("total", [1.0, 1.0000000000000002, 3.3, 1e300])
def test_a_last_part_whose_weight_adds_nothing_is_never_drawn(tmp_path, monkeypatch, total):
    """This includes the largest word, whose product with the sum of weights may be rounded up to the sum."""

    class Largest:
        def random_raw(self, size):
            return np.full(size, 2**64 - 1, np.uint64)

    monkeypatch.setattr("wdskit.stages.streaming.philox", lambda purpose, *words: Largest())
    parts = [write_numbers(tmp_path / name, [1]) for name in "abc"]
    pipe = split("::".join(parts), resampled=True, weights=[1e-200, total, 1e-200]).to_tuple("__url__").with_epoch(5)
    assert {url for (url,) in pipe.loader(workers=0)} == {str(tmp_path / "b" / "s-000.tar")}


def test_shares_are_dealt_in_turn():
    for total, num_parts in itertools.product(range(30), range(1, 9)):
        dealt = [len(range(part, total, num_parts)) for part in range(num_parts)]
        assert [share(total, part, num_parts) for part in range(num_parts)] == dealt


def test_the_draws_of_a_seed_and_an_epoch_are_those_that_were_committed(tmp_path):
    shards = write_numbers(tmp_path / "s", [1] * 7)

    def drawn(epoch, **settings):
        built = split(shards, seed=5, **settings).to_tuple("__url__").with_epoch(14).build(rank=0, world_size=1)
        built.set_epoch(epoch)
        return [int(item["url"][-7:-4]) for item in itertools.islice(built.pipeline[0](), 14)]

    assert drawn(0) == [0, 4, 3, 5, 6, 2, 1, 3, 1, 5, 2, 0, 4, 6]
    assert drawn(3, resampled=True) == [5, 5, 5, 2, 1, 1, 2, 4, 3, 4, 1, 6, 6, 3]
