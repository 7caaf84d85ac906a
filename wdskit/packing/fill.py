"""Fill one shard: read its rows, check and change them, write tar, `.idx` and entry. Runs in any process.

The files of a job are named by the digest of everything that decides the bytes. So a job is done if its entry is there,
and its files are as the entry says (`read_entry`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.fields import encode_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.lock import share_lock_until_exit
from wdskit.dataset.shard import digest_offsets, idx_bytes
from wdskit.errors import DecodeError, FolderIndexError, KeyRuleError, PackError, RowError
from wdskit.files import DISK, Disk, describe_foreign, describe_os_error, publish, publish_bytes, read_own
from wdskit.packing.change import Change
from wdskit.packing.plan import Rows, with_dtypes
from wdskit.packing.row import Field, File, Label, LabelledJson, Row, SourceFiles, Values, bad_row
from wdskit.shards.make_columns import ColumnBuilder, reader_of
from wdskit.tar.writer import TarWriter

_NOTE_VERSION = 1

OnSample = Callable[[int, int], None]
"""Called after each sample with the numbers of samples and of bytes of the shard so far."""


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
    class_numbers: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    disk: Disk = DISK

    def digest_options(self) -> bytes:
        """Return, as bytes, all options that decide the bytes of a shard."""
        dtypes = {name: dtype.str for name, dtype in self.dtypes.items()}
        columns = {name: dict(source) for name, source in self.columns.items()}
        options = [_NOTE_VERSION, self.change.to_json(), dict(self.class_numbers), dtypes, columns]
        return json.dumps(options, sort_keys=True, default=str).encode()

    def read(self, row: Row, files: SourceFiles) -> dict[str, bytes]:
        """Return the fields of a row as they are packed, sorted by name.

        Raises:
            RowError: A file cannot be read or was changed, or a field is damaged, does not fit its name, or cannot be
                changed.
        """
        name = ""  # of the field that is checked
        try:
            read = iter(files.read([data for data in row.fields.values() if type(data) is File]))
            fields = {
                name: next(read) if type(data) is File else self._encode(row, data) for name, data in row.fields.items()
            }
            if self.change.changes_bytes:
                return self.change.apply(row.key, fields)
            for name, data in fields.items():
                self.change.check(name, data)
        except (OSError, ValueError, DecodeError, KeyRuleError) as err:
            raise _failed(row, name, err) from err
        return fields

    def _encode(self, row: Row, data: Field) -> bytes:
        """Return the bytes of a field that is not a file."""
        if type(data) is bytes:
            return data
        if isinstance(data, LabelledJson):
            label = row.fields[CLASS_FIELD]
            assert isinstance(label, Label)
            return data.replace(b"\0", b"%d" % self._number(label))
        if isinstance(data, Label):
            return b"%d" % self._number(data)
        assert isinstance(data, Values)
        return encode_field("npy", data.array)

    def _number(self, label: Label) -> int:
        return self.class_numbers[label.value] if isinstance(label.value, str) else label.value

    def find_bad(self, rows: Rows) -> list[RowError | None]:
        """Return the error of each row that cannot be packed, and None for each other row. `pack.leave_out_bad` lists
        them in `rejected.jsonl`.
        """
        found: list[RowError | None] = []
        with contextlib.closing(SourceFiles()) as files:
            for row in rows:
                try:
                    self.read(with_dtypes(row, self.dtypes), files)
                    found.append(None)
                except RowError as err:
                    found.append(err)
        return found

    def fill(self, job: ShardJob, on_sample: OnSample | None = None) -> Entry:
        """Fill a shard, unless it is filled already. Return its entry.

        Raises:
            RowError: A row cannot be packed.
            PackError: The folder cannot be written.
            SelectionError: A sample has no valid value for a column.
            FolderIndexError: An entry of this job is damaged.
        """
        known = read_entry(self.work, job.digest)
        if known is not None:
            return known
        tar = self.work / f"{job.digest}.tar"
        names, offsets, columns = set[str](), [0], ColumnBuilder(self.columns, job.name)
        try:
            with contextlib.closing(SourceFiles()) as files, publish(tar, disk=self.disk) as temp:
                writer = TarWriter(temp.write)
                for row in job.rows:
                    fields = self.read(with_dtypes(row, self.dtypes), files)
                    names |= fields.keys()
                    for name, data in fields.items():
                        writer.add(f"{row.key}.{name}", data)
                        if self.columns:
                            columns.add(name, len(data), reader_of(data))
                    if self.columns:
                        columns.end(row.key)
                    offsets.append(writer.offset)
                    if on_sample:
                        on_sample(len(offsets) - 1, writer.offset)
                writer.finish()
                sha256 = temp.sha256
            publish_bytes(tar.with_suffix(".idx"), idx_bytes(offsets), disk=self.disk)
            num_samples, found, idx_sha256 = len(offsets) - 1, tuple(sorted(names)), digest_offsets(offsets)
            entry = Entry(num_samples, writer.offset, sha256, found, idx_sha256, columns.values())
            write_entry(self.work, job.digest, entry, disk=self.disk)
        except OSError as err:
            raise PackError(f"{self.work.parent}: {job.name}: cannot be written: {describe_os_error(err)}") from err
        return entry


def fill_in_worker(job: ShardJob, *, filler: Filler) -> Entry:
    """Fill a shard in a worker process, which holds a shared lock on the folder until it ends."""
    share_lock_until_exit(filler.work)
    return filler.fill(job)


def _failed(row: Row, name: str, err: Exception) -> RowError:
    """Return the error of a row. It names the file of the field `name`, if `row.where` does not."""
    problem = f"{err.filename}: {err.strerror}" if isinstance(err, OSError) and err.filename else str(err)
    source = row.fields.get(getattr(err, "field", None) or name)
    is_other = isinstance(source, File) and not row.where.startswith(source.path)
    return bad_row(row.where, f"{source.path}: {problem}" if is_other else problem)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Entry:
    """What is known of a filled shard. The file of an entry is the proof that shard and `.idx` are whole.

    Attributes:
        num_samples: Number of samples.
        num_bytes: Bytes of the shard.
        sha256: Hex digest of the shard.
        fields: Names of all fields, sorted.
        idx_sha256: Hex digest of the `.idx`.
        columns: Values of each column.
        name: Name of the shard in a bucket, from the start of its upload on; empty for a shard of a local folder.
        etags: ETag of each uploaded object by its name; empty for a shard that is on this disk.
    """

    num_samples: int
    num_bytes: int
    sha256: str
    fields: tuple[str, ...]
    idx_sha256: str
    columns: Mapping[str, list[object]] = field(default_factory=dict, repr=False)
    name: str = ""
    etags: Mapping[str, str | None] = field(default_factory=dict)


def write_entry(work: Path, digest: str, entry: Entry, *, disk: Disk) -> None:
    """Publish the file of an entry. OSError: An operation of `disk` fails."""
    publish_note(work / f"{digest}.json", asdict(entry), disk=disk)


def read_entry(work: Path, digest: str) -> Entry | None:
    """Return the entry of a filled shard; None if the shard is not filled, or if its files are not as the entry says.

    Raises:
        FolderIndexError: The entry is damaged, foreign or of another version.
    """
    note = read_note(work / f"{digest}.json")
    if note is None:
        return None
    entry = Entry(**note | {"fields": tuple(note["fields"])})
    if entry.etags:
        return entry
    try:
        num_bytes = (work / f"{digest}.tar").stat().st_size
        idx = (work / f"{digest}.idx").read_bytes()
    except OSError:
        return None
    is_whole = num_bytes == entry.num_bytes and hashlib.sha256(idx).hexdigest() == entry.idx_sha256
    return entry if is_whole else None


def publish_note(path: Path, values: Mapping[str, Any], *, disk: Disk) -> None:
    """Publish a JSON file with its own digest, for `read_note`. OSError: An operation of `disk` fails."""
    document = {"version": _NOTE_VERSION, **values}
    publish_bytes(path, json.dumps({**document, "check": _check_of(document)}).encode(), disk=disk)


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the values in a file of `publish_note`; None without a file. FolderIndexError: As for `parse_note`."""
    return parse_note(read_own(path), path)


def parse_note(data: bytes | None, path: Path) -> dict[str, Any] | None:
    """Return the values in the bytes of a file of `publish_note`; None for None. `path` is for the message.

    Raises:
        FolderIndexError: The file is damaged, foreign or of another version.
    """
    if data is None:
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        document: dict[str, Any] = json.loads(data)
        if document.pop("check") == _check_of(document) and document.pop("version") == _NOTE_VERSION:
            return document
    raise FolderIndexError(describe_foreign(path, "is damaged, or of another version"), folder=str(path.parent))


def _check_of(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
