"""The number of the next epoch, for planned sources and streams: set by any caller, at any time, or by a state."""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from typing import Any

import pytest
from shards import draw, index_numbers

from wdskit import Pipeline, PipelineError, StateError
from wdskit.loader import stream

KINDS = ["planned", "stream", "stream with_epoch", "stream, 2 workers"]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    return index_numbers(tmp_path_factory.mktemp("numbers"), [5, 7])


def loader_of(kind: str, numbers: str):
    """Return a loader with three batches of four draws per epoch."""
    if kind == "planned":
        return Pipeline().exact(numbers, seed=3).map(draw).batched(4).loader(workers=0)
    source = Pipeline().stream(numbers, seed=3, resampled="," in kind).split_by_worker().map(draw).batched(4)
    source = source if kind == "stream" else source.with_epoch(3)
    return source.loader(workers=2 if "," in kind else 0)


def plain(batches) -> list:
    return [[column.tolist() for column in batch] for batch in batches]


def epochs(kind: str, numbers: str, *wanted: int) -> list:
    """Return the items of these epochs; each epoch is set before it starts."""
    loader = loader_of(kind, numbers)
    found = []
    for epoch in wanted:
        loader.set_epoch(epoch)
        found.append(plain(loader))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_epoch_that_is_set_inside_another_is_the_next_one(numbers, kind, step):
    """The running epoch continues to its end, and its reported number does not change; the last call counts."""
    zero, five, six = epochs(kind, numbers, 0, 5, 6)
    loader = loader_of(kind, numbers)
    seen = []
    for number, batch in enumerate(loader):
        if number == step:
            before = loader.epoch, loader.state_dict()
            loader.set_epoch(4)
            loader.sampler.set_epoch(5)
            if before[0]:  # its last batch has been delivered
                assert (step, loader.epoch) == (2, 5)
            else:
                assert (loader.epoch, loader.state_dict()) == (0, before[1])
        seen += plain([batch])
    assert seen == zero
    assert loader.epoch == 5
    assert [plain(loader), plain(loader)] == [five, six]
    assert loader.epoch == 7


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_is_set_inside_another_is_the_next_one_after_a_break_too(numbers, kind):
    zero, five = epochs(kind, numbers, 0, 5)
    loader = loader_of(kind, numbers)
    for _ in loader:
        loader.set_epoch(5)
        break
    assert (loader.epoch, plain(loader)) == (5, five)
    loader.set_epoch(0)
    batches = iter(loader)  # nothing happens before the first batch is requested
    loader.set_epoch(5)
    assert plain(batches) == five
    loader.set_epoch(0)
    assert plain(loader) == zero


@pytest.mark.parametrize("epoch", [0, 5])
def test_a_worker_that_is_slow_to_start_reads_what_the_next_iteration_is_told(numbers, monkeypatch, epoch):
    """It starts the abandoned iteration after the next epoch is set, and completes it without a consumer."""
    [wanted] = epochs(KINDS[-1], numbers, epoch)
    go_on = multiprocessing.get_context("fork").Event()

    def start(number: int) -> None:
        assert number == 0 or go_on.wait(30)

    monkeypatch.setattr(stream, "_start_worker", start)
    source = Pipeline().stream(numbers, seed=3, resampled=True).split_by_worker().map(draw).batched(4).with_epoch(3)
    loader = source.loader(workers=2, start_method="fork")
    next(iter(loader))
    loader.set_epoch(epoch)
    late = threading.Timer(0.2, go_on.set)
    late.start()
    assert plain(loader) == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_state_that_is_loaded_inside_an_epoch_is_where_the_next_iteration_begins(numbers, kind, goes_on):
    """An example is a run that goes back because its loss is not finite. The loop is left, or runs to its end."""
    zero, one = epochs(kind, numbers, 0, 1)
    loader = loader_of(kind, numbers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()
    loader.set_epoch(0)
    assert plain(loader) == zero
    for number, _ in enumerate(loader):
        if number == 1:
            loader.set_epoch(8)
            loader.load_state_dict(state)
            assert (loader.epoch, loader.state_dict()) == (0, state)
            with pytest.raises(StateError, match=r"set_epoch\(3\): a state in epoch 0 was loaded"):
                loader.set_epoch(3)
            if not goes_on:
                break
    assert (loader.epoch, loader.state_dict()) == (0, state)
    loader.set_epoch(0)
    seen = []
    for batch in loader:
        loader.set_epoch(1)
        seen += plain([batch])
    assert seen == (zero[1:] if kind == "planned" else zero)  # the state of a stream is its epoch
    assert (loader.epoch, plain(loader)) == (1, one)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("epoch", [-1, 10**9 + 1, 2**63, 1.0, True, "1"])
def test_what_is_no_epoch_is_refused_when_it_is_set(numbers, kind, epoch):
    loader = loader_of(kind, numbers)
    with pytest.raises(PipelineError, match=r"a whole number is needed, 0 to 1000000000\."):
        loader.set_epoch(epoch)
    loader.set_epoch(10**9)
    assert len(plain(loader)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_that_a_framework_counts_may_be_one_behind_or_one_ahead(numbers, kind):
    """Lightning counts an epoch after its validation, or before its end; other frameworks count like the state."""
    [zero], [one] = epochs(kind, numbers, 0), epochs(kind, numbers, 1)  # an epoch may go on from the one before it
    is_planned = kind == "planned"
    loader = loader_of(kind, numbers)
    batches = iter(loader)
    next(batches)
    inside = loader.state_dict()
    list(batches)
    end = loader.state_dict()
    assert (inside["epoch"], end["epoch"]) == (0, 1)

    def resumed(state: dict[str, Any], *counted: int) -> Any:
        loader = loader_of(kind, numbers)
        loader.load_state_dict(state)
        for epoch in counted:
            loader.sampler.set_epoch(epoch)
        return loader

    assert resumed(end, 0).state_dict() == end
    assert plain(resumed(end, 0, 1)) == one
    assert plain(resumed(inside, 0)) == (zero[1:] if is_planned else zero)
    assert plain(resumed(inside, 1)) == one
    for state, wrong in ((inside, 2), (end, 3), *([(end, 2)] if is_planned else [])):
        loader = resumed(state)
        with pytest.raises(StateError, match=rf"set_epoch\({wrong}\): a state in epoch {state['epoch']} was loaded"):
            loader.sampler.set_epoch(wrong)
        assert loader.state_dict() == state
        loader.set_epoch(state["epoch"])


# States of streams, which are the starts of their epochs; tests/promises/test_epochs.py has those of planned sources.


def test_state_of_a_stream_is_taken_on_any_ranks_and_workers(numbers):
    loader = loader_of(KINDS[-1], numbers)
    list(loader)
    source = Pipeline().stream(numbers, seed=3, resampled=True).split_by_node().split_by_worker().map(draw).batched(4)
    for place in ({"workers": 0}, {"workers": 1}, {"workers": 0, "rank": 1, "world_size": 2}):
        resumed = source.with_epoch(3).loader(**place)
        resumed.load_state_dict(loader.state_dict())
        assert (resumed.epoch, [resumed.remaining for _ in resumed], resumed.epoch) == (1, [2, 1, 3], 2)


@pytest.mark.parametrize(
    "state",
    [None, {}, *({"version": 1, "epoch": at} for at in (-1, 2**31, None, "1", True))],
)
def test_what_is_no_state_of_a_stream_is_refused(numbers, state):
    with pytest.raises(StateError, match=r"this is not the state of a (stream|loader)"):
        loader_of("stream", numbers).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 4}, "seed is 4 here and 3 there"),
        ({"shuffle_shards": False}, "shuffle_shards is False here and True there"),
        ({"resampled": True}, "resampled is True here and False there"),
        ({"shards": "s-0*0.tar"}, "shards: other shards, by name"),
        ({"version": 9}, "version is 1 here and 9 there"),
    ],
)
def test_state_of_another_order_of_shards_is_refused_by_name(numbers, tmp_path, caplog, changes, difference):
    """The same shards in another folder are the same, whatever the stages."""
    shutil.copytree(numbers, tmp_path / "copy")
    state = {**loader_of("stream", numbers).state_dict(), "epoch": 5}
    changed = {"seed": 3, "shards": "*.tar", **changes}
    state["version"] = changed.pop("version", 1)
    shards = f"{tmp_path}/copy/{changed.pop('shards')}"
    loader = Pipeline().stream(shards, **changed).shuffle(3).loader(workers=0)
    with pytest.raises(StateError, match=difference):
        loader.load_state_dict(state)
    assert loader.epoch == 0
    loader.load_state_dict(state, strict=False)
    assert loader.epoch == 5
    assert "different sequence of samples" in caplog.text
    same = Pipeline().stream(f"{tmp_path}/copy", seed=3).batched(2).loader(workers=0)
    same.load_state_dict({**state, "version": 1})
    assert same.epoch == 5


def test_state_of_the_other_kind_of_source_is_refused_by_name(numbers):
    stream, planned = loader_of("stream", numbers), loader_of("planned", numbers)
    with pytest.raises(StateError, match=r"source is 'stream' here and None there"):
        stream.load_state_dict(planned.state_dict())
    with pytest.raises(StateError, match=r"state: consumed=None: a whole number is needed"):
        planned.load_state_dict(stream.state_dict())
