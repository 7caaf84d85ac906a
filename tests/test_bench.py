"""`wdskit.bench`: what is measured is what it says, and nothing is left behind. Times are not compared."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import shutil
import threading
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leaks import open_things
from shards import draw, fail_on_7, key_of, write_numbers, write_pictures

import wdskit
from wdskit import Pipeline, PipelineError, SampleError, ShardError, StorageError, processes
from wdskit.loader import bench_run, bench_subject
from wdskit.loader.bench_loops import TrainingStep, Watch, busy_python, make_free, ready_item
from wdskit.loader.bench_parts import Parts
from wdskit.loader.bench_types import BenchResult, Setting
from wdskit.pipeline.settings import load_config
from wdskit.shards.index import index_folder

QUICK: dict[str, Any] = {"seconds": 0.01, "repeats": 1, "workers": [0, 1], "threads": [1]}


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with two CPUs, so that two processes decode."""
    for module in (bench_run, bench_subject):
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
    told: list[tuple[str, int, int]] = []
    config = config_of(pictures, workers=1, threads=1, prefetch=3)
    result = wdskit.bench(config, **QUICK | {"repeats": 2}, progress=lambda *each: told.append(each))
    json.dumps(dataclasses.asdict(result))
    assert (result.source, result.num_shards, result.batch, result.num_cpus, result.repeats) == ("exact", 2, 4, 2, 2)
    with wdskit.LocalShard(str(pictures / "p-000.tar")) as one, wdskit.LocalShard(str(pictures / "p-001.tar")) as two:
        sizes = [sum(map(len, shard[at].values())) for shard in (one, two) for at in range(len(shard))]
    assert min(sizes) <= result.sample_bytes <= max(sizes)
    pairs = [(1, 1), (1, 2), (2, 1)]
    assert [(part.what, part.processes, part.threads) for part in result.parts] == [
        (what, *pair) for what in ("read", "decode") for pair in pairs
    ]
    decoding = [part.samples_per_s for part in result.parts if part.what == "decode"]
    assert result.limit == max(decoding, key=lambda rate: rate.median)
    assert [each.setting for each in result.loaders] == [(0, 1), (1, 1)]
    for each in result.loaders:
        for measured in (each.alone, each.cpu_ms, each.first_batch_s, each.beside_python, each.headspace):
            assert measured is not None
            assert 0 < measured.least <= measured.median <= measured.most
        assert each.beside_training is not None
        assert each.limit_ratio.least <= each.alone.most / result.limit.least
        assert each.limit_ratio.most >= each.alone.least / result.limit.most
    chosen = next(each for each in result.loaders if each.setting == result.advice.setting)
    assert result.advice.limit_ratio == chosen.limit_ratio.median
    assert result.training_step_s is not None
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert told[-1] == ("done", told[-1][2], 2 * (6 + 2 * 2))


def test_the_advice_is_yaml_that_keeps_what_the_configuration_says(pictures: Path, tmp_path: Path) -> None:
    config = config_of(pictures, workers=3, threads=1, prefetch=7, start_method="fork")
    result = wdskit.bench(config, **QUICK | {"workers": [1], "threads": [2]}, alone=True)
    assert result.advice.setting == Setting(1, 2)
    assert result.configured == Setting(3, 1)
    assert result.advice.yaml == "loader: {workers: 1, threads: 2, prefetch: 7, start_method: fork}"
    (tmp_path / "a.yaml").write_text(f"version: 1\npipeline: [exact: x]\n{result.advice.yaml}\n")
    assert load_config(tmp_path / "a.yaml").loader.threads == 2


def test_alone_leaves_out_what_keeps_the_process_busy(numbers: str) -> None:
    result = wdskit.bench(Pipeline().exact(numbers).decode().batched(3), **QUICK, alone=True)
    assert result.training_step_s is result.configured is None
    assert [(each.beside_python, each.beside_training) for each in result.loaders] == [(None, None)] * 2


def first_two(samples):
    return samples[:2]


PIPELINES = {
    "without batches": lambda x: Pipeline().exact(x).decode(),
    "padded": lambda x: Pipeline().sequential(x).decode().batched(4),
    "padded, without batches": lambda x: Pipeline().sequential(x).decode(),
    "resampled, with an epoch": lambda x: Pipeline().resampled(x).decode().batched(4).with_epoch(2),
    "a collate of the user's, and a map behind": lambda x: (
        Pipeline().exact(x).decode().batched(4, collate=first_two).map(len)
    ),
    "random numbers": lambda x: Pipeline().exact(x).map(draw).batched(4),
    "a mixture": lambda x: (
        Pipeline()
        .exact(mixture=[{"shards": x, "weight": 1}, {"shards": x, "weight": 2, "stages": ["decode"]}])
        .map(key_of)
        .batched(4)
        .with_epoch(3)
    ),
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_every_kind_of_planned_pipeline_is_measured_beyond_its_epoch(make: Any, numbers: str) -> None:
    result = wdskit.bench(make(numbers), **QUICK, alone=True)
    assert [each.setting for each in result.loaders] == [(0, 1), (1, 1)]
    assert all(each.headspace.median > 0 for each in result.loaders)


def test_nothing_is_left_behind_and_nothing_is_written(tmp_path: Path) -> None:
    write_numbers(tmp_path / "data", [10])
    index_folder(tmp_path / "data", workers=1)
    config = {
        "version": 1,
        "pipeline": [{"exact": str(tmp_path / "data")}, {"map": "fail_on_7"}, {"batched": 4}],
        "errors": {"max_bad": 1, "transforms": True, "dir": str(tmp_path / "bad")},
    }
    torch.ones(300, 300) @ torch.ones(300, 300)  # torch keeps its own threads
    gc.collect()
    before = open_things()
    files = sorted(tmp_path.rglob("*"))
    wdskit.bench(config, transforms={"fail_on_7": fail_on_7}, **QUICK)
    gc.collect()  # errors that were forgiven
    assert open_things() == before
    assert sorted(tmp_path.rglob("*")) == files


def test_a_stream_is_refused_with_the_way_out(numbers: str) -> None:
    with pytest.raises(PipelineError, match=r"a stream cannot be read and decoded apart.*\n.*wdskit index"):
        wdskit.bench(Pipeline().stream(numbers).decode().batched(4))


def test_what_could_not_be_trained_on_is_not_measured_either(numbers: str) -> None:
    with pytest.raises(PipelineError, match="10 samples cannot fill one batch of 64"):
        wdskit.bench(Pipeline().exact(numbers).batched(64), **QUICK)
    with pytest.raises(PipelineError, match="does not divide into 3 ranks"):
        wdskit.bench(Pipeline().exact(numbers).batched(global_size=4), world_size=3, **QUICK)


def test_one_rank_of_several_is_measured_only_when_asked_for(numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks would measure at the same time."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipe = Pipeline().exact(numbers).batched(global_size=6)
    with pytest.raises(PipelineError, match=r"bench measures one rank, and here are 2.*\n.*world_size=2"):
        wdskit.bench(pipe, **QUICK)
    result = wdskit.bench(pipe, **QUICK, world_size=2, alone=True)
    assert (result.world_size, result.batch) == (2, 3)


def test_functions_of_the_users_are_measured_in_one_thread_a_process_unless_threads_are_asked_for(numbers: str) -> None:
    """Several threads would call them at the same time, in the loaders and in what decodes without one."""
    pipe = Pipeline().exact(numbers).map(key_of).batched(4)
    result = wdskit.bench(pipe, seconds=0.01, repeats=1, alone=True)
    assert [each.setting for each in result.loaders] == [(0, 1), (1, 1), (2, 1)]
    assert {each.threads for each in result.parts if each.what == "decode"} == {1}
    assert "functions of yours run in one thread a process" in result.advice.warnings[0]
    result = wdskit.bench(pipe, **QUICK | {"threads": [1, 2]})
    assert {each.setting.threads for each in result.loaders} == {1, 2}
    assert not any("functions of yours" in warning for warning in result.advice.warnings)


def test_a_setting_that_cannot_run_is_an_error_if_asked_for_and_left_out_if_not(numbers: str) -> None:
    pipe = Pipeline().exact(numbers).map(key_of, global_rng=True).batched(4)
    with pytest.raises(PipelineError, match="2 threads share"):
        wdskit.bench(pipe, **QUICK | {"threads": [1, 2]})
    stages = [{"exact": numbers}, {"map": {"fn": "f", "global_rng": True}}, {"batched": 4}]
    threaded = {"version": 1, "pipeline": stages, "loader": {"threads": 2}}
    result = wdskit.bench(threaded, transforms={"f": key_of}, seconds=0.01, repeats=1, alone=True)
    assert [each.setting for each in result.loaders] == [(0, 1), (1, 1), (2, 1)]
    assert [each.setting for each in result.refused] == [(0, 2), (1, 2)]
    assert all("global_rng" in each.reason for each in result.refused)
    with pytest.raises(PipelineError, match="cannot reach workers under 'spawn'"):
        wdskit.bench(
            {
                "version": 1,
                "pipeline": [{"exact": numbers}, {"map": "f"}, {"batched": 4}],
                "loader": {"start_method": "spawn"},
            },
            transforms={"f": lambda sample: sample},
            **QUICK,
        )


def die_in_a_child(sample):
    if parent_process() is not None:
        os._exit(3)
    return sample


def test_errors_of_the_processes_that_measure_arrive(numbers: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="n000007: map failed: ValueError: seven"):
        wdskit.bench(Pipeline().exact(numbers).map(fail_on_7).batched(4), **QUICK)
    with pytest.raises(PipelineError, match="a process that measured died"):
        wdskit.bench(Pipeline().exact(numbers).map(die_in_a_child).batched(4), **QUICK)
    pattern = write_numbers(tmp_path / "cut", [5])
    index_folder(tmp_path / "cut", workers=1)
    path = tmp_path / "cut" / "s-000.tar"
    data = bytearray(path.read_bytes())
    data[148:156] = b"0000000\0"  # a checksum
    path.write_bytes(data)
    with pytest.raises(ShardError, match=r"s-000\.tar, byte"):
        wdskit.bench(Pipeline().exact(pattern).batched(4), **QUICK)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": []},
        {"workers": 2},
        {"workers": "2"},
        {"workers": [-1]},
        {"workers": [True]},
        {"threads": [0]},
        {"threads": [1.0]},
        {"repeats": 0},
        {"repeats": 1.5},
        {"world_size": 0},
        {"seconds": 0},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_by_name(wrong: dict[str, Any], numbers: str) -> None:
    with pytest.raises(PipelineError, match=rf"^bench\({next(iter(wrong))}="):
        wdskit.bench(Pipeline().exact(numbers), **wrong)


def endless_pipeline(pattern: str) -> Any:
    return Pipeline().exact(pattern).decode().batched(4).with_epoch(10**9)


def test_reading_reads_and_decoding_does_not(tmp_path: Path) -> None:
    pattern = write_numbers(tmp_path / "data", [10])
    index_folder(tmp_path / "data", workers=1)
    pipeline = endless_pipeline(pattern).build()
    with Parts(pipeline, 2, "fork") as parts:
        os.truncate(tmp_path / "data" / "s-000.tar", 0)  # of a file that is gone, what is open could still be read
        done = parts.run("decode", processes=2, threads=2, seconds=0.01)
        assert done.num_samples % 4 == 0
        assert done.num_samples >= 2 * 2 * 4
        assert done.cpu_s > 0
        with pytest.raises(wdskit.WdskitError, match=r"s-000\.tar"):
            parts.run("read", processes=1, threads=1, seconds=0.01)


def test_what_is_decoded_goes_on_where_the_last_run_ended(numbers: str) -> None:
    pipeline = endless_pipeline(numbers).build()
    with Parts(pipeline, 1, "fork") as parts:
        steps = [parts.run("read", processes=1, threads=2, seconds=0.005).step for _ in range(3)]
    assert 0 < steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_free_batches_are_like_the_real_ones_and_read_nothing(workers: int, tmp_path: Path) -> None:
    write_pictures(tmp_path / "data", [9])
    index_folder(tmp_path / "data", workers=1)
    pipe = Pipeline().sequential(str(tmp_path / "data")).decode("rgb8").center_crop(8).to_tuple("jpg;png", "cls", "txt")
    pipe = pipe.batched(4)
    real = next(iter(pipe.loader(workers=0)))
    loader: Any = pipe.loader(workers=workers)
    item = ready_item(pipe.build())
    shutil.rmtree(tmp_path / "data")
    make_free(loader, item)
    free = next(iter(loader))
    assert [type(each) for each in free] == [type(each) for each in real]
    for one, other in zip(free, real, strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    assert free[2] == real[2]


def test_a_rate_counts_samples_in_whole_rounds_of_the_workers(numbers: str) -> None:
    """Batches of several workers come in bursts."""
    loader: Any = endless_pipeline(numbers).loader(workers=2)
    watch = Watch(loader, 0.01)
    watch.first()
    watch._ahead = 0
    taken: list[int] = []
    rate, cpu_ms = watch.rate(step=lambda: taken.append(1))
    watch.close()
    assert rate > 0
    assert cpu_ms is not None
    assert len(taken) >= 2
    assert len(taken) % 2 == 0


def test_the_busy_thread_is_busy_and_ends() -> None:
    num_threads = threading.active_count()
    start = time.thread_time(), time.process_time()
    with busy_python():
        assert threading.active_count() == num_threads + 1
        while time.process_time() - start[1] < 0.05:
            time.thread_time()
    assert threading.active_count() == num_threads


def test_a_training_step_leaves_torchs_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    step = TrainingStep(0.001)
    assert step.seconds > 0
    assert torch.get_num_threads() == before


def test_cpu_time_of_the_tree_counts_children_that_run() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def burn() -> None:
        while time.process_time() < 0.2:
            np.arange(1000).sum()
        there.send("done")
        there.recv()

    before = processes.cpu_s_of_tree()
    process = context.Process(target=burn)
    process.start()
    here.recv()
    after = processes.cpu_s_of_tree()
    here.send("end")
    process.join()
    assert before is not None
    assert after is not None
    assert after - before >= 0.15


def test_a_picture_is_drawn(numbers: str, tmp_path: Path) -> None:
    result = wdskit.bench(Pipeline().exact(numbers).decode().batched(4), **QUICK, alone=True, plot=tmp_path / "a.png")
    assert isinstance(result, BenchResult)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(PipelineError, match=r"a\.gif: a picture is drawn as"):
        wdskit.bench(Pipeline().exact(numbers), plot=tmp_path / "a.gif")
    with pytest.raises(StorageError, match=r"none/a\.png: the picture cannot be written: No such file"):
        wdskit.bench(Pipeline().exact(str(tmp_path / "none")), plot=tmp_path / "none" / "a.png")  # before any is read
