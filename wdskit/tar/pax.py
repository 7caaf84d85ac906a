"""pax extended headers (POSIX.1-2017, "pax Extended Header"): records of `length keyword=value` and a newline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wdskit.tar.header import HeaderError, check_size

_MAX_DIGITS = 20

_SPARSE = (b"GNU.sparse.", b"SCHILY.realsize", b"SUN.holesdata")
_PART = (b"GNU.volume.filename", b"GNU.volume.size", b"GNU.volume.offset")  # not the label, which is a comment


@dataclass(frozen=True)
class Overrides:
    """What extension headers say about the member behind them; None where they say nothing."""

    name: bytes | None = None
    size: int | None = None

    def with_name(self, name: bytes) -> Overrides:
        """The same with another name.

        Raises:
            HeaderError: The name is empty.
        """
        if not name:
            msg = "an extension header gives an empty name"
            raise HeaderError(msg)
        return replace(self, name=name)

    def joined(self, other: Overrides) -> Overrides:
        """What two extension headers of one member say together.

        Raises:
            HeaderError: Both say the same thing; then GNU tar believes the last and Python's tarfile the first.
        """
        if (self.name is not None and other.name is not None) or (self.size is not None and other.size is not None):
            msg = "two extension headers of one member contradict each other"
            raise HeaderError(msg)
        return Overrides(
            other.name if self.name is None else self.name,
            other.size if self.size is None else self.size,
        )


def parse_pax(data: bytes) -> Overrides:
    """Read a pax header's records.

    `path` and `size` count; `linkpath`, every sparse keyword and those of a file that began on another volume are
    refused; times, owners, comments and vendors' own keywords say nothing about the member's bytes and are passed over.

    Raises:
        HeaderError: Malformed records, or a keyword that makes the member something else than plain bytes.
    """
    found = Overrides()
    at = 0
    while at < len(data):
        keyword, value, at = _record(data, at)
        if keyword == b"path":
            found = found.with_name(value)
        elif keyword == b"size":
            found = replace(found, size=_size(value))
        elif keyword == b"linkpath":
            msg = "a pax header makes a member a link (linkpath)"
            raise HeaderError(msg)
        elif keyword.startswith(_SPARSE):
            msg = f"a pax header makes a member a sparse file ({keyword.decode('ascii', 'replace')})"
            raise HeaderError(msg)
        elif keyword in _PART:
            msg = f"a pax header makes a member a part of a file of a multi-volume archive ({keyword.decode('ascii')})"
            raise HeaderError(msg)
    return found


def _record(data: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Keyword and value of the record at `at`, and where the next one starts."""
    space = data.find(b" ", at, at + _MAX_DIGITS)
    digits = data[at:space] if space > 0 else b""
    stop = at + int(digits) if digits.isdigit() else -1
    record = data[space + 1 : stop - 1] if stop > space + 1 else b""
    keyword, equals, value = record.partition(b"=")
    if not equals or not keyword or stop > len(data) or data[stop - 1 : stop] != b"\n":
        msg = f"a pax header is malformed at its byte {at}"
        raise HeaderError(msg)
    return keyword, value, stop


def _size(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        msg = f"a pax header gives the size {value!r}"
        raise HeaderError(msg)
    size = int(value)
    check_size(size)
    return size
