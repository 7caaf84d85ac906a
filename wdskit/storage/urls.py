"""Parse URLs and paths, and open files and objects as streams or for reads at any offset."""

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

# `run:1` is a path. A `Path` of a URL keeps one slash, and is refused.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=://)|pipe(?=:)|(https?|s3|gs|az|hf|ais)(?=:/)", re.IGNORECASE)
ABSENT_STATUSES = (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.GONE)
"""Statuses for a file that does not exist. S3 sends 403 to a client without the permission to list."""
LISTED_SCHEMES = ("s3", "gs", "az")
"""Schemes of buckets, whose folders can be listed and written."""
_STORES = (*LISTED_SCHEMES, "hf", "ais", "http", "https")


class ByteStream(Protocol):
    """A stream of bytes that are read in order. Close the stream when done."""

    @property
    def num_bytes(self) -> int | None:
        """Size in bytes; None if it is unknown."""

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes; empty only at the end. Raises StorageError if the bytes cannot be read."""

    def close(self) -> None:
        """Release the descriptor or connection."""


def scheme_of(url: str) -> str:
    """Return `file` for a path or a file URL, otherwise `http`, `https`, `s3`, `gs`, `az`, `hf` or `ais`. A text is a
    URL if it starts with a word and `://`.

    Raises:
        StorageError: The scheme is not supported, or is webdataset's `pipe:`. Or the URL has a control character, or a
            space in its query.
    """
    match = _SCHEME.match(url)
    scheme = match[0].lower() if match else "file"
    if scheme == "file":
        return scheme
    shown = public_url(url)
    if scheme in _STORES:
        if CONTROL.search(url) or " " in url.partition("?")[2]:  # libraries treat these differently
            msg = f"{shown}: a URL has no control characters, and no space in its query. Write %20 for a space."
            raise StorageError(msg, url=shown)
        return scheme
    known = "http(s), s3, gs, az, hf or ais"
    if scheme == "pipe":
        msg = f"{shown}: `pipe:` runs a shell command, which wdskit never does. Name a file or a URL of {known}."
    else:
        msg = f"{shown}: the scheme `{scheme}:` is not supported. Name a local path or a URL of {known}."
    raise StorageError(msg, url=shown)


def is_local(url: str) -> bool:
    """Return True for a path or a file URL, False for another URL. Raises StorageError if the URL is invalid."""
    return scheme_of(url) == "file"


def shown_url(url: str) -> str:
    """Return a URL without user, password and query, which may be secrets. A path or file URL is returned unchanged.

    Raises StorageError if the URL is invalid.
    """
    return url if is_local(url) else public_url(url)


def local_path(url: str) -> str:
    """Return the path of a local file. `url` is a path, which is returned unchanged, or a file URL, which is decoded.

    Raises StorageError if a file URL names another host.
    """
    if not url.lower().startswith("file://"):
        return url
    host, slash, path = url[len("file://") :].partition("/")
    path = slash + path
    if host.lower() not in ("", "localhost"):
        msg = f"{url}: a file URL names a file on this machine: file:///path, not file://{host}/..."
        raise StorageError(msg, url=url)
    return unquote(path, errors="surrogateescape")  # file names may have any bytes


def open_stream(url: str, *, takes_pipe: bool = True) -> ByteStream:
    """Open a local file, or an object of a store or http(s) server, for reading in order. `takes_pipe` is for
    `LocalFile`.

    Raises StorageError if the file or object cannot be opened.
    """
    if is_local(url):
        return LocalFile(url, takes_pipe=takes_pipe)
    from wdskit.storage.objects import ObjectStream

    return ObjectStream(url)


class RangeFile(Protocol):
    """A file or object whose bytes can be read at any offset. Call `close` when done."""

    url: str

    @property
    def fd(self) -> int:
        """Descriptor of a local file; -1 for an object."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes. Raises StorageError if the size cannot be read."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the file.

        Several threads may call this method. Raises StorageError if the bytes cannot be read.
        """

    def close(self) -> None:
        """Release the descriptor or connection."""


def open_ranges(url: str) -> RangeFile:
    """Open a local file, or an object of a store or http(s) server, for reading at any offset.

    Raises StorageError if a local file cannot be opened, or the URL names no object. The first read of an object sends
    the first request.
    """
    if is_local(url):
        return LocalFile(url)
    from wdskit.storage.objects import ObjectFile

    return ObjectFile(url)


class LocalFile:
    """A local file or named pipe, read in order or (not a pipe) at any offset. A folder can be opened, but not read.

    Args:
        url: Path or `file:` URL.
        takes_pipe: Whether pipes and devices are allowed. Opening a named pipe waits for a writer.

    Attributes:
        fd: The descriptor; -1 after `close`.

    Raises:
        StorageError: The path or URL is invalid, or the file does not exist, may not be read, or is a pipe or device
            although `takes_pipe` is False.
    """

    def __init__(self, url: str, *, takes_pipe: bool = True) -> None:
        self.url = url
        try:
            self.fd = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | (0 if takes_pipe else os.O_NONBLOCK))
        except OSError as err:
            cause = None if "://" in url else err  # `err` shows the whole URL
            raise StorageError(f"{url}: cannot be opened: {err.strerror}.", url=url) from cause
        except ValueError as err:  # a NUL, or a text that is not a file name in this locale
            raise StorageError(f"{url!r}: cannot be opened: {err}.", url=url) from err
        if not takes_pipe and stat.S_IFMT(os.fstat(self.fd).st_mode) not in {stat.S_IFREG, stat.S_IFDIR}:
            self.close()  # a folder is accepted here: reading it raises an error
            raise StorageError(f"{url}: this is not a plain file.", url=url)

    @property
    def num_bytes(self) -> int:
        """Current size of the file in bytes; 0 for a pipe."""
        return os.fstat(self.fd).st_size

    @property
    def is_regular(self) -> bool:
        """Whether this is a regular file, not a pipe, device or folder."""
        return stat.S_ISREG(os.fstat(self.fd).st_mode)

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes from where the last call stopped; empty only at the end.

        Raises StorageError if the file cannot be read.
        """
        try:
            return os.read(self.fd, size)
        except OSError as err:
            raise self._failed(err) from err

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the file.

        Raises StorageError if the file cannot be read.
        """
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
        """Close the descriptor. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _failed(self, err: OSError) -> StorageError:
        return StorageError(f"{self.url}: reading failed: {err.strerror}.", url=self.url)


def read_bytes(url: str, *, limit: int, takes_pipe: bool = False) -> bytes:
    """Return all bytes of a small file or object. An empty file gives b"".

    Raises StorageError if the file cannot be read or has more than `limit` bytes. Pipes and devices are errors too,
    unless `takes_pipe` is True.
    """
    data = bytearray()
    with contextlib.closing(open_stream(url, takes_pipe=takes_pipe)) as stream:
        while part := stream.read(1 << 20):
            data += part
            if len(data) > limit:
                raise StorageError(f"{url}: it holds more than {limit} bytes, too many for such a file.", url=url)
    return bytes(data)
