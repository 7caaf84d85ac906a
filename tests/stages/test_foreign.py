"""Foreign stages: webdataset's own, callables from iterator to iterator, and torch's data sets."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import webdataset
from shards import listed, number_of, write_numbers

from wdskit import Pipeline, PipelineError
from wdskit.dataset.patterns import list_shards


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


def plus_100(source):
    for sample in source:
        yield int(sample["cls"]) + 100


class Rerun(torch.utils.data.IterableDataset):
    """A source that is a data set of torch."""

    def __iter__(self):
        return iter([{"__key__": str(number), "cls": number} for number in range(5)])


def test_callables_and_datasets_are_stages(six):
    assert list(listed(six).stage(plus_100).loader(workers=0)) == list(range(100, 139))
    assert list(Pipeline().stage(Rerun()).map_dict(cls=str).to_tuple("cls").loader(workers=0)) == [
        (str(number),) for number in range(5)
    ]


def test_webdatasets_splitters_are_read_as_ours(six, monkeypatch):
    """Left alone, they would count from a resumed position and read the environment's rank, both wrong in workers."""
    theirs = Pipeline().stream(six, seed=2).stage(webdataset.split_by_node).stage(webdataset.split_by_worker)
    ours = Pipeline().stream(six, seed=2).split_by_node().split_by_worker()
    for rank in range(2):
        loaders = [
            pipe.map(number_of).with_epoch(9).loader(rank=rank, world_size=2, workers=2, persistent_workers=False)
            for pipe in (theirs, ours)
        ]
        first, second = ([list(loader) for _ in range(3)] for loader in loaders)
        assert first == second


def test_a_partial_of_webdatasets_splitter_is_one_too(six):
    """It takes shards, so they are not opened before it; its argument `group` is kept."""
    splitter = functools.partial(webdataset.split_by_node, group=None)
    built = Pipeline().stream(six).stage(splitter).split_by_worker().map(number_of).build()
    assert built.pipeline[1] is splitter
    assert sorted(built) == list(range(39))


def test_another_stage_of_webdataset_is_no_splitter(six):
    pipe = Pipeline().stream(six).stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        pipe.loader(rank=0, world_size=2, workers=0)
    by_node = Pipeline().stream(six).split_by_node().stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        by_node.loader(rank=0, world_size=2, workers=2)


def test_webdatasets_own_batches_shuffle_and_decode_run_inside(six):
    pipe = listed(six).stage(webdataset.shuffle(10)).stage(webdataset.decode()).to_tuple("cls")
    items = list(pipe.stage(webdataset.batched(4)).build())
    assert sorted(int(number) for (column,) in items for number in column) == list(range(39))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
def test_build_is_a_data_pipeline_that_takes_webdatasets_stages(six):
    built = (
        Pipeline()
        .stream(six, seed=1)
        .map(number_of)
        .stage(webdataset.filters.map(lambda number: number + 1000))
        .build()
    )
    assert isinstance(built, webdataset.DataPipeline)
    assert sorted(built) == list(range(1000, 1039))
    source = webdataset.SimpleShardList([*list_shards(six).urls])
    mixed = Pipeline().stage(source).stage(webdataset.tarfile_to_samples())
    assert [int(sample["cls"]) for sample in mixed.build()] == list(range(39))
    del mixed
    gc.collect()
