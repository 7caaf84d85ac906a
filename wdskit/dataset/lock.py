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
    from filelock import FileLock, Timeout

    lock = FileLock(folder / name, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout as err:
        raise _in_use(folder, problem) from err
    except OSError as err:
        raise StorageError(f"{folder}: cannot be written: {err.strerror or err}.", url=str(folder)) from err
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def share_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    """Hold the folder's lock together with others of the same kind; `lock_folder` is refused meanwhile, and refuses.

    Yields:
        What asks whether nobody else shares the lock now.

    Raises:
        FolderIndexError: A process holds it alone.
        StorageError: The folder cannot be written.
    """
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise StorageError(f"{folder}: cannot be written: {err.strerror or err}.", url=str(folder)) from err

    def is_alone() -> bool:
        alone = _try(fd, fcntl.LOCK_EX)
        if not _try(fd, fcntl.LOCK_SH):  # the kernel lets go of a lock that cannot be changed, and another was quick
            raise _in_use(folder)
        return alone

    try:
        if not _try(fd, fcntl.LOCK_SH):
            raise _in_use(folder)
        yield is_alone
    finally:
        os.close(fd)


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
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
    """Share the lock of a folder or file while the block runs: in a process that goes on to other things."""
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
    with contextlib.suppress(OSError):  # a disk that locks no folders: what is left is that workers end by themselves
        fcntl.flock(fd, kind)
    return fd
