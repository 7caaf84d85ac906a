"""The default collate: makes a batch of a list of samples, with images in channels_last memory and arrays of different
lengths joined end to end.

Batches are made of numpy arrays, so that a worker process does not need torch. `as_tensors` makes tensors of the
arrays, in the process that uses the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import TypeIs

from wdskit.errors import PipelineError
from wdskit.stages.fields import list_fields
from wdskit.stages.run import NO_ROLES, Origin, Roles, Run, stage_error

if TYPE_CHECKING:
    import torch

_NUMBERS = "biufc"  # kinds of numpy dtypes that torch supports


class Memory(Protocol):
    """An allocator of the arrays that batches are written to."""

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array of this shape and dtype with undefined values."""
        ...


FRESH: Memory = np
"""Allocates new memory for each array. It costs 9,408 page faults for a float batch of 64 x 3 x 224 x 224."""


def empty_images(memory: Memory, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of `shape` (batch, channels, height, width) with undefined values, in channels_last memory."""
    batch, channels, height, width = shape
    images: NDArray[Any] = memory.empty((batch, height, width, channels), dtype).transpose(0, 3, 1, 2)
    return images


def has_torch_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if torch supports the numbers of a numpy dtype. The byte order does not matter."""
    return dtype.kind in _NUMBERS and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Return whether a value is a tensor of torch. Does not import torch."""
    return hasattr(value, "untyped_storage")


def as_tensors(batch: Any) -> Any:
    """Return a batch of `Collate` with a tensor in place of each array, also in a `Ragged`. A tensor shares memory with
    its array. Lists and tensors stay unchanged.
    """
    if isinstance(batch, tuple):
        return tuple(map(as_tensors, batch))
    if isinstance(batch, dict):
        return {name: as_tensors(column) for name, column in batch.items()}
    if isinstance(batch, Ragged):
        return Ragged(as_tensors(batch.values), as_tensors(batch.offsets))
    if not isinstance(batch, np.ndarray):
        return batch
    import torch

    return torch.from_numpy(batch)


@dataclass(frozen=True)
class Collate:
    """Makes batches of samples that are all tuples of one length, all dicts with the same keys, or all bare values.

    Each slot (a key of the dicts, or a position in the tuples) becomes one batch:

    - Python numbers become an array. bool becomes bool, int becomes int64, and float, or a mix of int and float,
      becomes float64. numpy scalars keep their dtype.
    - Images, which are arrays (height, width[, channels]) or tensors ([channels, ]height, width), become (batch,
      channels, height, width) in channels_last memory, with their dtype. `roles` says which slots are images.
    - Other arrays and tensors are stacked. The values of a slot must have one shape and dtype.
    - The arrays of the fields `ragged` become a `Ragged`. So do the arrays of lists in JSON, if they differ in the
      first axis only. Lists get one dtype by the rules of numpy.
    - Other values (text, bytes, dicts, lists, None, PIL images, numbers that torch has no dtype for, ...) become a
      list.

    Attributes:
        roles: What is known of the fields before `batched`.
        ragged: Fields whose arrays may differ in the first axis; they become a `Ragged` of arrays, which `as_tensors`
            turns into one of tensors. Each sample must have all these fields.

    Raises:
        PipelineError: `to_tuple` does not name a field of `ragged`.
    """

    roles: Roles = NO_ROLES
    ragged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.roles.places is not None:
            self.check_ragged(())

    def check_ragged(self, sample: object) -> None:
        """Check that a sample has the fields `ragged`. The fields of a tuple are those of `to_tuple`. PipelineError: It
        does not, or a function has made a value without names.
        """
        if not self.ragged:
            return
        names = sample if isinstance(sample, dict) else dict[str, object]()
        if isinstance(sample, tuple):
            names = dict.fromkeys(";".join(self.roles.places or ()).split(";"))
        if missing := sorted(self.ragged.difference(names)):
            raise PipelineError(f"batched: ragged: no field `{missing[0]}`; the samples have: {list_fields(names)}")

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
            samples have tensors that are not arrays of numpy, a `Ragged` or a list.

        Raises:
            PipelineError: The samples differ in type, fields or length. The values of a slot differ in type, shape or
                dtype. An image does not have the shape of one. Or a ragged field is missing.
        """
        first, ready = samples[0], ready or {}
        advice = ". Use to_tuple or to_dict to choose fields that all have"
        _check_same([_form(sample) for sample in samples], "sample", advice=advice)
        self.check_ragged(first)
        if isinstance(first, tuple):
            columns = enumerate(zip(*samples, strict=True))
            return tuple(ready[at] if at in ready else self.column(at, values, memory) for at, values in columns)
        if isinstance(first, dict):
            return {
                key: ready[key] if key in ready else self.column(key, [sample[key] for sample in samples], memory)
                for key in first
            }
        return self.column(None, samples, memory)

    def column(self, slot: object, values: Sequence[Any], memory: Memory) -> Any:
        """Return the batch of the values of one slot: a key of dicts, a position in tuples, or None for bare values.
        PipelineError: The values cannot be collated.
        """
        where = f"slot {slot}" if isinstance(slot, int) else "the value" if slot is None else f"`{slot}`"
        names = self.roles.names_at(slot)
        is_list = self.roles.is_list(names)
        if is_list and not all(map(_kind, values)):  # lists of text: an empty list is not an array of numbers then
            values = [value.tolist() if getattr(value, "size", 1) == 0 else value for value in values]
        kinds = [_kind(value) for value in values]
        is_list = is_list and {*kinds} == {"array"}
        if is_list:
            values = _unify_lists(values)
        if self.is_ragged(slot) or (is_list and _differ_in_length(values)):
            return make_ragged(values, where, memory)
        if not any(kinds):
            return list(values)
        if {*kinds} == {"int64", "float64"}:
            kinds = ["float64"] * len(kinds)  # JSON writes 1.0 as 1
        _check_same(kinds, where)
        if kinds[0] not in {"tensor", "array"}:
            try:
                return np.array(values, dtype=kinds[0])
            except OverflowError as err:
                raise PipelineError(f"batched: {where}: {err}") from err
        return _stack(values, where, memory, image=names if self.roles.is_image(names) else "")

    def is_ragged(self, slot: object) -> bool:
        """Return whether a slot has a field of `ragged`."""
        return bool(self.ragged) and not self.ragged.isdisjoint(self.roles.names_at(slot).split(";"))


@dataclass(frozen=True)
class Batcher:
    """Collates batches of `size` values.

    Attributes:
        run: The running pipeline.
        collate: A `Collate`, or a user's function that takes a list of values and returns a batch.
        size: Number of values in a batch.
    """

    run: Run
    collate: Callable[..., Any]
    size: int

    def collated(
        self,
        values: list[Any],
        origins: list[Origin],
        memory: Memory | None = None,
        ready: Mapping[Any, Any] | None = None,
    ) -> tuple[Any, Origin]:
        """Return a batch of these values, and the batch's origin. The default collate makes arrays, as `Collate` does.

        Args:
            values: At least one value.
            origins: Origin of each value.
            memory: Allocates the arrays of the default collate; None for new memory. A user's function ignores it.
            ready: Finished columns of the batch, by key of the dicts or position in the tuples. The default collate
                then ignores these items of `values`.

        Raises:
            SampleError: The values cannot be collated, or the user's function fails. The message names the first and
                the last sample of the batch.
        """
        origin = origins[-1]._replace(members=tuple(origins))
        is_own = isinstance(self.collate, Collate)
        try:
            if is_own:
                return self.collate(values, memory or FRESH, ready), origin
            with self.run.call_lock(self.collate):
                return self.collate(values), origin
        except Exception as err:
            raise stage_error("batched", origin, err, is_function=not is_own) from err


def _form(sample: Any) -> str:
    """Return what samples of a batch have in common, as text."""
    if isinstance(sample, tuple):
        return f"a tuple of {len(sample)}"
    return f"a dict of {', '.join(sorted(map(str, sample)))}" if isinstance(sample, dict) else "a value"


def _kind(value: object) -> str:
    """Return the kind of a value: "tensor", "array", the name of the dtype that a number gets, such as "int64", or ""
    for other values, which stay in a list. Numbers that torch has no dtype for have the kind "".
    """
    if isinstance(value, np.ndarray | np.generic):
        name = "array" if isinstance(value, np.ndarray) else value.dtype.name
        return name if has_torch_dtype(value.dtype) else ""
    if is_tensor(value):
        return "tensor"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    return "float64" if isinstance(value, float) else ""


def _stack(values: Sequence[Any], where: str, memory: Memory, *, image: str) -> Any:
    """Return arrays, or tensors, as one array; as a tensor if numpy cannot hold the tensors. `image` is the field of
    images; "" if the values are not images.
    """
    _check_same([_dtype(value) for value in values], where, advice=". Convert them with `map`")
    _check_same([tuple(value.shape) for value in values], where, advice=". Resize or crop first")
    if image and values[0].ndim not in {2, 3}:
        msg = f"batched: {where} has the shape {tuple(values[0].shape)}, but `{image}` is an image: (height, width"
        msg += "[, channels]) as an array, ([channels, ]height, width) as a tensor."
        raise PipelineError(f"{msg}\n  Give what is no image another name, which ends in .npy")
    values = [_channels_first(value) for value in values] if image else values
    try:
        arrays = [value.numpy() if is_tensor(value) else value for value in values]
    except (TypeError, RuntimeError):  # of another device, with gradients, or of a dtype such as bfloat16
        import torch

        stacked = torch.stack(list(values))
        return stacked.contiguous(memory_format=torch.channels_last) if image else stacked
    dtype, shape = arrays[0].dtype.newbyteorder("="), (len(arrays), *arrays[0].shape)
    batch = empty_images(memory, shape, dtype) if image else memory.empty(shape, dtype)
    for place, array in enumerate(arrays):
        batch[place] = array
    return batch


def _dtype(value: Any) -> str:
    return str(value.dtype.newbyteorder("=") if isinstance(value, np.ndarray) else value.dtype)


def _channels_first(image: Any) -> Any:
    """Return an image as (channels, height, width), a view."""
    if image.ndim == 2:
        return image[None]
    return image.transpose(2, 0, 1) if isinstance(image, np.ndarray) else image


def _check_same(kinds: Sequence[object], where: str, *, advice: str = "") -> None:
    """Raise PipelineError if `kinds` are not all equal. `kinds` has the kind, shape or dtype of each sample's value.
    The message names `where`, which is a slot or the sample, and ends with `advice`.
    """
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            first, other = ("neither a number nor an array" if each == "" else each for each in (kinds[0], kind))
            raise PipelineError(f"batched: {where} is {first} in sample 0 but {other} in sample {number}{advice}")


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
        number = range(len(self))[at]
        return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def to(self, *args: Any, **options: Any) -> Ragged:
        """Return the `Ragged` on another device, or its values with another dtype. The arguments are those of
        `torch.Tensor.to`. A tensor that needs no change is not copied.
        """
        values = self.values.to(*args, **options)
        return Ragged(values, self.offsets.to(values.device, non_blocking=bool(options.get("non_blocking", False))))

    def pin_memory(self) -> Ragged:
        """Return a copy in page-locked memory."""
        return Ragged(self.values.pin_memory(), self.offsets.pin_memory())


def _differ_in_length(arrays: Sequence[NDArray[Any]]) -> bool:
    """Return True if the arrays differ in their first axis, but in no other axis."""
    shapes = {array.shape for array in arrays}
    return len(shapes) > 1 and all(shapes) and len({shape[1:] for shape in shapes}) == 1


def make_ragged(values: Sequence[Any], where: str, memory: Memory) -> Ragged:
    """Return the batch of arrays or tensors of one dtype, whose shapes may differ in the first axis only, as a `Ragged`
    of arrays.

    Args:
        values: At least one array or tensor, each with at least one axis.
        where: The slot, for messages.
        memory: Allocates the joined values.

    Raises:
        PipelineError: A value is neither an array nor a tensor, has no axis or no dtype of torch, or differs from the
            first value in dtype or in another axis than the first. The message names the slot and the sample.
    """
    for at, value in enumerate(values):
        if _kind(value) not in {"array", "tensor"} or not value.ndim:
            msg = f"batched: {where} is a {type(value).__name__} in sample {at}. Ragged fields are arrays of numbers"
            raise PipelineError(f"{msg} with at least one axis, such as `npy`")
    arrays = [np.asarray(value) for value in values]
    forms = [f"(..., {', '.join(map(str, array.shape[1:]))}) of {_dtype(array)}" for array in arrays]
    _check_same(forms, where, advice=". Ragged fields can differ only in their first axis")
    offsets: Any = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    joined: Any = memory.empty((int(offsets[-1]), *arrays[0].shape[1:]), arrays[0].dtype.newbyteorder("="))
    np.concatenate(arrays, out=joined)
    return Ragged(joined, offsets)


def _unify_lists(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the arrays, which were JSON lists, in one dtype by the rules of numpy. An array of shape (0,) gets the
    other axes of the first array of another shape.
    """
    filled = [array for array in arrays if array.shape != (0,)] or arrays
    dtype = np.result_type(*{array.dtype for array in filled})
    empty = np.zeros((0, *filled[0].shape[1:]), dtype)
    return [empty if array.shape == (0,) else array.astype(dtype, copy=False) for array in arrays]
