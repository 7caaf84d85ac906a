"""The base of what a pipeline's stages are set to, and the way from what was written to a checked model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from wdskit.config.messages import Flaw, describe, dotted, flaws_of, listing, show, unknown_stage
from wdskit.errors import ConfigError, Problem
from wdskit.text import hide_secrets

Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["source", "splitter", "open", "each", "stream", "batch", "epoch"]


class StageSpec(BaseModel):
    """The settings of one stage: validated, frozen, comparable. It holds no state and opens nothing.

    Attributes:
        name: The stage's name in YAML, in the builder and in messages.
        kind: What it does to the stream: gives it (source), picks shards (splitter), opens them (open), maps one value
            to one (each), reorders, drops or unpacks (stream), groups (batch), or counts (epoch).
        shorthand: The field that a bare value fills (`shuffle: 200`); None where the stage takes no arguments.
        is_mapping: Whether YAML's whole mapping is the value of `shorthand` (`rename: {image: jpg}`).
        is_starred: What the items of `shorthand` are called where Python's method takes them one by one; else empty.
        takes_any: Whether it maps a value of any kind to one of any kind, as a user's function may.
        is_planned: Whether it is a source that knows every sample's position beforehand.
        items: Models of the items of settings that are lists of mappings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    kind: ClassVar[Kind]
    shorthand: ClassVar[str | None] = None
    is_mapping: ClassVar[bool] = False
    is_starred: ClassVar[str] = ""
    takes_any: ClassVar[bool] = False
    is_planned: ClassVar[bool] = False
    items: ClassVar[dict[str, type[BaseModel]]] = {}

    def __repr__(self) -> str:
        return hide_secrets(super().__repr__())

    __str__ = __repr__

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """The settings that a value written behind the stage's name stands for.

        Raises:
            ValueError: The stage takes no arguments.
        """
        if value is None:
            return {}
        if isinstance(value, Mapping) and not cls.is_mapping:
            return dict(value)
        if cls.shorthand is None:
            raise ValueError(f"it takes no arguments, but {show(value)} was given. Write `- {cls.name}`.")
        return {cls.shorthand: value}

    def write_settings(self) -> Any:
        """Return the opposite of `expand`: every setting except those that are null; None if no setting is left.

        A stage of one setting is written as a bare value, if `expand` reads it so.
        """
        fields = {name: value for name, value in self if value is not None}
        name = self.shorthand
        if name is not None and list(fields) == [name] and (self.is_mapping or not isinstance(fields[name], Mapping)):
            return (fields[name] or None) if self.is_mapping else fields[name]
        return fields or None

    def written(self) -> Any:
        """As an item of a list of stages in YAML."""
        value = self.write_settings()
        return self.name if value is None else {self.name: value}


Stages = Mapping[str, type[StageSpec]]
"""Every stage by its name."""


def refuse(rule: str) -> PydanticCustomError:
    """The error by which a validator refuses a value; `rule` is the message a person reads."""
    return PydanticCustomError("wdskit", "{rule}", {"rule": rule})


def parse_settings(model: type[Model], settings: Mapping[str, Any], *, where: str) -> Model:
    """A model from its settings; `where` is said first in messages.

    Raises:
        ConfigError: Settings are wrong; all of them are listed.
    """
    return checked(*read_settings(model, settings), where=where)


def checked(read: Model | None, flaws: list[Flaw], *, where: str) -> Model:
    """What `read_settings` or `read_stage` has read; `where` is said first in messages.

    Raises:
        ConfigError: There are flaws; all of them are listed.
    """
    if read is None:
        raise ConfigError(problems=tuple(Problem(where, dotted(flaw.path), flaw.rule) for flaw in flaws))
    return read


def read_settings(
    model: type[Model], settings: Mapping[Any, Any], *, stages: Stages | None = None
) -> tuple[Model | None, list[Flaw]]:
    """A model from its settings, or what is wrong with them. Validators find `stages` as their context."""
    try:
        return model.model_validate(settings, context=stages), []
    except ValidationError as err:
        return None, flaws_of(model, err)


def read_item(stages: Stages, item: object) -> tuple[StageSpec | None, list[Flaw]]:
    """Read an item of a list of stages as in YAML: `name`, or `{name: value}`; a spec stays as it is.

    Returns:
        The stage, or what is wrong; paths are those of `read_stage`.
    """
    if isinstance(item, StageSpec):
        return item, []
    if isinstance(item, Mapping) and len(item) == 1:
        [(name, value)] = item.items()
        return read_stage(stages, name, value)
    if isinstance(item, str):
        return read_stage(stages, item, None)
    if isinstance(item, Mapping) and item:
        near = [name for name in item if name in stages]
        hint = " Indent its settings further than its name." if len(near) == 1 else " Write `- ` before each stage."
        return None, [Flaw((), f"a stage has one name, but this one has {listing(list(item)[:5])}.{hint}")]
    return None, [Flaw((), f"{describe(item)}; a stage is needed, as in `- shuffle: 200` or `- split_by_node`.")]


def read_stage(stages: Stages, name: str, value: object) -> tuple[StageSpec | None, list[Flaw]]:
    """One of `stages` with what is written behind its name, or what is wrong; paths start with the name, if it is one.

    Args:
        stages: Every stage by its name.
        name: Of one of them.
        value: None, a bare value, or a mapping of settings.
    """
    if name not in stages:
        return None, [Flaw((), unknown_stage(name, stages))]
    model = stages[name]
    try:
        settings = model.expand(value)
    except ValueError as err:
        return None, [Flaw((name,), str(err))]
    spec, flaws = read_settings(model, settings, stages=stages)
    # the setting that a bare value fills is not written, so messages do not name it
    unwritten = (model.shorthand,) if model.is_mapping or not isinstance(value, Mapping) else None
    paths = [flaw.path[1:] if flaw.path[:1] == unwritten else flaw.path for flaw in flaws]
    return spec, [Flaw((name, *path), flaw.rule) for path, flaw in zip(paths, flaws, strict=True)]
