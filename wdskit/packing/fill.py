"""Filling one shard, and checking rows before: what runs in each process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.index import ShardEntry
from wdskit.dataset.offsets import digest_offsets, write_offsets
from wdskit.errors import PackError, RowError
from wdskit.files import DISK, Disk, publish
from wdskit.packing.rows import Row
from wdskit.packing.treating import read_treated
from wdskit.packing.treatment import UNTOUCHED, Treatment
from wdskit.tar.writer import END_BYTES, TarWriter

OnSample = Callable[[int, int], None]
"""Told after each sample: how many samples, and bytes of their shard, were added since the last call."""


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard to fill: its file, its rows in order, and the bytes that it will have."""

    path: Path
    rows: tuple[Row, ...]
    num_bytes: int


def fill_shard(
    job: ShardJob,
    *,
    treatment: Treatment = UNTOUCHED,
    threads: int = 1,
    disk: Disk = DISK,
    on_sample: OnSample | None = None,
) -> ShardEntry:
    """Write one shard and its `.idx`, and return its line of the index.

    A file that has the shard's name already, as a run that was killed leaves it, must hold the same bytes.

    Raises:
        RowError: A row turned out to be bad.
        PackError: The folder cannot be written, or the name is taken by a shard with other bytes.
    """
    fields: set[str] = set()
    offsets = []
    try:
        check_free(job)
        with publish(job.path, disk=disk) as draft:
            writer = TarWriter(draft.write)
            for row, treated in read_treated(job.rows, treatment, threads=threads):
                offsets.append(writer.offset)
                for field, data in treated:
                    writer.add(f"{row.key}.{field}", data)
                fields.update(field for field, _ in treated)
                if on_sample:
                    on_sample(1, writer.offset - offsets[-1])
            writer.finish()
            assert writer.offset == job.num_bytes
            if job.path.exists() and _sha256_of(job.path) != draft.sha256:
                raise taken(job.path)
        offsets.append(writer.offset - END_BYTES)
        write_offsets(job.path, offsets, disk=disk)
    except OSError as err:
        raise PackError(f"{job.path}: cannot be written: {err.strerror or err}.") from err
    told = draft.sha256, tuple(sorted(fields)), digest_offsets(offsets)
    return ShardEntry(job.path.name, len(job.rows), draft.num_bytes, *told)


def check_free(job: ShardJob) -> None:
    """Refuse, without reading a row, to write where a file of another size has the shard's name.

    Raises:
        PackError: One has.
    """
    if job.path.exists() and job.path.stat().st_size != job.num_bytes:
        raise taken(job.path)


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


def check_rows(rows: Sequence[Row]) -> list[RowError | None]:
    """Read each row as packing will, and say what is wrong with it."""
    return [_check_row(row) for row in rows]


def _check_row(row: Row) -> RowError | None:
    try:
        row.read()
    except RowError as err:
        return err
    return None
