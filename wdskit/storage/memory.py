"""Parts of remote shards that are kept in memory: a cache in a folder that its last user removes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import weakref
from pathlib import Path
from typing import Any

from wdskit.errors import StorageError
from wdskit.storage.cache import PartCache
from wdskit.text import format_bytes

MEMORY = Path("/dev/shm")  # noqa: S108 (the folder in it is this user's alone)
"""Where Linux keeps files in memory."""
USERS_NAME = "users"
"""File in the folder that each process locks that uses it."""


class MemoryCache(PartCache):
    """Parts that are kept in memory, shared by all processes of a user. Pickled, it is its size.

    Args:
        num_bytes: As `PartCache`.
        max_rate: As `PartCache`.

    Raises:
        StorageError: This system has no such memory, or less of it.
    """

    def __init__(self, num_bytes: int, max_rate: int | None = None) -> None:
        folder = MEMORY / f"wdskit-{os.getuid()}"
        try:
            status = os.statvfs(MEMORY)
            if status.f_blocks * status.f_frsize < num_bytes:
                size, most = format_bytes(num_bytes), format_bytes(status.f_blocks * status.f_frsize)
                msg = f"cache.memory is {size}, but {MEMORY} holds {most}.\n  Set a smaller one, or start the container"
                raise StorageError(f"{msg} with a larger `--shm-size`.", url=str(MEMORY))
            users = _enter(folder)
        except OSError as err:
            msg = f"cache.memory: {folder} cannot be used: {err.strerror}.\n  Set cache.dir and cache.size instead."
            raise StorageError(msg, url=str(folder)) from err
        super().__init__(folder, num_bytes, max_rate)
        weakref.finalize(self, _leave, folder, users, os.getpid())

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return MemoryCache, (self.num_bytes, self.max_rate)


def _enter(folder: Path) -> int:
    """Make a folder, or use it beside other processes: as long as the descriptor is open that this gives."""
    for left in folder.parent.glob(f"{folder.name}.*"):  # who removed it was killed
        shutil.rmtree(left, ignore_errors=True)
    path = folder / USERS_NAME
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):  # the last user has just removed it
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
            os.close(fd)


def _leave(folder: Path, fd: int, owner: int) -> None:
    """Stop using a folder, and remove it where no other process uses it."""
    if os.getpid() != owner:  # a forked process has a copy
        return
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder.rename(f"{folder}.{secrets.token_hex(4)}"), ignore_errors=True)  # none comes in meanwhile
    os.close(fd)
