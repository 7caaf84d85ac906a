"""Worker processes of a run that was killed, and the next run in their folder.

A worker ends by itself when its main process is gone, but it needs a moment to see that, in which it may go on to
publish. The folder's lock is free by then. So each worker shares a lock on the folder itself for as long as it lives,
or on the log of the part of the run that it works for, and a run begins when nobody does. The kernel frees all locks,
however a process ends.
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


def fill_in_worker(job: ShardJob, *, held: Path, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: a folder or a file is held until the process ends."""
    hold(held)
    return fill_shard(job, disk=disk)


@functools.cache
def hold(path: Path) -> int:
    """Share the lock of a folder or file until this process ends, and end at once if it comes too late for that."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    _lock(fd, fcntl.LOCK_SH)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
    return fd


def wait_for_workers(path: Path) -> None:
    """Return once no worker of an earlier run holds a folder or file. Call it with that run's own lock held."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> None:
    with contextlib.suppress(OSError):  # a disk that locks no folders: what is left is that workers end by themselves
        fcntl.flock(fd, kind)
