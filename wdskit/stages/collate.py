"""A list of samples -> one batch: what each kind of value becomes, and images in channels_last memory with one copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.errors import PipelineError
from wdskit.stages.layouts import IMAGE_CHANNELS, NOTHING_KNOWN, Layouts, mark_of, may_be_image
from wdskit.stages.memory import FRESH, Memory
from wdskit.stages.ragged import make_ragged

_NUMBERS = "biufc"  # kinds of numpy dtypes that torch has


def collate(
    samples: Sequence[Any],
    layouts: Layouts = NOTHING_KNOWN,
    memory: Memory = FRESH,
    ready: Mapping[Any, torch.Tensor] | None = None,
    ragged: frozenset[str | int] = frozenset(),
) -> Any:
    """Make one batch of samples that are all tuples of one length, all dicts with the same keys, or all bare values.

    In each slot int becomes a tensor of int64, bool of bool, float of float64, numpy scalars of their dtype; arrays and
    tensors of one shape are stacked; everything else (text, bytes, dicts, lists, None, PIL images, ...) is a list.

    Args:
        samples: At least one.
        layouts: Which dict keys or tuple positions hold images. There arrays (height, width[, 1, 3 or 4 channels]) and
            tensors ([channels, ]height, width) become (batch, channels, height, width) in channels_last memory; dtypes
            stay. Where nothing is known, an array is an image if a stage has marked it as one; others are stacked as
            they are, but for those that may be images or not, (height, width, 1, 3 or 4) of uint8 or float.
        memory: Where tensors are written.
        ready: Slots whose batch is there already; their values are not looked at.
        ragged: Slots whose arrays differ in their first axis, which become a `Ragged`.

    Returns:
        A tuple or dict of batches, or the batch of bare values.

    Raises:
        PipelineError: The samples, or their values in one slot, do not fit each other, or nobody knows whether they are
            images; it names the slot.
    """
    if not samples:
        raise PipelineError("batched: a batch of no samples")
    first = samples[0]
    ready = ready or {}
    if isinstance(first, tuple):
        _check_same([f"a tuple of {len(s)}" if isinstance(s, tuple) else type(s).__name__ for s in samples], "sample")
        return tuple(
            ready[place]
            if place in ready
            else make_ragged(column, f"slot {place}", memory)
            if place in ragged
            else _collate_slot(list(column), f"slot {place}", memory, layouts.is_image(place))
            for place, column in enumerate(zip(*samples, strict=True))
        )
    if isinstance(first, dict):
        _check_keys(samples)
        return {
            key: ready[key]
            if key in ready
            else make_ragged([sample[key] for sample in samples], f"`{key}`", memory)
            if key in ragged
            else _collate_slot([sample[key] for sample in samples], f"`{key}`", memory, layouts.is_image(key))
            for key in first
        }
    return _collate_slot(list(samples), "the value", memory, None)


class Collate:
    """`collate` that knows where images are.

    Args:
        layouts: Where they are; and where arrays are that are none.
        ragged: Places in tuples and fields of dicts that become a `Ragged`. A dict has all of those that are names.
    """

    def __init__(self, layouts: Layouts, ragged: frozenset[str | int] = frozenset()) -> None:
        self.layouts = layouts
        self.ragged = ragged

    def __call__(
        self, samples: Sequence[Any], memory: Memory = FRESH, ready: Mapping[Any, torch.Tensor] | None = None
    ) -> Any:
        """The batch of these samples, as `collate` makes it."""
        if isinstance(samples[0], dict):
            self.check_ragged(samples[0])
        return collate(samples, self.layouts, memory, ready, self.ragged)

    def check_ragged(self, fields: Collection[str]) -> None:
        """Refuse a batch of dicts without a field that is to be ragged.

        Raises:
            PipelineError: It names the field.
        """
        missing = sorted(name for name in self.ragged if isinstance(name, str) and name not in fields)
        if missing:
            has = ", ".join(name for name in fields if not name.startswith("__"))
            raise PipelineError(f"batched: ragged: no field `{missing[0]}`; the samples have: {has or 'none'}")


def _check_keys(samples: Sequence[Any]) -> None:
    """All samples are dicts with the keys of the first."""
    keys = samples[0].keys()
    for number, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise PipelineError(f"batched: sample 0 is a dict, sample {number} a {type(sample).__name__}")
        if sample.keys() != keys:
            missing, further = sorted(map(str, keys - sample.keys())), sorted(map(str, sample.keys() - keys))
            name = f" (`{sample['__key__']}`)" if "__key__" in sample else ""
            raise PipelineError(
                f"batched: sample {number}{name} has other fields than sample 0: "
                + "; ".join(
                    f"{word} {', '.join(names)}" for word, names in (("without", missing), ("with", further)) if names
                )
                + ". Choose the fields that all have with to_tuple or to_dict"
            )


def _collate_slot(values: list[Any], slot: str, memory: Memory, is_image: bool | None) -> Any:  # noqa: FBT001 (private)
    """The batch of one slot; `is_image` is None where nobody knows."""
    kinds = [_kind(value) for value in values]
    if all(kind == "" for kind in kinds):
        return values
    _check_same(kinds, slot)
    if kinds[0] == "tensor":
        return _stack_tensors(values, slot, memory, is_image=is_image is True)
    if kinds[0] == "array":
        is_image = _are_images(values, slot) if is_image is None else is_image
        return _stack_arrays(values, slot, memory, is_image=is_image)
    try:
        return torch.from_numpy(np.array(values, dtype=kinds[0]))
    except (OverflowError, TypeError) as err:
        raise PipelineError(f"batched: {slot}: {err}") from err


def _kind(value: object) -> str:
    """Equal for values that batch together: "tensor", "array", the dtype of a number, "" for what stays in a list."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in _NUMBERS else ""
    if isinstance(value, np.generic):
        return value.dtype.name if value.dtype.kind in _NUMBERS else ""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    return "float64" if isinstance(value, float) else ""


def _are_images(arrays: list[NDArray[Any]], slot: str) -> bool:
    """Whether arrays are images whose slot does not say it.

    Raises:
        PipelineError: They may be or not.
    """
    marks = {mark_of(array) for array in arrays}
    if marks in ({True}, {False}):
        return True in marks
    unknown = [array for array in arrays if may_be_image(array)]
    if not unknown and marks == {None}:
        return False
    array = (unknown or arrays)[0]
    raise PipelineError(
        f"batched: {slot} is an array {array.shape} of {array.dtype} from a function, and nothing says whether it is "
        "an image, whose channels come first in a batch.\n  Give an image the name of an image field, such as `jpg` or "
        "`left.png`; anything else the name of an npy field, such as `points.npy`, or make it a tensor, which is "
        "stacked as it is"
    )


def _stack_arrays(arrays: list[NDArray[Any]], slot: str, memory: Memory, *, is_image: bool) -> torch.Tensor:
    _check_same([str(array.dtype.newbyteorder("=")) for array in arrays], slot)
    shape = _common_shape(arrays, slot)
    first = arrays[0]
    has_channels = first.ndim == 3 and first.shape[2] in IMAGE_CHANNELS
    try:
        # torch's dtype of the same name, by way of an empty array: in the machine's byte order, which torch asks for
        dtype = torch.from_numpy(np.empty(0, first.dtype.newbyteorder("="))).dtype
    except TypeError as err:
        raise PipelineError(f"batched: {slot}: {err}") from err
    stacked = memory.empty((len(arrays), *shape), dtype)
    _fill(stacked.numpy(), arrays)
    if is_image and has_channels:
        return stacked.permute(0, 3, 1, 2)
    return stacked[:, None] if is_image and first.ndim == 2 else stacked


def _fill(stacked: NDArray[Any], arrays: list[NDArray[Any]]) -> None:
    for place, array in enumerate(arrays):
        stacked[place] = array


def _stack_tensors(tensors: list[torch.Tensor], slot: str, memory: Memory, *, is_image: bool) -> torch.Tensor:
    _check_same([str(tensor.dtype) for tensor in tensors], slot)
    shape = _common_shape(tensors, slot)
    if any(tensor.device.type != "cpu" or tensor.requires_grad for tensor in tensors):
        return torch.stack(tensors)
    if not is_image or len(shape) not in {2, 3}:
        return torch.stack(tensors, out=memory.empty((len(tensors), *shape), tensors[0].dtype))
    channels = shape[0] if len(shape) == 3 else 1
    images_bchw = memory.empty((len(tensors), channels, *shape[-2:]), tensors[0].dtype, channels_last=True)
    for place, tensor in enumerate(tensors):
        images_bchw[place].copy_(tensor)
    return images_bchw


def _common_shape(values: Sequence[Any], slot: str) -> tuple[int, ...]:
    _check_same([tuple(value.shape) for value in values], slot, advice=". Resize or crop first")
    return tuple(values[0].shape)


def _check_same(found: Sequence[object], where: str, *, advice: str = "") -> None:
    """All samples have in `where` what the first one has."""
    for number, what in enumerate(found):
        if what != found[0]:
            raise PipelineError(
                f"batched: {where} is {_text(found[0])} in sample 0 but {_text(what)} in sample {number}{advice}"
            )


def _text(what: object) -> str:
    return "no number or array" if what == "" else str(what)
