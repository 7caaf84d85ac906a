"""List the members of a tar by their headers: as strict as `tar.reader`, but the data of large members is not read.

Damage inside the data is not found. For every other fault, the error is the same as in `tar.reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from wdskit.limits import BLOCK_BYTES
from wdskit.tar.header import padded
from wdskit.tar.reader import any_member, check_end, no_end_marker
from wdskit.tar.window import NUM_EXACT_READS, Window

ReadAt = Callable[[int, int], bytes]
"""(offset, size): returns up to `size` bytes from `offset`; empty only at the end."""

JUMP_BYTES = 32 << 10  # data that ends at least this far after the last read is skipped; nearer data is read
PEEK_BYTES = 4 << 10  # read after a skip: small fields, and the next header

_ZERO_BLOCK = bytes(BLOCK_BYTES)


class Span(NamedTuple):
    """The byte range of a member's data in the shard: `size` bytes from `offset`."""

    offset: int
    size: int


class _JumpingWindow(Window):
    """A window over a file, which can skip large ranges without reading them."""

    def __init__(self, read_at: ReadAt, num_bytes: int, shard: str, start: int) -> None:
        super().__init__(self._read_next, shard)
        self._read_at = read_at
        self._num_bytes = num_bytes
        self._next = self.base = start
        if start:  # the caller may want a single sample
            self.data = self._read_next(PEEK_BYTES)
            self.num_exact_reads = NUM_EXACT_READS

    def _read_next(self, size: int) -> bytes:
        data = self._read_at(self._next, size)
        self._next += len(data)
        return data

    def jump(self, size: int) -> None:
        """Consume `size` bytes of data and their padding. A large range is not read.

        Raises:
            ShardError: The file is too short.
        """
        stop = self.offset + padded(size)
        if stop - self._next < JUMP_BYTES:
            self.skip(size)
            return
        self.base, self.at, self.data = min(stop, self._num_bytes), 0, b""
        if stop > self._num_bytes:
            raise self.cut_member(size)
        self._next = stop
        self.data = self._read_next(PEEK_BYTES)
        self.num_exact_reads = NUM_EXACT_READS


class TarWalk:
    """Iterator over the regular members of a tar, in order, without their data. Iterate it once.

    Args:
        read_at: Called with (offset, size). Returns up to `size` bytes from `offset`; `b""` only at the end.
        num_bytes: Size of the file in bytes.
        shard: Path or URL, for messages.
        start: Byte offset of the first header of the first member to yield.

    Attributes:
        stop: Offset of the end marker, after the marker was read and zeros or another archive follow; 0 before.
    """

    def __init__(self, read_at: ReadAt, num_bytes: int, *, shard: str, start: int = 0) -> None:
        self._window = _JumpingWindow(read_at, num_bytes, shard, start)
        self.stop = 0

    def __iter__(self) -> Iterator[tuple[str, int, Span]]:
        """Yield (name, offset of the member's first header, range of its data). The first header may be an extension
        header.

        Raises:
            UnsupportedMember: As for `TarReader`: iterate again for the members after it.
            ShardError: A header or the end marker is invalid or missing. All members before the fault were yielded.
        """
        window = self._window
        while True:
            if not window.fill(BLOCK_BYTES):
                raise no_end_marker(window)
            if window.data.startswith(_ZERO_BLOCK, window.at):
                stop = window.offset
                second = check_end(window)
                self.stop = stop
                if second is not None:
                    raise second
                return
            member = any_member(window)
            if member is not None:
                name, start, size = member
                span = Span(window.offset, size)
                window.jump(size)
                yield name, start, span
