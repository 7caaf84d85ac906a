"""Fill shards with their rows, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeGuard

from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import share_lock_until_exit
from wdskit.dataset.shard import digest_offsets, write_offsets
from wdskit.errors import PackError, WdskitError
from wdskit.files import DISK, Buffer, Disk, TempFile, describe_os_error, publish, publish_bytes
from wdskit.packing.plan import ShardJob, ShardJobs
from wdskit.packing.references import FieldBytes, FileBytes, PartBytes, SourceFiles
from wdskit.packing.remote_prefetch import read_ahead
from wdskit.packing.row import OnProgress, Progress, Row, size_of
from wdskit.packing.run_journal import values_path
from wdskit.packing.transforms import Field, Transforms
from wdskit.shards.column_values import ColumnBuilder, reader_of
from wdskit.shards.parallel import map_shards
from wdskit.tar.writer import END_BYTES, TarWriter

_FILE_KINDS = (FileBytes, PartBytes)
_LARGE_BYTES = 16 << 10
"""Smallest size of a file that is read directly into the writer's buffer. A copy takes 40 of the 200 us for 100 KB."""

OnSample = Callable[[int, int], None]
"""Called after each sample with the numbers of samples and of shard bytes added since the last call."""


class ProgressCounter:
    """Counts packed samples and bytes. Calls `on_progress` with the sums: when it is made, and after each change.

    `total` has the numbers of samples and of bytes at the end of the run. A number that is not known is None.
    """

    def __init__(self, on_progress: OnProgress, total: tuple[int | None, int | None]) -> None:
        self._on_progress = on_progress
        self._total = total
        self._samples = self._bytes = 0
        self(0, 0)

    def __call__(self, num_samples: int, num_bytes: int) -> None:
        """Add `num_samples` samples and their `num_bytes` bytes in a shard, then report the sums to `on_progress`."""
        self._samples += num_samples
        self._bytes += num_bytes
        self._on_progress(Progress("packing", self._samples, self._bytes, *self._total))

    def add(self, entry: ShardEntry) -> None:
        """Add the samples and bytes of a filled shard, except its end marker, then report the sums to `on_progress`."""
        self(entry.num_samples, entry.num_bytes - END_BYTES)


def fill_shard(job: ShardJob, *, disk: Disk = DISK, on_sample: OnSample | None = None) -> ShardEntry:
    """Write one shard and its `.idx`, and return its index entry.

    With `job.columns`, the values of these columns are written to `run_journal.values_path(job.path)`. If `job.sha256`
    is set, the shard exists already. Then nothing is written, and the rows are only compared with this digest.

    Args:
        job: The shard to fill.
        disk: Performs the file operations; tests replace it.
        on_sample: Called after each sample with the numbers of added samples and bytes.

    Raises:
        RowError: A row cannot be packed.
        PackError: The folder cannot be written, or the bytes do not have the digest `job.sha256`.
        SelectionError: A sample has no valid value for a column.
        StorageError: An object with bytes of a field cannot be read, or was replaced.
    """
    try:
        if job.sha256 is None:
            with publish(job.path, disk=disk) as temp:
                entry, offsets, values = _fill(job, temp, on_sample)
            if job.columns:
                publish_bytes(values_path(job.path), json.dumps(values, ensure_ascii=True).encode(), disk=disk)
            write_offsets(job.path, offsets, disk=disk)
        else:
            entry, _, _ = _fill(job, hashlib.sha256(), on_sample)
            if entry.sha256 != job.sha256:
                msg = (
                    f"{job.path}: its rows now give other bytes than those in the folder's index. Nothing was replaced."
                )
                raise PackError(f"{msg}\n  Use the source as it was when it was packed, and the same options.")
    except OSError as err:
        raise PackError(f"{job.path}: cannot be written: {describe_os_error(err)}") from err
    return entry


def fill_jobs(
    jobs: ShardJobs, *, workers: int, log: Path, disk: Disk, count: ProgressCounter
) -> Generator[ShardEntry, None, None]:
    """Fill shards in this process or, for several shards with several `workers`, in worker processes.

    The shards have the same bytes in both cases.

    Args:
        jobs: The shards to fill.
        workers: Number of processes.
        log: The log of the run. Each worker process holds a shared lock on this file until the process ends.
        disk: Performs the file operations; tests replace it.
        count: Called with the numbers of samples and bytes that were packed since its last call.

    Yields:
        The index entries of the shards, in order.

    Raises:
        WdskitError: A shard cannot be filled, or a worker process was killed. If several shards cannot be filled, the
            error of the first of these shards is raised.
    """
    if workers == 1 or len(jobs) < 2:
        for job in jobs:
            yield fill_shard(job, disk=disk, on_sample=count)
        return
    fill = functools.partial(_fill_in_worker, log=log, disk=disk)
    with contextlib.closing(map_shards(fill, jobs, workers=workers)) as filled:  # stops the workers before an error
        for entry in filled:
            if isinstance(entry, WdskitError):
                raise entry
            count.add(entry)
            yield entry


def _fill_in_worker(job: ShardJob, *, log: Path, disk: Disk) -> ShardEntry:
    share_lock_until_exit(log)
    return fill_shard(job, disk=disk)


def _fill(
    job: ShardJob, sink: TempFile | hashlib._Hash, on_sample: OnSample | None
) -> tuple[ShardEntry, list[int], dict[str, list[object]]]:
    """Write the bytes of a shard to `sink`, a temporary file or a digest.

    Returns:
        The shard's index entry; the byte offset of each sample, then the end of the last sample; and the values of each
        column, by its name.

    Raises:
        RowError: A row cannot be packed.
        SelectionError: A sample has no valid value for a column.
        StorageError: An object with bytes of a field cannot be read, or was replaced.
    """
    names: set[str] = set()
    offsets = [0]
    columns = ColumnBuilder(job.columns, str(job.path))
    writer = TarWriter(sink.write, hand_over=sink.hand_over) if isinstance(sink, TempFile) else TarWriter(sink.update)
    is_transformed = job.threads > 1 or job.transforms.changes_bytes
    rows: Generator[tuple[Row, Iterable[tuple[str, Buffer]]], None, None]
    if is_transformed:
        rows = read_transformed(read_ahead(job.rows), job.transforms, threads=job.threads)
    else:
        rows = _read_unchanged(job.rows, writer)
    is_checked = not is_transformed and job.transforms.validate != "none"  # `read_transformed` checks its rows
    with contextlib.closing(rows):
        for row, fields in rows:
            for field, data in fields:
                names.add(field)
                if not isinstance(data, memoryview):  # a memoryview is in the writer's buffer already
                    writer.add(f"{row.key}.{field}", data)
                if is_checked:
                    row.check(field, data, job.transforms)
                if job.columns:
                    columns.add(field, len(data), reader_of(data))
            if job.columns:
                columns.end(row.key)
            offsets.append(writer.offset)
            if on_sample:
                on_sample(1, offsets[-1] - offsets[-2])
    writer.finish()
    assert job.num_bytes in {0, writer.offset}
    entry = ShardEntry(
        name=job.path.name,
        num_samples=len(offsets) - 1,
        num_bytes=writer.offset,
        sha256=sink.sha256 if isinstance(sink, TempFile) else sink.hexdigest(),
        fields=tuple(sorted(names)),
        idx_sha256=digest_offsets(offsets),
    )
    return entry, offsets, columns.values()


def _read_unchanged(
    rows: Iterable[Row], writer: TarWriter
) -> Generator[tuple[Row, Iterable[tuple[str, Buffer]]], None, None]:
    """Yield each row with an iterable of (name, bytes) of its fields. In a row with a large file, a field is read when
    the iteration reaches the field.

    For a large file, the bytes may be a memoryview: the member is then in the buffer of `writer` already, and the
    memoryview is valid until the next member. The caller must write the other members, in order.

    Raises:
        RowError: A file cannot be read or was changed.
        StorageError: An object in a store cannot be read, or was replaced.
    """
    with contextlib.closing(SourceFiles()) as files:
        for row in read_ahead(rows):
            if any(_is_large(source) for _, source in row.fields):
                yield row, ((field, _read_field(writer, row, field, source, files)) for field, source in row.fields)
            else:
                yield row, row.read_fields(files)


def _is_large(source: FieldBytes) -> TypeGuard[FileBytes | PartBytes]:
    return type(source) in _FILE_KINDS and size_of(source) >= _LARGE_BYTES


def _read_field(writer: TarWriter, row: Row, field: str, source: FieldBytes, files: SourceFiles) -> bytes | memoryview:
    """Read a field and return its bytes.

    A large file is read straight into the buffer of `writer`, as a complete member with its header, and the result is a
    memoryview of the member's data, valid until the next member. Otherwise the result is bytes, and the caller must add
    the member to `writer`. `source` is the field's item in `row.fields`.

    Raises:
        RowError: The file of the field cannot be read or was changed.
        StorageError: The object in a store cannot be read, or was replaced.
    """
    if _is_large(source):
        memory = writer.reserve(f"{row.key}.{field}", source.num_bytes)
        if memory is not None:
            row.read_into(source, memory, files)
            return memory
    return row.read_field(source, files)


_AHEAD = 2
"""Number of rows per thread that are read ahead, so that one large image does not stop the other threads."""


def read_transformed(
    rows: Iterable[Row], transforms: Transforms, *, threads: int
) -> Generator[tuple[Row, list[Field]], None, None]:
    """Read and transform rows in several threads. Yield each row with its fields to pack, in the order of `rows`.

    Args:
        rows: The rows to read.
        transforms: The transforms of each row.
        threads: Number of threads; 1 uses only the calling thread. Each thread has some rows with decoded images in
            memory.

    Raises:
        RowError: A row cannot be packed. If several rows cannot be packed, the error of the first is raised.
        StorageError: An object in a store cannot be read, or was replaced.
    """
    if threads == 1:
        for row in rows:
            yield row, row.read(transforms)
        return
    if transforms.resize is not None:
        import torch  # noqa: F401 (imported once, before the threads start)
    pool = ThreadPoolExecutor(threads, initializer=transforms.prepare_thread)
    try:
        pending: deque[tuple[Row, Future[list[Field]]]] = deque()
        for row in rows:
            pending.append((row, pool.submit(row.read, transforms)))
            if len(pending) >= _AHEAD * threads:
                row, future = pending.popleft()
                yield row, future.result()
        while pending:
            row, future = pending.popleft()
            yield row, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
