"""The shards of a planned source as arrays, made from the indexes of their folders. No shard is opened."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.columns import COLUMNS_NAME, Column, Columns, ColumnView, list_columns
from wdskit.dataset.index import Index, ShardEntry, read_index
from wdskit.dataset.patterns import check_found, find_shards, refuse_doubles
from wdskit.dataset.remote import read_copy
from wdskit.dataset.subset import Subset
from wdskit.dataset.where import Where
from wdskit.errors import FolderIndexError
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
            the number of samples, or no sample is left.
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
        names = [COLUMNS_NAME] if needs_columns else []
        found = find_shards(shards, functools.partial(_open_index, names=names), needs_index=True, is_absolute=True)
        check_found(found)
        refuse_doubles(found, "make a `mixture` of parts with `repeat` or `weight`")
        pairs = [(one.index, one.names) for one in found if one.index is not None]
        self._indexes = [*dict.fromkeys(index for index, _ in pairs)]
        folders = np.array([self._indexes.index(index) for index, _ in pairs], dtype=np.int32)
        self._folder_numbers = np.repeat(folders, [len(names) for _, names in pairs])
        shards_of = [index.by_name[name] for index, names in pairs for name in names]
        self._numbers: Ints = np.array(shards_of, dtype=np.int64)
        self._columns = [Columns(index) for index in self._indexes] if needs_columns else []
        self.file_counts: Ints = self._column([index.counts for index in self._indexes])
        if self.file_counts.sum(dtype=np.float64) >= _MOST_SAMPLES:  # as int64, the sum may overflow
            folder = self.folders[0]
            msg = f"{folder}: the index says that a shard has {self.file_counts.max()} samples."
            raise FolderIndexError(f"{msg}\n  Run `wdskit index {folder}`.", folder=folder)
        mask = self._choose(split, where)
        self._subset = None if mask is None else Subset(self.file_counts, mask)
        self.counts: Ints = self.file_counts if self._subset is None else self._subset.counts
        self._firsts: Ints = np.zeros_like(self.file_counts)
        total = int(self.counts.sum())
        if bounds is not None:
            self._use_range(*bounds)
        if not self.counts.sum():
            folder = self.folders[0]
            of = f" of the split {split!r}" if split else ""
            of += f" with `where: {where}`" if where else ""
            where = f"this range of {total} samples" if bounds is not None and total else "these shards"
            raise FolderIndexError(f"{folder}: there are no samples{of} in {where}.", folder=folder)

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
        return any(index.is_remote for index in self._indexes)

    @property
    def remote(self) -> NDArray[np.bool_]:
        """Whether each shard is remote: bool (num_shards,)."""
        return np.array([index.is_remote for index in self._indexes], np.bool_)[self._folder_numbers]

    def is_remote_shard(self, shard: int) -> bool:
        """Return True if a shard is remote."""
        return self._indexes[int(self._folder_numbers[shard])].is_remote

    def sample_bytes(self) -> NDArray[np.float64]:
        """Return the mean size of a sample of each shard in bytes, with headers and padding: float64 (num_shards,). The
        value is 0 for a shard without samples.
        """
        sizes = self._column([index.sizes for index in self._indexes])
        return np.where(self.file_counts > 0, sizes / np.maximum(self.file_counts, 1), 0.0)

    def path(self, shard: int) -> str:
        """Return the path or URL of a shard, 0 <= shard < len(self). In a URL, the name is percent-encoded."""
        return self._indexes[int(self._folder_numbers[shard])].url(int(self._numbers[shard]))

    def entry(self, shard: int) -> ShardEntry:
        """Return the index entry of a shard by its number in this table."""
        return self._indexes[int(self._folder_numbers[shard])].entry(int(self._numbers[shard]))

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
            names = [self._indexes[folder].names[number].encode() for number in numbers.tolist()]
            digest.update(b"".join(names))
            digest.update(np.array([*map(len, names)], dtype="<i8").tobytes())
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

    def number_all(self) -> None:
        """Let `number` and `numbers` take the number of a sample among all samples of its shard, used or not. `counts`
        does not change. `used` and `digest` must have been called before.
        """
        self._subset, self._firsts = None, np.zeros_like(self.file_counts)

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


def _open_index(folder: str, *, names: Sequence[str]) -> Index:
    """Return the index of a folder. Of a remote folder, the index and the files `names` are copied first."""
    if is_local(folder):
        return read_index(folder)

    def read(copy: Path) -> Index:
        index = read_index(folder, copy=copy)
        list_columns(copy, folder)  # raises if the list is damaged, and `read_copy` downloads it again
        return index

    return read_copy(folder, names, read)
