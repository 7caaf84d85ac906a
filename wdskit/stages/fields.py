"""The stages that work on the fields of a sample. Each class has the settings, YAML form and function of one stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, create_model, field_validator

from wdskit.codecs.fields import decode_field, follow_path, is_json_field
from wdskit.codecs.formats import INDEX_SPEC, is_image_field
from wdskit.config.types import (
    VALID,
    Alternatives,
    Bool,
    Count,
    FieldChoices,
    FieldName,
    FieldNames,
    refuse,
    show,
    unknown_setting,
)
from wdskit.errors import DecodeError, PipelineError, WdskitError
from wdskit.limits import MAX_PIXELS
from wdskit.stages.base import Context, Function, PerSampleStage
from wdskit.stages.run import NO_ORIGIN, NOTHING, Live, Numbers, Origin, Roles, ValueFunction

_MAX_EXACT = 1 << 53  # float64 is exact for whole numbers up to this number

ImageSpec = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba", "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch",
    "torchrgba", "pill", "pil", "pilrgb", "pilrgba", "index",
]  # fmt: skip
NumberOrNames = Annotated[
    Annotated[Count, Tag("[number]")] | Annotated[FieldNames, Tag("[names]")],
    Discriminator(lambda value: "[names]" if isinstance(value, (str, list, tuple)) else "[number]"),
]
Functions = Annotated[tuple[Function | None, ...], Field(min_length=1)]


class Decode(PerSampleStage):
    """Decode fields to values. Nothing is unpickled; fields with unknown names stay bytes.

    So do fields that no later stage and not the output uses, damaged or not. A function for whole samples uses all.

    webdataset also decodes pickles (`pkl`, `pyd`, `pth`), `mp`, `msg`, `npz`, `ten`, `tb` and `*.gz`. They stay
    bytes. Decode them with `map_dict`.
    """

    name: ClassVar[str] = "decode"
    shorthand: ClassVar[str | None] = "images"

    images: ImageSpec | None = Field(
        None,
        description="What images become, in webdataset's terms such as `rgb8` or `pil`; `index`: the numbers that "
        "masks store, one per pixel. Default: images stay bytes.",
        examples=["rgb8"],
    )
    only: FieldNames | None = Field(None, description="The fields to decode. Default: all.")
    fuse: Bool = Field(
        True,
        description="Whether decoding and the crop directly after it run as one step. Native code then decodes a large "
        "JPEG only as large as the crop needs; its pixels differ by about 1 of 255. Float images (`rgb`, ...) are "
        "resized as uint8 and become floats after it.",
    )
    max_pixels: Count = Field(MAX_PIXELS, description="Largest width x height that an image's header may give.")

    def bind(self, context: Context, label: str) -> FieldDecoder:  # noqa: ARG002 (nothing is drawn)
        """Return the function that decodes the fields of a sample. `label` has no effect."""
        return FieldDecoder(self.images, frozenset(self.only or ()), self.max_pixels, context.live)

    @property
    def mask_names(self) -> tuple[str, ...]:
        """The fields whose numbers are wanted: those of `only`, if images are decoded to `index`."""
        return self.only or () if self.images == INDEX_SPEC else ()

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        numbers: Numbers = "mask" if self.images == INDEX_SPEC else "colours"
        return roles if self.images is None else roles.decoded(self.only or (), numbers)


@dataclass(frozen=True)
class FieldDecoder:
    """The running form of `decode`. It can be pickled.

    Attributes:
        images: The setting of `Decode`.
        only: The fields to decode; empty for all fields.
        max_pixels: Largest width x height that an image's header may give.
        live: The fields that a later stage or the output uses; all others stay bytes.
    """

    images: str | None
    only: frozenset[str]
    max_pixels: int
    live: Live

    def __call__(self, sample: Any, origin: Origin = NO_ORIGIN) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """Return a copy of `sample` with the values of `decode_one`. `origin` has no effect.

        Raises:
            PipelineError: The sample is not a dict.
            WdskitError: The sample has none of the fields in `only`.
            DecodeError: The bytes of a field cannot be decoded.
        """
        check_dict("decode", sample)
        self.check_fields(sample)
        return {field: self.decode_one(field, value) for field, value in sample.items()}

    def check_fields(self, fields: Collection[str]) -> None:
        """Check that `fields`, the names of a sample's fields, have at least one name of `only`. Any `fields` pass if
        `only` is empty.

        Raises:
            WdskitError: `fields` has no name of `only`. The message lists `only`.
        """
        if self.only and self.only.isdisjoint(fields):
            names = "`, `".join(sorted(self.only))
            raise WdskitError(f"no field `{names}` (`only`); the sample has: {list_fields(fields)}")

    def takes(self, field: str, value: Any) -> bool:
        """Return whether a field is decoded: its value is bytes, `only` is empty or has the field, and the field is
        used. Fields such as `__key__` are never decoded.
        """
        is_wanted = (not self.only or field in self.only) and self.live.has(field)
        return is_wanted and isinstance(value, bytes) and not field.startswith("__")

    def decode_one(self, field: str, value: Any) -> Any:
        """Return the decoded value of a field. Return `value` itself if `takes` returns False, if the field's name is
        unknown, or if images stay bytes.

        Raises:
            DecodeError: The bytes cannot be decoded.
        """
        if not self.takes(field, value):
            return value
        if not is_image_field(field):
            return decode_field(field, value)
        if self.images is None:
            return value
        from wdskit.codecs.images import decode_image, decode_index  # imports PIL, which other fields do not need

        try:
            if self.images == INDEX_SPEC:
                return decode_index(value, max_pixels=self.max_pixels)
            return decode_image(value, self.images, max_pixels=self.max_pixels)
        except DecodeError as err:
            err.field = field
            raise


class Map(PerSampleStage):
    """Call a function for each value; its result is the new value."""

    name: ClassVar[str] = "map"
    calls_user: ClassVar[bool] = True
    takes_any: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(
        description="A function, or the name of a registered one. If it has a parameter `rng`, it gets a numpy "
        "Generator that depends only on the seed and the position of the sample.",
        examples=["my_augment"],
    )
    global_rng: Bool = Field(
        False,
        description="Whether to seed random, numpy and torch before each call, from the seed and the position of the "
        "sample.",
    )

    def bind(self, context: Context, label: str) -> ValueFunction:
        """Return the function that maps a sample and its origin to the result of `fn`. `label` is the key of the random
        numbers (see `PerSampleStage.bind`).

        Raises:
            PipelineError: The name of the function is unknown, or `global_rng` is set and the run has several threads.
        """
        if self.global_rng and context.run.num_threads > 1:
            msg = f"map: global_rng seeds one generator, which {context.run.num_threads} threads of a process share."
            raise PipelineError(f"{msg}\n  Take `rng` as a parameter instead, or use threads: 1.")
        return context.call("map", self.fn, label, global_rng=self.global_rng, is_map=True)


class MapDict(PerSampleStage):
    """Call a function for each named field; its result is the new value of the field. A missing field is an error."""

    name: ClassVar[str] = "map_dict"
    calls_user: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "fields"
    is_mapping: ClassVar[bool] = True

    fields: Annotated[dict[FieldName, Function], Field(min_length=1)] = Field(
        description="Field name: a function, or the name of a registered one.", examples=[{"cls": "my_label"}]
    )

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return roles.after_function(self.fields)

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using(self.fields)

    def bind(self, context: Context, label: str) -> ValueFunction:
        """Return the function that maps a sample (a dict) and its origin to a new dict. `label` is the key of the
        random numbers (see `PerSampleStage.bind`). PipelineError: The name of a function is unknown.
        """
        calls = {field: context.call("map_dict", fn, f"{label}:{field}") for field, fn in self.fields.items()}
        return functools.partial(_map_fields, calls)


def _map_fields(calls: Mapping[str, ValueFunction], sample: dict[str, Any], origin: Origin) -> dict[str, Any]:
    return sample | {field: function(pick("map_dict", sample, field), origin) for field, function in calls.items()}


class MapTuple(PerSampleStage):
    """Call a function for each item of a tuple; its result is the new item. null leaves an item unchanged.

    Items after the last function stay unchanged. A tuple with fewer items than functions is an error.
    """

    name: ClassVar[str] = "map_tuple"
    calls_user: ClassVar[bool] = True
    is_starred: ClassVar[str] = "fns"
    shorthand: ClassVar[str | None] = "fns"

    fns: Functions = Field(
        description="Functions, or names of registered ones; null leaves an item unchanged.",
        examples=[["my_augment", None]],
    )

    def bind(self, context: Context, label: str) -> ValueFunction:
        """Return the function that maps a tuple and its origin to a new tuple. The function raises PipelineError for a
        tuple with too few items. `label` is the key of the random numbers (see `PerSampleStage.bind`).

        Raises:
            PipelineError: The name of a function is unknown.
        """
        places = enumerate(self.fns)
        calls = [None if fn is None else context.call("map_tuple", fn, f"{label}:{place}") for place, fn in places]
        return functools.partial(_map_places, calls)


def _map_places(calls: Sequence[ValueFunction | None], value: Any, origin: Origin) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) < len(calls):
        msg = f"map_tuple: {len(calls)} functions need a tuple of as many items, not {show(value)}."
        raise PipelineError(f"{msg} Put it after to_tuple.")
    pairs = zip(value, calls, strict=False)
    return (*(item if call is None else call(item, origin) for item, call in pairs), *value[len(calls) :])


class Rename(PerSampleStage):
    """Give fields new names; other fields stay. A missing field, or a new name that another field has, is an error."""

    name: ClassVar[str] = "rename"
    is_light: ClassVar[bool] = True
    shorthand: ClassVar[str | None] = "names"
    is_mapping: ClassVar[bool] = True

    names: Annotated[dict[FieldName, Alternatives], Field(min_length=1)] = Field(
        description="New name: old name, or alternatives joined by `;`, the first that exists.",
        examples=[{"image": "jpg;png"}],
    )

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return roles.renamed(self.names)

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using(self.names.values(), without=self.names)

    def __call__(self, sample: Any, origin: Origin = NO_ORIGIN) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """Return a new dict: the other fields of `sample`, then the fields with new names, in the order of `names`.

        Of alternatives, the first that exists is used. A path such as `json.caption` copies a value; `json` stays.

        Raises:
            PipelineError: The sample is not a dict, or `json` is not decoded yet and a path such as `json.caption`
                needs it.
            WdskitError: A field is missing, or a new name is the name of another field that is kept.
        """
        found = {new: find("rename", sample, olds) for new, olds in self.names.items()}
        renamed = {old for old, _ in found.values() if old in sample}
        for new, (old, _) in found.items():
            if new in sample and new not in renamed:
                msg = f"`{new}: {old}` would replace the field `{new}` of the sample"
                raise WdskitError(f"{msg}. Use another name, or leave `{new}` out first, with to_dict")
        kept = {field: value for field, value in sample.items() if field not in renamed}
        return kept | {new: value for new, (_, value) in found.items()}


class _ChoosesFields(PerSampleStage):
    """The base class of `ToTuple` and `ToDict`."""

    is_light: ClassVar[bool] = True
    is_starred: ClassVar[str] = "fields"
    shorthand: ClassVar[str | None] = "fields"

    fields: FieldChoices = Field(
        description="Fields, or paths in JSON, in order; `jpg;png` takes the first that a sample has. A missing field "
        "is an error.",
        examples=[["jpg;png", "cls"]],
    )

    def live_before(self, live: Live) -> Live:  # noqa: ARG002 (no other field is left)
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return NOTHING.using(self.fields)


class ToTuple(_ChoosesFields):
    """Make a tuple of the named fields. With `tail: pad`, also name `__valid__`, the mask of samples in a batch."""

    name: ClassVar[str] = "to_tuple"

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return replace(roles, places=self.fields)

    def __call__(self, sample: Any, origin: Origin = NO_ORIGIN) -> tuple[Any, ...]:  # noqa: ARG002 (nothing is drawn)
        """Return the values of `fields`, in the order of `fields`; True for `__valid__`, which the engine replaces in
        padded batches. WdskitError: A field is missing. PipelineError: The sample is not a dict, or `json` is not
        decoded yet and a path such as `json.caption` needs it.
        """
        return tuple(names == VALID or pick("to_tuple", sample, names) for names in self.fields)


class ToDict(_ChoosesFields):
    """Make a dict of the named fields, each under the name of its first alternative."""

    name: ClassVar[str] = "to_dict"

    @field_validator("fields")
    @classmethod
    def _check_names(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        names = [field.split(";")[0] for field in fields]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise refuse(f"{show(twice[0])} would appear twice in the dict; `rename` one first.")
        return fields

    def __call__(self, sample: Any, origin: Origin = NO_ORIGIN) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """Return a dict of `fields`, in the order of `fields`. The key of a field is the name of its first alternative.
        WdskitError: A field is missing. PipelineError: The sample is not a dict, or `json` is not decoded yet and a
        path such as `json.caption` needs it.
        """
        return {name: pick("to_dict", sample, names) for name, names in self._names.items()}

    def roles_after(self, roles: Roles) -> Roles:
        """Return the roles of the fields after this stage; `roles` are those before it."""
        return roles.renamed({new: names for new, names in self._names.items() if new != names})

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {names.split(";")[0]: names for names in self.fields}


class MultiHot(PerSampleStage):
    """Make a vector of the labels of a sample: 1 for each class that it has, 0 for the others; float32 (classes,)."""

    name: ClassVar[str] = "multi_hot"
    model_config = ConfigDict(populate_by_name=True)  # `source` in Python, where `from` is no name
    example: ClassVar[dict[str, Any]] = {"from": "json.labels", "classes": 80}

    source: Alternatives = Field(
        alias="from",
        description="The field with a list of class numbers or names, such as `json.labels`, or with one number or "
        "name. A label that is not in `classes` is an error.",
        examples=["json.labels"],
    )
    classes: NumberOrNames = Field(
        description="The number of classes, whose labels are 0, 1, ..., or the names of the classes in order.",
        examples=[80],
    )
    to: FieldName = Field("multi_hot", description="The field that gets the vector.")

    @functools.cached_property
    def _numbers(self) -> dict[Any, int]:
        names: Sequence[Any] = range(self.classes) if isinstance(self.classes, int) else self.classes
        return {name: number for number, name in enumerate(names)}

    def live_before(self, live: Live) -> Live:
        """Return the fields that this stage or later stages use; `live` are those of the later stages."""
        return live.using([self.source], without=[self.to])

    def __call__(self, sample: Any, origin: Origin = NO_ORIGIN) -> dict[str, Any]:  # noqa: ARG002 (nothing is drawn)
        """Return a copy of `sample` with the vector in the field `to`.

        Raises:
            PipelineError: The sample is not a dict, or `json` is not decoded yet and a path such as `json.caption`
                needs it.
            WdskitError: The field is missing, or a label is not one of `classes`.
        """
        value = pick("multi_hot", sample, self.source)
        labels = value.tolist() if isinstance(value, np.ndarray) else value
        vector = np.zeros(len(self._numbers), np.float32)
        for label in labels if isinstance(labels, list) else [labels]:
            if type(label) not in {int, str} or label not in self._numbers:
                raise WdskitError(f"multi_hot: `{self.source}` has {label!r}, which is not one of the classes")
            vector[self._numbers[label]] = 1
        return {**sample, self.to: vector}


class UserStage(PerSampleStage):
    """A stage that calls a user's registered function or class: `- my_augment: {strength: 3}`.

    A function gets the settings as keyword arguments in each call. A class is instantiated once with the settings, in
    the process that makes the loader. Each worker process has a copy of the instance and calls it for each value.
    """

    shorthand: ClassVar[str | None] = "settings"
    is_mapping: ClassVar[bool] = True
    takes_any: ClassVar[bool] = True
    calls_user: ClassVar[bool] = True

    known: ClassVar[tuple[str, ...] | None] = None
    """The parameters of the function or class; None if it takes any."""

    settings: dict[str, Any] = Field({}, description="Its keyword arguments.")

    def bind(self, context: Context, label: str) -> ValueFunction:
        """Return the function that maps a sample and its origin to the result of the registered function or class. A
        class is instantiated here. `label` is the key of the random numbers (see `PerSampleStage.bind`). PipelineError:
        The name is unknown, or the settings are not accepted.
        """
        return context.call(self.name, context.resolve(self.name, self.name, self.settings), label, is_map=True)

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        """Return the function and its arguments from which pickle makes an equal stage."""
        # pickle cannot import the class, which `user_stage` makes.
        return _make_user_stage, (self.name, self.known, self.settings)


@functools.cache
def user_stage(registered_name: str, parameters: tuple[str, ...] | None = None) -> type[UserStage]:
    """Return the stage class of a registered function or class with these parameters; None if it takes any. Equal
    arguments give the same class.
    """

    def check_name(setting: str) -> str:
        if parameters is not None and setting not in parameters:
            raise refuse(unknown_setting(setting, parameters))
        return setting

    names = dict[Annotated[str, AfterValidator(check_name)], Any]
    made = create_model("Registered", __base__=UserStage, settings=(names, UserStage.model_fields["settings"]))
    made.__doc__ = f"The registered `{registered_name}`."
    made.name, made.known = registered_name, parameters
    return made


def _make_user_stage(name: str, known: tuple[str, ...] | None, settings: dict[str, Any]) -> UserStage:
    return user_stage(name, known)(settings=settings)


def pick(stage: str, sample: Any, names: str) -> Any:
    """Return the value of the first alternative in `names`, such as `jpg;png`, that a sample has as a field or as a
    path in JSON. A list of numbers at a path is returned as an array, see `as_array`.

    Args:
        stage: Name of the stage, for the messages of a PipelineError.
        sample: A dict.
        names: Fields or paths, joined by `;`.

    Raises:
        PipelineError: The sample is not a dict, or `json` is not decoded yet and a path such as `json.caption` needs
            it.
        WdskitError: The sample has none of the alternatives.
    """
    return find(stage, sample, names)[1]


def find(stage: str, sample: Any, names: str) -> tuple[str, Any]:
    """Return the first alternative in `names` that a sample has, and its value. Arguments and errors are those of
    `pick`.
    """
    check_dict(stage, sample)
    for name in names.split(";"):
        if name in sample:
            return name, sample[name]
        with contextlib.suppress(KeyError):
            return name, _value_at_path(stage, sample, name)
    raise WdskitError(f"no field `{names}`; the sample has: {list_fields(sample)}")


def _value_at_path(stage: str, sample: Mapping[str, Any], name: str) -> Any:
    """Return the value at a path such as `json.caption`: the name of a JSON field, and names in its value. A list of
    numbers becomes an array, see `as_array`. If several JSON fields fit, the field with the longest name is used.

    Raises:
        KeyError: The path does not exist.
        PipelineError: The JSON field is not decoded yet. The message starts with `stage`.
    """
    parts = name.split(".")
    for stop in range(len(parts) - 1, 0, -1):
        field = ".".join(parts[:stop])
        if field not in sample or not is_json_field(field):
            continue
        if isinstance(sample[field], bytes | bytearray | memoryview):
            raise PipelineError(f"{stage}: `{name}`: `{field}` is not decoded yet. Put `decode` before it")
        return as_array(follow_path(sample[field], parts[stop:]))
    raise KeyError(name)


def as_array(value: Any) -> Any:
    """Return a list of numbers, or nested lists of equal lengths, as an array.

    Numbers are of type int or float, not bool. The dtype is int64 if all numbers are of type int, otherwise float64. An
    empty list becomes int64 (0,). Any other value is returned unchanged, also a list with an int that the dtype cannot
    store exactly.
    """
    if not isinstance(value, list):
        return value
    flat: Any = value
    while flat and isinstance(flat[0], list):
        flat = [each for one in flat if isinstance(one, list) for each in one]
    has_fractions = any(type(each) is float for each in flat)
    most = _MAX_EXACT if has_fractions else np.iinfo(np.int64).max
    if not all(type(each) is float or (type(each) is int and abs(each) <= most) for each in flat):
        return value
    try:
        return np.array(value, np.float64 if has_fractions else np.int64)
    except ValueError:  # lists of different lengths
        return value


def list_fields(fields: Collection[str]) -> str:
    """Return the names of `fields` for a message, without names such as `__key__`; "none" if no name is left."""
    return ", ".join(field for field in fields if not field.startswith("__")) or "none"


def check_dict(stage: str, sample: Any) -> None:
    """Check that a sample is a dict.

    Raises:
        PipelineError: The sample is not a dict. The message starts with `stage`.
    """
    if not isinstance(sample, dict):
        msg = f"{stage}: it takes samples (dicts), but got a {type(sample).__name__}."
        raise PipelineError(f"{msg} Put it before to_tuple and batched.")
