"""One-to-one stages as functions `(value, origin) -> value`."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.random import Generator

from wdskit.codecs.fields import decode_field
from wdskit.codecs.formats import INDEX_SPEC, is_image_field
from wdskit.codecs.images import decode_image, decode_index, stores_other_numbers
from wdskit.errors import DecodeError, PipelineError, WdskitError
from wdskit.stages.base import Function, Origin, Run
from wdskit.stages.layouts import NOTHING_KNOWN, Layouts, unmarked

Rng = Callable[[Origin], Any]
_HIDDEN = "__"
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def wants_rng(function: Callable[..., Any]) -> bool:
    """Whether a callable has a parameter `rng` that is free: neither its first one, which gets the value, nor bound by
    a partial.
    """
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    return "rng" in list(parameters)[1:] or ("rng" in parameters and parameters["rng"].kind is _KEYWORD_ONLY)


class Call:
    """A user's function; one with a parameter `rng` gets the Generator of the value's position.

    Args:
        run: Gives the random numbers.
        stage: Name and ordinal of the stage, their key.
        function: Takes the value.
        global_rng: Whether to seed random, numpy and torch by position before each call.
        is_map: Whether what it returns goes on, so that None can only be a forgotten `return`.
        layouts: What is known of the values that it takes.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        function: Callable[..., Any],
        *,
        global_rng: bool = False,
        is_map: bool = False,
        layouts: Layouts = NOTHING_KNOWN,
    ) -> None:
        self.run = run
        self.stage = stage
        self.function = function
        self.global_rng = global_rng
        self.is_map = is_map
        self.layouts = layouts
        self.wants_rng = wants_rng(function)

    def __call__(self, value: Any, origin: Origin) -> Any:
        """The function's result for `value`.

        Raises:
            PipelineError: `is_map`, and it returned nothing.
        """
        if self.global_rng:
            self._seed_globals(origin)
        known = self.layouts.known(value)
        value = unmarked(value) if known else value
        if self.wants_rng:
            result = self.function(value, rng=self.run.rng_of(self.stage)(origin))
        else:
            result = self.function(value)
        if result is None and self.is_map:
            msg = "map: the function returned None. Return the value; to leave some out, use `select`."
            raise PipelineError(msg)
        return self.layouts.mark(result, known) if known else result

    def _seed_globals(self, origin: Origin) -> None:
        import numpy as np
        import torch

        words = self.run.rng_of(f"{self.stage}:global")(origin).integers(0, 1 << 32, 3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 (users' libraries draw from it; that is what it is for)
        torch.manual_seed(int(words[2]))


class OnValue:
    """A function of the value alone."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any, origin: Origin) -> Any:  # noqa: ARG002 (the shape of all steps)
        """The function's result for `value`."""
        return self.function(value)


class Transform:
    """A built-in transform `(sample, rng) -> sample`, where `rng()` is the Generator of the position."""

    def __init__(self, run: Run, stage: str, function: Callable[[Any, Callable[[], Any]], Any]) -> None:
        self.run = run
        self.stage = stage
        self.function = function

    def __call__(self, value: Any, origin: Origin) -> Any:
        """The transformed sample."""
        return self.function(value, lambda: self.rng_at(origin))

    def rng_at(self, origin: Origin) -> Generator:
        """The Generator of a position, as at its first use."""
        return self.run.rng_of(self.stage)(origin)


class Decode:
    """Fields into values: images by `spec`, others by their name; what is not known stays bytes.

    Args:
        spec: A name of `IMAGE_SPECS`, or `index`; None leaves images as they are.
        only: The fields to decode, None for all.
        max_pixels: As in `decode_image`.
        masks: Fields whose numbers must be those that they store, since a later stage takes them for masks.
    """

    def __init__(
        self, spec: str | None, only: Sequence[str] | None, max_pixels: int, masks: frozenset[str] = frozenset()
    ) -> None:
        self.spec = spec
        self.only = None if only is None else frozenset(only)
        self.max_pixels = max_pixels
        self.masks = masks

    def __call__(self, sample: Any) -> dict[str, Any]:
        """A copy of `sample` with its fields decoded."""
        check_dict("decode", sample)
        return {field: self.decode_one(field, value) for field, value in sample.items()}

    def takes(self, field: str, value: Any) -> bool:
        """Whether a field is one to decode."""
        return not field.startswith(_HIDDEN) and isinstance(value, bytes) and (not self.only or field in self.only)

    def decode_one(self, field: str, value: Any) -> Any:
        """The value of one field."""
        if not self.takes(field, value):
            return value
        if not is_image_field(field):
            return decode_field(field, value)
        if self.spec is None:
            return value
        try:
            if self.spec == INDEX_SPEC:
                return decode_index(value, max_pixels=self.max_pixels)
            if field in self.masks:
                self._check_mask(field, value)
            return decode_image(value, self.spec, max_pixels=self.max_pixels)
        except DecodeError as err:
            err.field = field
            raise

    def _check_mask(self, field: str, value: bytes) -> None:
        form = stores_other_numbers(value, max_pixels=self.max_pixels)
        if form:
            msg = f"decode: `{field}` is a mask with {form}, of which `{self.spec}` makes other numbers than it stores."
            advice = f"Put `decode: {{images: index, only: {field}}}` before this stage, which leaves the field then."
            raise PipelineError(f"{msg}\n  {advice}")


def pick(stage: str, sample: Any, names: str) -> Any:
    """The first of the `;` alternatives that a sample has.

    Raises:
        WdskitError: It has none of them.
    """
    check_dict(stage, sample)
    for name in names.split(";"):
        if name in sample:
            return sample[name]
    has = ", ".join(field for field in sample if not field.startswith(_HIDDEN))
    raise WdskitError(f"no field `{names}`; the sample has: {has or 'none'}")


def check_dict(stage: str, sample: Any) -> None:
    """Refuse what is no sample.

    Raises:
        PipelineError: It is not a dict.
    """
    if not isinstance(sample, dict):
        msg = f"{stage}: it takes samples (dicts), but a {type(sample).__name__} came."
        msg += " Put it before to_tuple and batched."
        raise PipelineError(msg)


class ToTuple:
    """The named fields as a tuple."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)

    def __call__(self, sample: Any) -> tuple[Any, ...]:
        """The fields in the order they were named."""
        return tuple(pick("to_tuple", sample, names) for names in self.fields)


class ToDict:
    """The named fields as a dict, each under the name of its first alternative."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = {names.split(";")[0]: names for names in fields}

    def __call__(self, sample: Any) -> dict[str, Any]:
        """The fields in the order they were named."""
        return {name: pick("to_dict", sample, names) for name, names in self.fields.items()}


class Rename:
    """Fields under new names, first alternative wins; other fields stay."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def __call__(self, sample: Any) -> dict[str, Any]:
        """A copy of `sample` with its fields renamed."""
        check_dict("rename", sample)
        gone = {old for olds in self.names.values() for old in olds.split(";")}
        kept = {field: value for field, value in sample.items() if field not in gone}
        return kept | {new: pick("rename", sample, olds) for new, olds in self.names.items()}


class MapDict:
    """A function for each of some fields."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = dict(functions)

    def __call__(self, sample: Any, origin: Origin) -> dict[str, Any]:
        """A copy of `sample` with those fields mapped."""
        check_dict("map_dict", sample)
        mapped = dict(sample)
        for field, function in self.functions.items():
            mapped[field] = function(pick("map_dict", sample, field), origin)
        return mapped


class MapTuple:
    """A function for each place of a tuple; None leaves a place as it is."""

    def __init__(self, functions: Sequence[Function | None]) -> None:
        self.functions = tuple(functions)

    def __call__(self, value: Any, origin: Origin) -> tuple[Any, ...]:
        """The tuple with its places mapped."""
        if not isinstance(value, (tuple, list)):
            raise PipelineError(
                f"map_tuple: it takes tuples, but a {type(value).__name__} came. Put it behind to_tuple."
            )
        if len(value) < len(self.functions):
            raise PipelineError(f"map_tuple: {len(self.functions)} functions for a tuple of {len(value)}.")
        rest = value[len(self.functions) :]
        pairs = zip(value, self.functions, strict=False)
        return (*(item if function is None else function(item, origin) for item, function in pairs), *rest)
