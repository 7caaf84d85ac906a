"""Parts of remote shards that are kept on a local disk, shared by all processes of a machine.

There is no daemon. Who fetches a part holds a lock file that the kernel frees when the process ends. The others wait
until it is there, and read what they need from the store where it does not come. A part (`storage.parts`) appears under
its name when it is whole. One that is damaged is removed, and fetched again.

Where the folder is full, parts that were not used for long make room: a random one of the half that was used longest
ago. The part that was used longest ago is the wrong one where the data is read again and again in the same order: each
would go just before it is wanted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import logging
import os
import random
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdskit.errors import StorageError
from wdskit.files import make_folders
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.parts import Part, PartName, parts_of, write_part

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

MAX_OPEN = 128
"""Parts that stay open in a process."""
MAX_FETCHING = 4
"""Parts that a process fetches at once."""
SCAN_EVERY = 8
"""Parts that a process keeps before it counts again what others keep."""
IN_USE_S = 30.0
"""A part that was used so lately makes no room."""
WAIT_S = 0.02
"""How often a process looks whether a part has come that another one fetches."""
CLAIM_S = 60.0
"""Another process that fetches a part and takes longer is not waited for."""
RATE_NAME = "rate"
"""File in a cache's folder: the time until which fetches have been given their share of the rate, float64."""
MAX_LINE_S = 3600.0
"""A line of fetches is never longer: the clock was set back, and nobody waits for that."""
FULL_S = 60.0
"""How long nothing is kept after the disk was full."""

_TIME = struct.Struct("<d")
_log = logging.getLogger(__name__)


class PartCache:
    """Parts that are kept below a folder. Pickled, it is its folder and size.

    Args:
        folder: Made if it is not there.
        num_bytes: Most bytes of all parts in it, but for those that other processes are just writing.
        max_rate: Most bytes a second that all processes together fetch of parts; None for no limit.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int, max_rate: int | None = None) -> None:
        self.folder = Path(folder)
        self.num_bytes = num_bytes
        self.max_rate = max_rate
        try:
            make_folders(self.folder)
        except OSError as err:
            msg = f"{self.folder}: the cache cannot be stored here: {err.strerror}."
            raise StorageError(f"{msg}\n  Name another folder in cache.dir.", url=str(folder)) from err
        self._open: OrderedDict[PartName, Part] = OrderedDict()
        self._wanted: dict[PartName, Future[None]] = {}
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._slots: asyncio.Semaphore | None = None
        self._used_bytes = 0  # of all parts, by the last count and what was kept since
        self._writing = 0  # of those that are being written
        self._num_left = 0  # parts that may be kept before they are counted again
        self._full_until = 0.0

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return PartCache, (self.folder, self.num_bytes, self.max_rate)

    def find(self, name: PartName) -> Part | None:
        """A part that is there."""
        with self._lock:
            part = self._open.get(name)
            if part is not None:
                self._open.move_to_end(name)
        if part is None:
            path = name.path(self.folder)
            try:
                part = Part(name, path)
            except StorageError as err:
                if not isinstance(err.__cause__, FileNotFoundError):
                    self.drop(name, str(err))
                return None
            with self._lock:
                self._open[name] = part
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
        now = time.monotonic()
        if now - part.used_s > IN_USE_S / 2:
            part.used_s = now
            with contextlib.suppress(OSError):  # another process has removed it: it can be read to the end
                os.utime(part.file.fd)
        return part

    def drop(self, name: PartName, problem: str) -> None:
        """Remove a part that is damaged."""
        _log.warning("%s It is fetched again.", problem)
        with self._lock:
            self._open.pop(name, None)
        with contextlib.suppress(OSError):
            name.path(self.folder).unlink()

    def has(self, name: PartName) -> bool:
        """Whether a part is there, or on its way to this process."""
        return name in self._wanted or name in self._open or name.path(self.folder).exists()

    def keep(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> bool:
        """Begin to fetch a part, unless that has begun. Whether it is on its way: it is not where the disk is full.

        Args:
            name: Which.
            file: The shard.
            starts: Where its samples start in the shard, and where the last ends.
        """
        from wdskit.storage.requests import loop_of_this_process  # which needs obstore

        loop = loop_of_this_process(file.url)
        with self._lock:
            if name in self._wanted:
                return True
            if time.monotonic() < self._full_until:
                return False
            self._wanted[name] = loop.submit(self._fetch(name, file, starts))
        return True

    def wait_for(self, name: PartName) -> None:
        """Until a part is there, or no process is at it. Another process is waited for `CLAIM_S` long: it may be
        stopped.
        """
        path, start_s = name.path(self.folder), time.monotonic()
        while not path.exists():
            with self._lock:
                fetch = self._wanted.get(name)
            if fetch is not None and not fetch.done():
                concurrent.futures.wait([fetch], WAIT_S)
                start_s = time.monotonic()
            elif _is_claimed(path) and time.monotonic() - start_s < CLAIM_S:
                time.sleep(WAIT_S)
            else:
                return

    def wait(self, num: int = 0) -> None:
        """Until no more than so many parts are on their way."""
        while len(self._wanted) > num:
            time.sleep(WAIT_S)

    async def _fetch(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        self._slots = self._slots or asyncio.Semaphore(MAX_FETCHING)
        try:
            async with self._slots:
                with _claimed(name.path(self.folder)) as is_mine:
                    if is_mine:
                        await self._fetch_claimed(name, file, starts)
        except StorageError as err:
            _log.info("%s Its part is not cached.", err)  # an error only if a sample of it is read
        except OSError as err:
            if time.monotonic() >= self._full_until:
                _log.warning("%s: parts cannot be stored now: %s.", self.folder, err.strerror)
            self._full_until = time.monotonic() + FULL_S
        finally:
            with self._lock:
                self._wanted.pop(name, None)

    async def _fetch_claimed(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        num_bytes = name.stop - name.start + BLOCK_BYTES + 12 * len(starts) + 12
        if not await loop.run_in_executor(None, self._make_room, num_bytes):
            return
        try:
            if self.max_rate is not None:
                await asyncio.sleep(_take_turn(self.folder / RATE_NAME, num_bytes / self.max_rate))
            chunks = await asyncio.wrap_future(file.start_reading([(name.start, name.stop + BLOCK_BYTES)]))
            if sum(len(chunk.data) for chunk in chunks) == name.stop - name.start + BLOCK_BYTES:
                await loop.run_in_executor(None, write_part, self.folder, name, chunks, starts)
        finally:
            with self._room:
                self._writing -= num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so many bytes fit, once parts that were not used for long have gone. They are being written then."""
        with self._room:
            if not self._num_left or self._used_bytes + num_bytes > self.num_bytes:
                parts = sorted(parts_of(self.folder), key=lambda part: part.used_s)
                self._used_bytes = sum(part.num_bytes for part in parts) + self._writing
                self._num_left = SCAN_EVERY
                while self._used_bytes + num_bytes > self.num_bytes and parts:
                    gone = parts.pop(random.randrange(-(-len(parts) // 2)))  # noqa: S311 (no secret)
                    if time.time() - gone.used_s < IN_USE_S:
                        self._full_until = time.monotonic() + IN_USE_S / 3  # all of it is in use
                        return False
                    gone.path.unlink(missing_ok=True)
                    self._used_bytes -= gone.num_bytes
                if self._used_bytes + num_bytes > self.num_bytes:
                    self._full_until = time.monotonic() + IN_USE_S / 3
                    return False
            self._num_left -= 1
            self._used_bytes += num_bytes
            self._writing += num_bytes
            return True


def _take_turn(path: Path, seconds: float) -> float:
    """Take the next `seconds` of a line in which all processes stand. Returns how long it is until they begin."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # for microseconds; the kernel frees it when a process ends
        found, now = os.pread(fd, _TIME.size, 0), time.time()
        end = _TIME.unpack(found)[0] if len(found) == _TIME.size else now
        start = end if now < end < now + MAX_LINE_S else now
        os.pwrite(fd, _TIME.pack(start + seconds), 0)
        return float(start - now)
    finally:
        os.close(fd)


def _is_claimed(path: Path) -> bool:
    """Whether a process is making a file."""
    try:
        fd = os.open(path.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether this process is to make a file: it is not there, and no other is at it."""
    os.makedirs(path.parent, exist_ok=True)  # noqa: PTH103 (nothing to flush: what is lost is fetched again)
    lock = path.with_suffix(".lock")
    fd = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
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
