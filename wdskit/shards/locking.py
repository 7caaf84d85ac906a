"""One writer at a time in a folder of shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
