"""Publish files. Only `storage.cache`, whose files may be lost, writes data in another way.

A file appears under its final name whole and on disk, or not at all: it is written to a temporary file in the same
folder, flushed to the device, renamed, and the folder is flushed too. Every disk operation goes through one `Disk`, so
that a test can fail or kill the process at the n-th operation.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import TypeAlias

from wdskit.errors import FolderIndexError

Buffer: TypeAlias = bytes | bytearray | memoryview

TEMP_PREFIX = "."
TEMP_SUFFIX = ".wdskit-temp"
_TOKEN_BYTES = 4
"""The random part at the end of a temporary file's name."""


class Disk:
    """The operations that change a disk. Tests replace this object to let operations fail.

    Every method but `begin_flush` raises OSError if the operation fails.
    """

    def open(self, path: Path) -> int:
        """Create a file for writing and return its descriptor, which child processes do not inherit.

        Raises:
            FileExistsError: `path` exists, perhaps as a link.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_log(self, path: Path) -> int:
        """Open a file for appending and return its descriptor. A missing file is created; a link raises OSError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def write(self, fd: int, data: Buffer) -> int:
        """Write the first bytes of `data`, perhaps not all, and return their number."""
        return os.write(fd, data)

    def begin_flush(self, fd: int, start: int, num_bytes: int) -> None:
        """Ask the kernel to start writing a part of a file to the device, and return at once. This never raises."""
        # Otherwise the last flush takes a sixth of the time to pack files of 100 KB.
        if hasattr(os, "posix_fadvise"):  # Linux starts to write dirty pages, and keeps them in memory
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Return after the file's bytes are on the device."""
        _flush(fd)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file atomically. An existing file `target` is replaced."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file the second name `target` by a hard link. Rename the file if the disk allows no hard link.

        Raises:
            FileExistsError: `target` exists.
        """
        try:
            os.link(source, target)
        except OSError as err:
            if err.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                raise
            source.rename(target)

    def fsync_folder(self, folder: Path) -> None:
        """Return after the folder's entries are on the device."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(fd)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty. Do nothing if the folder does not exist or is not empty."""
        try:
            path.rmdir()
        except OSError as err:
            if err.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def make_folder(self, path: Path) -> None:
        """Create a folder if it does not exist. Its parent must exist."""
        path.mkdir(exist_ok=True)


DISK = Disk()
_disk_in_use: ContextVar[Disk] = ContextVar("disk", default=DISK)


def disk_in_use() -> Disk:
    """Return the disk of the innermost `use_disk`; without one, the disk of this machine."""
    return _disk_in_use.get()


@contextlib.contextmanager
def use_disk(disk: Disk) -> Iterator[None]:
    """Let `pack`, `reshard`, `index_folder` and `split` write with `disk`, if this thread calls them in the block."""
    token = _disk_in_use.set(disk)
    try:
        yield
    finally:
        _disk_in_use.reset(token)


def _flush(fd: int) -> None:
    """Return after the bytes of a file or the entries of a folder are on the device."""
    # macOS's fsync leaves bytes in the cache of the device
    full = getattr(fcntl, "F_FULLFSYNC", None)
    try:
        if full is not None:
            fcntl.fcntl(fd, full)
            return
    except OSError as err:
        if err.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):  # network disks do not support it
            raise
    os.fsync(fd)


class TempFile:
    """The temporary file that `publish` writes and then renames.

    A thread digests and writes the bytes of one call while the caller makes those of the next one. This saves a fifth
    of the time to pack photographs with one worker.

    Attributes:
        num_bytes: Number of bytes of all calls of `write`.
    """

    def __init__(self, fd: int, disk: Disk, thread: ThreadPoolExecutor) -> None:
        self._fd = fd
        self._disk = disk
        self._thread = thread
        self._running: Future[None] | None = None
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append all of `data`, which must not change before the next call of a method returns.

        OSError: The disk accepts no more bytes, perhaps of the previous call.
        """
        self.wait()
        view = memoryview(data).cast("B")
        self._running = self._thread.submit(self._append, view, self.num_bytes)
        self.num_bytes += len(view)

    def _append(self, view: memoryview, start: int) -> None:
        self._digest.update(view)
        write_all(self._fd, view, self._disk)
        self._disk.begin_flush(self._fd, start, len(view))

    def wait(self) -> None:
        """Return after all bytes are written. OSError: The disk accepts no more bytes."""
        if self._running:
            self._running.result()

    @property
    def sha256(self) -> str:
        """The sha256 of all bytes, in hexadecimal, after all are written. OSError: The disk accepts no more bytes."""
        self.wait()
        return self._digest.hexdigest()


def write_all(fd: int, rest: memoryview, disk: Disk) -> None:
    """Write all bytes of `rest`. OSError: The disk accepts no more bytes."""
    while rest:
        written = disk.write(fd, rest)
        if not written:  # POSIX does not define this result, and retries may never end
            raise OSError(errno.EIO, "the disk accepts no more bytes and gives no reason")
        rest = rest[written:]


def describe_os_error(err: OSError) -> str:
    """Return the reason of an error of a file operation, as a sentence without the path.

    A second line with advice follows if the disk is full or the user's quota is used up.
    """
    problem = f"{err.strerror or err}."
    if err.errno not in (errno.ENOSPC, errno.EDQUOT):
        return problem
    return f"{problem}\n  Free some space and run the same command again: it continues after the last complete shard."


@contextlib.contextmanager
def publish(path: Path, *, disk: Disk = DISK) -> Iterator[TempFile]:
    """Return a context with a `TempFile`, which becomes the file `path` when the block ends without an error.

    An existing file is replaced in one step. After an error in the block, `path` is unchanged and the temporary file is
    removed. If only the last step fails, the fsync of the folder, `path` is already the whole new file. If several
    writers publish to one path at the same time, the whole file of the last writer remains.

    Raises:
        OSError: A disk operation failed.
    """
    temp = path.with_name(f"{TEMP_PREFIX}{path.name}.{secrets.token_hex(_TOKEN_BYTES)}{TEMP_SUFFIX}")
    fd = disk.open(temp)
    closed = False
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="wdskit-write") as thread:
            yield (file := TempFile(fd, disk, thread))
            file.wait()
        disk.fsync(fd)
        closed = True
        disk.close(fd)
        disk.rename(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            if not closed:
                disk.close(fd)
        with contextlib.suppress(OSError):
            disk.remove(temp)
        raise
    disk.fsync_folder(path.parent)


def publish_bytes(path: Path, data: Buffer, *, disk: Disk = DISK) -> None:
    """Write a file with these bytes, which appears at `path` whole or not at all. An existing file is replaced.

    Raises:
        OSError: A disk operation failed.
    """
    with publish(path, disk=disk) as temp:
        temp.write(data)


def read_own(path: Path, *, limit: int = 1 << 30) -> bytes | None:
    """Return the bytes of a plain file that wdskit wrote; None if the file does not exist.

    Raises:
        FolderIndexError: The path is a link, a pipe, a device, or a file of more than `limit` bytes.
        OSError: The file cannot be read, or the path is a folder.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            is_plain = stat.S_ISREG(found.st_mode)
            if is_plain and found.st_size <= limit:
                return file.read()
            problem = f"is larger than {limit:,} bytes" if is_plain else "is not a plain file"
    except FileNotFoundError:
        return None
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise
        problem = "is a link"
    raise FolderIndexError(describe_foreign(path, problem), folder=str(path.parent))


def describe_foreign(path: Path, problem: str) -> str:
    """Return the message for a file or folder that wdskit did not make and refuses to use.

    `problem` is the reason and follows "this" in the message, for example "is a link".
    """
    return f"{path}: this {problem}, so wdskit did not write it. Nothing was changed.\n  Look at it, then remove it."


def describe_missing(path: str, what: str) -> str:
    """Return the message that a file or folder of the kind `what` does not exist.

    If a parent folder of a local `path` is missing or may not be searched, the message names this folder instead.
    """
    missing = Path(path)
    while "://" not in path and not os.path.isdir(missing.parent):  # noqa: PTH112 (Path raises without permission)
        missing = missing.parent
    if "://" not in path and not os.access(missing.parent, os.X_OK):
        return f"the folder {missing.parent} may not be read."
    return f"there is no such {what}." if missing == Path(path) else f"there is no such folder: {missing}."


def append_lines(path: Path, lines: Sequence[str], *, disk: Disk = DISK) -> None:
    """Append lines to a log, and create a missing log. `lines` have no newline at their ends; this function adds it.

    All lines are one write if the disk accepts it, so that lines of several processes do not mix, and a kill cuts no
    line.

    Raises:
        OSError: The log cannot be opened or written, or is a link.
    """
    fd = disk.open_log(path)
    try:
        data = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        write_all(fd, memoryview(data), disk)
    finally:
        disk.close(fd)


def make_folders(path: Path, *, disk: Disk = DISK) -> None:
    """Create a folder and its missing parents. Each folder is flushed to the device before the next is created.

    Raises:
        OSError: A folder cannot be created or flushed, or `path` or one of its parents is a file.
    """
    if path.is_dir():
        with contextlib.suppress(PermissionError):  # the parent can belong to another user
            disk.fsync_folder(path.parent)  # a killed run may have made `path` without this fsync
        return
    make_folders(path.parent, disk=disk)
    disk.make_folder(path)
    disk.fsync_folder(path.parent)


def remove_temp_files(folder: Path, *, of: Container[str] | None = None, disk: Disk = DISK) -> None:
    """Remove the temporary files of killed writers in `folder`. The caller must hold the folder's lock.

    Args:
        folder: The folder.
        of: Names, without folder, of the final files whose temporary files are removed; None for all temporary files.
        disk: Performs the file operations; tests replace it.

    Raises:
        OSError: A file cannot be removed.
    """
    for temp in sorted(folder.glob(f"{TEMP_PREFIX}*{TEMP_SUFFIX}")):
        name = temp.name.removeprefix(TEMP_PREFIX).removesuffix(TEMP_SUFFIX)
        if of is None or name in of or re.sub(rf"\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\Z", "", name) in of:
            disk.remove(temp)


def owner_of_new_files(folder: Path) -> int:
    """Return the user id of the owner that a new file in `folder` gets. On a network disk, this may be another user.

    Raises:
        OSError: A file cannot be created in the folder.
    """
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: another process may remove temporary files
        return os.fstat(file.fileno()).st_uid
