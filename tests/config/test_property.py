"""Whatever is written: a configuration or a list of problems, and back to YAML without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.config.test_load import TEXT, load
from wdskit.dataset.braces import check_pattern
from wdskit.errors import ConfigError, StorageError
from wdskit.pipeline.settings import Config, load_config
from wdskit.pipeline.specs import STAGES

COUNTS = st.integers(1, 2**63 - 1)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,6}", fullmatch=True).filter(lambda name: name.strip())
ANY_TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip)
STAGE_VALUES = st.one_of(
    st.fixed_dictionaries({"shuffle": st.fixed_dictionaries({"size": COUNTS})}),
    st.fixed_dictionaries({"rename": st.dictionaries(NAMES, NAMES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"map_dict": st.dictionaries(NAMES, st.just("f"), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"decode": st.fixed_dictionaries({}, optional={
        "only": st.lists(NAMES, min_size=1), "max_pixels": COUNTS})}),
    st.fixed_dictionaries({"random_flip": st.floats(0, 1)}),
    st.fixed_dictionaries({"normalize": st.fixed_dictionaries({
        "mean": st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        "std": st.lists(st.floats(1e-300, 1e300), min_size=3, max_size=3)})}),
    st.fixed_dictionaries({"slice": st.one_of(
        COUNTS, st.tuples(st.integers(0, 5), st.none() | st.integers(6, 9), COUNTS))}),
    st.fixed_dictionaries({"resize": st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 9), st.integers(1, 9)))}),
    st.sampled_from(["random_flip", "to_tensor", "decode", "map: f"]).filter(lambda name: ":" not in name),
)  # fmt: skip


def refuses(shards: str) -> bool:
    """Whether this text can never name shards."""
    try:
        check_pattern(shards)
    except StorageError:
        return True
    return False


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY_TEXT, st.lists(STAGE_VALUES, max_size=6), st.sampled_from(["pipeline", "train", "null", "no", "x-1"]))
def test_any_config_reads_back_equal(tmp_path: Path, shards: str, stages: list[Any], name: str) -> None:
    """Whatever its texts, names and numbers are, `$`, quotes and `1e-3` among them."""
    assume(not refuses(shards))
    config = load_config({"pipelines": {name: [{"stream": shards}, *stages]}})
    assert load(config.to_yaml(), tmp_path) == config


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


def check_told(err: ConfigError) -> None:
    """Each problem says where, what, and ends as a sentence does."""
    assert err.problems
    assert all(problem.where and problem.rule[-1] in ".?" for problem in err.problems)
    assert "pydantic" not in str(err)


@given(CONFIG_TREES, st.lists(OVERRIDE_TEXTS, max_size=2))
def test_any_tree_is_a_config_or_a_config_error(tree: dict[str, Any], overrides: list[str]) -> None:
    """Nothing else."""
    try:
        config = load_config(tree, overrides=overrides)
    except ConfigError as err:
        check_told(err)
    else:
        assert isinstance(config, Config)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=60)
    | st.text(max_size=60)
    | st.lists(st.sampled_from(TEXT.splitlines(keepends=True))).map("".join)
)
def test_any_file_is_a_config_or_a_config_error(tmp_path: Path, data: bytes | str) -> None:
    """Bytes, text, and lines of a good file in any order."""
    try:
        assert isinstance(load(data, tmp_path), Config)
    except ConfigError as err:
        check_told(err)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TEXT) - 1), st.characters())
def test_a_good_file_with_one_character_changed(tmp_path: Path, at: int, char: str) -> None:
    """Is a configuration or a list of problems."""
    try:
        assert isinstance(load(TEXT[:at] + char + TEXT[at + 1 :], tmp_path), Config)
    except ConfigError as err:
        check_told(err)
