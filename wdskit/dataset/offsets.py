"""`<shard>.idx`: where each sample of a shard starts (Megatron-Energon's layout).

N+1 little-endian uint64: the offset of each sample's first header block, extension headers included, then the end of
the last member. No magic, so the numbers themselves are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import FolderIndexError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.limits import BLOCK_BYTES

SUFFIX = ".idx"


def offsets_path(shard: str | Path) -> Path:
    """Where the offsets of a shard stand: beside it."""
    return Path(f"{shard}{SUFFIX}")


def write_offsets(shard: Path, offsets: Sequence[int], *, disk: Disk = DISK) -> None:
    """Publish the offsets of a shard: one a sample, then the end of the last member."""
    publish_bytes(offsets_path(shard), np.asarray(offsets, dtype="<u8").tobytes(), disk=disk)


def read_offsets(shard: str | Path, *, num_bytes: int) -> NDArray[np.int64]:
    """The offsets of a local shard, N+1 int64 in bytes.

    Args:
        shard: Path of the shard.
        num_bytes: Its size, which the offsets must fit.

    Raises:
        FolderIndexError: There are none, or they cannot be those of this shard.
    """
    path = offsets_path(shard)
    folder = str(path.parent)
    try:
        data = path.read_bytes()
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}.\n  Run `wdskit index {folder}`."
        raise FolderIndexError(msg, folder=folder) from err
    offsets = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").astype(np.int64)
    problem = _problem(offsets, len(data), num_bytes)
    if problem:
        msg = f"{path}: {problem}, so it does not belong to {Path(shard).name}.\n  Run `wdskit index {folder}`."
        raise FolderIndexError(msg, folder=folder)
    return offsets


def _problem(offsets: NDArray[np.int64], idx_bytes: int, shard_bytes: int) -> str | None:
    """Why these numbers cannot be the offsets of a shard of `shard_bytes`."""
    if idx_bytes == 0 or idx_bytes % 8:
        return f"it has {idx_bytes} bytes, not 8 a sample and 8 more"
    if np.any(np.diff(offsets) <= 0) or offsets[0] < 0:
        return "its offsets do not rise"
    if np.any(offsets % BLOCK_BYTES):
        return "its offsets are no multiples of 512"
    if offsets[-1] + 2 * BLOCK_BYTES > shard_bytes:
        return f"its last offset {offsets[-1]} leaves no room for an end marker in {shard_bytes} bytes"
    return None
