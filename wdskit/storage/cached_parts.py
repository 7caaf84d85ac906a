"""Name and format of the files of cached parts of remote shards.

A part is a run of samples of a shard, with the tar block after the last sample. The file of a part is
`<dir>/<digest>/<first byte>-<end byte>.part`. The digest is computed from the shard's sha256 in its index and the
object's ETag (URL and time of change if the store has no ETags), so different bytes never share a name. The file has:

- the bytes of the part,
- the offset of each sample in the shard, and the end of the last sample (uint64 each),
- XXH3-64 of each sample with the tar block after it (uint64 each),
- the digest (32 bytes), the first byte, the end byte, and the number of samples (uint64 each),
- XXH3-64 of everything after the bytes of the part, and 8 bytes of magic.

Numbers are little-endian. A file that was renamed is detected, because its name is inside.

The checksums detect damage but not forgery. So the cache's folder, the shard's folder and the file must belong to the
user, other users must not have write access, and links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from wdskit.files import TEMP_PREFIX, Buffer
from wdskit.limits import BLOCK_BYTES

if TYPE_CHECKING:
    from wdskit.storage.objects import Chunk

STALE_S = 3600.0
"""A temporary or lock file that is older belongs to a killed process, and may be removed."""

FOLDER_MODE = 0o700
"""Mode of the cache's folders. Other users must not write to them, or read bytes that only this user may read."""

_MAGIC = b"WDSKPRT3"
_RANGE = struct.Struct("<32sQQQ")
_END = struct.Struct("<Q8s")
_TRAILER_BYTES = _RANGE.size + _END.size
_SHARD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(\d+)-(\d+)\.part")
_TEMP_NAME = re.compile(rf"\d+-\d+\.lock|{re.escape(TEMP_PREFIX)}\d+-\d+\.part\.[0-9a-f]{{8}}")


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
    return name.stop - name.start + BLOCK_BYTES + 8 * (2 * num_samples + 1) + _TRAILER_BYTES


def is_private(status: os.stat_result, owner: int) -> bool:
    """Return whether a file or folder belongs to the user `owner`, and no other user may write to it."""
    return status.st_uid == owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_private_folder(path: Path, owner: int) -> bool:
    """Return whether `path` is a folder, not a link, that is private to `owner`. OSError: `path` does not exist."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and is_private(status, owner)


def write_part(folder: Path, name: PartName, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
    """Write the file of a part. If this fails, no file is left.

    Args:
        folder: The cache's folder, in which the folder of the shard exists.
        name: The part.
        chunks: Exactly the bytes of the part's samples and of the tar block after the last sample, sorted by offset.
        starts: Offsets of the part's samples in the shard, and the end of the last sample.

    Raises:
        OSError: The file cannot be written.
    """
    sums = [_checksum(chunks, start, stop + BLOCK_BYTES) for start, stop in itertools.pairwise(starts)]
    end = np.array(starts, dtype="<u8").tobytes() + np.array(sums, dtype="<u8").tobytes()
    end += _RANGE.pack(bytes.fromhex(name.shard), name.start, name.stop, len(sums))
    path = name.path(folder)
    temp = path.with_name(f"{TEMP_PREFIX}{path.name}.{secrets.token_hex(4)}")  # another process may write the part too
    try:
        with temp.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.writelines(chunk.data for chunk in chunks)
            file.write(end + _END.pack(_hash(end), _MAGIC))
        temp.rename(path)  # not synced: checksums detect damage after a power cut
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def _hash(*parts: Buffer) -> int:
    """Return XXH3-64 of the bytes of all parts, joined."""
    joined = xxhash.xxh3_64()
    for part in parts:
        joined.update(part)
    return joined.intdigest()


def _checksum(chunks: Sequence[Chunk], start: int, stop: int) -> int:
    """Return the checksum of the bytes from `start` to `stop` of a shard. `chunks` must have these bytes, sorted by
    offset.
    """
    inside = [chunk for chunk in chunks if chunk.offset < stop and start < chunk.stop]
    return _hash(*(chunk.data[max(0, start - chunk.offset) : stop - chunk.offset] for chunk in inside))


class DamagedPart(Exception):
    """The file of a part is damaged, does not match its name, or is not private. The caller may remove the file."""


class OpenFile:
    """An open file of a part. The descriptor is closed with the last reference to this object."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)  # also when the program ends, before modules are unloaded


class CachedPart:
    """A part on the disk. Its file was checked, and need not stay open.

    Args:
        name: The part.
        folder: The cache's folder.
        owner: The id of the user who must own the file.

    Attributes:
        path: Path of the file.
        opened: The file, if the cache keeps it open for later reads; otherwise None.
        used_s: When the file was last marked as used (`time.monotonic`); 0 if never.

    Raises:
        DamagedPart: The file is cut, damaged, renamed, a link, or not private to `owner`.
        OSError: The file does not exist, or cannot be read now, although its bytes may be valid.
    """

    def __init__(self, name: PartName, folder: Path, owner: int) -> None:
        self.name = name
        self.path = str(name.path(folder))
        self.used_s = 0.0
        self.opened: OpenFile | None = None
        self._owner = owner
        self._identity = -1, -1
        self.open()

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of this object, in bytes."""
        return int(self._sums.nbytes) + 1024

    def open(self) -> OpenFile:
        """Open the file and return it. The file in `opened` is neither used nor replaced.

        The file is checked if no file was checked before, or if another file has replaced the checked file.

        Raises:
            DamagedPart: The file is cut, damaged, renamed, a link, or not private to `owner`.
            OSError: The file does not exist, or cannot be read now, although its bytes may be valid.
        """
        try:
            file = OpenFile(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
            raise DamagedPart(f"{self.path}: it is a link.") from err
        status = os.fstat(file.fd)
        identity = status.st_dev, status.st_ino
        if identity != self._identity:
            if not (
                stat.S_ISREG(status.st_mode)
                and is_private(status, self._owner)
                and is_private_folder(Path(self.path).parent, self._owner)
                and self._read_trailer(file.fd, status.st_size)
            ):
                raise DamagedPart(f"{self.path}: it is damaged, renamed, or a file that other users may write to.")
            self._identity = identity
        return file

    def _read_trailer(self, fd: int, num_bytes: int) -> bool:
        """Read and store the checksums of the samples, and return True. Return False if the file is damaged or renamed.

        `num_bytes` is the size of the file.
        """
        data_bytes = self.name.stop - self.name.start + BLOCK_BYTES
        end = _read(fd, data_bytes, max(0, num_bytes - data_bytes))
        if len(end) < _TRAILER_BYTES:
            return False
        shard, start, stop, num = _RANGE.unpack_from(end, len(end) - _TRAILER_BYTES)
        checksum, magic = _END.unpack_from(end, len(end) - _END.size)
        if (magic, checksum) != (_MAGIC, _hash(end[: -_END.size])) or num_bytes != part_bytes(self.name, num):
            return False
        if PartName(shard.hex(), start, stop) != self.name:
            return False
        self._sums = np.frombuffer(end, dtype="<u8", count=num, offset=8 * (num + 1)).copy()
        return True

    def __len__(self) -> int:
        """Return the number of samples of the part."""
        return len(self._sums)

    def read(self, file: OpenFile, number: int, start: int, stop: int) -> bytes:
        """Return the bytes of a sample and of the tar block after the sample.

        Args:
            file: Result of `open`.
            number: Number of the sample in this part, from 0.
            start: Offset of the sample in the shard.
            stop: End of the sample in the shard.

        Raises:
            DamagedPart: The bytes are damaged.
            OSError: The file cannot be read now.
        """
        data = _read(file.fd, start - self.name.start, stop - start + BLOCK_BYTES)
        if _hash(data) != self._sums[number]:
            raise DamagedPart(f"{self.path}: its copy of sample {number} of the shard is damaged.")
        return data


def _read(fd: int, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset`; fewer bytes only at the end of the file."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


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
    for shard in _shards_of(folder):
        with contextlib.suppress(FileNotFoundError), os.scandir(shard) as files:
            for file in files:
                found = _NAME.fullmatch(file.name)
                if found is not None and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        name = PartName(shard.name, int(found[1]), int(found[2]))
                        yield PartFile(Path(file.path), name, status.st_size, status.st_mtime)


def _shards_of(folder: Path) -> Iterator[Path]:
    """Yield the folders of shards in a cache folder. Links are ignored. Yield nothing if the folder does not exist."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as shards:
        for shard in shards:
            if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                yield Path(shard.path)


def prune(folder: Path, num_bytes: int) -> list[PartFile]:
    """Remove the least recently used parts until the remaining parts have at most `num_bytes` bytes together.

    Parts in use are removed too. Return the removed parts, the least recently used first. Temporary files and lock
    files older than `STALE_S` seconds, and empty folders, are removed too.
    OSError: A file cannot be removed.
    """
    parts = sorted(parts_of(folder), key=lambda part: part.used_s)
    remaining = sum(part.num_bytes for part in parts)
    removed = []
    for part in parts:
        if remaining <= num_bytes:
            break
        part.path.unlink(missing_ok=True)
        remaining -= part.num_bytes
        removed.append(part)
    for shard in _shards_of(folder):
        for file in shard.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _TEMP_NAME.fullmatch(file.name) and time.time() - file.lstat().st_mtime > STALE_S:
                    file.unlink()
        with contextlib.suppress(OSError):  # the folder is not empty
            shard.rmdir()
    return removed
