"""One full read of a finished shard: everything that the index says of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from wdskit.dataset.grouping import ShardReader
from wdskit.dataset.identities import identity_of
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.offsets import digest_offsets
from wdskit.limits import MAX_CHECKED_BYTES, MAX_HELD_BYTES
from wdskit.storage.urls import LocalFile
from wdskit.tar.watch import OnMember


@dataclass(frozen=True)
class ScannedShard:
    """What a full read found.

    Attributes:
        entry: The shard's line in the index.
        offsets: Byte offset of each sample, then the end of the last member.
        num_ignored: Members that belong to no sample.
    """

    entry: ShardEntry
    offsets: tuple[int, ...]
    num_ignored: int


def scan_shard(path: str, *, name: str, on_member: OnMember | None = None) -> ScannedShard:
    """Read a local shard from end to end, every header, and digest its bytes in the same pass.

    Args:
        path: The file.
        name: What the index calls it.
        on_member: Told of each member; in place of the data of one over `limits.MAX_CHECKED_BYTES` comes `Passed`.

    Raises:
        ShardError: It is not right.
        StorageError: It cannot be read.
    """
    file = LocalFile(f"./{path}" if path.lower().startswith("file:") else path)  # a path, whatever it looks like
    digest = hashlib.sha256()
    num_bytes = 0

    def read(size: int) -> bytes:
        nonlocal num_bytes
        part = file.read(size)
        digest.update(part)
        num_bytes += len(part)
        return part

    fields: set[str] = set()
    identity = identity_of(file)
    try:
        hold_bytes = MAX_HELD_BYTES if on_member is None else MAX_CHECKED_BYTES  # who is told may want a JSON
        reader = ShardReader(read, shard=path, on_member=on_member, hold_bytes=hold_bytes)
        for sample in reader:
            fields.update(sample)
    finally:
        file.close()
    fields -= {"__key__", "__url__"}
    offsets = (*reader.starts, reader.stop)
    told = digest.hexdigest(), tuple(sorted(fields)), digest_offsets(offsets)
    entry = ShardEntry(name, reader.num_samples, num_bytes, *told, identity=identity)
    return ScannedShard(entry, offsets, reader.num_ignored)
