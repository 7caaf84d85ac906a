"""The number of the next epoch, for planned sources and streams: set by any caller, at any time."""

from __future__ import annotations

import multiprocessing
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

    def start(pipeline: Any, number: int, num_workers: int) -> None:
        assert number == 0 or go_on.wait(30)

    monkeypatch.setattr(stream, "seed_worker", start)
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
    with pytest.raises(PipelineError, match=r"an epoch is a whole number, 0 to 1000000000"):
        loader.set_epoch(epoch)
    loader.set_epoch(10**9)
    assert len(plain(loader)) == 3
