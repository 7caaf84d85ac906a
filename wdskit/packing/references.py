"""References to the bytes of a field. A plan stores the references, and the bytes are read when the field is packed.

Each kind of reference is a tuple of texts and whole numbers. The first item is `path`, and `num_bytes` is the size of
the field. The last three items show later whether the content changed: size, modification time and inode of a file, or
size, ETag and modification time of an object. The method `read` returns the bytes. `KINDS` has the kinds by their names
in a plan.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from wdskit.limits import MAX_READ_BYTES
from wdskit.storage.file_identity import FileIdentity

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

_MAX_OPEN = 128
"""Largest number of open files of one `SourceFiles`. A process may usually open 1,024 files."""

_GAP_BYTES = 4 << 10
"""Two parts of a file are read together if at most this many bytes lie between them."""

ZIP_HEADER_BYTES = 30  # its last 4 bytes: sizes of the name and extra field after it (PKWARE APPNOTE 4.3.7)
_ZIP_HEADER_START = b"PK\x03\x04"


class FileBytes(NamedTuple):
    """Reference to a whole file. Its size, modification time and inode are those at the time of the plan."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file changed after the plan was made.
        """
        with _identity_of(self).opened(self.path) as fd:
            return _read_part(fd, 0, self.num_bytes)

    def read_into(self, memory: memoryview) -> None:
        """Read the file into `memory`, which has `num_bytes` bytes.
        OSError, ValueError: The file cannot be read, or changed after the plan was made.
        """
        with _identity_of(self).opened(self.path) as fd:
            _read_into(fd, memory, 0)


class PartBytes(NamedTuple):
    """Reference to `num_bytes` bytes of a file from `offset` on: a member of a tar, or a cell of an Arrow file.

    `file_bytes`, `mtime_ns` and `inode` are the file's size, modification time and inode at the time of the plan.
    """

    path: str
    num_bytes: int
    offset: int
    file_bytes: int
    mtime_ns: int
    inode: int

    def read(self) -> bytes:
        """Return the bytes. OSError, ValueError: The file cannot be read, or changed after the plan was made."""
        with _identity_of(self).opened(self.path) as fd:
            return _read_part(fd, self.offset, self.num_bytes)


class ZipBytes(NamedTuple):
    """Reference to a member of a zip.

    Attributes:
        path: Path of the zip.
        num_bytes: Size of the member after decompression.
        offset: Offset of the member's local header in the zip.
        packed_bytes: Size of the member's data in the zip.
        is_deflated: True if the member is compressed.
        crc: CRC-32 of the member.
        file_bytes: Size of the zip when the plan was made.
        mtime_ns: Modification time of the zip when the plan was made.
        inode: Inode of the zip when the plan was made.
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
        """Return the bytes of the member, decompressed.

        OSError: The zip cannot be read. ValueError: The zip changed after the plan was made, or the member is damaged.
        """
        with _identity_of(self).opened(self.path) as fd:
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


class CellBytes(NamedTuple):
    """Reference to a cell of a Parquet file.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the cell.
        group: Number of the row group in the file.
        row: Number of the row in the row group.
        column: Name of the column. Its cells are bytes, or structs whose member `bytes` is read.
        file_bytes: Size of the file when the plan was made.
        mtime_ns: Modification time of the file when the plan was made.
        inode: Inode of the file when the plan was made.
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
        """Return the cell's bytes. OSError, ValueError: The file cannot be read, or changed after the plan was made."""
        from wdskit.packing.sources.parquet import read_cell  # imported only if a plan has cells

        data = read_cell(self.path, _identity_of(self), self.group, self.row, self.column)
        if len(data) != self.num_bytes:
            raise ValueError(f"its cell has {len(data)} bytes now, but had {self.num_bytes} when packing began")
        return data


class ObjectBytes(NamedTuple):
    """Reference to a part of an object in a store: a member of a tar.

    Attributes:
        path: URL of the object, without a query.
        num_bytes: Number of bytes of the part.
        offset: Offset of the part in the object.
        object_bytes: Size of the object.
        etag: ETag of the object; empty if the store has no ETags.
        modified: Modification time of the object when the plan was made, in ISO 8601; empty if the store has no times.
    """

    path: str
    num_bytes: int
    offset: int
    object_bytes: int
    etag: str
    modified: str

    def open(self) -> ObjectFile:
        """Open the object as a file. A read raises StorageError if the object changed after the plan was made."""
        from wdskit.storage.objects import ObjectFile  # imported only if a plan has objects

        modified = datetime.fromisoformat(self.modified) if self.modified else None
        return ObjectFile(self.path, num_bytes=self.object_bytes, etag=self.etag, modified=modified)

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            StorageError: The object cannot be read, or was replaced.
        """
        return self.open().read_at(self.offset, self.num_bytes)


def _identity_of(source: FileBytes | PartBytes | ZipBytes | CellBytes) -> FileIdentity:
    """Return the identity of a reference's file when the plan was made: the last three items of the reference."""
    return FileIdentity(*source[-3:])


Reference: TypeAlias = FileBytes | PartBytes | ZipBytes | CellBytes | ObjectBytes
FieldBytes: TypeAlias = bytes | Reference

KINDS: dict[str, type[Reference]] = {
    "file": FileBytes,
    "part": PartBytes,
    "zip": ZipBytes,
    "cell": CellBytes,
    "object": ObjectBytes,
}
"""The kinds of reference, by their names in a plan."""


class SourceFiles:
    """Reads parts of files, and keeps the files open for more reads until `close`. Use it in one thread only.

    At most 128 files are open: the file that was opened first is closed before another file is opened.
    """

    def __init__(self) -> None:
        self._fds: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, parts: Sequence[PartBytes]) -> list[bytes]:
        """Return the bytes of each part, in order. There is at least one part, and all parts belong to one file.

        OSError: The file cannot be read. ValueError: The file changed after the plan was made.
        """
        fd = self._open(parts[0].path)
        data = _read_parts(fd, parts)
        _identity_of(parts[0]).check(fd)
        return data

    def read_into(self, part: PartBytes, memory: memoryview) -> None:
        """Read a part into `memory`, which has `part.num_bytes` bytes.
        OSError, ValueError: The file cannot be read, or changed after the plan was made.
        """
        fd = self._open(part.path)
        _read_into(fd, memory, part.offset)
        _identity_of(part).check(fd)

    def _open(self, path: str) -> int:
        fd = self._fds.get(path)
        if fd is None:
            if len(self._fds) == _MAX_OPEN:
                os.close(self._fds.popitem(last=False)[1])
            fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return fd


def _read_into(fd: int, memory: memoryview, offset: int) -> None:
    """Fill `memory` with the bytes of a file from `offset` on. ValueError: The file is too short."""
    count = 0
    while count < len(memory):  # one read may return less: a network disk, or `MAX_READ_BYTES`
        num_read = os.preadv(fd, [memory[count : count + MAX_READ_BYTES]], offset + count)
        if not num_read:
            raise _cut_short(offset + count, offset + len(memory))
        count += num_read


def read_parts(parts: Sequence[PartBytes]) -> list[bytes]:
    """Return the bytes of each part, in order. There is at least one part, and all parts belong to one file.

    The file is opened for this call. OSError, ValueError: The file cannot be read, or changed after the plan was made.
    """
    with _identity_of(parts[0]).opened(parts[0].path) as fd:
        return _read_parts(fd, parts)


def _read_parts(fd: int, parts: Sequence[PartBytes]) -> list[bytes]:
    start = min([part.offset for part in parts])
    stop = max([part.offset + part.num_bytes for part in parts])
    if stop - start > sum([part.num_bytes for part in parts]) + _GAP_BYTES * len(parts):
        return [_read_part(fd, part.offset, part.num_bytes) for part in parts]
    data = _read_part(fd, start, stop - start)
    return [data[part.offset - start : part.offset - start + part.num_bytes] for part in parts]


def _read_part(fd: int, offset: int, num_bytes: int) -> bytes:
    parts = []
    stop = offset + num_bytes
    file_bytes = os.fstat(fd).st_size
    if stop > file_bytes:  # checked before memory is allocated: a damaged directory can give any size
        raise _cut_short(file_bytes, stop)
    while offset < stop and (part := os.pread(fd, min(stop - offset, MAX_READ_BYTES), offset)):
        parts.append(part)
        offset += len(part)
    if offset < stop:
        raise _cut_short(offset, stop)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _cut_short(offset: int, stop: int) -> ValueError:
    return ValueError(f"the file stops at byte {offset}, {stop - offset} bytes before the end of this field")
