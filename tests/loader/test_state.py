"""EpochCounter and states of planned pipelines, without a pipeline."""

from __future__ import annotations

import itertools
import json
import logging

import pytest

from wdskit.errors import StateError
from wdskit.loader.state import EpochCounter, add_digest, compare_fingerprints
from wdskit.stages.epoch import EpochLayout


def passes(*, epoch_samples=20, batch=2, world_size=2, tail="drop", **fingerprint):
    return EpochCounter(EpochLayout(tail, batch, epoch_samples, fingerprint or {"seed": 1}), world_size=world_size)


def consume(counter, num_steps=None):
    """Return the places of the endless sequence that all ranks read in a pass, step by step."""
    running = counter.begin()
    for step in itertools.islice(range(len(running.steps)), num_steps):
        counter.received(running, step)
        first, stop = running.steps.first(step), min(running.steps.first(step + 1), running.steps.num_samples)
        yield set(range(running.start + first, running.start + stop))


def test_a_state_moves_to_another_number_of_ranks():
    """4 ranks -> 1, 2, 3, 6, 8, 12: with the same global batch the batches are equal, otherwise the sequence is."""
    for world_size in (1, 2, 3, 6, 8, 12):
        before = passes(epoch_samples=96, batch=3, world_size=4)
        whole = list(consume(passes(epoch_samples=96, batch=3, world_size=4)))
        list(consume(before, 3))
        kept = passes(epoch_samples=96, batch=12 // world_size, world_size=world_size) if 12 % world_size == 0 else None
        if kept is not None:
            kept.load_state_dict(before.state_dict())
            assert list(consume(kept)) == whole[3:]
        changed = passes(epoch_samples=96, batch=3, world_size=world_size)
        changed.load_state_dict(before.state_dict())
        batches = list(consume(changed))
        assert all(max(a) < min(b) for a, b in itertools.pairwise(batches))
        assert sorted(set().union(*batches)) == list(range(36, 36 + 3 * world_size * len(batches)))


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


def test_a_state_that_leaves_less_than_a_batch_ends_its_epoch_at_once():
    before = passes(epoch_samples=20, batch=1, world_size=1)
    list(consume(before, 18))
    after = passes(epoch_samples=20, batch=4, world_size=1)
    after.load_state_dict(before.state_dict())
    assert after.remaining == 0
    assert list(consume(after)) == []
    assert after.epoch == 1
    assert next(consume(after)) == {20, 21, 22, 23}


def test_a_state_of_another_sequence_is_refused_by_field(caplog):
    state = passes(seed=1, lanes=240, data="abc").state_dict()
    other = passes(seed=2, lanes=240, window=9)
    with pytest.raises(StateError, match="seed is 2 here and 1 in the state; window is 9 here and None") as caught:
        other.load_state_dict(state)
    assert "lanes" not in str(caught.value)
    assert other.state_dict()["epoch"] == 0
    with caplog.at_level(logging.WARNING, logger="wdskit"):
        other.load_state_dict(state, strict=False)
    assert "seed is 2 here and 1 in the state" in caplog.text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "not the state"),
        ({"version": None}, "not the state"),
        ({"epoch": -1}, "epoch is -1"),
        ({"consumed": 1.5}, "consumed is 1.5"),
        ({"consumed": True}, "consumed is True"),
        ({"consumed": 10**9}, "consumed is 1000000000, more than the"),
        ({"start": "0"}, "start is '0'"),
        ({"epoch_samples": None}, "epoch_samples is None"),
        ({"epoch": 2**63}, "epoch is 9223372036854775808"),
        ({"start": 2**62}, "start is 4611686018427387904"),
        ({"consumed": 2**63, "epoch_samples": 2**64}, "consumed is 9223372036854775808"),
        ({"epoch_samples": 2**63}, "epoch_samples is 9223372036854775808"),
        ({"bad": 2**70}, "bad is 1180591620717411303424"),
        ({"fingerprint": None}, "fingerprint"),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_changes(change, problem):
    counter = passes()
    list(consume(counter, 2))
    before = counter.state_dict()
    with pytest.raises(StateError, match=problem):
        counter.load_state_dict({**before, **change})
    with pytest.raises(StateError, match="not the state"):
        counter.load_state_dict([1])
    assert counter.state_dict() == before


@pytest.mark.parametrize("consumed", [4, 12])
def test_the_epoch_after_one_that_a_framework_ends_early_starts_where_that_one_would_have_ended(consumed):
    """The loaded epoch has its own number of samples, as with `with_epoch` on other ranks."""
    saved = passes(epoch_samples=16)
    list(consume(saved, consumed // 4))
    resumed = passes(epoch_samples=32, world_size=4)
    resumed.load_state_dict(saved.state_dict())
    resumed.set_epoch(saved.epoch + 1, is_counted_elsewhere=True)
    assert resumed.begin().start == (saved.epoch + 1) * 16


def test_a_state_that_a_framework_filtered_shows_that_settings_are_missing():
    """torch.distributed.checkpoint loads only the fields that the loader's own state has."""
    own = {"source": "exact", "order_version": 2, "weight": 1.0, "parts": [{"digest": "a", "content": "x"}]}
    saved = add_digest({**own, "where": "cls < 4", "columns": {"cls": "d"}})
    filtered = {name: saved[name] for name in add_digest(own)}
    with pytest.raises(StateError, match="the state has a setting that this loader lacks, such as `where`"):
        compare_fingerprints(own, filtered, strict=True)
    same = {**own, "weight": 1, "parts": [{"digest": "a", "content": None}]}
    for fingerprint in (own, add_digest(own), add_digest(same), json.loads(json.dumps(add_digest(same)))):
        assert compare_fingerprints(own, fingerprint, strict=True)
