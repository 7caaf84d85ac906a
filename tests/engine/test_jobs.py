"""Small batches of a job are made together, with the same results in less time."""

from __future__ import annotations

import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
from shards import write_shard

from wdskit import Pipeline
from wdskit.engine import program
from wdskit.errors import SampleError
from wdskit.shards.index import index_folder

NUM = 50
WAYS = [{"workers": 0, "threads": 1}, {"workers": 0, "threads": 3}, {"workers": 2, "threads": 1}]


def folder_of(path: Path, bad: int | None = None, also: int | None = None) -> Path:
    """Write fifty small samples in three shards; one sample has bad JSON, or one more field."""
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


def keys(pipe: Pipeline, epochs: int = 3, **options: Any) -> list[list[str]]:
    loader = pipe.loader(**({"workers": 0, "threads": 1} | options), rank=0, world_size=1)
    return [batch["__key__"] for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("batches_a_job", [1, 2, 3, 16])
def test_a_sample_with_a_field_more_changes_nothing_for_the_others(tmp_path, batches_a_job, monkeypatch):
    monkeypatch.setattr(program, "_MOST_BATCHES_A_JOB", batches_a_job)
    pipe = Pipeline().exact(str(folder_of(tmp_path, also=7)), seed=3).decode().to_dict("__key__", "json").batched(10)
    found = keys(pipe, epochs=4)
    for first in range(0, 20, 5):
        assert sorted(itertools.chain(*found[first : first + 5])) == [f"k{at:02d}" for at in range(NUM)]


@pytest.mark.parametrize("threads", [1, 4])
def test_loaders_of_one_process_share_its_descriptors(tmp_path, threads):
    """Two loaders after each other, with more shards than descriptors."""
    for number in range(90):
        write_shard(tmp_path / f"s-{number:03d}.tar", {f"k{number:03d}-{at}": {"bin": b"x"} for at in range(2)})
    index_folder(tmp_path, workers=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        loaders = [Pipeline().exact(str(tmp_path), seed=seed).to_tuple("__key__").batched(4) for seed in range(2)]
        kept = [pipe.loader(workers=0, threads=threads) for pipe in loaders]
        assert [len({key for (names,) in loader for key in names}) for loader in kept] == [180, 180]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("size", [None, 5])
def test_an_error_comes_with_its_own_batch(tmp_path, way, size):
    """All batches before it are delivered, also batches that were made together with the bad one."""
    source = Pipeline().exact(str(folder_of(tmp_path, bad=20)), seed=3)
    right = [batch["__key__"] for batch in (source if size is None else source.batched(size)).loader(workers=0)]
    pipe = source.decode() if size is None else source.decode().batched(size)
    at = next(number for number, keys in enumerate(right) if "k20" in keys)
    assert at > 0
    found: list[list[str]] = []
    loader = pipe.loader(**way, rank=0, world_size=1)
    with pytest.raises(SampleError, match="k20"):
        found.extend(batch["__key__"] for batch in loader)
    assert found == right[:at]
    assert loader.state_dict()["consumed"] == sum(map(len, right[:at])) if size else at


def test_a_function_behind_the_batches_runs_when_its_batch_is_asked_for(folder):
    seen: list[str] = []

    def look(batch):
        seen.append(batch["__key__"][0])
        return batch

    loader = Pipeline().exact(str(folder), seed=3).batched(5).map(look).loader(workers=0, threads=1)
    for number, _ in enumerate(loader, start=1):
        assert len(seen) == number
