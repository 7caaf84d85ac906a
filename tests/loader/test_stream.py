"""The state of a stream is its epoch."""

from __future__ import annotations

import functools
import itertools
import json
import time

import pytest
from shards import index_numbers, write_numbers, write_shard

from wdskit import Pipeline, StateError

SIZES = [5, 1, 9, 4, 7, 3]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Six shards of uneven sizes; each sample holds its running number."""
    folder = tmp_path_factory.mktemp("six")
    numbers = itertools.count()
    for shard, size in enumerate(SIZES):
        write_shard(
            folder / f"s-{shard}.tar", {f"k{n}": {"cls": str(n).encode()} for n in itertools.islice(numbers, size)}
        )
    return str(folder / "s-*.tar")


def is_even(sample) -> bool:
    return sample["cls"] % 3 != 0


def stream(shards, **options):
    return Pipeline().stream(shards, seed=3, **options).split_by_node().split_by_worker()


def labels(pipe):
    return pipe.decode().to_tuple("cls")


PIPES = {
    "each shard once": lambda shards: labels(stream(shards)).batched(3),
    "shuffled": lambda shards: labels(stream(shards).shuffle(7, initial=3)).batched(2),
    "samples": lambda shards: labels(stream(shards).shuffle(4)),
    "with_epoch": lambda shards: labels(stream(shards, resampled=True).shuffle(6)).batched(3).with_epoch(7),
    "selected": lambda shards: (
        labels(stream(shards, resampled=True).decode().select(is_even).shuffle(5).shuffle(3)).batched(2).with_epoch(9)
    ),
}


def plain(item):
    return item[0].tolist() if hasattr(item[0], "tolist") else item[0]


def epochs(loader, num_epochs: int) -> list:
    found = []
    for _ in range(num_epochs):
        epoch = loader.epoch
        found += [(epoch, plain(item)) for item in loader]
    return found


def saved(loader) -> dict:
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 2}], ids=str)
def test_a_state_is_the_start_of_its_epoch(shards, name, settings):
    """This holds in the middle of an epoch and after a break; after the last item it is the state of the next epoch."""
    make = functools.partial(PIPES[name](shards).loader, **settings)
    loader = make()
    assert saved(loader)["epoch"] == 0
    items = iter(loader)
    next(items)
    assert saved(loader) == saved(make())
    for item in items:
        last = item
    assert last is not None
    assert saved(loader)["epoch"] == 1
    next(iter(loader))
    fresh, resumed = make(), make()
    fresh.set_epoch(1)
    resumed.load_state_dict(saved(loader))
    assert resumed.epoch == 1
    assert saved(resumed) == saved(loader)
    assert epochs(resumed, 2) == epochs(fresh, 2)


def test_a_state_is_taken_on_any_ranks_and_workers(shards):
    loader = PIPES["with_epoch"](shards).loader(workers=2)
    epochs(loader, 1)
    for other in ({"workers": 0}, {"workers": 1}, {"workers": 0, "rank": 1, "world_size": 2}):
        resumed = PIPES["with_epoch"](shards).loader(**other)
        resumed.load_state_dict(saved(loader))
        assert [epoch for epoch, _ in epochs(resumed, 1)] == [1] * 7


def test_remaining_counts_down(shards):
    loader = PIPES["with_epoch"](shards).loader(workers=0)
    told = [loader.remaining for _ in loader]
    assert told == [6, 5, 4, 3, 2, 1, 7]


@pytest.mark.parametrize(
    "state",
    [None, {}, {"version": 9, "epoch": 0}, *({"version": 1, "epoch": at} for at in (-1, 2**31, None, "1", True))],
)
def test_what_is_no_state_is_refused(shards, state):
    with pytest.raises(StateError, match=r"this is not the state of a (stream|loader)"):
        PIPES["with_epoch"](shards).loader(workers=0).load_state_dict(state)


def test_a_state_of_the_other_kind_of_source_is_refused_by_name(tmp_path):
    shards = index_numbers(tmp_path / "indexed", [5, 4])
    stream = PIPES["with_epoch"](shards).loader(workers=0)
    planned = Pipeline().exact(shards).batched(3).loader(workers=0)
    with pytest.raises(StateError, match=r"this is the state of a planned source, such as `exact`, not of a stream"):
        stream.load_state_dict(planned.state_dict())
    with pytest.raises(StateError, match=r"consumed is None, not a whole number"):
        planned.load_state_dict(stream.state_dict())


def test_ranks_that_leave_an_epoch_at_one_step_stay_disjoint(tmp_path):
    """This holds for any batches that workers have ready: a draw of a shard belongs to one rank."""
    shards = write_numbers(tmp_path, [40] * 8)
    pipe = stream(shards).decode().to_tuple("cls").batched(2).with_epoch(10)
    seen = [set() for _ in range(2)]
    for rank in range(2):
        loader = pipe.loader(rank=rank, world_size=2, workers=1, prefetch=1 + 8 * rank)
        for epoch in range(2):
            loader.set_epoch(epoch)
            items = list(itertools.islice(loader, 3))
            time.sleep(0.3 * rank)  # the second rank's worker reaches the end of the epoch
            seen[rank] |= {(epoch, int(cls)) for (column,) in items for cls in column}
        seen[rank] |= {(1, int(cls)) for (column,) in loader for cls in column}
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("name", ["with_epoch", "each shard once"])
def test_an_epoch_that_is_counted_elsewhere_may_be_one_behind_or_one_ahead(shards, name):
    """A framework may count an epoch after validation, or end an epoch early."""
    make = functools.partial(PIPES[name](shards).loader, workers=2)
    fresh = make()
    fresh.set_epoch(1)
    expected = epochs(fresh, 2)
    state = {**saved(make()), "epoch": 1}
    behind = make()
    behind.load_state_dict(state)
    behind.sampler.set_epoch(0)
    assert saved(behind) == state
    behind.sampler.set_epoch(1)
    assert epochs(behind, 2) == expected
    ahead = make()
    ahead.load_state_dict({**state, "epoch": 0})
    ahead.sampler.set_epoch(1)
    assert epochs(ahead, 2) == expected
    for set_epoch, wrong in ((ahead.sampler.set_epoch, 3), (ahead.set_epoch, 0)):
        ahead.load_state_dict(state)
        with pytest.raises(StateError, match=rf"set_epoch\({wrong}\): a state in epoch 1 was loaded"):
            set_epoch(wrong)
