"""DALI's index of a shard: a line a sample with extension, offset, size and name of each of its fields.

https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/dataloading_webdataset.html

Version 1.2 ends each field with the member's name, which a space in it breaks; 1.1 has no names and the same offsets.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from wdskit.dataset.keys import split_name
from wdskit.errors import FolderIndexError
from wdskit.files import Buffer
from wdskit.tar.window import Passed


@dataclass
class ShardMembers:
    """The members of one shard, in order, those that belong to no sample included; 16 bytes each besides its name.

    Attributes:
        names: As their headers have them.
        offsets: Where their data start, in bytes.
        sizes: How long they are.
    """

    names: list[str] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, name: str, offset: int, data: Buffer) -> None:
        """Add a member by its name, the offset of its data, and the data, or `Passed` where they were not kept."""
        self.names.append(name)
        self.offsets.append(offset)
        self.sizes.append(data.num_bytes if isinstance(data, Passed) else memoryview(data).nbytes)


def dali_index(members: ShardMembers, shard: str) -> bytes:
    """The index of a shard, in version 1.2 unless a name has white space.

    Args:
        members: What it holds.
        shard: Its path, for messages.

    Raises:
        FolderIndexError: A field has white space in its name, which no version can hold.
    """
    with_names = not any(map(_has_space, members.names))
    lines = [""]
    last = None
    for name, offset, size in zip(members.names, members.offsets, members.sizes, strict=True):
        split = split_name(name)
        if split is None:
            continue
        extension = name[len(split[0]) + 1 :]  # as it is written
        if _has_space(extension):
            msg = f"{shard}: DALI's index cannot hold the field {extension!r}, which has white space in its name."
            raise FolderIndexError(f"{msg}\n  Leave out `dali`, or rename the field.", folder=shard)
        words = f"{extension} {offset} {size}" + (f" {name}" if with_names else "")
        if split[0] == last:
            lines[-1] += f" {words}"
        else:
            lines.append(words)
        last = split[0]
    lines[0] = f"v1.{2 if with_names else 1} {len(lines) - 1}"
    return ("\n".join(lines) + "\n").encode()


def dali_problem(data: bytes, members: ShardMembers, shard: str) -> str:
    """What is wrong with the index of a shard, "" where nothing is."""
    try:
        return "" if data == dali_index(members, shard) else "its offsets, sizes or names are not the shard's"
    except FolderIndexError as err:
        return str(err).partition("\n")[0]


def _has_space(name: str) -> bool:
    return any(map(str.isspace, name))
