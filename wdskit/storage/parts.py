"""Parts of remote shards as files below a folder: their names, their format, and what is there.

A part is consecutive samples of a shard and the block behind the last. Its file is
`<dir>/<digest>/<first byte>-<byte behind>.part`, where the digest is that of the shard's sha256 in its index and of the
object's ETag (of its URL and time of change, where the store has no ETags). It holds those bytes, then where each
sample starts in the shard and where the last ends (uint64 each), CRC-32 of each sample with the block behind it (uint32
each), the number of samples (uint64), and 8 bytes of magic; little-endian. The name says which bytes they are: two data
sets, and two objects of which one replaced the other, never meet in one file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wdskit.errors import StorageError
from wdskit.files import DRAFT_PREFIX
from wdskit.limits import BLOCK_BYTES
from wdskit.storage.urls import LocalFile

if TYPE_CHECKING:
    from wdskit.storage.objects import Chunk

LEFT_S = 3600.0
"""A draft or lock so old belongs to nobody."""

_MAGIC = b"WDSKPRT1"
_END = struct.Struct("<Q8s")
_SHARD = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"(\d+)-(\d+)\.part")


class PartName(NamedTuple):
    """Which bytes of which shard: its digest in hex, the first byte, and the one behind the last, without the block."""

    shard: str
    start: int
    stop: int

    def path(self, folder: Path) -> Path:
        """Where its file is."""
        return folder / self.shard / f"{self.start}-{self.stop}.part"


def write_part(folder: Path, name: PartName, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
    """Write the file of a part: all of it or nothing. It is not flushed: what a power cut leaves does not fit its sums.

    Args:
        folder: The cache's. The folder of the shard is there.
        name: Which.
        chunks: Its bytes with the block behind them.
        starts: Where its samples start in the shard, and where the last ends.

    Raises:
        OSError: The disk refuses it.
    """
    sums = [_sum(chunks, start, stop + BLOCK_BYTES) for start, stop in itertools.pairwise(starts)]
    end = np.array(starts, dtype="<u8").tobytes() + np.array(sums, dtype="<u4").tobytes()
    path = name.path(folder)
    temp = path.with_name(f"{DRAFT_PREFIX}{path.name}.{secrets.token_hex(4)}")  # another process may be at it too
    try:
        with temp.open("xb") as file:
            for chunk in chunks:
                file.write(chunk.data)
            file.write(end + _END.pack(len(sums), _MAGIC))
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def _sum(chunks: Sequence[Chunk], start: int, stop: int) -> int:
    """CRC-32 of some bytes of a shard."""
    found = 0
    for chunk in chunks:
        if chunk.offset < stop and start < chunk.stop:
            found = zlib.crc32(chunk.data[max(0, start - chunk.offset) : stop - chunk.offset], found)
    return found


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
        weakref.finalize(self, self.file.close)  # at the end of the program too, before its modules are gone
        self._starts = np.frombuffer(self.file.read_whole(data_bytes, 8 * (num + 1)), dtype="<u8")
        self._sums = np.frombuffer(self.file.read_whole(data_bytes + 8 * (num + 1), 4 * num), dtype="<u4")

    def __len__(self) -> int:
        """Samples in it."""
        return len(self._sums)

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
