"""`StageSpec`, the base class of the settings of stages, and functions that read settings into checked models."""

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
    """The settings of one stage: validated, frozen, comparable. It holds no state and opens no file.

    Attributes:
        name: Name of the stage in YAML, in the builder and in messages.
        kind: Effect on the stream: "source" yields the stream, "splitter" selects shards, "open" opens shards, "each"
            maps one value to one value, "stream" reorders, drops or unpacks values, "batch" makes batches, "epoch" sets
            a number of items.
        shorthand: The setting that a bare value sets (`shuffle: 200`); None if the stage takes no arguments.
        is_mapping: Whether a whole YAML mapping is the value of `shorthand` (`rename: {image: jpg}`).
        is_starred: Name of the `*arguments` of the Python method, if the method takes the items of `shorthand` as
            separate arguments; else empty.
        takes_any: Whether the stage maps a value of any type to a value of any type, as a user's function may.
        is_planned: Whether the stage is a source that knows the position of every sample before the run.
        items: For each setting that is a list of mappings: the class that checks one mapping.
        example: Settings for an example in the documentation, if the required settings alone make no example.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    name: ClassVar[str]
    kind: ClassVar[Kind]
    shorthand: ClassVar[str | None] = None
    is_mapping: ClassVar[bool] = False
    is_starred: ClassVar[str] = ""
    takes_any: ClassVar[bool] = False
    is_planned: ClassVar[bool] = False
    items: ClassVar[dict[str, type[BaseModel]]] = {}
    example: ClassVar[dict[str, Any]] = {}

    def __repr__(self) -> str:
        return hide_secrets(super().__repr__())

    __str__ = __repr__

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """Return the settings as a dict, not yet checked. `value` is the value after the stage's name in YAML.

        None gives {}. A mapping of settings is copied. A short form, such as 200 in `shuffle: 200`, gives
        `{shorthand: value}`; so does every mapping if `is_mapping` is True.

        Raises:
            ValueError: The stage takes no arguments, but `value` is neither None nor a mapping.
        """
        if value is None:
            return {}
        if isinstance(value, Mapping) and not cls.is_mapping:
            return dict(value)
        if cls.shorthand is None:
            raise ValueError(f"it takes no arguments, but {show(value)} was given. Write `- {cls.name}`.")
        return {cls.shorthand: value}

    def write_settings(self) -> Any:
        """Return the value to write after the stage's name in YAML, without settings that are null.

        The value is None if all settings are null. It is the short form if only the setting `shorthand` is not null,
        and `expand` reads the same setting from it.
        """
        fields = {name: value for name, value in self if value is not None}
        name = self.shorthand
        if name is not None and list(fields) == [name] and (self.is_mapping or not isinstance(fields[name], Mapping)):
            return (fields[name] or None) if self.is_mapping else fields[name]
        return fields or None

    def written(self) -> Any:
        """Return the stage as an item of a list of stages in YAML: `{name: value}`, or the name if the value is None.

        The value is the result of `write_settings`.
        """
        value = self.write_settings()
        return self.name if value is None else {self.name: value}


Stages = Mapping[str, type[StageSpec]]
"""Maps the name of each stage to its class."""


def refuse(rule: str) -> PydanticCustomError:
    """Return the error that a validator raises to refuse a value, with `rule` as its message."""
    return PydanticCustomError("wdskit", "{rule}", {"rule": rule})


def parse_settings(model: type[Model], settings: Mapping[str, Any], *, where: str) -> Model:
    """Check settings and return them as an object of the class `model`.

    Raises:
        ConfigError: Settings are invalid; all problems are listed. Messages start with `where`.
    """
    return require_valid(*read_settings(model, settings), where=where)


def require_valid(read: Model | None, flaws: list[Flaw], *, where: str) -> Model:
    """Return `read`, or raise an error if it is None. `read_settings` and `read_stage` return `read` and `flaws`.

    Raises:
        ConfigError: `read` is None; all flaws are listed. Messages start with `where`.
    """
    if read is None:
        raise ConfigError(problems=tuple(Problem(where, dotted(flaw.path), flaw.rule) for flaw in flaws))
    return read


def read_settings(
    model: type[Model], settings: Mapping[Any, Any], *, stages: Stages | None = None
) -> tuple[Model | None, list[Flaw]]:
    """Check settings. Return (an object of the class `model`, no flaws), or (None, flaws) if settings are invalid.

    `stages` are the classes of stages by name, for settings that contain stages.
    """
    try:
        return model.model_validate(settings, context=stages), []
    except ValidationError as err:
        return None, flaws_of(model, err)


def read_item(stages: Stages, item: object) -> tuple[StageSpec | None, list[Flaw]]:
    """Read an item of a list of stages: `name`, `{name: value}`, or a `StageSpec`, which is returned unchanged.

    Returns:
        (stage, no flaws), or (None, flaws) if the item is invalid. The path of a flaw starts with the name of the
        stage; it is empty if the item does not name a known stage.
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
    """Read a stage from its name and the value after it.

    Args:
        stages: Maps the name of each stage to its class.
        name: Name of the stage.
        value: None, a bare value, or a mapping of settings.

    Returns:
        (stage, no flaws), or (None, flaws) if the stage is invalid. The path of a flaw starts with `name`; it is empty
        if no stage has this name.
    """
    if name not in stages:
        return None, [Flaw((), unknown_stage(name, stages))]
    model = stages[name]
    try:
        settings = model.expand(value)
    except ValueError as err:
        return None, [Flaw((name,), str(err))]
    spec, flaws = read_settings(model, settings, stages=stages)
    # a bare value does not name its setting, so messages do not name the setting either
    unwritten = (model.shorthand,) if model.is_mapping or not isinstance(value, Mapping) else None
    paths = [flaw.path[1:] if flaw.path[:1] == unwritten else flaw.path for flaw in flaws]
    return spec, [Flaw((name, *path), flaw.rule) for path, flaw in zip(paths, flaws, strict=True)]
