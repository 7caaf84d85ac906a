"""Rows from tars: their samples, whose bytes are copied from where they stand."""

from __future__ import annotations

import os
from collections.abc import Iterator

from wdskit.dataset.grouping import HeaderReader
from wdskit.dataset.patterns import list_shards
from wdskit.errors import PackError, RowError
from wdskit.packing.members import row_or_error
from wdskit.packing.references import PartBytes
from wdskit.packing.rows import Row
from wdskit.storage.urls import LocalFile, is_local, local_path


class Tars:
    """Local tars, as `dataset.patterns.list_shards` finds them.

    Attributes:
        num_other: Members read so far that belong to no sample.

    Raises:
        PackError: One is not on this machine.
        StorageError: There are none.
    """

    def __init__(self, shards: str) -> None:
        urls = list_shards(shards).urls
        remote = next((url for url in urls if not is_local(url)), None)
        if remote is not None:
            raise PackError(f"{remote}: only local tars can be packed. Fetch it first.")
        self._paths = [local_path(url) for url in urls]
        self.num_other = 0

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
