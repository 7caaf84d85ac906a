"""Indexing a folder of shards that others wrote."""

from __future__ import annotations

import contextlib
import hashlib
import stat
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from wdskit.dataset.index import Exports, FolderIndex, ShardEntry, has_index, read_index, read_other_counts, write_index
from wdskit.dataset.lock import LOCK_NAME, hold, lock_folder, wait_for_workers
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import digest_offsets, write_offsets
from wdskit.dataset.unfinished import refuse_unfinished
from wdskit.errors import FolderIndexError, ShardError, StorageError, WdskitError
from wdskit.export.api import check_export_names, export_folder, export_shard, new_members, parse_exports
from wdskit.files import DISK, Disk, remove_drafts
from wdskit.limits import MAX_CHECKED_BYTES, MAX_HELD_BYTES
from wdskit.shards.parallel import Progress, choose_workers, open_path, read_shards
from wdskit.storage.identity import FileIdentity
from wdskit.storage.urls import is_local, local_path
from wdskit.tar.reader import OnMember


@dataclass(frozen=True)
class IndexReport:
    """What `index_folder` did.

    Attributes:
        index: The index that it wrote.
        num_ignored: Members that belong to no sample, in all shards.
        workers: Processes that it used.
        changed: Names of shards that have the size which the index before said, and other bytes.
        disagreeing: For each of open_clip's and timm's files of counts that says otherwise: of which shards. No shard
            where the file is not what its program reads.
    """

    index: FolderIndex
    num_ignored: int
    workers: int
    changed: tuple[str, ...] = ()
    disagreeing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class _Job(NamedTuple):
    """A shard to scan, and what to keep beside it. `disk` is None where nothing is."""

    path: str
    exports: Exports
    before: Exports
    disk: Disk | None


class _WriteError(StorageError):
    """No fault of a shard, but of the disk that is written to."""


def index_folder(
    folder: str | Path,
    *,
    export: str | Sequence[str] = (),
    split_name: str = "",
    workers: int | None = None,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> IndexReport:
    """Read every `*.tar` of a folder from end to end and write the folder's index: `wdskit index`.

    Written are `<shard>.idx` for each shard, then `index.bin` and `index.json`. An index that was there is replaced.
    The same shards give the same bytes, whatever `workers` is. Files whose names start with a dot are passed over.

    Args:
        folder: A local folder.
        export: Files for other readers to keep beside the shards: some of `export.api.KINDS`, besides those that the
            index before says are kept; or `none` alone. They are written in the same pass, those of a shard at once.
        split_name: The split of all shards for timm and energon; by default what the shards are called.
        workers: Processes that read; with 1, all is done in this one. Default: the CPUs that this process may use,
            fewer where there is little to read.
        progress: Called after each shard with the bytes read so far and the bytes in all.
        disk: What writes.

    Raises:
        FolderIndexError: A shard is invalid, and then no index was written; all at fault are listed. Or `pack` has
            not finished here, another process is writing in the folder, or a file stands in the way that something
            else has written.
        ConfigError: `export` holds what is no kind.
        StorageError: There is no such folder, no shard in it, or it cannot be written.
    """
    path = local_folder(folder, command="index", done="indexed")
    with lock_folder(path):
        wait_for_workers(path)
        refuse_unfinished(path)
        sizes = _find_shards(path)
        before = _index_before(path)
        kept = parse_exports(export, split_name=split_name, before=before.exports)
        check_export_names(sizes, kept.kinds)
        num_workers = choose_workers(len(sizes), sum(sizes.values())) if workers is None else workers
        try:
            remove_drafts(path, disk=disk)
            worker_disk = disk if new_members(kept.kinds) else None
            jobs = [_Job(str(path / name), kept, before.exports, worker_disk) for name in sizes]
            scans = list(_scan_all(path, jobs, sizes, num_workers, progress))
            entries = [scan.entry for scan in scans]
            for scan in scans:
                write_offsets(path / scan.entry.name, scan.offsets, disk=disk)
            export_folder(path, entries, exports=kept, before=before.exports, earlier=before.entries, disk=disk)
            write_index(path, entries, exports=kept, disk=disk)
        except OSError as err:
            raise StorageError(f"{path}: the index cannot be written: {err.strerror}.", url=str(path)) from err
    index = FolderIndex(str(folder), tuple(entries), kept)
    return IndexReport(
        index=index,
        num_ignored=sum(scan.num_ignored for scan in scans),
        workers=min(num_workers, len(sizes)),
        changed=tuple(
            now.name
            for now in entries
            if (old := before.by_name.get(now.name)) and old.num_bytes == now.num_bytes and old.sha256 != now.sha256
        ),
        disagreeing=_disagreeing(path, index),
    )


def _disagreeing(folder: Path, index: FolderIndex) -> dict[str, tuple[str, ...]]:
    """What open_clip's `sizes.json` and timm's `_info.json`, where they stand, say otherwise of these shards."""
    found: dict[str, tuple[str, ...]] = {}
    for file, counts in read_other_counts(str(folder)).items():
        known = counts or {}
        names = [one.name for one in index.entries if known.get(one.name, one.num_samples) != one.num_samples]
        if names or counts is None:
            found[file] = tuple(names)
    return found


def _index_before(folder: Path) -> FolderIndex:
    """The index that is to be replaced, an empty one where there is none that reads."""
    try:
        return read_index(folder) if has_index(str(folder)) else FolderIndex(str(folder), ())
    except FolderIndexError:
        return FolderIndex(str(folder), ())  # it is damaged, which is why it is made again


def _find_shards(folder: Path) -> dict[str, int]:
    """The shards of a folder by name, sorted, with their sizes in bytes."""
    try:
        paths = sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))
        stats = {path.name: path.stat() for path in paths}
    except OSError as err:
        raise StorageError(f"{err.filename}: cannot be read: {err.strerror}.", url=str(folder)) from err
    for name, status in stats.items():
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for ever
            raise StorageError(f"{folder / name}: this is no file. Move it away, or rename it.", url=str(folder / name))
    if not stats:
        raise StorageError(f"{folder}: no shard (*.tar) stands in this folder.", url=str(folder))
    return {name: status.st_size for name, status in stats.items()}


def _scan_all(
    folder: Path, jobs: list[_Job], sizes: dict[str, int], workers: int, progress: Progress | None
) -> Iterator[ScannedShard]:
    """Scan the shards; an error that lists every shard at fault if there is one."""
    faults: list[WdskitError] = []
    scan = _scan if workers == 1 or len(jobs) < 2 else _scan_in_worker
    with contextlib.closing(read_shards(scan, jobs, [*sizes.values()], workers=workers, progress=progress)) as results:
        for result in results:
            if isinstance(result, _WriteError):
                raise result
            if isinstance(result, WdskitError):
                faults.append(result)
            else:
                yield result
    if faults:
        are = "is" if len(faults) == 1 else "are"
        msg = f"{folder}: {len(faults)} of {len(sizes)} shards {are} invalid, so no index was written.\n"
        raise FolderIndexError(msg + "\n".join(map(str, faults)), folder=str(folder)) from faults[0]


def _scan_in_worker(job: _Job) -> ScannedShard:
    """`_scan` in a worker process, which holds the folder until it ends if it writes."""
    if job.disk is not None:
        hold(Path(job.path).parent)
    return _scan(job)


def _scan(job: _Job) -> ScannedShard:
    path = job.path
    name = Path(path).name
    if not name.isprintable():
        problem, remedy = f"its file name {name!r} holds characters that cannot be printed", "Rename it."
        raise ShardError(shard=path, offset=0, problem=problem, remedy=remedy)
    members = new_members(job.exports.kinds)
    scanned = scan_shard(path, name=name, on_member=members.add if members else None)
    if members and job.disk is not None:
        try:
            export_shard(Path(path), members, exports=job.exports, before=job.before, disk=job.disk)
        except OSError as err:
            raise _WriteError(f"{path}: what belongs beside it cannot be written: {err.strerror}.", url=path) from err
    return scanned


def local_folder(folder: str | Path, *, command: str, done: str) -> Path:
    """A local folder that is there, as a path.

    Args:
        folder: As the user wrote it.
        command: What is run, `index`, for the message.
        done: What is done to it, `indexed`.

    Raises:
        StorageError: It is remote, no folder, or not there.
    """
    if not is_local(str(folder)):
        msg = f"{folder}: only a local folder can be {done}. Run `wdskit {command}` where its files are."
        raise StorageError(msg, url=str(folder))
    path = Path(local_path(str(folder)))
    if not path.is_dir():
        what = "this is a file, not a folder" if path.exists() else "there is no such folder"
        raise StorageError(f"{folder}: {what}. Name the folder that holds the shards.", url=str(folder))
    return path


def refuse_filled(folder: Path) -> None:
    """Refuse to write into a folder that holds anything but its lock.

    Raises:
        StorageError: It does.
    """
    if any(one.name != LOCK_NAME for one in folder.iterdir()):
        msg = f"{folder}: there is something in this folder. Name one that is empty or not there yet."
        raise StorageError(msg, url=str(folder))


@dataclass(frozen=True)
class ScannedShard:
    """What a full read found.

    Attributes:
        entry: The shard's line in the index.
        offsets: Byte offset of each sample, then the end of the last member.
        num_ignored: Members that belong to no sample.
    """

    entry: ShardEntry
    offsets: array[int]  # 8 bytes a sample, where a tuple takes 40
    num_ignored: int


def scan_shard(path: str, *, name: str, on_member: OnMember | None = None) -> ScannedShard:
    """Read a local shard from end to end, every header, and digest its bytes in the same pass.

    Args:
        path: The file.
        name: What the index calls it.
        on_member: Called of each member; in place of the data of one over `limits.MAX_CHECKED_BYTES` comes `Passed`.

    Raises:
        ShardError: It is invalid.
        StorageError: It cannot be read.
    """
    file = open_path(path)
    digest = hashlib.sha256()
    num_bytes = 0

    def read(size: int) -> bytes:
        nonlocal num_bytes
        part = file.read(size)
        digest.update(part)
        num_bytes += len(part)
        return part

    fields: set[str] = set()
    with contextlib.closing(file):
        identity = FileIdentity.of(file.fd)
        hold_bytes = MAX_HELD_BYTES if on_member is None else MAX_CHECKED_BYTES  # `on_member` may want a JSON
        reader = ShardReader(read, shard=path, on_member=on_member, hold_bytes=hold_bytes)
        for sample in reader:
            fields.update(sample)
    offsets = array("Q", (*reader.starts, reader.stop))
    entry = ShardEntry(
        name=name,
        num_samples=reader.num_samples,
        num_bytes=num_bytes,
        sha256=digest.hexdigest(),
        fields=tuple(sorted(fields - {"__key__", "__url__"})),
        idx_sha256=digest_offsets(offsets),
        identity=identity,
    )
    return ScannedShard(entry, offsets, reader.num_ignored)
