"""A state is accepted for the data that it was saved with, on any number of ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from masks import mask_of
from shards import number_of, write_shard

from wdskit import Pipeline
from wdskit.errors import StateError
from wdskit.shards.index import index_folder
from wdskit.shards.split import split


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
    "split": lambda folder: Pipeline().exact(folder, split="train"),
    "mixture": lambda folder: Pipeline().exact(
        mixture=[{"shards": folder, "repeat": 1}, {"shards": f"{folder}/s-1.tar", "repeat": 1}]
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
    with pytest.raises(StateError, match=r"a different sequence of samples: (shards .* have other bytes|parts: other)"):
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


def test_epoch_after_one_that_a_framework_ends_early_starts_where_that_one_would_have_ended(tmp_path):
    """The loaded epoch has its own number of samples: `with_epoch` counts those of a rank."""
    pipe = Pipeline().exact(write(tmp_path / "a", FORWARD), seed=1).map(number_of)
    saved = pipe.with_epoch(4).loader(workers=0, rank=0, world_size=2)
    next(iter(saved))
    found = []
    for rank in range(4):
        resumed = pipe.with_epoch(4).loader(workers=0, rank=rank, world_size=4)
        resumed.load_state_dict(saved.state_dict())
        assert (resumed.remaining, len(resumed)) == (1, 2)  # steps of the loaded epoch of 8 samples
        resumed.sampler.set_epoch(1)
        found += resumed
    assert sorted(found) == sorted([*pipe.with_epoch(24).loader(workers=0)][8:24])
