"""From what was written to checked specs, or to all that is wrong with it in plain English."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from wdskit.errors import ConfigError, Problem
from wdskit.pipeline.problems import (
    Flaw,
    Path,
    describe,
    did_you_mean,
    dotted,
    listing,
    nearest,
    show,
    translate,
    wrong_kind,
)
from wdskit.pipeline.spec_types import StageSpec, refuse
from wdskit.pipeline.specs import STAGES

Model = TypeVar("Model", bound=BaseModel)


def parse_stage(name: str, value: object = None, *, where: str = "pipeline") -> StageSpec:
    """The spec of a stage with what stands behind its name: None, a bare value, or a mapping of settings.

    Args:
        name: One of `STAGES`.
        value: As in YAML: `parse_stage("shuffle", 200)` or `parse_stage("shuffle", {"size": 200})`.
        where: Said first in messages.

    Raises:
        ConfigError: There is no such stage, or settings are wrong; all that are.
    """
    if name not in STAGES:
        raise ConfigError(problems=(Problem(where, "", unknown_stage(name)),))
    spec, flaws = read_stage(STAGES[name], value)
    if spec is None:
        raise ConfigError(problems=tuple(Problem(where, dotted((name, *flaw.path)), flaw.rule) for flaw in flaws))
    return spec


def parse_settings(model: type[Model], settings: Mapping[str, Any], *, where: str) -> Model:
    """A model from its settings; `where` is said first in messages.

    Raises:
        ConfigError: Some are wrong; all that are.
    """
    parsed, flaws = read_settings(model, settings)
    if parsed is None:
        raise ConfigError(problems=tuple(Problem(where, dotted(flaw.path), flaw.rule) for flaw in flaws))
    return parsed


def read_stage(model: type[StageSpec], value: object) -> tuple[StageSpec | None, list[Flaw]]:
    """A stage's spec from what stands behind its name, or what is wrong with it; paths are below the name."""
    try:
        settings = model.expand(value)
    except ValueError as err:
        return None, [Flaw((), str(err))]
    spec, flaws = read_settings(model, settings)
    if model.is_mapping or not isinstance(value, Mapping):
        flaws = [_as_written(model, flaw) for flaw in flaws]
    return spec, flaws


def read_settings(model: type[Model], settings: Mapping[Any, Any]) -> tuple[Model | None, list[Flaw]]:
    """A model from its settings, or what is wrong with them."""
    try:
        return model.model_validate(settings), []
    except ValidationError as err:
        errors = err.errors(include_url=False)
    known = list(model.model_fields)
    meant = {nearest(str(error["loc"][-1]), known) for error in errors if error["type"] == "extra_forbidden"}
    told = [error for error in errors if error["type"] != "missing" or error["loc"][-1] not in meant]
    inner = {error["loc"][:size] for error in errors for size in range(1, len(error["loc"]))}
    told = [error for error in told if error["type"] != "too_short" or error["loc"] not in inner]
    return None, list(dict.fromkeys(_flaw(model, error) for error in told))


def read_part_stages(value: object) -> tuple[StageSpec, ...]:
    """The stages of one part of a mixture: such as make one sample of one.

    Raises:
        PydanticCustomError: The first thing that is wrong with them.
    """
    if not isinstance(value, (list, tuple)):
        raise refuse(wrong_kind(value, "a list of stages is needed, as in [{decode: rgb8}, {resize: 256}]"))
    return tuple(_read_part_stage(at, item) for at, item in enumerate(value))


def _read_part_stage(at: int, item: object) -> StageSpec:
    if isinstance(item, StageSpec):
        spec: StageSpec | None = item
    else:
        name, settings = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, None)
        if not isinstance(name, str):
            raise refuse(f"[{at}]: {describe(item)}; a stage is needed, as in `- decode: rgb8`.")
        if name not in STAGES:
            raise refuse(f"[{at}]: {unknown_stage(name)}")
        spec, flaws = read_stage(STAGES[name], settings)
        if spec is None:
            raise refuse(f"[{at}].{dotted((name, *flaws[0].path))}: {flaws[0].rule}")
    if spec is None or spec.kind != "each" or spec.name in {"to_tuple", "to_dict", "map_tuple"}:
        msg = f"[{at}]: `{spec.name if spec else item}` cannot be a stage of one part"
        raise refuse(f"{msg}, which are those that make one sample of one (decode, map, resize, ...).")
    return spec


def unknown_stage(name: str) -> str:
    """The rule for a stage that does not exist."""
    hint = did_you_mean(name, STAGES)
    return f"{show(name)} is no stage.{hint or ' A function of your own is called by `- map: its_name`.'}"


def unknown_setting(name: str, owner: str, known: list[str]) -> str:
    """The rule for a setting that does not exist; `owner` has the `known` ones."""
    has = f" {owner} has {listing(known)}." if known else f" {owner} takes no arguments."
    return f"no such setting.{did_you_mean(name, known) or has}"


def _flaw(model: type[BaseModel], error: Mapping[str, Any]) -> Flaw:
    # pydantic marks a wrong key of a dict with a last "[key]"
    path = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        owner = (
            f"`{model.name}`" if issubclass(model, StageSpec) else f"`{model.__name__.removesuffix('Spec').lower()}`"
        )
        inner = _inner(model, path)
        if inner is not None:
            owner, model = f"an item of `{path[0]}`" if isinstance(path[1], int) else f"`{path[0]}`", inner
        return Flaw(path, unknown_setting(str(path[-1]), owner, list(model.model_fields)))
    if error["type"] == "missing":
        return Flaw(path[:-1], _missing(_inner(model, path) or model, str(path[-1])))
    return Flaw(path, translate(error))


def _inner(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model of what stands inside a setting."""
    items: Mapping[str, type[BaseModel]] = getattr(model, "items", {})
    return items.get(str(path[0])) if len(path) > 1 else None


def _missing(model: type[BaseModel], field: str) -> str:
    examples = model.model_fields[field].examples or []
    if not issubclass(model, StageSpec) or not examples:
        return f"the setting `{field}` is missing."
    return f"the setting `{field}` is missing. Write for example `{model.name}: {_written(examples[0])}`."


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_written(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return "null" if value is None else str(value)


def _as_written(model: type[StageSpec], flaw: Flaw) -> Flaw:
    """The flaw without the name of a setting that was not written, because a bare value filled it."""
    if flaw.path[:1] == (model.shorthand,):
        return Flaw(flaw.path[1:], flaw.rule)
    return flaw
