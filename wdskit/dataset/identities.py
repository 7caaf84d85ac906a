"""`.wdskit.files`: which files an index was made of, by inode and time of change, where it was made.

A shard that was replaced by one of its size, or written anew in its place, is another file. What the index publishes
cannot say so, since copies of a folder are other files too. So this stands beside it, and begins with the identity of
`index.bin`; both are there before `index.json` is. In a copy that kept the times (`cp -a`, `rsync -a`) the times are
compared alone; in one that did not, nothing is known.

Little-endian: magic `WDSKFIL1`, sha256 of the rest; inode and mtime_ns of `index.bin`, uint64 each, then of each shard
in its order, zeros where they are not known.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import ShardError
from wdskit.files import Disk, publish_bytes
from wdskit.storage.urls import LocalFile

logger = logging.getLogger(__name__)

IDENTITIES_NAME = ".wdskit.files"

_MAGIC = b"WDSKFIL1"
_HEAD_BYTES = len(_MAGIC) + 32

Identity = tuple[int, int]
"""Inode and mtime_ns, as a number of 64 bits without a sign."""

UNKNOWN: Identity = (0, 0)
"""Nobody knows which file the index was made of; it stays so until the shard is read anew. An inode of 0 alone says
that the time is known and the inode is not."""


def write_identities(index: Path, shards: Sequence[tuple[str, Identity | None]], *, disk: Disk) -> None:
    """Publish the identities of an `index.bin` that has just been published, and of the shards beside it.

    Args:
        index: Its path.
        shards: Name and identity of each; of None, that of the file that is there now.
        disk: What writes.
    """
    try:
        found = [_identity(index.stat())]
        found += [_identity((index.parent / name).stat()) if told is None else told for name, told in shards]
    except OSError:
        disk.remove(index.parent / IDENTITIES_NAME)  # a shard is gone: whoever reads it is told so
        return
    rest = np.array(found, dtype="<u8").tobytes()
    publish_bytes(index.parent / IDENTITIES_NAME, _MAGIC + hashlib.sha256(rest).digest() + rest, disk=disk)


def read_identities(index: Path, num_shards: int) -> NDArray[np.uint64] | None:
    """The identities of an index's shards, (num_shards, 2); None where they are not known, as in a copy of a folder."""
    try:
        data = (index.parent / IDENTITIES_NAME).read_bytes()
        own = _identity(index.stat())
    except OSError:
        return None
    rest = data[_HEAD_BYTES:]
    if data[:_HEAD_BYTES] != _MAGIC + hashlib.sha256(rest).digest() or len(rest) != 16 * (num_shards + 1):
        return None
    found = np.frombuffer(rest, dtype="<u8").reshape(-1, 2)
    inode, mtime_ns = found[0].tolist()
    if (inode, mtime_ns) == own:
        return found[1:]
    if mtime_ns == own[1]:
        return found[1:] * np.array([0, 1], dtype=np.uint64)
    logger.info(
        "%s was copied or changed since it was made: its shards are compared by size, headers and keys; "
        "`wdskit verify` compares all bytes, and `wdskit index` notes the files that are here",
        index,
    )
    return None


def identity_of(file: LocalFile) -> Identity:
    """The identity of an open file."""
    return _identity(os.fstat(file.fd))


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_mtime_ns % (1 << 64)


def check_digest(file: LocalFile, sha256: str) -> None:
    """Compare all bytes of a shard with the index.

    Raises:
        ShardError: They are others.
        StorageError: It cannot be read.
    """
    digest = hashlib.sha256()
    num_bytes = 0
    while part := file.read_at(num_bytes, 1 << 20):
        digest.update(part)
        num_bytes += len(part)
    if digest.hexdigest() != sha256:
        raise changed_bytes(file.url, num_bytes, digest.hexdigest(), sha256)


def changed_bytes(url: str, num_bytes: int, found: str, expected: str) -> ShardError:
    """The error of a shard whose bytes are not those that the index has the digest of."""
    problem = f"its sha256 {found[:12]}... is not {expected[:12]}... of the index"
    remedy = "It was damaged or replaced. Fetch it again, or run `wdskit index` if it is right."
    return ShardError(shard=url, offset=num_bytes, problem=problem, remedy=remedy)


class Verified:
    """Takes the digest of shards that are other files than the index was made of, of each such file once."""

    def __init__(self) -> None:
        self._known: dict[str, Identity] = {}

    def check(self, file: LocalFile, identity: Identity | None, sha256: str) -> None:
        """Compare a shard that was opened with what the index was made of; None says nothing.

        Raises:
            ShardError: It is another file, with other bytes.
        """
        if identity in (None, UNKNOWN):
            return
        now = identity_of(file)
        if now in (identity, self._known.get(file.url)) or (0, now[1]) == identity:
            return
        check_digest(file, sha256)
        self._known[file.url] = now
        logger.warning(
            "%s was replaced or touched since it was indexed; its sha256 is still that of the index. `wdskit index` "
            "spares the next process to look",
            file.url,
        )
