"""Strict reader of a tar stream: every member is whole and checked, otherwise `ShardError` is raised.

The reader accepts ustar, v7, pax (`path` and `size`; other harmless keywords are ignored) and GNU long names.
Directories are skipped. A link, a device, another member that is not a plain file, or one whose name is not UTF-8
has no data; if its name has a key, it is an error of this member: iterate again for the members after it. Everything
else is an error, for example a header with a wrong checksum, a stream that stops before its end marker, and a byte
other than zero after the marker.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

from wdskit.errors import ShardError
from wdskit.limits import (
    BLOCK_BYTES,
    MAX_END_ZEROS_BYTES,
    MAX_EXTENSION_BYTES,
    MAX_READ_MEMBER_BYTES,
    MAX_USTAR_SIZE_BYTES,
)
from wdskit.tar.header import (
    DIRECTORY_TYPE,
    GNU,
    GNU_LONG_LINK_TYPE,
    GNU_LONG_NAME_TYPE,
    ODD_TYPES,
    OLD_REGULAR_TYPE,
    PAX_GLOBAL_TYPE,
    PAX_TYPE,
    REGULAR_TYPES,
    SOLARIS_PAX_TYPE,
    SPARSE_TYPE,
    TYPES_WITH_DATA,
    USTAR,
    HeaderError,
    Overrides,
    expected_adler,
    padded,
    parse_header,
    parse_long_name,
    parse_pax,
)
from wdskit.tar.names import split_name
from wdskit.tar.window import Read, Spill, Window

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_EXTENSION_TYPES = (PAX_TYPE, SOLARIS_PAX_TYPE, PAX_GLOBAL_TYPE, GNU_LONG_NAME_TYPE, GNU_LONG_LINK_TYPE)
_UNPACK = "not a tar", "Shards are plain tars: unpack it first."
_OTHER_FILES = {
    b"\x1f\x8b": ("a gzip file", *_UNPACK),
    b"\x28\xb5\x2f\xfd": ("a zstd file", *_UNPACK),
    b"\xfd7zXZ": ("a xz file", *_UNPACK),
    b"BZh": ("a bzip2 file", *_UNPACK),
    b"PK\x03\x04": ("a zip file", *_UNPACK),
    b"version https://git-lfs": ("a Git LFS pointer", "not the shard", "Fetch the shard: `git lfs pull`."),
}
_PLAIN = struct.Struct("100s24x11sB20xc100x8s80xB")  # name, size and the byte after it, type, magic, prefix


class TarReader:
    """Iterator over the regular members of a tar stream, in order. Iterate it once.

    Args:
        read: Called with a number of bytes. Returns the next bytes, at most this number; `b""` only at the end.
        shard: Path or URL, for messages.
        hold_bytes: Largest number of bytes of a member's data that are kept in memory. `LargeData` replaces larger
            data. A limit below 512 KiB is not exact: data over the limit are kept too if they were read together
            with other members.
        spill: Returns a new temporary file, for the data of each member over `hold_bytes`; None discards the data.

    Attributes:
        stop: Offset of the end marker, after the marker was read and zeros or another archive follow; 0 before.
    """

    def __init__(
        self, read: Read, *, shard: str, hold_bytes: int = MAX_READ_MEMBER_BYTES, spill: Spill | None = None
    ) -> None:
        self._window = Window(read, shard, hold_bytes, spill)
        self.stop = 0

    @property
    def offset(self) -> int:
        """Offset after the last yielded member and its padding; 0 before. At the end: the size of the stream."""
        return self._window.offset

    def __iter__(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (name, offset of the member's first header, data). The first header may be an extension header.

        Raises:
            UnsupportedMember: A member with a key is not a plain file, or its name is not UTF-8. Iterate again for the
                members after it.
            ShardError: A header or the end marker is invalid, or the stream stops too early. All members before the
                fault were yielded.
        """
        window = self._window
        while True:
            at, data = window.at, window.data
            block = data[at : at + BLOCK_BYTES]
            if len(block) < BLOCK_BYTES:
                if not window.fill(BLOCK_BYTES):
                    raise no_end_marker(window)
                continue
            plain = plain_member(block)
            if plain is not None:
                name, size = plain
                first, start = at + BLOCK_BYTES, window.base + at
                end = first + size + -size % BLOCK_BYTES
                if end <= len(data):
                    window.at = end
                    yield name, start, data[first : first + size]
                else:
                    window.at = first
                    yield name, start, window.take(size)
                continue
            if block == _ZERO_BLOCK:
                stop = window.offset
                second = check_end(window)
                self.stop = stop
                if second is not None:
                    raise second
                return
            member = next_member(window)
            if member is not None:
                name, start, size = member
                yield name, start, window.take(size)


def locate_members(data: bytes, *, shard: str, offset: int, stop: int) -> Iterator[tuple[str, int, int]]:
    """Yield the regular members in a part of a shard. The part starts at a member's first header.

    Args:
        data: The bytes of the part.
        shard: Path or URL, for messages.
        offset: Offset of the part in the shard, for messages.
        stop: Offset in `data` where the last member's padding ends; the bytes after this offset are ignored.

    Yields:
        (name, start, stop): the member's data is `data[start:stop]`.

    Raises:
        ShardError: A header is invalid or not of a plain file, a zero block is in the place of a header, or `stop` is
            inside a member.
    """
    window = Window(lambda _: b"", shard)
    window.data = data
    window.base = offset
    while window.offset < offset + stop:
        member = any_member(window)
        if member is not None:
            name, _, size = member
            start = window.offset - offset
            if window.at + padded(size) <= len(window.data):
                window.at += padded(size)
            else:
                window.skip(size)
            yield name, start, start + size
    if window.offset != offset + stop:
        raise window.damaged(offset + stop, "a sample ends in the middle of a member")


def plain_member(block: bytes) -> tuple[str, int] | None:
    """Return the name and the size in bytes of a plain member; None if `block` is not the header of a plain member.

    A plain member has one header, a size in octal digits, no prefix, and an ASCII name that ends in a letter or digit.
    `next_member` reads all others.
    """
    if len(block) < BLOCK_BYTES:
        return None
    try:
        if zlib.adler32(block) & 0xFFFF != expected_adler(block[148:156]):
            return None
    except HeaderError:
        return None
    name, digits, nul, kind, magic, prefix = _PLAIN.unpack_from(block)
    if kind != b"0" or magic not in (USTAR, GNU) or prefix or nul or digits.strip(b"01234567"):
        return None
    size = int(digits, 8)
    name = name.partition(b"\x00")[0]
    if size > MAX_READ_MEMBER_BYTES or not name.isascii() or not name[-1:].isalnum():
        return None
    return name.decode("ascii"), size


def any_member(window: Window) -> tuple[str, int, int] | None:
    """Return the result of `next_member`, and consume the same bytes. This is three times as fast for a plain member
    whose header block is already in the buffer.
    """
    plain = plain_member(window.data[window.at : window.at + BLOCK_BYTES])
    if plain is None:
        return next_member(window)
    start = window.offset
    window.at += BLOCK_BYTES
    return plain[0], start, plain[1]


def next_member(window: Window) -> tuple[str, int, int] | None:
    """Check and consume the headers of one member.

    Returns:
        (name, offset of the first header, size of the data). None for a directory, and for a global header that comes
        first: the next call then reads the member after it.

    Raises:
        ShardError: A header is invalid, a zero block is in the place of a header, or the stream ends.
        UnsupportedMember: The member has a key, but is not a plain file, or its name is not UTF-8. The member was
            consumed.
    """
    start = window.offset
    overrides = Overrides()
    while True:
        offset = window.offset
        if not window.fill(BLOCK_BYTES):
            raise no_end_marker(window)
        block = window.data[window.at : window.at + BLOCK_BYTES]
        if block == _ZERO_BLOCK:
            if offset == start:
                raise window.damaged(offset, "a zero block is in the place of a member")
            raise window.damaged(offset, "an extension header has no member after it")
        try:
            header = parse_header(block)
        except HeaderError as err:
            raise _other_file(window, block) or window.damaged(window.offset, f"bad header: {err}") from err
        kind = header.typeflag
        if kind in _EXTENSION_TYPES:
            if header.size > MAX_EXTENSION_BYTES:
                raise window.damaged(offset, f"an extension header of {header.size} bytes is over the limit")
            window.at += BLOCK_BYTES
            data = window.take(header.size)
            if kind == GNU_LONG_NAME_TYPE:  # Perl's writer counts no NUL to the data
                data += window.data[window.at - padded(header.size) + header.size : window.at][:1]
            try:
                overrides = _extend(overrides, kind, data)
            except HeaderError as err:
                raise window.damaged(offset, str(err)) from err
            if kind == PAX_GLOBAL_TYPE and offset == start:
                return None  # it belongs to no member: `git archive` without files ends with it
            continue
        if kind not in REGULAR_TYPES and kind != DIRECTORY_TYPE and kind not in ODD_TYPES:
            raise window.damaged(offset, f"a member has the unknown type {chr(kind)!r}")
        size = header.size if overrides.size is None else overrides.size
        raw = overrides.name or header.name
        if not raw or b"\x00" in raw:
            raise window.damaged(offset, f"the name {raw!r} holds a NUL byte" if raw else "a member has no name")
        name, odd = raw.decode(errors="backslashreplace"), ODD_TYPES.get(kind, overrides.odd)
        if name.encode() != raw:
            odd = odd or "a file whose name is not UTF-8"
        if header.size not in (0, size) and size <= MAX_USTAR_SIZE_BYTES:  # a larger one has not enough octal digits
            raise window.damaged(offset, f"a pax header gives the size {size}, but the member's header {header.size}")
        window.at += BLOCK_BYTES
        if kind == OLD_REGULAR_TYPE and header.name.endswith(b"/") and not name.endswith("/"):
            problem = f"{name!r} is a file by its extension header and a directory by its own, so readers disagree"
            raise window.damaged(offset, problem)
        if kind not in ODD_TYPES and (kind == DIRECTORY_TYPE or name.endswith("/")):
            if size:
                raise window.damaged(offset, f"the directory {name!r} claims {size} bytes of data")
            return None
        if odd:
            if size and kind not in TYPES_WITH_DATA:
                raise window.damaged(start, f"{name!r} is {odd}, but claims {size} bytes of data")
            is_extended = kind == SPARSE_TYPE and block[482]
            while is_extended and window.fill(BLOCK_BYTES):
                is_extended = window.data[window.at + 504]
                window.at += BLOCK_BYTES
            window.take(size)
            if split := split_name(name):
                raise window.unsupported(start, split[0], f"a member is {odd}: {name!r}")
            return name, start, 0
        return name, start, size


def _extend(overrides: Overrides, kind: int, data: bytes) -> Overrides:
    """Return `overrides` with the values of one more extension header. `kind` and `data` are its type and data.

    Raises:
        HeaderError: The header is invalid, gives a value that `overrides` has already, or is a global header with a
            value for all members.
    """
    if kind == GNU_LONG_NAME_TYPE:
        return overrides.combined(Overrides(name=parse_long_name(data)))
    if kind == GNU_LONG_LINK_TYPE:
        return overrides.combined(Overrides(odd="a link with a long name"))
    found = parse_pax(data)
    if kind == PAX_GLOBAL_TYPE:
        if found != Overrides():
            what = f"makes all members {found.odd}" if found.odd else "sets a path or a size for all members"
            raise HeaderError(f"a global pax header {what}")
        return overrides
    return overrides.combined(found)


def no_end_marker(window: Window) -> ShardError:
    """Return the ShardError for a stream that ends where a header is expected."""
    rest = window.data[window.at :]
    if rest:
        return _other_file(window, rest) or window.cut("the shard stops inside a header")
    return window.cut("the shard stops before its end marker")


def _other_file(window: Window, start: bytes) -> ShardError | None:
    """Return the ShardError for a gzip, zstd, xz, bzip2 or zip file or a Git LFS pointer in place of a tar.

    `start` has the next bytes of the stream. Return None if these bytes do not start such a file, or are not the first
    bytes of the stream.
    """
    if window.offset:
        return None
    for magic, (what, instead, remedy) in _OTHER_FILES.items():
        if start.startswith(magic):
            return window.damaged(0, f"this is {what}, {instead}", remedy)
    return None


def check_end(window: Window) -> ShardError | None:
    """Consume and check the end of the stream: two zero blocks, then at most `MAX_END_ZEROS_BYTES` zeros.

    The caller must have seen that the next block is a zero block. Return None, or the error for another archive after
    the end marker, before which all members are whole.

    Raises:
        ShardError: The second zero block is missing, other bytes follow, or there are too many zeros.
    """
    first = window.offset
    if not window.fill(2 * BLOCK_BYTES):
        raise window.cut("the shard stops inside its end marker")
    if window.data[window.at + BLOCK_BYTES : window.at + 2 * BLOCK_BYTES] != _ZERO_BLOCK:
        raise window.damaged(first, "a single zero block is between members")
    window.at += 2 * BLOCK_BYTES
    limit = window.offset + MAX_END_ZEROS_BYTES
    while window.fill(1):
        window.fill(BLOCK_BYTES)
        rest = window.data[window.at :]
        num_zeros = len(rest) - len(rest.lstrip(b"\x00"))
        if num_zeros < len(rest):
            offset = window.offset + num_zeros
            window.at += num_zeros // BLOCK_BYTES * BLOCK_BYTES
            with contextlib.suppress(HeaderError):
                if window.fill(BLOCK_BYTES):
                    parse_header(window.data[window.at : window.at + BLOCK_BYTES])
                    problem = "another archive follows the end marker, which most programs would not read"
                    return window.damaged(offset, problem, "Extract both with `tar -xif`, and pack the files.")
            raise window.damaged(offset, "bytes other than zero follow the end marker")
        window.at += len(rest) // BLOCK_BYTES * BLOCK_BYTES or len(rest)
        if window.offset > limit:
            problem = f"more than {MAX_END_ZEROS_BYTES} zeros follow the end marker"
            raise window.damaged(limit, problem, "Pack it again.")
    return None
