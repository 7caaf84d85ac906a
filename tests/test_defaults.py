"""How many workers and threads there are where nobody says: what the machine has for this rank, and none that wait."""

from __future__ import annotations

import os

import pytest
from shards import number_of, write_numbers

import wdskit
from wdskit import Pipeline
from wdskit.pipeline import settings
from wdskit.pipeline.settings import LoaderSpec, choose_workers, usable_cores
from wdskit.shards.index import index_folder

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
    ("pipe", "said", "environ", "crew"),
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
        (DECODES, {"workers": 1}, {"SLURM_NTASKS_PER_NODE": "2"}, (1, 6)),
        (DECODES, {"workers": 1}, {"SLURM_NTASKS_PER_NODE": "2(x3)"}, (1, 8)),
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
def test_workers_and_threads_share_the_machine(pipe, said, environ, crew):
    """And where functions of the user's are called, one thread a process: several would call them at the same time."""
    assert choose_workers(LoaderSpec(**said), pipe.stages, environ)[:2] == crew


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_large_machines_have_no_more_than_sixteen_at_work(monkeypatch, cores):
    monkeypatch.setattr(settings, "usable_cores", lambda: cores)
    for pipe, threads in ((CALLING[0], 1), (DECODES, 2)):
        crew = choose_workers(LoaderSpec(), pipe.stages, {})
        assert crew[:2] == (max(1, min(16, cores) // threads), min(cores, threads))


def test_a_pipeline_with_functions_of_the_users_says_why_it_has_one_thread(tmp_path, caplog):
    write_numbers(tmp_path, [9])
    index_folder(tmp_path)
    pipe = Pipeline().exact(tmp_path).map(number_of).batched(2)
    with caplog.at_level("INFO"):
        pipe.loader(), pipe.loader(workers=1, threads=3), Pipeline().exact(tmp_path).batched(2).loader()
    told = [line for line in caplog.messages if line.startswith("workers")]
    others = ["workers: 1, threads: 3", "workers: 1, threads: 1"]
    assert told == [f"workers: 12, threads: 1 ({settings.ONE_THREAD})", *others]
    planned = [wdskit.plan(each) for each in (pipe, Pipeline().exact(tmp_path).decode("rgb8").batched(2))]
    assert [(each.workers, each.threads_reason) for each in planned] == [(12, settings.ONE_THREAD), (6, "")]


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000\n", 64), ("400000 100000\n", 4), ("50000 100000\n", 1), ("nonsense", 64), (None, 64)],
)
def test_a_containers_share_counts(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_a_loader_has_them_unless_it_is_told(tmp_path):
    write_numbers(tmp_path, [9])
    index_folder(tmp_path)
    pipe = Pipeline().exact(tmp_path).map(number_of).batched(2)
    assert pipe.loader().pipeline.run.num_threads == 1
    assert pipe.loader().spec.workers == 12
    assert pipe.loader(workers=1).pipeline.run.num_threads == 1
    assert pipe.loader(workers=1, threads=3).pipeline.run.num_threads == 3
    assert pipe.loader(workers=0).pipeline.run.num_threads == 1
