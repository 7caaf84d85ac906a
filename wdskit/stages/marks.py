"""Marks of values: whether an array is an image, and whether the image is a mask.

A mark belongs to the value. Decoders and image stages mark their results. An array, a tensor or a PIL image keeps its
mark when a stage or a function moves it to another field. Collating puts the channels of images first, and no transform
blends a mask. The name of a field decides only for values without a mark (`layout_of`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeIs

from wdskit.codecs.fields import NPY_FIELDS
from wdskit.codecs.formats import is_image_field

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Layout: TypeAlias = Literal["image", "array", "lost"] | None
IMAGE_CHANNELS = frozenset({1, 3, 4})


@dataclass(frozen=True)
class Mark:
    """What is known about one value besides its type and shape.

    Attributes:
        layout: "image": an array (height, width[, channels]) or a tensor ([channels, ]height, width). "array": not an
            image; a batch stacks the value without a change of axes. "lost": a new array that a function put at the
            place of an image in a tuple; it may be an image or not. None: unknown.
        is_mask: Whether the numbers are classes or depths, which no transform may blend or scale.
        changed: Part of an error message: why the numbers can no longer be those of a mask in the file. "" if they can.
        is_list: Whether the value was a JSON list. Lists of different lengths are collated to a `Ragged`.
    """

    layout: Layout
    is_mask: bool = False
    changed: str = ""
    is_list: bool = False


IMAGE = Mark("image")
MASK = Mark("image", is_mask=True)
ARRAY = Mark("array")
LIST = Mark("array", is_list=True)
_LOST = Mark("lost")


class _Reference(weakref.ref[Any]):
    """A weak reference to a value. Stores the mark of the value."""

    __slots__ = ("key", "mark")
    key: int
    mark: Mark


_REFERENCES: dict[int, _Reference] = {}
"""Maps `id(value)` to the value's reference. An entry is removed when its value is deleted."""


def _remove_entry(reference: weakref.ref[Any], references: dict[int, _Reference] = _REFERENCES) -> None:
    references.pop(reference.key, None)  # type: ignore[attr-defined]  # a new value cannot have this id yet


def marked(value: T, mark: Mark) -> T:
    """Set the mark of an array, a tensor or a PIL image, and return the same object. The mark replaces an earlier
    mark.
    """
    reference = _Reference(value, _remove_entry)
    reference.key, reference.mark = id(value), mark
    _REFERENCES[reference.key] = reference
    return value


def mark_of(value: object) -> Mark | None:
    """Return the mark of a value; None if the value has no mark."""
    reference = _REFERENCES.get(id(value))
    return reference.mark if reference is not None and reference() is value else None


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Return whether a value is a tensor of torch. Does not import torch."""
    return hasattr(value, "untyped_storage")


def count_rows(column: Any) -> int:
    """Return the number of rows in a column of a batch: an array, a tensor, a `Ragged` or a list. TypeError: The column
    has no length, such as a tensor without axes.
    """
    return column.size(0) if is_tensor(column) and column.ndim else len(column)  # a nested tensor has no `len`


def names_image(field: str) -> bool:
    """Return whether a field has the name of an image field, such as `jpg`."""
    return not field.startswith("__") and is_image_field(field)


def layout_of(slot: object, value: object) -> Layout:
    """Return the layout of a value: the layout in its mark, or the layout for the name of its field if the value has no
    mark or the mark has no layout. Return None if the name does not tell the layout.

    Args:
        slot: Name of the field; for a value without a name, its position in a tuple or None.
        value: Any value.
    """
    mark = mark_of(value)
    if mark is not None and mark.layout is not None:
        return mark.layout
    if not isinstance(slot, str) or slot.startswith("__"):
        return None
    if is_image_field(slot):
        return "image"
    return "array" if slot.rpartition(".")[2].lower() in NPY_FIELDS else None


def is_image_in(field: str, value: object) -> bool:
    """Return whether a field holds an image: by the value's mark, or without a mark by the field's name (see
    `layout_of`). The type of the value is not checked. Return False if the field's name starts with `__`.
    """
    return not field.startswith("__") and layout_of(field, value) == "image"


def may_be_image(array: NDArray[Any]) -> bool:
    """Return whether the shape and dtype fit an image with channels: (height, width, 1, 3 or 4), uint8 or float. The
    array may still be something else.
    """
    is_pixels = array.dtype == np.uint8 or array.dtype.kind == "f"
    return is_pixels and array.ndim == 3 and array.shape[2] in IMAGE_CHANNELS


SampleMarks = list[tuple[object, Any, Mark | None]]
"""Slot, value and mark of each marked value of a sample, and of its unmarked arrays and tensors."""


def marks_in(sample: Any) -> SampleMarks:
    """Return (slot, value, mark) of each array, tensor and marked value in a sample, for `transfer_marks`. The mark of
    an array or a tensor may be None. Return an empty list if no value has a mark.

    `sample` is a dict, a tuple, a list or a bare value.
    """
    found: SampleMarks = []
    for slot, item in _items(sample):
        mark = mark_of(item)
        if mark is not None or isinstance(item, np.ndarray) or is_tensor(item):
            found.append((slot, item, mark))
    return found if any(mark for _, _, mark in found) else []


def transfer_marks(known: SampleMarks, result: Any) -> Any:
    """Mark the values in a function's result that the function made from marked values. Return the result with the
    marked values, or `result` itself if no value gets a mark. Values that have a mark already keep this mark.

    - A view or a copy of a marked value gets the value's mark. A tensor that shares the memory of a mask is a mask.
    - A new value under the same key of a dict, or in place of a bare value, gets the mark of the old value, unless the
      old value is a mask and the new value is of floats.
    - A new array in place of an image in a tuple gets the layout "lost", because it may be an image or another array.
    - A new value that has the type, dtype and number of axes of a value in another slot, but not of the old value in
      its own slot, gets no mark. But in place of a mask, except in a tuple, a new value of integers gets no mark only
      if it also has another number of axes than the mask, and the channels of the other value.

    Args:
        known: Result of `marks_in` for the function's argument, from before the call.
        result: The function's result. It is not changed: the marked values are views, in a new dict or tuple; of a bare
            value, the view is returned. A list is returned unchanged.
    """
    changed = {}
    if known:
        for slot, item in _items(result) if not isinstance(result, list) else ():
            if (isinstance(item, np.ndarray) or is_tensor(item)) and mark_of(item) is None:
                mark = _mark_from(known, slot, item)
                if mark is not None:
                    changed[slot] = marked(item[...], mark)
    if not changed:
        return result
    if isinstance(result, dict):
        return {**result, **changed}
    if isinstance(result, tuple):
        items = (changed.get(place, item) for place, item in enumerate(result))
        return result._make(items) if hasattr(result, "_make") else tuple(items)
    return changed[None]


def _mark_from(known: SampleMarks, slot: object, item: Any) -> Mark | None:
    """Return the mark for the value `item` in a function's result, by the rules of `transfer_marks`; None for no mark.

    Args:
        known: Result of `marks_in` for the function's argument.
        slot: Key or position of `item` in the result; None if `item` is the result.
        item: An array or a tensor without a mark.
    """
    for is_same in (_is_view, _is_copy):
        found = {mark: at == slot for at, value, mark in known if is_same(item, value)}
        if found:
            return max(found, key=lambda mark: (found[mark], mark is not None and mark.is_mask))
    if any(mark is not None and mark.is_mask and _shares_memory(item, value) for _, value, mark in known):
        return Mark(None, is_mask=True)
    before, value = next(((mark, value) for at, value, mark in known if at == slot), (None, None))
    is_float = item.dtype.kind == "f" if isinstance(item, np.ndarray) else item.dtype.is_floating_point
    if before is not None and before.is_mask and not is_float and not isinstance(slot, int):
        other_axes = item.ndim != getattr(value, "ndim", None)
        if not (other_axes and any(_has_form(other, item) for _, other, _ in known)):
            return before  # such as other class numbers, or a one-hot mask, but not an image in place of the mask
    similar = [other for _, other, _ in known if _form(other) == _form(item)]
    if before is None or (similar and _form(value) != _form(item)):
        return None  # `item` was probably made from a value in another slot
    if isinstance(slot, int):
        return _LOST if before.layout != "array" and isinstance(item, np.ndarray) else None
    return None if before.is_mask and is_float else before


def _form(value: Any) -> tuple[object, ...]:
    return type(value), getattr(value, "dtype", None), getattr(value, "ndim", None)


def _has_form(value: Any, image: Any) -> bool:
    """Return whether `value` has the type, the dtype, the number of axes and the channels of `image`, an array or a
    tensor. Only an array or a tensor of three axes has channels.
    """
    axis = 2 if isinstance(image, np.ndarray) else 0
    return _form(value) == _form(image) and (image.ndim != 3 or bool(value.shape[axis] == image.shape[axis]))


def _is_view(item: Any, value: Any) -> bool:
    """Return whether `item` is a view of `value` with all its channels, such as a crop or a mirrored image."""
    if type(item) is not type(value) or item.ndim != value.ndim or item.dtype != value.dtype:
        return False
    if isinstance(item, np.ndarray):
        return (item.ndim < 3 or item.shape[2] == value.shape[2]) and np.may_share_memory(item, value)
    is_shared = bool(item.untyped_storage().data_ptr() == value.untyped_storage().data_ptr())
    return is_shared and (item.ndim < 3 or item.shape[0] == value.shape[0])


def _is_copy(item: Any, value: Any) -> bool:
    if type(item) is not type(value) or item.shape != value.shape or item.dtype != value.dtype or not item.shape:
        return False
    if isinstance(item, np.ndarray):
        return np.array_equal(item[:1], value[:1]) and np.array_equal(item, value)
    return bool(item.device == value.device and (item == value).all())


def _shares_memory(item: Any, value: Any) -> bool:
    """Return whether `item` is a tensor that starts in the memory of the array `value`."""
    return is_tensor(item) and isinstance(value, np.ndarray) and bool(item.data_ptr() == value.ctypes.data)


def _items(value: Any) -> Iterator[tuple[object, Any]]:
    """Yield slot and value for each item of a sample; a bare value has the slot None."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    else:
        yield None, value
