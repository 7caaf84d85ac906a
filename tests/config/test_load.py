"""Configurations from files and dicts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import TEXT, load
from wdskit.errors import ConfigError, StorageError
from wdskit.limits import MAX_CONFIG_BYTES
from wdskit.pipeline.settings import Config, LoaderSpec, load_config
from wdskit.stages.registry import STAGES, parse_stage


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


def message(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)
    return str(caught.value)


def test_a_file_becomes_a_config(config_file: Path) -> None:
    """Pipelines and stages keep their order in the file, and defaults are filled in."""
    config = load_config(config_file)
    assert list(config.pipelines) == ["train", "val"]
    names = [stage.name for stage in config.pipeline("train")]
    assert names == ["stream", "split_by_node", "shuffle", "map", "map", "random_flip", "to_tuple", "batched"]
    assert config.pipeline("val") == (parse_stage("stream", {"shards": ["b.tar"], "seed": 5}),)
    assert config.loader == LoaderSpec()
    assert config.origin == str(config_file)
    assert load_config(str(config_file)) == config


def test_which_pipeline() -> None:
    """A single pipeline needs no name; for several, the error lists the names."""
    one = load_config({"pipeline": [{"stream": "a.tar"}]})
    assert one.pipeline() == one.pipeline("pipeline") == (parse_stage("stream", "a.tar"),)
    two = load_config({"pipelines": {"train": [{"stream": "a.tar"}], "val": [{"stream": "b.tar"}]}})
    with pytest.raises(ConfigError, match=r"2 pipelines; say which \(`--pipeline` or `pipeline=`\): `train` and `val`"):
        two.pipeline()
    with pytest.raises(ConfigError, match=r"no pipeline `vall`\. Did you mean `val`"):
        two.pipeline("vall")


def test_a_dict_may_hold_functions_stages_and_specs(config_file: Path) -> None:
    """The dict is not changed, and foreign stages are kept."""

    def stage(source):
        return source

    spec = parse_stage("shuffle", 5)
    source = {"pipeline": [{"stream": ("a.tar",)}, "split_by_node", stage, spec, {"map": len}], "loader": {}}
    before = copy.deepcopy(source)
    stages = load_config(source, overrides=["pipeline.stream.seed=3"]).pipeline()
    assert source == before
    assert (stages[0].shards, stages[0].seed, stages[4].fn) == (("a.tar",), 3, len)
    assert stages[2:4] == (stage, spec)


def test_problems_of_a_dict_say_where() -> None:
    """A dict has no lines, so the message gives only the path."""
    said = message({"pipeline": [{"stream": {"shards": "a", "seed": True}}]})
    assert said == "config dict: pipeline[0].stream.seed: Input should be a valid integer, not True."
    said = message({"pipeline": [{"stream": "a", None: 1}], "version": 1})
    assert said.startswith("config dict: pipeline[0]: {'None': 1, 'stream': 'a'} is not a stage. A stage is one name")


@pytest.mark.parametrize("path", ["missing.yaml", ".", "x" * 5000])
def test_an_unreadable_file_is_a_storage_error(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="the configuration cannot be read") as caught:
        load_config(path)
    assert caught.value.url == path


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    assert load(TEXT + "#" * (MAX_CONFIG_BYTES - len(TEXT)), tmp_path)
    with pytest.raises(ConfigError, match=f"at most {MAX_CONFIG_BYTES} bytes"):
        load(TEXT + "#" * (MAX_CONFIG_BYTES - len(TEXT) + 1), tmp_path)


WORDS = st.sampled_from(
    [*STAGES, "version", "pipeline", "pipelines", "loader", "workers", "size", "shards", "fields", "a", ""]
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)
STAGE_TREES = st.lists(
    st.dictionaries(st.sampled_from(list(STAGES)), TREES, min_size=1, max_size=1) | WORDS, max_size=5
)
CONFIG_TREES = st.one_of(
    st.dictionaries(WORDS, TREES, max_size=4),
    st.fixed_dictionaries({"pipeline": STAGE_TREES.map(lambda stages: [{"stream": "a"}, *stages])}),
    st.fixed_dictionaries({"pipelines": st.dictionaries(WORDS, STAGE_TREES, max_size=2)}, optional={"loader": TREES}),
)
STEPS = WORDS | st.sampled_from(["0", "1", "99999999", "[0]", "train"])
OVERRIDE_VALUES = st.sampled_from(["1", "x", "{}", "[]", "[1, 2]", "{size: 5}", "", "~", "[", "00", "${X}"])
OVERRIDE_TEXTS = st.text(max_size=8) | st.builds(
    lambda steps, value: f"{'.'.join(steps)}={value}", st.lists(STEPS, max_size=5), OVERRIDE_VALUES
)


def check_problems(err: ConfigError) -> None:
    """Check that each problem gives place and fault, and ends like a sentence."""
    assert err.problems
    assert all(problem.where and problem.rule[-1] in ".?" for problem in err.problems)
    assert "pydantic" not in str(err)


@given(CONFIG_TREES, st.lists(OVERRIDE_TEXTS, max_size=2))
def test_any_tree_is_a_config_or_a_config_error(tree: dict[str, Any], overrides: list[str]) -> None:
    """No other result is possible."""
    try:
        config = load_config(tree, overrides=overrides)
    except ConfigError as err:
        check_problems(err)
    else:
        assert isinstance(config, Config)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.text(max_size=60)
    | st.lists(st.sampled_from(TEXT.splitlines(keepends=True))).map("".join)
)
def test_any_file_is_a_config_or_a_config_error(tmp_path: Path, data: bytes | str) -> None:
    """The files have random bytes, random text, and lines of a good file in any order."""
    try:
        assert isinstance(load(data, tmp_path), Config)
    except ConfigError as err:
        check_problems(err)
