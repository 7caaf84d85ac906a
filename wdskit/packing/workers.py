"""Worker processes of a run that was killed, and the next run in their folder.

A worker ends by itself when its main process is gone, but it needs a moment to see that, in which it may go on to
publish. The folder's lock is free by then. So each worker shares a lock on the folder itself for as long as it lives,
and a run begins when nobody does. The kernel frees both locks, however a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from multiprocessing import parent_process
from pathlib import Path

from wdskit.dataset.index import ShardEntry
from wdskit.files import Disk
from wdskit.packing.fill import ShardJob, fill_shard


def fill_in_worker(job: ShardJob, *, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: the folder is held until the process ends."""
    hold_folder(job.path.parent)
    return fill_shard(job, disk=disk)


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
