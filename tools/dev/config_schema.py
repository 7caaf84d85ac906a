"""The JSON schema of configuration files, for `generate.py`."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from wdskit.config.types import Settings, Stages, StageSpec
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, LoaderSpec

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""Schema of text with a variable, such as `${SIZE}`, which may replace a number or a truth value."""

_REFERENCE = "#/$defs/{model}"


SECTIONS: dict[str, type[Settings]] = {"loader": LoaderSpec, "errors": ErrorsSpec, "cache": CacheSpec}

_NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
SHAPES: dict[str, dict[str, Any]] = {
    "_check_bytes": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "_split_names": _NAMES,
    "_check_shards": _NAMES,
    "_check_ordered": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    "_check_stage": {"title": "stage"},
}
"""The schemas of settings that functions check, by the name of the function."""


class _Schemas(GenerateJsonSchema):
    """Knows the schemas of `SHAPES`."""

    def function_plain_schema(self, schema: Any) -> dict[str, Any]:
        return SHAPES[schema["function"]["function"].__name__]

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        shape = SHAPES.get(getattr(schema["function"]["function"], "__name__", ""))
        return shape or super().function_before_schema(schema)

    def function_after_schema(self, schema: Any) -> dict[str, Any]:
        shape = SHAPES.get(getattr(schema["function"]["function"], "__name__", ""))
        return shape or super().function_after_schema(schema)


def json_schema(known: Stages) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of configuration files, for editors. The order of stages is not in it."""
    checked = [(model, "validation") for model in (*known.values(), *SECTIONS.values())]
    _, made = models_json_schema(checked, ref_template=_REFERENCE, schema_generator=_Schemas)  # type: ignore[arg-type]  # a tuple of a Literal
    defs = {name: _with_variables(schema) for name, schema in made["$defs"].items()}
    bare = [name for name, spec in known.items() if not defs[spec.__name__].get("required")]
    stages = {f"stage.{name}": _stage_schema(spec, defs[spec.__name__]) for name, spec in known.items()}
    shown = {
        name: {"anyOf": [_reference(model.__name__), {"type": "null"}], "description": model.__doc__}
        for name, model in SECTIONS.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "wdskit configuration",
        "type": "object",
        "properties": {
            "version": {"const": 1, "description": "Version of the configuration format."},
            "pipeline": _reference("pipeline") | {"description": "The only pipeline."},
            "pipelines": {
                "type": "object",
                "description": "Several pipelines by name.",
                "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"},
                "additionalProperties": _reference("pipeline"),
                "minProperties": 1,
            },
            **shown,
        },
        "required": ["version"],
        "oneOf": [{"required": ["pipeline"]}, {"required": ["pipelines"]}],
        "additionalProperties": False,
        "$defs": {
            "pipeline": {"type": "array", "items": _reference("stage"), "minItems": 1},
            "stage": {"anyOf": [{"enum": bare}, *map(_reference, stages)]},
            **stages,
            **defs,
        },
    }


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": _REFERENCE.format(model=name)}


def _stage_schema(spec: type[StageSpec], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a stage in YAML, such as `shuffle: 200`. `settings` is the schema of its settings."""
    choices = [] if spec.is_mapping else [_reference(spec.__name__)]
    if spec.shorthand is not None:
        short = settings["properties"][spec.shorthand]
        choices.append(short)
    if not settings.get("required"):
        choices.append({"type": "null"})
    return {
        "type": "object",
        "description": spec.__doc__,
        "properties": {spec.name: {"anyOf": choices}},
        "required": [spec.name],
        "additionalProperties": False,
    }


def _with_variables(schema: Any) -> Any:
    """Return a copy of a JSON schema that also accepts a variable, such as `${SIZE}`. Titles are left out.

    A variable may replace a number, a boolean, or a value from a fixed list.
    """
    if schema == {"title": "stage"}:
        return _reference("stage")
    if isinstance(schema, list):
        return [_with_variables(choice) for choice in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: value for key, value in schema.items() if key != "title"}
    for key in ("anyOf", "oneOf", "items", "prefixItems", "additionalProperties"):
        if key in schema:
            schema[key] = _with_variables(schema[key])
    if "properties" in schema:
        schema["properties"] = {name: _with_variables(value) for name, value in schema["properties"].items()}
    if schema.get("type") not in {"integer", "number", "boolean"} and not {"enum", "const"} & schema.keys():
        return schema
    outside = {key: schema.pop(key) for key in ("description", "default", "examples") if key in schema}
    return {"anyOf": [schema, _VARIABLE]} | outside
