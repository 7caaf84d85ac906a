"""Filling one shard, and checking rows before: what runs in each process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.index import NOTHING_ELSE, Also, ShardEntry
from wdskit.dataset.offsets import digest_offsets, write_offsets
from wdskit.errors import PackError, RowError
from wdskit.files import DISK, Disk, publish
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.rows import Row
from wdskit.packing.spool import Rows
from wdskit.packing.treating import read_treated
from wdskit.packing.treatment import UNTOUCHED, Treatment
from wdskit.shards.also import new_record, publish_beside_shard
from wdskit.tar.writer import END_BYTES, TarWriter

OnSample = Callable[[int, int], None]
"""Told after each sample: how many samples, and bytes of their shard, were added since the last call."""


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard to fill.

    Attributes:
        path: Its file.
        rows: Its rows in order.
        num_bytes: The bytes that it will have; None where only the treated rows tell.
        also: What is kept beside it.
        treatment: What happens to its samples.
        threads: So many of them at a time.
    """

    path: Path
    rows: Rows
    num_bytes: int | None
    also: Also = NOTHING_ELSE
    treatment: Treatment = UNTOUCHED
    threads: int = 1


def fill_shard(job: ShardJob, *, disk: Disk = DISK, on_sample: OnSample | None = None) -> ShardEntry:
    """Write one shard, its `.idx` and what other readers want beside it, and return its line of the index.

    A file that has the shard's name already, as a run that was killed leaves it, must hold the same bytes.

    Raises:
        RowError: A row turned out to be bad.
        PackError: The folder cannot be written, or the name is taken by a shard with other bytes.
    """
    fields: set[str] = set()
    offsets = []
    record = new_record(job.also)
    try:
        check_free(job.path, job.num_bytes)
        with publish(job.path, disk=disk) as draft:
            writer = TarWriter(draft.write)
            for row, treated in read_treated(job.rows, job.treatment, threads=job.threads):
                offsets.append(writer.offset)
                for field, data in treated:
                    name = f"{row.key}.{field}"
                    if record:
                        record.add(name, writer.offset + BLOCK_BYTES, data)
                    writer.add(name, data)
                fields.update(field for field, _ in treated)
                if on_sample:
                    on_sample(1, writer.offset - offsets[-1])
            writer.finish()
            assert job.num_bytes in {None, writer.offset}
            if job.path.exists() and _sha256_of(job.path) != draft.sha256:
                raise taken(job.path)
        offsets.append(writer.offset - END_BYTES)
        write_offsets(job.path, offsets, disk=disk)
        told = draft.sha256, tuple(sorted(fields)), digest_offsets(offsets)
        entry = ShardEntry(job.path.name, len(job.rows), draft.num_bytes, *told)
        if record:
            publish_beside_shard(job.path, entry, record, also=job.also, before=NOTHING_ELSE, disk=disk)
    except OSError as err:
        raise PackError(f"{job.path}: cannot be written: {err.strerror or err}.") from err
    return entry


def check_free(path: Path, num_bytes: int | None) -> None:
    """Refuse, without reading a row, to write a shard of so many bytes where a file of another size has its name.

    None bytes, of which only the treated rows tell, are refused later if they are others.

    Raises:
        PackError: One has.
    """
    if num_bytes is not None and path.exists() and path.stat().st_size != num_bytes:
        raise taken(path)


def taken(path: Path) -> PackError:
    """The error for a file in the way, which another run, or something else, has written."""
    msg = f"{path}: this file exists already and holds something else."
    remedy = "Pack into another folder. Or remove it, if a run that was stopped left it and you want other options now."
    return PackError(f"{msg} Nothing was overwritten.\n  {remedy}")


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def check_rows(rows: Iterable[Row]) -> list[RowError | None]:
    """Read each row as packing will, and say what is wrong with it."""
    return [_check_row(row) for row in rows]


def _check_row(row: Row) -> RowError | None:
    try:
        row.read()
    except RowError as err:
        return err
    return None
