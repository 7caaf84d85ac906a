"""How a pipeline is run: workers and threads where none are set, and `loader: {stats: ...}`."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from shards import number_of, write_numbers

import wdskit
from tests.config.test_export import SCHEMA, fits
from wdskit import ConfigError, FolderIndexError, Pipeline, RankError, load_config, make_loader
from wdskit.pipeline import settings
from wdskit.pipeline.settings import LoaderSpec, StatsSpec, choose_workers
from wdskit.processes import usable_cores
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
def test_workers_and_threads_share_the_machine(pipe, said, environ, counts):
    """And where functions of the user's are called, one thread a process: several would call them at the same time."""
    assert choose_workers(LoaderSpec(**said), pipe.stages, environ)[:2] == counts


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
def test_large_machines_have_no_more_than_sixteen_at_work(monkeypatch, cores):
    monkeypatch.setattr(settings, "usable_cores", lambda: cores)
    for pipe, threads in ((CALLING[0], 1), (DECODES, 2)):
        counts = choose_workers(LoaderSpec(), pipe.stages, {})
        assert counts[:2] == (max(1, min(16, cores) // threads), min(cores, threads))


def test_a_pipeline_with_functions_of_the_users_says_why_it_has_one_thread(tmp_path, caplog):
    write_numbers(tmp_path, [9])
    index_folder(tmp_path)
    pipe = Pipeline().exact(tmp_path).map(number_of).batched(2)
    with caplog.at_level("INFO"):
        pipe.loader(), pipe.loader(workers=1, threads=3), Pipeline().exact(tmp_path).batched(2).loader()
    reported = [line for line in caplog.messages if line.startswith("workers")]
    others = ["workers: 1, threads: 3", "workers: 1, threads: 1"]
    assert reported == [f"workers: 12, threads: 1 ({settings.ONE_THREAD})", *others]
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


def test_a_loader_has_them_unless_it_is_told(tmp_path):
    write_numbers(tmp_path, [9])
    index_folder(tmp_path)
    pipe = Pipeline().exact(tmp_path).map(number_of).batched(2)
    assert pipe.loader().pipeline.run.num_threads == 1
    assert pipe.loader().spec.workers == 12
    assert pipe.loader(workers=1).pipeline.run.num_threads == 1
    assert pipe.loader(workers=1, threads=3).pipeline.run.num_threads == 3
    assert pipe.loader(workers=0).pipeline.run.num_threads == 1


FORMS = [
    (None, None),
    (50, StatsSpec(every=50)),
    ({}, StatsSpec()),
    ({"every": 50}, StatsSpec(every=50)),
    ({"file": "stats.jsonl"}, StatsSpec(every=100, file="stats.jsonl")),
    ({"port": 9400}, StatsSpec(port=9400)),
    ({"every": 1, "file": "a", "port": 0, "host": "0.0.0.0"}, StatsSpec(every=1, file="a", port=0, host="0.0.0.0")),
]
SLIPS = [
    (0, "stats.every: 0 is too small; it must be at least 1."),
    ("100", "stats: `100` is text; a number of steps is needed, or a mapping, as in {every: 100, port: 9400}. Remove"),
    (True, "stats: true is a truth value; a number of steps is needed, or a mapping, as in {every: 100, port: 9400}."),
    ([5], "stats: [5] is a list; a number of steps is needed, or a mapping, as in {every: 100, port: 9400}."),
    (1.5, "stats: 1.5 is a decimal number; a number of steps is needed"),
    ({"every": 0}, "stats.every: 0 is too small; it must be at least 1."),
    ({"every": "often"}, "stats.every: `often` is text; a whole number is needed."),
    ({"evry": 5}, "stats.evry: no such setting. Did you mean `every`?"),
    ({"size": 5}, "stats.size: no such setting. `stats` has `every`, `file`, `port` and `host`."),
    ({"file": ""}, "stats.file: the text is empty."),
    ({"file": 5}, "stats.file: it is 5; text is needed. Put it in quotes."),
    ({"port": 65536}, "stats.port: 65536 is too large; it must be at most 65535."),
    ({"port": -1}, "stats.port: -1 is too small; it must be at least 0."),
    ({"port": "http"}, "stats.port: `http` is text; a whole number is needed."),
    ({"host": "0.0.0.0"}, "stats: `host` does nothing without a port. Add `port: 9400`, or remove it."),
]  # fmt: skip


def config(stats: object) -> dict[str, object]:
    return {"version": 1, "pipeline": [{"stream": "a.tar"}], "loader": {"stats": stats}}


@pytest.mark.parametrize(("written", "spec"), FORMS, ids=repr)
def test_forms(written, spec):
    """Each gives the same in a configuration, and back through YAML; and an editor takes it."""
    read = load_config(config(written))
    assert read.loader.stats == spec
    assert fits(config(written), SCHEMA)


@pytest.mark.parametrize(("written", "spec"), FORMS, ids=repr)
def test_what_is_written_back_reads_the_same(written, spec, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(load_config(config(written)).to_yaml())
    assert load_config(path).loader.stats == spec


@pytest.mark.parametrize(("written", "message"), SLIPS, ids=repr)
def test_slips_are_refused_in_plain_english(written, message):
    with pytest.raises(ConfigError) as caught:
        load_config(config(written))
    assert f"loader.{message}" in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "written", [slip for slip, _ in SLIPS[:-1] if slip not in ({"file": ""}, {"every": "often"})], ids=repr
)
def test_slips_do_not_fit_the_schema(written):
    assert not fits(config(written), SCHEMA)


def test_a_variable_may_stand_for_a_number(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("version: 1\npipeline:\n  - stream: a.tar\nloader:\n  stats:\n    port: ${PORT_OF_STATS:-9401}\n")
    assert load_config(path).loader.stats == StatsSpec(port=9401)
    assert fits(config({"port": "${PORT_OF_STATS:-9401}"}), SCHEMA)


@pytest.mark.parametrize("before", [{}, {"loader": None}, {"loader": {}}, {"loader": {"stats": None}}])
def test_overrides_reach_it_where_nothing_is_written(before):
    read = load_config(config(None) | before, overrides=["loader.stats.port=9400", "loader.stats.every=7"])
    assert read.loader.stats == StatsSpec(every=7, port=9400)


def test_overrides_write_a_bare_number_out():
    assert load_config(config(50), overrides=["loader.stats.port=9400"]).loader.stats == StatsSpec(every=50, port=9400)
    assert load_config(config(50), overrides=["loader.stats=8"]).loader.stats == StatsSpec(every=8)
    assert load_config(config(50), overrides=["loader.stats=null"]).loader.stats is None
    with pytest.raises(ConfigError, match=r"there is no `stat` in loader\. Did you mean `stats`"):
        load_config(config(50), overrides=["loader.stat.port=9400"])


def test_arguments_overrule_the_file(tmp_path):
    numbers = write_numbers(tmp_path, [4])
    written = {
        "pipeline": [{"stream": numbers}],
        "loader": {"workers": 0, "stats": {"every": 5, "file": "never.jsonl"}},
    }
    assert make_loader(written, stats=7).spec.stats == StatsSpec(every=7)


@pytest.mark.parametrize(
    "values",
    [{"mean": [123.0], "std": [0.5]}, {"mean": [-0.1], "std": [1]}, {"mean": [0.5], "std": [58.4]}],
)
def test_normalize_takes_numbers_of_pixels_in_0_to_1(values) -> None:
    with pytest.raises(ConfigError, match=r"is not within 0\.\.1, as the pixels are"):
        load_config({"pipeline": [{"stream": "a.tar"}, {"decode": "rgb8"}, {"normalize": values}]})


@pytest.mark.parametrize("source", ["exact", "sequential", "resampled"])
def test_a_range_beyond_the_samples_is_refused(tmp_path, source) -> None:
    write_numbers(tmp_path, [20, 23])
    index_folder(tmp_path, workers=1)

    def make(bounds):
        pipe = {"pipeline": [{source: {"shards": str(tmp_path), "range": bounds}}]}
        return make_loader(pipe, workers=0)

    for bounds in ([5, 44], [100, 1_000_000]):
        message = rf"`range` ends at sample {bounds[1]}, but there are 43 samples"
        with pytest.raises(FolderIndexError, match=message):
            make(bounds)
    assert len(make([5, 43])) == len(make([5, "100%"])) == 38


def test_ranks_per_node_shares_the_cores_where_workers_are_chosen(monkeypatch):
    monkeypatch.setattr("wdskit.pipeline.settings.usable_cores", lambda: 64)
    stages = Pipeline().exact("a.tar").decode("rgb8").stages
    alone = choose_workers(LoaderSpec(), stages, {})
    shared = choose_workers(LoaderSpec(ranks_per_node=8), stages, {})
    assert alone.workers * alone.threads == 16
    assert shared.workers * shared.threads == 8


@pytest.mark.parametrize("whole", [np.int64, np.uint8, torch.tensor], ids=["int64", "uint8", "tensor"])
def test_whole_numbers_of_numpy_and_torch_are_plain_ints(tmp_path, whole) -> None:
    write_numbers(tmp_path, [20, 23])
    index_folder(tmp_path, workers=1)

    def loader_of(number):
        source = {"seed": 3, "window": 9, "lanes": 4, "homes": 2}
        source = {name: number(value) for name, value in source.items()} | {"range": [number(2), number(40)]}
        pipe = Pipeline().exact(tmp_path, **source).batched(number(2)).with_epoch(number(12))
        settings = {"workers": 0, "threads": 2, "prefetch": 3, "ranks_per_node": 1, "stats": 7, "world_size": 2}
        settings = {name: number(value) for name, value in settings.items()} | {"rank": number(0)}
        return pipe.loader(**settings, errors={"max_bad": number(1)})

    loader, plain = loader_of(whole), loader_of(int)
    for each, number in ((loader, whole), (plain, int)):
        each.set_epoch(number(4))
        each.sampler.set_epoch(number(5))
    assert loader.spec == plain.spec
    assert json.dumps(loader.state_dict()) == json.dumps(plain.state_dict())
    assert [batch["__key__"] for batch in loader] == [batch["__key__"] for batch in plain]
    assert written_with(whole) == written_with(int)
    found = wdskit.plan(Pipeline().exact(tmp_path).batched(2), world_size=whole(2), epoch=whole(1), workers=whole(1))
    assert type(found.world_size) is int


def written_with(number) -> str:
    part = {"shards": "a", "weight": {number(0): number(3), number(8): 0.5}}
    stages = [{"exact": {"mixture": [part]}}, {"decode": "rgb8"}, {"resize": [number(8), number(9)]}]
    return load_config({"pipeline": [*stages, {"with_epoch": number(4)}]}).to_yaml()


@pytest.mark.parametrize("value", [np.bool_(True), torch.tensor(True), np.float64(3), np.array([3]), torch.tensor([3])])
def test_what_is_no_whole_number_stays_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"seed"):
        Pipeline().exact("a.tar", seed=value)
    with pytest.raises(ConfigError, match=r"max_bad"):
        load_config({"pipeline": [{"stream": "a.tar"}], "errors": {"max_bad": value}})
    with pytest.raises(RankError, match=r"whole numbers"):
        Pipeline().stream("a.tar").loader(rank=value, world_size=value)
