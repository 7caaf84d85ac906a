"""Epochs are exact, all ranks take equally many steps, and a run resumes at any step, on any ranks and workers.

`test_orders.py` pins which samples come; this file says how epochs, states and ranks belong together.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from folders import ALL
from writing import pack

from wdskit import Pipeline, StateError, WdskitError
from wdskit.testing import assert_resumes_exactly

GLOBAL = 12
NUM_SAMPLES = 57
Keys = list[str]
Step = tuple[int, Keys]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two folders; the shards of the first have 10 samples, the last 7."""
    base = tmp_path_factory.mktemp("epochs")
    for name, count in (("one", NUM_SAMPLES), ("two", 23)):
        pack(
            [{"__key__": f"{name}{n:02d}", "cls": n} for n in range(count)], base / name, max_samples=10, columns="cls"
        )
    return {name: str(base / name) for name in ("one", "two")}


def _mixture(data: dict[str, str]) -> list[dict[str, Any]]:
    return [{"shards": data["one"], "weight": 3}, {"shards": data["two"], "weight": 1}]


PIPELINES: dict[str, Callable[[dict[str, str]], Pipeline]] = {
    "exact": lambda data: Pipeline().exact(data["one"], seed=3),
    "exact lanes": lambda data: Pipeline().exact(data["one"], seed=3, lanes=6, window=8),
    "exact range": lambda data: Pipeline().exact(data["one"], seed=3, range=["10%", "80%"]),
    "exact where": lambda data: Pipeline().exact(data["one"], seed=3, where="cls >= 5"),
    "exact pad": lambda data: Pipeline().exact(data["one"], seed=3, tail="pad"),
    "exact epoch": lambda data: Pipeline().exact(data["one"], seed=3).with_epoch(60),
    "sequential": lambda data: Pipeline().sequential(data["one"]),
    "sequential drop": lambda data: Pipeline().sequential(data["one"], tail="drop"),
    "resampled": lambda data: Pipeline().resampled(data["one"], seed=5),
    "mixture": lambda data: Pipeline().exact(mixture=_mixture(data), seed=3).with_epoch(48),
    "mixture finite": lambda data: Pipeline().exact(
        mixture=[{"shards": data["one"], "repeat": 1}, {"shards": data["two"], "range": [3, 9], "repeat": 2}], lanes=3
    ),
    "mixture schedule": lambda data: (
        Pipeline()
        .exact(mixture=[{"shards": data["one"], "weight": {0: 1.0, 20: 0.5}}, {"shards": data["two"], "weight": 1}])
        .with_epoch(48)
    ),
    "other seed": lambda data: Pipeline().exact(data["one"], seed=4),
    "other data": lambda data: Pipeline().exact(data["two"], seed=3),
}


def loader_of(
    data: dict[str, str], name: str, *, world: int = 1, rank: int = 0, workers: int = 0, threads: int = 1
) -> Any:
    pipe = PIPELINES[name](data).batched(global_size=GLOBAL)
    return pipe.loader(rank=rank, world_size=world, workers=workers, threads=threads)


def keys_of(batch: dict[str, Any]) -> Keys:
    """Return the keys of a batch without padding."""
    valid = batch.get("__valid__")
    return [key for at, key in enumerate(batch["__key__"]) if valid is None or valid[at]]


def all_ranks(data: dict[str, str], name: str, *, world: int) -> list[Any]:
    return [loader_of(data, name, world=world, rank=rank) for rank in range(world)]


def together(loaders: list[Any]) -> Iterator[Step]:
    """Yield the steps of all ranks, epoch after epoch: the epoch, and the keys of the global batch, sorted."""
    while True:
        epoch = loaders[0].epoch
        for batches in itertools.zip_longest(*loaders):
            assert all(batch is not None for batch in batches), "ranks take different numbers of steps"
            yield epoch, sorted(key for batch in batches for key in keys_of(batch))


def reference(data: dict[str, str], name: str, num: int) -> list[Step]:
    return [*itertools.islice(together(all_ranks(data, name, world=1)), num)]


RANK_EPOCHS = ("exact epoch", "mixture", "mixture schedule")
"""Pipelines with `with_epoch`, which counts the samples of a rank: more ranks have longer epochs."""

RESUMED = [name for name in PIPELINES if not name.startswith("other")]


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("seed", range(20 if ALL else 2))
def test_run_that_stops_and_resumes_on_other_ranks_sees_the_samples_of_one_run(
    data: dict[str, str], name: str, seed: int
) -> None:
    """A history of stops: each goes on with another number of ranks, from the state of any rank."""
    rng = random.Random(f"{name} {seed}")
    found: list[Step] = []
    state: dict[str, Any] | None = None
    while len(found) < 14:
        loaders = all_ranks(data, name, world=rng.choice([1, 2, 3, 4, 6]))
        for loader in loaders if state else []:
            loader.load_state_dict(state)
        found += itertools.islice(together(loaders), rng.choice([0, 1, 1, 2, 3, 5]))
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = json.loads(json.dumps(rng.choice(states)))
        for loader in loaders:
            loader.close()
    expected = reference(data, name, len(found))
    if name in RANK_EPOCHS:
        assert [keys for _, keys in found] == [keys for _, keys in expected]
    else:
        assert found == expected


@pytest.mark.parametrize("name", RESUMED if ALL else ["exact lanes", "mixture", "sequential"])
def test_loader_resumes_exactly_at_each_step(data: dict[str, str], name: str) -> None:
    assert_resumes_exactly(lambda: loader_of(data, name))


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("source", ["exact", "sequential"])
def test_all_ranks_take_equally_many_steps_and_no_sample_twice(data: dict[str, str], source: str, tail: str) -> None:
    """With `tail: pad` each sample comes once; `__valid__` marks padding."""
    for world, batch in itertools.product(range(1, 12 if ALL else 6), (1, 3, 8)):
        if tail == "drop" and world * batch > NUM_SAMPLES:
            continue  # refused, as the next test shows
        seen: Keys = []
        lengths = set()
        for rank in range(world):
            pipe = getattr(Pipeline(), source)(data["one"], tail=tail).batched(batch)
            loader = pipe.loader(rank=rank, world_size=world, workers=0)
            batches = [*loader]
            assert {len(one["__key__"]) for one in batches} == {batch}
            assert all(("__valid__" in one) == (tail == "pad") for one in batches)
            lengths |= {len(batches), len(loader)}
            seen += [key for one in batches for key in keys_of(one)]
        whole = NUM_SAMPLES // (world * batch)
        assert lengths == {whole + (tail == "pad" and NUM_SAMPLES % (world * batch) > 0)}
        assert len({*seen}) == len(seen) == (NUM_SAMPLES if tail == "pad" else whole * world * batch)


def test_epoch_without_a_step_is_refused_with_the_numbers(data: dict[str, str]) -> None:
    for world in (8, 58):
        with pytest.raises(WdskitError, match=f"{NUM_SAMPLES}"):
            [*Pipeline().exact(data["one"]).batched(8).loader(rank=0, world_size=world, workers=0)]


def test_each_epoch_has_another_order_and_the_same_samples(data: dict[str, str]) -> None:
    loader = Pipeline().exact(data["one"], tail="pad").batched(8).loader(workers=0)
    epochs = [[key for batch in loader for key in keys_of(batch)] for _ in range(3)]
    assert len({*map(tuple, epochs)}) == 3
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    loader.set_epoch(1)
    assert [key for batch in loader for key in keys_of(batch)] == epochs[1]


# Epochs of a loop that leaves early.


def test_each_iteration_that_yielded_is_an_epoch(data: dict[str, str]) -> None:
    """A loop of two steps an epoch never sees the same batches twice; an iterator that yielded nothing is no epoch."""
    steps = [keys for epoch, keys in reference(data, "exact", 12)]
    loader = loader_of(data, "exact")
    iter(loader)
    found = []
    for _ in range(3):
        found += [sorted(keys_of(batch)) for batch in itertools.islice(loader, 2)]
    assert found == [*steps[:2], *steps[4:6], *steps[8:10]]
    loader.set_epoch(1)
    assert [sorted(keys_of(batch)) for batch in loader] == steps[4:8]


@pytest.mark.parametrize("way", [{"workers": 0}, {"workers": 0, "threads": 2}, {"workers": 1}], ids=str)
def test_error_and_close_end_an_epoch_too(data: dict[str, str], way: dict[str, int]) -> None:
    """The state stays where the consumer is, until the next iteration begins."""
    steps = [keys for _, keys in reference(data, "exact", 12)]
    loader = loader_of(data, "exact", **way)
    found = []
    with pytest.raises(ZeroDivisionError):
        for batch in loader:
            found.append(sorted(keys_of(batch)))
            1 / 0  # noqa: B018
    state = loader.state_dict()
    assert (loader.epoch, loader.remaining, state["epoch"], state["consumed"]) == (1, 4, 0, GLOBAL)
    batches = iter(loader)
    found.append(sorted(keys_of(next(batches))))
    loader.close()
    with pytest.raises(WdskitError, match="closed"):
        next(batches)
    found += [sorted(keys_of(batch)) for batch in loader]
    assert found == [steps[0], steps[4], *steps[8:]]
    loader.load_state_dict(state)
    assert [sorted(keys_of(batch)) for batch in loader] == steps[1:4]
    loader.close()


def test_new_iterator_ends_an_older_one_which_says_so(data: dict[str, str]) -> None:
    loader = loader_of(data, "exact")
    old = iter(loader)
    next(old)
    assert next(iter(loader)) is not None
    with pytest.raises(WdskitError, match="iter"):
        next(old)


def test_end_of_an_epoch_is_counted_before_its_last_batch(data: dict[str, str]) -> None:
    """A state that is saved in the loop's last step belongs to the next epoch."""
    loader = loader_of(data, "exact")
    states = [(loader.epoch, loader.state_dict()["consumed"], loader.remaining) for _ in loader]
    assert states == [(0, 12, 3), (0, 24, 2), (0, 36, 1), (1, 0, 4)]


# States.


def test_state_at_the_end_of_its_epoch_has_no_step_left_and_the_next_epoch_is_whole(data: dict[str, str]) -> None:
    loader = loader_of(data, "exact")
    next(iter(loader))
    state = loader.state_dict()
    loader = loader_of(data, "exact")
    loader.load_state_dict({**state, "consumed": state["epoch_samples"]})
    assert loader.remaining == 0
    assert [*loader] == []
    assert loader.epoch == 1
    whole = [keys for epoch, keys in reference(data, "exact", 8) if epoch == 1]
    assert [sorted(keys_of(batch)) for batch in loader] == whole


@pytest.mark.parametrize("name", PIPELINES)
def test_state_of_another_sequence_is_refused(
    data: dict[str, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `strict=False` it continues in the same epoch, and a warning says that the sequence differs."""
    loader = loader_of(data, name)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    for other in PIPELINES.keys() - {name}:
        with pytest.raises(StateError):
            loader_of(data, other).load_state_dict(state)
    other = "exact lanes" if name != "exact lanes" else "exact"
    lenient = loader_of(data, other)
    caplog.clear()
    lenient.load_state_dict(state, strict=False)
    assert "different sequence" in caplog.text
    assert (lenient.epoch, lenient.state_dict()["consumed"]) == (state["epoch"], state["consumed"])


ODD_VALUES = [None, -1, "1", 1.5, True, [], {}, [1], {"a": 1}, 2**70, float("nan")]


def _with(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a state with another value at a path."""
    copy = json.loads(json.dumps(state))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return copy


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a state."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield (*path, name)
        yield from _paths(item, (*path, name))


@pytest.mark.parametrize("name", ["exact lanes", "mixture"])
def test_damaged_state_is_a_state_error_and_no_other(data: dict[str, str], name: str) -> None:
    """Each value is replaced by others and removed; a state that is accepted continues as the right one does."""
    loader = loader_of(data, name)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [keys_of(batch) for batch in batches]
    num_refused = 0
    for path, value in itertools.product(_paths(state), ODD_VALUES):
        damaged = _with(state, path, value)
        loader = loader_of(data, name)
        try:
            loader.load_state_dict(damaged)
        except StateError:
            num_refused += 1
        else:
            assert path[0] in {"fingerprint", "bad", "bad_rank"} or value == state[path[0]], (path, value)
            assert [keys_of(batch) for batch in loader] == rest
    assert num_refused > 100
    wrongs: list[Any] = [None, [], "state", 1, {}, {"version": 1}, {**state, "version": 2}, {**state, "consumed": 58}]
    for wrong in wrongs:
        with pytest.raises(StateError):
            loader_of(data, name).load_state_dict(wrong)
    for missing in ("version", "epoch", "consumed", "start", "epoch_samples", "fingerprint"):
        with pytest.raises(StateError):
            loader_of(data, name).load_state_dict({key: value for key, value in state.items() if key != missing})


@pytest.mark.parametrize("path", [(), ("epoch",), ("bad_rank",), ("fingerprint", "digest"), ("fingerprint", "seed")])
def test_state_with_objects_is_a_state_error(data: dict[str, str], path: tuple[str, ...]) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    state = loader_of(data, "exact").state_dict()
    for value in (np.ones(2), torch.ones(2), {1}, b"1", object(), cycle):
        damaged = _with(state, path, value) if path else value
        with pytest.raises(StateError):
            loader_of(data, "exact").load_state_dict(damaged)
