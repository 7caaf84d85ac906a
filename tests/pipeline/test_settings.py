"""The settings of a loader: default numbers of workers and threads."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from shards import index_numbers, number_of

import wdskit
from wdskit import ConfigError, Pipeline, RankError, load_config
from wdskit.pipeline import settings
from wdskit.pipeline.settings import LoaderSpec, choose_workers
from wdskit.processes import usable_cores

EXACT = Pipeline().exact("a")
DECODES = EXACT.decode("rgb8").random_resized_crop(8).to_tuple("jpg", "cls").batched(4)
CALLING = [
    DECODES.map(number_of),
    DECODES.map("by_name"),
    EXACT.map(number_of).batched(2),
    EXACT.map(number_of, global_rng=True),
    EXACT.decode().map_dict(cls=number_of),
    DECODES.map_tuple(None, number_of),
    EXACT.decode("rgb8").batched(2, collate=number_of),
    Pipeline().exact(mixture=[{"shards": "a", "weight": 1, "stages": [{"map": "by_name"}]}]).batched(2),
]
LIGHT_CALLING = EXACT.decode().batched(2, collate=number_of)
PARTS = Pipeline().exact(mixture=[{"shards": "a", "weight": 1, "stages": [{"decode": "rgb8"}]}]).batched(2)
LIGHT = EXACT.decode().rename(a="b").to_tuple("a").batched(4).with_epoch(3)


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch):
    monkeypatch.setattr(settings, "usable_cores", lambda: 12)


@pytest.mark.parametrize(
    ("pipe", "said", "environ", "counts"),
    [
        (DECODES, {}, {}, (6, 2)),
        (DECODES, {}, {"LOCAL_WORLD_SIZE": "4"}, (1, 2)),
        (DECODES, {}, {"LOCAL_WORLD_SIZE": "2"}, (3, 2)),
        (DECODES, {}, {"LOCAL_WORLD_SIZE": "16"}, (1, 1)),
        (DECODES, {"workers": 1}, {}, (1, 8)),
        (DECODES, {"workers": 2}, {}, (2, 6)),
        (DECODES, {"workers": 1}, {"LOCAL_WORLD_SIZE": "4"}, (1, 3)),
        (DECODES, {"workers": 2}, {"LOCAL_WORLD_SIZE": "4"}, (2, 1)),
        (DECODES, {"workers": 1}, {"LOCAL_WORLD_SIZE": "16"}, (1, 1)),
        (DECODES, {"workers": 1}, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, (1, 6)),
        (DECODES, {"workers": 1}, {"SLURM_STEP_TASKS_PER_NODE": "2,3"}, (1, 8)),
        (DECODES, {"workers": 0}, {}, (0, 1)),
        (DECODES, {"threads": 5}, {}, (1, 5)),
        (DECODES, {"workers": 3, "threads": 5}, {}, (3, 5)),
        *((pipe, {}, {}, (12, 1)) for pipe in CALLING),
        *((pipe, {"workers": 2}, {}, (2, 1)) for pipe in CALLING),
        *((pipe, {"threads": 3}, {}, (1, 3)) for pipe in CALLING[:-1]),
        (CALLING[0], {"workers": 4, "threads": 2}, {}, (4, 2)),
        (CALLING[0], {"workers": 0}, {}, (0, 1)),
        (CALLING[0], {}, {"LOCAL_WORLD_SIZE": "4"}, (3, 1)),
        (CALLING[0], {}, {"LOCAL_WORLD_SIZE": "16"}, (1, 1)),
        (CALLING[0], {"ranks_per_node": 1}, {"LOCAL_WORLD_SIZE": "4"}, (3, 1)),  # the cores are divided all the same
        (LIGHT_CALLING, {}, {}, (1, 1)),
        (LIGHT, {}, {}, (1, 1)),
        (LIGHT, {"workers": 2}, {}, (2, 1)),
        (EXACT, {}, {}, (1, 1)),
        (PARTS, {"workers": 1}, {}, (1, 8)),
        (Pipeline().stream("a").decode("rgb8"), {}, {}, (1, 1)),
        (Pipeline().stream("a").map(number_of), {"workers": 2}, {}, (2, 1)),
        (Pipeline().stream("a").map(number_of), {"threads": 3}, {}, (1, 3)),
    ],
)
def test_workers_and_threads_share_the_machine(pipe, said, environ, counts):
    """With user functions there is one thread per process, because several threads would call them at the same time."""
    assert choose_workers(LoaderSpec(**said), pipe.stages, environ)[:2] == counts


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_large_machines_have_no_more_than_sixteen_at_work(monkeypatch, cores):
    monkeypatch.setattr(settings, "usable_cores", lambda: cores)
    for pipe, threads in ((CALLING[0], 1), (DECODES, 2)):
        counts = choose_workers(LoaderSpec(), pipe.stages, {})
        assert counts[:2] == (max(1, min(16, cores) // threads), min(cores, threads))


def test_the_chosen_workers_and_threads_are_logged(tmp_path, caplog):
    index_numbers(tmp_path, [9])
    pipe = Pipeline().exact(tmp_path).map(number_of).batched(2)
    with caplog.at_level("INFO"):
        pipe.loader(), pipe.loader(workers=1, threads=3), Pipeline().exact(tmp_path).batched(2).loader()
    reported = [line for line in caplog.messages if line.startswith("workers")]
    assert reported == ["workers: 12, threads: 1", "workers: 1, threads: 3", "workers: 1, threads: 1"]
    planned = [wdskit.plan(each) for each in (pipe, Pipeline().exact(tmp_path).decode("rgb8").batched(2))]
    assert [each.workers for each in planned] == [12, 6]


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000\n", 64), ("400000 100000\n", 4), ("50000 100000\n", 1), ("nonsense", 64), (None, 64)],
)
def test_a_containers_share_counts(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == cores


@pytest.mark.parametrize("whole", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_whole_numbers_of_numpy_and_torch_are_plain_ints(tmp_path, whole) -> None:
    index_numbers(tmp_path, [20, 23])

    def loader_of(number):
        source = {"seed": 3, "window": 9, "lanes": 4, "homes": 2}
        source = {name: number(value) for name, value in source.items()} | {"range": [number(2), number(40)]}
        pipe = Pipeline().exact(tmp_path, **source).batched(number(2)).with_epoch(number(12))
        settings = {"workers": 0, "threads": 2, "prefetch": 3, "ranks_per_node": 1, "world_size": 2}
        settings = {name: number(value) for name, value in settings.items()} | {"rank": number(0)}
        return pipe.loader(**settings, errors={"max_bad": number(1)})

    loader, plain = loader_of(whole), loader_of(int)
    for each, number in ((loader, whole), (plain, int)):
        each.set_epoch(number(4))
        each.sampler.set_epoch(number(5))
    assert loader.spec == plain.spec
    assert json.dumps(loader.state_dict()) == json.dumps(plain.state_dict())
    assert [batch["__key__"] for batch in loader] == [batch["__key__"] for batch in plain]
    assert repr(read_with(whole)) == repr(read_with(int))
    found = wdskit.plan(Pipeline().exact(tmp_path).batched(2), world_size=whole(2), epoch=whole(1))
    assert type(found.world_size) is int


def read_with(number) -> tuple[object, ...]:
    part = {"shards": "a", "weight": {number(0): number(3), number(8): 0.5}}
    stages = [{"exact": {"mixture": [part]}}, {"decode": "rgb8"}, {"resize": [number(8), number(9)]}]
    return load_config({"pipeline": [*stages, {"with_epoch": number(4)}]}).pipeline()


@pytest.mark.parametrize("value", [np.bool_(True), torch.tensor(True), np.float64(3), np.array([3]), torch.tensor([3])])
def test_what_is_no_whole_number_stays_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"seed"):
        Pipeline().exact("a.tar", seed=value)
    with pytest.raises(ConfigError, match=r"max_bad"):
        load_config({"pipeline": [{"stream": "a.tar"}], "errors": {"max_bad": value}})
    with pytest.raises(RankError, match=r"whole numbers"):
        Pipeline().stream("a.tar").loader(rank=value, world_size=value)
