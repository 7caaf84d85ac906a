"""Fill one shard: read its rows, check and change them, write tar, `.idx` and entry. Runs in any process.

The files of a job are named by the digest of everything that decides the bytes. So a job is done if its entry is there,
and its files have the size and the offsets that the entry says (`read_filled`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import share_lock
from wdskit.dataset.shard import digest_offsets, idx_bytes
from wdskit.errors import DecodeError, FolderIndexError, KeyRuleError, RowError
from wdskit.files import DISK, Disk, describe_foreign, publish, publish_bytes, read_own
from wdskit.packing.change_sample import Change
from wdskit.packing.plan import Rows, with_dtypes
from wdskit.packing.row import Field, File, Label, LabelledJson, Row, SourceFiles, bad_row
from wdskit.shards.make_columns import ColumnBuilder, reader_of
from wdskit.tar.writer import TarWriter

_NOTE_VERSION = 1


class ShardJob(NamedTuple):
    """One shard to fill.

    Attributes:
        name: File name of the shard.
        rows: Its rows.
        digest: 32 hex digits that identify everything that decides the bytes of the shard; its files have this name.
    """

    name: str
    rows: Rows
    digest: str


class Filled(NamedTuple):
    """A filled shard. The file of its entry, named by the digest, is the proof that shard and `.idx` are whole.

    Attributes:
        digest: Digest of its job.
        entry: Its entry in `index.json`.
        columns: Values of each column.
    """

    digest: str
    entry: ShardEntry
    columns: Mapping[str, list[object]]


@dataclass(frozen=True)
class Filler:
    """What all jobs of a run share: how rows become samples.

    Attributes:
        work: The folder for the files of the jobs.
        change: The checks and changes of each sample.
        class_numbers: Class number of each class name.
        dtypes: Dtype of each `npy` column.
        columns: How each column is computed, by its name.
        disk: Performs the file operations.
    """

    work: Path
    change: Change
    class_numbers: Mapping[Any, int] = field(default_factory=dict)
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disk: Disk = DISK

    def digest_options(self) -> bytes:
        """Return, as bytes, all options that decide the bytes of a shard."""
        options = [_NOTE_VERSION, self.change.to_json(), self.class_numbers, self.dtypes, self.columns]
        return json.dumps(options, sort_keys=True, default=str).encode()

    def read(self, row: Row, files: SourceFiles) -> dict[str, bytes]:
        """Return the fields of a row as they are packed, sorted by name.

        Raises:
            RowError: A file cannot be read or was changed, or a field is damaged, does not fit its name, or cannot be
                changed.
        """
        name = ""  # of the field that is checked
        row = with_dtypes(row, self.dtypes)
        try:
            fields = {
                name: files.read(data) if type(data) is File else self._encode(row, data)
                for name, data in row.fields.items()
            }
            if self.change.changes_bytes:
                return self.change.apply(row.key, fields)
            for name in fields if self.change.checks is None else self.change.checks & fields.keys():
                self.change.check(name, fields[name])
        except (OSError, ValueError, DecodeError, KeyRuleError) as err:
            raise _failed(row, name, err) from err
        return fields

    def _encode(self, row: Row, data: Field) -> bytes:
        """Return the bytes of a field that is not a file."""
        if isinstance(data, bytes) and type(data) is not LabelledJson:
            return data
        label = row.fields[CLASS_FIELD]
        assert isinstance(label, Label)
        number = str(self.class_numbers.get(label.value, label.value)).encode()
        return data.replace(b"\0", number) if isinstance(data, LabelledJson) else number

    def find_bad(self, rows: Rows) -> dict[int, RowError]:
        """Return the error of each row that cannot be packed, by its position in `rows`."""
        found: dict[int, RowError] = {}
        with contextlib.closing(SourceFiles()) as files:
            for at, row in enumerate(rows):
                try:
                    self.read(row, files)
                except RowError as err:
                    found[at] = err
        return found

    def fill(self, job: ShardJob) -> Filled:
        """Fill a shard. A shared lock on the folder `work` is held meanwhile.

        Raises:
            RowError: A row cannot be packed.
            OSError: The folder cannot be written.
            SelectionError: A sample has no valid value for a column.
        """
        tar = self.work / f"{job.digest}.tar"
        names, offsets, columns = set[str](), [0], ColumnBuilder(self.columns, job.name)
        with share_lock(self.work), contextlib.closing(SourceFiles()) as files:
            with publish(tar, disk=self.disk) as temp:
                writer = TarWriter(temp.write)
                for row in job.rows:
                    fields = self.read(row, files)
                    names |= fields.keys()
                    for name, data in fields.items():
                        writer.add(f"{row.key}.{name}", data)
                        if self.columns:
                            columns.add(name, len(data), reader_of(data))
                    if self.columns:
                        columns.end(row.key)
                    offsets.append(writer.offset)
                writer.finish()
                sha256 = temp.sha256
            publish_bytes(tar.with_suffix(".idx"), idx_bytes(offsets), disk=self.disk)
            fields_found, idx_sha256 = tuple(sorted(names)), digest_offsets(offsets)
            entry = ShardEntry(job.name, len(offsets) - 1, writer.offset, sha256, fields_found, idx_sha256)
            filled = Filled(job.digest, entry, columns.values())
            publish_note(tar.with_suffix(".json"), {"entry": asdict(entry), "columns": filled.columns}, disk=self.disk)
            return filled


def _failed(row: Row, name: str, err: Exception) -> RowError:
    """Return the error of a row. It names the file of the field `name`, if `row.where` does not."""
    problem = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
    source = row.fields.get(getattr(err, "field", None) or name)
    is_other = isinstance(source, File) and not row.where.startswith(source.path)
    return bad_row(row.where, f"{source.path}: {problem}" if is_other else problem)  # type: ignore[union-attr]


def read_filled(work: Path, name: str, digest: str, *, has_files: bool = True) -> Filled | None:
    """Return the filled shard of a job under the name `name`; None if it is not filled, or if its files are not as the
    entry says. With `has_files` False, the files are elsewhere and not looked at.

    Raises:
        FolderIndexError: The entry is damaged, foreign or of another version.
    """
    path = work / f"{digest}.json"
    note = parse_note(read_own(path), path)
    if note is None:
        return None
    entry = ShardEntry(**note["entry"] | {"name": name, "fields": tuple(note["entry"]["fields"])})
    tar = work / f"{digest}.tar"
    is_filled = not has_files or is_whole(tar, tar.with_suffix(".idx"), entry)
    return Filled(digest, entry, note["columns"]) if is_filled else None


def is_whole(tar: Path, idx: Path, entry: ShardEntry) -> bool:
    """Return whether the files of a shard exist, and have the size and the offsets of its entry."""
    try:
        found = tar.stat().st_size, hashlib.sha256(idx.read_bytes()).hexdigest()
    except OSError:
        return False
    return found == (entry.num_bytes, entry.idx_sha256)


def publish_note(path: Path, values: Mapping[str, Any], *, disk: Disk) -> None:
    """Publish a file of two lines: a JSON object, and its digest, for `parse_note`. OSError: `disk` fails."""
    text = json.dumps(values).encode()
    publish_bytes(path, b"%b\n%b" % (text, _check_of(text)), disk=disk)


def parse_note(data: bytes | None, path: Path) -> dict[str, Any] | None:
    """Return the values in the bytes of a file of `publish_note`; None for None. `path` is for the message.

    Raises:
        FolderIndexError: The file is damaged, foreign or of another version.
    """
    if data is None:
        return None
    text, _, check = data.partition(b"\n")
    if check != _check_of(text):
        raise FolderIndexError(describe_foreign(path, "is damaged, or of another version"), folder=str(path.parent))
    values: dict[str, Any] = json.loads(text)
    return values


def _check_of(text: bytes) -> bytes:
    return hashlib.sha256(b"%d %b" % (_NOTE_VERSION, text)).hexdigest().encode()
