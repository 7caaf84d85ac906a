"""Rows from tars, local or in a store: samples of others for `pack`, and finished shards for `reshard`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME, common_classes
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import any_index, list_shards, split_url
from wdskit.dataset.samples import HeaderReader, ShardReader
from wdskit.dataset.shard import DigestedFile
from wdskit.dataset.shard_table import ShardTable
from wdskit.errors import FolderIndexError, PackError, RowError, ShardError
from wdskit.packing.row import SAME_FIELD, Field, File, Reading, Row, bad_row
from wdskit.packing.sources.records import Records, Source, add_field, read_object
from wdskit.storage.urls import LocalFile, is_local, local_path, open_stream, shown_url
from wdskit.tar.walk import Span

_ARCHIVES = frozenset({"tar", "zip", "gz", "tgz", "tar.gz"})


class Tars(Source):
    """The samples of tars, in order, with the fields that they have. `cls` is a label, as in a table.

    Args:
        source: Path, URL, pattern or folder of tars; several joined by `::`, or a list of them.
        how: How a sample becomes a row.

    Attributes:
        classes: Class names in the `classes.json` of the folders, in the order of their numbers; None without them.

    Raises:
        StorageError: No tar matches, a local tar is missing, a URL is invalid, or a store cannot be read.
        FolderIndexError: An index is invalid or does not match its tars, or a `classes.json` is invalid or contradicts
            another.
    """

    reads = frozenset({"fields"})
    keeps_keys: ClassVar[bool] = True

    def __init__(self, source: str | Sequence[str], how: Reading) -> None:
        super().__init__(source if isinstance(source, str) else "::".join(source), how)
        self._seen: set[str] = set()  # fields of all samples so far
        self._faults: dict[str, str] = {}  # keys of the samples of a tar that are not whole, and why
        self._used: list[NDArray[np.bool_]] | None = None  # which samples of each tar are rows; None for all
        self._records = Records("", how)
        self._num_samples = 0
        self._of_field: dict[str, int] = {}  # number of the only sample with this dotted field; -1 for several
        self._has_folders = False
        found = list_shards(source, any_index)
        self._shards = [*zip(found.urls, found.entries, strict=True)]
        way_out = "leave the labels out: `wdskit reshard --drop cls`."
        common = common_classes(found.folders, found.folders.__getitem__, way_out=way_out)
        self.classes = None if common.problem else common.names
        if common.problem:
            self.notes.append(f"{common.problem}, so no {CLASSES_NAME} is written.")

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per sample, in the order of the tars. A key that changes is kept in `json`. A sample with a
        member that is no field, such as a link, gives a `RowError` after the tar. A damaged tar gives the whole samples
        before the damage, then one `RowError`.

        Raises:
            FolderIndexError: The tar has another size or number of samples than its index entry.
            StorageError: The tar cannot be read.
            PackError: `_finish` found a fault of all samples together.
        """
        for at, (url, entry) in enumerate(self._shards):
            place = local_path(url) if is_local(url) else shown_url(url)
            name = "/".join((os.path.abspath(place) if is_local(url) else place).split("/")[-2:])
            try:
                for number, sample in enumerate(self._read(url, place, entry)):
                    key = sample["__key__"]
                    if key not in self._faults and (self._used is None or self._used[at][number : number + 1].any()):
                        yield self.row(f"{place}: {key}", self._fields, key, sample, name=name)
            except ShardError as err:
                problem = f"{err.problem} ({err.samples_read} samples read), and everything after it is lost"
                yield bad_row(f"{place}, byte {err.offset}", problem)
            yield from (bad_row(f"{place}: {key}", problem) for key, problem in self._faults.items())
            self._faults.clear()
        self._finish()

    def _note_fault(self, _: int, key: str, problem: str) -> None:
        self._faults.setdefault(key, problem)

    def _read(self, url: str, place: str, entry: ShardEntry | None) -> Iterator[dict[str, Any]]:
        """Yield the samples of a tar. Of a local tar only headers are read: the fields are parts of it.

        FolderIndexError: After the last sample: the tar has other bytes or samples than its index entry.
        """
        shard = DigestedFile(open_stream(url, takes_pipe=False))
        with contextlib.closing(shard.file) as file:
            if isinstance(file, LocalFile):
                status = os.fstat(file.fd)
                reader: ShardReader = HeaderReader(file, shard=place, on_fault=self._note_fault)
            else:
                reader = ShardReader(shard.read, shard=place, on_fault=self._note_fault)
            try:
                for sample in reader:
                    for name, data in sample.items():
                        if type(data) is Span:
                            sample[name] = File(place, data.offset, data.size, status.st_size, status.st_mtime_ns)
                    self._seen.update(sample)
                    yield sample
            finally:
                self._seen -= {"__key__", "__url__"}
                self.num_other += reader.num_ignored
            num_bytes = shard.num_bytes or status.st_size
        sha256 = shard.sha256.hexdigest() if shard.num_bytes or entry is None else entry.sha256
        if entry and (num_bytes, reader.num_samples, sha256) != (entry.num_bytes, entry.num_samples, entry.sha256):
            raise FolderIndexError(f"{place}: it is not the shard that the index lists.", folder=split_url(url)[0])

    def _fields(self, key: str, sample: Mapping[str, Any]) -> tuple[str, dict[str, Field]]:
        """Return the key and the fields to pack. ValueError: The sample cannot be packed."""
        self._num_samples += 1
        self._has_folders |= "/" in key
        fields: dict[str, Field] = {}
        for given, data in sample.items():
            name = SAME_FIELD.get(given, given)
            if name in _ARCHIVES:
                raise ValueError(f"its field {name!r} is an archive. Extract it, and pack its files")
            if "." in name:
                self._of_field[name] = -1 if name in self._of_field else self._num_samples
            if not name.startswith("__"):
                add_field(fields, name, data)
        if self.how.fields:
            self._records.add_fields(fields, read_object(fields), self.how.fields)
        return key, fields

    def _finish(self) -> None:
        """Check all samples together. PackError: The check fails."""
        own = {field: number for field, number in self._of_field.items() if number >= 0}
        num = len({*own.values()})
        kinds = {(number, field.rpartition(".")[2]) for field, number in own.items()}
        if num * 2 > self._num_samples and (num > 1 or len(kinds) < len(own)):
            msg = f"{self.path}: {num} of {self._num_samples} samples have a field that no other sample has, such as "
            msg += f"{next(iter(own))!r}. The first dot of a member's name cuts it into key and field."
            raise PackError(f"{msg}\n  Extract the tar and pack the folder, which cuts at the last dot.")
        if CLASS_FIELD not in {*self._seen, *self.how.fields} and (
            self._has_folders or all(is_image_field(SAME_FIELD.get(name, name)) for name in self._seen)
        ):
            self.notes.append("no sample has a class: folder names in tars are not labels. A folder's are: extract it.")


class Shards(Tars):
    """Finished shards, whose fields are copied.

    Args:
        source: As for `Tars`.
        where: Condition on the columns of the folders that is true for the samples to keep; None for all.
        keep: Names of the fields to keep; empty for all.
        drop: Names of the fields to leave out.
        rename: New names of fields, by their old names.

    Raises:
        StorageError, FolderIndexError: As for `Tars`; with `where`, also for a folder without an index.
        SelectionError: `where` is invalid, or a column is missing or damaged.
    """

    copies: ClassVar[bool] = True

    def __init__(
        self,
        source: str | Sequence[str],
        *,
        where: str | None,
        keep: Collection[str],
        drop: Collection[str],
        rename: Mapping[str, str],
    ) -> None:
        super().__init__(source, Reading())
        self._keep, self._drop, self._rename = keep, drop, rename
        if where is not None:
            table = ShardTable(source, where=where)
            self._used = np.split(table.used(), np.cumsum(table.file_counts)[:-1])
        if not self._is_kept(CLASS_FIELD) or CLASS_FIELD in {*rename.keys(), *rename.values()}:
            self.classes = None  # the names belong to another field

    def _is_kept(self, name: str) -> bool:
        return name not in self._drop and (not self._keep or name in self._keep) and not name.startswith("__")

    def _fields(self, key: str, sample: Mapping[str, Any]) -> tuple[str, dict[str, Field]]:
        fields: dict[str, Field] = {}
        for name, data in sample.items():
            if self._is_kept(name):
                add_field(fields, self._rename.get(name, name), data)
        return key, fields

    def _finish(self) -> None:
        unknown = {*self._keep, *self._drop, *self._rename} - self._seen
        if unknown:
            known = ", ".join(sorted(self._seen))
            raise PackError(f"{min(unknown)}: no sample has this field. The fields are {known}.")
