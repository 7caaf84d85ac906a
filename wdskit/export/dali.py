"""DALI's index of a shard: a line a sample with extension, offset, size and name of each of its fields.

https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/dataloading_webdataset.html

Version 1.2 ends each field with the member's name, which a space in it breaks; 1.1 has no names and the same offsets.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from wdskit.dataset.keys import split_name
from wdskit.errors import FolderIndexError
from wdskit.files import Buffer
from wdskit.tar.window import Passed


@dataclass
class ShardMembers:
    """The members of one shard, in order, those that belong to no sample included; 16 bytes each besides its name.

    It is filled while the shard is written or read.

    Attributes:
        names: As their headers have them.
        offsets: Where their data start, in bytes.
        sizes: How long they are.
    """

    names: list[str] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, name: str, offset: int, data: Buffer) -> None:
        """Add a member.

        Args:
            name: As its header has it.
            offset: Of its data.
            data: Its bytes, or `Passed` where they were not kept.
        """
        self.names.append(name)
        self.offsets.append(offset)
        self.sizes.append(data.num_bytes if isinstance(data, Passed) else memoryview(data).nbytes)

    def samples(self) -> Iterator[list[int]]:
        """The numbers of the members of each sample."""
        splits = ((number, split_name(name)) for number, name in enumerate(self.names))
        members = ((number, split[0]) for number, split in splits if split is not None)
        for _, group in itertools.groupby(members, key=lambda member: member[1]):
            yield [number for number, _ in group]


def dali_index(members: ShardMembers, shard: str) -> bytes:
    """The index of a shard, in version 1.2 unless a name has white space.

    Args:
        members: What it holds.
        shard: Its path, for messages.

    Raises:
        FolderIndexError: A field has white space in its name, which no version can hold.
    """
    samples = list(members.samples())
    with_names = not any(map(_has_space, members.names))
    lines = [f"v1.{2 if with_names else 1} {len(samples)}"]
    for numbers in samples:
        parts = []
        for number in numbers:
            name = members.names[number]
            parts += [_extension(name, shard), str(members.offsets[number]), str(members.sizes[number])]
            parts += [name] if with_names else []
        lines.append(" ".join(parts))
    return ("\n".join(lines) + "\n").encode()


def dali_problem(data: bytes, members: ShardMembers, shard: str) -> str:
    """What is wrong with the index of a shard, "" where nothing is."""
    try:
        return "" if data == dali_index(members, shard) else "its offsets, sizes or names are not the shard's"
    except FolderIndexError as err:
        return str(err).partition("\n")[0]


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
