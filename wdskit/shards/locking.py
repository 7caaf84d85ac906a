"""One writer at a time in a folder of shards, the worker processes of a run that was killed included.

A worker ends by itself when its main process is gone, but it needs a moment to see that, in which it may go on to
publish. The folder's lock is free by then. So each worker shares a lock on the folder itself for as long as it lives,
and a run begins when nobody does. The kernel frees both locks, however a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from multiprocessing import parent_process
from pathlib import Path

from wdskit.errors import FolderIndexError, StorageError

LOCK_NAME = ".wdskit.lock"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock while the block runs. The kernel frees it when the process ends, however it ends.

    The empty lock file stays: removing it would let two later writers lock two different files of the same name.

    Raises:
        FolderIndexError: Another process holds it. It is not waited for.
        StorageError: The folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK_NAME, timeout=0)
    try:
        lock.acquire()
    except Timeout as err:
        msg = f"{folder}: another wdskit process is writing in this folder. Wait for its end, or stop it."
        raise FolderIndexError(msg, folder=str(folder)) from err
    except OSError as err:
        raise StorageError(f"{folder}: cannot be written: {err.strerror or err}.", url=str(folder)) from err
    try:
        yield
    finally:
        lock.release()


@functools.cache
def hold_folder(folder: Path) -> int:
    """Share the lock of a folder until this process ends, and end at once if it comes too late for that."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _lock(fd, fcntl.LOCK_SH)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
    return fd


def wait_for_workers(folder: Path) -> None:
    """Return once no worker of an earlier run holds the folder. Call it with the folder's own lock held."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> None:
    with contextlib.suppress(OSError):  # a disk that locks no folders: what is left is that workers end by themselves
        fcntl.flock(fd, kind)
