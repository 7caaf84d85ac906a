"""Publishing files: the only module that writes data.

A file appears under its final name whole and on disk, or not at all: it is written to a temporary file in the same
folder, flushed to the device, renamed, and the folder is flushed too. Every disk operation goes through one `Disk`, so
that a test can fail or kill at the n-th.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from wdskit.errors import FolderIndexError

Buffer: TypeAlias = bytes | bytearray | memoryview

DRAFT_PREFIX = "."
TEMP_SUFFIX = ".wdskit-temp"
_TOKEN_BYTES = 4
_TOKEN = re.compile(rf"\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\Z")
"""The random part at the end of a temporary file's name."""

_MAX_NEAR = 10_000  # most names of a folder that are compared to suggest a similar name

THREAD_BYTES = 256 << 10
"""Smallest write that is done in a thread: starting it takes 0.1 ms, the time to digest 200 KB."""


class Disk:
    """The operations that change a disk. Tests derive from it to fail, count or kill."""

    def open(self, path: Path) -> int:
        """Create the file at `path` and return its descriptor, which is not inherited by children.

        A file that exists is an error: another process may be writing it, or it is a link to a file elsewhere.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_log(self, path: Path) -> int:
        """Open a file to append to, create it if it does not exist, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, fd: int, data: Buffer) -> int:
        """Write a first part of `data` and return how many bytes that was."""
        return os.write(fd, data)

    def begin_flush(self, fd: int, start: int, num_bytes: int) -> None:
        """Let the kernel start to write these bytes to the device while the program continues.

        It promises nothing and does not fail: `fsync` reports errors.
        """
        if hasattr(os, "posix_fadvise"):  # Linux starts to write dirty pages, and keeps them in memory
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Return once the file's bytes are on the device."""
        _flush(fd)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give the file its final name, atomically. An existing file with this name is replaced."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, which no file has. On a disk without hard links, rename it."""
        try:
            os.link(source, target)
        except OSError as err:
            if err.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            source.rename(target)

    def fsync_folder(self, folder: Path) -> None:
        """Return once the folder's entries are on the device."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it exists and is empty."""
        try:
            path.rmdir()
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def make_folder(self, path: Path) -> None:
        """Create one folder if it does not exist."""
        path.mkdir(exist_ok=True)


DISK = Disk()


def _flush(fd: int) -> None:
    """Call fsync; on macOS F_FULLFSYNC, because fsync leaves bytes in the cache of the device there."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    try:
        if full is not None:
            fcntl.fcntl(fd, full)
            return
    except OSError as err:
        if err.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):  # a network disk has no such call
            raise
    os.fsync(fd)


class TempFile:
    """A file that `publish` writes and then gives its final name.

    A thread digests and writes large pieces while the caller continues. It has at most one piece, so the operations of
    the disk keep their order. It reads only bytes that cannot change: `bytes` objects, and buffers that were handed
    over. The next call raises its error.
    """

    def __init__(self, fd: int, disk: Disk) -> None:
        self._fd = fd
        self._disk = disk
        self._digest = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._handed_over: bytearray | None = None
        self.num_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append all of `data`. Data other than `bytes` is written when this returns; the caller may change it."""
        self.wait()
        view = memoryview(data).cast("B")
        self._append(view, beside=isinstance(data, bytes))

    def hand_over(self, buffer: bytearray, num_bytes: int) -> bytearray | None:
        """Append the first `num_bytes` of `buffer`. The buffer belongs to the temporary file from now on.

        Returns:
            The buffer of the previous call, which belongs to the caller again; None at the first call.
        """
        self.wait()
        free, self._handed_over = self._handed_over, buffer
        self._append(memoryview(buffer)[:num_bytes], beside=True)
        return free

    def _append(self, view: memoryview, *, beside: bool) -> None:
        start = self.num_bytes
        self.num_bytes += len(view)
        if not beside or len(view) < THREAD_BYTES:
            self._write(view)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="wdskit-write")
        self._running = self._thread.submit(self._write_large, view, start)

    def _write_large(self, view: memoryview, start: int) -> None:
        """Write, and let the device start at once. So the flush at the end is short; it was a sixth of the time to
        pack files of 100 KB.
        """
        self._write(view)
        self._disk.begin_flush(self._fd, start, len(view))

    def _write(self, rest: memoryview) -> None:
        self._digest.update(rest)
        while rest:
            written = self._disk.write(self._fd, rest)
            if not written:  # POSIX does not define this result, and a retry might never end
                raise OSError(errno.EIO, "the disk accepts no more bytes and gives no reason")
            rest = rest[written:]

    def wait(self) -> None:
        """Return after all bytes are written. OSError: A write failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def end(self) -> None:
        """End the thread. Its errors are ignored."""
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def sha256(self) -> str:
        """Hex sha256 of the written bytes."""
        self.wait()
        return self._digest.hexdigest()


def describe_os_error(err: OSError) -> str:
    """Describe an error of a disk, with advice if the disk is full."""
    problem = f"{err.strerror or err}."
    if err.errno not in (errno.ENOSPC, errno.EDQUOT):
        return problem
    return f"{problem}\n  Free some space and run the same command again: it continues after the last complete shard."


def temp_path(path: Path) -> Path:
    """Return the name of a temporary file for `path`. A lock ensures that only one process writes it."""
    return path.with_name(f"{DRAFT_PREFIX}{path.name}{TEMP_SUFFIX}")


def _unique_temp_path(path: Path) -> Path:
    """Return a name that no other writer of `path` uses, so that two of them never write or rename one file."""
    return path.with_name(f"{DRAFT_PREFIX}{path.name}.{secrets.token_hex(_TOKEN_BYTES)}{TEMP_SUFFIX}")


@contextlib.contextmanager
def publish(path: Path, *, disk: Disk = DISK) -> Iterator[TempFile]:
    """Write a file that appears under `path` only when the block ends without an error.

    An existing file with this name is replaced in one step. After an error the temporary file is removed, and `path` is
    unchanged; if only the last step failed, the fsync of the folder, `path` is the whole new file. If several writers
    publish to one path at the same time, the file of the last one remains, whole.
    """
    temp = _unique_temp_path(path)
    fd = disk.open(temp)
    closed = False
    handle = TempFile(fd, disk)
    try:
        yield handle
        handle.wait()
        handle.end()
        disk.fsync(fd)
        closed = True
        disk.close(fd)
        disk.rename(temp, path)
    except BaseException:
        handle.end()
        with contextlib.suppress(OSError):  # the first error is the one to report
            if not closed:
                disk.close(fd)
        with contextlib.suppress(OSError):
            disk.remove(temp)
        raise
    disk.fsync_folder(path.parent)


def publish_bytes(path: Path, data: Buffer, *, disk: Disk = DISK) -> None:
    """Publish a file with these bytes, see `publish`."""
    with publish(path, disk=disk) as temp:
        temp.write(data)


def read_own(path: Path, *, limit: int = 1 << 30) -> bytes | None:
    """Read a plain file that wdskit wrote into a folder. Links are not followed.

    Returns:
        Its bytes; None if the file does not exist.

    Raises:
        FolderIndexError: It is a link, a pipe, a device, or larger than `limit` bytes.
        OSError: It cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise
        raise FolderIndexError(foreign(path, "is a link"), folder=str(path.parent)) from err
    with open(fd, "rb") as file:  # noqa: PTH123 (a descriptor)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FolderIndexError(foreign(path, "is not a plain file"), folder=str(path.parent))
        if os.fstat(fd).st_size > limit:
            raise FolderIndexError(foreign(path, f"is larger than {limit:,} bytes"), folder=str(path.parent))
        return file.read()


def foreign(path: Path, problem: str) -> str:
    """Return the message for a file or folder that wdskit did not make and will not use."""
    return f"{path}: this {problem}, so wdskit did not write it. Nothing was changed.\n  Look at it, then remove it."


def is_file_name(value: object) -> bool:
    """True if a value is the plain name of a file in a folder: no path, no control character."""
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value and value.isprintable()


def why_not(path: Path) -> str | None:
    """Return why a file cannot be published at a path, if that is known before it is written; else None."""
    if path.is_dir():
        return os.strerror(errno.EISDIR)
    if not path.parent.is_dir():
        return os.strerror(errno.ENOENT)
    return None if os.access(path.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def describe_missing(path: str, what: str) -> str:
    """Return the message for a missing path, with a similar name if one exists.

    Args:
        path: Path of the missing file or folder.
        what: The kind of the path, such as `folder`. Names of files are suggested only if it has the word `file`.

    Returns:
        ``there is no such folder: a/b. Did you mean `a/c`?``, with the first missing part of the path.
    """
    if "://" in path:
        return f"there is no such {what}."
    missing = Path(path)
    while not os.path.isdir(missing.parent):  # noqa: PTH112 (Path raises without permission)
        missing = missing.parent
    if missing != Path(path):
        what = f"folder: {missing}"
    near: list[str] = []
    with contextlib.suppress(OSError):  # the folder cannot be listed
        there = islice(missing.parent.iterdir(), _MAX_NEAR)
        names = [one.name for one in there if "file" in what or ("folder" in what and one.is_dir())]
        near = difflib.get_close_matches(missing.name, names, n=1)
    hint = f" Did you mean `{missing.parent / near[0]}`?" if near else ""
    return f"there is no such {what}.{hint}"


def append_lines(path: Path, lines: Sequence[str], *, disk: Disk = DISK) -> None:
    """Append lines to a log with one write, so that lines of several processes do not mix, and a kill cuts no line."""
    fd = disk.open_log(path)
    try:
        data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        while data:
            data = data[disk.write(fd, data) :]
    finally:
        disk.close(fd)


def make_folders(path: Path, *, disk: Disk = DISK) -> None:
    """Create a folder and its missing parents. Each is flushed to the device before the next is created."""
    if path.is_dir():
        with contextlib.suppress(PermissionError):  # another user made `path`, and its parent cannot be opened
            disk.fsync_folder(path.parent)  # a killed run may have made `path` without this fsync
        return
    make_folders(path.parent, disk=disk)
    disk.make_folder(path)
    disk.fsync_folder(path.parent)


def remove_temp_files(folder: Path, *, of: Container[str] | None = None, disk: Disk = DISK) -> None:
    """Remove the temporary files of killed writers in `folder`. The caller holds the folder's lock.

    Args:
        folder: The folder.
        of: Names of the files whose temporary files are removed. Default: all.
        disk: Performs the file operations; tests replace it.
    """
    for temp in sorted(folder.glob(f"{DRAFT_PREFIX}*{TEMP_SUFFIX}")):
        name = temp.name.removeprefix(DRAFT_PREFIX).removesuffix(TEMP_SUFFIX)
        if of is None or name in of or _TOKEN.sub("", name) in of:
            disk.remove(temp)


def owner_of_new_files(folder: Path) -> int:
    """Return the user id of a new file in `folder`. On a network disk it may differ from that of the process.

    Raises:
        OSError: A file cannot be created in the folder.
    """
    path = folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        path.unlink()
