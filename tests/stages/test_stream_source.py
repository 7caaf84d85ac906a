"""`stream` and its splitters: shards are drawn by weight, each draw for one rank and worker."""

from __future__ import annotations

import itertools

import pytest
from shards import number_of, write_numbers

from wdskit import Pipeline, PipelineError


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
        draws.append([sample["__url__"] for sample, _ in itertools.islice(built.pipeline[0](), 30)])
    shards = list(itertools.islice(built.source.draws(), 24))
    for number, own in enumerate(draws):  # the samples of a shard follow each other
        rank, worker = divmod(number, 2)
        assert [url for url, _ in itertools.groupby(own)][:3] == shards[rank + 2 * worker :: 4][:3]


def test_a_worker_without_a_shard_has_no_items(six):
    assert sorted(split(six).map(number_of).loader(workers=7)) == list(range(39))


def test_a_missing_splitter_is_refused(six):
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        Pipeline().stream(six).split_by_worker().with_epoch(3).loader(rank=0, world_size=2, workers=0)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        Pipeline().stream(six).split_by_node().with_epoch(3).loader(workers=2)


def test_a_stream_over_ranks_needs_with_epoch(six):
    with pytest.raises(PipelineError, match="with_epoch"):
        split(six).map(number_of).loader(rank=0, world_size=2, workers=0)


def test_the_draws_of_a_seed_and_an_epoch_are_those_that_were_committed(tmp_path):
    shards = write_numbers(tmp_path / "s", [1] * 7)

    def drawn(epoch, **settings):
        built = split(shards, seed=5, **settings).to_tuple("__url__").with_epoch(14).build(rank=0, world_size=1)
        built.run.epoch = epoch
        return [int(url[-7:-4]) for url in itertools.islice(built.source.draws(), 14)]

    assert drawn(0) == [0, 4, 3, 5, 6, 2, 1, 3, 1, 5, 2, 0, 4, 6]
    assert drawn(3, resampled=True) == [4, 2, 2, 4, 5, 4, 1, 6, 3, 2, 3, 1, 3, 4]
