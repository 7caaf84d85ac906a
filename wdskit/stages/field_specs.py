"""Specs of the stages that work on a sample's fields, one value in, one value out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from wdskit.config.messages import describe, listing
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.config.values import (
    Alternatives,
    Bool,
    Count,
    FieldChoices,
    FieldName,
    FieldNames,
    ImageSpec,
    Items,
)
from wdskit.limits import MAX_PIXELS
from wdskit.stages.names import Function

Functions = Annotated[tuple[Function | None, ...], Field(min_length=1), Items]


class DecodeSpec(StageSpec):
    """Fields into values. Nothing is unpickled; fields of unknown names stay bytes."""

    name: ClassVar[str] = "decode"
    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "images"

    images: ImageSpec | None = Field(
        None,
        description="What images become, in webdataset's words; `index`: the numbers that masks store, one a pixel. "
        "Without: they stay bytes.",
    )
    only: FieldNames | None = Field(None, description="The fields to decode. Without: all.")
    fuse: Bool = Field(
        True,
        description="Whether decoding and the crop directly behind it run as one, which decodes a large JPEG no larger "
        "than the crop needs. Its pixels then differ by about one level of 255.",
    )
    max_pixels: Count = Field(MAX_PIXELS, description="Largest width x height that an image's header may promise.")


class MapSpec(StageSpec):
    """A function of each value."""

    name: ClassVar[str] = "map"
    kind: ClassVar[Kind] = "each"
    takes_any: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(
        description="A function, or the name of a registered one. One with a parameter `rng` gets a numpy Generator "
        "that depends on the seed and the position of the sample only.",
        examples=["my_augment"],
    )
    global_rng: Bool = Field(False, description="Seed random, numpy and torch by position before each call.")


class MapDictSpec(StageSpec):
    """A function for each of some fields."""

    name: ClassVar[str] = "map_dict"
    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "fields"
    is_mapping: ClassVar[bool] = True

    fields: Annotated[dict[FieldName, Function], Field(min_length=1)] = Field(
        description="Field name: a function, or the name of a registered one.", examples=[{"cls": "my_label"}]
    )


class MapTupleSpec(StageSpec):
    """A function for each place of a tuple; null leaves a place as it is."""

    name: ClassVar[str] = "map_tuple"
    kind: ClassVar[Kind] = "each"
    is_starred: ClassVar[str] = "fns"
    shorthand: ClassVar[str | None] = "fns"

    fns: Functions = Field(
        description="Functions, or names of registered ones; null leaves a place as it is.",
        examples=[["my_augment", None]],
    )


class RenameSpec(StageSpec):
    """Fields under new names; other fields stay."""

    name: ClassVar[str] = "rename"
    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "names"
    is_mapping: ClassVar[bool] = True

    names: Annotated[dict[FieldName, Alternatives], Field(min_length=1)] = Field(
        description="New name: old name, or alternatives joined by `;`.", examples=[{"image": "jpg;png"}]
    )


class ToTupleSpec(StageSpec):
    """The named fields as a tuple."""

    name: ClassVar[str] = "to_tuple"
    kind: ClassVar[Kind] = "each"
    is_starred: ClassVar[str] = "fields"
    shorthand: ClassVar[str | None] = "fields"

    fields: FieldChoices = Field(
        description="Fields in order; `jpg;png` takes the first that a sample has.", examples=[["jpg;png", "cls"]]
    )


class ToDictSpec(StageSpec):
    """The named fields as a dict, each under the name of its first alternative."""

    name: ClassVar[str] = "to_dict"
    kind: ClassVar[Kind] = "each"
    is_starred: ClassVar[str] = "fields"
    shorthand: ClassVar[str | None] = "fields"

    fields: FieldChoices = Field(
        description="Fields in order; `jpg;png` takes the first that a sample has.", examples=[["jpg;png", "cls"]]
    )

    @field_validator("fields")
    @classmethod
    def _check_names(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        names = [field.split(";")[0] for field in fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise refuse(f"{listing(twice)} would stand twice in the dict; `rename` one first.")
        return fields


class UserSpec(StageSpec):
    """A function or class of the user's under the name it was registered by: `- my_augment: {strength: 3}`.

    A function gets the settings as keyword arguments in each call; of a class an instance is made with them once in
    each process, which is called with each value.
    """

    kind: ClassVar[Kind] = "each"
    shorthand: ClassVar[str | None] = "settings"
    is_mapping: ClassVar[bool] = True
    takes_any: ClassVar[bool] = True

    settings: dict[str, Any] = Field({}, description="Its keyword arguments.")

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """The settings that stand behind the name: none, or a mapping."""
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{describe(value)}; settings of `{cls.name}` are a mapping, as in {{strength: 3}}.")
        return {} if value is None else {"settings": dict(value)}

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, Any]]]:
        """Its name and settings: the class is made when it is asked for."""
        return _make_user_spec, (self.name, self.settings)


@functools.cache
def user_spec(called: str) -> type[UserSpec]:
    """The settings of what is registered under a name."""

    class Registered(UserSpec):
        __doc__ = f"The registered `{called}`."
        name: ClassVar[str] = called

    return Registered


def _make_user_spec(name: str, settings: dict[str, Any]) -> UserSpec:
    return user_spec(name)(settings=settings)
