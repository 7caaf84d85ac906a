"""Batches on their way between processes: what is large lies in shared memory, written there in the first place or
copied once.

A message is pickled with protocol 5; tensors and arrays leave it as buffers. It goes only from a worker to the process
that started it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from wdskit.loader.memory import Bytes, Ring

_INLINE_BYTES = 1 << 12  # what is smaller travels in the pickle, and a small pickle in the pipe
_ALIGNMENT = 64


class Part(NamedTuple):
    """Bytes of a block."""

    block: int
    start: int
    num_bytes: int


class Message(NamedTuple):
    """A value: its pickle, or where that lies, and where its buffers lie."""

    pickled: bytes | Part
    buffers: tuple[Part, ...]

    @property
    def blocks(self) -> set[int]:
        """The blocks that it lies in."""
        parts = self.buffers if isinstance(self.pickled, bytes) else (*self.buffers, self.pickled)
        return {part.block for part in parts}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        return _reduce_tensor(value) if type(value) is torch.Tensor else NotImplemented


class _Chunks(list[Any]):
    """A file for a pickler, which gives it large bytes as they are."""

    def write(self, data: Any) -> int:
        """Keep what is written."""
        self.append(data)
        return len(data)


def pack(value: Any, ring: Ring) -> Message:
    """Put a value into a message.

    Args:
        value: Whatever pickles.
        ring: Of shared blocks. A tensor or array that lies in one of them stays there; others of some size are copied
            into another block, once. The blocks of the message are held once more: `ring.give_back` lets them go.
    """
    parts: list[Part | None] = []
    copied: list[Bytes] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = np.frombuffer(buffer.raw(), np.uint8)
        if raw.nbytes < _INLINE_BYTES:
            return True
        found = ring.locate(raw.ctypes.data)
        parts.append(Part(*found, raw.nbytes) if found else None)
        if found is None:
            copied.append(raw)
        return False

    chunks = _Chunks()
    _Pickler(chunks, protocol=5, buffer_callback=take).dump(value)
    pickled = b"".join(chunks) if sum(map(len, chunks)) < _INLINE_BYTES else None
    array, places = _copy([] if pickled is not None else chunks, copied, ring)
    message = Message(pickled or places.pop(0), tuple(part or places.pop(0) for part in parts))
    for number in message.blocks:
        ring.hold(number)
    del array  # its block was lent until here
    return message


def _copy(chunks: list[Any], others: list[Bytes], ring: Ring) -> tuple[Bytes | None, list[Part]]:
    """Copy chunks end to end and others behind them into one block: its memory, the part of all chunks if there are
    any, and those of the others.
    """
    sizes = [sum(map(len, chunks))] * bool(chunks) + [len(other) for other in others]
    if not sizes:
        return None, []
    stops = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
    array = ring.lend(stops[-1])
    found = ring.locate(array.ctypes.data)
    assert found is not None
    parts = [Part(found[0], start, size) for start, size in zip([0, *stops], sizes, strict=False)]
    at = 0
    for chunk in chunks:
        array[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
        at += len(chunk)
    for part, other in zip(parts[bool(chunks) :], others, strict=True):
        array[part.start : part.start + part.num_bytes] = other
    return array, parts


def unpack(message: Message, lend: Callable[[int], Bytes]) -> Any:
    """The value in a message.

    Args:
        message: From `pack`.
        lend: Gives all bytes of a block by its number. Tensors and arrays of the value are views of them.
    """
    blocks = {number: lend(number) for number in message.blocks}

    def find(part: Part) -> Bytes:
        return blocks[part.block][part.start : part.start + part.num_bytes]

    pickled = message.pickled if isinstance(message.pickled, bytes) else find(message.pickled).data
    return pickle.loads(pickled, buffers=[find(part) for part in message.buffers])  # noqa: S301 (of a worker of ours)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """A tensor as its bytes, dtype, shape and strides; what is none of the usual is left to torch."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_quantized:
        return NotImplemented
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dense = tensor if _is_dense(tensor) else tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(flat.data), tensor.dtype, tuple(dense.shape), dense.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie side by side, in whatever order."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    if not memoryview(buffer):
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(dtype).as_strided(shape, stride)
