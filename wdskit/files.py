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
"""At the end of the name that a temporary file is made of."""

_MAX_NEAR = 10_000  # names of a folder among which the nearest is looked for

THREAD_BYTES = 256 << 10
"""From here on a write in a thread pays: handing it over takes 0.1 ms, in which 200 KB are digested."""


class Disk:
    """The operations that change a disk. Tests derive from it to fail, count or kill."""

    def open(self, path: Path) -> int:
        """Create the file at `path` and return its descriptor, which is not inherited by children.

        A file that exists is an error: another process may be writing it, or it is a link to a file elsewhere.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_log(self, path: Path) -> int:
        """Open a file to add to its end, created where it is missing, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, fd: int, data: Buffer) -> int:
        """Write a first part of `data` and return how many bytes that was."""
        return os.write(fd, data)

    def begin_flush(self, fd: int, start: int, num_bytes: int) -> None:
        """Let the kernel begin to bring these bytes to the device, beside what comes next. It promises nothing and does
        not fail: `fsync` reports what goes wrong.
        """
        if hasattr(os, "posix_fadvise"):  # of pages that are still to be written Linux begins to write, and keeps them
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Return once the file's bytes are on the device."""
        _flush(fd)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give the file its final name, atomically, replacing what had it."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, which is free. On a disk without hard links it loses the first one by that."""
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
        """Remove a file; one that is gone already is fine."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder; one that is gone already, or in which something stands, is fine."""
        try:
            path.rmdir()
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def make_folder(self, path: Path) -> None:
        """Create one folder; one that exists already is fine."""
        path.mkdir(exist_ok=True)


DISK = Disk()


def _flush(fd: int) -> None:
    """fsync; on macOS, where that leaves bytes in the cache of the device, the call that empties it."""
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
    """A file on its way to a final name. Made by `publish`.

    Large pieces are digested and written in a thread while the caller goes on; only one is on its way at a time, so the
    disk's operations keep their order. The thread reads only what nobody can change: `bytes`, or a buffer that was
    handed over. An error is raised by the next call.
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
        """Append all of `data`, in as many writes as the disk wants. What can change is written when this returns."""
        self.wait()
        view = memoryview(data).cast("B")
        self._append(view, beside=isinstance(data, bytes))

    def hand_over(self, buffer: bytearray, num_bytes: int) -> bytearray | None:
        """Append the first `num_bytes` of `buffer`. The buffer belongs to the temporary file from now on.

        Returns:
            The buffer of the call before, which nothing reads any more and which is the caller's again; None when this
            is the first call.
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
        """As `_write`. The device begins at once, and the flush at the end has less to do: a sixth of packing 100 KB
        files.
        """
        self._write(view)
        self._disk.begin_flush(self._fd, start, len(view))

    def _write(self, rest: memoryview) -> None:
        self._digest.update(rest)
        while rest:
            written = self._disk.write(self._fd, rest)
            if not written:  # POSIX leaves it open what that means; asking again might go on for ever
                raise OSError(errno.EIO, "the disk accepts no more bytes and gives no reason")
            rest = rest[written:]

    def wait(self) -> None:
        """Return once all bytes are with the disk; raise what went wrong."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def end(self) -> None:
        """Let nothing run any more; what went wrong is passed over."""
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes written so far."""
        self.wait()
        return self._digest.hexdigest()


def describe_os_error(err: OSError) -> str:
    """What went wrong with a disk, and what to do where that is known."""
    problem = f"{err.strerror or err}."
    if err.errno not in (errno.ENOSPC, errno.EDQUOT):
        return problem
    return f"{problem}\n  Free some space and run the same command again: it continues after the last complete shard."


def temp_path(path: Path) -> Path:
    """Return the name of a temporary file that one process at a time makes for `path`, which holds a lock for that."""
    return path.with_name(f"{DRAFT_PREFIX}{path.name}{TEMP_SUFFIX}")


def _unique_temp_path(path: Path) -> Path:
    """Return a name that no other writer of `path` uses, so that two of them never write or rename one file."""
    return path.with_name(f"{DRAFT_PREFIX}{path.name}.{secrets.token_hex(_TOKEN_BYTES)}{TEMP_SUFFIX}")


@contextlib.contextmanager
def publish(path: Path, *, disk: Disk = DISK) -> Iterator[TempFile]:
    """Write a file that appears under `path` only when the block ends without an error.

    A file that had the name is replaced in one step. After an error the temporary file is removed and `path` is as it
    was; only where the very last step failed, the folder's flush, it is the whole new file. Of several writers that
    publish to one path at the same time each publishes its whole file, and the last one stays.
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


@contextlib.contextmanager
def scratch(path: Path, *, disk: Disk = DISK) -> Iterator[TempFile]:
    """Write a temporary file, `temp_path(path)`, that never gets a final name. It is gone when the block ends; after a
    kill it is replaced by the next one, or removed by `remove_temp_files`.
    """
    temp = temp_path(path)
    disk.remove(temp)
    fd = disk.open(temp)
    handle = TempFile(fd, disk)
    try:
        yield handle
    finally:
        handle.end()
        with contextlib.suppress(OSError):  # nothing in it has to last
            disk.close(fd)
        with contextlib.suppress(OSError):
            disk.remove(temp)


def publish_bytes(path: Path, data: Buffer, *, disk: Disk = DISK) -> None:
    """`publish` a file whose bytes are at hand."""
    with publish(path, disk=disk) as temp:
        temp.write(data)


def read_own(path: Path, *, limit: int = 1 << 30) -> bytes | None:
    """Read a file that wdskit itself wrote into a folder: a plain file, never what a link leads to.

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
    """True if a value that was read back is the plain name of a file in a folder: no path, no control character."""
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value and value.isprintable()


def why_not(path: Path) -> str | None:
    """Why a file cannot be published there, as far as that can be known before it is made; else None."""
    if path.is_dir():
        return os.strerror(errno.EISDIR)
    if not path.parent.is_dir():
        return os.strerror(errno.ENOENT)
    return None if os.access(path.parent, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def describe_missing(path: str, what: str) -> str:
    """Why nothing is found at a path, and the name nearest to it.

    Args:
        path: Of a file or folder that is not there.
        what: What was looked for, such as `folder`. Files are near only where it names a file.

    Returns:
        ``there is no such folder: a/b. Did you mean `a/c`?``, with the first part that is missing.
    """
    if "://" in path:
        return f"there is no such {what}."
    missing = Path(path)
    while not os.path.isdir(missing.parent):  # noqa: PTH112 (where it may not be looked at, Path raises)
        missing = missing.parent
    if missing != Path(path):
        what = f"folder: {missing}"
    near: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may not be listed
        there = islice(missing.parent.iterdir(), _MAX_NEAR)
        names = [one.name for one in there if "file" in what or ("folder" in what and one.is_dir())]
        near = difflib.get_close_matches(missing.name, names, n=1)
    hint = f" Did you mean `{missing.parent / near[0]}`?" if near else ""
    return f"there is no such {what}.{hint}"


def append_lines(path: Path, lines: Sequence[str], *, disk: Disk = DISK) -> None:
    """Add lines to a log. One write: those of several processes do not mix, and a kill leaves whole lines or none."""
    fd = disk.open_log(path)
    try:
        data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        while data:
            data = data[disk.write(fd, data) :]
    finally:
        disk.close(fd)


def make_folders(path: Path, *, disk: Disk = DISK) -> None:
    """Create `path` and what is missing above it, each flushed into its parent before the next is made."""
    if path.is_dir():
        with contextlib.suppress(PermissionError):  # a parent that may not be opened; whoever made `path` could
            disk.fsync_folder(path.parent)  # a run that was killed may have made `path` and not come to this
        return
    make_folders(path.parent, disk=disk)
    disk.make_folder(path)
    disk.fsync_folder(path.parent)


def remove_temp_files(folder: Path, *, of: Container[str] | None = None, disk: Disk = DISK) -> None:
    """Remove what a killed writer left unfinished in `folder`. Call it with the folder's lock held.

    Args:
        folder: The folder.
        of: Names of the files whose temporary files are removed. Default: all.
        disk: Performs the file operations; tests replace it.
    """
    for temp in sorted(folder.glob(f"{DRAFT_PREFIX}*{TEMP_SUFFIX}")):
        name = temp.name.removeprefix(DRAFT_PREFIX).removesuffix(TEMP_SUFFIX)
        if of is None or name in of or _TOKEN.sub("", name) in of:
            disk.remove(temp)


def is_temp(path: Path) -> bool:
    """True for the name of a temporary file."""
    return path.name.startswith(DRAFT_PREFIX) and path.name.endswith(TEMP_SUFFIX)


def owner_of_new_files(folder: Path) -> int:
    """Return the user id that a new file in `folder` gets. A network disk may give another one than the process has.

    Raises:
        OSError: No file can be made there.
    """
    path = folder / f"{DRAFT_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        path.unlink()
