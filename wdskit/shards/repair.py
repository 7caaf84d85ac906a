"""`wdskit repair`: what can be saved of damaged shards, written to another folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck
from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES
from wdskit.dataset.index import FolderIndex, ShardEntry, has_index, read_index, write_index
from wdskit.dataset.lock import LOCK_NAME, lock_folder
from wdskit.dataset.patterns import Fault, collect_shards
from wdskit.dataset.shard import write_offsets
from wdskit.errors import ConfigError, FolderIndexError, StorageError
from wdskit.files import DISK, Disk, Draft, make_folders, publish, publish_bytes
from wdskit.shards.index import scan_shard
from wdskit.shards.parallel import Progress
from wdskit.shards.salvage import COPY_BYTES, Loss, Salvage, salvage
from wdskit.storage.urls import LocalFile, read_bytes
from wdskit.tar.writer import END_BYTES


@dataclass(frozen=True)
class RepairedShard:
    """What became of one shard.

    Attributes:
        path: The shard that was read.
        num_saved: Samples that were saved; with 0, no shard was written.
        lost: What was not.
        is_suspect: Its sha256 is not the one in the index. Where bytes inside of a field changed, nothing but that
            digest can tell, so samples that were saved may have other contents than they had.
    """

    path: str
    num_saved: int
    lost: tuple[Loss, ...]
    is_suspect: bool


@dataclass(frozen=True)
class RepairResult:
    """What `wdskit.repair` did.

    Attributes:
        folder: Where the repaired shards and their index are.
        shards: One for each shard that was read, or is missing.
    """

    folder: Path
    shards: tuple[RepairedShard, ...]

    @property
    def num_saved(self) -> int:
        """Samples in all repaired shards."""
        return sum(one.num_saved for one in self.shards)

    @property
    def lost(self) -> tuple[Loss, ...]:
        """All that was lost, in order."""
        return tuple(loss for one in self.shards for loss in one.lost)


def repair(
    path: str | Path,
    to: str | Path,
    *,
    images: ImageCheck = "structure",
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> RepairResult:
    """Write all whole samples of damaged shards to another folder, with an index: `wdskit repair`.

    A shard without damage is copied as it is, byte for byte. Nothing is changed where the shards are.

    Args:
        path: As `verify` takes it.
        to: A folder that is empty or not there yet.
        images: A sample with an image that fails this check is lost: `none`, `structure` or `decode`.
        progress: Called after each shard.
        disk: What writes.

    Raises:
        StorageError: There is nothing to read, `to` is not empty, or it cannot be written.
        ConfigError: `images` has no such value.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    missing: list[RepairedShard] = []
    indexed: list[Path] = []

    def note(kind: Fault, shard: str, problem: str) -> None:
        if kind == "missing":
            missing.append(RepairedShard(shard, 0, (Loss(shard, 0, 0, None, problem),), is_suspect=False))

    def open_index(folder: Path) -> FolderIndex | None:
        if not has_index(str(folder)):
            return None
        indexed.append(folder)
        try:
            return read_index(folder)
        except FolderIndexError:
            return None

    shards = collect_shards(str(path), open_index=open_index, on_fault=note)
    if not shards and not indexed:
        raise StorageError(f"{path}: there is no such shard, or no shard (*.tar) in this folder.", url=str(path))
    folder = Path(to)
    _check_names(shards)
    try:
        make_folders(folder, disk=disk)
    except OSError as err:
        raise StorageError(f"{folder}: cannot be made: {err.strerror}.", url=str(folder)) from err
    with lock_folder(folder):
        if any(one.name != LOCK_NAME for one in folder.iterdir()):
            msg = f"{folder}: there is something in this folder. Name one that is empty or not there yet."
            raise StorageError(msg, url=str(folder))
        try:
            return RepairResult(folder, (*missing, *_repair_all(shards, folder, images, progress, disk)))
        except OSError as err:
            raise StorageError(f"{folder}: cannot be written: {err.strerror}.", url=str(folder)) from err


def _check_names(shards: Iterable[str]) -> None:
    """Refuse shards of several folders that would have one name."""
    seen: dict[str, str] = {}
    for path in shards:
        name = Path(path).name
        if name in seen:
            msg = f"{path}: {seen[name]} has the same file name. Repair them one after the other."
            raise StorageError(msg, url=path)
        if not name.isprintable():
            raise StorageError(f"{path}: its file name holds characters that cannot be printed. Rename it.", url=path)
        seen[name] = path


def _repair_all(
    found: Mapping[str, ShardEntry | None], folder: Path, images: ImageCheck, progress: Progress | None, disk: Disk
) -> list[RepairedShard]:
    shards = []
    entries = []
    num_bytes = sum(Path(path).stat().st_size for path in found if Path(path).is_file())
    num_done = 0
    for path, entry in found.items():
        target = folder / Path(path).name
        shard, num_read = _repair_shard(path, entry, target, images, disk)
        shards.append(shard)
        if shard.num_saved:
            scanned = scan_shard(str(target), name=target.name)
            write_offsets(target, scanned.offsets, disk=disk)
            entries.append(scanned.entry)
        num_done += num_read
        if progress:
            progress(num_done, num_bytes)
    _copy_classes(found, folder, disk)
    write_index(folder, entries, disk=disk)
    return shards


def _repair_shard(
    path: str, entry: ShardEntry | None, target: Path, images: ImageCheck, disk: Disk
) -> tuple[RepairedShard, int]:
    """Write what can be saved of one shard; what became of it, and its size."""
    if not Path(path).is_file():
        return RepairedShard(path, 0, (Loss(path, 0, 0, None, "this is no file"),), is_suspect=False), 0
    try:
        file = LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
    except StorageError as err:
        return RepairedShard(path, 0, (Loss(path, 0, 0, None, str(err)),), is_suspect=False), 0
    num_bytes = file.num_bytes
    try:
        digest = _digest(file) if entry else ""
        is_suspect = entry is not None and digest != entry.sha256
        found = salvage(path, file, images=images, with_offsets=entry is None or is_suspect)
        if found.groups:
            with publish(target, disk=disk) as draft:
                for start, stop in _ranges(found, num_bytes):
                    _copy(file, start, stop, draft)
                if found.lost:
                    draft.write(bytes(END_BYTES))
    except StorageError as err:
        return RepairedShard(path, 0, (Loss(path, 0, num_bytes, None, str(err)),), is_suspect=False), num_bytes
    finally:
        file.close()
    return RepairedShard(path, len(found.groups), tuple(found.lost), is_suspect), num_bytes


def _ranges(found: Salvage, num_bytes: int) -> Iterator[tuple[int, int]]:
    """The bytes to copy: all of a shard that lost nothing, else those of its samples, neighbours in one go."""
    if not found.lost:
        yield 0, num_bytes
        return
    start, stop = found.groups[0].start, found.groups[0].stop
    for group in found.groups[1:]:
        if group.start != stop:
            yield start, stop
            start = group.start
        stop = group.stop
    yield start, stop


def _copy(file: LocalFile, start: int, stop: int, draft: Draft) -> None:
    while start < stop:
        part = file.read_at(start, min(COPY_BYTES, stop - start))
        if not part:
            raise StorageError(f"{file.url}: it was cut while it was read.", url=file.url)
        draft.write(part)
        start += len(part)


def _digest(file: LocalFile) -> str:
    digest = hashlib.sha256()
    at = 0
    while part := file.read_at(at, COPY_BYTES):
        digest.update(part)
        at += len(part)
    return digest.hexdigest()


def _copy_classes(shards: Iterable[str], folder: Path, disk: Disk) -> None:
    """The names of the classes, where the shards come from one folder that has them."""
    sources = {Path(path).parent for path in shards}
    path = next(iter(sources), Path()) / CLASSES_NAME
    if len(sources) == 1 and path.is_file():
        publish_bytes(folder / CLASSES_NAME, read_bytes(str(path), limit=MAX_CLASSES_BYTES), disk=disk)
