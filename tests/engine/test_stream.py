"""A stream is a `webdataset.DataPipeline`: epochs in torch's DataLoader, and stages that are not wdskit's."""

from __future__ import annotations

import pytest
import webdataset
from shards import listed, number_of
from torch.utils.data import DataLoader

from wdskit import Pipeline, PipelineError


def plus_100(source):
    for sample in source:
        yield int(sample["cls"]) + 100


def test_callables_are_stages(six):
    assert list(listed(six).stage(plus_100).loader(workers=0)) == list(range(100, 139))
    with pytest.raises(PipelineError, match=r"a pipeline starts with a source of wdskit"):
        Pipeline().stage(plus_100).map(number_of).loader(workers=0)


def test_another_stage_of_webdataset_is_no_splitter(six):
    pipe = Pipeline().stream(six).stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        pipe.loader(rank=0, world_size=2, workers=0)
    by_node = Pipeline().stream(six).split_by_node().stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        by_node.loader(rank=0, world_size=2, workers=2)


@pytest.mark.parametrize(("persistent", "start_method"), [(False, "fork"), (True, "fork"), (True, "spawn")])
def test_all_workers_of_torchs_loader_are_in_one_epoch(six, persistent, start_method):
    """Also after passes in this process, after a `break`, and after `set_epoch`."""
    built = Pipeline().stream(six, seed=1).split_by_worker().map(number_of).build()
    assert sorted(built) == list(range(39))
    settings = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": start_method}
    loader = DataLoader(built, batch_size=None, **settings)
    for number, _ in enumerate(loader):
        if number == 33:
            break
    epochs = [[int(item) for item in loader] for _ in range(3)]
    assert all(sorted(epoch) == list(range(39)) for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3
    built.set_epoch(2)
    assert [int(item) for item in loader] == epochs[0]
    assert [int(item) for item in loader] == epochs[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_all_ranks_have_equal_steps_and_reach_all_samples(six, world_size, workers):
    pipe = Pipeline().stream(six, seed=3).split_by_node().split_by_worker().shuffle(7).map(number_of).batched(2)
    seen: set[int] = set()
    for rank in range(world_size):
        with pipe.with_epoch(5).loader(rank=rank, world_size=world_size, workers=workers) as loader:
            for _ in range(24):
                items = list(loader)
                assert len(items) == len(loader) == 5
                seen |= {number for item in items for number in item.tolist()}
    assert seen == {*range(39)}
