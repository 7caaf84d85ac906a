"""Arenas: the memory of batches, reused, and shared between processes.

An arena is the memory of one batch: the first large array takes a block, and later arrays the next bytes of it. A
worker process sends the number of the block with the batch. The main process maps each block once, and its batches are
views of the block. After Python has garbage-collected all these views, the next request to the worker has the number of
the block, and the worker writes another batch into it.

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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    import torch

MIN_BYTES = 1 << 12
"""Smallest array that is in an arena. Smaller arrays use malloc, and are part of the pickle of a batch."""

_ALIGNMENT = 64
_STEP = 1 << 16  # sizes of blocks are multiples of it; pages that no batch touches take no memory
_UNUSED_FOR = 64  # a block is released to the system after this number of other batches

Bytes = NDArray[np.uint8]


class Block:
    """A block of memory.

    Args:
        number: Number of the block in its process.
        num_bytes: Size of the block.
        is_shared: Whether another process can map the block, by its file descriptor. The file has no name, so a killed
            process leaves no file in /dev/shm.

    Attributes:
        memory: The mapped bytes.
        address: Address of the first byte.
        holders: Number of arrays and messages that use the block.
        last_used: Number of the last batch in this block.
    """

    def __init__(self, number: int, num_bytes: int, *, is_shared: bool) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.is_shared = is_shared
        self._file = _anonymous_file() if is_shared else -1
        if is_shared:
            os.ftruncate(self._file, num_bytes)
        self.memory = map_memory(num_bytes, self._file)
        self.address = ctypes.addressof(self.memory)
        self.holders = self.last_used = 0

    def send(self, connection: Connection) -> None:
        """Send the descriptor to the process at the other end of `connection`, and close the descriptor in this
        process. A block can be sent only once.
        """
        # Not by multiprocessing's `send_handle`: since Python 3.14 it waits for an answer, and would read the first
        # byte of a request as the answer.
        with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            socket.send_fds(channel, [b"f"], [self._file])
        self._close_file()

    def free_pages(self) -> None:
        """Give the pages back to the operating system. The block can be used again, but its content is undefined. Do
        nothing for a shared block on systems other than Linux.
        """
        advice = getattr(mmap, "MADV_REMOVE", None) if self.is_shared else mmap.MADV_DONTNEED
        if advice is not None:
            _libc.madvise(self.address, self.num_bytes, advice)

    def _close_file(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self._close_file()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def map_memory(num_bytes: int, file: int = -1) -> Any:
    """Return new memory of this process, or with `file`, a descriptor, the first bytes of a file as shared memory. The
    memory is unmapped when the result is garbage-collected. OSError: The system has no memory.
    """
    # `mmap.mmap` would keep a copy of the descriptor: a consumer with a thousand batches would have none left.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, num_bytes).atexit = False
    return memory


def receive_memory(connection: Connection, num_bytes: int) -> Any:
    """Receive a block that the other process sends with `Block.send`, and return its mapped memory.

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
        return map_memory(num_bytes, files[0])
    finally:
        os.close(files[0])


def _anonymous_file() -> int:
    """Return the descriptor of a new empty file in memory or in the folder for temporary files. It has no name."""
    if hasattr(os, "memfd_create"):  # a block may then be larger than /dev/shm
        return os.memfd_create("wdskit")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def borrow(memory: Any, back: deque[int], number: int) -> Bytes:
    """Return `memory` as a uint8 array. After this array and all its views are garbage-collected, `number` is appended
    to `back`.
    """
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, back.append, number).atexit = False
    return array


def keep_freed_memory() -> None:
    """Let malloc of this process keep up to 62 MB of freed memory, for the next samples."""
    # With new memory, a sample of 100 kB costs 11 page faults, and 66 us of CPU instead of 27 us.
    # When a mapped block is freed, glibc from then on keeps twice the size of the largest such block, at most 64 MB.
    np.empty(31 << 20, np.uint8)  # freed at once, and never touched


class Arenas:
    """The memory of the batches of one process. Threads may share it.

    Args:
        is_shared: Whether other processes can map the memory.

    Attributes:
        returned: Numbers of blocks whose user has ended. Finalizers fill it, which must take no lock.
        dropped: Numbers of blocks that were released to the operating system. A worker removes a number when it reports
            the number to the main process.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.returned: deque[int] = deque()
        self.dropped: deque[int] = deque()
        self._is_shared = is_shared
        self._numbers = itertools.count()
        self._free: list[Block] = []
        self._lent: dict[int, Block] = {}
        self._num_lent = 0
        self._usual_bytes = 0  # of a batch
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes`, for one user. It can be taken again after its number was in
        `returned` once for each of its `holders`.
        """
        needed = -(-max(num_bytes, self._usual_bytes) // _STEP) * _STEP
        with self._lock:
            self._collect()
            self._num_lent += 1
            for block in [*self._free]:
                if block.num_bytes < needed or self._num_lent - block.last_used > _UNUSED_FOR:
                    self._free.remove(block)
                    self.dropped.append(block.number)
            block = self._free.pop() if self._free else Block(next(self._numbers), needed, is_shared=self._is_shared)
            block.holders, block.last_used = 1, self._num_lent
            self._lent[block.number] = block
        return block

    def learn(self, num_bytes: int) -> None:
        """Make later blocks large enough for a batch of `num_bytes`."""
        self._usual_bytes = max(self._usual_bytes, num_bytes)

    def free_pages(self) -> None:
        """Give the pages of all free blocks back to the operating system. The blocks can be used again."""
        with self._lock:
            self._collect()
            for block in self._free:
                block.free_pages()

    def _collect(self) -> None:
        while self.returned:
            block = self._lent[self.returned.popleft()]
            block.holders -= 1
            if not block.holders:
                self._free.append(self._lent.pop(block.number))


class Arena:
    """The memory of one batch, of `Collate` and `pack`. One thread uses it.

    Attributes:
        block: The block; None before the first large array.
    """

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self.block: Block | None = None
        self._bytes: Bytes | None = None
        self._used = self._wanted = 0

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """Return a C-contiguous array with undefined values: in the arena, if the array is large and the arena has
        room.
        """
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < MIN_BYTES:
            return np.empty(tuple(shape), dtype)
        start = self._used
        self._wanted += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if self.block is None:
            self.block = self._arenas.take(num_bytes)
            self._bytes = borrow(self.block.memory, self._arenas.returned, self.block.number)
        if self._bytes is None or start + num_bytes > self.block.num_bytes:
            return np.empty(tuple(shape), dtype)
        self._used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._bytes[start : start + num_bytes].view(dtype).reshape(tuple(shape))

    def find(self, address: int) -> int | None:
        """Return the offset of an address in the block; None for another address."""
        offset = -1 if self.block is None else address - self.block.address
        return offset if self.block is not None and 0 <= offset < self.block.num_bytes else None

    def end(self) -> None:
        """End the use of the arena. Its block is free once no array in it is left."""
        self._arenas.learn(self._wanted)
        self.block = self._bytes = None


class Message(NamedTuple):
    """A value that `pack` has prepared for another process.

    Attributes:
        pickled: The pickle of the value; if the pickle is large, its (start, size) in the block.
        block: Number of the block that holds the value's large arrays; -1 if there is none.
        parts: (start, size) of each large array in the block.
    """

    pickled: bytes | tuple[int, int]
    block: int
    parts: tuple[tuple[int, int], ...]


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
        return memoryview(data).nbytes


def pack(value: Any, arena: Arena) -> Message:
    """Pack a value for another process, which calls `unpack`.

    Large arrays and tensors in the arena are not copied. Others, and a large pickle, are copied into the arena; if it
    has no room, they are a part of the message. A message with a block is one more user of the block, until the number
    of the block is in `Arenas.returned`.

    Raises:
        OSError: No memory or no file descriptor is left.
        BaseException: Pickling a part of `value` raised this error.
    """
    parts: list[tuple[int, int]] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = np.frombuffer(buffer.raw(), np.uint8)
        if raw.nbytes < MIN_BYTES:
            return True
        start = arena.find(raw.ctypes.data)
        if start is None:
            copied = arena.empty(raw.shape, np.uint8)
            start = arena.find(copied.ctypes.data)
            if start is None:
                return True
            copied[:] = raw
        parts.append((start, raw.nbytes))
        return False

    chunks = _Chunks()
    BatchPickler(chunks, protocol=5, buffer_callback=take).dump(value)
    num_bytes = sum(memoryview(chunk).nbytes for chunk in chunks)
    copied = arena.empty((num_bytes,), np.uint8)
    start = arena.find(copied.ctypes.data)
    pickled: bytes | tuple[int, int]
    if start is None:
        pickled = b"".join(chunks)
    else:
        pickled, at = (start, num_bytes), 0
        for chunk in chunks:
            raw = np.frombuffer(chunk, np.uint8)
            copied[at : at + len(raw)] = raw
            at += len(raw)
    if start is None and not parts:
        return Message(pickled, -1, ())
    assert arena.block is not None
    arena.block.holders += 1
    return Message(pickled, arena.block.number, tuple(parts))


def can_pack(value: Any) -> bool:
    """Return True if `pack` can pickle a value, that is, if its pickling raises no Exception."""
    try:
        BatchPickler(_Chunks(), protocol=5, buffer_callback=lambda _: False).dump(value)
    except Exception:  # noqa: BLE001 (a user's `__reduce__` may raise anything)
        return False
    return True


def unpack(message: Message, block: Bytes | None) -> Any:
    """Return the value of a message. `block` has the bytes of `message.block`; large arrays are views of it."""

    def find(part: tuple[int, int]) -> Bytes:
        assert block is not None
        return block[part[0] : part[0] + part[1]]

    pickled = message.pickled if isinstance(message.pickled, bytes) else find(message.pickled).data
    return pickle.loads(pickled, buffers=map(find, message.parts))  # noqa: S301 (from our own worker)


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
