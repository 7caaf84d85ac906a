"""What is known of a sample's fields before there is a sample: where images are, and where stored numbers.

A batch puts the channels of images first. That an array is one, (height, width[, channels]), is known by its field's
name, and of an array that an image stage has handled under any name: a function of the user's may hand it on under
another one. The arrays of npy files are as they are stored. Of others nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import NPY_FIELDS
from wdskit.codecs.formats import INDEX_SPEC, is_image_field

Slot = str | int
"""A field of a dict, or a place in a tuple."""


IMAGE_CHANNELS = frozenset({1, 3, 4})


def names_image(field: str) -> bool:
    """Whether a field of a sample holds an image by its name."""
    return not field.startswith("__") and is_image_field(field)


class _Known(np.ndarray[Any, Any]):
    """An array that says itself whether it is an image. Functions of the user's never get one."""

    is_image: bool | None = None


@dataclass(frozen=True)
class Layouts:
    """What is known of the slots at one place of a pipeline.

    Attributes:
        images: Those with images, beside the fields that are called so.
        arrays: Those with arrays of npy files, beside the fields that are called so.
    """

    images: frozenset[Slot] = frozenset()
    arrays: frozenset[Slot] = frozenset()

    def is_image(self, slot: Slot) -> bool | None:
        """Whether a slot's arrays are images, None where nobody knows."""
        if slot in self.images:
            return True
        if slot in self.arrays:
            return False
        if isinstance(slot, int) or slot.startswith("__"):
            return None
        if is_image_field(slot):
            return True
        return False if slot.rpartition(".")[2].lower() in NPY_FIELDS else None

    def renamed(self, names: Mapping[str, str] | Mapping[int, str]) -> Layouts:
        """Behind a stage that gives fields, `;` between alternatives, new names or places."""
        found = {new: [self.is_image(old) for old in olds.split(";")] for new, olds in names.items()}
        images = {new for new, olds in found.items() if True in olds}
        arrays = {new for new, olds in found.items() if not any(olds) and False in olds}
        return Layouts((self.images - names.keys()) | images, (self.arrays - names.keys()) | arrays)

    def handled(self, fields: Iterable[str]) -> Layouts:
        """Behind a stage that handles these fields, `;` between alternatives, as images."""
        return Layouts(self.images | {name for names in fields for name in names.split(";")}, self.arrays)

    def known(self, value: Any) -> list[tuple[NDArray[Any], bool]]:
        """The arrays of a sample of which it is known whether they are images."""
        found = []
        for slot, item in _items(value):
            if isinstance(item, np.ndarray):
                is_image = None if slot is None else self.is_image(slot)
                is_image = mark_of(item) if is_image is None else is_image
                if is_image is not None:
                    found.append((item, is_image))
        return found

    def mark(self, value: Any, known: Iterable[tuple[NDArray[Any], bool]]) -> Any:
        """A function's result, in which arrays that it was given and hands on, or a part of them, are still known."""
        changed: dict[Any, NDArray[Any]] = {}
        for slot, item in _items(value):
            if isinstance(item, np.ndarray) and (slot is None or self.is_image(slot) is None):
                marks = [is_image for array, is_image in known if _is_part(item, array)]
                if marks:
                    marked = item.view(_Known)
                    marked.is_image = marks[0]
                    changed[slot] = marked
        return _with(value, changed) if changed else value


NOTHING_KNOWN = Layouts()
"""Beside the names of fields."""


@dataclass(frozen=True)
class Stored:
    """Which image fields hold the numbers that their files store, one a pixel: no transform may blend or scale them.

    Attributes:
        numbers: By name, those that `decode: index` took.
        others: By name, those that another `decode` took.
        rest: What the image fields are that no `decode` named: decoded by `index`, otherwise, or None for not yet.
    """

    numbers: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    rest: bool | None = None

    def holds(self, field: str) -> bool:
        """Whether it is such a field."""
        if field in self.numbers or field in self.others:
            return field in self.numbers
        return self.rest is True and is_image_field(field)

    def decoded(self, images: str | None, only: Sequence[str] | None) -> Stored:
        """Behind a `decode`, which leaves what is decoded already."""
        if images is None or self.rest is not None:
            return self
        is_index = images == INDEX_SPEC
        if not only:
            return replace(self, rest=is_index)
        names = frozenset(only) - self.numbers - self.others
        return replace(self, numbers=self.numbers | names) if is_index else replace(self, others=self.others | names)

    def renamed(self, names: Mapping[str, str]) -> Stored:
        """Behind a `rename`."""
        held = {new for new, olds in names.items() if any(self.holds(old) for old in olds.split(";"))}
        return replace(self, numbers=(self.numbers - {*names}) | held, others=self.others | ({*names} - held))


def mark_of(array: NDArray[Any]) -> bool | None:
    """Whether an array is an image, as far as it says so itself."""
    return array.is_image if isinstance(array, _Known) else None


def unmarked(value: Any) -> Any:
    """A sample for a function of the user's."""
    marked = {slot: item.view(np.ndarray) for slot, item in _items(value) if isinstance(item, _Known)}
    return _with(value, marked) if marked else value


def may_be_image(array: NDArray[Any]) -> bool:
    """Whether it is of a shape and kind that could be an image with channels, or else something with three axes."""
    is_pixels = array.dtype == np.uint8 or array.dtype.kind == "f"
    return is_pixels and array.ndim == 3 and array.shape[2] in IMAGE_CHANNELS


def _items(value: Any) -> Iterator[tuple[Slot | None, Any]]:
    """The slots of a sample; a bare value has one without a name."""
    if isinstance(value, dict):
        yield from ((slot, item) for slot, item in value.items() if isinstance(slot, str))
    elif isinstance(value, tuple):
        yield from enumerate(value)
    else:
        yield None, value


def _with(value: Any, changed: dict[Any, NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        return {**value, **changed}
    if isinstance(value, tuple):
        items = (changed.get(place, item) for place, item in enumerate(value))
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return changed[None]


def _is_part(item: NDArray[Any], array: NDArray[Any]) -> bool:
    """Whether it is the array itself, or some rows and columns of it, in any order."""
    same_axes = (
        item.ndim == array.ndim and item.dtype == array.dtype and (item.ndim < 3 or item.shape[2] == array.shape[2])
    )
    return same_axes and np.may_share_memory(item, array)
