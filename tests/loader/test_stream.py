"""A stream goes on exactly where its consumer was, with the same ranks and workers."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import time
import zlib

import numpy as np
import pytest
import webdataset
from shards import write_numbers, write_shard

from wdskit import Pipeline, PipelineError, StateError
from wdskit.engine.stream import StreamPipeline
from wdskit.testing import assert_resumes_exactly

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
    "with_epoch inside": lambda shards: labels(stream(shards)).with_epoch(11).shuffle(5).batched(2),
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


def has_length(loader) -> bool:
    try:
        return len(loader) > 0
    except TypeError:
        return False


def stop_after(loader, num_items: int) -> str:
    """Take so many items, over the ends of epochs, and save."""
    taken = 0
    while taken < num_items:
        for _ in loader:
            taken += 1
            if taken == num_items:
                return json.dumps(loader.state_dict())
    return json.dumps(loader.state_dict())


def check_every_stop(make, *, stops=None, spacing: int | None = None) -> None:
    """Stop after each item of two epochs; what comes then, to the end of the third, is what came without a stop."""
    whole = epochs(make(), 3)
    num_two = sum(epoch < 2 for epoch, _ in whole)
    for stop in range(num_two + 1) if stops is None else stops(num_two):
        state = json.loads(stop_after(make(), stop))
        loader = make()
        loader.load_state_dict(state)
        # Where nobody knows the length, an epoch is over when the next item is asked for.
        assert loader.epoch == whole[stop][0] or (not has_length(loader) and loader.epoch == whole[stop - 1][0])
        assert json.loads(json.dumps(loader.state_dict())) == state
        assert epochs(loader, 3 - loader.epoch) == whole[stop:], stop


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_it_resumes_behind_each_item(shards, name, threads):
    check_every_stop(lambda: PIPES[name](shards).loader(workers=0, threads=threads))


@pytest.mark.parametrize("name", ["each shard once", "with_epoch inside"])
@pytest.mark.parametrize(("workers", "persistent"), [(2, True), (3, False)])
def test_it_resumes_with_worker_processes(shards, name, workers, persistent):
    """Of all stops those near the ends of epochs; those without workers are all tried above."""

    def make():
        return PIPES[name](shards).loader(workers=workers, persistent_workers=persistent, prefetch=2)

    def stops(num):
        near = {num // 2 - 1, num // 2, num // 2 + 1, num - 1}
        return near | {0, 1, 2, num} if workers == 2 else near

    check_every_stop(make, stops=stops)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_resumes_its_own(shards, rank):
    check_every_stop(lambda: PIPES["with_epoch"](shards).loader(workers=0, rank=rank, world_size=2))


def test_a_state_of_a_resumed_run_resumes_too(shards):
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=2)
    whole = epochs(make(), 3)
    loader = make()
    for stop in (3, 7, 8, 12):
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
        done = stop - {3: 0, 7: 3, 8: 7, 12: 8}[stop]
        assert [plain(item) for item in itertools.islice(_endless(loader), done)] == [
            item for _, item in whole[stop - done : stop]
        ]


def _endless(loader):
    while True:
        yield from loader


def test_after_a_break_the_resumed_epoch_starts_again(shards):
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=0)
    whole = epochs(make(), 2)
    state = stop_after(make(), 10)
    loader = make()
    loader.load_state_dict(json.loads(state))
    for item in loader:
        assert plain(item) == whole[10][1]
        break
    assert [plain(item) for item in loader] == [item for epoch, item in whole if epoch == 1]


def test_a_loader_in_use_takes_a_state(shards):
    """Workers that persist are somewhere else in the stream."""
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=2)
    whole = epochs(make(), 3)
    state = json.loads(stop_after(make(), 4))
    loader = make()
    epochs(loader, 2)
    loader.load_state_dict(state)
    assert epochs(loader, 3) == whole[4:]
    loader.load_state_dict(json.loads(stop_after(make(), 0)))
    assert epochs(loader, 3) == whole


def test_a_resumed_epoch_that_is_set_once_more_begins_at_its_start(shards):
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=0)
    state = json.loads(stop_after(make(), 11))  # inside epoch 1, behind a mark
    assert state["workers"][0]["mark"]
    loader = make()
    loader.load_state_dict(state)
    list(loader)
    loader.set_epoch(1)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert epochs(resumed, 1) == [one for one in epochs(make(), 2) if one[0] == 1]


def test_remaining_counts_down(shards):
    loader = PIPES["with_epoch"](shards).loader(workers=0)
    told = [loader.remaining for _ in loader]
    assert told == [6, 5, 4, 3, 2, 1, 7]


def test_what_holds_a_hidden_state_says_so(shards):
    for pipe, why in [
        (stream(shards).decode().to_tuple("cls").batched(2).unbatched(), "unbatched"),
        (stream(shards).slice(3), "slice"),
        (stream(shards).decode().to_tuple("cls").batched(2).shuffle(4), "behind batched"),
        (stream(shards).stage(webdataset.map(dict)), "not wdskit's"),
    ]:
        with pytest.raises(StateError, match=f"this stream cannot be resumed: .*{why}"):
            pipe.loader(workers=0).state_dict()


def test_what_holds_a_hidden_state_is_logged_when_the_loader_is_made(shards, caplog):
    """And nothing where the state can be saved."""
    PIPES["with_epoch"](shards).loader(workers=0)
    assert not caplog.records
    stream(shards).stage(webdataset.map(dict)).loader(workers=0)
    [message] = caplog.messages
    assert message.startswith(
        "this stream cannot be resumed, and `state_dict` is an error: a stage that is not wdskit's"
    )


def test_another_setting_is_refused_by_name(shards):
    state = PIPES["with_epoch"](shards).loader(workers=2).state_dict()
    for other, name in [({"workers": 1}, "workers"), ({"workers": 2, "threads": 2}, "threads")]:
        with pytest.raises(
            StateError, match=f"a stream resumes only with the same ranks, workers and threads: .*{name}"
        ):
            PIPES["with_epoch"](shards).loader(**other).load_state_dict(state)
    other = stream(shards, resampled=True).shuffle(9).decode().to_tuple("cls").batched(3).with_epoch(7)
    with pytest.raises(StateError, match=r"sizes is \[9, 3, 7\] here and \[6, 3, 7\] in the state"):
        other.loader(workers=2).load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, {"version": 9, "workers": []}])
def test_what_is_no_state_is_refused(shards, state):
    with pytest.raises(StateError, match="this is not the state of a stream"):
        PIPES["with_epoch"](shards).loader(workers=0).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        {"mark": "x"},
        {"mark": [3, "AAAA"]},
        {"received": -1},
        {"received": "ab"},
        {"how": "somehow"},
        {"epoch": None},
        {"begun": "!"},
    ],
)
def test_a_damaged_state_is_refused(shards, damage):
    loader = PIPES["with_epoch"](shards).loader(workers=0)
    state = json.loads(stop_after(loader, 4))
    with pytest.raises(StateError, match="it is damaged"):
        loader.load_state_dict({**state, "workers": [{**state["workers"][0], **damage}]})
    for other in ({"workers": []}, {"workers": 5}, {"epoch": -1}, {"next_worker": None}):
        with pytest.raises(StateError, match="it is damaged"):
            loader.load_state_dict({**state, **other})
    for name, number in (("epoch", 2**63), ("epoch", 2**31), ("next_worker", 1)):
        with pytest.raises(StateError, match=f"{name} is {number}, not a whole number from 0 to"):
            loader.load_state_dict({**state, name: number})
    for name in ("received", "epoch"):
        with pytest.raises(StateError, match=rf"{name} is 9223372036854775808, not a whole"):
            loader.load_state_dict({**state, "workers": [{**state["workers"][0], name: 2**63}]})
    below = base64.b64encode(zlib.compress(np.array([0, 0, -1, 0, 1], dtype="<i8").tobytes())).decode()
    with pytest.raises(StateError, match="begun holds -1, not a whole number"):
        loader.load_state_dict({**state, "workers": [{**state["workers"][0], "begun": below}]})


def test_the_state_is_small_and_the_re_read_bounded(shards):
    """By what the shuffle holds, not by how far the epoch is."""
    loader = labels(stream(shards, resampled=True).shuffle(20)).with_epoch(5000).loader(workers=0)
    state = json.loads(stop_after(loader, 4321))
    assert len(json.dumps(state)) < 3000
    num_items, _ = state["workers"][0]["mark"]
    assert 4321 - 40 <= num_items <= 4321
    again = labels(stream(shards, resampled=True).shuffle(20)).with_epoch(5000).loader(workers=0)
    again.load_state_dict(state)
    list(itertools.islice(again, 2))
    assert again.state_dict()["workers"][0]["mark"][0] >= num_items  # and a second resume is as near


@pytest.mark.parametrize("mutant", ["no marks", "marks ahead", "no starts"])
def test_the_check_of_stops_catches(shards, mutant, monkeypatch):
    true_marked = StreamPipeline._marked

    def marked(self, start, values):
        for value, mark in true_marked(self, start, values):
            ahead = mark and mark._replace(num_items=mark.num_items + 3)
            yield value, ahead if mutant == "marks ahead" else None

    if mutant == "no starts":
        monkeypatch.setattr(StreamPipeline, "_between_epochs", lambda _: None)
    else:
        monkeypatch.setattr(StreamPipeline, "_marked", marked)
    if mutant == "no marks":  # nothing but the count: read from the start of the epoch, it is right still, but slow
        check_every_stop(lambda: PIPES["with_epoch"](shards).loader(workers=0))
        return
    with pytest.raises((AssertionError, PipelineError)):
        check_every_stop(lambda: PIPES["with_epoch"](shards).loader(workers=0))


@pytest.mark.parametrize(
    "settings", [{"workers": 0}, {"workers": 2}, {"workers": 2, "persistent_workers": False}], ids=str
)
def test_an_epoch_that_is_left_goes_on_where_its_consumer_was(shards, settings):
    """Whatever the workers have ready: the next epoch, and a state of it, follow from what was received."""
    make = PIPES["with_epoch"](shards).loader
    settings |= {"prefetch": 2} if settings["workers"] else {}
    found = []
    for nap in (0, 0.3):
        loader = make(**settings)
        seen = []
        for num_items in (3, 1, 0):
            epoch = loader.epoch
            seen += [plain(item) for item in itertools.islice(loader, num_items)]
            time.sleep(nap)  # workers may run ahead, to the end of the epoch
            loader.set_epoch(epoch + 1)
        state = json.loads(json.dumps(loader.state_dict()))
        seen += epochs(loader, 2)
        resumed = make(**settings)
        resumed.load_state_dict(state)
        assert [*seen[:4], *epochs(resumed, 2)] == seen
        found.append(seen)
    assert found[0] == found[1]
    whole = [item for _, item in epochs(make(workers=0), 2)]
    assert found[0][:4] == whole[:4] or settings["workers"]  # no sample is read that was had before, none left out


def test_a_jump_begins_a_stream(shards):
    """The same from any place and any number of workers' preparations."""
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=1, prefetch=2)
    loader = make()
    epochs(loader, 3)
    for num_items in (2, 0):
        list(itertools.islice(loader, num_items))
        loader.set_epoch(9)
        state = json.loads(json.dumps(loader.state_dict()))
        there = epochs(loader, 2)
        fresh = make()
        fresh.set_epoch(9)
        assert epochs(fresh, 2) == there
        resumed = make()
        resumed.load_state_dict(state)
        assert epochs(resumed, 2) == there
        loader.set_epoch(1)


def test_ranks_that_leave_an_epoch_at_one_step_stay_disjoint(tmp_path):
    """Whatever their workers have ready: a draw of shards belongs to one rank."""
    shards = write_numbers(tmp_path, [40] * 8)
    pipe = stream(shards).decode().to_tuple("cls").batched(2).with_epoch(10)
    seen = []
    for rank in range(2):
        loader = pipe.loader(rank=rank, world_size=2, workers=1, persistent_workers=False, prefetch=1 + 8 * rank)
        items = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            items += itertools.islice(loader, 3)
            time.sleep(0.3 * rank)  # the second rank's worker comes to the end of the epoch
        seen.append({int(cls) for (column,) in [*items, *loader] for cls in column})
    assert [len(part) for part in seen] == [32, 32]  # 2 x 3 batches, and 10 of the last epoch, which starts again
    assert not seen[0] & seen[1]


@pytest.mark.parametrize("name", ["with_epoch", "with_epoch inside", "each shard once"])
def test_an_epoch_that_is_counted_elsewhere_may_be_one_behind_or_one_ahead(shards, name):
    """As a framework counts that validates before it counts, or that ends epochs early."""
    make = functools.partial(PIPES[name](shards).loader, workers=2)
    whole = make()
    num_items = len(epochs(whole, 1))
    state = whole.state_dict()
    rest = epochs(whole, 2)
    behind = make()
    behind.load_state_dict(json.loads(json.dumps(state)))
    behind.sampler.set_epoch(0)
    assert (behind.epoch, behind.state_dict()) == (1, state)
    behind.sampler.set_epoch(1)
    assert epochs(behind, 2) == rest

    left = make()
    list(itertools.islice(left, num_items - 2))
    state = left.state_dict()
    left.sampler.set_epoch(1)
    there = epochs(left, 2)
    ahead = make()
    ahead.load_state_dict(json.loads(json.dumps(state)))
    ahead.sampler.set_epoch(1)
    assert epochs(ahead, 2) == there
    for loader, wrong in ((make(), 2), (behind, 9)):
        loader.load_state_dict(state)
        with pytest.raises(StateError, match=rf"set_epoch\({wrong}\): a state in epoch 0 was loaded"):
            loader.sampler.set_epoch(wrong)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("num_batches", "workers"), [(3, 2), (2, 3)])
def test_a_worker_that_is_late_at_the_end_of_an_epoch_is_waited_for(
    shards, monkeypatch, num_batches, workers, persistent
):
    """One that has nothing left to give, as it is resumed or has no share, says where it stands behind its last item;
    the state at the end of the epoch holds that too.
    """
    true_position = StreamPipeline._between_epochs

    def late(self):
        time.sleep(0.05 * (self.run.worker > 0))
        return true_position(self)

    monkeypatch.setattr(StreamPipeline, "_between_epochs", late)
    pipe = labels(stream(shards, resampled=True).shuffle(4)).batched(2).with_epoch(num_batches)
    steps = [num_batches - 1, num_batches, 2 * num_batches]
    assert_resumes_exactly(lambda: pipe.loader(workers=workers, persistent_workers=persistent), steps=steps)


def test_a_worker_that_is_late_behind_an_epoch_that_was_left_is_waited_for(shards, monkeypatch):
    """It has still to find the place where the consumer was; a state inside the next epoch holds that place."""
    true_position = StreamPipeline._between_epochs

    def late(self):
        time.sleep(0.2 * (self.run.worker > 0))
        return true_position(self)

    monkeypatch.setattr(StreamPipeline, "_between_epochs", late)
    make = functools.partial(PIPES["with_epoch"](shards).loader, workers=2)
    loader = make()
    list(itertools.islice(loader, 4))
    loader.set_epoch(1)
    items = iter(loader)
    next(items)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [plain(item) for item in items] + [item for _, item in epochs(loader, 1)]
    resumed = make()
    resumed.load_state_dict(state)
    assert [item for _, item in epochs(resumed, 2)] == rest
