"""Where the bytes of a field are until they are packed: references, small and plain enough to stand in a plan.

Each kind is a frozen dataclass of texts and whole numbers that has `path`, `num_bytes` (of the field), the size, time
of change and inode that the file had when the plan was made (of an object its size and ETag), and `read`. `KINDS` names
them all, so that a plan can be written and read back.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias

from wdskit.limits import MAX_READ_BYTES
from wdskit.storage.identity import FileIdentity

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

ZIP_HEADER_BYTES = 30  # then its name and extra field, whose sizes stand in the last four (PKWARE APPNOTE 4.3.7)
_ZIP_HEADER_START = b"PK\x03\x04"


class _InFile:
    """Bytes somewhere in a file, which is compared with its identity at every read."""

    __slots__ = ()
    path: str
    num_bytes: int
    file_bytes: int
    mtime_ns: int
    inode: int

    @property
    def identity(self) -> FileIdentity:
        """The file's identity when the plan was made."""
        return FileIdentity(self.file_bytes, self.mtime_ns, self.inode)


@dataclass(frozen=True, slots=True)
class FileBytes(_InFile):
    """A whole file, which had `num_bytes` when the plan was made."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    @property
    def identity(self) -> FileIdentity:
        """As of all; its size is that of the field."""
        return FileIdentity(self.num_bytes, self.mtime_ns, self.inode)

    def read(self) -> bytes:
        """The file's bytes.

        Raises:
            OSError: It cannot be read.
            ValueError: It is not the file that it was; and as all `read`s, what it has is damaged.
        """
        with self.identity.opened(self.path) as fd:
            return _read_part(fd, 0, self.num_bytes)

    def read_into(self, memory: memoryview) -> None:
        """Write the file's bytes into memory of `num_bytes` bytes. Raises as `read`."""
        with self.identity.opened(self.path) as fd:
            count = os.readv(fd, [memory[:MAX_READ_BYTES]])
            while count < self.num_bytes:  # it comes in parts: from a network, or `MAX_READ_BYTES` at a time
                more = os.readv(fd, [memory[count : count + MAX_READ_BYTES]])
                if not more:
                    raise _cut_short(count, self.num_bytes)
                count += more


@dataclass(frozen=True, slots=True)
class PartBytes(_InFile):
    """Bytes that stand at `offset` of a file: a member of a tar, a cell of an Arrow file."""

    path: str
    num_bytes: int
    offset: int
    file_bytes: int
    mtime_ns: int
    inode: int

    def read(self) -> bytes:
        """The bytes. Raises as `FileBytes.read`."""
        with self.identity.opened(self.path) as fd:
            return _read_part(fd, self.offset, self.num_bytes)


@dataclass(frozen=True, slots=True)
class ZipBytes(_InFile):
    """A member of a zip.

    Attributes:
        offset: Where its local header begins.
        packed_bytes: Bytes that it takes in the zip.
        is_deflated: Whether they are compressed.
        crc: CRC-32 of the member.
    """

    path: str
    num_bytes: int
    offset: int
    packed_bytes: int
    is_deflated: bool
    crc: int
    file_bytes: int
    mtime_ns: int
    inode: int

    def read(self) -> bytes:
        """The member's bytes; no more of them are made than it claims to have. Raises as `FileBytes.read`."""
        with self.identity.opened(self.path) as fd:
            header = _read_part(fd, self.offset, ZIP_HEADER_BYTES)
            if not header.startswith(_ZIP_HEADER_START):
                raise ValueError(f"no member begins at byte {self.offset}, where the directory of the zip lists one")
            name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            start = self.offset + ZIP_HEADER_BYTES + name_bytes + extra_bytes
            data = _read_part(fd, start, self.packed_bytes)
        if self.is_deflated:
            data = self._inflated(data)
        if zlib.crc32(data) != self.crc:
            raise ValueError(f"the CRC-32 of the member at byte {self.offset} does not match its {len(data)} bytes")
        return data

    def _inflated(self, packed: bytes) -> bytes:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = stream.decompress(packed, self.num_bytes + 1)
        except zlib.error as err:
            raise ValueError(f"the member at byte {self.offset} is damaged: {err}") from err
        if len(data) != self.num_bytes or not stream.eof:
            msg = f"the member at byte {self.offset} does not have the {self.num_bytes} bytes that the zip promises"
            raise ValueError(msg)
        return data


@dataclass(frozen=True, slots=True)
class CellBytes(_InFile):
    """A cell of a Parquet file.

    Attributes:
        group: Number of its row group.
        row: Number of its row in that.
        column: Name of its column: one of bytes, or of structs whose `bytes` are meant.
    """

    path: str
    num_bytes: int
    group: int
    row: int
    column: str
    file_bytes: int
    mtime_ns: int
    inode: int

    def read(self) -> bytes:
        """The cell's bytes. Raises as `FileBytes.read`."""
        from wdskit.packing.sources.parquet import read_cell  # only where there are such cells

        data = read_cell(self.path, self.identity, self.group, self.row, self.column)
        if len(data) != self.num_bytes:
            raise ValueError(f"its cell has {len(data)} bytes now, but had {self.num_bytes} when packing began")
        return data


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes that stand at `offset` of an object in a store: a member of a tar.

    Attributes:
        path: Its URL, without a query.
        object_bytes: Size of the object.
        etag: Its ETag, empty where the store has none.
        modified: Its last change then, as in ISO 8601.
    """

    path: str
    num_bytes: int
    offset: int
    object_bytes: int
    etag: str
    modified: str

    def open(self) -> ObjectFile:
        """The object, of the version that it had when the plan was made."""
        from wdskit.storage.objects import ObjectFile  # only where there are objects

        modified = datetime.fromisoformat(self.modified) if self.modified else None
        return ObjectFile(self.path, num_bytes=self.object_bytes, etag=self.etag, modified=modified)

    def read(self) -> bytes:
        """The bytes.

        Raises:
            StorageError: The object cannot be read, or was replaced.
        """
        return self.open().read_whole(self.offset, self.num_bytes)


Reference: TypeAlias = FileBytes | PartBytes | ZipBytes | CellBytes | ObjectBytes
FieldBytes: TypeAlias = bytes | Reference

KINDS: dict[str, type[Reference]] = {
    "file": FileBytes,
    "part": PartBytes,
    "zip": ZipBytes,
    "cell": CellBytes,
    "object": ObjectBytes,
}
"""The kinds of reference, by the name that a plan gives them."""


def _read_part(fd: int, offset: int, num_bytes: int) -> bytes:
    parts = []
    stop = offset + num_bytes
    file_bytes = os.fstat(fd).st_size
    if stop > file_bytes:  # before there is memory for what a damaged directory claims
        raise _cut_short(file_bytes, stop)
    while offset < stop and (part := os.pread(fd, min(stop - offset, MAX_READ_BYTES), offset)):
        parts.append(part)
        offset += len(part)
    if offset < stop:
        raise _cut_short(offset, stop)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _cut_short(offset: int, stop: int) -> ValueError:
    return ValueError(f"the file stops at byte {offset}, {stop - offset} bytes before the end of this field")
