"""One writer at a time in a folder of shards. Worker processes of a killed run count as writers too.

A worker ends when its main process has ended, but it notices that a moment later and may publish a file before. The
folder's lock is free by then. So each worker shares a lock on the folder itself while it lives, and a run starts when
no process shares that lock. The kernel frees both locks when a process ends for any reason.
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
    """Hold the folder's lock while the block runs. The kernel frees it when the process ends, however it ends.

    The empty lock file stays: removing it would let two later writers lock two different files of the same name.

    Args:
        folder: Where it is.
        name: Of the lock: another one for something that may go on beside other things.
        problem: What it means that another process holds it; by default, that it is writing.
        wait: Wait for that process.

    Raises:
        FolderIndexError: Another process holds it, and is not waited for.
        StorageError: The folder cannot be written.
    """
    with _opened(folder, name) as fd:
        if not _try(fd, fcntl.LOCK_EX, folder, wait=wait):
            raise _in_use(folder, problem)
        yield


@contextlib.contextmanager
def share_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold the folder's lock together with others of the same kind; `lock_folder` is refused meanwhile, and refuses.

    Yields:
        A function that returns whether no other process shares the lock now.

    Raises:
        FolderIndexError: A process has the exclusive lock.
        StorageError: The folder cannot be written.
    """
    with _opened(folder, LOCK_NAME) as fd:

        def is_alone() -> bool:
            alone = _try(fd, fcntl.LOCK_EX, folder)
            # A change of a lock that fails frees it, so another process may have been quicker.
            if not _try(fd, fcntl.LOCK_SH, folder):
                raise _in_use(folder)
            return alone

        if not _try(fd, fcntl.LOCK_SH, folder):
            raise _in_use(folder)
        yield is_alone


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    """Open a lock file for `flock`, created if it does not exist. A link is not followed: it may lead anywhere.

    The lock is freed at the end of the block, also if a process that was forked meanwhile has the descriptor too.

    Yields:
        Its descriptor.

    Raises:
        StorageError: The file is a link, or the folder cannot be written.
    """
    path = folder / name
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as err:
        if err.errno == errno.ELOOP:
            msg = f"{path}: this is a link, and wdskit does not lock what it leads to.\n  Remove the link."
            raise StorageError(msg, url=str(folder)) from err
        raise StorageError(f"{folder}: cannot be written: {err.strerror or err}.", url=str(folder)) from err
    owner = os.getpid()
    try:
        yield fd
    finally:
        if os.getpid() == owner:  # the end of a forked process frees no lock of its parent
            with contextlib.suppress(OSError):  # a file system without locks, which was reported
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _try(fd: int, kind: int, folder: Path, *, wait: bool = False) -> bool:
    """Take a lock; False if another process holds it. StorageError: the file system has no locks."""
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
def hold(path: Path) -> None:
    """Share the lock of a folder or file until this process ends, and end at once if it comes too late for that."""
    _open_locked(path, fcntl.LOCK_SH)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


@contextlib.contextmanager
def held_meanwhile(path: Path) -> Iterator[None]:
    """Share the lock of a folder or file while the block runs, in a process that continues afterwards."""
    fd = _open_locked(path, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(fd)


def wait_for_workers(path: Path) -> None:
    """Return once no worker of an earlier run holds a folder or file. Call it with that run's own lock held."""
    os.close(_open_locked(path, fcntl.LOCK_EX))


def _open_locked(path: Path, kind: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a disk without locks on folders: workers end by themselves
        fcntl.flock(fd, kind)
    return fd
