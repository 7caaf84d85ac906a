"""The folder that is packed into: what it holds already, and what that forbids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.grouping import ShardReader
from wdskit.dataset.index import INDEX_NAME, ShardEntry, read_index
from wdskit.errors import PackError
from wdskit.files import Disk, remove_drafts
from wdskit.packing.plan import Names
from wdskit.packing.rows import Row, row_error
from wdskit.storage.urls import LocalFile

CLASSES_NAME = "classes.json"
REJECTED_NAME = "rejected.jsonl"


@dataclass(frozen=True)
class Destination:
    """A locked folder to pack into.

    Attributes:
        folder: Where it is.
        entries: Shards that it has already, from its index.
    """

    folder: Path
    entries: tuple[ShardEntry, ...]

    def first_number(self, names: Names) -> int:
        """The number of the first new shard: behind all that the index has under this pattern."""
        known = {entry.name for entry in self.entries}
        number = 0
        while names[number] in known:
            number += 1
        return number

    def refuse_taken(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, none of whose keys the shards here have already.

        Raises:
            RowError: One has.
        """
        taken = {key for entry in self.entries for key in self._keys(entry)}
        for row in rows:
            if row.key in taken:
                raise row_error(row.where, f"its key {row.key!r} is in {self.folder} already", "Keys must be unique.")
            yield row

    def _keys(self, entry: ShardEntry) -> Iterator[str]:
        path = str(self.folder / entry.name)
        file = LocalFile(path)
        try:
            for sample in ShardReader(file.read, shard=path):
                yield sample["__key__"]
        finally:
            file.close()

    def check_strays(self, new: Sequence[ShardEntry]) -> None:
        """Refuse shards that no index would know.

        Raises:
            PackError: Names one.
        """
        known = {entry.name for entry in (*self.entries, *new)}
        strays = sorted(path.name for path in self.folder.glob("[!.]*.tar") if path.name not in known)
        if strays:
            msg = f"{self.folder / strays[0]}: this shard is not one of those being packed."
            raise PackError(f"{msg}\n  Move it away, or pack into another folder. No index was written.")


def open_destination(folder: Path, *, append: bool, classes: Mapping[str, int], disk: Disk) -> Destination:
    """Look at a folder that is locked, and remove what a killed run left unfinished.

    Raises:
        PackError: It is indexed and not to be added to, or the other way round, or its classes are others.
        FolderIndexError: Its index does not match its shards.
    """
    if not append and (folder / INDEX_NAME).exists():
        msg = f"{folder}: this folder is packed and indexed already."
        raise PackError(f"{msg}\n  Pack into another folder, or add to it with --append.")
    entries: tuple[ShardEntry, ...] = ()
    if append:
        index = read_index(folder)
        _check_classes(folder, classes)
        entries = index.entries
    try:
        remove_drafts(folder, disk=disk)
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {err.strerror or err}.") from err
    return Destination(folder, entries)


def _check_classes(folder: Path, classes: Mapping[str, int]) -> None:
    path = folder / CLASSES_NAME
    try:
        known = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as err:
        raise PackError(f"{path}: it is no JSON: {err}.") from err
    if known != dict(classes):
        msg = f"{path}: it has other classes ({len(known)}) than what is added ({len(classes)})."
        raise PackError(f"{msg}\n  The same names in both give the same numbers; add empty folders for those missing.")


def classes_json(classes: Mapping[str, int]) -> bytes:
    """The bytes of `classes.json`: `{name: number}`, a class a line."""
    return (json.dumps(dict(classes), ensure_ascii=False, indent=0) + "\n").encode()
