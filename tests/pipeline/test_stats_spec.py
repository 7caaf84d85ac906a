"""`loader: {stats: ...}`: how it is written, and what is refused."""

from __future__ import annotations

import pytest
from shards import write_numbers

from tests.config.test_export import SCHEMA, fits
from wdskit import ConfigError, load_config, make_loader
from wdskit.pipeline.settings import StatsSpec

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
