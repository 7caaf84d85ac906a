"""Samples by (shard, sample), from shards that stay open."""

from __future__ import annotations

import bisect
import functools
import itertools
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import Verified
from wdskit.dataset.many import LARGE_BYTES, Run, Spans, read_natively, read_samples
from wdskit.dataset.remote import RemoteShard, open_remote_shards
from wdskit.dataset.shard import IndexedShard, LocalShard
from wdskit.dataset.table import ShardTable
from wdskit.errors import ShardError
from wdskit.native import native
from wdskit.order.base import Ints
from wdskit.storage.cache import MAX_FETCHING, PartCache
from wdskit.storage.traffic import NO_TRAFFIC, Traffic
from wdskit.storage.urls import shown_url

MAX_OPEN_SHARDS = 4096  # each takes 9 bytes a sample; ImageNet on one rank reads 1,221 at a time
USUAL_OPEN_SHARDS = 512  # half of the descriptors that a process has by default


class ManySamples(NamedTuple):
    """Samples by columns.

    Attributes:
        paths: Path of the shard of each sample.
        keys: Key of each sample.
        fields: The places of the fields' bytes, in the order of the members, which is the same for all samples.
    """

    paths: list[str]
    keys: list[str]
    fields: dict[str, Spans]

    def part(self, at: slice) -> ManySamples:
        """Some of them."""
        return ManySamples(self.paths[at], self.keys[at], {name: each.part(at) for name, each in self.fields.items()})


class SampleReader:
    """Reads samples through the offsets of their shards. Safe to share between threads.

    Args:
        tables: The shards of each part, numbered through; the same part may appear several times.
        parts: For each of `tables`, the number of its part.
        kept: Where parts of remote shards are kept; None for nowhere.
    """

    def __init__(self, tables: Sequence[ShardTable], parts: Sequence[int], kept: PartCache | None = None) -> None:
        self.kept = kept
        self.tables = tuple(tables)
        self.parts = tuple(parts)
        self._stops = np.cumsum([len(table) for table in tables])
        self._begin()

    def _begin(self) -> None:
        self._stop_list: list[int] = self._stops.tolist()
        self._open: OrderedDict[int, IndexedShard] = OrderedDict()
        self._ahead: dict[int, IndexedShard] = {}  # shards with requested samples, in a reader that `begin` returned
        self._has_begun = False
        self._lock = threading.Lock()
        self._verified = Verified()
        self._mean_bytes: NDArray[np.float64] | None = None
        # Half of the descriptors that this process may have.
        self._most = max(16, min(MAX_OPEN_SHARDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tables", "parts", "kept", "_stops")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def is_remote(self) -> bool:
        """Whether some of the shards are in a store."""
        return any(table.is_remote for table in self.tables)

    def begin(self, shards: Ints, samples: Ints) -> SampleReader:
        """Request the samples that are in a store, and return a reader of them that shares all open shards. The first
        call requests byte ranges; later calls request whole parts if parts are kept. It raises the errors of `read`.
        """
        if not self.is_remote:
            return self
        at_once, self._has_begun = not self._has_begun, True
        wanted = self._wanted(shards, samples)
        ahead = {shard: one.ahead(numbers, at_once=at_once) for shard, (one, numbers) in wanted.items()}
        begun = SampleReader.__new__(SampleReader)  # which shares all that is open
        begun.__dict__.update(self.__dict__, _ahead=ahead)
        return begun

    def keep(self, shards: Ints, samples: Ints) -> None:
        """Start to fetch the parts of these samples. It raises the errors of `read`."""
        for one, numbers in self._wanted(shards, samples).values():
            one.keep(numbers)

    def _wanted(self, shards: Ints, samples: Ints) -> dict[int, tuple[RemoteShard, list[int]]]:
        """Samples by their shards, as far as these are remote: each, open, and the numbers in it, rising."""
        numbers, opened = self._locate(shards, samples)
        found: dict[int, tuple[RemoteShard, list[int]]] = {}
        for shard, number in sorted(set(zip(shards.tolist(), numbers.tolist(), strict=True))):
            one = opened[shard]
            if isinstance(one, RemoteShard):
                found.setdefault(shard, (one, []))[1].append(number)
        return found

    def take_traffic(self) -> Traffic:
        """What has come from stores to this process since the last call."""
        if not self.is_remote:
            return NO_TRAFFIC
        from wdskit.storage.requests import loop_of_this_process  # which needs obstore

        return loop_of_this_process("").take_count()

    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Fetch all remote shards into the cache, until it is full.

        Args:
            progress: Called after each shard: how many are done, and how many there are.
        """
        assert self.kept is not None
        numbers = range(int(self._stops[-1]))
        for shard in numbers:
            opened = self._opened(self._table_of(shard), np.array([shard]))[shard]
            if isinstance(opened, RemoteShard):
                opened.keep(range(len(opened)))
                self.kept.wait(MAX_FETCHING)
            progress(shard + 1, len(numbers))
        self.kept.wait()

    def _table_of(self, shard: int) -> int:
        return bisect.bisect_right(self._stop_list, shard) if len(self.tables) > 1 else 0

    def read(
        self, shard: int, sample: int, viewed: Callable[[str], bool] | None = None
    ) -> tuple[str, str, int, dict[str, Any]]:
        """Return path, key, number of the part, and the fields of one sample.

        Args:
            shard: Its number.
            sample: Its number in the shard.
            viewed: Returns whether a field of this name is a memoryview without a copy; None for bytes only.

        Raises:
            ShardError: The shard is damaged.
            StorageError, FolderIndexError: The shard cannot be opened, or its `.idx` file belongs to another file.
        """
        at = self._table_of(shard)
        table = self.tables[at]
        inner = shard - self._stop_list[at] + len(table)
        local = self._shard(shard, table, inner)
        key, fields = local.read(table.number(inner, sample))
        if viewed is None:
            return local.path, key, self.parts[at], {name: bytes(view) for name, view in fields.items()}
        given = {name: view if viewed(name) else bytes(view) for name, view in fields.items()}
        return local.path, key, self.parts[at], given

    def read_natively(self, shards: Ints, samples: Ints) -> list[tuple[str, str, int, dict[str, Any]]] | None:
        """Read samples with wdskit-native. Return for each sample what `read` returns, with its fields as bytes.

        Return None without the package, and if a sample is remote, unusual or damaged: `read` then reads the samples
        one by one, and raises the error of the damaged one.
        """
        if self.is_remote or native() is None:
            return None
        try:
            numbers, opened = self._locate(shards, samples)
            files = [opened[shard] for shard in shards.tolist()]
            found = read_natively(files, numbers)
        except Exception:  # noqa: BLE001 (`read` raises it again, for the sample that causes it)
            return None
        if found is None:
            return None
        rows = zip(*(spans.cut() for spans in found.fields.values()), strict=True)
        parts = [self.parts[self._table_of(shard)] for shard in shards.tolist()]
        return [
            (file.path, key, part, dict(zip(found.fields, row, strict=True)))
            for file, key, part, row in zip(files, found.keys, parts, rows, strict=True)
        ]

    def describe(self, shard: int, sample: int) -> str:
        """Name a sample by its shard and key; one of a store, which may not answer, by its number there."""
        at = self._table_of(shard)
        table = self.tables[at]
        inner = shard - self._stop_list[at] + len(table)
        path, number = table.path(inner), table.number(inner, sample)
        if table.is_remote:
            return f"{number} of {shown_url(path)}"
        with LocalShard(path) as local:
            return f"{path}: {local.key(number)}"

    def mean_bytes(self, shards: Ints) -> int:
        """Bytes of some samples in these shards, as many as each is named: that of the mean sample of each."""
        return int(self._means()[shards].sum())

    def has_large_samples(self) -> bool:
        """Whether there is a shard whose mean sample is read by itself."""
        return bool(self._means().max() > LARGE_BYTES)

    def _means(self) -> NDArray[np.float64]:
        if self._mean_bytes is None:
            self._mean_bytes = np.concatenate([table.sample_bytes() for table in self.tables])
        return self._mean_bytes

    def part(self, shard: int) -> int:
        """Number of the part that a shard belongs to."""
        return self.parts[int(np.searchsorted(self._stops, shard, side="right"))]

    def read_many(self, shards: Ints, samples: Ints, *, viewed: Callable[[str], bool]) -> ManySamples | None:
        """Read many samples at once, (n,) each. Return None if they do not have the same fields in the same order.

        Args:
            shards: Their shards.
            samples: Their numbers in these.
            viewed: As `dataset.many.read_samples` takes it.

        Raises:
            ShardError, StorageError, FolderIndexError: As `read`.
        """
        numbers, opened = self._locate(shards, samples)
        files = [opened[shard] for shard in shards.tolist()]
        found = read_natively(files, numbers)
        if found is not None:
            return ManySamples([file.path for file in files], *found)
        goes_on = (shards[1:] == shards[:-1]) & (numbers[1:] == numbers[:-1] + 1)
        runs: list[Run] = list(zip(files, numbers.tolist(), itertools.repeat(1)))
        if goes_on.any():
            firsts = np.flatnonzero(np.append(True, ~goes_on))
            counts = np.diff(firsts, append=len(shards)).tolist()
            runs = [(*runs[at][:2], count) for at, count in zip(firsts.tolist(), counts, strict=True)]
        found = read_samples(runs, viewed=viewed)
        if found is None:
            return None
        return ManySamples([file.path for file in files], *found)

    def _locate(self, shards: Ints, samples: Ints) -> tuple[Ints, dict[int, IndexedShard]]:
        """The samples' numbers in their files, and these, open."""
        if len(self.tables) == 1:
            return self.tables[0].numbers(shards, samples), self._opened(0, shards)
        tables = np.searchsorted(self._stops, shards, side="right")
        numbers = np.empty_like(samples)
        opened: dict[int, IndexedShard] = {}
        for at in np.unique(tables).tolist():
            rows = np.flatnonzero(tables == at)
            start = int(self._stops[at]) - len(self.tables[at])
            numbers[rows] = self.tables[at].numbers(shards[rows] - start, samples[rows])
            opened |= self._opened(at, shards[rows])
        return numbers, opened

    def _opened(self, at: int, shards: Ints) -> dict[int, IndexedShard]:
        """Open shards of one table, by their numbers."""
        wanted = dict.fromkeys(shards.tolist())
        with self._lock:
            found = {shard: self._open[shard] for shard in wanted if shard in self._open}
            for shard in found:
                self._open.move_to_end(shard)
        found |= {shard: self._ahead[shard] for shard in wanted if shard in self._ahead}
        table = self.tables[at]
        start = int(self._stops[at]) - len(table)
        missing = [shard for shard in wanted if shard not in found]
        if table.is_remote and missing:  # all at once
            inner = [shard - start for shard in missing]
            remote = _open_remote(table, inner, self.kept)
            found |= {shard: self._keep(shard, one) for shard, one in zip(missing, remote, strict=True)}
        return {shard: found.get(shard) or self._shard(shard, table, shard - start) for shard in wanted}

    def _shard(self, shard: int, table: ShardTable, inner: int) -> IndexedShard:
        """Return the open shard. The least recently used shard is dropped for it, and closes after its last reader."""
        if shard in self._ahead:
            return self._ahead[shard]
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found
        entry = table.entry(inner)
        if table.is_remote:
            return self._keep(shard, _open_remote(table, [inner], self.kept)[0])
        local = LocalShard(table.path(inner), idx_sha256=entry.idx_sha256, num_bytes=entry.num_bytes)
        if len(local) != entry.num_samples:
            problem = f"its .idx has {len(local)} samples, but the folder's index has {entry.num_samples}"
            raise ShardError(shard=local.path, offset=0, problem=problem, remedy="Run `wdskit index` on its folder.")
        self._verified.check(local.file, entry.identity, entry.sha256)
        return self._keep(shard, local)

    def _keep(self, shard: int, opened: IndexedShard) -> IndexedShard:
        at = self._table_of(shard)
        table = self.tables[at]
        opened.find_fields = functools.partial(table.fields, shard - self._stop_list[at] + len(table))
        with self._lock:
            self._open[shard] = opened
            if len(self._open) > self._most:
                self._open.popitem(last=False)
        return opened


def _open_remote(table: ShardTable, shards: Sequence[int], kept: PartCache | None) -> list[RemoteShard]:
    """Open remote shards of a table. It raises the errors of `open_remote_shards`."""
    named = [(table.path(shard), table.entry(shard)) for shard in shards]
    return open_remote_shards(named, kept, [table.seen(shard) for shard in shards])
