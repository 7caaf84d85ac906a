"""Filling one shard, and checking rows before: what runs in each process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdskit.dataset.index import NO_EXPORTS, Exports, ShardEntry
from wdskit.dataset.shard import digest_offsets, write_offsets
from wdskit.errors import PackError, RowError
from wdskit.export.api import export_shard, new_members
from wdskit.export.dali import ShardMembers
from wdskit.files import DISK, Buffer, Disk, Draft, describe_os_error, publish
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.duplicates import image_digest
from wdskit.packing.recorded import Rows
from wdskit.packing.references import FileBytes, Reference
from wdskit.packing.rows import Row
from wdskit.packing.sources import Progress, Tell
from wdskit.packing.treating import read_treated
from wdskit.packing.treatment import UNTOUCHED, Treatment
from wdskit.tar.writer import TarWriter

_LARGE_BYTES = 16 << 10
"""From here on copying a file takes longer than what views cost more than bytes: 40 us of 200 for 100 KB."""

OnSample = Callable[[int, int], None]
"""Told after each sample: how many samples, and bytes of their shard, were added since the last call."""


class Count:
    """Tells how much is packed. `total` is samples and bytes in all."""

    def __init__(self, tell: Tell, total: tuple[int | None, int | None]) -> None:
        self._tell = tell
        self._total = total
        self._samples = self._bytes = 0
        self(0, 0)

    def __call__(self, num_samples: int, num_bytes: int) -> None:
        """So many more."""
        self._samples += num_samples
        self._bytes += num_bytes
        self._tell(Progress("packing", self._samples, self._bytes, *self._total))


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard to fill.

    Attributes:
        path: Its file.
        rows: Its rows in order; they are taken once.
        num_bytes: The bytes that it will have; 0 where only the treated rows tell.
        also: What is kept beside it.
        treatment: What happens to its samples.
        threads: So many of them at a time.
        sha256: Its digest, where it is filled again.
    """

    path: Path
    rows: Rows | Iterable[Row]
    num_bytes: int
    also: Exports = NO_EXPORTS
    treatment: Treatment = UNTOUCHED
    threads: int = 1
    sha256: str | None = None


def fill_shard(
    job: ShardJob, *, disk: Disk = DISK, on_sample: OnSample | None = None, only_compare: bool = False
) -> ShardEntry:
    """Write one shard and its `.idx`, and return its line of the index.

    Args:
        job: The shard.
        disk: What writes.
        on_sample: Told after each sample.
        only_compare: Write nothing: the shard is there, and has the digest that the job knows.

    Raises:
        RowError: A row turned out to be bad.
        PackError: The folder cannot be written, or the bytes have not the digest that they should have.
    """
    record = None if only_compare else new_members(job.also.kinds)
    try:
        if only_compare:
            filled = _fill(job, hashlib.sha256(), record, on_sample)
        else:
            with publish(job.path, disk=disk) as draft:
                filled = _fill(job, draft, record, on_sample)
                if job.sha256 not in (None, filled.sha256):
                    raise _other_bytes(job.path)
            write_offsets(job.path, filled.offsets, disk=disk)
        if job.sha256 not in (None, filled.sha256):
            raise _other_bytes(job.path)
        entry = ShardEntry(
            name=job.path.name,
            num_samples=len(filled.offsets) - 1,
            num_bytes=filled.num_bytes,
            sha256=filled.sha256,
            fields=filled.fields,
            idx_sha256=digest_offsets(filled.offsets),
        )
        if record:
            before = NO_EXPORTS if job.sha256 is None else job.also
            export_shard(job.path, record, also=job.also, before=before, disk=disk)
    except OSError as err:
        raise PackError(f"{job.path}: cannot be written: {describe_os_error(err)}") from err
    return entry


class _Filled(NamedTuple):
    """What was written."""

    sha256: str
    num_bytes: int
    fields: tuple[str, ...]
    offsets: list[int]


def _fill(
    job: ShardJob, sink: Draft | hashlib._Hash, record: ShardMembers | None, on_sample: OnSample | None
) -> _Filled:
    """Write the bytes of a shard to a draft, or only into a digest."""
    fields: set[str] = set()
    offsets = [0]
    writer = TarWriter(sink.write, hand_over=sink.hand_over) if isinstance(sink, Draft) else TarWriter(sink.update)
    passes = job.threads == 1 and not job.treatment.changes_bytes
    for names in (_pass_rows if passes else _treat_rows)(job, writer, record):
        offsets.append(writer.offset)
        fields.update(names)
        if on_sample:
            on_sample(1, offsets[-1] - offsets[-2])
    writer.finish()
    assert job.num_bytes in {0, writer.offset}
    sha256 = sink.sha256 if isinstance(sink, Draft) else sink.hexdigest()
    return _Filled(sha256, writer.offset, tuple(sorted(fields)), offsets)


def _treat_rows(job: ShardJob, writer: TarWriter, record: ShardMembers | None) -> Iterator[list[str]]:
    """Add the samples, and give the names of the fields of each."""
    for row, treated in read_treated(job.rows, job.treatment, threads=job.threads):
        for field, data in treated:
            name = f"{row.key}.{field}"
            if record:
                record.add(name, writer.offset + BLOCK_BYTES, data)
            writer.add(name, data)
        yield [field for field, _ in treated]


def _pass_rows(job: ShardJob, writer: TarWriter, record: ShardMembers | None) -> Iterator[list[str]]:
    """As `_treat_rows`, of rows that pass through: large files are read to where they are written from."""
    for row in job.rows:
        for field, source in row.fields:
            name = f"{row.key}.{field}"
            offset = writer.offset + BLOCK_BYTES
            data: Buffer = source if isinstance(source, bytes) else _read(writer, name, row, source)
            if not isinstance(data, memoryview):  # which is in its place
                writer.add(name, data)
            row.check(field, data, job.treatment)
            if record:
                record.add(name, offset, data)
        yield [field for field, _ in row.fields]


def _read(writer: TarWriter, name: str, row: Row, source: Reference) -> bytes | memoryview:
    """The bytes of a field; those of a large file in the shard already, where they stay until the next is added."""
    if isinstance(source, FileBytes) and source.num_bytes >= _LARGE_BYTES:
        room = writer.room(name, source.num_bytes)
        if room is not None:
            row.read_file_into(source, room)
            return room
    return row.read_field(source)


def _other_bytes(path: Path) -> PackError:
    msg = f"{path}: its rows give other bytes now than the folder's index tells of. Nothing was replaced."
    return PackError(f"{msg}\n  Give the source as it was when it was packed, and the same options.")


def check_rows(
    rows: Iterable[Row], treatment: Treatment = UNTOUCHED, *, treats: bool = True
) -> list[RowError | bytes | None]:
    """Read each row, and say what is wrong with it, or where nothing is and duplicates count, its images' digest.

    Args:
        rows: Some rows.
        treatment: What happens to them.
        treats: Whether to treat them as packing will; otherwise they are read only.
    """
    return [_check_row(row, treatment, treats=treats) for row in rows]


def _check_row(row: Row, treatment: Treatment, *, treats: bool) -> RowError | bytes | None:
    try:
        fields = row.read_fields()
        if treats:
            row.treat(fields, treatment)
    except RowError as err:
        return err
    return image_digest(fields, treatment.image_fields) if treatment.duplicates != "keep" else None
