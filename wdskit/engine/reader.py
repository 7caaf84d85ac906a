"""Read samples by number: the number of the shard, and the number of the sample in the shard. Shards stay open."""

from __future__ import annotations

import bisect
import errno
import functools
import os
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.columns import RawColumn
from wdskit.dataset.remote import RemoteShard, open_remote_shards
from wdskit.dataset.shard import IndexedShard, LocalShard
from wdskit.dataset.shard_table import ShardTable
from wdskit.errors import ShardError, StorageError, WdskitError
from wdskit.native import native
from wdskit.order.base import Ints
from wdskit.storage.cache import PartCache
from wdskit.storage.traffic import NO_TRAFFIC, Traffic
from wdskit.storage.urls import shown_url

_MANY_SAMPLES, _FEW_SAMPLES = 1024, 256
"""Limits of `SampleReader.most_samples`. Samples of 3 kB in batches of 64 take three quarters of the time if 1,024 of
them are read at once.
"""

MAX_OPEN_SHARDS = 4096  # an open shard takes 9 bytes a sample; ImageNet on one rank reads 1,221 shards at a time


class ColumnarSamples(NamedTuple):
    """Samples as columns.

    Attributes:
        paths: Path of the shard of each sample.
        keys: Key of each sample.
        fields: Maps the name of each field to the bytes of this field in all samples. All samples have these fields in
            this order.
    """

    paths: list[str]
    keys: list[str]
    fields: dict[str, RawColumn]


def read_natively(shards: Sequence[IndexedShard], rows: Ints, numbers: Ints) -> ColumnarSamples | None:
    """Read sample `numbers[i]` of the local shard `shards[rows[i]]`, for each i. Return None if `IndexedShard.read`
    must read the samples instead: the C code is missing, a header is not plain, a sample cannot be read, or
    the samples differ in their fields.
    """
    module = native()
    found = module.read_samples([shard.handle for shard in shards], rows, numbers) if module else None
    if found is None:
        return None
    keys, names, columns = found
    fields = dict(zip(names, map(RawColumn, columns), strict=True))
    return ColumnarSamples([shards[row].path for row in rows.tolist()], keys, fields)


class SampleReader:
    """A reader of samples, which keeps shards and their offsets open. Safe to share between threads.

    All methods number the shards from 0 over all tables, and the samples of a shard among the samples that its table
    uses.

    Args:
        tables: Tables of shards. A part that is repeated n times has its table n times.
        parts: For each of `tables`, the number of its part of the mixture.
        cache: The cache for parts of remote shards; None for no cache.
    """

    def __init__(self, tables: Sequence[ShardTable], parts: Sequence[int], cache: PartCache | None = None) -> None:
        self.cache = cache
        self.tables = tuple(tables)
        self.parts = tuple(parts)
        self._stops = np.cumsum([len(table) for table in tables])
        self._begin()

    def _begin(self) -> None:
        self._stop_list: list[int] = self._stops.tolist()
        self._open = _OpenShards()
        self._ahead: dict[int, IndexedShard] = {}  # shards with requested samples, in a reader from `request`
        self._has_requested = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tables", "parts", "cache", "_stops")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def is_remote(self) -> bool:
        """Whether at least one shard is remote."""
        return any(table.is_remote for table in self.tables)

    def request(self, shards: Ints, samples: Ints) -> SampleReader:
        """Start to fetch samples of remote shards, and return a reader that uses the fetched bytes.

        The returned reader waits for these bytes and does not request them again. It shares all open shards with this
        reader. With a cache, parts of shards are fetched into the cache. If all shards are local, return this reader.

        Args:
            shards: Numbers of the samples' shards, (n,).
            samples: Numbers of the samples in their shards, (n,).

        Raises:
            ShardError: A shard is damaged.
            StorageError, FolderIndexError: A shard cannot be opened, or its `.idx` file belongs to another file.
        """
        if not self.is_remote:
            return self
        is_first, self._has_requested = not self._has_requested, True
        wanted = self._wanted(shards, samples)
        ahead = {shard: one.ahead(numbers, at_once=is_first) for shard, (one, numbers) in wanted.items()}
        requested = SampleReader.__new__(SampleReader)  # shares all open shards, which a copy would open again
        requested.__dict__.update(self.__dict__, _ahead=ahead)
        return requested

    def fetch_parts(self, shards: Ints, samples: Ints) -> None:
        """Start to fetch the parts of remote shards that have these samples into the cache. Without a cache, only open
        the shards.

        Raises ShardError, StorageError or FolderIndexError if a shard is damaged or cannot be opened.
        """
        for one, numbers in self._wanted(shards, samples).values():
            one.keep(numbers)

    def _wanted(self, shards: Ints, samples: Ints) -> dict[int, tuple[RemoteShard, list[int]]]:
        """Return a dict that maps the number of each remote shard to (open shard, numbers of the wanted samples among
        all samples of the shard, ascending, each once). Local shards are left out. The errors are those of `_locate`.
        """
        numbers, opened, _ = self._locate(shards, samples)
        found: dict[int, tuple[RemoteShard, list[int]]] = {}
        for shard, number in sorted(set(zip(shards.tolist(), numbers.tolist(), strict=True))):
            one = opened[shard]
            if isinstance(one, RemoteShard):
                found.setdefault(shard, (one, []))[1].append(number)
        return found

    def take_traffic(self) -> Traffic:
        """Return the traffic of this process since the last call by any reader with remote shards. If all shards are
        local, return `NO_TRAFFIC`.
        """
        if not self.is_remote:
            return NO_TRAFFIC
        from wdskit.storage.requests import loop_of_this_process

        return loop_of_this_process("").take_count()

    def _find_table(self, shard: int) -> tuple[int, ShardTable, int]:
        """Return (index of a shard's table in `tables`, the table, number of the shard in the table)."""
        at = bisect.bisect_right(self._stop_list, shard) if len(self.tables) > 1 else 0
        table = self.tables[at]
        return at, table, shard - self._stop_list[at] + len(table)

    def read(self, shard: int, sample: int) -> tuple[str, str, int, dict[str, bytes]]:
        """Return (path, key, part, fields) of one sample. `part` is the number of the shard's part of the mixture.

        Args:
            shard: Number of the shard.
            sample: Number of the sample among the samples of the shard that the source uses.

        Raises:
            ShardError: The shard is damaged.
            StorageError, FolderIndexError: The shard cannot be opened, or its `.idx` file belongs to another file.
        """
        at, table, inner = self._find_table(shard)
        local = self._shard(shard)
        key, fields = local.read(table.number(inner, sample))
        return local.path, key, self.parts[at], {name: bytes(view) for name, view in fields.items()}

    def read_many(self, shards: Ints, samples: Ints) -> list[tuple[str, str, int, dict[str, bytes]]] | None:
        """Return (path, key, part, fields) of each sample, read in C. All fields are bytes.

        Return None if any shard of the reader is remote, if the C code is missing or cannot read a sample, or
        if the samples differ in their fields. Then call `read` for each sample: it raises the error of a damaged one.
        """
        # Several threads hold the shards that they read. `np.unique` would import numpy.ma: 20 ms and 10 MB.
        if len(set(shards.tolist())) > _most_files() // 8:
            return None
        try:
            found = self.read_columns(shards, samples)
        except (WdskitError, OSError):  # `read` raises it again, for the sample that causes it
            return None
        if found is None:
            return None
        rows = zip(found.paths, found.keys, shards.tolist(), zip(*found.fields.values(), strict=True), strict=True)
        return [
            (path, key, self.part(shard), dict(zip(found.fields, row, strict=True))) for path, key, shard, row in rows
        ]

    def describe(self, shard: int, sample: int) -> str:
        """Return the name of a sample for messages: its number in its shard, from 0, and the shard."""
        _, table, inner = self._find_table(shard)
        return f"{table.number(inner, sample)} of {shown_url(table.path(inner))}"

    def mean_bytes(self, shards: Ints) -> int:
        """Estimate the bytes of several samples together: the sum of the mean sample sizes of their shards.

        `shards` has the number of each sample's shard.
        """
        return int(self._means[shards].sum())

    def most_samples(self, num_threads: int) -> int:
        """Return how many samples each of `num_threads` threads should read at once at most, although each may be in
        another shard. The limit is low for remote shards, and if the process may open few files.
        """
        # An eighth of the descriptors, because half of them belong to open shards.
        most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8 // num_threads
        if most_files < min(_MANY_SAMPLES, int(self._stops[-1])):
            return max(1, min(_FEW_SAMPLES, most_files))
        return _FEW_SAMPLES if self.is_remote else _MANY_SAMPLES

    def most_mean_bytes(self) -> float:
        """Return the mean bytes of a sample in the shard with the largest samples: at least 1."""
        return max(1.0, float(self._means.max()))

    @functools.cached_property
    def _means(self) -> NDArray[np.float64]:
        """The mean size of a sample of each shard in bytes; 0 for a shard without samples."""
        return np.concatenate([table.sample_bytes() for table in self.tables])

    def part(self, shard: int) -> int:
        """Return the number of the mixture's part to which a shard belongs."""
        return self.parts[self._find_table(shard)[0]]

    def read_columns(self, shards: Ints, samples: Ints) -> ColumnarSamples | None:
        """Read samples field by field, in C. Return None if any shard of the reader is remote, if
        the C code is missing or cannot read a sample, or if the samples do not have equal fields in equal
        order.

        Args:
            shards: Numbers of the samples' shards, (n,).
            samples: Numbers of the samples in their shards, (n,).

        Raises:
            ShardError: A shard is damaged.
            StorageError, FolderIndexError: A shard cannot be opened, or its `.idx` file belongs to another file.
        """
        if self.is_remote or native() is None:
            return None
        numbers, opened, rows = self._locate(shards, samples)
        return read_natively([*opened.values()], rows, numbers)

    def _locate(self, shards: Ints, samples: Ints) -> tuple[Ints, dict[int, IndexedShard], Ints]:
        """Open the shards of samples, and find the samples in these shards.

        Args:
            shards: Numbers of the samples' shards, (n,).
            samples: Numbers of the samples among the samples of their shards that the pipeline uses, (n,).

        Returns:
            (numbers, opened, rows). `numbers[i]` is the number of sample i among all samples of its shard, int64 (n,).
            `opened` maps the number of each shard, ascending, to the open shard. The shard of sample i is the
            `rows[i]`-th shard of `opened`, from 0, int64 (n,).

        Raises:
            ShardError: A shard is damaged, or the folder's index does not match it.
            StorageError, FolderIndexError: A shard cannot be opened, or its `.idx` file belongs to another file.
        """
        wanted, rows = np.unique(shards, return_inverse=True)
        if len(self.tables) == 1:
            return self.tables[0].numbers(shards, samples), self._opened(0, wanted), rows
        tables = np.searchsorted(self._stops, wanted, side="right")
        numbers = np.empty_like(samples)
        opened: dict[int, IndexedShard] = {}
        for at in sorted(set(tables.tolist())):
            own = np.flatnonzero(tables[rows] == at)
            start = int(self._stops[at]) - len(self.tables[at])
            numbers[own] = self.tables[at].numbers(shards[own] - start, samples[own])
            opened |= self._opened(at, wanted[tables == at])
        return numbers, opened, rows

    def _opened(self, at: int, shards: Ints) -> dict[int, IndexedShard]:
        """Return a dict that maps each number in `shards` to the open shard, in the order of `shards`.

        `shards` are numbers over all tables, each once. All of them are in the table `tables[at]`.
        Raises ShardError, StorageError or FolderIndexError if a shard is damaged or cannot be opened.
        """
        wanted = shards.tolist()
        found = {shard: one for shard in wanted if (one := self._open.get(shard)) is not None}
        found |= {shard: self._ahead[shard] for shard in wanted if shard in self._ahead}
        table = self.tables[at]
        if table.is_remote:  # open all missing remote shards at the same time
            inner = {shard: self._find_table(shard)[2] for shard in wanted if shard not in found}
            inner = {shard: number for shard, number in inner.items() if table.is_remote_shard(number)}
            remote = _open_remote(table, [*inner.values()], self.cache) if inner else []
            found |= {shard: self._open.add(shard, one) for shard, one in zip(inner, remote, strict=True)}
        return {shard: found[shard] if shard in found else self._shard(shard) for shard in wanted}

    def _shard(self, shard: int) -> IndexedShard:
        """Return an open shard. Open the shard if this reader does not have it open.

        Raises:
            ShardError: The shard is damaged, or the folder's index does not match it.
            StorageError, FolderIndexError: The shard cannot be opened, or its `.idx` file belongs to another file.
        """
        if shard in self._ahead:
            return self._ahead[shard]
        found = self._open.get(shard)
        if found is not None:
            return found
        _, table, inner = self._find_table(shard)
        entry = table.entry(inner)
        if table.is_remote_shard(inner):
            return self._open.add(shard, _open_remote(table, [inner], self.cache)[0])
        local = _with_files(
            lambda: LocalShard(table.path(inner), idx_sha256=entry.idx_sha256, num_bytes=entry.num_bytes)
        )
        if len(local) != entry.num_samples:
            problem = f"its .idx has {len(local)} samples, but the folder's index has {entry.num_samples}"
            raise ShardError(shard=local.path, offset=0, problem=problem, remedy="Run `wdskit index` on its folder.")
        return self._open.add(shard, local)


def _most_files() -> int:
    """Return how many shards this process may keep open: at most half of its descriptors."""
    return max(16, min(MAX_OPEN_SHARDS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))


class _OpenShards:
    """Open shards of one reader, by number. The readers of a process together keep at most `_most_files()` open. Safe
    to share between threads.
    """

    def __init__(self) -> None:
        self.shards: OrderedDict[int, IndexedShard] = OrderedDict()
        with _lock:
            _readers.add(self)

    def get(self, shard: int) -> IndexedShard | None:
        """Return an open shard; None if the reader does not have it open."""
        with _lock:
            found = self.shards.get(shard)
            if found is not None:
                self.shards.move_to_end(shard)
        return found

    def add(self, shard: int, opened: IndexedShard) -> IndexedShard:
        """Keep a shard open, and return it. If too many shards are open, the reader with the most forgets the one that
        was used longest ago: its file closes when no other object uses the shard.
        """
        most = _most_files()
        with _lock:
            self.shards[shard] = opened
            while sum(len(each.shards) for each in _readers) > most:
                max(_readers, key=lambda each: len(each.shards)).shards.popitem(last=False)
        return opened


_lock = threading.Lock()
_readers: weakref.WeakSet[_OpenShards] = weakref.WeakSet()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 (another thread may have held it when this process was forked)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _with_files(open_shard: Callable[[], LocalShard]) -> LocalShard:
    """Return the opened shard. If the process has no descriptor left, close the shards that no thread reads, and try
    again.

    Raises:
        StorageError: The process has no descriptor left, because the program itself or its samples need them.
    """
    for wait_s in (0.0, 0.01, 0.1, 1.0, None):
        try:
            return open_shard()
        except WdskitError as err:
            cause: BaseException | None = err
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__
            if cause is None or cause.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if wait_s is None:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                msg = f"a shard cannot be opened: the program has too many open files, of at most {limit}."
                raise StorageError(f"{msg}\n  Raise the limit: `ulimit -n 65536`.", url="") from err
        with _lock:
            for each in _readers:
                each.shards.clear()
        time.sleep(wait_s)  # until other threads have read their samples
    raise AssertionError


def _open_remote(table: ShardTable, shards: Sequence[int], cache: PartCache | None) -> list[RemoteShard]:
    """Open remote shards of a table, and return them in the order of `shards`.

    `shards` are numbers of shards in the table. Raises StorageError or FolderIndexError if a shard or its `.idx` is
    unusable.
    """
    named = [(table.path(shard), table.entry(shard)) for shard in shards]
    return open_remote_shards(named, cache)
