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
import errno
import io
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wdskit.engine.outcome import Outcome

MIN_BYTES = 1 << 12
"""Smallest array that is in an arena. Smaller arrays use malloc, and are part of the pickle of a batch."""

_ALIGNMENT = 64
_STEP = 1 << 16  # sizes of blocks are multiples of it; pages that no batch touches take no memory

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
    """

    def __init__(self, number: int, num_bytes: int, *, is_shared: bool) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self._file = -1
        if is_shared:
            self._file = _anonymous_file()
            self._closing = weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, num_bytes)
        self.memory = map_memory(num_bytes, self._file)
        self.address = ctypes.addressof(self.memory)

    def send(self, connection: Connection) -> None:
        """Send the descriptor to the process at the other end of `connection`, and close the descriptor in this
        process. Do nothing if it was sent before.
        """
        # Not by multiprocessing's `send_handle`: since Python 3.14 it waits for an answer, and would read the first
        # byte of a request as the answer.
        if self._closing.alive:
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
                socket.send_fds(channel, [b"f"], [self._file])
            self._closing()

    def free_pages(self) -> None:
        """Give the pages back to the operating system. The block can be used again, but its content is undefined. On
        systems other than Linux, a shared block keeps its pages.
        """
        advice = mmap.MADV_DONTNEED if self._file < 0 else getattr(mmap, "MADV_REMOVE", mmap.MADV_DONTNEED)
        _libc.madvise(self.address, self.num_bytes, advice)


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


def receive_memory(connection: Connection) -> Any:
    """Receive a block that the other process sends with `Block.send`, and return its mapped memory.

    Raises:
        EOFError: The other process has ended.
        OSError: Too many files are open, or the block cannot be mapped.
    """
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        data, files, _, _ = socket.recv_fds(channel, 1, 1)
    if not data:
        raise EOFError
    if not files:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel dropped it
    try:
        return map_memory(os.fstat(files[0]).st_size, files[0])
    finally:
        os.close(files[0])


def _anonymous_file() -> int:
    """Return the descriptor of a new empty file in memory or in the folder for temporary files. It has no name."""
    if hasattr(os, "memfd_create"):  # a block may then be larger than /dev/shm
        return os.memfd_create("wdskit")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def borrow(memory: Any, back: deque[Any], item: Any) -> Bytes:
    """Return `memory` as a uint8 array. After this array and all its views are garbage-collected, `item` is appended to
    `back`.
    """
    array: Bytes = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, back.append, item).atexit = False
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
        free: The blocks that no batch uses. Finalizers append to it, which must take no lock.
        dropped: Numbers of blocks that were too small and were released to the operating system. A worker removes a
            number when it reports the number to the main process.
        usual_bytes: Size of the largest batch until now. New blocks are large enough for it.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.free: deque[Block] = deque()
        self.dropped: deque[int] = deque()
        self.usual_bytes = 0
        self._is_shared = is_shared
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Block:
        """Return a block of at least `num_bytes`. The caller appends it to `free` after its use."""
        needed = -(-max(num_bytes, self.usual_bytes) // _STEP) * _STEP
        with self._lock:
            while self.free:
                block = self.free.pop()
                if block.num_bytes >= needed:
                    return block
                self.dropped.append(block.number)
            return Block(next(self._numbers), needed, is_shared=self._is_shared)

    def free_pages(self) -> None:
        """Give the pages of all free blocks back to the operating system. The blocks can be used again."""
        with self._lock:
            for _ in range(len(self.free)):
                block = self.free.popleft()
                block.free_pages()
                self.free.append(block)


class Arena:
    """The memory of one batch, of `Collate` and `pack`. One thread uses it.

    Attributes:
        block: The block; None before the first large array.
        bytes: The bytes of the block. The block is free after this array and its views are garbage-collected.
    """

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self.block: Block | None = None
        self.bytes: Bytes | None = None
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
            self.bytes = borrow(self.block.memory, self._arenas.free, self.block)
        if self.bytes is None or start + num_bytes > self.block.num_bytes:
            return np.empty(tuple(shape), dtype)
        self._used = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self.bytes[start : start + num_bytes].view(dtype).reshape(tuple(shape))

    def find(self, address: int) -> int | None:
        """Return the offset of an address in the block; None for another address."""
        offset = -1 if self.block is None else address - self.block.address
        return offset if self.block is not None and 0 <= offset < self.block.num_bytes else None

    def end(self) -> None:
        """End the use of the arena. Its block is free once no array in it is left."""
        self._arenas.usual_bytes = max(self._arenas.usual_bytes, self._wanted)
        self.block = self.bytes = None


class Message(NamedTuple):
    """A value that `pack` has prepared for another process.

    Attributes:
        pickled: The pickle of the value; empty if the last of `parts` is the pickle.
        block: Number of the block with the parts; -1 if there are none.
        parts: (start, size) of each large array in the block.
    """

    pickled: bytes
    block: int = -1
    parts: tuple[tuple[int, int], ...] = ()


class BatchPickler(pickle.Pickler):
    """Pickles arrays and tensors. Their memory goes to the pickler's `buffer_callback` instead of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce a tensor as an array, and images (batch, channels, height, width) whose memory is channels_last as the
        contiguous array (batch, height, width, channels) of the same memory. `pickle.Pickler` calls this method.
        """
        if type(value) is np.ndarray:
            if value.ndim != 4 or value.flags.c_contiguous:
                return NotImplemented
            images_bhwc = value.transpose(0, 2, 3, 1)  # numpy would copy the images, which are not contiguous
            return (_channels_first, (images_bhwc,)) if images_bhwc.flags.c_contiguous else NotImplemented
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (RuntimeError, TypeError):  # numpy has no such tensor: sparse, bfloat16, with `requires_grad`, on a GPU
            return NotImplemented


def _channels_first(images_bhwc: NDArray[Any]) -> Any:
    return images_bhwc.transpose(0, 3, 1, 2)


def pack(outcome: Outcome[Any], arena: Arena) -> Message:
    """Pack an outcome for another process, which calls `unpack`. If it cannot be pickled, pack the error of pickling.

    Large arrays and tensors in the arena are not copied. Others, and a large pickle, are copied into the arena; if it
    has no room, they are a part of the message. The caller keeps `Arena.bytes` until the other process has returned the
    block.
    """
    parts: list[tuple[int, int]] = []

    def is_placed(raw: Bytes) -> bool:
        if raw.nbytes < MIN_BYTES:
            return False
        start = arena.find(raw.ctypes.data)
        if start is None:
            copied = arena.empty(raw.shape, np.uint8)
            start = arena.find(copied.ctypes.data)
            if start is not None:
                copied[:] = raw
        if start is not None:
            parts.append((start, raw.nbytes))
        return start is not None

    def take(buffer: pickle.PickleBuffer) -> bool:
        return not is_placed(np.frombuffer(buffer.raw(), np.uint8))

    file = io.BytesIO()
    try:
        BatchPickler(file, protocol=5, buffer_callback=take).dump(outcome)
        pickled = b"" if is_placed(np.frombuffer(file.getbuffer(), np.uint8)) else file.getvalue()
    except BaseException as err:  # noqa: BLE001 (the consumer receives every error of a worker)
        return Message(pickle.dumps(Outcome(error=err, where=outcome.where)))
    if arena.block is None or not parts:
        return Message(pickled)
    return Message(pickled, arena.block.number, tuple(parts))


def unpack(message: Message, block: Bytes | None) -> Any:
    """Return the value of a message. `block` has the bytes of `message.block`; large arrays are views of it."""
    parts = [] if block is None else [block[start : start + size] for start, size in message.parts]
    pickled = message.pickled or parts.pop().data
    return pickle.loads(pickled, buffers=parts)  # noqa: S301 (from our own worker)
