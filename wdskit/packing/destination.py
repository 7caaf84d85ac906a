"""The folder that is packed into: what it holds already, and what that forbids."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.index import INDEX_NAME, NO_EXPORTS, Exports, ShardEntry, read_index
from wdskit.dataset.samples import HeaderReader
from wdskit.errors import FolderIndexError, PackError, RowError
from wdskit.export.api import parse_exports
from wdskit.files import Disk, publish_bytes
from wdskit.packing.fill import check_free, taken
from wdskit.packing.finished import Finished, find_finished, indexed_already
from wdskit.packing.plan import Names
from wdskit.packing.planning import PlannedShard
from wdskit.packing.recorded import Ints
from wdskit.packing.rows import Row, row_error
from wdskit.packing.sources import Progress, Source, Tell
from wdskit.packing.spool import Spool, suspects
from wdskit.storage.urls import LocalFile

REJECTED_NAME = "rejected.jsonl"
DUPLICATES_NAME = "duplicates.jsonl"


class Intent(Protocol):
    """What may become of what stands in the folder: the options of `pack` that say so."""

    @property
    def append(self) -> bool:
        """Add to it."""

    @property
    def overwrite(self) -> bool:
        """Replace it."""

    @property
    def only(self) -> int | None:
        """Fill this shard again."""

    @property
    def dry_run(self) -> bool:
        """Nothing."""

    @property
    def may_add(self) -> bool:
        """Whether there is a word for adding to it."""


def check_place(folder: Path, source: object, options: Intent | None = None) -> None:
    """Refuse what can be refused before a row is read.

    Raises:
        PackError: The folder lies in the source, is indexed and should not be, or the other way round.
    """
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        root = os.path.realpath(os.fsdecode(source))
        if os.path.commonpath([root, os.path.realpath(folder)]) == root:
            msg = f"{folder}: it lies in the source {os.fsdecode(source)}, and would be a part of it the next time."
            raise PackError(f"{msg}\n  Pack into a folder outside of it.")
    is_indexed = (folder / INDEX_NAME).exists()
    may_be = options and (options.append or options.overwrite or options.only is not None)
    if is_indexed and not may_be and _may_go_on(folder, options) is None:
        raise indexed_already(folder, may_add=options is None or options.may_add)
    if options and options.append and not is_indexed:
        msg = f"{folder}: append: it has no index, so there is nothing to add to. Pack it without --append."
        raise PackError(f"{msg}\n  If others wrote shards there, run `wdskit index {folder}` first.")
    if options and options.only is not None and not is_indexed:
        raise PackError(f"{folder}: only: it has no index, so it is not packed yet. Pack it without --only.")


def _may_go_on(folder: Path, options: Intent | None) -> Finished | None:
    """A run that was killed at its very end, of which this one may be the same."""
    return None if options is None or options.dry_run or options.only is not None else find_finished(folder)


@dataclass(frozen=True)
class Destination:
    """A locked folder to pack into.

    Attributes:
        folder: Where it is.
        append: Whether it is indexed, and added to.
        entries: Shards that it has already and that stay, from its index.
        replaced: Names of the shards that are going to be replaced.
        also: What the index says that is kept beside them for other readers.
        finished: A run that came as far as the index, and that this one may be. All else is as it was before that.
    """

    folder: Path
    append: bool = False
    entries: tuple[ShardEntry, ...] = ()
    replaced: tuple[str, ...] = ()
    also: Exports = NO_EXPORTS
    finished: Finished | None = None

    def beside(self, kinds: Sequence[str], split_name: str) -> Exports:
        """What is to be kept beside all shards: these kinds, and what is kept already.

        Raises:
            PackError: The shards here have not all of them.
        """
        also = parse_exports(kinds, split_name=split_name, before=self.also)
        if self.append and also != self.also:
            msg = f"{self.folder}: its shards were packed with other files for other readers beside them."
            raise PackError(f"{msg}\n  Run `wdskit index {self.folder} --also ...` first, then add to them.")
        return also

    def first_number(self, names: Names) -> int:
        """The number of the first new shard: behind all that the index has under this pattern."""
        numbers = (names.number_of(entry.name) for entry in self.entries)
        return max((number for number in numbers if number is not None), default=-1) + 1

    def check_keys(self, spool: Spool, kept: Ints | None, tell: Tell) -> None:
        """Refuse planned rows, of which `kept` count, whose keys the shards here have already.

        Raises:
            RowError: One has.
            ShardError: A shard here is damaged.
        """
        found = suspects(spool, kept, self.hashes_of_keys(tell))
        if len(found):
            known = self.taken_of(row.key for row in spool.take(found))
            for row in spool.take(found):
                if row.key in known:
                    raise self.key_taken(row)

    def hashes_of_keys(self, tell: Tell) -> Ints:
        """A hash of this process of each key that the shards here have, sorted. The headers of all are read.

        Raises:
            ShardError: One is damaged.
        """
        hashes = np.frombuffer(array("q", map(hash, self._all_keys(tell))), dtype=np.int64)
        hashes.sort()
        return hashes

    def taken_of(self, keys: Iterable[str]) -> set[str]:
        """Those of some keys that the shards here have. All their headers are read, where there is a key."""
        suspects = {*keys}
        return suspects.intersection(self._all_keys(lambda _: None)) if suspects else suspects

    def key_taken(self, row: Row) -> RowError:
        """The error of a row whose key the shards here have."""
        remedy = "Keys must be unique. Rename it; or name a column of a table that has them: --key-column."
        return row_error(row.where, f"its key {row.key!r} is in {self.folder} already", remedy)

    def _all_keys(self, tell: Tell) -> Iterator[str]:
        num_keys = num_bytes = 0
        total_bytes = sum(entry.num_bytes for entry in self.entries)
        total_samples = sum(entry.num_samples for entry in self.entries)
        for entry in self.entries:
            tell(Progress("comparing", num_keys, num_bytes, total_samples, total_bytes))
            yield from self._keys(entry)
            num_keys += entry.num_samples
            num_bytes += entry.num_bytes

    def _keys(self, entry: ShardEntry) -> Iterator[str]:
        path = str(self.folder / entry.name)
        file = LocalFile(path)
        try:
            for sample in HeaderReader(file, shard=path):
                yield sample["__key__"]
        finally:
            file.close()

    def check_free(self, shards: Sequence[PlannedShard]) -> None:
        """Refuse shards in the way, and those that no index would know, before anything is written.

        Raises:
            PackError: Names one.
        """
        for shard in () if self.replaced else shards:
            check_free(self.folder / shard.name, shard.num_bytes)
        self.check_strays([shard.name for shard in shards])

    def check_strays(self, new: Iterable[str]) -> None:
        """Refuse shards that are neither indexed nor among the new ones.

        Raises:
            PackError: Names one.
        """
        known = {*new, *self.replaced, *(entry.name for entry in self.entries)}
        strays = sorted(path.name for path in self.folder.glob("[!.]*.tar") if path.name not in known)
        if strays:
            msg = f"{self.folder / strays[0]}: this shard is not one of those being packed."
            remedy = "Move it away, or remove it if a run that was stopped left it; or pack into another folder."
            raise PackError(f"{msg} No index was written.\n  {remedy}")

    def lists(self, found: Source) -> dict[str, bytes]:
        """The bytes of `classes.json`, `rejected.jsonl` and `duplicates.jsonl`, where there is something to write."""
        lists = {}
        if found.classes and not self.append:
            lists[CLASSES_NAME] = (json.dumps(dict(found.classes), ensure_ascii=False, indent=0) + "\n").encode()
        rejected: list[object] = [{"where": err.where, "reason": err.problem} for err in found.rejected]
        for name, told in ((REJECTED_NAME, rejected), (DUPLICATES_NAME, [one.told() for one in found.duplicates])):
            if told:
                lines = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in told)
                # Half a surrogate pair, of a file name that is no UTF-8, is written as JSON escapes it.
                added = lines.encode(errors="backslashreplace")
                before = self._before(name)
                lists[name] = before if before.endswith(added) else before + added
        return lists

    def _before(self, name: str) -> bytes:
        """What is added to. A run that was killed just before its index has added its lines already."""
        path = self.folder / name
        return path.read_bytes() if self.append and path.exists() else b""

    def check_lists(self, lists: Mapping[str, bytes]) -> None:
        """Refuse to replace a list that something else has written, or to leave one that is not of this run.

        Raises:
            PackError: Names one.
        """
        for name in () if self.append or self.replaced else sorted({*lists, REJECTED_NAME, DUPLICATES_NAME}):
            path = self.folder / name
            if path.exists() and path.read_bytes() != lists.get(name):
                raise taken(path)

    def publish_lists(self, lists: Mapping[str, bytes], *, disk: Disk) -> None:
        """Write `classes.json`, `rejected.jsonl` and `duplicates.jsonl`."""
        for name, data in lists.items():
            publish_bytes(self.folder / name, data, disk=disk)


def look_at_destination(folder: Path, options: Intent | None, classes: Mapping[str, int]) -> Destination:
    """Look at the folder to pack into.

    Raises:
        PackError: It is indexed and should not be, or the other way round, or its classes are others.
        FolderIndexError: It is to be added to and has no index, or its index does not match its shards.
    """
    check_place(folder, None, options)
    finished = _may_go_on(folder, options)
    if options and options.overwrite and finished is None:
        old = read_index(folder).entries if (folder / INDEX_NAME).exists() else ()
        return Destination(folder, replaced=tuple(entry.name for entry in old))
    if options is None or not options.append:
        return Destination(folder, finished=finished)
    index = read_index(folder)
    _check_sizes(folder, index.entries)
    _check_classes(folder, classes)
    entries = index.entries if finished is None else finished.before
    return Destination(folder, append=True, entries=entries, also=index.also, finished=finished)


def _check_sizes(folder: Path, entries: Iterable[ShardEntry]) -> None:
    """Compare the index with its shards. Others may stand there: those of an addition that was stopped."""
    for entry in entries:
        path = folder / entry.name
        num_bytes = path.stat().st_size if path.exists() else None
        if num_bytes != entry.num_bytes:
            what = "is not there" if num_bytes is None else f"has {num_bytes} bytes, not {entry.num_bytes}"
            msg = f"{folder / INDEX_NAME}: it does not match the shards: {entry.name} {what}."
            raise FolderIndexError(f"{msg}\n  Put it right, or run `wdskit index {folder}`.", folder=str(folder))


def _check_classes(folder: Path, classes: Mapping[str, int]) -> None:
    path = folder / CLASSES_NAME
    try:
        known = json.loads(path.read_bytes()) if path.exists() else {}
    except (ValueError, RecursionError) as err:
        raise PackError(f"{path}: it is no JSON: {err}.") from err
    if known != dict(classes):
        msg = f"{path}: it has other classes ({len(known)}) than what is added ({len(classes)})"
        if not known or not classes:
            raise PackError(f"{msg}: one of them has labels without names.\n  Pack into another folder.")
        name = next(name for name in [*classes, *known] if known.get(name) != classes.get(name))
        numbers = f"{name!r} is {known.get(name, 'not there')} and {classes.get(name, 'not there')}"
        remedy = f"Images get the numbers that are there with --classes {folder}; new classes need another folder."
        raise PackError(f"{msg}: {numbers}.\n  {remedy}")
