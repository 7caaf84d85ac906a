"""What files for other readers are made of: one record a shard, filled while the shard is written or read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from wdskit.dataset.keys import split_name
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES
from wdskit.tar.window import Passed


@dataclass
class ShardRecord:
    """The members of one shard, in order. A member takes some 100 bytes besides its name.

    Attributes:
        keep_json: Whether to keep the field `json` of each sample.
        names: Of all members, those that belong to no sample included.
        offsets: Where their data start, in bytes.
        sizes: How long they are.
        keys: Of the samples.
        documents: Their field `json`, None where they have none, it is not kept, or over `limits.MAX_CHECKED_BYTES`; as
            long as `keys`.
    """

    keep_json: bool = False
    names: list[str] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    keys: list[str] = field(default_factory=list)
    documents: list[bytes | None] = field(default_factory=list)

    def add(self, name: str, offset: int, data: Buffer) -> None:
        """Note one member.

        Args:
            name: As its header has it.
            offset: Of its data.
            data: Its bytes, or `Passed` where they were not kept.
        """
        self.names.append(name)
        self.offsets.append(offset)
        size = data.num_bytes if isinstance(data, Passed) else memoryview(data).nbytes
        self.sizes.append(size)
        split = split_name(name)
        if split is None:
            return
        if not self.keys or self.keys[-1] != split[0]:
            self.keys.append(split[0])
            self.documents.append(None)
        if self.keep_json and split[1] == "json" and size <= MAX_CHECKED_BYTES:
            self.documents[-1] = bytes(data)

    def samples(self) -> Iterator[list[int]]:
        """The numbers of the members of each sample."""
        key = None
        numbers: list[int] = []
        for number, name in enumerate(self.names):
            split = split_name(name)
            if split is None:
                continue
            if split[0] != key and numbers:
                yield numbers
                numbers = []
            key = split[0]
            numbers.append(number)
        if numbers:
            yield numbers
