"""Lock a folder of shards, so that only one run writes there. Worker processes of a killed run count as writers too.

A worker ends a moment after its main process. In this moment, the folder's lock is free already, but the worker may
still publish a file. So each worker holds a shared lock on the folder of its run while it writes. A run starts only
when no worker holds such a lock (`wait_for_workers`). The kernel frees both locks when a process ends for any reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path

from wdskit.errors import FolderIndexError, StorageError

LOCK_NAME = ".wdskit.lock"


@contextlib.contextmanager
def lock_folder(folder: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock while the block runs. The kernel frees the lock when the process ends for any reason. The
    empty lock file stays in the folder.

    Args:
        folder: The folder to lock.
        shared: Let other processes hold the lock too, if they share it.
        wait: If another process holds the lock, wait until it is free instead of raising.

    Raises:
        FolderIndexError: Another process, or another block of this process, holds the lock, and `wait` is False.
        StorageError: The folder cannot be written, its file system has no locks, or the lock file is a link.
    """
    with _open_lock_file(folder) as fd:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as err:
            msg = f"{folder}: another wdskit process is writing in this folder. Wait until it ends, or stop it."
            raise FolderIndexError(msg, folder=str(folder)) from err
        except OSError as err:
            if err.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                raise
            msg = f"{folder}: this file system has no `flock` ({err.strerror}), which keeps two writers apart."
            remedy = "Mount it with locks (Lustre: `-o flock`; NFS: without `nolock`), or write to another file system."
            raise StorageError(f"{msg}\n  {remedy}", url=str(folder)) from err
        yield


@contextlib.contextmanager
def _open_lock_file(folder: Path) -> Iterator[int]:
    """Open or create the lock file of a folder, and yield its descriptor. The end of the block frees the lock.

    Raises:
        StorageError: The file is a link, or the folder cannot be written.
    """
    path = folder / LOCK_NAME
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
            with contextlib.suppress(OSError):  # a file system without locks, which `lock_folder` reported
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def share_lock(path: Path) -> Iterator[None]:
    """Hold a shared lock on a folder or file while the block runs. Wait while another process has the exclusive lock.
    Then end this process at once if its parent process has ended already. Without locks in the file system, the block
    runs without one. Raises OSError if the path cannot be opened.
    """
    fd = _open_locked(path, fcntl.LOCK_SH)
    try:
        parent = parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)
        yield
    finally:
        os.close(fd)


def wait_for_workers(path: Path) -> None:
    """Wait until no process has a shared lock on a folder or file, which means that all workers of earlier runs have
    ended. Without locks in the file system, return at once. The caller must hold the folder's lock (`lock_folder`)
    during the call. Raises OSError if the path cannot be opened.
    """
    os.close(_open_locked(path, fcntl.LOCK_EX))


def _open_locked(path: Path, kind: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks on folders: workers still end with their parent
        fcntl.flock(fd, kind)
    return fd
