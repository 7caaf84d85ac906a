"""DALI's index of a shard: a line a sample with extension, offset, size and name of each of its fields.

https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/dataloading_webdataset.html

Version 1.2 ends each field with the member's name, which a space in it breaks; 1.1 has no names and the same offsets.
"""

from __future__ import annotations

from wdskit.dataset.keys import split_name
from wdskit.errors import FolderIndexError
from wdskit.shards.also_record import ShardRecord


def dali_index(record: ShardRecord, shard: str) -> bytes:
    """The index of a shard, in version 1.2 unless a name has white space.

    Args:
        record: Its members.
        shard: Its path, for messages.

    Raises:
        FolderIndexError: A field has white space in its name, which no version can hold.
    """
    samples = list(record.samples())
    with_names = not any(map(_has_space, record.names))
    lines = [f"v1.{2 if with_names else 1} {len(samples)}"]
    for numbers in samples:
        parts = []
        for number in numbers:
            name = record.names[number]
            parts += [_extension(name, shard), str(record.offsets[number]), str(record.sizes[number])]
            parts += [name] if with_names else []
        lines.append(" ".join(parts))
    return ("\n".join(lines) + "\n").encode()


def _has_space(name: str) -> bool:
    return any(map(str.isspace, name))


def _extension(name: str, shard: str) -> str:
    """What stands behind the key and its dot, as it is written."""
    split = split_name(name)
    assert split is not None
    extension = name[len(split[0]) + 1 :]
    if _has_space(extension):
        msg = f"{shard}: DALI's index cannot hold the field {extension!r}, which has white space in its name."
        raise FolderIndexError(f"{msg}\n  Leave out `dali`, or rename the field.", folder=shard)
    return extension
