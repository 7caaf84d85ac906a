"""Parse URLs and paths, and open them as streams or for reads at any offset."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

from wdskit.errors import StorageError
from wdskit.limits import MAX_READ_BYTES
from wdskit.text import CONTROL, public_url

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?!:)")  # `a::b` are two folders
_HTTP = ("http", "https")
ABSENT_STATUSES = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
"""Replies for a file that does not exist; S3 replies 403 to a client without the right to list."""
LISTED_SCHEMES = ("s3", "gs", "az")
"""Buckets: their folders can be listed and written."""
_STORES = (*LISTED_SCHEMES, "hf", "ais")


class ByteStream(Protocol):
    """Bytes in order. Close it when done."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end and only there."""

    def close(self) -> None:
        """Give back the descriptor or connection."""


def scheme_of(url: str) -> str:
    """`file` for a path or a file URL, `http`, `https`, `s3`, `gs`, `az`, `hf` or `ais`; `StorageError` for others:
    `pipe:` is never run.
    """
    match = _SCHEME.match(url)
    if match is None:
        return "file"
    scheme = match[1].lower()
    if scheme in (*_HTTP, *_STORES):
        if CONTROL.search(url) or " " in url.partition("?")[2]:  # each library shows, cuts or removes them otherwise
            msg = (
                f"{public_url(url)}: a URL has no control characters, and no space in its query. Write %20 for a space."
            )
            raise StorageError(msg, url=public_url(url))
        return scheme
    if scheme == "file":
        return scheme
    shown = public_url(url)
    known = "http(s), s3, gs, az, hf or ais"
    if scheme == "pipe":
        msg = f"{shown}: `pipe:` runs a shell command, which wdskit never does. Name a file or a URL of {known}."
    else:
        msg = f"{shown}: the scheme `{scheme}:` is not supported. Name a local path or a URL of {known}."
    raise StorageError(msg, url=url)


def is_local(url: str) -> bool:
    """Return whether `url` is a path or a file URL; raises as `scheme_of` does."""
    return scheme_of(url) == "file"


def shown_url(url: str) -> str:
    """Return a path unchanged, a URL without user, password and query, which may be secrets. Raises as `scheme_of`
    does.
    """
    return url if is_local(url) else public_url(url)


def local_path(url: str) -> str:
    """The path that a local URL names; `StorageError` for another host, a query or a fragment."""
    if not url.lower().startswith("file:"):
        return url
    host, path = "", url[5:]
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest
    if host.lower() not in ("", "localhost"):
        msg = f"{url}: a file URL names a file on this machine: file:///path, not file://{host}/..."
        raise StorageError(msg, url=url)
    if "?" in path or "#" in path:
        msg = f"{url}: `?` and `#` end the path of a URL. Write %3F and %23 there, or the path without `file:`."
        raise StorageError(msg, url=url)
    return unquote(path, errors="surrogateescape")  # a file name may be any bytes


def open_stream(url: str) -> ByteStream:
    """Open a local file, a named pipe, an http(s) body or an object of a store for reading in order; `StorageError`
    where it cannot be.
    """
    scheme = scheme_of(url)
    if scheme in _STORES:
        from wdskit.storage.objects import ObjectStream

        return ObjectStream(url)
    if scheme in _HTTP:
        from wdskit.storage.http import HttpBody

        return HttpBody(url)
    return LocalFile(url)


class RangeFile(Protocol):
    """A file or object of which any bytes can be read. Close it when done."""

    url: str

    @property
    def fd(self) -> int:
        """Descriptor of a local file, -1 for others."""

    @property
    def num_bytes(self) -> int:
        """Size of it."""

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only where it ends. Safe to call from several threads."""

    def close(self) -> None:
        """Give back the descriptor or connection."""


def open_ranges(url: str) -> RangeFile:
    """Open a local file, or an object of a store or http(s) server, for reading anywhere; `StorageError` where it
    cannot be. Of an object nothing is read yet.
    """
    if is_local(url):
        return LocalFile(url)
    from wdskit.storage.objects import ObjectFile

    return ObjectFile(url)


class LocalFile:
    """A file read in order through its descriptor `fd`, -1 once it is closed; a named pipe too.

    Args:
        url: Path or `file:` URL.
        takes_pipe: Whether it may be a named pipe, whose opening waits for a writer.

    Raises:
        StorageError: The file does not exist, may not be read, or is a pipe or device where none is taken.
    """

    def __init__(self, url: str, *, takes_pipe: bool = True) -> None:
        self.url = url
        try:
            self.fd = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | (0 if takes_pipe else os.O_NONBLOCK))
        except OSError as err:
            cause = None if "://" in url else err  # which would show all of a URL
            raise StorageError(f"{url}: cannot be opened: {err.strerror}.", url=url) from cause
        except ValueError as err:  # a NUL, or a text that is not a file name in this locale
            raise StorageError(f"{url!r}: cannot be opened: {err}.", url=url) from err
        if not takes_pipe and stat.S_IFMT(os.fstat(self.fd).st_mode) not in {stat.S_IFREG, stat.S_IFDIR}:
            self.close()  # a folder fails when it is read
            raise StorageError(f"{url}: this is not a plain file.", url=url)

    @property
    def num_bytes(self) -> int:
        """Size of the file now; 0 for a pipe."""
        return os.fstat(self.fd).st_size

    @property
    def is_regular(self) -> bool:
        """Whether it is a file with a size, and no pipe."""
        return stat.S_ISREG(os.fstat(self.fd).st_mode)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes from where the last call stopped."""
        try:
            return os.read(self.fd, size)
        except OSError as err:
            raise self._failed(err) from err

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, fewer only where the file ends. Safe to call from several threads."""
        try:
            data = os.pread(self.fd, min(size, MAX_READ_BYTES), offset)
            while len(data) < size and (  # one pread returns at most MAX_READ_BYTES, and less on network disks
                part := os.pread(self.fd, min(size - len(data), MAX_READ_BYTES), offset + len(data))
            ):
                data += part
        except OSError as err:
            raise self._failed(err) from err
        return data

    def close(self) -> None:
        """Close the descriptor; twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _failed(self, err: OSError) -> StorageError:
        return StorageError(f"{self.url}: reading failed: {err.strerror}.", url=self.url)


def read_bytes(url: str, *, limit: int, takes_pipe: bool = False) -> bytes:
    """All bytes of a small file, or with `takes_pipe` of a named pipe; `StorageError` if it cannot be read, or has more
    than `limit` bytes.
    """
    data = bytearray()
    opened = LocalFile(url, takes_pipe=takes_pipe) if is_local(url) else open_stream(url)
    with contextlib.closing(opened) as stream:
        while part := stream.read(1 << 20):
            data += part
            if len(data) > limit:
                raise StorageError(f"{url}: it holds more than {limit} bytes, too many for such a file.", url=url)
    return bytes(data)
