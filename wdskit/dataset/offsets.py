"""`<shard>.idx`: where each sample of a shard starts (Megatron-Energon's layout).

N+1 little-endian uint64: the offset of each sample's first header block, extension headers included, then the end of
the last member. No magic, so the numbers themselves are checked; the folder's index has their sha256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import FolderIndexError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.limits import BLOCK_BYTES, MAX_IDX_BYTES

SUFFIX = ".idx"


def offsets_path(shard: str | Path) -> Path:
    """Where the offsets of a shard stand: beside it."""
    return Path(f"{shard}{SUFFIX}")


def write_offsets(shard: Path, offsets: Sequence[int], *, disk: Disk = DISK) -> None:
    """Publish the offsets of a shard: one a sample, then the end of the last member."""
    publish_bytes(offsets_path(shard), _packed(offsets), disk=disk)


def digest_offsets(offsets: Sequence[int]) -> str:
    """Hex sha256 of the file that `write_offsets` makes."""
    return hashlib.sha256(_packed(offsets)).hexdigest()


def _packed(offsets: Sequence[int]) -> bytes:
    return np.asarray(offsets, dtype="<u8").tobytes()


def read_offsets(shard: str | Path, *, num_bytes: int, sha256: str | None = None) -> NDArray[np.int64]:
    """The offsets of a local shard, N+1 int64 in bytes.

    Args:
        shard: Path of the shard.
        num_bytes: Its size, which the offsets must fit.
        sha256: Hex digest that their file must have, None where it is not known.

    Raises:
        FolderIndexError: There are none, or they cannot be those of this shard.
    """
    path = offsets_path(shard)
    most = min(8 * (num_bytes // BLOCK_BYTES + 1), MAX_IDX_BYTES)  # a sample takes a block at least
    try:
        with path.open("rb") as file:
            idx_bytes = os.fstat(file.fileno()).st_size
            data = file.read(idx_bytes) if idx_bytes <= most else b""  # never as many as a damaged index lets expect
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}.\n  Run `wdskit index {path.parent}`."
        raise FolderIndexError(msg, folder=str(path.parent)) from err
    problem = _size_problem(max(len(data), idx_bytes), most) or _problem(np.frombuffer(data, dtype="<u8"), num_bytes)
    if not problem and sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        problem = "it is not the file that the folder's index was made with"
    if problem:
        raise foreign_offsets(shard, problem)
    return np.frombuffer(data, dtype="<u8").astype(np.int64)


def foreign_offsets(shard: str | Path, problem: str) -> FolderIndexError:
    """The error of offsets that cannot be those of `shard`."""
    path = offsets_path(shard)
    msg = f"{path}: {problem}, so it does not belong to {Path(shard).name}.\n  Run `wdskit index {path.parent}`."
    return FolderIndexError(msg, folder=str(path.parent))


def _size_problem(idx_bytes: int, most: int) -> str | None:
    if idx_bytes > most:
        return f"it has more than {most} bytes, the most that the offsets of its shard can take"
    return f"it has {idx_bytes} bytes, not 8 a sample and 8 more" if idx_bytes == 0 or idx_bytes % 8 else None


def _problem(offsets: NDArray[np.uint64], shard_bytes: int) -> str | None:
    """Why these numbers cannot be the offsets of a shard of `shard_bytes`."""
    if np.any(offsets[1:] <= offsets[:-1]):
        return "its offsets do not rise"
    if np.any(offsets % np.uint64(BLOCK_BYTES)):
        return "its offsets are no multiples of 512"
    if int(offsets[-1]) + 2 * BLOCK_BYTES > shard_bytes:
        return f"its last offset {offsets[-1]} leaves no room for an end marker in {shard_bytes} bytes"
    return None
