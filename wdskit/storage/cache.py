"""Cache parts of remote shards on a local disk, shared by all processes of a user on a machine.

The process that fetches a part holds a lock file, which the kernel frees when the process ends. Other processes wait
up to `CLAIM_S` for the part, and then read from the store. The file of a part (`storage.cached_parts`) gets its name
when it is complete. A damaged part is removed and fetched again.

If the cache is full, random parts of the least recently used half are removed. Always removing the oldest part would be
wrong for data that is read again in the same order: each part would go just before its use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import logging
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdskit.errors import StorageError
from wdskit.files import make_folders, owner_of_new_files
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.cached_parts import (
    FOLDER_MODE,
    CachedPart,
    DamagedPart,
    PartName,
    is_private,
    is_private_folder,
    part_bytes,
    parts_of,
    write_part,
)

if TYPE_CHECKING:
    import asyncio

    from wdskit.storage.cached_parts import PartFile
    from wdskit.storage.objects import ObjectFile

MAX_OPEN = 128
"""Most parts that stay open in a process."""
CHECKED_BYTES = 16 << 20
"""Most memory for the parts that a process knows: enough for 10,000 parts with a hundred samples each."""
MAX_FETCHING = 4
"""Most parts that a process fetches at the same time."""
SCAN_EVERY = 8
"""Least number of parts that a process stores before it lists the parts of all processes again."""
SCAN_SHARE = 1 / 16
"""Share of the free space that a process fills before it lists all parts again: sixteen processes may share it."""
FREE_SHARE = 0.05
"""Share of a full cache that is freed at once, because listing and sorting all parts takes a second per terabyte."""
IN_USE_S = 30.0
"""A part that was used within this time is not removed."""
WAIT_S = 0.02
"""Time between two checks for a part that another process fetches."""
CLAIM_S = 60.0
"""Longest wait for a part that another process fetches."""
FULL_S = 60.0
"""Time without new parts after the disk was full, and least time between two warnings about the disk."""

_log = logging.getLogger(__name__)


class PartCache:
    """A cache of parts of remote shards in a local folder. A pickle has only `folder` and `num_bytes`.

    Args:
        folder: Folder of the cache, which is created if it does not exist.
        num_bytes: Largest size of all parts in the folder together. Parts that other processes are writing do not
            count.

    Raises:
        StorageError: The folder cannot be created or written, belongs to another user, or other users may write to it.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        self.folder = Path(folder)
        self.num_bytes = num_bytes
        self._owner = make_private_folder(self.folder, "the cache", "Name another folder in cache.dir")
        self._checked: OrderedDict[PartName, CachedPart] = OrderedDict()  # the least recently used first
        self._checked_bytes = 0  # memory of these parts
        self._open: deque[CachedPart] = deque()  # in the order in which they were opened
        self._fetches: dict[PartName, Future[None]] = {}
        self._lock = threading.RLock()
        self._space_lock = threading.Lock()
        self._slots: asyncio.Semaphore | None = None
        self._used_bytes = 0  # by all parts: as last listed, and the parts of this process since then
        self._writing_bytes = 0  # by the parts that this process is writing
        self._until_scan = 0  # parts to store before all parts are listed again
        self._full_until = 0.0
        self._warned_s = -FULL_S

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return PartCache, (self.folder, self.num_bytes)

    def find(self, name: PartName) -> CachedPart | None:
        """Return a part, and mark it as used. Return None if the part is missing, cannot be read now, or is damaged.
        A damaged part is removed.
        """
        with self._lock:
            part = self._checked.get(name)
            if part is not None:
                self._checked.move_to_end(name)
        if part is None:
            try:
                part = CachedPart(name, self.folder, self._owner)
            except FileNotFoundError:
                return None
            except OSError as err:  # for example no free descriptor: the part may be valid
                self._warn("parts cannot be read now", err)
                return None
            except DamagedPart as err:
                self._drop(name, str(err))
                return None
            with self._lock:
                self._forget(name)  # another thread may have found the part meanwhile
                self._checked[name] = part
                self._checked_bytes += part.memory_bytes
                while self._checked_bytes > CHECKED_BYTES and len(self._checked) > 1:
                    self._checked_bytes -= self._checked.popitem(last=False)[1].memory_bytes
        now = time.monotonic()
        if now - part.used_s > IN_USE_S / 2:
            part.used_s = now
            try:
                os.utime(part.path, follow_symlinks=False)
            except FileNotFoundError:  # another process removed the file
                self._forget(name)
                return None
            except OSError:
                pass
        return part

    def _forget(self, name: PartName) -> None:
        with self._lock:
            part = self._checked.pop(name, None)
            if part is not None:
                self._checked_bytes -= part.memory_bytes
                part.opened = None  # frees the disk space of a removed file

    def read(self, name: PartName, number: int, start: int, stop: int) -> bytes | None:
        """Return the bytes of a sample and of the tar block after the sample.

        Return None if the part does not exist, cannot be read now, or is damaged. A damaged part is removed.

        Args:
            name: The part.
            number: Number of the sample in this part, from 0.
            start: Offset of the sample in the shard.
            stop: End of the sample in the shard.
        """
        part = self.find(name)
        if part is None:
            return None
        try:
            file = part.opened
            if file is None:
                file = part.open()
                with self._lock:
                    part.opened = file
                    self._open.append(part)
                    if len(self._open) > MAX_OPEN:
                        self._open.popleft().opened = None
            return part.read(file, number, start, stop)
        except FileNotFoundError:  # another process removed the file
            self._forget(name)
        except DamagedPart as err:
            self._drop(name, str(err))
        except OSError as err:
            self._warn("parts cannot be read now", err)
        return None

    def _drop(self, name: PartName, problem: str) -> None:
        """Log `problem`, close a damaged part, and remove its file. The file stays if it cannot be removed, or if its
        folder is not private to the user. No error is raised.
        """
        _log.warning("%s It is fetched again.", problem)
        self._forget(name)
        path = name.path(self.folder)
        with contextlib.suppress(OSError):
            if is_private_folder(path.parent, self._owner):
                path.unlink()

    def _warn(self, problem: str, err: OSError) -> None:
        """Log an error of the disk. Do nothing if this method logged an error less than a minute ago."""
        now = time.monotonic()
        if now - self._warned_s >= FULL_S:
            self._warned_s = now
            _log.warning("%s: %s: %s.", self.folder, problem, err.strerror or err)

    def keep(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> bool:
        """Start to fetch a part and store it in the cache, in the background.

        Return True if the fetch was started, or this process is already fetching the part. A fetch does nothing if the
        part exists or another process is fetching it; errors of a fetch are only logged. Return False, and fetch
        nothing, if the disk or the cache was full a short time ago. Raises StorageError if this process is ending, or
        was forked after its parent had used a store.

        Args:
            name: The part.
            file: The shard.
            starts: Offsets of the part's samples in the shard, and the end of the last sample.
        """
        from wdskit.storage.requests import loop_of_this_process  # needs obstore

        loop = loop_of_this_process(file.url)
        with self._lock:
            if name in self._fetches:
                return True
            if time.monotonic() < self._full_until:
                return False
            self._fetches[name] = loop.submit(self._fetch(name, file, starts))
        return True

    def wait_for(self, name: PartName) -> None:
        """Wait until a part is on the disk, or until no process is fetching the part. If only another process is
        fetching the part, wait at most `CLAIM_S` seconds.
        """
        path, start_s = name.path(self.folder), time.monotonic()
        while not path.exists():
            with self._lock:
                fetch = self._fetches.get(name)
            if fetch is not None and not fetch.done():
                concurrent.futures.wait([fetch], WAIT_S)
                start_s = time.monotonic()
            elif _is_claimed(path) and time.monotonic() - start_s < CLAIM_S:
                time.sleep(WAIT_S)
            else:
                return

    def wait(self, num: int = 0) -> None:
        """Wait until this process is fetching at most `num` parts."""
        while len(self._fetches) > num:
            time.sleep(WAIT_S)

    async def _fetch(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        import asyncio  # not needed for local shards

        self._slots = self._slots or asyncio.Semaphore(MAX_FETCHING)
        try:
            async with self._slots:
                with _claim(name.path(self.folder), self._owner) as is_writer:
                    if is_writer:
                        await self._fetch_claimed(name, file, starts)
        except StorageError as err:
            _log.info("%s Its part is not cached.", err)  # reading a sample of the part raises the error
        except OSError as err:
            self._warn("parts cannot be stored now", err)
            self._full_until = time.monotonic() + FULL_S
        finally:
            with self._lock:
                self._fetches.pop(name, None)

    async def _fetch_claimed(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        num_bytes = part_bytes(name, len(starts) - 1)
        if not await loop.run_in_executor(None, self._make_room, num_bytes):
            return
        try:
            chunks = await asyncio.wrap_future(file.start_reading([(name.start, name.stop + BLOCK_BYTES)]))
            if sum(len(chunk.data) for chunk in chunks) == name.stop - name.start + BLOCK_BYTES:
                await loop.run_in_executor(None, write_part, self.folder, name, chunks, starts)
        finally:
            with self._space_lock:
                self._writing_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` for a new part and return True.

        If the cache is full, remove old parts, but no part that was used in the last `IN_USE_S` seconds. If this does
        not free enough, reserve nothing, make `keep` return False for `IN_USE_S / 3` seconds, and return False.
        """
        with self._space_lock:
            if not self._until_scan or self._used_bytes + num_bytes > self.num_bytes:
                parts = sorted(parts_of(self.folder), key=lambda part: part.used_s)
                self._used_bytes = sum(part.num_bytes for part in parts) + self._writing_bytes
                if self._used_bytes + num_bytes > self.num_bytes:
                    self._remove_old_parts(parts, self.num_bytes - max(num_bytes, int(self.num_bytes * FREE_SHARE)))
                if self._used_bytes + num_bytes > self.num_bytes:
                    self._full_until = time.monotonic() + IN_USE_S / 3  # all parts are in use
                    return False
                self._until_scan = max(SCAN_EVERY, int((self.num_bytes - self._used_bytes) * SCAN_SHARE) // num_bytes)
            self._until_scan -= 1
            self._used_bytes += num_bytes
            self._writing_bytes += num_bytes
            return True

    def _remove_old_parts(self, parts: list[PartFile], num_bytes: int) -> None:
        """Remove parts until the cache has at most `num_bytes`. Each part is chosen at random from the least recently
        used half. Stop early if the chosen part was used in the last `IN_USE_S` seconds.

        `parts` has all parts, the least recently used first. Each chosen part is removed from this list too.
        """
        while self._used_bytes > num_bytes and parts:
            part = parts.pop(random.SystemRandom().randrange(-(-len(parts) // 2)))
            if time.time() - part.used_s < IN_USE_S:
                return
            part.path.unlink(missing_ok=True)
            self._used_bytes -= part.num_bytes


def make_private_folder(folder: Path, what: str, remedy: str) -> int:
    """Create a folder that only this user may write to, or check an existing folder.

    Args:
        folder: Path of the folder.
        what: Description of the content, for messages.
        remedy: Advice for a folder that cannot be used, for messages; without a full stop.

    Returns:
        The user id (uid) that owns new files in the folder. On a network disk, this may be another user's id.

    Raises:
        StorageError: The folder cannot be created or written, belongs to another user, or other users may write to it.
    """
    try:
        if not folder.is_dir():
            make_folders(folder.parent)
            folder.mkdir(FOLDER_MODE, exist_ok=True)
        owner = owner_of_new_files(folder)
        if is_private(folder.stat(), owner):
            return owner
    except OSError as err:
        msg = f"{folder}: {what} cannot be stored here: {err.strerror or err}.\n  {remedy}."
        raise StorageError(msg, url=str(folder)) from err
    msg = f"{folder}: {what} cannot be stored here: other users own this folder or may write to it.\n  {remedy} that"
    raise StorageError(f"{msg} does not exist yet, or run `chmod go-w` if it is yours.", url=str(folder))


def _is_claimed(path: Path) -> bool:
    """Return True if a process is writing the file `path`, and so holds the lock file of `path`. Return False also if
    the lock file cannot be opened.
    """
    try:
        fd = os.open(path.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no lock file, or no free descriptor: the caller reads from the store
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _claim(path: Path, owner: int) -> Iterator[bool]:
    """Try to take the lock file of `path`, and hold it during the block. A lock that was taken is removed at the end.

    Yield True if the block must write `path`. Yield False if `path` exists, or if another process holds the lock.
    OSError: The folder of `path` cannot be created or written, or is not private to `owner`.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path.parent, FOLDER_MODE)  # noqa: PTH102 (no flush: lost files are fetched again)
    if not is_private_folder(path.parent, owner):
        raise PermissionError(errno.EPERM, f"{path.parent.name} is not a folder that only this user may write to")
    lock = path.with_suffix(".lock")
    fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield not path.exists()
        finally:
            with contextlib.suppress(FileNotFoundError):
                lock.unlink()
    finally:
        os.close(fd)
