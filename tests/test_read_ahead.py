"""What is read along for the next batches is what each of them would have read, and nobody notices but the clock."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from shards import write_shard

from wdskit import Pipeline
from wdskit.engine import read_ahead
from wdskit.engine.jobs import Job
from wdskit.engine.planned import PlannedPipeline
from wdskit.engine.read_ahead import ReadAhead
from wdskit.engine.shards import OpenShards
from wdskit.errors import SampleError
from wdskit.loader.makers import InThisThread
from wdskit.shards.index import index_folder

NUM = 50


def folder_of(path: Path, bad: int | None = None, also: int | None = None) -> Path:
    """Fifty small samples in three shards; of one the JSON is bad, or one has a field more."""
    samples: dict[str, dict[str, bytes]] = {f"k{at:02d}": {"json": b'{"n": %d}' % at} for at in range(NUM)}
    if bad is not None:
        samples[f"k{bad:02d}"] = {"json": b"{"}
    if also is not None:
        samples[f"k{also:02d}"]["txt"] = b"more"
    keys = list(samples)
    for shard, part in enumerate((keys[:13], keys[13:31], keys[31:])):
        write_shard(path / f"s-{shard}.tar", {key: samples[key] for key in part})
    index_folder(path, workers=1)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples were read at once."""
    sizes: list[int] = []
    read_many = OpenShards.read_many

    def counted(self: OpenShards, shards: Any, samples: Any, **options: Any) -> Any:
        sizes.append(len(shards))
        return read_many(self, shards, samples, **options)

    monkeypatch.setattr(OpenShards, "read_many", counted)
    return sizes


def keys(pipe: Pipeline, epochs: int = 3, **options: Any) -> list[list[str]]:
    loader = pipe.loader(workers=0, threads=1, rank=0, world_size=1, **options)
    return [batch["__key__"] for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 49, 50])
def test_batches_are_those_that_are_read_one_by_one(folder, size, tail, monkeypatch):
    pipe = Pipeline().exact(str(folder), seed=3, tail=tail).decode().batched(size)
    ahead = keys(pipe)
    monkeypatch.setattr(read_ahead, "_MOST_JOBS", 1)
    assert ahead == keys(pipe)


def test_so_many_batches_are_read_at_once_and_those_of_the_next_epoch_too(folder, calls):
    pipe = Pipeline().exact(str(folder), seed=3).batched(10)
    assert len(keys(pipe, epochs=4)) == 20
    assert calls == [100, 100]  # those of an epoch and of the one behind it are known


def test_what_is_at_most_read_at_once(folder, calls, monkeypatch):
    monkeypatch.setattr(read_ahead, "_SAMPLES", 30)
    keys(Pipeline().exact(str(folder), seed=3).batched(7), epochs=2)
    assert set(calls) == {28}
    calls.clear()
    keys(Pipeline().exact(str(folder), seed=3).batched(25), epochs=2)
    assert calls == [25] * 4


def test_large_samples_are_not_read_ahead(tmp_path, calls):
    write_shard(tmp_path / "a.tar", {f"k{at}": {"bin": bytes(33_000)} for at in range(12)})
    index_folder(tmp_path, workers=1)
    assert len(keys(Pipeline().exact(str(tmp_path), seed=1).batched(2), epochs=1)) == 6
    assert set(calls) == {2}


def test_an_error_comes_with_its_own_batch(tmp_path):
    """All before it are delivered: also those that were read together with the bad one."""
    pipe = Pipeline().exact(str(folder_of(tmp_path, bad=20)), seed=3).decode().batched(5)
    right = keys(Pipeline().exact(str(tmp_path), seed=3).batched(5), epochs=1)
    at = next(number for number, batch in enumerate(right) if "k20" in batch)
    assert at > 0
    found: list[list[str]] = []
    with pytest.raises(SampleError, match="k20"):
        found.extend(batch["__key__"] for batch in pipe.loader(workers=0, threads=1, rank=0, world_size=1))
    assert found == right[:at]


def test_a_function_behind_the_batches_runs_when_its_batch_is_asked_for(folder):
    seen: list[str] = []

    def look(batch):
        seen.append(batch["__key__"][0])
        return batch

    loader = Pipeline().exact(str(folder), seed=3).batched(5).map(look).loader(workers=0, threads=1)
    for number, _ in enumerate(loader, start=1):
        assert len(seen) == number


def test_after_a_jump_nothing_of_before_is_delivered(folder):
    pipe = Pipeline().exact(str(folder), seed=3).batched(4)
    whole = keys(pipe, epochs=6)
    loader = pipe.loader(workers=0, threads=1, rank=0, world_size=1)
    for epoch in (4, 0, 2):
        loader.set_epoch(epoch)
        batches = iter(loader)
        first = [next(batches)["__key__"] for _ in range(3)]
        assert first == whole[12 * epoch : 12 * epoch + 3]
        batches.close()


def test_where_samples_differ_less_and_less_is_read_in_vain(tmp_path, calls, monkeypatch):
    """A field more in one sample: what was read at once is of no use. It is never given up, and never costs much."""
    monkeypatch.setattr(read_ahead, "_SAMPLES", NUM)
    pipe = Pipeline().exact(str(folder_of(tmp_path, also=7)), seed=3).to_dict("__key__", "json").batched(10)
    found = keys(pipe, epochs=60)
    for first in range(0, 300, 5):
        assert sorted(itertools.chain(*found[first : first + 5])) == [f"k{at:02d}" for at in range(NUM)]
    assert calls.count(NUM) == 6  # behind 5, 10, 20, 40, 80 batches more each time
    assert calls.count(10) == 300


def test_what_is_read_at_once_is_used_where_batches_cannot_be_made_by_columns(tmp_path, calls, monkeypatch):
    """A word where a number belongs in every batch: they are replaced, the rest is not read again."""
    samples = {f"k{at:03d}": {"cls": b"one" if at % 2 else b"1"} for at in range(200)}
    write_shard(tmp_path / "a.tar", samples)
    index_folder(tmp_path, workers=1)
    pipe = Pipeline().sequential(str(tmp_path)).decode().batched(2)
    loader = pipe.loader(workers=0, threads=1, errors={"max_bad": 100})
    read, alone = OpenShards.read, []
    monkeypatch.setattr(OpenShards, "read", lambda *place: alone.append(1) or read(*place))
    assert sum(len(batch["cls"]) for batch in loader) == 200
    assert calls == [2 * read_ahead._MOST_JOBS] * 7
    assert len(alone) < 400  # the samples that stand in for bad ones


def test_what_was_read_for_others_is_forgotten(folder):
    """Memory holds the samples of one group at most."""
    pipeline = Pipeline().exact(str(folder), seed=3).batched(5).build(rank=0, world_size=1)
    assert isinstance(pipeline, PlannedPipeline)
    jobs = [Job(0, range(start, start + 5), NUM) for start in range(0, 50, 5)]
    ahead = ReadAhead(pipeline)
    assert ahead.take(jobs[0], jobs[1:4]) is not None
    assert ahead.take(jobs[9], ()) is None
    assert not ahead._known
    assert ahead.take(jobs[1], ()) is None


def test_a_maker_forgets_what_was_submitted(folder):
    pipeline = Pipeline().exact(str(folder), seed=3).batched(5).build(rank=0, world_size=1)
    jobs = [Job(0, range(start, start + 5), NUM) for start in range(0, 50, 5)]
    maker = InThisThread(pipeline)
    tickets = [maker.submit(job) for job in jobs]
    first = maker.wait(tickets[0]).value
    maker.forget(tickets[1:])
    assert maker.wait(maker.submit(jobs[0])).value == first
    maker.close()
