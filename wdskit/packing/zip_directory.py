"""The directory of a zip, record by record (PKWARE's APPNOTE.TXT 6.3.10, section 4.3).

`zipfile` keeps an object of some 700 bytes for each member; a million would fill the memory that packing may take.
"""

from __future__ import annotations

import os
import stat
import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np

from wdskit.errors import PackError
from wdskit.packing.references import ZIP_HEADER_BYTES

_END = struct.Struct("<4s4H2LH")
_END_START = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_START = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_START = b"PK\x06\x06"
_RECORD = struct.Struct("<4s6H3L5H2L")
_RECORD_START = b"PK\x01\x02"
_MAX_COMMENT_BYTES = (1 << 16) - 1
_IN_EXTRA = 0xFFFFFFFF  # the number is too large for its place, and stands in the extra field 1
_READ_BYTES = 1 << 20

_ENCRYPTED = 0x2041  # and with a masked directory
_STORED, _DEFLATED = 0, 8


class Member(NamedTuple):
    """Where a member is: plain numbers.

    Attributes:
        offset: Of its local header.
        packed_bytes: Bytes that it takes in the zip.
        num_bytes: Bytes that it has.
        crc: CRC-32 of these.
        is_deflated: Whether it is compressed.
    """

    offset: int
    packed_bytes: int
    num_bytes: int
    crc: int
    is_deflated: bool


def read_directory(path: str) -> Iterator[tuple[str, Member]]:
    """Name and place of each file in a zip, in the directory's order.

    Raises:
        PackError: It is no zip of stored and deflated plain files, or members overlap.
        OSError: It cannot be read.
    """
    with open(path, "rb") as file:
        zip_bytes = os.fstat(file.fileno()).st_size
        num_records, directory_bytes, directory = _find(path, file.fileno(), zip_bytes)
        file.seek(directory)
        starts, stops = array("Q"), array("Q")
        left = directory_bytes
        for _ in range(num_records):
            head = file.read(_RECORD.size)
            if len(head) < _RECORD.size or not head.startswith(_RECORD_START):
                _refuse(path, f"the directory has fewer than the {num_records} records that it promises")
            name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<3H", head, 28)
            rest = file.read(name_bytes + extra_bytes + comment_bytes)
            left -= _RECORD.size + len(rest)
            if left < 0:
                _refuse(path, "a record of its directory reaches beyond the directory")
            name = _name(path, rest[:name_bytes])
            member = _member(path, name, head, rest[name_bytes : name_bytes + extra_bytes])
            stop = member.offset + ZIP_HEADER_BYTES + name_bytes + member.packed_bytes
            if stop > directory:
                _refuse(path, f"{name!r} reaches beyond byte {directory}, where the directory begins")
            starts.append(member.offset)
            stops.append(stop)
            if not name.endswith("/"):
                yield name, member
        if left:
            _refuse(path, f"{left} bytes of its directory are no record")
    _check_places(path, starts, stops)


def _find(path: str, fd: int, zip_bytes: int) -> tuple[int, int, int]:
    """Number of records, bytes and offset of the directory."""
    tail_at = max(0, zip_bytes - _END.size - _MAX_COMMENT_BYTES)
    tail = os.pread(fd, zip_bytes - tail_at, tail_at)
    at = tail.rfind(_END_START)
    while at >= 0 and at + _END.size + int.from_bytes(tail[at + 20 : at + 22], "little") != len(tail):
        at = tail.rfind(_END_START, 0, at)
    if at < 0:
        _refuse(path, "it has no end record: it was cut short, or something stands behind its end")
    _, disk, first_disk, here, num_records, size, offset, _ = _END.unpack_from(tail, at)
    end = tail_at + at
    locator = os.pread(fd, _LOCATOR.size, max(0, end - _LOCATOR.size))
    if locator.startswith(_LOCATOR_START) and len(locator) == _LOCATOR.size:
        _, _, end64, _ = _LOCATOR.unpack(locator)
        record = os.pread(fd, _END64.size, end64)
        if len(record) < _END64.size or not record.startswith(_END64_START):
            _refuse(path, "its zip64 end record is not where it should be")
        _, _, _, _, disk, first_disk, here, num_records, size, offset = _END64.unpack(record)
        end = end64
    if disk or first_disk or here != num_records:
        _refuse(path, "it is one of several parts")
    if offset + size != end:
        _refuse(path, f"its directory of {size} bytes at byte {offset} does not end where its end record stands")
    return num_records, size, offset


def _name(path: str, raw: bytes) -> str:
    """A member's name: UTF-8, which is written with its flag and, on macOS, without."""
    try:
        name = raw.decode()
    except UnicodeDecodeError as err:
        raise PackError(f"{path}: the name {raw!r} of a member is no UTF-8. Unpack it, and pack the folder.") from err
    if not name or "\x00" in name:
        _refuse(path, f"a member is called {name!r}")
    return name


def _member(path: str, name: str, head: bytes, extra: bytes) -> Member:
    _, made_by, _, flags, method, _, _, crc, packed_bytes, num_bytes, *_, mode, offset = _RECORD.unpack(head)
    if flags & _ENCRYPTED:
        _refuse(path, f"{name!r} is encrypted")
    if method not in {_STORED, _DEFLATED}:
        _refuse(path, f"{name!r} is compressed by method {method}, and only deflate (8) is read")
    if made_by >> 8 == 3 and stat.S_ISLNK(mode >> 16):  # made on Unix: the upper half is a mode
        _refuse(path, f"{name!r} is a symbolic link")
    if _IN_EXTRA in {packed_bytes, num_bytes, offset}:
        large = iter(_large_numbers(extra))
        try:
            num_bytes = next(large) if num_bytes == _IN_EXTRA else num_bytes
            packed_bytes = next(large) if packed_bytes == _IN_EXTRA else packed_bytes
            offset = next(large) if offset == _IN_EXTRA else offset
        except StopIteration:
            _refuse(path, f"{name!r} lacks the sizes that its zip64 extra field should have")
    return Member(offset, packed_bytes, num_bytes, crc, method == _DEFLATED)


def _large_numbers(extra: bytes) -> tuple[int, ...]:
    """Those of the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + size]
            return struct.unpack(f"<{len(data) // 8}Q", data[: len(data) // 8 * 8])
        at += 4 + size
    return ()


def _check_places(path: str, starts: array[int], stops: array[int]) -> None:
    """Refuse members that share bytes: so a zip of a few kilobytes unpacks to terabytes (D. Fifield, 2019)."""
    if not starts:
        return
    order = np.argsort(np.frombuffer(starts, np.uint64), kind="stable")
    begins, ends = np.frombuffer(starts, np.uint64)[order], np.frombuffer(stops, np.uint64)[order]
    if (ends[:-1] > begins[1:]).any():
        _refuse(path, "members of it overlap, as they do in bombs")


def _refuse(path: str, problem: str) -> NoReturn:
    raise PackError(f"{path}: {problem}.\n  It is damaged or no zip of plain files. Make it again, or unpack it.")
