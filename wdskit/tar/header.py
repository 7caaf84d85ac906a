"""Build, check and read one 512-byte header.

The layout is POSIX.1-2017 ustar: name 0:100, mode 100:108, uid 108:116, gid 116:124, size 124:136, mtime 136:148,
chksum 148:156, typeflag 156, linkname 157:257, magic 257:263, version 263:265, uname 265:297, gname 297:329,
devmajor 329:337, devminor 337:345, prefix 345:500. And pax extended headers (POSIX.1-2017, "pax Extended Header"):
records of `length keyword=value` and a newline.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import NamedTuple

from wdskit.limits import BLOCK_BYTES, MAX_NAME_BYTES, MAX_READ_MEMBER_BYTES, MAX_USTAR_SIZE_BYTES

USTAR = b"ustar\x0000"
GNU = b"ustar  \x00"
V7 = bytes(8)

REGULAR_TYPES = frozenset(b"0\x007")  # 7 is a contiguous file, which POSIX lets a reader take as a regular one
OLD_REGULAR_TYPE = 0  # of v7, which marks a directory by a slash at the end of its name
DIRECTORY_TYPE = ord("5")
PAX_TYPE = ord("x")
PAX_GLOBAL_TYPE = ord("g")
GNU_LONG_NAME_TYPE = ord("L")

REFUSED_TYPES = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a character device",
    ord("4"): "a block device",
    ord("6"): "a FIFO",
    ord("S"): "a sparse file",
    ord("K"): "a link with a long name",
    ord("D"): "a GNU directory listing",
    ord("M"): "a continued file of a multi-volume archive",
    ord("V"): "a volume label",
    ord("X"): "a Solaris extended header",
}

ADLER_MODULUS = 65521

_TEMPLATE_BEFORE_SIZE = b"0000644\x00" + b"0000000\x00" * 2
_TEMPLATE_MTIME = b"00000000000\x00"
_TEMPLATE_AFTER_CHECKSUM = b"0" + bytes(100) + USTAR + bytes(64) + b"0000000\x00" * 2 + bytes(167)
_TEMPLATE_SUM = sum(_TEMPLATE_BEFORE_SIZE) + sum(_TEMPLATE_MTIME) + sum(_TEMPLATE_AFTER_CHECKSUM) + 8 * ord(" ")


class HeaderError(ValueError):
    """A header is refused; the message says why, without the offset."""


class NotPlain(HeaderError):
    """An undamaged header describes a member that is not a plain file."""


class Header(NamedTuple):
    """The content of a header, before extension headers overrule it."""

    name: bytes
    size: int
    typeflag: int


def build_header(name: bytes, size: int) -> bytes:
    """One ustar header of a regular file: mode 0644, uid, gid and mtime 0, empty user and group.

    Args:
        name: 1 to 100 bytes, no NUL, no slash at its end.
        size: 0 to 8 GiB - 1, in bytes.

    Raises:
        HeaderError: Name or size do not fit the fields that every reader understands.
    """
    if not 1 <= len(name) <= MAX_NAME_BYTES or 0 in name:
        raise HeaderError(f"a name of {len(name)} bytes does not fit 1 to {MAX_NAME_BYTES} bytes without NUL")
    if name.endswith(b"/"):
        raise HeaderError(f"the name {name!r} ends in a slash, which makes it a directory's")
    if not 0 <= size <= MAX_USTAR_SIZE_BYTES:
        raise HeaderError(f"a size of {size} bytes does not fit 11 octal digits")
    behind_name, checksum = _fields_of(size)
    checksum += (zlib.adler32(name) & 0xFFFF) - 1  # its low half is 1 + the sum of the bytes, below the modulus here
    return name.ljust(MAX_NAME_BYTES, b"\x00") + behind_name + (b"%06o\x00 " % checksum) + _TEMPLATE_AFTER_CHECKSUM


@functools.lru_cache(maxsize=4096)  # small fields have one of some hundred sizes
def _fields_of(size: int) -> tuple[bytes, int]:
    """Return the bytes between name and checksum, and the checksum without the name's part."""
    size_field = b"%011o\x00" % size
    return _TEMPLATE_BEFORE_SIZE + size_field + _TEMPLATE_MTIME, _TEMPLATE_SUM + sum(size_field)


def parse_octal(field: bytes, what: str) -> int:
    """Parse an octal number as tar writers pad it, with spaces before and NUL or space after; or GNU's form for large
    numbers: the first bit set, then a big-endian two's complement number.

    A NUL before the digits is refused: GNU tar skips it, and Python's tarfile takes it for the end of an empty number.
    Negative numbers are refused too. Raise `HeaderError`.
    """
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise HeaderError(f"its {what} is negative")
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.rstrip(b" \x00").lstrip(b" ")
    if not text or text.strip(b"01234567"):
        raise HeaderError(f"its {what} {field!r} is not an octal number")
    return int(text, 8)


def expected_adler(checksum_field: bytes) -> int:
    """The low half of adler32 that a header with this checksum field has if its checksum holds.

    adler32's low half is 1 + the sum of all bytes modulo 65521, four times cheaper in Python than summing; the checksum
    counts its own field as eight spaces. A sum that is off by exactly 65521 would need 257 damaged bytes of 255.
    """
    checksum = parse_octal(checksum_field, "checksum")
    return (1 + checksum - 8 * ord(" ") + sum(checksum_field)) % ADLER_MODULUS


def parse_header(block: bytes) -> Header:
    """Read one header block that is not all zeros; `HeaderError` where checksum, magic or size are not right."""
    if zlib.adler32(block) & 0xFFFF != expected_adler(block[148:156]):
        raise HeaderError("its checksum does not match")
    magic = block[257:265]
    if magic not in (USTAR, GNU, V7):
        raise HeaderError(f"its magic {magic!r} is not a readable tar format")
    name = block[:100].partition(b"\x00")[0]
    prefix = block[345:500].partition(b"\x00")[0] if magic == USTAR else b""
    # What is refused for its type may have a size that says nothing: GNU tar leaves that of a volume label empty.
    size = 0 if block[156] in REFUSED_TYPES else parse_octal(block[124:136], "size")
    check_size(size)
    return Header(prefix + b"/" + name if prefix else name, size, block[156])


def check_size(size: int) -> None:
    """Raise `HeaderError` for a size that no member of a shard has."""
    if size > MAX_READ_MEMBER_BYTES:
        raise HeaderError(f"its size of {size} bytes is over the limit of {MAX_READ_MEMBER_BYTES}")


def check_overruled_size(size: int, own: int) -> None:
    """Compare the size in a pax header with the one in the member's own header; `HeaderError` if both name one.

    Writers overrule a size that does not fit the header, and leave that field 0 or full.
    """
    if own not in (0, size) and size <= MAX_USTAR_SIZE_BYTES:
        raise HeaderError(f"a pax header gives the size {size}, but the member's header {own}")


def padded(size: int) -> int:
    """Bytes that `size` bytes of data take in a tar."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


_MAX_DIGITS = 20

_SPARSE = (b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")
_SWALLOWED = re.compile(rb"\n[0-9]+ [A-Za-z][A-Za-z._]*=")
_PART = (b"GNU.volume.filename", b"GNU.volume.size", b"GNU.volume.offset")  # not the label, which is a comment


class Overrides(NamedTuple):
    """The name and size that extension headers give to the next member; None if they give none."""

    name: bytes | None = None
    size: int | None = None

    def joined(self, other: Overrides) -> Overrides:
        """Combine two extension headers of one member; `HeaderError` if both give a name or both a size: GNU tar uses
        the last and Python's tarfile the first.
        """
        if (self.name is not None and other.name is not None) or (self.size is not None and other.size is not None):
            raise HeaderError("two extension headers of one member contradict each other")
        return Overrides(
            other.name if self.name is None else self.name,
            other.size if self.size is None else self.size,
        )


def parse_long_name(data: bytes) -> bytes:
    """Read the data of a GNU long name: the name and one NUL; `HeaderError` for anything else.

    More than one NUL, or a byte in its place, is what a changed byte at the end of the name looks like.
    """
    name, nul, rest = data.partition(b"\x00")
    if not name:
        raise HeaderError("an extension header gives an empty name")
    if not nul or rest:
        raise HeaderError(f"the long name {data!r} does not end in its only NUL")
    return name


def parse_pax(data: bytes) -> Overrides:
    """Read a pax header's records.

    `path` and `size` count; times, owners, comments and vendors' own keywords say nothing about the member's bytes and
    are passed over. `HeaderError` for malformed records, for keywords that make the member something else than plain
    bytes (links, sparse files, and files that began on another volume), and for what one changed byte makes of `path`
    and `size`: another keyword, or text in the value of the record before.
    """
    found = Overrides()
    at = 0
    while at < len(data):
        keyword, value, at = _record(data, at)
        if keyword == b"path":
            if not value:
                raise HeaderError("an extension header gives an empty name")
            found = found._replace(name=value)
        elif keyword == b"size":
            found = found._replace(size=_size(value))
        elif keyword == b"linkpath":
            raise NotPlain("a pax header makes a member a link (linkpath)")
        elif keyword.startswith(_SPARSE):
            raise NotPlain(f"a pax header makes a member a sparse file ({keyword.decode('ascii', 'replace')})")
        elif keyword in _PART:
            msg = f"a pax header makes a member part of a multi-volume archive ({keyword.decode('ascii')})"
            raise NotPlain(msg)
        elif any(sum(map(int.__ne__, known, keyword + b"=" + value)) == 1 for known in (b"path=", b"size=")):
            raise HeaderError(f"a pax header has the keyword {keyword!r}, one byte away from another keyword")
        if _SWALLOWED.search(value):
            raise HeaderError(f"the value of {keyword!r} in a pax header contains another record")
    return found


def _record(data: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Keyword and value of the record at `at`, and where the next one starts."""
    space = data.find(b" ", at, at + _MAX_DIGITS)
    digits = data[at:space] if space > 0 else b""
    stop = at + int(digits) if digits.isdigit() else -1
    record = data[space + 1 : stop - 1] if stop > space + 1 else b""
    keyword, equals, value = record.partition(b"=")
    if not equals or not keyword or stop > len(data) or data[stop - 1 : stop] != b"\n":
        raise HeaderError(f"a pax header is malformed at its byte {at}")
    return keyword, value, stop


def _size(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise HeaderError(f"a pax header gives the size {value!r}")
    size = int(value)
    check_size(size)
    return size
