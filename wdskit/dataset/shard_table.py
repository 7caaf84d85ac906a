"""The shards of a planned source as arrays, made from the indexes of their folders. No shard is opened."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary_index import BinaryIndex, ShardEntry
from wdskit.dataset.braces import expand_patterns
from wdskit.dataset.columns import COLUMNS_NAME, Column, Columns, ColumnView, list_columns
from wdskit.dataset.conditions import Where
from wdskit.dataset.index import compare_names, join_url, read_index
from wdskit.dataset.patterns import (
    ABSENT,
    LISTED_ABSENT,
    UNLISTED,
    check_planned_url,
    find_folders,
    nothing_matches,
    shard_error,
)
from wdskit.dataset.remote import SeenVersion, read_copy
from wdskit.dataset.subset import Subset
from wdskit.dataset.unfinished_runs import find_unfinished
from wdskit.errors import FolderIndexError, StorageError
from wdskit.storage.urls import is_local

Ints = NDArray[np.int64]
Bound = int | Fraction
"""Number of a sample, or a share of all samples from 0 to 1."""

_MOST_SAMPLES = 1 << 62  # far more than any data set has, so that sums in int64 do not overflow


class ShardTable:
    """Indexed shards in the order in which they were named, and which of their samples are used.

    Args:
        shards: A path, URL, glob, brace pattern or folder; several joined by `::`, or a list of them.
        split: Use only samples of this split (see `wdskit split`) of each folder; None for all.
        where: Use only samples for which this condition on the folders' columns is true; None for all.
        has_columns: Whether `column` will be called. `split` and `where` imply it.
        bounds: (first, stop): use only this range of the samples that `split` and `where` leave, in the order of the
            shards. `stop` is excluded. A bound is an int, the number of a sample from 0, or a Fraction from 0 to 1, a
            share of these samples. None for all.

    Attributes:
        file_counts: Number of all samples of each shard, int64 (num_shards,).
        counts: Number of used samples of each shard, int64 (num_shards,).

    Raises:
        StorageError: No shard matches, a shard is missing or is named twice, a pattern or a URL is invalid, or a store
            cannot be read.
        FolderIndexError: A folder has no index, its index does not match its shards, an int in `bounds` is larger than
            the number of samples, no sample is left, or a run in the folder is unfinished.
        SelectionError: A column or the split is missing, a column is damaged or was made for other shards, or `where`
            is invalid.
    """

    def __init__(
        self,
        shards: str | Sequence[str],
        *,
        split: str | None = None,
        where: str | None = None,
        has_columns: bool = False,
        bounds: tuple[Bound, Bound] | None = None,
    ) -> None:
        needs_columns = has_columns or split is not None or where is not None
        try:
            found = find_indexed_shards(shards, with_columns=needs_columns)
        except FolderIndexError as err:
            if not err.folder or not is_local(err.folder):
                raise
            unfinished = find_unfinished(Path(err.folder))
            if unfinished is not None:
                raise unfinished.error() from err
            found = find_indexed_shards(shards, with_columns=needs_columns)  # a run may just have ended
        self._indexes = [*dict.fromkeys(index for index, _ in found)]
        folders = np.array([self._indexes.index(index) for index, _ in found], dtype=np.int32)
        self._folder_numbers = np.repeat(folders, [len(numbers) for _, numbers in found])
        self._numbers = np.concatenate([numbers for _, numbers in found])
        self._refuse_doubles()
        self._columns = [Columns(index) for index in self._indexes] if needs_columns else []
        self.file_counts: Ints = self._column([index.counts for index in self._indexes])
        self._fields: dict[int, dict[str, frozenset[str]]] = {}  # fields of each shard, by folder and name
        if self.file_counts.sum(dtype=np.float64) >= _MOST_SAMPLES:  # as int64, the sum may overflow
            folder = self.folders[0]
            msg = f"{folder}: the index says that a shard has {self.file_counts.max()} samples."
            raise FolderIndexError(f"{msg}\n  Run `wdskit index {folder}`.", folder=folder)
        self.use_only(self._choose(split, where))
        total = int(self.counts.sum())
        if bounds is not None:
            self._use_range(*bounds)
        if not self.counts.sum():
            folder = self.folders[0]
            of = f" of the split {split!r}" if split else ""
            of += f" with `where: {where}`" if where else ""
            where = f"this range of {total} samples" if bounds is not None and total else "these shards"
            raise FolderIndexError(f"{folder}: there are no samples{of} in {where}.", folder=folder)

    def _refuse_doubles(self) -> None:
        """Raise StorageError if the patterns name a shard twice. Two paths that lead to one file through symbolic or
        hard links name one shard.
        """
        places = [index.place if index.url else os.path.realpath(index.place) for index in self._indexes]
        last = {place: number for number, place in enumerate(places)}  # one number for all spellings of a folder
        folders = np.array([last[place] for place in places], dtype=np.int64)[self._folder_numbers]
        _, firsts = np.unique(folders << 32 | self._numbers, return_index=True)
        double = next(iter(np.setdiff1d(np.arange(len(self._numbers)), firsts)), self._find_linked())
        if double is not None:
            double = self.path(int(double))
            msg = f"{double}: this shard is named twice, so its samples would be used twice as often."
            way = "Name it once. To use it more often, make a `mixture` of parts with `repeat` or `weight`"
            raise StorageError(f"{msg}\n  {way}.", url=double)

    def _find_linked(self) -> int | None:
        """Return the number of the first shard that is the same file as an earlier shard, by a symbolic or a hard link;
        None if all shards are different files. Only shards with equal digests are compared. Missing files are ignored.
        """
        digests = self._column([index.digests[:, :8].copy().view(np.int64)[:, 0] for index in self._indexes])
        _, inverse, copies = np.unique(digests, return_inverse=True, return_counts=True)
        files: set[tuple[int, int]] = set()
        for shard in np.flatnonzero(copies[inverse] > 1).tolist():
            if not self._indexes[int(self._folder_numbers[shard])].url:
                with contextlib.suppress(OSError):
                    status = os.stat(self.path(shard))
                    if (status.st_dev, status.st_ino) in files:
                        return int(shard)
                    files.add((status.st_dev, status.st_ino))
        return None

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.counts)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the shards, each once."""
        return tuple(index.place for index in self._indexes)

    @property
    def is_remote(self) -> bool:
        """Whether at least one shard is remote."""
        return any(index.url for index in self._indexes)

    @property
    def remote(self) -> NDArray[np.bool_]:
        """Whether each shard is remote: bool (num_shards,)."""
        remote: NDArray[np.bool_] = np.array([bool(index.url) for index in self._indexes])[self._folder_numbers]
        return remote

    def is_remote_shard(self, shard: int) -> bool:
        """Return True if a shard is remote."""
        return bool(self._indexes[int(self._folder_numbers[shard])].url)

    def sample_bytes(self) -> NDArray[np.float64]:
        """Return the mean size of a sample of each shard in bytes, with headers and padding: float64 (num_shards,). The
        value is 0 for a shard without samples.
        """
        sizes = self._column([index.sizes for index in self._indexes])
        return np.where(self.file_counts > 0, sizes / np.maximum(self.file_counts, 1), 0.0)

    def path(self, shard: int) -> str:
        """Return the path or URL of a shard, 0 <= shard < len(self). In a URL, the name is percent-encoded."""
        index = self._indexes[int(self._folder_numbers[shard])]
        name = index.name(int(self._numbers[shard]))
        return join_url(index.place, quote(name) if index.url else name)

    def entry(self, shard: int) -> ShardEntry:
        """Return the index entry of a shard by its number in this table. Its `fields` are empty."""
        index = self._indexes[int(self._folder_numbers[shard])]
        return index.entry(int(self._numbers[shard]))

    def seen_version(self, shard: int) -> SeenVersion:
        """Return the `SeenVersion` of a remote shard, which notices that the shard was replaced."""
        index, number = self._indexes[int(self._folder_numbers[shard])], int(self._numbers[shard])
        return SeenVersion(index.folder, index.url, index.digest, number, index.digests[number].tobytes().hex())

    def fields(self, shard: int) -> frozenset[str]:
        """Return the names of all fields of a shard's samples; empty if `index.json` does not list the shard. The first
        call for a folder reads the folder's `index.json`. Raises FolderIndexError if it is missing or invalid.
        """
        folder = int(self._folder_numbers[shard])
        index = self._indexes[folder]
        if folder not in self._fields:
            entries = read_index(index.folder).entries
            self._fields[folder] = {entry.name: frozenset(entry.fields) for entry in entries}
        return self._fields[folder].get(index.name(int(self._numbers[shard])), frozenset())

    def number(self, shard: int, sample: int) -> int:
        """Return the number of a used sample among all samples of its shard. `sample` is its number among the used
        samples of the shard: 0 <= sample < counts[shard].
        """
        if self._subset is None:
            return int(self._firsts[shard]) + sample
        return int(self.numbers(np.array([shard]), np.array([sample]))[0])

    def numbers(self, shards: Ints, samples: Ints) -> Ints:
        """Return the number of each used sample among all samples of its shard, int64 (n,). `samples[i]` is the number
        among the used samples of the shard `shards[i]`: 0 <= samples[i] < counts[shards[i]].
        """
        places = self._firsts[shards] + samples
        return places if self._subset is None else self._subset.take(shards, places)

    def digest(self) -> str:
        """Return the hex sha256 of all values on which the order of samples depends: names and counts of the shards,
        and which samples are used. The paths of the folders do not change the digest.
        """
        digest = hashlib.sha256()
        for folder, numbers in self._runs():
            self._indexes[folder].hash_names(digest, numbers)
        for column in (self.file_counts, self._firsts, self.counts):
            digest.update(np.ascontiguousarray(column, dtype="<i8").data)
        if self._subset is not None:
            digest.update(self._subset.digest())
        return digest.hexdigest()

    def content(self) -> str:
        """Return a hex sha256 of the shards' digests in order. It identifies the bytes of the shards, and does not
        depend on their names.
        """
        digest = hashlib.sha256()
        for folder, numbers in self._runs():
            digest.update(np.ascontiguousarray(self._indexes[folder].digests[numbers]).data)
        return digest.hexdigest()

    def column(self, name: str) -> tuple[ColumnView, list[Column]]:
        """Return (view, columns) of the column `name`. `view` has the values of all samples of the shards, used or not.
        `columns` has the stored column of each folder; of several columns with equal files, it has only one. The table
        must have been made with `has_columns`, `split` or `where`.

        Raises:
            SelectionError: A folder does not have the column, the column is damaged, or its texts differ between
                folders.
            StorageError: A remote file cannot be copied.
        """
        runs = [(self._columns[folder].column(name), first, count) for folder, first, count in self._row_runs()]
        columns = list({column.sha256: column for column, _, _ in runs}.values())
        for column in columns:
            column.check()
        if len({column.values for column in columns}) > 1:
            raise columns[0].unfit("its texts are not the same in all folders. Use whole numbers, such as `cls`")
        return ColumnView(runs), columns

    def used(self) -> NDArray[np.bool_]:
        """Return for each sample whether it is used, shard after shard, bool (sum of file_counts,)."""
        if self.counts is self.file_counts:
            return np.ones(int(self.file_counts.sum()), dtype=np.bool_)
        mask = np.zeros(int(self.file_counts.sum()), dtype=np.bool_)
        starts = np.cumsum(self.file_counts) - self.file_counts
        for shard in np.flatnonzero(self.counts).tolist():
            samples = np.arange(self.counts[shard])
            mask[starts[shard] + self.numbers(np.full_like(samples, shard), samples)] = True
        return mask

    def use_only(self, mask: NDArray[np.bool_] | None) -> None:
        """Use the samples for which `mask` is True instead of the samples used now; None for all samples. `mask` has
        one bool for each sample of the shards, used or not, shard after shard: (sum of file_counts,).
        """
        self._subset = None if mask is None else Subset(self.file_counts, mask)
        self.counts: Ints = self.file_counts if self._subset is None else self._subset.counts
        self._firsts: Ints = np.zeros_like(self.file_counts)

    def _choose(self, split: str | None, where: str | None) -> NDArray[np.bool_] | None:
        """Return for each sample whether it is in the split and fulfils the condition, bool (sum of file_counts,).
        Return None if both arguments are None. The errors are those of `Columns.of_split` and `Where`.
        """
        if split is None and where is None:
            return None
        condition = None if where is None else Where(where)
        masks = []
        for columns in self._columns:
            found = [] if split is None else [columns.of_split(split)]
            found += [] if condition is None else [condition.mask(columns)]
            masks.append(functools.reduce(np.logical_and, found))
        return np.concatenate([masks[folder][first : first + count] for folder, first, count in self._row_runs()])

    def _row_runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (folder, first, count) for each run of neighbouring samples of a folder. Together, the runs have all
        samples of the shards, used or not, in order. `folder` is the number of the folder, `first` the number of the
        run's first sample in the folder, and `count` the number of samples.
        """
        rows = [np.concatenate([[0], np.cumsum(index.counts, dtype=np.int64)]) for index in self._indexes]
        for folder, numbers in self._runs():
            for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
                first = int(rows[folder][run[0]])
                yield folder, first, int(rows[folder][run[-1] + 1]) - first

    def _runs(self) -> list[tuple[int, Ints]]:
        """Return (folder, shards) for each run of successive shards in one folder: the number of the folder, and the
        numbers of the shards in its index.
        """
        edges = np.flatnonzero(np.diff(self._folder_numbers)) + 1
        firsts = [0, *edges.tolist()]
        return list(zip(self._folder_numbers[firsts].tolist(), np.split(self._numbers, edges), strict=True))

    def _column(self, columns: Sequence[NDArray[Any]]) -> Ints:
        """Return one value for each shard of this table, int64 (num_shards,). `columns[i]` has the values of all shards
        in the index of folder i.
        """
        parts = [columns[folder][numbers] for folder, numbers in self._runs()]
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")

    def _use_range(self, first: Bound, stop: Bound) -> None:
        """Narrow the used samples to those from number `first` to before number `stop`, counted over all shards. A
        Fraction is a share of the used samples, rounded down to a number. If `stop` is not above `first`, no sample is
        left.

        Raises:
            FolderIndexError: A bound that is an int is larger than the number of used samples.
        """
        total = int(self.counts.sum())
        beyond = [bound for bound in (first, stop) if isinstance(bound, int) and bound > total]
        if beyond:
            folder = self.folders[0]
            msg = f"{folder}: `range` ends at sample {beyond[-1]}, but there are {total} samples."
            raise FolderIndexError(f"{msg} Write a smaller number, or shares such as `100%`.", folder=folder)
        start, end = (
            min(total, int(bound * total) if isinstance(bound, Fraction) else bound) for bound in (first, stop)
        )
        starts = np.cumsum(self.counts) - self.counts
        self._firsts = np.clip(start - starts, 0, self.counts)
        self.counts = np.maximum(0, np.clip(end - starts, 0, self.counts) - self._firsts)


MAX_COMPARED = 100_000  # a folder with more shards is not listed: listing 10**6 takes 0.7 s


def find_indexed_shards(shards: str | Sequence[str], *, with_columns: bool = False) -> list[tuple[BinaryIndex, Ints]]:
    """Return the shards that a user named, in order, as runs (index, numbers): the index of a folder, and the numbers
    of one or more shards in this index, int64 (n,).

    Args:
        shards: A path, URL, glob, brace pattern or folder; several joined by `::`, or a list of them.
        with_columns: Also copy the list of columns of remote folders.

    Raises:
        StorageError: No shard matches, a shard is missing, a pattern or a URL is invalid, or a store cannot be read.
        FolderIndexError: A folder has no index, or its index does not match its shards. Or no shard matches in a local
            folder with an unfinished run.
        SelectionError: `with_columns` is True, and a remote folder has no list of columns, or the list is damaged.
    """
    names = [COLUMNS_NAME] if with_columns else []

    @functools.cache
    def open_index(folder: str) -> BinaryIndex:
        if is_local(folder):
            return BinaryIndex(Path(folder))
        return read_copy(folder, names, functools.partial(_open_copy, url=folder))

    compare = functools.cache(_compare_with_disk)
    number_names = functools.cache(
        lambda index: {each: number for number, each in enumerate(itertools.chain.from_iterable(index.names()))}
    )
    found: list[tuple[BinaryIndex, Ints | array[int]]] = []  # one array per run: saves 200 MB for 10**6 names
    for pattern in expand_patterns(shards):
        if not is_local(pattern):
            check_planned_url(pattern)
        folders = find_folders(pattern)
        if not folders:
            raise nothing_matches(pattern)
        for folder, name, is_glob in folders:
            path, local = join_url(folder, name), is_local(pattern)
            if local and not is_glob and not os.path.exists(path):
                raise shard_error(path, ABSENT)
            index = open_index(folder)
            if is_glob:
                if local:
                    compare(folder, index)
                numbers = _match_names(index, name)
                if not len(numbers):
                    raise nothing_matches(pattern)
                found.append((index, numbers))
            elif name in number_names(index):
                if not found or found[-1][0] is not index or not isinstance(found[-1][1], array):
                    found.append((index, array("q")))
                found[-1][1].append(number_names(index)[name])  # type: ignore[union-attr]
            else:
                raise shard_error(path, UNLISTED)
    if not found:
        raise StorageError("no shards: the list is empty. Name a path, a glob, a brace pattern or a folder.")
    return [(index, np.asarray(numbers, dtype=np.int64)) for index, numbers in found]


def _open_copy(copy: Path, *, url: str) -> BinaryIndex:
    index = BinaryIndex(copy, url=url)
    list_columns(copy, url)  # raises if the list is damaged, and `read_copy` downloads it again
    return index


def _match_names(index: BinaryIndex, name: str) -> Ints:
    """Return the numbers of the shards of an index whose names match the glob `name`, ascending, int64 (n,)."""
    if name in ("*", "*.tar"):
        return np.arange(len(index))
    matches = re.compile(fnmatch.translate(name)).match
    found = (matches(each) is not None for names in index.names() for each in names)
    return np.flatnonzero(np.fromiter(found, dtype=np.bool_, count=len(index)))


def _compare_with_disk(folder: str, index: BinaryIndex) -> None:
    """Raise FolderIndexError if a local folder and its index have different names of shards, or if the folder cannot
    be read. Do nothing if the index has more than `MAX_COMPARED` shards.
    """
    if len(index) > MAX_COMPARED:
        return
    try:
        on_disk = frozenset(os.listdir(folder or "."))
    except OSError as err:
        raise FolderIndexError(f"{folder or '.'}: cannot be read: {err.strerror}.", folder=folder) from err
    missing, unlisted = compare_names(on_disk, set(itertools.chain.from_iterable(index.names())))
    if unlisted:
        raise shard_error(join_url(folder, unlisted[0]), UNLISTED)
    if missing:
        raise shard_error(join_url(folder, missing[0]), LISTED_ABSENT)
