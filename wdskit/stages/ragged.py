"""Arrays of different lengths in one batch: their values end to end, and where each of them starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wdskit.errors import PipelineError
from wdskit.stages.memory import Memory


@dataclass(frozen=True, eq=False)
class Ragged:
    """One field of a batch whose arrays differ in their first axis, as `batched: {ragged: ...}` makes it.

    `ragged[i]` is the array of sample i, a view; `len(ragged)` the number of samples. It goes where a tensor goes:
    `ragged.to(device)`, `ragged.pin_memory()`.

    Attributes:
        values: All arrays end to end, (sum of the lengths, ...).
        offsets: Where each starts, and where the last one ends, int64 (batch + 1,).
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> torch.Tensor:
        """The array of sample `at`, negative numbers count from the end.

        Raises:
            IndexError: There is no such sample.
        """
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            msg = f"sample {at} is out of range: there are {len(self)}"
            raise IndexError(msg)
        return self.values[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The arrays of all samples."""
        return iter(self.values.split(self.offsets.diff().tolist()))

    def to(self, *args: Any, **options: Any) -> Ragged:
        """On another device, as `torch.Tensor.to` takes it; a dtype is that of the values."""
        values = self.values.to(*args, **options)
        return Ragged(values, self.offsets.to(values.device, non_blocking=bool(options.get("non_blocking", False))))

    def pin_memory(self) -> Ragged:
        """In page-locked memory."""
        return Ragged(self.values.pin_memory(), self.offsets.pin_memory())


def make_ragged(values: Sequence[Any], slot: str, memory: Memory) -> Ragged:
    """The batch of arrays or tensors of one dtype that differ in their first axis only.

    Args:
        values: At least one, each with at least one axis.
        slot: For messages.
        memory: Where the values are written.

    Raises:
        PipelineError: They are not such; it names the slot and the sample.
    """
    tensors = [_as_tensor(value, slot, at) for at, value in enumerate(values)]
    first = tensors[0]
    for at, one in enumerate(tensors):
        if (one.dtype, one.shape[1:]) != (first.dtype, first.shape[1:]):
            kinds = [f"{tuple(each.shape)} of {each.dtype}" for each in (first, one)]
            msg = f"batched: {slot} is {kinds[0]} in sample 0 but {kinds[1]} in sample {at}"
            raise PipelineError(f"{msg}. Ragged fields differ in their first axis only")
    offsets = offsets_of([len(one) for one in tensors])
    joined = memory.empty((int(offsets[-1]), *first.shape[1:]), first.dtype)
    torch.cat(tensors, out=joined)
    return Ragged(joined, offsets)


def offsets_of(lengths: Sequence[int]) -> torch.Tensor:
    """Where arrays of these lengths start when they lie end to end, and where the last one ends, int64 (n + 1,)."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int64))


def _as_tensor(value: Any, slot: str, at: int) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        try:
            native = value.dtype.newbyteorder("=")
            value = torch.from_numpy(np.ascontiguousarray(value, dtype=native).reshape(value.shape))
        except TypeError as err:
            raise PipelineError(f"batched: {slot} in sample {at}: {err}") from err
    if not isinstance(value, torch.Tensor) or not value.ndim:
        what = "one number" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise PipelineError(f"batched: {slot} is {what} in sample {at}. Ragged fields are arrays, as of `npy`")
    return value
