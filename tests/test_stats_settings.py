"""`loader: {stats: ...}`: how it is written, what is refused, and what a loader then tells."""

from __future__ import annotations

import gc
import json
import logging
import urllib.request
import weakref

import pytest
from shards import number_of, write_numbers

from tests.config.test_export import SCHEMA, fits
from wdskit import ConfigError, Pipeline, PipelineError, load_config, make_loader
from wdskit.files import Disk
from wdskit.loader import reports
from wdskit.loader.reports import path_of
from wdskit.loader.serving import ports
from wdskit.pipeline.stats_spec import StatsSpec

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
    ({"file": ""}, "stats.file: it is empty text."),
    ({"file": 5}, "stats.file: it is 5; text is needed. Put it in quotes."),
    ({"port": 65536}, "stats.port: 65536 is too large; it must be at most 65535."),
    ({"port": -1}, "stats.port: -1 is too small; it must be at least 0."),
    ({"port": "http"}, "stats.port: `http` is text; a whole number is needed."),
    ({"host": "0.0.0.0"}, "stats: `host` does nothing without a port. Add `port: 9400`, or remove it."),
]  # fmt: skip


def config(stats: object) -> dict[str, object]:
    return {"version": 1, "pipeline": [{"stream": "a.tar"}], "loader": {"stats": stats}}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """Shards of 40 samples in all."""
    return write_numbers(tmp_path_factory.mktemp("numbers"), [20, 20])


def loader_of(numbers: str, **settings):
    return Pipeline().stream(numbers, seed=1).map(number_of).batched(4).loader(workers=0, **settings)


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
def test_slips_are_told_in_plain_english(written, message):
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


def test_arguments_overrule_the_file(numbers):
    told = {"pipeline": [{"stream": numbers}], "loader": {"workers": 0, "stats": {"every": 5, "file": "never.jsonl"}}}
    assert make_loader(told, stats=7).spec.stats == StatsSpec(every=7)


def test_a_line_of_the_log_every_so_many_steps(numbers, caplog):
    caplog.set_level(logging.INFO, logger="wdskit.loader.reports")
    loader = loader_of(numbers, stats=4)
    for _ in range(2):
        assert len(list(loader)) == 10
    lines = [record.message for record in caplog.records if record.name == "wdskit.loader.reports"]
    assert [line.partition(" steps")[0] for line in lines] == [
        "pipeline: epoch 0, 4", "pipeline: epoch 0, 4", "pipeline: epoch 1, 4", "pipeline: epoch 1, 4",
        "pipeline: epoch 1, 4",
    ]  # fmt: skip
    assert all(" samples/s, " in line and ", waited " in line for line in lines)


def test_a_file_of_lines_for_each_rank(numbers, tmp_path):
    for rank in range(2):
        pipe = Pipeline().stream(numbers, seed=1).split_by_node().batched(4).with_epoch(6)
        stats = {"every": 3, "file": str(tmp_path / "new" / "stats.jsonl")}
        for _ in pipe.loader(workers=0, rank=rank, world_size=2, stats=stats):
            pass
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "stats-rank00000.jsonl",
        "stats-rank00001.jsonl",
    ]
    for rank in range(2):
        lines = (tmp_path / "new" / f"stats-rank{rank:05d}.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert [(each["rank"], each["steps"], each["samples"]) for each in found] == [(rank, 3, 12)] * 2
        assert all(each["time"] > 1.7e9 for each in found)


@pytest.mark.parametrize(
    ("file", "name"),
    [("stats.jsonl", "stats-rank00003.jsonl"), ("a/b.c.jsonl", "a/b.c-rank00003.jsonl"), ("x", "x-rank00003")],
)
def test_names_of_files(file, name):
    assert str(path_of(file, 3)) == name


def test_a_file_that_cannot_be_written_is_an_error_at_once(numbers, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PipelineError, match=r"stats: .*file/stats-rank00000\.jsonl cannot be written: "):
        loader_of(numbers, stats={"file": str(tmp_path / "file" / "stats.jsonl")})


def test_a_disk_that_fills_up_later_ends_the_file_and_not_the_training(numbers, tmp_path, monkeypatch, caplog):
    loader = loader_of(numbers, stats={"every": 2, "file": str(tmp_path / "stats.jsonl")})
    asked = []

    class Full(Disk):
        def write(self, fd, data):
            asked.append(data)
            raise OSError(28, "No space left on device")

    append_lines = reports.append_lines
    monkeypatch.setattr(reports, "append_lines", lambda path, lines: append_lines(path, lines, disk=Full()))
    assert len(list(loader)) == 10
    assert len(asked) == 1
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "cannot be written any more: [Errno 28] No space left on device" in warnings[0]


def test_a_port_of_its_own_for_each_rank_and_none_above_the_last(numbers):
    with pytest.raises(PipelineError, match="stats: rank 1 would listen at port 65536"):
        Pipeline().stream(numbers).split_by_node().with_epoch(2).loader(
            workers=0, rank=1, world_size=2, stats={"port": 65535}
        )
    assert not ports()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_port_goes_with_the_loader(numbers, workers):
    """While its processes run and when they have ended, forked with the socket open."""
    pipe = Pipeline().stream(numbers, seed=1).split_by_worker().map(number_of).batched(4)
    loader = pipe.loader(workers=workers, stats={"every": 5, "port": 0})
    assert len(list(loader)) == 10
    (port,) = ports()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert text == loader.prometheus_text()
    assert 'wdskit_samples_total{loader="pipeline",rank="0"} 40\n' in text
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert not ports()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


def test_loaders_of_one_configuration_share_the_port(numbers):
    stages = [{"stream": numbers}, {"batched": 4}]
    told = {"pipelines": {"train": stages, "val": stages}, "loader": {"workers": 0, "stats": {"port": 0}}}
    train, val = (make_loader(told, pipeline=name) for name in ("train", "val"))
    list(val)
    (port,) = ports()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert 'wdskit_samples_total{loader="train",rank="0"} 0\n' in text
    assert 'wdskit_samples_total{loader="val",rank="0"} 40\n' in text
    assert train.stats().loader == "train"
