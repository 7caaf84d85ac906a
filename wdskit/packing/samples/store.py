"""Samples of finished shards as a plan holds them: a row of numbers each, 10 million in 300 MB."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.keys import find_repeated, is_among
from wdskit.dataset.samples import read_span
from wdskit.errors import PackError, ShardError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.labels import CLASS_FIELD
from wdskit.packing.row import Row
from wdskit.packing.samples.changes import Changes, find_fields
from wdskit.packing.samples.headers import Bools, Ints, Words, hash_keys
from wdskit.packing.samples.read import SourcePath, Sources, open_path
from wdskit.packing.samples.scan import Scanned
from wdskit.storage.identity import ObjectVersion
from wdskit.storage.urls import RangeFile
from wdskit.tar.names import split_name
from wdskit.tar.reader import first_name
from wdskit.tar.walk import Span

Column = NDArray[np.uint32]

_LEAST = 1 << 12
_KEYS_AHEAD = 512  # samples whose keys are read at once from remote shards
_HEAD_BLOCKS = 8  # enough for the first header of a sample, with the longest name


@dataclass(frozen=True)
class SampleRows:
    """Some samples by columns, in the order in which they are written: small enough to be sent to another process.

    Attributes:
        sources: Paths of the shards that they come from.
        source: Which of these.
        start: Where it starts there, in blocks of 512 bytes.
        span: How long it is there, in blocks.
        size: How long it becomes, in blocks, before transforms.
        check: Half of the 64 bits that its key gives, to know it again.
        copied: Whether its bytes are copied as they are.
        changes: What happens to the fields and keys of the others.
    """

    sources: Sequence[SourcePath]
    source: Column
    start: Column
    span: Column
    size: Column
    check: Column
    copied: Bools
    changes: Changes

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.source)


class Samples:
    """All samples that are packed, in the order of their sources: a store as `packing.store.Store`.

    Args:
        scans: What was seen of each source.
        changes: What happens to samples that are not copied.

    Attributes:
        blocks: Blocks of 512 bytes that each takes in its shard.
        hashes: 64 bits of each key as it becomes.
        draws: What decides the split of each; empty unless that was asked for.
        has_labels: Whether a sample may have the field `cls` as it becomes.
    """

    num_fields: Mapping[tuple[str, ...], int] = {}

    def __init__(self, scans: Iterable[Scanned], changes: Changes) -> None:
        paths: list[SourcePath] = []
        columns = _Columns(
            {"hashes": "u8", "source": "u4", "starts": "u4", "spans": "u4", "sizes": "u4", "copied": "?"}
        )
        draws: list[Words] = []
        self.has_labels = changes.made is not None and CLASS_FIELD in changes.made.fields
        for number, scan in enumerate(scans):
            paths.append(scan.path)
            self.has_labels |= any(changes.new_name(name) == CLASS_FIELD for name in scan.fields)
            draws.append(scan.draws)
            columns.append({**vars(scan), "source": number}, len(scan.starts))
        self._changes = changes
        self._sources = paths
        self.hashes = columns.take("hashes")
        self._check = self.hashes.view("<u4")[::2]
        self.draws = np.concatenate(draws) if draws else np.zeros(0, np.uint64)
        self._source, self._start, self._span = map(columns.take, ("source", "starts", "spans"))
        self.blocks = columns.take("sizes")
        self._copied = columns.take("copied")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._source)

    @property
    def num_copied(self) -> int:
        """Samples whose bytes are copied as they are."""
        return int(self._copied.sum())

    def take(self, numbers: Ints) -> SampleRows:
        """The samples of these numbers, in their order, with those sources only that they need."""
        needed, source = np.unique(self._source[numbers], return_inverse=True)
        return SampleRows(
            sources=[self._sources[number] for number in needed.tolist()],
            source=source.astype(np.uint32),
            start=self._start[numbers],
            span=self._span[numbers],
            size=self.blocks[numbers],
            check=self._check[numbers],
            copied=self._copied[numbers],
            changes=self._changes,
        )

    def where(self, number: int) -> str:
        """Shard and place of one."""
        return f"{self._sources[self._source[number]]} (byte {int(self._start[number]) * BLOCK_BYTES})"

    def __getitem__(self, number: int) -> Row:
        """Key and place of one, which is read."""
        path = self._sources[self._source[number]]
        start, span = (int(column[number]) * BLOCK_BYTES for column in (self._start, self._span))
        file = open_path(path)
        try:
            key = find_fields(read_span(file, Span(start, span)), shard=path, offset=start).key
        except ValueError as err:
            raise PackError(f"{path}, byte {start}: {err}. It changed while it was read; start again.") from err
        finally:
            file.close()
        return Row(self._changes.new_key(key), (), self.where(number))

    def forget_hashes(self) -> None:
        """Keep half of each, by which a sample is known when it is copied, and forget the draws."""
        self._check = self._check.copy()
        self.hashes = self.draws = np.zeros(0, np.uint64)

    def hash_keys(self, keys: Iterable[str]) -> Words:
        """64 bits of each key, as in `hashes`."""
        keys = iter(keys)
        parts = [np.zeros(0, np.uint64)]
        while chunk := [*itertools.islice(keys, _LEAST)]:
            parts.append(hash_keys([key.encode() for key in chunk]))
        return np.concatenate(parts)

    def unique(self, *, first_of_key: bool) -> Ints | None:
        """The numbers of the samples to pack, None for all, each key once.

        Args:
            first_of_key: Leave out the later ones of a key, instead of refusing them.

        Raises:
            PackError: Two have one key.
        """
        known: dict[str, int] = {}
        is_later = np.zeros(len(self), np.bool_)
        suspects = np.flatnonzero(is_among(self.hashes, find_repeated(self.hashes)))  # equal hashes are only a hint
        for number, key in self._keys(suspects):
            first = known.setdefault(key, number)
            if first != number and not first_of_key:
                remedy = "Keep the first sample of each key with --duplicate-keys first, or name fewer shards."
                places = f"{self.where(first)} and in {self.where(number)}"
                raise PackError(f"key {key!r} is in {places}; keys must be unique.\n  {remedy}")
            is_later[number] = first != number
        return np.flatnonzero(~is_later) if is_later.any() else None

    def _keys(self, numbers: Ints) -> Iterator[tuple[int, str]]:
        """The keys of some samples, read from their first headers: many at a time where shards are remote."""
        sources = Sources(self._sources)
        try:
            for first in range(0, len(numbers), _KEYS_AHEAD):
                chosen = numbers[first : first + _KEYS_AHEAD]
                source, start, span = (
                    each[chosen].astype(np.int64) for each in (self._source, self._start, self._span)
                )
                heads = np.minimum(span, _HEAD_BLOCKS) * BLOCK_BYTES
                if any(isinstance(self._sources[at].identity, ObjectVersion) for at in np.unique(source).tolist()):
                    sources.read_ahead(source, start * BLOCK_BYTES, heads)
                for at, number in enumerate(chosen.tolist()):
                    yield number, self._key(sources[int(source[at])], number, int(heads[at]))
        finally:
            sources.close()

    def _key(self, file: RangeFile, number: int, num_bytes: int) -> str:
        start = int(self._start[number]) * BLOCK_BYTES
        try:
            name = first_name(read_span(file, Span(start, num_bytes)), shard=file.url, offset=start)
        except ShardError:
            name = None
        split = None if name is None else split_name(name)
        # A long chain of headers, or a first member of no sample: then the whole sample says its key.
        return self[number].key if split is None else self._changes.new_key(split[0])


class Batch(NamedTuple):
    """Neighbours among the rows of a job: the first, the one behind the last, and their bytes."""

    first: int
    stop: int
    num_bytes: int


def batches_of(rows: SampleRows, most_bytes: int) -> Iterable[Batch]:
    """All rows, so many bytes of them at a time, one sample at least."""
    ends = np.cumsum(rows.size, dtype=np.int64) * BLOCK_BYTES
    first = done = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, done + most_bytes, side="right")))
        yield Batch(first, stop, int(ends[stop - 1]) - done)
        first, done = stop, int(ends[stop - 1])


class _Columns:
    """Arrays that grow together. Each is one block of memory that the system moves, where it grows: pieces of a shard
    each, joined at the end, would take twice the memory and leave holes.

    Args:
        kinds: Type of each array, by its name.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._arrays: dict[str, NDArray[Any]] = {name: np.empty(_LEAST, dtype=kind) for name, kind in kinds.items()}
        self._count = 0
        self._room = _LEAST

    def append(self, values: Mapping[str, Any], count: int) -> None:
        """Add `count` values to each: an array of so many, or one value for all of them."""
        stop = self._count + count
        if stop > self._room:
            self._room = stop + (stop >> 3)
            for array in self._arrays.values():
                array.resize(self._room, refcheck=False)  # no view of it is ever given out before `take`
        for name, array in self._arrays.items():
            array[self._count : stop] = values[name]
        self._count = stop

    def take(self, name: str) -> NDArray[Any]:
        """One of them, which is not kept here any more."""
        array = self._arrays.pop(name)
        array.resize(self._count, refcheck=False)
        return array
