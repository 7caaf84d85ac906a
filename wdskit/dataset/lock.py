"""Lock a folder of shards, so that only one run writes there. Worker processes of a killed run count as writers too.

A worker ends a moment after its main process. In this moment, the folder's lock is free already, but the worker may
still publish a file. So each worker holds a shared lock on the log of its run until the worker ends. A run starts only
when no worker holds such a lock (`wait_for_workers`). The kernel frees both locks when a process ends for any reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from pathlib import Path

from wdskit.errors import FolderIndexError, StorageError

LOCK_NAME = ".wdskit.lock"


@contextlib.contextmanager
def lock_folder(folder: Path, name: str = LOCK_NAME, problem: str = "", *, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock while the block runs. The kernel frees the lock when the process ends for any reason. The
    empty lock file stays in the folder.

    Args:
        folder: The folder to lock.
        name: Name of the lock file. Locks with different names do not exclude each other.
        problem: Message if another process holds the lock; by default, that another process is writing in the folder.
        wait: If another process holds the lock, wait until it is free instead of raising.

    Raises:
        FolderIndexError: Another process, or another block of this process, holds the lock, and `wait` is False.
        StorageError: The folder cannot be written, its file system has no locks, or the lock file is a link.
    """
    with _open_lock_file(folder, name) as fd:
        if not _take_lock(fd, fcntl.LOCK_EX, folder, wait=wait):
            raise _in_use(folder, problem)
        yield


@contextlib.contextmanager
def share_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold a shared lock on the folder while the block runs. Other processes may hold a shared lock too, but not the
    exclusive lock of `lock_folder`.

    Yields:
        A function that returns True if no other process shares the lock now. The function gives the shared lock up for
        a moment. It raises FolderIndexError if another process takes the exclusive lock in this moment; the shared
        lock is then lost.

    Raises:
        FolderIndexError: Another process holds the exclusive lock.
        StorageError: The folder cannot be written, its file system has no locks, or the lock file is a link.
    """
    with _open_lock_file(folder, LOCK_NAME) as fd:

        def is_alone() -> bool:
            alone = _take_lock(fd, fcntl.LOCK_EX, folder)
            # If this fails, flock has freed the shared lock, and another process may have taken an exclusive one.
            if not _take_lock(fd, fcntl.LOCK_SH, folder):
                raise _in_use(folder)
            return alone

        if not _take_lock(fd, fcntl.LOCK_SH, folder):
            raise _in_use(folder)
        yield is_alone


@contextlib.contextmanager
def _open_lock_file(folder: Path, name: str) -> Iterator[int]:
    """Open or create the lock file `name` of a folder, and yield its descriptor. The end of the block frees the lock.

    Raises:
        StorageError: The file is a link, or the folder cannot be written.
    """
    path = folder / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as err:
        if err.errno == errno.ELOOP:
            msg = f"{path}: this is a link, and wdskit does not lock what it leads to.\n  Remove the link."
            raise StorageError(msg, url=str(folder)) from err
        place = path if os.path.lexists(path) else folder
        raise StorageError(f"{place}: cannot be written: {err.strerror or err}.", url=str(folder)) from err
    owner = os.getpid()
    try:
        yield fd
    finally:
        if os.getpid() == owner:  # a forked process does not free the lock of its parent
            with contextlib.suppress(OSError):  # a file system without locks, which `_take_lock` reported
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _take_lock(fd: int, kind: int, folder: Path, *, wait: bool = False) -> bool:
    """Take the lock `kind`, `fcntl.LOCK_EX` or `LOCK_SH`, on a descriptor. Return True if the lock was taken. If
    another process has a conflicting lock, return False, or wait if `wait` is True. Raises StorageError if the file
    system of `folder` has no locks.
    """
    try:
        fcntl.flock(fd, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise
        msg = f"{folder}: this file system has no `flock` ({err.strerror}), which keeps two writers apart."
        remedy = "Mount it with locks (Lustre: `-o flock`; NFS: without `nolock`), or write to another file system."
        raise StorageError(f"{msg}\n  {remedy}", url=str(folder)) from err
    return True


def _in_use(folder: Path, problem: str = "") -> FolderIndexError:
    problem = problem or "another wdskit process is writing in this folder"
    return FolderIndexError(f"{folder}: {problem}. Wait until it ends, or stop it.", folder=str(folder))


@functools.cache
def share_lock_until_exit(path: Path) -> None:
    """Hold a shared lock on a folder or file until this process ends. Wait while another process has the exclusive
    lock. Then end this process at once if its parent process has ended already. Without locks in the file system, no
    lock is held. A second call for the same path does nothing. Raises OSError if the path cannot be opened.
    """
    _open_locked(path, fcntl.LOCK_SH)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


@contextlib.contextmanager
def share_lock(path: Path) -> Iterator[None]:
    """Hold a shared lock on a folder or file while the block runs. Wait while another process has the exclusive lock.
    Without locks in the file system, the block runs without one. Raises OSError if the path cannot be opened.
    """
    fd = _open_locked(path, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(fd)


def wait_for_workers(path: Path) -> None:
    """Wait until no process has a shared lock on a folder or file, which means that all workers of earlier runs have
    ended. Without locks in the file system, return at once. The caller must hold the folder's lock (`lock_folder` or
    `share_folder`) during the call. Raises OSError if the path cannot be opened.
    """
    os.close(_open_locked(path, fcntl.LOCK_EX))


def _open_locked(path: Path, kind: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks on folders: workers still end with their parent
        fcntl.flock(fd, kind)
    return fd
