"""Parts of remote shards as files in a folder: their names, and their format.

A part has consecutive samples of a shard and the block after the last one. Its file is
`<dir>/<digest>/<first byte>-<end byte>.part`, where the digest is computed from the shard's sha256 in its index and the
object's ETag (its URL and time of change if the store has no ETags). The file has these bytes; then the offset of each
sample in the shard and the end of the last one (uint64 each), CRC-32 of each sample with the block after it (uint32
each), and a trailer: the digest, the first byte and the end byte, the number of samples (uint64 each), CRC-32 of
everything after the samples, and 8 bytes of magic; little-endian. The name identifies the bytes: two data sets, or two
versions of an object, never share a file. The trailer repeats the name, so a renamed or exchanged file is found.

A part is used only by the user who wrote it, since its checksums find damage but not forgery. So the folder, the
shard's folder and the file belong to that user, other users have no write access, and links are not followed.
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
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wdskit.files import DRAFT_PREFIX
from wdskit.limits import BLOCK_BYTES

if TYPE_CHECKING:
    from wdskit.storage.objects import Chunk

LEFT_S = 3600.0
"""A draft or lock so old belongs to nobody."""

FOLDER_MODE = 0o700
"""Of the folders of a cache: no other user may write to them, or read what the store lets only this one read."""

_MAGIC = b"WDSKPRT2"
_RANGE = struct.Struct("<32sQQQ")
_END = struct.Struct("<I8s")
_TRAILER_BYTES = _RANGE.size + _END.size
_SHARD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(\d+)-(\d+)\.part")
_LEFT = re.compile(rf"\d+-\d+\.lock|{re.escape(DRAFT_PREFIX)}\d+-\d+\.part\.[0-9a-f]{{8}}")


class PartName(NamedTuple):
    """A range of a shard: its digest in hex, the first byte, and the end, without the block after the last sample."""

    shard: str
    start: int
    stop: int

    def path(self, folder: Path) -> Path:
        """Return the path of its file."""
        return folder / self.shard / f"{self.start}-{self.stop}.part"


def part_bytes(name: PartName, num_samples: int) -> int:
    """Size of the file of a part."""
    return name.stop - name.start + BLOCK_BYTES + 8 * (num_samples + 1) + 4 * num_samples + _TRAILER_BYTES


def is_private(status: os.stat_result, owner: int) -> bool:
    """Whether a file or folder belongs to a user, and no other user may write to it."""
    return status.st_uid == owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_private_folder(path: Path, owner: int) -> bool:
    """Whether a path is a folder, no link to one, that is private to a user. Raises `OSError` if it does not exist."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and is_private(status, owner)


def write_part(folder: Path, name: PartName, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
    """Write the file of a part, all of it or nothing. It is not flushed: after a power cut, the checksums find damage.

    Args:
        folder: The cache's folder. The folder of the shard exists.
        name: The part.
        chunks: Its bytes with the block after them.
        starts: Offsets of its samples in the shard, and the end of the last one.

    Raises:
        OSError: The file cannot be written.
    """
    sums = [_sum(chunks, start, stop + BLOCK_BYTES) for start, stop in itertools.pairwise(starts)]
    end = np.array(starts, dtype="<u8").tobytes() + np.array(sums, dtype="<u4").tobytes()
    end += _RANGE.pack(bytes.fromhex(name.shard), name.start, name.stop, len(sums))
    path = name.path(folder)
    temp = path.with_name(f"{DRAFT_PREFIX}{path.name}.{secrets.token_hex(4)}")  # another process may be at it too
    try:
        with temp.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.writelines(chunk.data for chunk in chunks)
            file.write(end + _END.pack(zlib.crc32(end), _MAGIC))
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def _sum(chunks: Sequence[Chunk], start: int, stop: int) -> int:
    """Return CRC-32 of a range of a shard."""
    found = 0
    for chunk in chunks:
        if chunk.offset < stop and start < chunk.stop:
            found = zlib.crc32(chunk.data[max(0, start - chunk.offset) : stop - chunk.offset], found)
    return found


class DamagedPart(Exception):
    """A file does not match its name. It can be removed."""


class CachedPart:
    """An open part.

    Args:
        name: Which.
        folder: The cache's.
        owner: The user who wrote it.

    Raises:
        DamagedPart: The file is not this part as this user wrote it: it is cut, exchanged, a link, or of another user.
        OSError: It does not exist, or cannot be read now. That says nothing about its bytes.
    """

    def __init__(self, name: PartName, folder: Path, owner: int) -> None:
        self.name = name
        self.used_s = 0.0  # when its file was last marked as used
        self.path = path = name.path(folder)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
            raise DamagedPart(f"{path}: it is a link.") from err
        self.fd = fd
        weakref.finalize(self, os.close, fd)  # at the end of the program too, before its modules are gone
        status = os.fstat(fd)
        if not (
            stat.S_ISREG(status.st_mode)
            and is_private(status, owner)
            and is_private_folder(path.parent, owner)
            and self._read_end(status.st_size)
        ):
            raise DamagedPart(f"{path}: it is damaged, renamed, or a file that other users may write to.")

    def _read_end(self, num_bytes: int) -> bool:
        """Read the checksums of the samples. False if the file is not the part that its name says."""
        data_bytes = self.name.stop - self.name.start + BLOCK_BYTES
        end = _read(self.fd, data_bytes, max(0, num_bytes - data_bytes))
        if len(end) < _TRAILER_BYTES:
            return False
        shard, start, stop, num = _RANGE.unpack_from(end, len(end) - _TRAILER_BYTES)
        crc, magic = _END.unpack_from(end, len(end) - _END.size)
        if (magic, crc) != (_MAGIC, zlib.crc32(end[: -_END.size])) or num_bytes != part_bytes(self.name, num):
            return False
        self._sums = np.frombuffer(end, dtype="<u4", count=num, offset=8 * (num + 1))
        return PartName(shard.hex(), start, stop) == self.name

    def __len__(self) -> int:
        """Samples in it."""
        return len(self._sums)

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return a sample with the block after it.

        Args:
            number: Number of the sample in this part.
            start: Its offset in the shard.
            stop: Its end in the shard.

        Raises:
            DamagedPart: The bytes are damaged.
            OSError: The file cannot be read now.
        """
        data = _read(self.fd, start - self.name.start, stop - start + BLOCK_BYTES)
        if zlib.crc32(data) != self._sums[number]:
            raise DamagedPart(f"{self.path}: its copy of sample {number} of the shard is damaged.")
        return data


def _read(fd: int, offset: int, size: int) -> bytes:
    """`size` bytes of a file, fewer only if it ends."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


class PartFile(NamedTuple):
    """A file of the cache: which part, its size, and when it was last used, in seconds since 1970."""

    path: Path
    name: PartName
    num_bytes: int
    used_s: float


def parts_of(folder: Path) -> Iterator[PartFile]:
    """The parts below a folder. Files of other names are passed over, and links are not followed."""
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
    """The folders of shards below a folder; no links to folders."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as shards:
        for shard in shards:
            if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                yield Path(shard.path)


def prune(folder: Path, num_bytes: int) -> list[PartFile]:
    """Remove the least recently used parts until at most `num_bytes` remain, and temporary files of killed processes.
    Return the removed files.
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
    for shard in _shards_of(folder):
        for file in shard.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _LEFT.fullmatch(file.name) and time.time() - file.lstat().st_mtime > LEFT_S:
                    file.unlink()
        with contextlib.suppress(OSError):  # there is something in it
            shard.rmdir()
    return removed
