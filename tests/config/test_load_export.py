"""Configurations as YAML that reads back equal, and the JSON schema for editors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from configs import FORMS, load
from wdskit.config.load import Document
from wdskit.dataset.patterns import expand_parts
from wdskit.errors import ConfigError, StorageError
from wdskit.pipeline.settings import LoaderSpec, json_schema, load_config
from wdskit.stages.registry import STAGES

SCHEMA = json_schema()
KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
KNOWN = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "description", "enum", "examples",
    "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems", "maximum", "minItems",
    "minProperties", "minimum", "oneOf", "prefixItems",
    "pattern", "patternProperties", "properties", "propertyNames", "required", "title", "type",
}  # fmt: skip


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value fits a JSON schema. A keyword that wdskit's schema does not use is an error."""
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if "$ref" in schema and not fits(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]):
        return False
    if "type" in schema and (
        not isinstance(value, KINDS[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean")
    ):
        return False
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return False
    if "anyOf" in schema and not any(fits(value, choice) for choice in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(fits(value, choice) for choice in schema["oneOf"]) != 1:
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if number and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if number and not schema.get("exclusiveMinimum", value - 1) < value < schema.get("exclusiveMaximum", value + 1):
        return False
    if isinstance(value, list):
        in_bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        places = [*schema.get("prefixItems", ()), *[schema.get("items", {})] * len(value)]
        return in_bounds and all(fits(item, each) for item, each in zip(value, places, strict=False))
    return not isinstance(value, dict) or object_fits(value, schema)


def object_fits(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    if len(value) < schema.get("minProperties", 0) or not set(schema.get("required", ())) <= value.keys():
        return False
    for key, item in value.items():
        matching = [below for name, below in schema.get("patternProperties", {}).items() if re.search(name, key)]
        rest = matching[0] if matching else schema.get("additionalProperties", {})
        below = schema.get("properties", {}).get(key, rest)
        if (
            below is False
            or not fits(item, {} if below is True else below)
            or not fits(key, schema.get("propertyNames", {}))
        ):
            return False
    return True


def config(*stages: Any) -> dict[str, Any]:
    return {"version": 1, "pipeline": [{"stream": "a.tar"}, *stages]}


@pytest.mark.parametrize("name", STAGES)
def test_both_forms_of_every_stage_fit(name: str) -> None:
    """A stage without arguments also fits as a bare name."""
    for form in FORMS[name]:
        assert fits(config({name: form}), SCHEMA)
    assert fits(config(name), SCHEMA) == (not any(field.is_required() for field in STAGES[name].model_fields.values()))


WRONG = [
    {"version": 1}, {"version": 2, "pipeline": [{"stream": "a"}]}, {"pipeline": [{"stream": "a"}]},
    config("shufle"), config(5),
    config({"shuffle": 0}), config({"shuffle": "x"}), config({"shuffle": {"siz": 5}}),
    config({"shuffle": 5, "map": "f"}),
    config({"decode": "rgb88"}), config({"split_by_node": 5}), config({"random_flip": 1.5}),
    config({"map_dict": "f"}), config({"rename": {"a": 5}}), config({"resize": [1, 2, 3]}),
    config({"batched": {"partial": "x"}}),
    config() | {"loader": {"worker": 1}}, config() | {"loader": {"threads": 0}}, config() | {"loader": 5},
    config() | {"x": 1},
    config() | {"pipelines": {"train": [{"stream": "a"}]}}, {"version": 1, "pipelines": {"a b": [{"stream": "a"}]}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_misspelt_settings_do_not_fit(wrong: dict[str, Any]) -> None:
    """Editors underline them."""
    assert not fits(wrong, SCHEMA)


def test_variables_fit_where_numbers_do() -> None:
    """A variable is text for an editor, and a number after reading."""
    assert fits(config({"shuffle": "${N:-5}"}, {"batched": {"size": "${N}", "partial": "${P}"}}), SCHEMA)
    assert fits(config() | {"loader": {"workers": "${N}"}}, SCHEMA)


def test_the_repositorys_configurations_fit(repository: Path) -> None:
    """Each file in configs/ fits."""
    files = sorted((repository / "configs").glob("*.yaml"))
    assert files
    for file in files:
        document = Document(str(file))
        document.read_yaml(file.read_text())
        assert fits(document.tree, SCHEMA), file


def test_every_setting_is_described() -> None:
    """Editors can show a text for each setting, and the schema is plain JSON."""
    for model in (*STAGES.values(), LoaderSpec):
        for name, field in model.model_fields.items():
            assert field.description, (model, name)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_a_config_with_functions_cannot_be_written() -> None:
    """YAML can only name them."""
    for stage in (len, {"map": len}):
        with pytest.raises(ConfigError, match="holds a function"):
            load_config({"pipeline": [{"stream": "a"}, stage]}).to_yaml()


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
        "mean": st.lists(st.floats(0, 1), min_size=3, max_size=3),
        "std": st.lists(st.floats(1e-300, 1), min_size=3, max_size=3)})}),
    st.fixed_dictionaries({"resize": st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 9), st.integers(1, 9)))}),
    st.sampled_from(["random_flip", "to_tensor", "decode", "map: f"]).filter(lambda name: ":" not in name),
)  # fmt: skip


def refuses(shards: str) -> bool:
    """Return whether this text can never name shards."""
    try:
        expand_parts(shards)
    except StorageError:
        return True
    return False


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANY_TEXT, st.lists(STAGE_VALUES, max_size=6), st.sampled_from(["pipeline", "train", "null", "no", "x-1"]))
def test_any_config_reads_back_equal(tmp_path: Path, shards: str, stages: list[Any], name: str) -> None:
    """This holds for any texts, names and numbers, including `$`, quotes and `1e-3`."""
    assume(not refuses(shards))
    config = load_config({"pipelines": {name: [{"stream": shards}, *stages]}})
    assert load(config.to_yaml(), tmp_path) == config
