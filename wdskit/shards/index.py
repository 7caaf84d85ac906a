"""Index a folder of shards that another program wrote: `wdskit index`."""

from __future__ import annotations

import contextlib
import hashlib
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

from wdskit.dataset.binary import BINARY_NAME, ShardEntry, build_binary
from wdskit.dataset.index import (
    INDEX_NAME,
    FolderIndex,
    has_index,
    index_json,
    read_index,
    write_index,
)
from wdskit.dataset.lock import lock_folder, wait_for_workers
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import IDX_SUFFIX, digest_offsets, idx_bytes, write_offsets
from wdskit.dataset.unfinished import refuse_unfinished
from wdskit.errors import FolderIndexError, ShardError, StorageError
from wdskit.files import DISK, Disk, describe_missing, remove_temp_files
from wdskit.limits import MAX_HELD_BYTES
from wdskit.shards.parallel import Progress, choose_workers, open_path, read_shards
from wdskit.storage.identity import FileIdentity
from wdskit.storage.urls import ByteStream, LocalFile, is_local, local_path
from wdskit.text import format_bytes, plural

if TYPE_CHECKING:
    from wdskit.storage.buckets import ObjectInfo

S = TypeVar("S")
F = TypeVar("F", bound=ByteStream)


@dataclass(frozen=True)
class IndexReport:
    """Result of `index_folder`.

    Attributes:
        index: The index that it wrote.
        num_ignored: Members that belong to no sample, in all shards.
        workers: Processes that it used.
        changed: Names of shards with other bytes than in the previous index, but the same size.
    """

    index: FolderIndex
    num_ignored: int
    workers: int
    changed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: shards, samples and size."""
        entries = self.index.entries
        samples = plural(sum(entry.num_samples for entry in entries), "sample")
        size = format_bytes(sum(entry.num_bytes for entry in entries))
        return f"IndexReport({plural(len(entries), 'shard')}, {samples}, {size})"


def index_folder(
    folder: str | Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> IndexReport:
    """Read every `*.tar` of a folder from end to end and write the folder's index: `wdskit index`.

    It writes `<shard>.idx` for each shard, then `index.bin` and `index.json`, and replaces an existing index. The same
    shards give the same bytes, whatever `workers` is. Files whose names start with a dot are skipped.

    Args:
        folder: A local folder, or one of a bucket (`s3://bucket/train/`), into which the index is written last.
        workers: Processes that read; 1 is this process. Default: the CPUs that this process may use, fewer for little
            data.
        progress: Called after each shard with the number of bytes read and of all bytes.
        disk: Performs the file operations; tests replace it.

    Raises:
        FolderIndexError: Shards are invalid; all of them are listed, and no index is written. Or `pack` has not
            finished here, or another process is writing in the folder.
        StorageError: The folder does not exist, has no shard or cannot be written.
    """
    if not is_local(str(folder)):
        return _index_bucket(str(folder).rstrip("/"), workers=workers, progress=progress)
    path = local_folder(folder, command="index", done="indexed")
    with lock_folder(path):
        wait_for_workers(path)
        refuse_unfinished(path)
        sizes = _find_shards(path)
        try:
            before = read_index(path).by_name if has_index(str(path)) else {}
        except FolderIndexError:  # it is damaged, and replaced now
            before = {}
        num_workers = choose_workers(len(sizes), sum(sizes.values())) if workers is None else workers
        scans: list[ScannedShard] = []
        try:
            remove_temp_files(path, disk=disk)
            paths = [str(path / name) for name in sizes]
            scans += _read_all(str(path), _scan, paths, [*sizes.values()], num_workers, progress)
            entries = [scan.entry for scan in scans]
            for scan in scans:
                write_offsets(path / scan.entry.name, scan.offsets, disk=disk)
            write_index(path, entries, disk=disk)
        except OSError as err:
            raise StorageError(f"{path}: the index cannot be written: {err.strerror}.", url=str(path)) from err
    return _report(FolderIndex(str(folder), tuple(entries)), scans, num_workers, before)


def _index_bucket(url: str, *, workers: int | None, progress: Progress | None) -> IndexReport:
    """Index a folder of a bucket as `index_folder` does. Nothing is written before all shards are read."""
    from wdskit.storage.buckets import check_bucket, list_objects, put_object

    check_bucket(url)
    objects = {unquote(one.url.rpartition("/")[2]): one for one in list_objects(url)}
    shards = {name: one for name, one in objects.items() if name.endswith(".tar") and not name.startswith(".")}
    if not shards:
        raise StorageError(f"{url}: there are no shards (*.tar) in this folder.", url=url)
    known: Mapping[str, ShardEntry] = {}
    if INDEX_NAME in objects:
        with contextlib.suppress(FolderIndexError):  # it is damaged, and replaced now
            known = read_index(url).by_name
    sizes = [one.num_bytes for one in shards.values()]
    num_workers = choose_workers(len(sizes), sum(sizes)) if workers is None else workers
    scans = [*_read_all(url, _scan_object, [*shards.values()], sizes, num_workers, progress)]
    entries = [scan.entry for scan in scans]
    for one, scan in zip(shards.values(), scans, strict=True):
        put_object(f"{one.url}{IDX_SUFFIX}", idx_bytes(scan.offsets))
    data = index_json(entries)
    put_object(f"{url}/{BINARY_NAME}", build_binary(entries, hashlib.sha256(data).digest()))
    put_object(f"{url}/{INDEX_NAME}", data)
    return _report(FolderIndex(url, tuple(entries)), scans, num_workers, known)


def _report(
    index: FolderIndex, scans: Sequence[ScannedShard], workers: int, known: Mapping[str, ShardEntry]
) -> IndexReport:
    return IndexReport(
        index=index,
        num_ignored=sum(scan.num_ignored for scan in scans),
        workers=min(workers, len(scans)),
        changed=tuple(
            one.name
            for one in index.entries
            if (old := known.get(one.name)) and old.num_bytes == one.num_bytes and old.sha256 != one.sha256
        ),
    )


def _scan_object(one: ObjectInfo) -> ScannedShard:
    from wdskit.storage.objects import ObjectStream

    stream = ObjectStream(one.url, num_bytes=one.num_bytes, etag=one.etag)
    return scan_shard(one.url, name=_checked_name(unquote(one.url.rpartition("/")[2]), one.url), file=stream)


def _find_shards(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of a folder's shards by name, sorted by name."""
    try:
        paths = sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))
        stats = {path.name: path.stat() for path in paths}
    except OSError as err:
        raise StorageError(f"{err.filename}: cannot be read: {err.strerror}.", url=str(folder)) from err
    for name, status in stats.items():
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for ever
            raise StorageError(
                f"{folder / name}: this is not a file. Move it away, or rename it.", url=str(folder / name)
            )
    if not stats:
        raise StorageError(f"{folder}: there are no shards (*.tar) in this folder.", url=str(folder))
    return {name: status.st_size for name, status in stats.items()}


def _read_all(
    folder: str,
    scan: Callable[[S], ScannedShard],
    shards: Sequence[S],
    sizes: Sequence[int],
    workers: int,
    progress: Progress | None,
) -> Iterator[ScannedShard]:
    try:
        yield from read_shards(
            scan,
            shards,
            sizes,
            path=folder,
            workers=workers,
            progress=progress,
            so="are invalid, so no index was written",
            error=partial(FolderIndexError, folder=folder),
        )
    except (ShardError, StorageError) as err:
        msg = f"{folder}: 1 of {len(sizes)} shards is invalid, so no index was written.\n{err}"
        raise FolderIndexError(msg, folder=folder) from err


def _scan(path: str) -> ScannedShard:
    return scan_shard(path, name=_checked_name(Path(path).name, path))


def _checked_name(name: str, path: str) -> str:
    if not name.isprintable():
        problem = f"its file name {name!r} holds characters that cannot be printed"
        raise ShardError(shard=path, offset=0, problem=problem, remedy="Rename it.")
    return name


def local_folder(folder: str | Path, *, command: str, done: str) -> Path:
    """Return the path of a local folder. Messages name the `command`, and say what it does in `done`: "indexed".

    Raises:
        StorageError: The folder is remote, does not exist, or is a file.
    """
    if not is_local(str(folder)):
        msg = f"{folder}: only a local folder can be {done}. Run `wdskit {command}` on the machine with its files."
        raise StorageError(msg, url=str(folder))
    path = Path(local_path(str(folder)))
    if not path.is_dir():
        problem = "this is a file, not a folder." if path.exists() else describe_missing(str(path), "folder")
        raise StorageError(f"{folder}: {problem} Name the folder that holds the shards.", url=str(folder))
    return path


class ScannedShard(NamedTuple):
    """Result of reading a whole shard.

    Attributes:
        entry: The shard's line in the index.
        offsets: Byte offset of each sample, then the end of the last member; 8 bytes a sample.
        num_ignored: Members that belong to no sample.
    """

    entry: ShardEntry
    offsets: array[int]
    num_ignored: int


class DigestedFile(Generic[F]):
    """A shard that is read in order; its digest is computed on the way.

    Args:
        file: The shard. The caller closes it.

    Attributes:
        num_bytes: Bytes read so far.
        sha256: Digest of these bytes.
    """

    def __init__(self, file: F) -> None:
        self.file = file
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`."""
        part = self.file.read(size)
        self.sha256.update(part)
        self.num_bytes += len(part)
        return part


def scan_shard(path: str, *, name: str, file: ByteStream | None = None) -> ScannedShard:
    """Read a shard from end to end, check every header, and compute its digest in the same pass.

    Args:
        path: Path or URL, for messages.
        name: The shard's name in the index.
        file: The open shard; None opens the local file `path`.

    Raises:
        ShardError: The shard is invalid.
        StorageError: The shard cannot be read.
    """
    shard: DigestedFile[ByteStream] = DigestedFile(open_path(path) if file is None else file)
    fields: set[str] = set()
    with contextlib.closing(shard.file):
        identity = FileIdentity.of(shard.file.fd) if isinstance(shard.file, LocalFile) else None
        reader = ShardReader(shard.read, shard=path, hold_bytes=MAX_HELD_BYTES)
        for sample in reader:
            fields.update(sample)
    offsets = array("Q", (*reader.starts, reader.stop))
    entry = ShardEntry(
        name=name,
        num_samples=reader.num_samples,
        num_bytes=shard.num_bytes,
        sha256=shard.sha256.hexdigest(),
        fields=tuple(sorted(fields - {"__key__", "__url__"})),
        idx_sha256=digest_offsets(offsets),
        identity=identity,
    )
    return ScannedShard(entry, offsets, reader.num_ignored)
