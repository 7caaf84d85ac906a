"""The default collate: makes a batch of a list of samples, with images in channels_last memory and arrays of different
lengths joined end to end.

Batches are made of numpy arrays, so that a worker process does not need torch. `as_tensors` makes tensors of the
arrays, in the process that uses the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import TypeIs

from wdskit.errors import PipelineError
from wdskit.stages.fields import list_fields
from wdskit.stages.roles import NO_ROLES, Roles

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


def is_tensor(value: object) -> TypeIs[torch.Tensor]:
    """Return whether a value is a tensor of torch. Does not import torch."""
    return hasattr(value, "untyped_storage")


def count_rows(column: Any) -> int:
    """Return the number of rows in a column of a batch: an array, a tensor, a `Ragged` or a list. TypeError: The column
    has no length, such as a tensor without axes.
    """
    return column.size(0) if is_tensor(column) and column.ndim else len(column)  # a nested tensor has no `len`


def as_tensors(batch: Any) -> Any:
    """Return a batch of `Collate` with a tensor in place of each array, and a `Ragged` in place of each `RaggedArrays`.
    A tensor shares memory with its array. Lists and tensors stay unchanged.
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

    return torch.from_numpy(column)


@dataclass(frozen=True)
class Collate:
    """Makes batches of samples that are all tuples of one length, all dicts with the same keys, or all bare values.

    Each slot (a key of the dicts, or a position in the tuples) becomes one batch:

    - Python numbers become an array. bool becomes bool, int becomes int64, and float, or a mix of int and float,
      becomes float64. numpy scalars keep their dtype.
    - Images, which are arrays (height, width[, channels]) or tensors ([channels, ]height, width), become (batch,
      channels, height, width) in channels_last memory, with their dtype. `roles` says which slots are images.
    - Other arrays and tensors are stacked. The values of a slot must have one shape and dtype.
    - The arrays of the fields `ragged` become `RaggedArrays`. So do the arrays of lists in JSON, if they differ in the
      first axis only. Lists may mix int64 and float64, and become float64.
    - Other values (text, bytes, dicts, lists, None, PIL images, ...) become a list.

    Attributes:
        roles: What is known of the fields before `batched`.
        ragged: Fields whose arrays may differ in the first axis; they become `RaggedArrays`, which `as_tensors` turns
            into a `Ragged`. Each sample must have all these fields.

    Raises:
        PipelineError: `to_tuple` does not name a field of `ragged`.
    """

    roles: Roles = NO_ROLES
    ragged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.roles.places is not None:
            self.check_ragged(dict.fromkeys(";".join(self.roles.places).split(";")))

    def check_ragged(self, sample: object) -> None:
        """Check that a sample, a dict or its keys, has the fields `ragged`. PipelineError: It does not, or it is
        another value that a function made, so that its fields are unknown.
        """
        if not self.ragged or (self.roles.places is not None and isinstance(sample, tuple)):
            return
        names = sample if isinstance(sample, dict) else {}
        missing = sorted(self.ragged.difference(names))
        if missing:
            has = list_fields(names) if names else f"no names, as a {type(sample).__name__} from a function"
            raise PipelineError(f"batched: ragged: no field `{missing[0]}`; the samples have: {has}")

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
            samples have tensors that are not arrays of numpy, a `RaggedArrays` or a list.

        Raises:
            PipelineError: `samples` is empty. The samples differ in type, fields or length. The values of a slot differ
                in type, shape or dtype, or torch has no such dtype. An image does not have the shape of one. Or a
                ragged field is missing.
        """
        if not samples:
            raise PipelineError("batched: a batch without samples")
        first, ready = samples[0], ready or {}
        _check_same([_form(sample) for sample in samples], "sample")
        self.check_ragged(first)
        if isinstance(first, tuple):
            columns = enumerate(zip(*samples, strict=True))
            return tuple(ready[at] if at in ready else self.column(at, values, memory) for at, values in columns)
        if isinstance(first, dict):
            _check_keys(samples)
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
        if self.is_ragged(slot):
            return make_ragged(values, where, memory, are_lists=is_list)
        kinds = [_kind(value) for value in values]
        if not any(kinds):
            return list(values)
        if {*kinds} == {"int64", "float64"} and not any(isinstance(value, np.generic) for value in values):
            kinds = ["float64"] * len(kinds)  # JSON writes 1.0 as 1
        _check_same(kinds, where)
        if kinds[0] not in {"tensor", "array"}:
            try:
                values = [np.array(values, dtype=kinds[0])]
            except (OverflowError, TypeError) as err:
                raise PipelineError(f"batched: {where}: {err}") from err
            _check_dtype(values[0].dtype, where)
            return values[0]
        if is_list and kinds[0] == "array":
            if _differ_in_length(values):
                return make_ragged(values, where, memory, are_lists=True)
            values = _unify_lists(values)
        return _stack(values, where, memory, image=names if self.roles.is_image(names) else "")

    def is_ragged(self, slot: object) -> bool:
        """Return whether a slot has a field of `ragged`."""
        return not self.ragged.isdisjoint(self.roles.names_at(slot).split(";"))


def _form(sample: Any) -> str:
    if isinstance(sample, tuple):
        return f"a tuple of {len(sample)}"
    return "a dict" if isinstance(sample, dict) else "a value"


def _check_keys(samples: Sequence[Any]) -> None:
    """Raise PipelineError unless all samples are dicts with the keys of the first sample."""
    for number, sample in enumerate(samples):
        if differ := sorted(map(str, samples[0].keys() ^ sample.keys())):
            msg = f"batched: sample {sample.get('__key__', number)} and the first sample do not both have "
            raise PipelineError(f"{msg}{', '.join(differ)}. Use to_tuple or to_dict to choose fields that all have")


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


def _check_dtype(dtype: np.dtype[Any], where: str) -> None:
    """Raise PipelineError if torch has no dtype for numbers of this dtype. The message names the slot `where`."""
    if not has_torch_dtype(dtype):
        raise PipelineError(f"batched: {where}: torch has no dtype for {dtype} of numpy. Convert it before batching")


def _stack(values: Sequence[Any], where: str, memory: Memory, *, image: str) -> Any:
    """Return arrays, or tensors, as one array; as a tensor if numpy cannot hold the tensors. `image` is the field of
    images; "" if the values are not images.
    """
    _check_same([_dtype(value) for value in values], where, advice=". Convert them with `map`")
    _check_same([tuple(value.shape) for value in values], where, advice=". Resize or crop first")
    first = values[0]
    if image:
        if first.ndim not in {2, 3}:
            msg = f"batched: {where} has the shape {tuple(first.shape)}, but `{image}` is an image: (height, width"
            msg += "[, channels]) as an array, ([channels, ]height, width) as a tensor."
            raise PipelineError(
                f"{msg}\n  Give what is no image another name, as {image.split(';', maxsplit=1)[0]}.npy"
            )
        values = [_channels_first(value) for value in values]
    arrays = _arrays(values)
    if arrays is None:
        import torch

        stacked = torch.stack(list(values))
        return stacked.contiguous(memory_format=torch.channels_last) if image else stacked
    dtype, shape = arrays[0].dtype.newbyteorder("="), (len(arrays), *arrays[0].shape)
    _check_dtype(dtype, where)
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


def _arrays(values: Sequence[Any]) -> list[NDArray[Any]] | None:
    """Return arrays that share the memory of tensors. Return None for tensors that numpy cannot hold: of another
    device, with gradients, or of a dtype such as bfloat16.
    """
    try:
        return [value.numpy() if is_tensor(value) else value for value in values]
    except (TypeError, RuntimeError):
        return None


def _check_same(kinds: Sequence[object], where: str, *, advice: str = "") -> None:
    """Raise PipelineError if `kinds` are not all equal. `kinds` has the kind, shape or dtype of each sample's value.
    The message names `where`, which is a slot or the sample, and ends with `advice`.
    """
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            first, other = ("neither a number nor an array" if each == "" else each for each in (kinds[0], kind))
            raise PipelineError(f"batched: {where} is {first} in sample 0 but {other} in sample {number}{advice}")


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


def make_ragged(values: Sequence[Any], where: str, memory: Memory, *, are_lists: bool = False) -> RaggedArrays:
    """Return the batch of arrays or tensors of one dtype, whose shapes may differ in the first axis only.

    Args:
        values: At least one array or tensor, each with at least one axis.
        where: The slot, for messages.
        memory: Allocates the joined values.
        are_lists: Whether the arrays were lists in JSON, which may mix int64 and float64.

    Raises:
        PipelineError: A value is neither an array nor a tensor, has no axis or no dtype of torch, or differs from the
            first value in dtype or in another axis than the first. The message names the slot and the sample.
    """
    for at, value in enumerate(values):
        is_array = isinstance(value, np.ndarray) or is_tensor(value)
        if not is_array or not value.ndim:
            what = "one number" if is_array else f"a {type(value).__name__}"
            raise PipelineError(f"batched: {where} is {what} in sample {at}. Ragged fields are arrays, such as `npy`")
    arrays: Any = _arrays(values)
    if are_lists and arrays is not None:
        arrays = _unify_lists(arrays)
    rows = values if arrays is None else arrays
    forms = [f"(..., {', '.join(map(str, row.shape[1:]))}) of {_dtype(row)}" for row in rows]
    _check_same(forms, where, advice=". Ragged fields can differ only in their first axis")
    offsets = offsets_of([len(row) for row in rows])
    if arrays is None:
        import torch

        return RaggedArrays(torch.cat(list(values)), offsets)
    dtype = arrays[0].dtype.newbyteorder("=")
    _check_dtype(dtype, where)
    joined = memory.empty((int(offsets[-1]), *arrays[0].shape[1:]), dtype)
    np.concatenate(arrays, out=joined)
    return RaggedArrays(joined, offsets)


def _unify_lists(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the arrays, which were JSON lists, in one dtype if possible: a mix of int64 and float64 becomes float64.
    Arrays of another mix of dtypes keep their dtypes. An array of shape (0,) gets the dtype and the other axes of the
    first array of another shape. If all arrays have the shape (0,), they get the dtype of the first array.
    """
    filled = [array for array in arrays if array.shape != (0,)] or [arrays[0]]
    dtypes, numbers = {array.dtype for array in filled}, {np.dtype(np.int64), np.dtype(np.float64)}
    if len(dtypes) > 1 and dtypes != numbers:
        return list(arrays)
    dtype = np.dtype(np.float64) if dtypes == numbers else filled[0].dtype
    empty = np.zeros((0, *filled[0].shape[1:]), dtype)
    return [empty if array.shape == (0,) else array.astype(dtype, copy=False) for array in arrays]


def offsets_of(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the start of each array after arrays of these lengths are joined, and the total length: int64 (n + 1,)."""
    return np.cumsum([0, *lengths], dtype=np.int64)
