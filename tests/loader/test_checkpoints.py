"""torch.distributed.checkpoint with loaders, on real ranks. docs/train.md has the loops of other frameworks."""

from __future__ import annotations

import itertools

import pytest
import torch
from ranks import run_ranks
from shards import index_numbers, number_of
from torch import nn
from torch.distributed import checkpoint as dcp

from wdskit import Pipeline, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*assuming the intent:UserWarning")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards with 19 samples: 3 global batches of 6."""
    return index_numbers(tmp_path_factory.mktemp("numbers"), [4, 0, 5, 2, 8])


def exact(shards, **options):
    return Pipeline().exact(shards, seed=1, **options).map(number_of).batched(global_size=6)


def batches_of(loader):
    """Yield the batches of endless epochs, as a training loop reads them."""
    for epoch in itertools.count(loader.epoch):
        loader.set_epoch(epoch)
        for batch in loader:
            yield batch.tolist()


def joined(ranks):
    """Return the global batches of a run, joined from the batches of its ranks."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def save(pipe, folder, num_steps):
    """Train this number of steps, save, and return all steps of the epochs."""
    loader, model = pipe.loader(workers=0), make_model()
    batches = batches_of(loader)
    found = list(itertools.islice(batches, num_steps))
    dcp.save({"model": model, "data": loader}, checkpoint_id=folder)
    return found + list(itertools.islice(batches, 7 - num_steps))


def load(pipe, folder, num_steps):
    loader, model = pipe.loader(workers=0), nn.Linear(3, 3)
    dcp.load({"model": model, "data": loader}, checkpoint_id=folder)
    assert torch.equal(model.weight, make_model().weight)
    return list(itertools.islice(batches_of(loader), num_steps))


@pytest.mark.parametrize("step", [2, 3])
def test_dcp_holds_the_loader_beside_the_model_and_other_numbers_of_ranks_go_on(shards, tmp_path, step):
    folder, pipe = str(tmp_path / "checkpoint"), exact(shards)
    whole = joined(run_ranks(2, lambda _: save(pipe, folder, step), tmp_path))
    for num in (1, 2, 3):
        assert joined(run_ranks(num, lambda _: load(pipe, folder, 7 - step), tmp_path)) == whole[step:]
    assert [sorted(batch) for batch in load(pipe, folder, 7 - step)] == whole[step:]  # without ranks


def test_dcp_refuses_another_sequence_by_name(shards, tmp_path):
    """DCP loads the names in the loader's state, so every loader's state must have all names."""
    folder = str(tmp_path / "checkpoint")
    save(exact(shards).with_epoch(3), folder, 2)
    for other, told in (
        (exact(shards), "with_epoch is None here and 3 there"),
        (exact(shards, window=5).with_epoch(3), "window is 5 here and 4096 there"),
    ):
        with pytest.raises(StateError, match=told):
            load(other, folder, 1)
