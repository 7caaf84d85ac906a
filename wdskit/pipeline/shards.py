"""The first stage of a planned pipeline: samples by (shard, sample), from files that stay open."""

from __future__ import annotations

import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.local import LocalShard
from wdskit.dataset.table import Ints, ShardTable
from wdskit.errors import ShardError

MAX_OPEN_SHARDS = 4096  # each takes 9 bytes a sample; ImageNet on one rank stands in 1,221 at a time
USUAL_OPEN_SHARDS = 512  # half of the descriptors that a process has by default


class OpenShards:
    """Reads samples through the offsets of their shards. Safe to share between threads.

    Args:
        tables: The shards of each part, numbered through; the same part may stand several times.
        parts: For each of `tables`, the number of its part.
    """

    def __init__(self, tables: Sequence[ShardTable], parts: Sequence[int]) -> None:
        self.tables = tuple(tables)
        self.parts = tuple(parts)
        self._stops = np.cumsum([len(table) for table in tables])
        self._begin()

    def _begin(self) -> None:
        self._open: OrderedDict[int, LocalShard] = OrderedDict()
        self._lock = threading.Lock()
        self._mean_bytes: NDArray[np.float64] | None = None
        # Half of the descriptors that this process may have.
        self._most = max(16, min(MAX_OPEN_SHARDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))

    def __getstate__(self) -> dict[str, Any]:
        return {"tables": self.tables, "parts": self.parts, "_stops": self._stops}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def read(self, shard: int, sample: int) -> tuple[str, str, int, dict[str, bytes]]:
        """Path, key, number of the part, and the fields of one sample.

        Raises:
            ShardError: Its shard is not right.
            StorageError, FolderIndexError: It cannot be opened, or its offsets are not those of this file.
        """
        at = int(np.searchsorted(self._stops, shard, side="right"))
        table = self.tables[at]
        inner = shard - int(self._stops[at]) + len(table)
        local = self._shard(shard, table, inner)
        key, fields = local.read(table.number(inner, sample))
        return local.path, key, self.parts[at], {name: bytes(view) for name, view in fields.items()}

    def mean_bytes(self, shards: Ints) -> int:
        """Bytes of some samples in these shards, as many as each is named: that of the mean sample of each."""
        if self._mean_bytes is None:
            self._mean_bytes = np.concatenate([table.sample_bytes() for table in self.tables])
        return int(self._mean_bytes[shards].sum())

    def _shard(self, shard: int, table: ShardTable, inner: int) -> LocalShard:
        """The open shard; the one that was not read for longest makes room, and closes when nobody reads it."""
        with self._lock:
            local = self._open.get(shard)
            if local is not None:
                self._open.move_to_end(shard)
                return local
        local = LocalShard(table.path(inner))
        _check(local, table, inner)
        with self._lock:
            self._open[shard] = local
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        return local


def _check(local: LocalShard, table: ShardTable, inner: int) -> None:
    """Compare what was opened with the folder's index."""
    expected = table.whole_count(inner)
    if len(local) != expected:
        problem = f"its offsets are those of {len(local)} samples, the folder's index says {expected}"
    elif local.num_bytes != table.num_bytes(inner):
        problem = f"it has {local.num_bytes} bytes, the folder's index says {table.num_bytes(inner)}"
    else:
        return
    raise ShardError(shard=local.path, offset=0, problem=problem, remedy="Run `wdskit index` on its folder.")
