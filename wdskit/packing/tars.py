"""Rows from tars: their samples, whose bytes are copied from where they stand."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from wdskit.dataset.classes import read_classes
from wdskit.dataset.grouping import HeaderReader
from wdskit.dataset.patterns import list_shards
from wdskit.dataset.unfinished import refuse_part
from wdskit.errors import PackError, RowError
from wdskit.packing.members import row_or_error
from wdskit.packing.references import PartBytes
from wdskit.packing.rows import Row
from wdskit.storage.urls import LocalFile, is_local, local_path


class Tars:
    """Local tars, as `dataset.patterns.list_shards` finds them.

    Attributes:
        num_other: Members read so far that belong to no sample.
        classes: Number of each class by name, where all folders of the tars have the same `classes.json`.

    Raises:
        PackError: One is not on this machine.
        StorageError: There are none.
        FolderIndexError: They are what a run has come to that is not finished; or their `classes.json` does not read.
    """

    def __init__(self, shards: str) -> None:
        found = list_shards(shards)
        remote = next((url for url in found.urls if not is_local(url)), None)
        if remote is not None:
            raise PackError(f"{remote}: only local tars can be packed. Fetch it first.")
        refuse_part(shards, found)
        self._paths = [local_path(url) for url in found.urls]
        self.num_other = 0
        self.classes = _classes_of({Path(path).parent for path in self._paths})

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a sample, in their order: its members are its fields.

        Raises:
            ShardError: A tar is not right.
            StorageError: One cannot be read.
        """
        for path in self._paths:
            file = LocalFile(path)
            try:
                status = os.fstat(file.fd)
                samples = HeaderReader(file, shard=path)
                for sample in samples:
                    fields = (
                        (name, PartBytes(path, span.size, span.offset, status.st_size, status.st_mtime_ns))
                        for name, span in sample.items()
                        if not name.startswith("__")
                    )
                    yield row_or_error(sample["__key__"], fields, path, keys)
                self.num_other += samples.num_ignored
            finally:
                file.close()


def _classes_of(folders: Collection[Path]) -> dict[str, int]:
    """The classes that the labels of all these folders stand for; none where one has no names, or others.

    Raises:
        FolderIndexError: As `read_classes`.
    """
    first, *others = {read_classes(folder) for folder in folders}
    if others or first is None or len({*first}) < len(first):
        return {}
    return {name: number for number, name in enumerate(first)}
