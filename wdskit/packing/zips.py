"""Rows from zips: members that share a key are a sample, as in a tar. Only the zips' directories are read here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from wdskit.dataset.keys import split_name
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.members import row_or_error
from wdskit.packing.references import FieldBytes, ZipBytes
from wdskit.packing.rows import Row, row_error
from wdskit.packing.sorting import SortedBytes
from wdskit.packing.zip_directory import Member, read_directory
from wdskit.storage.identity import FileIdentity

_NUMBER = re.compile(r"\d+")


class Zips:
    """Zips on this machine.

    Attributes:
        num_other: Members read so far that belong to no sample.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.num_other = 0

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a sample, by their keys' bytes: its members are its fields.

        Raises:
            PackError: A zip cannot be read, or is not right.
        """
        for path in self._paths:
            try:
                identity = FileIdentity.of(path)
                members = self._sorted(path)
            except OSError as err:
                raise PackError(f"{path}: cannot be read: {err.strerror}.") from err
            for key, records in groupby(map(_unpacked, members), key=lambda record: record[0]):
                try:
                    fields = [_field(path, key, field, member, identity) for _, field, member in records]
                except RowError as err:
                    yield err
                else:
                    yield row_or_error(key, fields, path, keys)

    def _sorted(self, path: str) -> Iterable[bytes]:
        """Members as `key NUL field NUL numbers`: text takes little memory, and those of a key come together."""
        found = SortedBytes()
        for name, member in read_directory(path):
            split = split_name(name)
            if split is None:
                self.num_other += 1
                continue
            numbers = ",".join(map(str, map(int, member)))
            found.add("\x00".join((*split, numbers)).encode())
        return found


def _unpacked(record: bytes) -> tuple[str, str, Member]:
    key, field, numbers = record.decode().split("\x00")
    offset, packed_bytes, num_bytes, crc, is_deflated = map(int, numbers.split(","))
    return key, field, Member(offset, packed_bytes, num_bytes, crc, bool(is_deflated))


def _field(path: str, key: str, field: str, member: Member, identity: FileIdentity) -> tuple[str, FieldBytes]:
    """A member as a field.

    Raises:
        RowError: It is a bomb; or the dot before the field's name is one in the key.
    """
    where = f"{path}: {key}"
    if member.num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * member.packed_bytes):
        problem = f"its {field!r} claims to unpack {member.packed_bytes} bytes to {member.num_bytes}, as bombs do"
        raise row_error(where, problem, "Unpack it yourself, if it is right.")
    if _NUMBER.fullmatch(field.partition(".")[0]):
        problem = f"the dot in {key}.{field} cuts its key, and names that differ behind it would be one sample"
        raise row_error(where, problem, "Unpack it, and pack the folder with --keys hashed.")
    if member.is_deflated or member.packed_bytes == member.num_bytes:
        told = member.packed_bytes, member.is_deflated, member.crc
        return field, ZipBytes(path, member.num_bytes, member.offset, *told, *identity)
    problem = f"its {field!r} is stored as {member.packed_bytes} bytes and claims to have {member.num_bytes}"
    raise row_error(where, problem, "The zip is damaged. Make it again.")
