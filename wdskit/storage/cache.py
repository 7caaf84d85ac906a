"""Parts of remote shards that are kept on a local disk, shared by all processes of a machine.

A part is consecutive samples of a shard and the block behind the last. Its file is
`<dir>/<digest>/<first byte>-<byte behind>.part`, where the digest is that of the shard's sha256 in its index and of the
object's ETag (of its URL and time of change, where the store has no ETags). It holds those bytes, then where each
sample starts in the shard and where the last ends (uint64 each), CRC-32 of each sample with the block behind it (uint32
each), the number of samples (uint64), and 8 bytes of magic; little-endian. The name says which bytes they are: two data
sets, and two objects of which one replaced the other, never meet in one file.

There is no daemon and nothing is waited for. Who fetches a part holds a lock file that the kernel frees when the
process ends; the others read what they need from the store meanwhile. A part appears under its name when it is whole.
One that is damaged is removed, and fetched again.

Where the folder is full, parts that were not used for long make room: a random one of the half that was used longest
ago. The part that was used longest ago is the wrong one where the data is read again and again in the same order: each
would go just before it is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import random
import re
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wdskit.errors import StorageError
from wdskit.files import DRAFT_PREFIX, make_folders, own_temp_files, publish_bytes
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.urls import LocalFile

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

MAX_OPEN = 128
"""Parts that stay open in a process."""
MAX_FETCHING = 4
"""Parts that a process fetches at once, so that single samples do not wait for them."""
SCAN_EVERY = 8
"""Parts that a process keeps before it counts again what others keep."""
IN_USE_S = 30.0
"""A part that was used so lately makes no room."""
LEFT_S = 3600.0
"""A draft or lock so old belongs to nobody."""
WAIT_S = 0.01
RATE_NAME = "rate"
"""File in a cache's folder: the time until which fetches have been given their share of the rate, float64."""
MAX_LINE_S = 3600.0
"""A line of fetches is never longer: the clock was set back, and nobody waits for that."""
FULL_S = 60.0
"""How long nothing is kept after the disk was full."""

_MAGIC = b"WDSKPRT1"
_END = struct.Struct("<Q8s")
_TIME = struct.Struct("<d")
_SHARD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(\d+)-(\d+)\.part")
_log = logging.getLogger(__name__)


class PartName(NamedTuple):
    """Which bytes of which shard: its digest in hex, the first byte, and the one behind the last, without the block."""

    shard: str
    start: int
    stop: int

    def path(self, folder: Path) -> Path:
        """Where its file is."""
        return folder / self.shard / f"{self.start}-{self.stop}.part"


class Part:
    """An open part.

    Args:
        name: Which.
        path: Its file.

    Raises:
        StorageError: There is no such file, or it is damaged.
    """

    def __init__(self, name: PartName, path: Path) -> None:
        self.name = name
        self.used_s = 0.0  # when its file was last marked as used
        self.file = LocalFile(str(path))
        size, end = self.file.num_bytes, self.file.read_whole(max(0, self.file.num_bytes - _END.size), _END.size)
        num, magic = _END.unpack(end.rjust(_END.size))
        data_bytes = name.stop - name.start + BLOCK_BYTES
        if magic != _MAGIC or size != data_bytes + 8 * (num + 1) + 4 * num + _END.size:
            self.file.close()
            raise StorageError(f"{path}: it is damaged.", url=str(path))
        self._starts = np.frombuffer(self.file.read_whole(data_bytes, 8 * (num + 1)), dtype="<u8")
        self._sums = np.frombuffer(self.file.read_whole(data_bytes + 8 * (num + 1), 4 * num), dtype="<u4")

    def __len__(self) -> int:
        """Samples in it."""
        return len(self._sums)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def read(self, number: int, start: int, stop: int) -> bytes | None:
        """A sample with the block behind it; None where it is damaged.

        Args:
            number: Of the sample in this part.
            start: Where it starts in the shard.
            stop: Where it ends.
        """
        data = self.file.read_whole(start - self.name.start, stop - start + BLOCK_BYTES)
        return data if zlib.crc32(data) == self._sums[number] else None

    def is_right(self) -> bool:
        """Whether all of it is as it was written."""
        starts = self._starts.tolist()
        pairs = list(itertools.pairwise(starts))
        if (starts[0], starts[-1]) != self.name[1:] or any(start >= stop for start, stop in pairs):
            return False
        return all(self.read(number, *pair) is not None for number, pair in enumerate(pairs))


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
            msg = f"{self.folder}: the cache cannot be kept there: {err.strerror}."
            raise StorageError(f"{msg}\n  Name another folder in cache.dir.", url=str(folder)) from err
        self._open: OrderedDict[PartName, Part] = OrderedDict()
        self._wanted: set[PartName] = set()
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._slots: asyncio.Semaphore | None = None
        self._used_bytes = 0  # of all parts, by the last count and what was kept since
        self._writing = 0  # of those that are being written
        self._num_left = 0  # parts that may be kept before they are counted again
        self._full_until = 0.0

    def __reduce__(self) -> tuple[object, tuple[Path, int, int | None]]:
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

    def keep(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        """Begin to fetch a part, unless that has begun.

        Args:
            name: Which.
            file: The shard.
            starts: Where its samples start in the shard, and where the last ends.
        """
        from wdskit.storage.requests import loop_of_this_process  # which needs obstore

        if time.monotonic() < self._full_until:
            return
        loop = loop_of_this_process(file.url)
        with self._lock:
            if name in self._wanted:
                return
            self._wanted.add(name)
        loop.submit(self._fetch(name, file, starts))

    def wait(self, num: int = 0) -> None:
        """Until no more than so many parts are on their way."""
        while len(self._wanted) > num:
            time.sleep(WAIT_S)

    async def _fetch(self, name: PartName, file: ObjectFile, starts: Sequence[int]) -> None:
        self._slots = self._slots or asyncio.Semaphore(MAX_FETCHING)
        loop = asyncio.get_running_loop()
        num_bytes = name.stop - name.start + BLOCK_BYTES + 12 * len(starts) + 12
        try:
            async with self._slots:
                with _claimed(name.path(self.folder)) as is_mine:
                    if not is_mine or not await loop.run_in_executor(None, self._make_room, num_bytes):
                        return
                    try:
                        if self.max_rate is not None:
                            await asyncio.sleep(_take_turn(self.folder / RATE_NAME, num_bytes / self.max_rate))
                        chunks = await asyncio.wrap_future(file.start_reading([(name.start, name.stop + BLOCK_BYTES)]))
                        data = b"".join(chunk.data for chunk in chunks)
                        if len(data) == name.stop - name.start + BLOCK_BYTES:
                            await loop.run_in_executor(None, self._publish, name, data, starts)
                    finally:
                        with self._room:
                            self._writing -= num_bytes
        except StorageError as err:
            _log.info("%s It is not kept.", err)  # who reads a sample of it says so
        except OSError as err:
            if time.monotonic() >= self._full_until:
                _log.warning("%s: parts cannot be kept now: %s.", self.folder, err.strerror)
            self._full_until = time.monotonic() + FULL_S
        finally:
            with self._lock:
                self._wanted.discard(name)

    def _publish(self, name: PartName, data: bytes, starts: Sequence[int]) -> None:
        view = memoryview(data)
        ends = [start - name.start for start in starts]
        sums = [zlib.crc32(view[at : stop + BLOCK_BYTES]) for at, stop in itertools.pairwise(ends)]
        end = np.array(starts, dtype="<u8").tobytes() + np.array(sums, dtype="<u4").tobytes()
        with own_temp_files():  # another process may fetch it too, where a claim was lost
            publish_bytes(name.path(self.folder), data + end + _END.pack(len(sums), _MAGIC))

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


class PartFile(NamedTuple):
    """A file of the cache: which part, its size, and when it was last used, in seconds since 1970."""

    path: Path
    name: PartName
    num_bytes: int
    used_s: float


def parts_of(folder: Path) -> Iterator[PartFile]:
    """The parts below a folder. Files of other names are passed over."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as shards:
        for shard in shards:
            if not _SHARD.fullmatch(shard.name):
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(shard.path) as files:
                for file in files:
                    found = _NAME.fullmatch(file.name)
                    if found is not None:
                        with contextlib.suppress(FileNotFoundError):
                            status = file.stat()
                            name = PartName(shard.name, int(found[1]), int(found[2]))
                            yield PartFile(Path(file.path), name, status.st_size, status.st_mtime)


def prune(folder: Path, num_bytes: int) -> list[PartFile]:
    """Remove the parts that were not used for longest, until no more than so many bytes are left, and what processes
    that were killed have left behind. Gives what was removed.
    """
    parts = sorted(parts_of(folder), key=lambda part: part.used_s)
    left = sum(part.num_bytes for part in parts)
    removed = []
    for part in parts:
        if left <= num_bytes:
            break
        part.path.unlink(missing_ok=True)
        left -= part.num_bytes
        removed.append(part)
    for shard in folder.iterdir():
        if _SHARD.fullmatch(shard.name):
            for file in shard.iterdir():
                is_left = file.suffix == ".lock" or file.name.startswith(DRAFT_PREFIX)
                if is_left and time.time() - file.stat().st_mtime > LEFT_S:
                    file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is something in it
                shard.rmdir()
    return removed


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
