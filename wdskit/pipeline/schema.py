"""The JSON schema (draft 2020-12) of the configuration file, for editors. Made from the same models that check it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from wdskit.pipeline.config import VERSION
from wdskit.pipeline.loader_specs import ErrorsSpec, LoaderSpec
from wdskit.pipeline.spec_types import StageSpec
from wdskit.pipeline.specs import STAGES

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""What may stand in place of a number or a truth value: text with a variable that becomes one."""


def json_schema() -> dict[str, Any]:
    """The schema. It knows names, kinds and ranges; `wdskit config check` knows the order of stages too."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "wdskit configuration",
        "type": "object",
        "properties": {
            "version": {"const": VERSION, "description": "Of this format."},
            "pipeline": {"$ref": "#/$defs/pipeline", "description": "The one pipeline."},
            "pipelines": {
                "type": "object",
                "description": "Pipelines by name, where there are several.",
                "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"},
                "additionalProperties": {"$ref": "#/$defs/pipeline"},
                "minProperties": 1,
            },
            "loader": {"anyOf": [_settings(LoaderSpec), {"type": "null"}], "description": "How a pipeline is run."},
            "errors": {
                "anyOf": [_settings(ErrorsSpec), {"type": "null"}],
                "description": "What becomes of bad samples.",
            },
        },
        "required": ["version"],
        "oneOf": [{"required": ["pipeline"]}, {"required": ["pipelines"]}],
        "additionalProperties": False,
    }
    inner: dict[str, Any] = {}
    defs = {"pipeline": {"type": "array", "items": {"$ref": "#/$defs/stage"}, "minItems": 1}} | _stages()
    defs = _hoisted(defs, inner)
    return schema | {"$defs": defs | inner}


def _hoisted(schema: Any, inner: dict[str, Any]) -> Any:
    """The schema without definitions inside, which go to `inner`; references count from the root."""
    if isinstance(schema, list):
        return [_hoisted(item, inner) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema == {"title": "stage"}:
        return {"$ref": "#/$defs/stage"}
    for name, definition in schema.get("$defs", {}).items():
        inner[name] = _hoisted(definition, inner)
    return {name: _hoisted(value, inner) for name, value in schema.items() if name != "$defs"}


def _section(model: type[BaseModel], description: str) -> dict[str, Any]:
    return {"anyOf": [_settings(model), {"type": "null"}], "description": description}


def _stages() -> dict[str, Any]:
    bare = [name for name, spec in STAGES.items() if not any(f.is_required() for f in spec.model_fields.values())]
    stages = {f"stage.{name}": _stage(spec) for name, spec in STAGES.items()}
    any_stage = [{"enum": bare}, *({"$ref": f"#/$defs/{name}"} for name in stages)]
    return {"stage": {"anyOf": any_stage}} | stages


def _stage(spec: type[StageSpec]) -> dict[str, Any]:
    """A mapping of one key, the stage's name."""
    return {
        "type": "object",
        "description": spec.__doc__,
        "properties": {spec.name: _behind_name(spec)},
        "required": [spec.name],
        "additionalProperties": False,
    }


def _behind_name(spec: type[StageSpec]) -> dict[str, Any]:
    settings = _settings(spec)
    if spec.shorthand is None:
        return {"anyOf": [settings, {"type": "null"}]}
    short = settings["properties"][spec.shorthand]
    if spec.is_mapping:
        return short  # type: ignore[no-any-return]  # pydantic's schemas are dicts of Any
    choices = [short, settings]
    if spec.name == "slice":
        choices.insert(1, {"type": "array", "items": short, "minItems": 2, "maxItems": 3})
    if not settings.get("required"):
        choices.append({"type": "null"})
    return {"anyOf": choices, "description": spec.__doc__}


def _settings(model: type[BaseModel]) -> dict[str, Any]:
    """The long form: pydantic's schema of the model, variables allowed."""
    schema = model.model_json_schema()
    properties = (
        {name: _with_variables(value) for name, value in schema["properties"].items()} if model.model_fields else {}
    )
    return schema | {"properties": properties}


def _with_variables(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of one setting, where a variable may stand for what is no text."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    if "anyOf" in schema:
        return schema | {"anyOf": [_with_variables(choice) for choice in schema["anyOf"]]}
    if schema.get("type") == "object" and "properties" in schema:
        return schema | {"properties": {name: _with_variables(each) for name, each in schema["properties"].items()}}
    if schema.get("type") == "array":
        return schema | {"items": _with_variables(schema["items"])} if "items" in schema else schema
    if schema.get("type") not in {"integer", "number", "boolean"} and not {"enum", "const"} & schema.keys():
        return schema
    outside = {key: schema.pop(key) for key in ("description", "default", "examples") if key in schema}
    return {"anyOf": [schema, _VARIABLE]} | outside
