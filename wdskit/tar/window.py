"""A moving window over a stream of bytes, which reads a shard in few reads and with few copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from typing_extensions import Self

from wdskit.errors import ShardError, UnsupportedMember
from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES, MAX_READ_MEMBER_BYTES
from wdskit.tar.header import padded

Read = Callable[[int], bytes]
"""Returns up to n bytes from where the last call stopped; empty only at the end."""

Spill = Callable[[], IO[bytes]]
"""Opens a temporary file for the data of one member that is too large to keep in memory."""

# CPU microseconds per sample (image and `cls`) with chunks of 64 KiB, 256 KiB, 1 MiB, and with one read per image:
#   5 KB 7.6, 7.3, 8.4, 14.6;  64 KB 17.5, 16.8, 25.1, 16.7;  100 KB 28.6, 24.7, 36.9, 22.4;  2 MB 346, 1222, 1292, 190
CHUNK_BYTES = 256 << 10
LARGE_BYTES = 64 << 10
NUM_EXACT_READS = 8  # reads without reading ahead after a large member, because the next one is often large too
MAX_PIECE_BYTES = 16 << 20  # os.read allocates the requested size before it reads

_CUT = "It was cut short. Fetch it again, or pack it again."
_DAMAGED = "It is damaged, or not a tar of plain files. Fetch it again, or pack it again."


class LargeData(bytes):
    """Empty bytes in place of the data of a member that is too large to keep in memory.

    Attributes:
        num_bytes: Size of the member's data in bytes.
        file: An open file with only the data, which the receiver seeks and closes; None if the data was discarded.
    """

    num_bytes: int
    file: IO[bytes] | None

    def __new__(cls, num_bytes: int, file: IO[bytes] | None = None) -> Self:  # noqa: D102
        self = super().__new__(cls)
        self.num_bytes = num_bytes
        self.file = file
        return self


def size_of(data: Buffer) -> int:
    """Return the number of bytes of a member's data, which may be `LargeData`."""
    return data.num_bytes if isinstance(data, LargeData) else len(data)


class Window:
    """A buffer that moves forward over a stream. Many small members are read at once, and a large member alone.

    Args:
        read: Called with a number of bytes. Returns the next bytes, at most this number; `b""` only at the end.
        shard: Path or URL, for messages.
        hold_bytes: Largest number of bytes of a member's data that are kept in memory.
        spill: Returns a new temporary file, for the data of each member over `hold_bytes`; None discards the data.

    Attributes:
        data: The buffer. `data[at:]` are read but not consumed.
        at: Index in `data` of the next byte to consume.
        base: Offset of `data[0]` in the shard.
        num_exact_reads: The next `num_exact_reads` reads of `fill` get only the needed bytes. Later reads get
            `CHUNK_BYTES` or more.
    """

    def __init__(
        self, read: Read, shard: str, hold_bytes: int = MAX_READ_MEMBER_BYTES, spill: Spill | None = None
    ) -> None:
        self._read = read
        self._hold_bytes = hold_bytes
        self._spill = spill
        self.num_exact_reads = 0
        self.shard = shard
        self.data = b""
        self.at = 0
        self.base = 0

    @property
    def offset(self) -> int:
        """Offset in the shard of the next byte to consume."""
        return self.base + self.at

    def fill(self, size: int) -> bool:
        """Read until the buffer has at least `size` bytes to consume.

        Return True if the buffer then has them. Return False if the stream ends earlier; the buffer then has all bytes
        that are left.
        """
        have = len(self.data) - self.at
        if have >= size:
            return True
        parts = [self.data[self.at :]]
        ahead = 0 if self.num_exact_reads else CHUNK_BYTES
        self.num_exact_reads = max(0, self.num_exact_reads - 1)
        while have < size:
            part = self._read(max(ahead, min(size - have, MAX_PIECE_BYTES)))
            if not part:
                break
            parts.append(part)
            have += len(part)
        self.base += self.at
        self.at = 0
        self.data = b"".join(parts)
        return have >= size

    def take(self, size: int) -> bytes:
        """Consume `size` bytes of data and their padding, and return the data.

        Return `LargeData` in place of data over `hold_bytes`, unless the data is below 64 KiB or already complete in
        the buffer.

        Raises:
            ShardError: The stream ends inside the data or their padding.
        """
        if size >= LARGE_BYTES and len(self.data) - self.at < size:
            return self._take_large(size)
        self.skip(size)
        start = self.at - padded(size)
        return self.data[start : start + size]

    def skip(self, size: int) -> None:
        """Consume `size` bytes and their padding. The next block is read into the buffer too, but not consumed.

        Raises:
            ShardError: The stream ends inside the bytes or their padding.
        """
        if not self.fill(padded(size) + BLOCK_BYTES) and len(self.data) - self.at < padded(size):
            raise self.cut_member(size)
        self.at += padded(size)

    def _take_large(self, size: int) -> bytes:
        """Do the same as `take` for data of which the buffer has only a part. Nothing after the padding and the next
        block is read.
        """
        have = len(self.data) - self.at
        parts = [self.data[self.at :]] if have else []  # bytes.join copies, unless there is one part only
        self.base += self.at
        self.data, self.at = b"", 0
        is_held = size <= self._hold_bytes
        file = None if is_held or self._spill is None else self._spill()
        if file is not None:
            file.writelines(parts)
        while have < size and (part := self._read(min(size - have, MAX_PIECE_BYTES if is_held else CHUNK_BYTES))):
            if is_held:
                parts.append(part)
            elif file is not None:
                file.write(part)
            have += len(part)
        if file is not None:
            file.flush()  # a full disk is noticed here, not where the data is used
        self.base += have
        self.num_exact_reads = NUM_EXACT_READS
        padding = padded(size) - size
        if have < size or (not self.fill(padding + BLOCK_BYTES) and len(self.data) < padding):
            raise self.cut_member(size)
        self.at = padding
        return b"".join(parts) if is_held else LargeData(size, file)

    def cut_member(self, size: int) -> ShardError:
        """Return the ShardError for a stream that ended inside a member of `size` bytes."""
        return self.cut(f"the shard stops inside a member of {size} bytes")

    def cut(self, problem: str) -> ShardError:
        """Return the ShardError for a stream that ended too early. `problem` says where."""
        return ShardError(shard=self.shard, offset=self.base + len(self.data), problem=problem, remedy=_CUT)

    def unsupported(self, offset: int, key: str, problem: str) -> UnsupportedMember:
        """Return the UnsupportedMember error for a member of `key` at `offset`. `problem` says what the member is."""
        remedy = "Pack it again without this member."
        error = UnsupportedMember(shard=self.shard, offset=offset, problem=problem, remedy=remedy)
        error.key = key
        return error

    def damaged(self, offset: int, problem: str, remedy: str = _DAMAGED) -> ShardError:
        """Return the ShardError for invalid bytes at `offset`. `problem` is the fault, `remedy` the advice."""
        return ShardError(shard=self.shard, offset=offset, problem=problem, remedy=remedy)
