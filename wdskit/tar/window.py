"""A moving window over a stream of bytes: how a shard is read, in few reads and few copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO

from typing_extensions import Self

from wdskit.errors import ShardError, UnsupportedMember
from wdskit.limits import BLOCK_BYTES, MAX_READ_MEMBER_BYTES
from wdskit.tar.header import padded

Read = Callable[[int], bytes]
"""Up to n bytes from where the last call stopped; empty at the end and only there."""

Spill = Callable[[], IO[bytes]]
"""Opens a temporary file for the data of one member that is too large for memory."""

# CPU microseconds a sample (image and `cls`) in chunks of 64 KiB, 256 KiB, 1 MiB, and with images read for themselves:
#   5 KB 7.6, 7.3, 8.4, 14.6;  64 KB 17.5, 16.8, 25.1, 16.7;  100 KB 28.6, 24.7, 36.9, 22.4;  2 MB 346, 1222, 1292, 190
CHUNK_BYTES = 256 << 10
LARGE_BYTES = 64 << 10
CAREFUL_READS = 8  # small members after a large one until reading ahead pays again
MAX_READ_BYTES = 16 << 20  # os.read allocates the requested size before it reads

_CUT = "It was cut short. Fetch it again, or pack it again."
_DAMAGED = "It is damaged, or not a tar of plain files. Fetch it again, or pack it again."


class Passed(bytes):
    """Replaces the data of a member over `hold_bytes`: empty bytes with the member's size, and with the open file that
    has the data from its start; None if the data were discarded.
    """

    num_bytes: int
    file: IO[bytes] | None

    def __new__(cls, num_bytes: int, file: IO[bytes] | None = None) -> Self:  # noqa: D102
        self = super().__new__(cls)
        self.num_bytes = num_bytes
        self.file = file
        return self


def size_of(data: bytes) -> int:
    """Return the number of bytes of a member, in memory or not."""
    return data.num_bytes if isinstance(data, Passed) else len(data)


class Window:
    """A moving window over a stream: `data[at:]` are the bytes not yet consumed, `base` the offset of `data[0]`.

    Small members are read many at a time. A large member is read alone, because its bytes that came with its header
    would have to be copied. The next `careful` reads fetch no more than they need.
    """

    def __init__(
        self, read: Read, shard: str, hold_bytes: int = MAX_READ_MEMBER_BYTES, spill: Spill | None = None
    ) -> None:
        self._read = read
        self._hold_bytes = hold_bytes
        self._spill = spill
        self.careful = 0
        self.shard = shard
        self.data = b""
        self.at = 0
        self.base = 0

    @property
    def offset(self) -> int:
        """Offset in the shard of the next byte."""
        return self.base + self.at

    def fill(self, size: int) -> bool:
        """Read until at least `size` bytes are available; return False if the stream ends before."""
        have = len(self.data) - self.at
        if have >= size:
            return True
        parts = [self.data[self.at :]]
        ahead = 0 if self.careful else CHUNK_BYTES
        self.careful = max(0, self.careful - 1)
        while have < size:
            part = self._read(max(ahead, min(size - have, MAX_READ_BYTES)))
            if not part:
                break
            parts.append(part)
            have += len(part)
        self.base += self.at
        self.at = 0
        self.data = b"".join(parts)
        return have >= size

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes, and consume their padding."""
        if size >= LARGE_BYTES and len(self.data) - self.at < size:
            return self._take_large(size)
        self.skip(size)
        start = self.at - padded(size)
        return self.data[start : start + size]

    def skip(self, size: int) -> None:
        """Consume `size` bytes and their padding; the next header is read with them."""
        if not self.fill(padded(size) + BLOCK_BYTES) and len(self.data) - self.at < padded(size):
            raise self.cut_member(size)
        self.at += padded(size)

    def _take_large(self, size: int) -> bytes:
        have = len(self.data) - self.at
        parts = [self.data[self.at :]] if have else []  # bytes.join copies, unless there is one part only
        self.base += self.at
        self.data, self.at = b"", 0
        is_held = size <= self._hold_bytes
        file = None if is_held or self._spill is None else self._spill()
        if file is not None:
            file.writelines(parts)
        while have < size and (part := self._read(min(size - have, MAX_READ_BYTES if is_held else CHUNK_BYTES))):
            if is_held:
                parts.append(part)
            elif file is not None:
                file.write(part)
            have += len(part)
        self.base += have
        self.careful = CAREFUL_READS
        padding = padded(size) - size
        if have < size or (not self.fill(padding + BLOCK_BYTES) and len(self.data) < padding):
            raise self.cut_member(size)
        self.at = padding
        return b"".join(parts) if is_held else Passed(size, file)

    def cut_member(self, size: int) -> ShardError:
        """Return the error for a stream that ended inside a member of `size` bytes."""
        return self.cut(f"the shard stops inside a member of {size} bytes")

    def cut(self, problem: str) -> ShardError:
        """Return the error for a stream that ended too early."""
        return ShardError(shard=self.shard, offset=self.base + len(self.data), problem=problem, remedy=_CUT)

    def unsupported(self, offset: int, problem: str) -> UnsupportedMember:
        """Return the error for a member at `offset` of an unsupported kind."""
        return UnsupportedMember(shard=self.shard, offset=offset, problem=problem, remedy="Pack regular files only.")

    def damaged(self, offset: int, problem: str, remedy: str = _DAMAGED) -> ShardError:
        """Return the error for invalid bytes at `offset`."""
        return ShardError(shard=self.shard, offset=offset, problem=problem, remedy=remedy)
