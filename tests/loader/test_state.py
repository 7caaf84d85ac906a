"""A state is accepted for the data that it was saved with, on any number of ranks, with the epochs of a framework."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from masks import mask_of
from shards import write_shard

from wdskit import Pipeline
from wdskit.errors import StateError
from wdskit.loader.state import EpochCounter
from wdskit.shards.index import index_folder
from wdskit.shards.split import split
from wdskit.stages.epoch import EpochLayout


def write(folder: Path, numbers: list[int], *, is_indexed: bool = True) -> str:
    folder.mkdir(exist_ok=True)
    for shard in range(3):
        part = numbers[shard * 8 : shard * 8 + 8]
        write_shard(folder / f"s-{shard}.tar", {f"k{number:03d}": {"cls": b"%03d" % number} for number in part})
    if is_indexed:
        index_folder(folder, workers=1)
    return str(folder)


FORWARD = list(range(24))
BACKWARD = FORWARD[::-1]

PIPES: dict[str, Any] = {
    "exact": lambda folder: Pipeline().exact(folder),
    "resampled": lambda folder: Pipeline().resampled(folder),
    "sequential": lambda folder: Pipeline().sequential(folder),
    "range": lambda folder: Pipeline().exact(folder, range=["0%", "50%"]),
    "split": lambda folder: Pipeline().exact(folder, split="train"),
    "mixture": lambda folder: Pipeline().exact(
        mixture=[{"shards": folder, "repeat": 1}, {"shards": f"{folder}/s-1.tar", "repeat": 1}]
    ),
    "weights": lambda folder: (
        Pipeline()
        .exact(mixture=[{"shards": folder, "weight": 3}, {"shards": f"{folder}/s-1.tar", "weight": 1}])
        .with_epoch(20)
    ),
}


def loader_of(name: str, folder: str) -> Any:
    if name == "split":
        split(folder, {"train": 0.8, "val": 0.2}, overwrite=True)
    pipe = PIPES[name](folder)
    return pipe.to_tuple("__key__", *mask_of(pipe)).loader(workers=0)


def stopped(loader: Any) -> dict[str, Any]:
    for step, _ in enumerate(loader):
        if step == 4:
            break
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("name", PIPES)
def test_a_state_of_other_samples_under_the_same_names_is_refused(tmp_path, name, caplog):
    state = stopped(loader_of(name, write(tmp_path / "a", FORWARD)))
    other = loader_of(name, write(tmp_path / "b", BACKWARD))
    with pytest.raises(StateError, match=r"a different sequence of samples: (shards .* have other bytes|parts is)"):
        other.load_state_dict(state)
    with caplog.at_level(logging.WARNING, logger="wdskit"):
        other.load_state_dict(state, strict=False)
    assert "state belongs to a different sequence of samples" in caplog.text
    next(iter(other))


@pytest.mark.parametrize("name", PIPES)
def test_a_state_is_taken_for_the_same_shards_elsewhere(tmp_path, name):
    loader = loader_of(name, write(tmp_path / "a", FORWARD))
    state = stopped(loader)
    other = loader_of(name, write(tmp_path / "b", FORWARD))
    other.load_state_dict(state)
    loader.load_state_dict(state)
    assert list(other) == list(loader)


@pytest.mark.parametrize("is_bucketed", [False, True])
def test_an_old_state_of_grown_data_leaves_the_later_epochs_whole(tmp_path, is_bucketed):
    """With `strict=False`, the epoch goes on after the consumed samples; later epochs are those of the data."""

    def loader(num_shards: int) -> Any:
        for shard in range(num_shards):
            numbers = range(shard * 25, shard * 25 + 25)
            samples = {f"k{n:03d}": {"cls": b"%d" % n, "json": b'{"size": %d}' % (1 + n % 3)} for n in numbers}
            write_shard(tmp_path / f"s-{shard}.tar", samples)
        index_folder(str(tmp_path), columns="json.size", workers=1)
        pipe = (
            Pipeline()
            .exact(str(tmp_path), seed=1, tail="pad")
            .decode(only=["cls", "json"])
            .to_tuple("cls", "json", "__valid__")
        )
        if is_bucketed:
            return pipe.bucketed(by="json.size", edges=[1, 2, 3], global_size=4).loader(workers=0)
        return pipe.batched(4).loader(workers=0)

    old = loader(2)
    list(old)
    for step, _ in enumerate(old):
        if step == 2:
            break
    state = old.state_dict()
    grown = loader(4)
    with pytest.raises(StateError, match="strict=False"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, strict=False)
    assert (grown.epoch, grown.state_dict()["consumed"]) == (1, state["consumed"])
    for epoch in range(1, 5):
        assert grown.epoch == epoch
        found = []
        for labels, documents, valid in grown:
            assert not is_bucketed or len({document["size"] for document in documents}) == 1
            found += labels[valid].tolist()
        assert len(found) == len(set(found)) == (100 if epoch > 1 else 100 - state["consumed"])


def passes(*, epoch_samples=20, batch=2, world_size=2, tail="drop", **fingerprint):
    return EpochCounter(EpochLayout(tail, batch, epoch_samples, fingerprint or {"seed": 1}), world_size=world_size)


def consume(counter, num_steps=None):
    """Return the places of the endless sequence that all ranks read in a pass, step by step."""
    running = counter.begin()
    for step in itertools.islice(range(len(running.steps)), num_steps):
        counter.received(running, step)
        first, stop = running.steps.first(step), min(running.steps.first(step + 1), running.steps.num_samples)
        yield set(range(running.start + first, running.start + stop))


def test_with_epoch_goes_on_where_another_world_size_ended():
    """with_epoch counts per rank, so its epochs change length with the ranks; no place is skipped or comes twice."""
    before = passes(epoch_samples=40, batch=2, world_size=4)  # n = 5 batches
    seen = set().union(*consume(before), *consume(before, 2))
    after = passes(epoch_samples=20, batch=2, world_size=2)
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.remaining, len(after)) == (1, 6, 10)  # this epoch has the length of the former ranks
    rest = [*consume(after), *consume(after)]
    assert sorted(seen | set().union(*rest)) == list(range(40 + 40 + 20))
    assert not seen & set().union(*rest)
    assert (after.epoch, len(after)) == (3, 5)


def resumed_behind(num_steps):
    """Return a counter that has loaded a state after this number of steps of epochs of 5."""
    before = passes()
    for first in range(0, num_steps + 1, 5):
        list(consume(before, min(5, num_steps - first)))
    after = passes()
    after.load_state_dict(before.state_dict())
    return after


def test_an_epoch_that_is_counted_elsewhere_may_be_one_behind_or_one_ahead(caplog):
    """Lightning counts an epoch after its validation, or before its end; other frameworks count like the state."""
    behind = resumed_behind(5)
    behind.set_epoch(0, is_counted_elsewhere=True)
    assert behind.state_dict() == resumed_behind(5).state_dict()
    behind.set_epoch(1, is_counted_elsewhere=True)
    assert next(consume(behind)) == {20, 21, 22, 23}
    same = resumed_behind(7)
    same.set_epoch(1, is_counted_elsewhere=True)
    assert next(consume(same)) == {28, 29, 30, 31}
    assert not caplog.records
    ahead = resumed_behind(3)
    ahead.set_epoch(1, is_counted_elsewhere=True)
    assert "the rest of epoch 0 is not read: the framework continues with the next epoch" in caplog.text
    assert next(consume(ahead)) == {20, 21, 22, 23}


@pytest.mark.parametrize(("num_steps", "epoch"), [(7, 0), (7, 3), (10, 0), (10, 3), (0, 1)])
def test_no_other_epoch_that_is_counted_elsewhere_is_taken(num_steps, epoch):
    counter = resumed_behind(num_steps)
    before = counter.state_dict()
    with pytest.raises(StateError, match=rf"set_epoch\({epoch}\): a state in epoch {num_steps // 5} was loaded"):
        counter.set_epoch(epoch, is_counted_elsewhere=True)
    assert counter.state_dict() == before
    counter.set_epoch(num_steps // 5)


@pytest.mark.parametrize("consumed", [4, 12])
def test_the_epoch_after_one_that_a_framework_ends_early_starts_where_that_one_would_have_ended(consumed):
    """The loaded epoch has its own number of samples, as with `with_epoch` on other ranks."""
    saved = passes(epoch_samples=16)
    list(consume(saved, consumed // 4))
    resumed = passes(epoch_samples=32, world_size=4)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_epoch(saved.epoch + 1, is_counted_elsewhere=True)
    assert resumed.begin().start == (saved.epoch + 1) * 16
