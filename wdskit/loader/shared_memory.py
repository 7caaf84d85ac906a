"""Reused memory of batches, which can be shared between processes.

A worker process writes a batch into a block (`Ring.allocate`) and sends the block with `pack`. The main process maps
each block once, and unpacks tensors and arrays that are views of the block. After Python has garbage-collected all
these views, the next request to the worker has the number of the block. The worker releases the block
(`Ring.give_back`) and writes another batch into it.

A float batch of 64 images in new memory costs 9,408 page faults, 0.44 ms of CPU per image. In a reused block, it costs
no page fault.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import pickle
import socket
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wdskit.stages.collate import FRESH

if TYPE_CHECKING:
    import torch

MIN_BYTES = 1 << 16
"""Smallest array that is in a block. Smaller arrays use malloc, which reuses its memory itself."""

_INLINE_BYTES = 1 << 12  # smaller buffers are part of the pickle; a smaller pickle is sent through the pipe
_ALIGNMENT = 64
_UNUSED_FOR = 64  # a block is released to the system after this number of other allocations

Bytes = NDArray[np.uint8]


class Block:
    """A block of memory of this process.

    Args:
        number: Number of the block in its ring.
        num_bytes: Size of the block.

    Attributes:
        address: Address of the first byte.
        holders: Number of arrays and messages that use the block.
        last_used: Number of the last loan of this block; 0 if it was never lent. The ring counts the loans of all its
            blocks from 1.
    """

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.memory = self._map()
        self.address: int = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.holders = 0
        self.last_used = 0

    def _map(self) -> Any:
        return mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def free_pages(self) -> None:
        """Give the pages back to the operating system. The block can be used again, but its content is undefined."""
        _libc.madvise(self.address, self.num_bytes, mmap.MADV_DONTNEED)


class SharedBlock(Block):
    """Memory that another process can map through its file descriptor.

    The memory has no name, so a killed process leaves no file in /dev/shm.
    """

    file: int | None = None

    def _map(self) -> Any:
        self.file = _anonymous_file()
        os.ftruncate(self.file, self.num_bytes)
        return map_file(self.file, self.num_bytes)

    def send(self, connection: Connection) -> None:
        """Send the descriptor to the process at the other end of `connection`, and close the descriptor in this
        process. A block can be sent only once.
        """
        # Not by multiprocessing's `send_handle`: since Python 3.14 it waits for an answer, and would read the first
        # byte of a request as the answer.
        assert self.file is not None
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            socket.send_fds(channel, [b"f"], [self.file])
        self.close_file()

    def free_pages(self) -> None:
        """Give the memory back to the operating system. All processes that have mapped the block lose its content. On
        systems other than Linux, do nothing.
        """
        if hasattr(mmap, "MADV_REMOVE"):  # Linux
            _libc.madvise(self.address, self.num_bytes, mmap.MADV_REMOVE)

    def close_file(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __del__(self) -> None:
        self.close_file()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, num_bytes: int) -> Any:
    """Return the first `num_bytes` bytes of a file, mapped as shared memory until the result is garbage-collected.

    `file` is a descriptor, which the caller may close at once.

    Raises:
        OSError: The file cannot be mapped.
    """
    # `mmap.mmap` would keep a copy of the descriptor: a consumer with a thousand batches would have none left.
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    return memory


def receive_block(connection: Connection, num_bytes: int) -> Any:
    """Receive a block that the other process sends with `SharedBlock.send`, and return its mapped memory.

    Raises:
        EOFError: The other process has ended.
        OSError: The descriptor is missing, or cannot be mapped.
    """
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        data, files, _, _ = socket.recv_fds(channel, 1, 1)
    if not data:
        raise EOFError
    if not files:
        raise OSError("no file descriptor came with the block")
    try:
        return map_file(files[0], num_bytes)
    finally:
        os.close(files[0])


def _anonymous_file() -> int:
    """Return the descriptor of a new empty file in memory or in the folder for temporary files. It has no name."""
    if hasattr(os, "memfd_create"):  # a block may then be larger than /dev/shm
        return os.memfd_create("wdskit")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def keep_freed_memory() -> None:
    """Let malloc of this process keep up to 62 MB of freed memory, for the next samples."""
    # With new memory, a sample of 100 kB costs 11 page faults, and 66 us of CPU instead of 27 us.
    # When a mapped block is freed, glibc from then on keeps twice the size of the largest such block, at most 64 MB.
    np.empty(31 << 20, np.uint8)  # freed at once, and never touched


class Ring:
    """Lends blocks of memory to batches, and lends a block again when no batch uses it any more. Threads may share a
    ring.

    Args:
        kind: `Block` or `SharedBlock`.

    Attributes:
        dropped: Numbers of blocks that were released to the operating system. A worker removes a number from this queue
            when it reports the number to the main process.
    """

    def __init__(self, kind: type[Block] = Block) -> None:
        self._kind = kind
        self._numbers = itertools.count()
        self._free: list[Block] = []
        self._borrowed: dict[int, Block] = {}
        self._back: deque[int] = deque()  # filled by finalizers, which must take no lock
        self._lock = threading.Lock()
        self._num_borrowed = 0
        self.dropped: deque[int] = deque()

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array with undefined values. An array of `MIN_BYTES` or more is in a block."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < MIN_BYTES:
            return FRESH.empty(shape, dtype)
        return self.allocate(num_bytes)[:num_bytes].view(dtype).reshape(tuple(shape))

    def allocate(self, num_bytes: int) -> Bytes:
        """Return a uint8 array of at least `num_bytes` bytes in a block. The block can be lent again after the array
        and all its views are garbage-collected, and each `hold` has ended.
        """
        with self._lock:
            self._collect()
            block = self._take_free_block(num_bytes)
            self._num_borrowed += 1
            block.last_used = self._num_borrowed
            self._borrowed[block.number] = block
            block.holders += 1
        return borrow(block.memory, self._back, block.number)

    def locate(self, address: int) -> tuple[int, int] | None:
        """Return (block number, offset) of an address in a lent block; None for another address."""
        with self._lock:
            for block in self._borrowed.values():
                if 0 <= address - block.address < block.num_bytes:
                    return block.number, address - block.address
        return None

    def hold(self, number: int) -> Block:
        """Return the lent block with this number. The block is not lent again before `give_back(number)` is called."""
        with self._lock:
            block = self._borrowed[number]
            block.holders += 1
        return block

    def give_back(self, number: int) -> None:
        """End one `hold` of the block with this number. Takes no lock, so a finalizer may call this method."""
        self._back.append(number)

    def free_pages(self) -> None:
        """Give the pages of all free blocks back to the operating system. The blocks can be used again."""
        with self._lock:
            self._collect()
            for block in self._free:
                block.free_pages()

    def _collect(self) -> None:
        while self._back:
            block = self._borrowed[self._back.popleft()]
            block.holders -= 1
            if not block.holders:
                self._free.append(self._borrowed.pop(block.number))

    def _take_free_block(self, num_bytes: int) -> Block:
        """Return the smallest free block that has at least `num_bytes` and at most about twice as many bytes. If there
        is no such block, return a new block. First drop free blocks that were not lent in the last `_UNUSED_FOR` loans.
        """
        for block in [block for block in self._free if self._num_borrowed - block.last_used > _UNUSED_FOR]:
            self._free.remove(block)
            self.dropped.append(block.number)
        best = min(
            (block for block in self._free if num_bytes <= block.num_bytes <= 2 * num_bytes + MIN_BYTES),
            key=lambda block: (block.num_bytes, -block.last_used),
            default=None,
        )
        if best is None:
            return self._kind(next(self._numbers), _round_up(num_bytes))
        self._free.remove(best)
        return best


def borrow(memory: Any, back: deque[int], number: int) -> Bytes:
    """Return `memory` as a uint8 array. After this array and all its views are garbage-collected, `number` is appended
    to `back`.
    """
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, back.append, number).atexit = False
    return array


def _round_up(num_bytes: int) -> int:
    """Return the size of a new block for `num_bytes` bytes: `num_bytes` rounded up by less than an eighth, or by less
    than `MIN_BYTES`. So batches of similar sizes can use the same block.
    """
    step = max(MIN_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


class Part(NamedTuple):
    """A range of bytes in a block: the number of the block, the offset of the first byte, and the size."""

    block: int
    start: int
    num_bytes: int


class Message(NamedTuple):
    """A value that `pack` has prepared for another process.

    Attributes:
        pickled: The pickle of the value; if the pickle is large, the part of a block that has the pickle.
        buffers: The parts of blocks that have the value's large tensors and arrays.
    """

    pickled: bytes | Part
    buffers: tuple[Part, ...]

    @property
    def blocks(self) -> set[int]:
        """Numbers of the blocks that hold the value."""
        parts = self.buffers if isinstance(self.pickled, bytes) else (*self.buffers, self.pickled)
        return {part.block for part in parts}


class BatchPickler(pickle.Pickler):
    """Pickles arrays and tensors. Their memory goes to the pickler's `buffer_callback` instead of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce arrays and tensors; `pickle.Pickler` calls this method."""
        if type(value) is np.ndarray:
            return _reduce_array(value)
        torch = sys.modules.get("torch")
        return _reduce_tensor(value) if torch is not None and type(value) is torch.Tensor else NotImplemented


class _Chunks(list[Any]):
    """A file to which a pickler writes. It keeps the written objects in a list and does not copy them."""

    def write(self, data: Any) -> int:
        """Append `data`, and return its length in bytes."""
        self.append(data)
        return len(data)


def pack(value: Any, ring: Ring) -> Message:
    """Pack a value for another process, which calls `unpack`.

    Args:
        value: Any object that pickles.
        ring: A ring of shared blocks. Tensors and arrays in these blocks are not copied. Other large tensors and arrays
            are copied once, into another block. The message holds each block in `message.blocks` until `ring.give_back`
            is called with the number of the block.

    Raises:
        OSError: No memory or no file descriptor is left.
        BaseException: Pickling a part of `value` raised this error.
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
    BatchPickler(chunks, protocol=5, buffer_callback=take).dump(value)
    pickled = b"".join(chunks) if sum(map(len, chunks)) < _INLINE_BYTES else None
    array, places = _copy([] if pickled is not None else chunks, copied, ring)
    message = Message(pickled or places.pop(0), tuple(part or places.pop(0) for part in parts))
    for number in message.blocks:
        ring.hold(number)
    del array  # lent until here
    return message


def can_pack(value: Any) -> bool:
    """Return True if `pack` can pickle a value, that is, if its pickling raises no Exception."""
    try:
        BatchPickler(_Chunks(), protocol=5, buffer_callback=lambda _: False).dump(value)
    except Exception:  # noqa: BLE001 (a user's `__reduce__` may raise anything)
        return False
    return True


def _copy(chunks: list[Any], others: list[Bytes], ring: Ring) -> tuple[Bytes | None, list[Part]]:
    """Copy the concatenated chunks, and then the other buffers, into one block of `ring`.

    Returns:
        (bytes of the block, parts of the block). The first part has the chunks, if there are any. Each further part has
        one buffer of `others`. Without chunks and buffers: (None, []).
    """
    sizes = [sum(map(len, chunks))] * bool(chunks) + [len(other) for other in others]
    if not sizes:
        return None, []
    stops = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]).tolist()
    array = ring.allocate(stops[-1])
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


def unpack(message: Message, borrowed: Callable[[int], Bytes]) -> Any:
    """Return the value of a message.

    Args:
        message: From `pack`.
        borrowed: Takes the number of a block and returns its bytes. Large tensors and arrays of the value are views of
            these bytes.
    """
    blocks = {number: borrowed(number) for number in message.blocks}

    def find(part: Part) -> Bytes:
        return blocks[part.block][part.start : part.start + part.num_bytes]

    pickled = message.pickled if isinstance(message.pickled, bytes) else find(message.pickled).data
    return pickle.loads(pickled, buffers=[find(part) for part in message.buffers])  # noqa: S301 (from our own worker)


def _reduce_array(array: NDArray[Any]) -> Any:
    """Return the result of `object.__reduce__` for images (batch, channels, height, width) whose memory is
    channels_last. They are pickled as the contiguous array (batch, height, width, channels) of the same memory.

    For any other array, return NotImplemented: numpy then pickles the array itself.
    """
    # numpy would copy the images, because they are not contiguous.
    if array.ndim != 4 or array.flags.c_contiguous:
        return NotImplemented
    images_bhwc = array.transpose(0, 2, 3, 1)
    return (_channels_first, (images_bhwc,)) if images_bhwc.flags.c_contiguous else NotImplemented


def _channels_first(images_bhwc: NDArray[Any]) -> Any:
    return images_bhwc.transpose(0, 3, 1, 2)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return the result of `object.__reduce__` for a CPU tensor, which is pickled as bytes, dtype, shape and strides.

    Return NotImplemented for a tensor that torch must pickle: sparse, nested, quantized, not on the CPU, or with
    `requires_grad`.
    """
    import torch

    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return NotImplemented
    if tensor.is_quantized or tensor.is_nested:
        return NotImplemented
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # Dense values fill their memory without gaps, in row-major or channels_last order.
    is_images = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    dense = tensor if is_images else tensor.contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(flat.data), tensor.dtype, tuple(dense.shape), dense.stride())


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not memoryview(buffer):
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).view(dtype).as_strided(shape, stride)
