"""The shards of a planned source as columns: what is known of them without opening one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.patterns import list_shards
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local, local_path


class ShardTable:
    """Indexed local shards, in the order in which they were named.

    Args:
        shards: As `dataset.patterns.list_shards` takes it.

    Attributes:
        paths: Path of each shard.
        counts: Samples of each, int64 (num_shards,).
        sizes: Bytes of each, int64 (num_shards,).

    Raises:
        StorageError: Nothing matches, a shard is missing, or one is remote.
        FolderIndexError: A folder has no index, or one that does not match its shards; or there is no sample.
    """

    def __init__(self, shards: str | Sequence[str]) -> None:
        listed = list_shards(shards, need_index=True)
        for url in listed.urls:
            if not is_local(url):
                msg = f"{url}: a planned source reads samples one by one, which takes a local shard."
                raise StorageError(f"{msg}\n  Copy the shards here, or use `stream`.", url=url)
        entries = [entry for entry in listed.entries if entry is not None]
        self.paths = tuple(local_path(url) for url in listed.urls)
        self.counts: NDArray[np.int64] = np.array([entry.num_samples for entry in entries], dtype=np.int64)
        self.sizes: NDArray[np.int64] = np.array([entry.num_bytes for entry in entries], dtype=np.int64)
        self._names = [entry.name for entry in entries]
        if not self.counts.sum():
            folder = str(Path(self.paths[0]).parent)
            raise FolderIndexError(f"{folder}: the index lists no sample in these shards.", folder=folder)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.paths)

    def digest(self) -> str:
        """Hex sha256 over names and counts: what the order of samples depends on, and not where they lie."""
        digest = hashlib.sha256("\n".join(self._names).encode())
        digest.update(self.counts.astype("<i8").tobytes())
        return digest.hexdigest()
