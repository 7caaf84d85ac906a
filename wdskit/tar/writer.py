"""The deterministic writer: only the subset of tar that every reader understands, the same bytes for the same
members.
"""

from __future__ import annotations

from collections.abc import Callable

from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES
from wdskit.tar.header import HeaderError, build_header, padded

END_BYTES = 2 * BLOCK_BYTES
"""The end marker: two zero blocks."""

_JOIN_BYTES = 1 << 20  # small members are joined to writes of about this size: 124k against 60k members a second


def member_bytes(size: int) -> int:
    """Bytes that a member with `size` bytes of data adds to a shard."""
    return BLOCK_BYTES + padded(size)


class TarWriter:
    """Writes ustar members with mode 0644, no owner, no time, names of at most 100 bytes.

    Args:
        write: Takes all the bytes it is given, in order.

    `offset` is the byte at which the next member starts.
    """

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self.offset = 0

    def add(self, name: str, data: Buffer) -> None:
        """Append one member. `data` must not change before `finish` or the next megabyte.

        Raises:
            HeaderError: The name is empty, over 100 bytes of UTF-8 or a directory's, or the data are over 8 GiB.
            TypeError: `data` is a view that is not contiguous.
        """
        if isinstance(data, memoryview):
            data = data.cast("B")  # its length would count items, which may be larger than bytes
        try:
            encoded = name.encode()
        except UnicodeEncodeError as err:
            msg = f"the name {name!r} cannot be written as UTF-8"
            raise HeaderError(msg) from err
        size = len(data)
        self._pending += (build_header(encoded, size), data, bytes(-size % BLOCK_BYTES))
        added = member_bytes(size)
        self.offset += added
        self._pending_bytes += added
        if self._pending_bytes >= _JOIN_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write what is pending and the end marker. Nothing may be added afterwards."""
        self._pending.append(bytes(END_BYTES))
        self.offset += END_BYTES
        self._flush()

    def _flush(self) -> None:
        self._write(b"".join(self._pending))
        self._pending.clear()
        self._pending_bytes = 0
