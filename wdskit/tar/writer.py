"""Write tars deterministically, with only the subset of tar that every reader understands."""

from __future__ import annotations

from collections.abc import Callable

from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES
from wdskit.tar.header import HeaderError, build_header

END_BYTES = 2 * BLOCK_BYTES
"""The end marker: two zero blocks."""

_JOIN_BYTES = 1 << 20
"""Size of the buffer that collects members."""

_ZEROS = bytes(BLOCK_BYTES)


def member_bytes(size: int) -> int:
    """Return the bytes that a member with `size` bytes of data adds to a shard: header, data and padding."""
    return BLOCK_BYTES + size + -size % BLOCK_BYTES  # inline for speed: called for each packed field


class TarWriter:
    """A writer of tars: ustar members with mode 0644, no owner, no time, and names of at most 100 bytes.

    Args:
        write: Writes the given bytes, which do not change before its next call returns, as `TempFile.write`.

    Attributes:
        offset: Byte offset of the next member.
    """

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self._buffer, self._spare = bytearray(_JOIN_BYTES), bytearray(_JOIN_BYTES)
        self._used = 0
        self.offset = 0

    def add(self, name: str, data: Buffer) -> None:
        """Append one member. If it has more than 1 MB, `data` must not change before the next call returns.

        Raises:
            HeaderError: The name is empty, over 100 bytes of UTF-8, cannot be written as UTF-8, has a NUL, or ends in a
                slash; or the data has 8 GiB or more.
            TypeError: `data` is a view that is not contiguous.
        """
        if isinstance(data, memoryview):
            data = data.cast("B")  # `len` must count bytes, not items
        size = len(data)
        self._put(_header(name, size), data, size)

    def finish(self) -> None:
        """Write the pending bytes and the end marker (two zero blocks). Call it once, after the last member.

        Nothing is closed.
        """
        self._put(_ZEROS, b"", 0)
        self._put(_ZEROS, b"", 0)
        self._flush()

    def _put(self, block: bytes, data: Buffer, size: int) -> None:
        """Append a block of 512 bytes, then `size` bytes of data and their padding."""
        start = self._used + BLOCK_BYTES
        stop = start + size
        end = stop + -size % BLOCK_BYTES
        buffer = self._buffer
        if end > len(buffer) and self._used:
            self._flush()
            self._put(block, data, size)
            return
        self.offset += end - self._used
        if end <= len(buffer):
            buffer[self._used : start] = block
            buffer[start:stop] = data
            buffer[stop:end] = _ZEROS[: end - stop]
            self._used = end
            return
        self._write(block)
        self._write(data)
        if end > stop:
            self._write(_ZEROS[: end - stop])

    def _flush(self) -> None:
        self._write(memoryview(self._buffer)[: self._used])
        # A new buffer for each megabyte would cost an eighth of the time to pack files of 100 KB.
        self._buffer, self._spare = self._spare, self._buffer
        self._used = 0


def _header(name: str, size: int) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError as err:
        raise HeaderError(f"the name {name!r} cannot be written as UTF-8") from err
    return build_header(encoded, size)
