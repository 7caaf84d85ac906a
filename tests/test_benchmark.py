"""`wdskit.bench`: it measures what it reports, and leaves nothing open. Times are not compared."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import pytest
import torch
from leaks import open_things, opened_since
from shards import fail_on_7, key_of, write_numbers, write_pictures

import wdskit
from wdskit import Pipeline, PipelineError, SampleError, ShardError, benchmark
from wdskit.pipeline import settings as settings_module
from wdskit.shards.index import index_folder

QUICK: dict[str, Any] = {"seconds": 0.01, "repeats": 1, "workers": [0, 1], "threads": [1]}


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with two CPUs, for which a loader's default is one worker with two threads."""
    for module in (benchmark, settings_module):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Ten samples in three shards, indexed."""
    folder = tmp_path_factory.mktemp("numbers")
    pattern = write_numbers(folder, [4, 3, 3])
    index_folder(folder, workers=1)
    return pattern


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine images of 12x16 in two shards, indexed."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [5, 4])
    index_folder(folder, workers=1)
    return folder


def config_of(folder: Path, **loader: Any) -> dict[str, Any]:
    stages = [{"exact": str(folder)}, {"decode": "rgb8"}, {"center_crop": 8}, {"normalize": "imagenet"}]
    return {"version": 1, "pipeline": [*stages, {"to_tuple": ["jpg;png", "cls"]}, {"batched": 4}], "loader": loader}


def test_the_figures_of_a_result_agree_with_each_other(pictures: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    config = config_of(pictures, workers=1, threads=1, prefetch=3)
    result = wdskit.bench(config, **QUICK | {"repeats": 2}, progress=lambda *each: calls.append(each))
    json.dumps(dataclasses.asdict(result))
    assert (result.batch, result.num_cpus, result.repeats) == (4, 2, 2)
    assert result.bare_samples_per_s > 0
    assert [each.setting for each in result.loaders] == [(0, 1), (1, 1)]
    for each in result.loaders:
        for measured in (each.samples_per_s, each.first_batch_s):
            assert measured > 0
    assert [done for _, done, _ in calls] == list(range(len(calls)))
    assert calls[-1] == ("done", calls[-1][2], 2 * (1 + 2))


def test_nothing_is_left_behind_and_nothing_is_written(tmp_path: Path) -> None:
    write_numbers(tmp_path / "data", [10])
    index_folder(tmp_path / "data", workers=1)
    config = {
        "version": 1,
        "pipeline": [{"exact": str(tmp_path / "data")}, {"map": "fail_on_7"}, {"batched": 4}],
        "errors": {"max_bad": 1, "transforms": True, "dir": str(tmp_path / "bad")},
    }
    torch.ones(300, 300) @ torch.ones(300, 300)  # torch starts its own threads, which stay
    gc.collect()
    before = open_things()
    files = sorted(tmp_path.rglob("*"))
    wdskit.bench(config, transforms={"fail_on_7": fail_on_7}, **QUICK)
    gc.collect()  # ignored errors
    assert not opened_since(before)
    assert sorted(tmp_path.rglob("*")) == files


def test_a_stream_is_refused_with_the_way_out(numbers: str) -> None:
    with pytest.raises(PipelineError, match=r"a stream cannot be measured.*\n.*wdskit index"):
        wdskit.bench(Pipeline().stream(numbers).decode().batched(4))
    with pytest.raises(PipelineError, match=r"`bucketed` cannot be measured"):
        wdskit.bench(Pipeline().exact(numbers).bucketed(by="size", edges=[8], global_size=4))


def test_functions_of_the_users_are_measured_in_one_thread_a_process_unless_threads_are_asked_for(numbers: str) -> None:
    """Several threads would call them at the same time."""
    pipe = Pipeline().exact(numbers).map(key_of).batched(4)
    result = wdskit.bench(pipe, seconds=0.01, repeats=1)
    assert [each.setting for each in result.loaders] == [result.configured] == [(2, 1)]
    result = wdskit.bench(pipe, **QUICK | {"threads": [1, 2]})
    assert {each.setting.threads for each in result.loaders} == {1, 2}


def die_in_a_child(sample):
    if parent_process() is not None:
        os._exit(3)
    return sample


def test_errors_of_reading_and_of_loaders_arrive(numbers: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="n000007: map failed: ValueError: seven"):
        wdskit.bench(Pipeline().exact(numbers).map(fail_on_7).batched(4), **QUICK)
    with pytest.raises(PipelineError, match="a worker process died"):
        wdskit.bench(Pipeline().exact(numbers).map(die_in_a_child).batched(4), **QUICK)
    pattern = write_numbers(tmp_path / "cut", [5])
    index_folder(tmp_path / "cut", workers=1)
    path = tmp_path / "cut" / "s-000.tar"
    data = bytearray(path.read_bytes())
    data[148:156] = b"0000000\0"  # a wrong checksum
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"s-000\.tar, byte"):
        wdskit.bench(Pipeline().exact(pattern).batched(4), **QUICK)
    assert multiprocessing.active_children() == []
