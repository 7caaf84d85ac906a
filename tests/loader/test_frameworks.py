"""accelerate and torch.distributed.checkpoint with unchanged wdskit loaders, on real ranks."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from ranks import run_ranks
from shards import index_numbers, number_of
from torch import nn
from torch.distributed import checkpoint as dcp

from wdskit import Pipeline, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*assuming the intent:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Import accelerate here: not in each rank, and not in processes that only collect tests."""
    import accelerate  # noqa: F401


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards with 19 samples: 3 global batches of 6."""
    return index_numbers(tmp_path_factory.mktemp("numbers"), [4, 0, 5, 2, 8])


def exact(shards, **options):
    return Pipeline().exact(shards, seed=1, **options).map(number_of).batched(global_size=6)


def endless(loader):
    """Yield the batches of endless epochs, as a training loop reads them."""
    for epoch in itertools.count(loader.epoch):
        loader.set_epoch(epoch)
        for batch in loader:
            yield batch.tolist()


def taken(loader, num):
    return list(itertools.islice(endless(loader), num))


def joined(ranks):
    """Return the global batches of a run, joined from the batches of its ranks."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


# --- accelerate


def accelerated(shards, rank, num_ranks, *, load=None, save=None, num_steps=3, kind=exact):
    """Return the batches of an ordinary training loop with accelerate; `save` is (folder, step)."""
    from accelerate import Accelerator

    there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(number) for name, number in there.items()}, MASTER_ADDR="none", MASTER_PORT="0")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, num_ranks)
    model = nn.Linear(1, 1)
    loader = kind(shards).loader(workers=0)
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(loader)
    if load is not None:
        accelerator.load_state(load)
    found = []
    for numbers in itertools.islice(endless(loader), num_steps):
        optimizer.zero_grad()
        accelerator.backward(model(torch.tensor(numbers)[:, None].float()).sum())
        optimizer.step()
        found.append(numbers)
        if save is not None and len(found) == save[1]:
            accelerator.save_state(save[0])
    return found


@pytest.mark.parametrize(("step", "num_ranks"), [(1, 3), (3, 2), (4, 1)])
def test_accelerate_saves_the_loader_and_other_numbers_of_ranks_go_on(shards, tmp_path, step, num_ranks):
    folder = str(tmp_path / "checkpoint")
    whole = joined(run_ranks(2, lambda r: accelerated(shards, r, 2, save=(folder, step), num_steps=6), tmp_path))
    assert [len({*itertools.chain(*whole[at : at + 3])}) for at in (0, 3)] == [18, 18]
    rest = run_ranks(num_ranks, lambda r: accelerated(shards, r, num_ranks, load=folder, num_steps=6 - step), tmp_path)
    assert joined(rest) == whole[step:]


# --- torch.distributed.checkpoint


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def save_with_dcp(make, folder, num_steps, *, key="data"):
    """Train this number of steps, save, and return all steps of the epochs."""
    loader, model = make(), make_model()
    batches = endless(loader)
    found = list(itertools.islice(batches, num_steps))
    dcp.save({"model": model, key: loader}, checkpoint_id=folder)
    return found + list(itertools.islice(batches, 7 - num_steps))


def load_with_dcp(make, folder, num_steps, *, key="data"):
    loader, model = make(), nn.Linear(3, 3)
    dcp.load({"model": model, key: loader}, checkpoint_id=folder)
    assert torch.equal(model.weight, make_model().weight)
    return taken(loader, num_steps)


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_dcp_holds_the_loader_beside_the_model_and_other_numbers_of_ranks_go_on(shards, tmp_path, step):
    folder = str(tmp_path / "checkpoint")

    def make():
        return exact(shards).loader(workers=0)

    whole = joined(run_ranks(2, lambda _: save_with_dcp(make, folder, step), tmp_path))
    for num in (1, 2, 3):
        rest = run_ranks(num, lambda _: load_with_dcp(make, folder, 7 - step), tmp_path)
        assert joined(rest) == whole[step:]
    assert [sorted(batch) for batch in load_with_dcp(make, folder, 7 - step)] == whole[step:]  # without ranks


def test_dcp_refuses_another_sequence_by_name(shards, tmp_path):
    """DCP loads the names in the loader's state, so every loader's state must have all names."""
    folder = str(tmp_path / "checkpoint")
    save_with_dcp(lambda: exact(shards).with_epoch(3).loader(workers=0), folder, 2)
    for other, told in (
        (exact(shards), "with_epoch is None here and 3 in the state"),
        (exact(shards, window=5).with_epoch(3), "window is 5 here and 4096 in the state"),
    ):
        with pytest.raises(StateError, match=told):
            load_with_dcp(lambda pipe=other: pipe.loader(workers=0), folder, 1)
