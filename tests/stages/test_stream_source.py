"""`stream` and its splitters: shards are drawn by weight, each draw for one rank and worker."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from shards import number_of, write_numbers

from wdskit import ConfigError, Pipeline, PipelineError


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
