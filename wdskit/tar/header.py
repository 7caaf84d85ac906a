"""Build, check and parse one 512-byte header of a tar, and parse the data of extension headers.

The layout is POSIX.1-2017 ustar: name 0:100, mode 100:108, uid 108:116, gid 116:124, size 124:136, mtime 136:148,
chksum 148:156, typeflag 156, linkname 157:257, magic 257:263, version 263:265, uname 265:297, gname 297:329,
devmajor 329:337, devminor 337:345, prefix 345:500. A pax extended header (POSIX.1-2017, "pax Extended Header") has
records of `length keyword=value` and a newline.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import NamedTuple

from wdskit.limits import BLOCK_BYTES, MAX_NAME_BYTES, MAX_READ_MEMBER_BYTES, MAX_USTAR_SIZE_BYTES

POSIX = b"ustar\x00"
USTAR = POSIX + b"00"
GNU = b"ustar  \x00"
V7 = bytes(8)

REGULAR_TYPES = frozenset(b"0\x007")  # POSIX allows to read type 7, a contiguous file, as a regular file
OLD_REGULAR_TYPE = 0  # v7 has no type for directories: their names end in a slash
DIRECTORY_TYPE = ord("5")
PAX_TYPE = ord("x")
PAX_GLOBAL_TYPE = ord("g")
SOLARIS_PAX_TYPE = ord("X")
GNU_LONG_NAME_TYPE = ord("L")
GNU_LONG_LINK_TYPE = ord("K")
SPARSE_TYPE = ord("S")
LABEL_TYPE = ord("V")

ODD_TYPES = {
    ord("1"): "a hard link",
    ord("2"): "a symbolic link",
    ord("3"): "a character device",
    ord("4"): "a block device",
    ord("6"): "a FIFO",
    SPARSE_TYPE: "a sparse file",
    ord("D"): "a GNU directory listing",
    ord("M"): "a continued file of a multi-volume archive",
    LABEL_TYPE: "a volume label",
}
"""Types of members that are not plain files."""

TYPES_WITH_DATA = REGULAR_TYPES | {OLD_REGULAR_TYPE} | frozenset(b"SDM")

ADLER_MODULUS = 65521

_TEMPLATE_BEFORE_SIZE = b"0000644\x00" + b"0000000\x00" * 2
_TEMPLATE_MTIME = b"00000000000\x00"
_TEMPLATE_AFTER_CHECKSUM = b"0" + bytes(100) + USTAR + bytes(64) + b"0000000\x00" * 2 + bytes(167)
_TEMPLATE_SUM = sum(_TEMPLATE_BEFORE_SIZE) + sum(_TEMPLATE_MTIME) + sum(_TEMPLATE_AFTER_CHECKSUM) + 8 * ord(" ")


class HeaderError(ValueError):
    """A header is invalid. The message says why, without the offset."""


class Header(NamedTuple):
    """The name with its prefix, the size of the data in bytes, and the type byte of one header.

    If the member has an extension header, the name or size in the extension header is valid instead.
    """

    name: bytes
    size: int
    typeflag: int


def build_header(name: bytes, size: int) -> bytes:
    """Return the ustar header of a regular file: mode 0644, uid, gid and mtime 0, empty user and group.

    Args:
        name: 1 to 100 bytes, without NUL, and without a slash at the end.
        size: 0 to 8 GiB - 1, in bytes.

    Raises:
        HeaderError: The name or the size is invalid.
    """
    if not 1 <= len(name) <= MAX_NAME_BYTES or 0 in name:
        raise HeaderError(f"a name of {len(name)} bytes does not fit 1 to {MAX_NAME_BYTES} bytes without NUL")
    if name.endswith(b"/"):
        raise HeaderError(f"the name {name!r} ends in a slash, which makes it a directory's")
    if not 0 <= size <= MAX_USTAR_SIZE_BYTES:
        raise HeaderError(f"a size of {size} bytes does not fit 11 octal digits")
    after_name, checksum = _fields_after_name(size)
    checksum += (zlib.adler32(name) & 0xFFFF) - 1  # the low half is 1 + the sum of the bytes
    return name.ljust(MAX_NAME_BYTES, b"\x00") + after_name + (b"%06o\x00 " % checksum) + _TEMPLATE_AFTER_CHECKSUM


@functools.lru_cache(maxsize=4096)  # small fields have a few hundred different sizes
def _fields_after_name(size: int) -> tuple[bytes, int]:
    """Return the bytes between name and checksum field, and the header's checksum without the bytes of the name."""
    size_field = b"%011o\x00" % size
    return _TEMPLATE_BEFORE_SIZE + size_field + _TEMPLATE_MTIME, _TEMPLATE_SUM + sum(size_field)


def parse_octal(field: bytes, what: str) -> int:
    """Return the number in a field of a header.

    The field has octal digits, with spaces on the left, and NUL or space on the right. Or it has GNU's form for large
    numbers: the first bit is set, and the other bits are a big-endian two's complement number.

    Args:
        field: The bytes of the field.
        what: Name of the number, for messages.

    Raises:
        HeaderError: The number is invalid or negative, or a NUL is before the digits.
    """
    if field[0] & 0x80:
        if field[0] & 0x40:
            raise HeaderError(f"its {what} is negative")
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    # GNU tar skips a NUL before the digits; for Python's tarfile this NUL is the end of an empty number
    text = field.rstrip(b" \x00").lstrip(b" ")
    if not text or text.strip(b"01234567"):
        raise HeaderError(f"its {what} {field!r} is not an octal number")
    return int(text, 8)


@functools.lru_cache(maxsize=4096)  # shards have a few hundred different checksums
def expected_adler(checksum_field: bytes) -> int:
    """Return the value that `zlib.adler32(block) & 0xFFFF` must have if the checksum of a header block is right.

    `checksum_field` is the checksum field of this block. An error of exactly 65521 in the checksum is not detected.

    Raises HeaderError if the field is not a number.
    """
    # The low half of adler32 is 1 + the sum of all bytes modulo 65521, and four times faster in Python than a sum. The
    # checksum counts its own field as eight spaces. For an error of 65521, more than 256 bytes must be damaged.
    checksum = parse_octal(checksum_field, "checksum")
    return (1 + checksum - 8 * ord(" ") + sum(checksum_field)) % ADLER_MODULUS


def parse_header(block: bytes) -> Header:
    """Parse one header block, 512 bytes that are not all zeros. After `ustar` and a NUL, any version is accepted.

    Raises:
        HeaderError: The checksum, the magic or the size is invalid, or the size exceeds 16 GiB.
    """
    if zlib.adler32(block) & 0xFFFF != expected_adler(block[148:156]):
        raise HeaderError("its checksum does not match")
    magic = block[257:265]
    is_ustar = magic[:6] == POSIX  # Ant, Maven and JRuby write other versions
    if not is_ustar and magic not in (GNU, V7):
        raise HeaderError(f"its magic {magic!r} is not a readable tar format")
    name = block[:100].partition(b"\x00")[0]
    prefix = block[345:500].partition(b"\x00")[0] if is_ustar else b""
    size_field = block[124:136]
    is_empty = block[156] == LABEL_TYPE and not any(size_field)  # GNU tar writes no size of a volume label
    size = 0 if is_empty else parse_octal(size_field, "size")
    check_size(size)
    return Header(prefix + b"/" + name if prefix else name, size, block[156])


def check_size(size: int) -> None:
    """Raise HeaderError if a size in bytes exceeds 16 GiB, the limit for a member of a shard."""
    if size > MAX_READ_MEMBER_BYTES:
        raise HeaderError(f"its size of {size} bytes is over the limit of {MAX_READ_MEMBER_BYTES}")


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks: the bytes that the data of a member take in a tar."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


_MAX_DIGITS = 20

_SPARSE = (b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")
_NESTED_RECORD = re.compile(rb"\n[0-9]+ [A-Za-z][A-Za-z._]*=")
_MULTI_VOLUME = (b"GNU.volume.filename", b"GNU.volume.size", b"GNU.volume.offset")  # GNU.volume.label is only a comment


class Overrides(NamedTuple):
    """The name and the size that extension headers give to the next member; each is None if no header gives it. `odd`
    says what the member is if it is not a plain file, for example `a sparse file`.
    """

    name: bytes | None = None
    size: int | None = None
    odd: str = ""

    def combined(self, other: Overrides) -> Overrides:
        """Return the values that this and `other`, two extension headers of one member, give together.

        Raises:
            HeaderError: Both headers give a name, or both give a size.
        """
        if (self.name is not None and other.name is not None) or (self.size is not None and other.size is not None):
            # GNU tar uses the last, Python's tarfile the first
            raise HeaderError("two extension headers of one member contradict each other")
        return Overrides(
            other.name if self.name is None else self.name,
            other.size if self.size is None else self.size,
            self.odd or other.odd,
        )


def parse_long_name(data: bytes) -> bytes:
    """Return the name from the data of a GNU long-name header and the byte after the data: the name ends in a NUL.

    Raises:
        HeaderError: The name is empty, has no NUL after it, or another byte follows its NUL.
    """
    name, nul, rest = data.partition(b"\x00")
    if not name:
        raise HeaderError("an extension header gives an empty name")
    if not nul or rest.strip(b"\x00"):
        raise HeaderError(f"the long name {data!r} does not end at its NUL")
    return name


def parse_pax(data: bytes) -> Overrides:
    """Return the values of `path` and `size` in the records of a pax header, and whether they make the member a link, a
    sparse file, or part of a multi-volume archive. Of several records with one keyword, the last counts.

    Times, owners, comments and vendors' own keywords are ignored.

    Raises:
        HeaderError: A record is malformed, or gives an empty name or a size over 16 GiB. Or a record looks damaged: its
            start differs from `path=` or `size=` in one byte, or its value contains another record.
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
            found = found._replace(odd="a link by its pax header")
        elif keyword.startswith(_SPARSE):
            found = found._replace(odd="a sparse file by its pax header")
        elif keyword in _MULTI_VOLUME:
            found = found._replace(odd="part of a multi-volume archive by its pax header")
        elif any(sum(map(int.__ne__, known, keyword + b"=" + value)) == 1 for known in (b"path=", b"size=")):
            raise HeaderError(f"a pax header has the keyword {keyword!r}, one byte away from another keyword")
        if _NESTED_RECORD.search(value):
            raise HeaderError(f"the value of {keyword!r} in a pax header contains another record")
    return found


def _record(data: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Return keyword and value of the pax record at offset `at`, and the offset of the next record.

    Raises:
        HeaderError: The record is malformed.
    """
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
