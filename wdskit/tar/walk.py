"""The members of a tar by their headers: as strict as `tar.reader`, but the data of large members are not read.

Damage inside the data is not found; every other fault is refused with the same message as in the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdskit.limits import BLOCK_BYTES
from wdskit.tar.header import padded
from wdskit.tar.reader import any_member, check_end, no_end_marker
from wdskit.tar.window import CAREFUL_READS, Window

ReadAt = Callable[[int, int], bytes]
"""(offset, size): up to `size` bytes from `offset`; empty at the end and only there."""

JUMP_BYTES = 32 << 10  # data that end this far after the last read are skipped by a jump; shorter data are read
PEEK_BYTES = 4 << 10  # read after a jump: small fields, and the next header

_ZERO_BLOCK = bytes(BLOCK_BYTES)


class Span(NamedTuple):
    """The byte range of a member's data: `size` bytes from `offset`."""

    offset: int
    size: int


class _JumpingWindow(Window):
    """A window over a file that does not read large skipped ranges."""

    def __init__(self, read_at: ReadAt, num_bytes: int, shard: str, start: int) -> None:
        super().__init__(self._read_on, shard)
        self._read_at = read_at
        self._num_bytes = num_bytes
        self._next = self.base = start
        if start:  # perhaps only one sample is read
            self.data = self._read_on(PEEK_BYTES)
            self.careful = CAREFUL_READS

    def _read_on(self, size: int) -> bytes:
        data = self._read_at(self._next, size)
        self._next += len(data)
        return data

    def jump(self, size: int) -> None:
        """Consume `size` bytes and their padding without reading them, if that saves time."""
        stop = self.offset + padded(size)
        if stop - self._next < JUMP_BYTES:
            self.skip(size)
            return
        self.base, self.at, self.data = min(stop, self._num_bytes), 0, b""
        if stop > self._num_bytes:
            raise self.cut_member(size)
        self._next = stop
        self.data = self._read_on(PEEK_BYTES)
        self.careful = CAREFUL_READS


class TarWalk:
    """Every regular member of a tar, in order, without its data; iterate it once.

    Args:
        read_at: Reads the file.
        num_bytes: Its size.
        shard: Path, for messages.
        start: Where the first member to see starts.

    Attributes:
        stop: Offset of the end marker, once the tar is walked; before, 0.
    """

    def __init__(self, read_at: ReadAt, num_bytes: int, *, shard: str, start: int = 0) -> None:
        self._window = _JumpingWindow(read_at, num_bytes, shard, start)
        self.stop = 0

    def __iter__(self) -> Iterator[tuple[str, int, Span]]:
        """Yield (name, offset of the member's first header block with its extension headers, where its data lie).

        Raises:
            ShardError: At the first byte that is invalid.
        """
        window = self._window
        while True:
            if not window.fill(BLOCK_BYTES):
                raise no_end_marker(window)
            if window.data.startswith(_ZERO_BLOCK, window.at):
                self.stop = window.offset
                check_end(window)
                return
            member = any_member(window)
            if member is not None:
                name, start, size = member
                span = Span(window.offset, size)
                window.jump(size)
                yield name, start, span
