"""Cache parts of remote shards on a local disk, shared by all processes of a user on a machine.

A part is a run of samples of a shard, with the tar block after the last sample. The file of a part is
`<dir>/<digest>/<first byte>-<end byte>.part`. The digest is computed from the shard's sha256 in its index and the
object's ETag (URL and time of change if the store has no ETags), so different bytes never share a name. The file has
the bytes of the part, then XXH3-64 of each sample with the tar block after it (uint64, little-endian). The name of the
part and the number of the sample are hashed too, so a file that was renamed is detected.

The checksums detect damage but not forgery. So the cache's folder, the shard's folder and the file must belong to the
user, other users must not have write access, and links are not followed.

The process that fetches a part holds a lock file, which the kernel frees when the process ends. Other processes wait
up to `CLAIM_S` for the part, and then read from the store. A file gets its name when it is complete. A damaged part is
removed and fetched again.

If the cache is full, random parts of the least recently used half are removed. Always removing the oldest part would be
wrong for data that is read again in the same order: each part would go just before its use.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import random
import re
import secrets
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import xxhash

from wdskit.errors import StorageError
from wdskit.files import TEMP_PREFIX, Buffer, make_folders, owner_of_new_files
from wdskit.limits import BLOCK_BYTES

if TYPE_CHECKING:
    import asyncio

    from wdskit.storage.objects import Chunk, ObjectFile

MAX_OPEN = 128
"""Most parts that stay open in a process."""
FOLDER_MODE = 0o700
"""Mode of the cache's folders. Other users must not write to them, or read bytes that only this user may read."""
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

_SHARD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(\d+)-(\d+)\.part")
_log = logging.getLogger(__name__)
T = TypeVar("T")


class PartName(NamedTuple):
    """The name of a part, which is a run of samples of a shard.

    Attributes:
        shard: Digest of the shard, in hex.
        start: Offset of the first sample in the shard.
        stop: End of the last sample, without the tar block after it.
    """

    shard: str
    start: int
    stop: int

    def path(self, folder: Path) -> Path:
        """Return the path of the part's file in the cache `folder`."""
        return folder / self.shard / f"{self.start}-{self.stop}.part"


def part_bytes(name: PartName, num_samples: int) -> int:
    """Return the size in bytes of the file of a part."""
    return name.stop - name.start + BLOCK_BYTES + 8 * num_samples


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
        self._open: OrderedDict[PartName, _OpenPart] = OrderedDict()  # the least recently used first
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

    def has(self, name: PartName) -> bool:
        """Mark a part as used, and return True. Return False if the part is missing, cannot be opened now, or is cut or
        not private. Such a file is removed.
        """
        return self._use(name, lambda _: True) is not None

    def _use(self, name: PartName, use: Callable[[_OpenPart], T]) -> T | None:
        """Mark a part as used, and return `use(part)`. Return None as `read` does."""
        try:
            part = self._open_part(name)
            now = time.monotonic()
            if now - part.used_s > IN_USE_S / 2:
                part.used_s = now
                with contextlib.suppress(PermissionError):
                    os.utime(part.path, follow_symlinks=False)
            return use(part)
        except FileNotFoundError:  # perhaps another process removed the file
            self._forget(name)
        except OSError as err:  # for example no free descriptor: the part may be valid
            self._warn("parts cannot be read now", err)
        except DamagedPart as err:
            self._drop(name, str(err))
        return None

    def _open_part(self, name: PartName) -> _OpenPart:
        with self._lock:
            part = self._open.get(name)
            if part is not None:
                self._open.move_to_end(name)
                return part
        part = _OpenPart(name, self.folder, self._owner)
        with self._lock:
            self._open[name] = part
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return part

    def _forget(self, name: PartName) -> None:
        with self._lock:
            self._open.pop(name, None)  # frees the disk space of a removed file

    def read(self, name: PartName, number: int, start: int, stop: int) -> bytes | None:
        """Return the bytes of a sample and of the tar block after the sample.

        Return None if the part does not exist, cannot be read now, or is damaged. A damaged part is removed.

        Args:
            name: The part.
            number: Number of the sample in this part, from 0.
            start: Offset of the sample in the shard.
            stop: End of the sample in the shard.
        """
        return self._use(name, lambda part: part.read(number, start, stop))

    def _drop(self, name: PartName, problem: str) -> None:
        """Log `problem`, close a damaged part, and remove its file. The file stays if it cannot be removed, or if its
        folder is not private to the user. No error is raised.
        """
        _log.warning("%s It is fetched again.", problem)
        self._forget(name)
        path = name.path(self.folder)
        with contextlib.suppress(OSError):
            if _is_private_folder(path.parent, self._owner):
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
        from wdskit.storage.requests import loop_of_this_process

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
                await loop.run_in_executor(None, _write_part, self.folder, name, chunks, starts)
        finally:
            with self._space_lock:
                self._writing_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` for a new part and return True.

        If the cache is full, remove old parts, but no part that was used in the last `IN_USE_S` seconds. If this does
        not free enough, reserve nothing, make `keep` return False for `IN_USE_S / 3` seconds, and return False. For a
        part that is larger than the cache, only return False.
        """
        if num_bytes > self.num_bytes:
            return False
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
        if _is_private(folder.stat(), owner):
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
    if not _is_private_folder(path.parent, owner):
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


class DamagedPart(Exception):
    """The file of a part is damaged, does not match its name, or is not private. The caller may remove the file."""


class _OpenPart:
    """The open file of a part. The descriptor is closed with the last reference to this object.

    Args:
        name: The part.
        folder: The cache's folder.
        owner: The id of the user who must own the file.

    Attributes:
        path: Path of the file.
        used_s: When the file was last marked as used (`time.monotonic`); 0 if never.

    Raises:
        DamagedPart: The file is cut, a link, or not private to `owner`.
        OSError: The file does not exist, or cannot be opened now, although its bytes may be valid.
    """

    def __init__(self, name: PartName, folder: Path, owner: int) -> None:
        self._name = name
        self.path = name.path(folder)
        self.used_s = 0.0
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
            raise DamagedPart(f"{self.path}: it is a link.") from err
        weakref.finalize(self, os.close, self._fd)  # also when the program ends, before modules are unloaded
        status = os.fstat(self._fd)
        if not (
            stat.S_ISREG(status.st_mode)
            and _is_private(status, owner)
            and _is_private_folder(self.path.parent, owner)
            and status.st_size > part_bytes(name, 0)
        ):
            raise DamagedPart(f"{self.path}: it is cut, or a file that other users may write to.")

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return the bytes of a sample and of the tar block after the sample. The arguments are those of
        `PartCache.read`.

        Raises:
            DamagedPart: The bytes are damaged, or of another part.
            OSError: The file cannot be read now.
        """
        data = self._read_at(start - self._name.start, stop - start + BLOCK_BYTES)
        found = self._read_at(part_bytes(self._name, number), 8)
        if _checksum(self._name, number, [data]) != found:
            raise DamagedPart(f"{self.path}: its copy of sample {number} of the shard is damaged.")
        return data

    def _read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the file."""
        data = os.pread(self._fd, size, offset)
        while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
            data += more
        return data


def _write_part(folder: Path, name: PartName, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
    """Write the file of a part, and remove what killed processes wrote of it. If this fails, no file is left.

    Args:
        folder: The cache's folder, in which the folder of the shard exists.
        name: The part.
        chunks: Exactly the bytes of the part's samples and of the tar block after the last sample, sorted by offset.
        starts: Offsets of the part's samples in the shard, and the end of the last sample.

    Raises:
        OSError: The file cannot be written.
    """
    path = name.path(folder)
    for begun in path.parent.glob(f"{TEMP_PREFIX}{path.name}.*"):  # of a process that was killed
        if time.time() - begun.stat().st_mtime > CLAIM_S:
            begun.unlink()
    temp = path.with_name(f"{TEMP_PREFIX}{path.name}.{secrets.token_hex(4)}")  # another process may write the part too
    try:
        with temp.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.writelines(chunk.data for chunk in chunks)
            for number, (start, stop) in enumerate(itertools.pairwise(starts)):
                inside = [one for one in chunks if one.offset < stop + BLOCK_BYTES and start < one.stop]
                pieces = (one.data[max(0, start - one.offset) : stop + BLOCK_BYTES - one.offset] for one in inside)
                file.write(_checksum(name, number, pieces))
        temp.rename(path)  # not synced: checksums detect damage after a power cut
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def _checksum(name: PartName, number: int, pieces: Iterable[Buffer]) -> bytes:
    """Return the checksum of sample `number` of a part: 8 bytes. `pieces` are the bytes of the sample and of the tar
    block after it.
    """
    joined = xxhash.xxh3_64(f"{name.shard} {name.start} {name.stop} {number}".encode())
    for piece in pieces:
        joined.update(piece)
    return joined.intdigest().to_bytes(8, "little")


def _is_private(status: os.stat_result, owner: int) -> bool:
    """Return whether a file or folder belongs to the user `owner`, and no other user may write to it."""
    return status.st_uid == owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_private_folder(path: Path, owner: int) -> bool:
    """Return whether `path` is a folder, not a link, that is private to `owner`. OSError: `path` does not exist."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and _is_private(status, owner)


class PartFile(NamedTuple):
    """A file of the cache: its path, the name of its part, its size, and its last use in seconds since 1970."""

    path: Path
    name: PartName
    num_bytes: int
    used_s: float


def parts_of(folder: Path) -> Iterator[PartFile]:
    """Yield the parts in a cache folder, in any order. Yield nothing if the folder does not exist.

    Links, and files whose names are not names of parts, are ignored.
    """
    folders: list[os.DirEntry[str]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as shards:
        folders = [each for each in shards if _SHARD.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
    for shard in folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as files:
            for file in files:
                found = _NAME.fullmatch(file.name)
                if found is not None and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        name = PartName(shard.name, int(found[1]), int(found[2]))
                        yield PartFile(Path(file.path), name, status.st_size, status.st_mtime)
