"""The stages that work on a sample's fields, each in one class: its settings, its line of YAML, and what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from wdskit.codecs.fields import decode_field
from wdskit.codecs.formats import INDEX_SPEC, is_image_field
from wdskit.config.messages import describe, listing
from wdskit.config.spec import refuse
from wdskit.config.values import Alternatives, Bool, Count, FieldChoices, FieldName, FieldNames, ImageSpec, Items
from wdskit.errors import DecodeError, PipelineError, WdskitError
from wdskit.limits import MAX_PIXELS
from wdskit.stages.base import NOWHERE, Context, Function, Origin, PerSampleStage, ValueFunction

Functions = Annotated[tuple[Function | None, ...], Field(min_length=1), Items]


class Decode(PerSampleStage):
    """Decode fields to values. Nothing is unpickled; fields with unknown names stay bytes."""

    name: ClassVar[str] = "decode"
    shorthand: ClassVar[str | None] = "images"

    images: ImageSpec | None = Field(
        None,
        description="What images become, in webdataset's terms; `index`: the numbers that masks store, one per pixel. "
        "Default: they stay bytes.",
        examples=["rgb8"],
    )
    only: FieldNames | None = Field(None, description="The fields to decode. Default: all.")
    fuse: Bool = Field(
        True,
        description="Whether decoding and the crop directly after it run as one step, which decodes a large JPEG only "
        "as large as the crop needs. Its pixels then differ by about 1 of 255.",
    )
    max_pixels: Count = Field(MAX_PIXELS, description="Largest width x height that an image's header may give.")

    def bind(self, context: Context, label: str) -> FieldDecoder:  # noqa: ARG002 (nothing is drawn)
        """As `PerSampleStage.bind`."""
        from wdskit.codecs.images import decode_image, decode_index

        context.stored = context.stored.decoded(self.images, self.only)
        image: Callable[..., Any] | None = None
        if self.images is not None:
            image = decode_index if self.images == INDEX_SPEC else functools.partial(decode_image, spec=self.images)
        return FieldDecoder(self.images, frozenset(self.only or ()), self.max_pixels, context.masks, image)


@dataclass(frozen=True)
class FieldDecoder:
    """What `decode` does.

    Attributes:
        images: As in `Decode`.
        only: The fields to decode, none for all.
        max_pixels: As in `decode_image`.
        masks: Fields whose numbers must be those that they store, since a later stage takes them for masks.
        decode_image: From the bytes of an image and `max_pixels` to its value.
    """

    images: str | None
    only: frozenset[str]
    max_pixels: int
    masks: frozenset[str]
    decode_image: Callable[..., Any] | None

    def __call__(self, sample: Any, origin: Origin = NOWHERE) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """A copy of `sample` with its fields decoded."""
        check_dict("decode", sample)
        return {field: self.decode_one(field, value) for field, value in sample.items()}

    def takes(self, field: str, value: Any) -> bool:
        """Whether a field is one to decode."""
        return not field.startswith("__") and isinstance(value, bytes) and (not self.only or field in self.only)

    def decode_one(self, field: str, value: Any) -> Any:
        """The value of one field."""
        if not self.takes(field, value):
            return value
        if not is_image_field(field):
            return decode_field(field, value)
        if self.decode_image is None:
            return value
        try:
            if field in self.masks and self.images != INDEX_SPEC:
                self._check_mask(field, value)
            return self.decode_image(value, max_pixels=self.max_pixels)
        except DecodeError as err:
            err.field = field
            raise

    def _check_mask(self, field: str, value: bytes) -> None:
        from wdskit.codecs.images import stores_other_numbers

        form = stores_other_numbers(value, max_pixels=self.max_pixels)
        if form:
            msg = f"decode: `{field}` is a mask with {form}, of which `{self.images}` gives other numbers than it "
            advice = f"Put `decode: {{images: index, only: {field}}}` before this stage, which then skips the field."
            raise PipelineError(f"{msg}stores.\n  {advice}")


class Map(PerSampleStage):
    """Call a function for each value."""

    name: ClassVar[str] = "map"
    takes_any: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(
        description="A function, or the name of a registered one. If it has a parameter `rng`, it gets a numpy "
        "Generator that depends only on the seed and the position of the sample.",
        examples=["my_augment"],
    )
    global_rng: Bool = Field(False, description="Seed random, numpy and torch by position before each call.")

    def bind(self, context: Context, label: str) -> ValueFunction:
        """As `PerSampleStage.bind`."""
        if self.global_rng and context.run.num_threads > 1:
            msg = "map: global_rng seeds one generator for the whole process, which "
            msg += f"{context.run.num_threads} threads share."
            raise PipelineError(f"{msg}\n  Take `rng` as a parameter instead, or use threads: 1.")
        return context.call("map", self.fn, label, global_rng=self.global_rng, is_map=True)


class MapDict(PerSampleStage):
    """Call a function for each named field."""

    name: ClassVar[str] = "map_dict"
    shorthand: ClassVar[str | None] = "fields"
    is_mapping: ClassVar[bool] = True

    fields: Annotated[dict[FieldName, Function], Field(min_length=1)] = Field(
        description="Field name: a function, or the name of a registered one.", examples=[{"cls": "my_label"}]
    )

    @field_validator("fields", mode="before")
    @classmethod
    def _is_no_setting(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and isinstance(fields.get("global_rng"), bool):
            raise refuse("`global_rng` is a setting of `map`. Give the function a parameter `rng`, or use `map`.")
        return fields

    def bind(self, context: Context, label: str) -> ValueFunction:
        """As `PerSampleStage.bind`."""
        calls = {field: context.call("map_dict", fn, f"{label}:{field}") for field, fn in self.fields.items()}
        return functools.partial(_map_fields, calls)


def _map_fields(calls: Mapping[str, ValueFunction], sample: Any, origin: Origin) -> dict[str, Any]:
    check_dict("map_dict", sample)
    mapped = dict(sample)
    for field, function in calls.items():
        mapped[field] = function(_pick("map_dict", sample, field), origin)
    return mapped


class MapTuple(PerSampleStage):
    """Call a function for each item of a tuple; null leaves an item as it is."""

    name: ClassVar[str] = "map_tuple"
    is_starred: ClassVar[str] = "fns"
    shorthand: ClassVar[str | None] = "fns"

    fns: Functions = Field(
        description="Functions, or names of registered ones; null leaves an item as it is.",
        examples=[["my_augment", None]],
    )

    def bind(self, context: Context, label: str) -> ValueFunction:
        """As `PerSampleStage.bind`."""
        places = enumerate(self.fns)
        calls = [None if fn is None else context.call("map_tuple", fn, f"{label}:{place}") for place, fn in places]
        return functools.partial(_map_places, calls)


def _map_places(calls: Sequence[ValueFunction | None], value: Any, origin: Origin) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise PipelineError(f"map_tuple: it takes tuples, but got a {type(value).__name__}. Put it after to_tuple.")
    if len(value) < len(calls):
        raise PipelineError(f"map_tuple: {len(calls)} functions for a tuple of {len(value)}.")
    pairs = zip(value, calls, strict=False)
    return (*(item if call is None else call(item, origin) for item, call in pairs), *value[len(calls) :])


class Rename(PerSampleStage):
    """Give fields new names; other fields stay."""

    name: ClassVar[str] = "rename"
    shorthand: ClassVar[str | None] = "names"
    is_mapping: ClassVar[bool] = True

    names: Annotated[dict[FieldName, Alternatives], Field(min_length=1)] = Field(
        description="New name: old name, or alternatives joined by `;`.", examples=[{"image": "jpg;png"}]
    )

    @property
    def new_names(self) -> Mapping[str, str]:
        """As `PerSampleStage.new_names`."""
        return self.names

    def bind(self, context: Context, label: str) -> Rename:  # noqa: ARG002 (nothing is drawn)
        """As `PerSampleStage.bind`."""
        context.rename(self.names)
        return self

    def __call__(self, sample: Any, origin: Origin = NOWHERE) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """A copy of `sample` with its fields renamed; the first alternative wins."""
        check_dict("rename", sample)
        kept = {field: value for field, value in sample.items() if field not in self._old_names}
        return kept | {new: _pick("rename", sample, olds) for new, olds in self.names.items()}

    @functools.cached_property
    def _old_names(self) -> frozenset[str]:
        return frozenset(old for olds in self.names.values() for old in olds.split(";"))


class ToTuple(PerSampleStage):
    """Make a tuple of the named fields."""

    name: ClassVar[str] = "to_tuple"
    is_starred: ClassVar[str] = "fields"
    shorthand: ClassVar[str | None] = "fields"

    fields: FieldChoices = Field(
        description="Fields in order; `jpg;png` takes the first that a sample has.", examples=[["jpg;png", "cls"]]
    )

    def bind(self, context: Context, label: str) -> ToTuple:  # noqa: ARG002 (nothing is drawn)
        """As `PerSampleStage.bind`."""
        context.layouts = context.layouts.renamed(dict(enumerate(self.fields)))
        context.places = tuple(self.fields)
        return self

    def __call__(self, sample: Any, origin: Origin = NOWHERE) -> tuple[Any, ...]:  # noqa: ARG002 (nothing is drawn)
        """The fields in the order they were named."""
        return tuple(_pick("to_tuple", sample, names) for names in self.fields)


class ToDict(PerSampleStage):
    """Make a dict of the named fields, each under the name of its first alternative."""

    name: ClassVar[str] = "to_dict"
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
            raise refuse(f"{listing(twice)} would appear twice in the dict; `rename` one first.")
        return fields

    @property
    def new_names(self) -> Mapping[str, str]:
        """As `PerSampleStage.new_names`."""
        return self._names

    def bind(self, context: Context, label: str) -> ToDict:  # noqa: ARG002 (nothing is drawn)
        """As `PerSampleStage.bind`."""
        context.rename(self._names)
        return self

    def __call__(self, sample: Any, origin: Origin = NOWHERE) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """The fields in the order they were named."""
        return {name: _pick("to_dict", sample, names) for name, names in self._names.items()}

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {names.split(";")[0]: names for names in self.fields}


class UserStage(PerSampleStage):
    """A function or class of the user's under the name it was registered by: `- my_augment: {strength: 3}`.

    A function gets the settings as keyword arguments in each call; of a class an instance is made with them once in
    each process, which is called with each value.
    """

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

    def bind(self, context: Context, label: str) -> ValueFunction:
        """As `PerSampleStage.bind`."""
        return context.call(self.name, context.resolve(self.name, self.name, self.settings), label, is_map=True)

    def __reduce__(self) -> tuple[object, tuple[str, dict[str, Any]]]:
        """Its name and settings: the class is made when it is asked for."""
        return _make_user_stage, (self.name, self.settings)


@functools.cache
def user_stage(called: str) -> type[UserStage]:
    """The stage of what is registered under a name."""

    class Registered(UserStage):
        __doc__ = f"The registered `{called}`."
        name: ClassVar[str] = called

    return Registered


def _make_user_stage(name: str, settings: dict[str, Any]) -> UserStage:
    return user_stage(name)(settings=settings)


def _pick(stage: str, sample: Any, names: str) -> Any:
    """The first of the `;` alternatives that a sample has."""
    check_dict(stage, sample)
    for name in names.split(";"):
        if name in sample:
            return sample[name]
    has = ", ".join(field for field in sample if not field.startswith("__"))
    raise WdskitError(f"no field `{names}`; the sample has: {has or 'none'}")


def check_dict(stage: str, sample: Any) -> None:
    """Refuse what is no sample.

    Raises:
        PipelineError: It is not a dict.
    """
    if not isinstance(sample, dict):
        msg = f"{stage}: it takes samples (dicts), but got a {type(sample).__name__}."
        msg += " Put it before to_tuple and batched."
        raise PipelineError(msg)
