"""The default collate: makes a batch of a list of samples, with images in channels_last memory and arrays of different
lengths joined end to end.

Batches are made of numpy arrays, so that a worker process does not need torch. `as_tensors` makes tensors of the
arrays, in the process that uses the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wdskit.errors import PipelineError
from wdskit.stages.fields import list_fields
from wdskit.stages.marks import ARRAY, IMAGE, IMAGE_CHANNELS, MASK, is_tensor, layout_of, mark_of, marked, may_be_image

if TYPE_CHECKING:
    import torch

_NUMBERS = "biufc"  # kinds of numpy dtypes that torch supports


class Memory(Protocol):
    """An allocator of the arrays that batches are written to."""

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array of this shape and dtype with undefined values."""
        ...


class FreshMemory:
    """A `Memory` that allocates new memory for each array."""

    # New memory costs 9,408 page faults for a float batch of 64 x 3 x 224 x 224.

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array of this shape and dtype with undefined values."""
        return np.empty(tuple(shape), dtype)


FRESH = FreshMemory()


def empty_images(memory: Memory, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of `shape` (batch, channels, height, width) with undefined values, in channels_last memory."""
    batch, channels, height, width = shape
    images: NDArray[Any] = memory.empty((batch, height, width, channels), dtype).transpose(0, 3, 1, 2)
    return images


def has_torch_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if torch supports the numbers of a numpy dtype. The byte order does not matter."""
    return dtype.kind in _NUMBERS and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def as_tensors(batch: Any) -> Any:
    """Return a batch of `Collate` with a tensor in place of each array, and a `Ragged` in place of each `RaggedArrays`.
    A tensor has the mark of its array (see `stages.marks`), and shares memory with the array. Lists and tensors stay
    unchanged.
    """
    if isinstance(batch, tuple):
        return tuple(map(_as_tensor, batch))
    if isinstance(batch, dict):
        return {name: _as_tensor(column) for name, column in batch.items()}
    return _as_tensor(batch)


def _as_tensor(column: Any) -> Any:
    if isinstance(column, RaggedArrays):
        return Ragged(_as_tensor(column.values), _as_tensor(column.offsets))
    if not isinstance(column, np.ndarray):
        return column
    import torch

    tensor, mark = torch.from_numpy(column), mark_of(column)
    return tensor if mark is None else marked(tensor, mark)


@dataclass(frozen=True)
class Collate:
    """Makes batches of samples that are all tuples of one length, all dicts with the same keys, or all bare values.

    Each slot (a key of the dicts, or a position in the tuples) becomes one batch:

    - Python numbers become an array. bool becomes bool, int becomes int64, and float, or a mix of int and float,
      becomes float64. numpy scalars keep their dtype.
    - Arrays are stacked, and so are tensors. The values of a slot must have one shape and dtype.
    - The arrays of the fields `ragged` become `RaggedArrays`. So do the arrays that `fields.as_array` has made from
      JSON lists, if they differ in the first axis only. Such arrays may mix int64 and float64, and become float64.
    - Other values (text, bytes, dicts, lists, None, PIL images, ...) become a list.

    Images, which are arrays (height, width[, 1, 3 or 4 channels]) or tensors ([channels, ]height, width), become
    (batch, channels, height, width) in channels_last memory, with their dtype. The mark of a value says if the value is
    an image (see `marks`); without a mark, the name of the field does. An array (height, width, 1, 3 or 4) of uint8 or
    float is an error if it has no mark and its field has neither the name of an image, such as `jpg`, nor of an array,
    such as `npy`. Arrays that are not images keep their axes.

    Attributes:
        ragged: Fields whose arrays may differ in the first axis; they become `RaggedArrays`, which `as_tensors` turns
            into a `Ragged`. A dict sample must have all these fields.
        places: The field of each item of the tuples; None if a function has made the tuples.

    Raises:
        PipelineError: A field of `ragged` is not in `places`, and `places` is not None.
    """

    ragged: frozenset[str] = frozenset()
    places: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in sorted(self.ragged) if self.places is not None else ():
            if not self._ragged_places(name):
                has = ", ".join(self.places or ())
                raise PipelineError(f"batched: ragged: no field `{name}` in to_tuple, which has {has}.")

    def _ragged_places(self, name: str) -> set[int]:
        return {place for place, names in enumerate(self.places or ()) if name in names.split(";")}

    def ragged_slots(self, sample: Collection[Any]) -> frozenset[str | int]:
        """Return the slots of the fields `ragged`: keys of a dict sample, or positions in a tuple sample. The set is
        empty if `ragged` is empty.

        Raises:
            PipelineError: A field of `ragged` is not in the dict. Or a function has made the tuple or the bare value,
                so that the fields are unknown.
        """
        if not self.ragged:
            return self.ragged
        if isinstance(sample, dict):
            missing = sorted(name for name in self.ragged if name not in sample)
            if missing:
                has = list_fields(sample)
                raise PipelineError(f"batched: ragged: no field `{missing[0]}`; the samples have: {has}")
            return self.ragged
        if self.places is None or not isinstance(sample, tuple):
            names, what = ", ".join(sorted(self.ragged)), "tuple" if isinstance(sample, tuple) else "value"
            raise PipelineError(
                f"batched: ragged: {names}: the samples are {what}s from a function, so that nothing shows where these "
                "fields are.\n  Let the function return a dict, or put it before to_tuple"
            )
        return frozenset[str | int]().union(*map(self._ragged_places, self.ragged))

    def __call__(
        self, samples: Sequence[Any], memory: Memory = FRESH, ready: Mapping[Any, NDArray[Any]] | None = None
    ) -> Any:
        """Return the batch of a list of samples.

        Args:
            samples: At least one sample.
            memory: Allocates the arrays of the batch.
            ready: Finished batches of slots, by key of the dicts or position in the tuples. The values of these slots
                are ignored.

        Returns:
            A tuple or dict with a batch per slot, or the batch of bare values. A batch is an array, a tensor if the
            samples have tensors, a `RaggedArrays` or a list.

        Raises:
            PipelineError: `samples` is empty. The samples differ in type, fields or length. The values of a slot differ
                in type, shape or dtype, or torch has no such dtype. Nothing shows whether an array is an image. Or a
                ragged field is missing.
        """
        if not samples:
            raise PipelineError("batched: a batch without samples")
        first = samples[0]
        ready = ready or {}
        ragged = self.ragged_slots(first)
        if isinstance(first, tuple):
            kinds = [f"a tuple of {len(s)}" if isinstance(s, tuple) else type(s).__name__ for s in samples]
            _check_same(kinds, "sample")
            columns = enumerate(zip(*samples, strict=True))
            return tuple(
                ready[place] if place in ready else _collate_slot(place, column, memory, is_ragged=place in ragged)
                for place, column in columns
            )
        if isinstance(first, dict):
            _check_keys(samples)
            return {
                key: ready[key]
                if key in ready
                else _collate_slot(key, [sample[key] for sample in samples], memory, is_ragged=key in ragged)
                for key in first
            }
        return _collate_slot(None, samples, memory)


def _collate_slot(slot: object, values: Sequence[Any], memory: Memory, *, is_ragged: bool = False) -> Any:
    """Return the batch of the values of one slot: a key of dicts, a position in tuples, or None for bare values.

    With `is_ragged`, the values may differ in the first axis, and the batch is a `RaggedArrays`. Without `is_ragged`,
    only JSON lists of different lengths make a `RaggedArrays`. PipelineError: The values cannot be collated.
    """
    where = f"slot {slot}" if isinstance(slot, int) else "the value" if slot is None else f"`{slot}`"
    if is_ragged:
        return make_ragged(values, where, memory)
    kinds = [_kind(value) for value in values]
    if not any(kinds):
        return list(values)
    if {*kinds} == {"int64", "float64"} and not any(isinstance(value, np.generic) for value in values):
        kinds = ["float64"] * len(kinds)  # JSON writes 1.0 as 1
    _check_same(kinds, where)
    if kinds[0] not in {"tensor", "array"}:
        try:
            numbers = np.array(values, dtype=kinds[0])
        except (OverflowError, TypeError) as err:
            raise PipelineError(f"batched: {where}: {err}") from err
        _check_dtype(numbers.dtype, where)
        return numbers
    layouts = {layout_of(slot, value) for value in values}
    is_mask = any(mark is not None and mark.is_mask for mark in map(mark_of, values))
    is_image = layouts == {"image"}
    batch: Any
    if kinds[0] == "tensor":
        if "image" in layouts and not is_image and values[0].ndim == 2:
            raise _unknown_layout(values[0], where)
        batch = _stack_tensors(values, where, memory, is_image=is_image)
    else:
        if not is_image and layouts != {"array"}:
            unknown = [value for value in values if may_be_image(value) or ("lost" in layouts and value.ndim == 2)]
            if unknown or len(layouts) > 1:
                raise _unknown_layout((unknown or values)[0], where)
        are_lists = all(mark is not None and mark.is_list for mark in map(mark_of, values))
        if are_lists and _differ_in_length(values):
            return make_ragged(values, where, memory)
        if are_lists and {value.dtype.name for value in values} == {"int64", "float64"}:
            values = [value.astype(np.float64) for value in values]
        batch = _stack_arrays(values, where, memory, is_image=is_image)
    if is_image or is_mask or layouts == {"array"}:
        marked(batch, MASK if is_mask else IMAGE if is_image else ARRAY)
    return batch


def _check_keys(samples: Sequence[Any]) -> None:
    """Raise PipelineError unless all samples are dicts with the keys of the first sample."""
    keys = samples[0].keys()
    for number, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise PipelineError(f"batched: sample 0 is a dict, but sample {number} is a {type(sample).__name__}")
        if sample.keys() != keys:
            missing, further = sorted(map(str, keys - sample.keys())), sorted(map(str, sample.keys() - keys))
            name = f" (`{sample['__key__']}`)" if "__key__" in sample else ""
            raise PipelineError(
                f"batched: sample {number}{name} has different fields from sample 0: "
                + "; ".join(
                    f"{word} {', '.join(names)}" for word, names in (("without", missing), ("with", further)) if names
                )
                + ". Use to_tuple or to_dict to choose fields that all samples have"
            )


def _kind(value: object) -> str:
    """Return the kind of a value: "tensor", "array", the name of the dtype that a number gets, such as "int64", or ""
    for other values, which stay in a list. An array without numbers has the kind "".
    """
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in _NUMBERS else ""
    if is_tensor(value):
        return "tensor"
    if isinstance(value, np.generic):
        return value.dtype.name if value.dtype.kind in _NUMBERS else ""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    return "float64" if isinstance(value, float) else ""


def _unknown_layout(value: Any, slot: str) -> PipelineError:
    kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
    return PipelineError(
        f"batched: {slot} is {kind} {tuple(value.shape)} of {value.dtype} from a function. Nothing shows whether it "
        "is an image, whose channels come first in a batch.\n  Give an image the name of an image field, such as `jpg` "
        "or `left.png`, or put the function before to_tuple. Give any other array the name of an npy field, such as "
        "`points.npy`, or return a tensor, which is stacked unchanged"
    )


def _check_dtype(dtype: np.dtype[Any], where: str) -> None:
    """Raise PipelineError if torch has no dtype for numbers of this dtype. The message names the slot `where`."""
    if not has_torch_dtype(dtype):
        raise PipelineError(f"batched: {where}: torch has no dtype for {dtype} of numpy. Convert it before batching")


def _stack_arrays(arrays: Sequence[NDArray[Any]], slot: str, memory: Memory, *, is_image: bool) -> Any:
    _check_same([str(array.dtype.newbyteorder("=")) for array in arrays], slot, advice=". Convert them with `map`")
    shape = _common_shape(arrays, slot)
    first = arrays[0]
    has_channels = first.ndim == 3 and first.shape[2] in IMAGE_CHANNELS
    _check_dtype(first.dtype, slot)
    stacked = memory.empty((len(arrays), *shape), first.dtype.newbyteorder("="))
    for place, array in enumerate(arrays):
        stacked[place] = array
    if is_image and has_channels:
        return stacked.transpose(0, 3, 1, 2)
    return stacked[:, None] if is_image and first.ndim == 2 else stacked


def _stack_tensors(tensors: Sequence[torch.Tensor], slot: str, memory: Memory, *, is_image: bool) -> torch.Tensor:
    import torch

    _check_same([str(tensor.dtype) for tensor in tensors], slot)
    shape = _common_shape(tensors, slot)
    if any(tensor.device.type != "cpu" or tensor.requires_grad for tensor in tensors):
        return torch.stack(list(tensors))
    dtype = tensors[0].dtype
    if not is_image or len(shape) not in {2, 3}:
        return torch.stack(list(tensors), out=_empty_tensor((len(tensors), *shape), dtype, memory))
    channels = shape[0] if len(shape) == 3 else 1
    images_bchw = _empty_tensor((len(tensors), *shape[-2:], channels), dtype, memory).permute(0, 3, 1, 2)
    for place, tensor in enumerate(tensors):
        images_bchw[place].copy_(tensor)
    return images_bchw


def _empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, memory: Memory) -> torch.Tensor:
    """Return a contiguous tensor with undefined values. `dtype` may be a dtype that numpy lacks, such as bfloat16."""
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(memory.empty((num_bytes,), np.uint8)).view(dtype).view(shape)


def _common_shape(values: Sequence[Any], slot: str) -> tuple[int, ...]:
    _check_same([tuple(value.shape) for value in values], slot, advice=". Resize or crop first")
    return tuple(values[0].shape)


def _check_same(kinds: Sequence[object], where: str, *, advice: str = "") -> None:
    """Raise PipelineError if `kinds` are not all equal. `kinds` has the kind, shape or dtype of each sample's value.
    The message names `where`, which is a slot or the sample, and ends with `advice`.
    """
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            what = f"{_describe(kinds[0])} in sample 0 but {_describe(kind)} in sample {number}"
            raise PipelineError(f"batched: {where} is {what}{advice}")


def _describe(kind: object) -> str:
    return "neither a number nor an array" if kind == "" else str(kind)


@dataclass(frozen=True, eq=False)
class RaggedArrays:
    """The form of a `Ragged` before `as_tensors`, with the same attributes. `values` is an array, or a tensor if a
    sample has a tensor. `offsets` is an array.
    """

    values: Any
    offsets: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ragged:
    """The arrays of one field in a batch, of different lengths, as `batched: {ragged: ...}` makes them.

    `ragged[i]` is a view of the array of sample i; `len(ragged)` is the number of samples. `ragged.to(device)` and
    `ragged.pin_memory()` work as for a tensor.

    Attributes:
        values: All arrays end to end, (sum of the lengths, ...).
        offsets: The start of each array in `values`, and the end of the last one; int64 (batch + 1,).
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> torch.Tensor:
        """Return the array of sample `at`, as a view. Negative numbers count from the end.

        Raises:
            IndexError: `at` is out of range.
        """
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            msg = f"sample {at} is out of range: there are {len(self)}"
            raise IndexError(msg)
        return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield the array of each sample, as a view."""
        return iter(self.values.split(self.offsets.diff().tolist()))

    def to(self, *args: Any, **options: Any) -> Ragged:
        """Return the `Ragged` on another device, or its values with another dtype. The arguments are those of
        `torch.Tensor.to`. A tensor that needs no change is not copied.
        """
        values = self.values.to(*args, **options)
        return Ragged(values, self.offsets.to(values.device, non_blocking=bool(options.get("non_blocking", False))))

    def pin_memory(self) -> Ragged:
        """Return a copy in page-locked memory."""
        return Ragged(self.values.pin_memory(), self.offsets.pin_memory())


def _differ_in_length(values: Sequence[Any]) -> bool:
    """Return True if the arrays `values`, which were JSON lists, differ in their first axis, but in no other axis. An
    array of shape (0,) fits any other shape.
    """
    shapes = {tuple(value.shape) for value in values}
    filled = shapes - {(0,)}
    return len(shapes) > 1 and all(filled) and len({shape[1:] for shape in filled}) <= 1


def make_ragged(values: Sequence[Any], slot: str, memory: Memory) -> RaggedArrays:
    """Return the batch of arrays or tensors of one dtype, whose shapes may differ in the first axis only. Among arrays
    from JSON lists, int64 and float64 may be mixed.

    Args:
        values: At least one array or tensor, each with at least one axis.
        slot: Name of the slot for messages.
        memory: Allocates the joined values.

    Raises:
        PipelineError: A value is neither an array nor a tensor, has no axis or no dtype of torch, or differs from the
            first value in dtype or in another axis than the first. The message names the slot and the sample.
    """
    for at, value in enumerate(values):
        is_array = isinstance(value, np.ndarray) or is_tensor(value)
        if not is_array or not value.ndim:
            what = "one number" if is_array else f"a {type(value).__name__}"
            raise PipelineError(f"batched: {slot} is {what} in sample {at}. Ragged fields are arrays, such as `npy`")
        if isinstance(value, np.ndarray):
            _check_dtype(value.dtype, f"{slot} in sample {at}")
    if any(map(is_tensor, values)):
        return _ragged_tensors(values, slot, memory)
    arrays = [value.astype(value.dtype.newbyteorder("="), copy=False) for value in values]
    if all(mark is not None and mark.is_list for mark in map(mark_of, values)):
        arrays = _unify_lists(arrays)
    _check_rows(arrays, slot)
    offsets = offsets_of([len(array) for array in arrays])
    joined = memory.empty((int(offsets[-1]), *arrays[0].shape[1:]), arrays[0].dtype)
    np.concatenate(arrays, out=joined)
    return RaggedArrays(joined, offsets)


def _ragged_tensors(values: Sequence[Any], slot: str, memory: Memory) -> RaggedArrays:
    """Return the ragged batch of a mix of tensors and arrays. The arrays become tensors. PipelineError: A value differs
    from the first value in dtype, or in another axis than the first axis.
    """
    import torch

    tensors = [
        torch.from_numpy(np.array(value, value.dtype.newbyteorder("="))) if isinstance(value, np.ndarray) else value
        for value in values
    ]
    _check_rows(tensors, slot)
    offsets = offsets_of([len(tensor) for tensor in tensors])
    joined = _empty_tensor((int(offsets[-1]), *tensors[0].shape[1:]), tensors[0].dtype, memory)
    torch.cat(tensors, out=joined)
    return RaggedArrays(joined, offsets)


def _check_rows(values: Sequence[Any], slot: str) -> None:
    """Check that arrays or tensors have one dtype, and one shape apart from the first axis.

    Raises:
        PipelineError: A value differs from the first value. The message names the slot and the sample.
    """
    first = values[0]
    for at, value in enumerate(values):
        if (value.dtype, value.shape[1:]) != (first.dtype, first.shape[1:]):
            kinds = [f"{tuple(each.shape)} of {each.dtype}" for each in (first, value)]
            msg = f"batched: {slot} is {kinds[0]} in sample 0 but {kinds[1]} in sample {at}"
            raise PipelineError(f"{msg}. Ragged fields can differ only in their first axis")


def _unify_lists(arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the arrays, which were JSON lists, in one dtype if possible: a mix of int64 and float64 becomes float64.
    Arrays of another mix of dtypes keep their dtypes. An array of shape (0,) gets the dtype and the other axes of the
    first array of another shape. If all arrays have the shape (0,), they get the dtype of the first array.
    """
    dtypes = {array.dtype.name for array in arrays if array.shape != (0,)}
    first = next((array for array in arrays if array.shape != (0,)), arrays[0])
    is_numbers = dtypes == {"int64", "float64"}
    dtype = np.dtype(np.float64) if is_numbers else first.dtype
    is_mixed = len(dtypes) > 1 and not is_numbers
    return [
        array.reshape(0, *first.shape[1:]).astype(dtype)
        if array.shape == (0,)
        else array
        if is_mixed
        else array.astype(dtype, copy=False)
        for array in arrays
    ]


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the start of each array after arrays of these lengths are joined, and the total length: int64 (n + 1,)."""
    return np.cumsum([0, *lengths], dtype=np.int64)
