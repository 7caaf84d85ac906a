"""`wdskit repair`: the whole samples of damaged shards, written to another folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from wdskit.codecs.checks import IMAGE_CHECKS, ImageCheck
from wdskit.dataset.braces import expand_patterns
from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES
from wdskit.dataset.index import NO_EXPORTS, Exports, FolderIndex, ShardEntry, has_index, read_index, write_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import UNLISTED, look_for_shards, nothing_matches
from wdskit.dataset.shard import write_offsets
from wdskit.errors import ConfigError, FolderIndexError, StorageError
from wdskit.export.api import export_folder, export_shard, new_members, parse_exports
from wdskit.files import DISK, Disk, make_folders, publish, publish_bytes
from wdskit.shards.index import DigestedFile, refuse_filled, scan_shard
from wdskit.shards.parallel import Progress, open_path
from wdskit.shards.payloads import PIECE_BYTES, file_pieces
from wdskit.shards.salvage import Loss, Walk, known_starts
from wdskit.storage.urls import is_local, read_bytes
from wdskit.tar.writer import END_BYTES


@dataclass(frozen=True)
class RepairedShard:
    """The result for one shard.

    Attributes:
        path: The shard that was read.
        num_saved: Samples that were saved; with 0, no shard was written.
        lost: What was not saved.
        is_suspect: Its sha256 differs from the index. Only that digest shows a change inside a field, so saved samples
            may have changed contents.
    """

    path: str
    num_saved: int
    lost: tuple[Loss, ...]
    is_suspect: bool


@dataclass(frozen=True)
class RepairResult:
    """What `wdskit.repair` did.

    Attributes:
        folder: The folder of the repaired shards and their index.
        shards: The result for each shard that was read, or is missing.
    """

    folder: Path
    shards: tuple[RepairedShard, ...]

    @property
    def num_saved(self) -> int:
        """Samples in all repaired shards."""
        return sum(one.num_saved for one in self.shards)

    @property
    def lost(self) -> tuple[Loss, ...]:
        """Everything that was lost, in order."""
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

    Shards without damage are copied byte for byte. If all shards are in one folder whose index lists files for other
    readers (`export`), these are written again, without a user's changes to those of energon. The folder of the shards
    stays unchanged.

    Args:
        path: As for `verify`, but local.
        to: A folder that is empty or does not exist.
        images: A sample with an image that fails this check is lost: `none`, `structure` or `decode`.
        progress: Called after each shard.
        disk: Performs the file operations; tests replace it.

    Raises:
        StorageError: There is nothing to read, or it is not local; `to` is not empty, or it cannot be written.
        ConfigError: `images` has an unknown value.
    """
    if images not in IMAGE_CHECKS:
        raise ConfigError(f"images are checked as {', '.join(IMAGE_CHECKS)}, not {images!r}.")
    remote = next((one for one in expand_patterns(str(path)) if not is_local(one)), None)
    if remote is not None:
        msg = f"{remote}: only local shards can be repaired. Copy the shards and their index here first."
        raise StorageError(msg, url=remote)
    indexes: dict[str, FolderIndex | None] = {}

    def open_index(folder: str) -> FolderIndex | None:
        if has_index(folder):
            indexes[folder] = None
            with contextlib.suppress(FolderIndexError):
                indexes[folder] = read_index(folder)
        return indexes.get(folder)

    shards, faults = look_for_shards(str(path), open_index)
    missing = [
        RepairedShard(one.url, 0, (Loss(one.url, 0, 0, None, one.problem),), is_suspect=False)
        for one in faults
        if one.problem != UNLISTED
    ]
    if not shards and not indexes:
        raise nothing_matches(str(path))
    found = [*indexes.values()]
    exports = parse_exports((), before=found[0].exports) if len(found) == 1 and found[0] else NO_EXPORTS
    folder = Path(to)
    _check_names(shards)
    try:
        make_folders(folder, disk=disk)
    except OSError as err:
        raise StorageError(f"{folder}: cannot be made: {err.strerror}.", url=str(folder)) from err
    with lock_folder(folder):
        refuse_filled(folder)
        try:
            return RepairResult(folder, (*missing, *_repair_all(shards, folder, images, exports, progress, disk)))
        except OSError as err:
            raise StorageError(f"{folder}: cannot be written: {err.strerror}.", url=str(folder)) from err


def _check_names(shards: Iterable[str]) -> None:
    """Refuse shards of several folders that would have one name."""
    seen: dict[str, str] = {}
    for path in shards:
        name = Path(path).name
        if name in seen:
            msg = f"{path}: {seen[name]} has the same file name. Repair them separately."
            raise StorageError(msg, url=path)
        if not name.isprintable():
            raise StorageError(f"{path}: its file name holds characters that cannot be printed. Rename it.", url=path)
        seen[name] = path


def _repair_all(
    found: Mapping[str, ShardEntry | None],
    folder: Path,
    images: ImageCheck,
    exports: Exports,
    progress: Progress | None,
    disk: Disk,
) -> list[RepairedShard]:
    shards = []
    entries = []
    sizes = {path: Path(path).stat().st_size if Path(path).is_file() else 0 for path in found}
    num_done = 0
    for path, entry in found.items():
        target = folder / Path(path).name
        shard = _repair_shard(path, entry, target, images, disk)
        shards.append(shard)
        if shard.num_saved:
            scanned = scan_shard(str(target), name=target.name, members=new_members(exports.kinds))
            if scanned.members is not None:
                export_shard(target, scanned.members, exports=exports, before=NO_EXPORTS, disk=disk)
            write_offsets(target, scanned.offsets, disk=disk)
            entries.append(scanned.entry)
        num_done += sizes[path]
        if progress:
            progress(num_done, sum(sizes.values()))
    _copy_classes(found, folder, disk)
    export_folder(folder, entries, exports=exports, before=NO_EXPORTS, earlier=(), disk=disk)
    write_index(folder, entries, exports=exports, disk=disk)
    return shards


def _repair_shard(path: str, entry: ShardEntry | None, target: Path, images: ImageCheck, disk: Disk) -> RepairedShard:
    """Write what can be saved of one shard."""
    if not Path(path).is_file():
        return RepairedShard(path, 0, (Loss(path, 0, 0, None, "this is not a file"),), is_suspect=False)
    num_bytes = 0
    try:
        shard = DigestedFile(open_path(path))
        with contextlib.closing(shard.file) as file:
            num_bytes = file.num_bytes
            while entry and shard.read(PIECE_BYTES):
                pass
            is_suspect = entry is not None and shard.sha256.hexdigest() != entry.sha256
            starts = known_starts(path) if entry is None or is_suspect else []
            walk = Walk(path, file, starts, images)
            if not walk.agrees:
                walk = Walk(path, file, [], images)
            whole, lost = walk.result()
            if whole:
                with publish(target, disk=disk) as temp:
                    for start, stop in [(one.start, one.stop) for one in whole] if lost else [(0, num_bytes)]:
                        for part in file_pieces(file, start, stop):
                            temp.write(part)
                    if lost:
                        temp.write(bytes(END_BYTES))
    except StorageError as err:
        return RepairedShard(path, 0, (Loss(path, 0, num_bytes, None, str(err)),), is_suspect=False)
    return RepairedShard(path, len(whole), tuple(lost), is_suspect)


def _copy_classes(shards: Iterable[str], folder: Path, disk: Disk) -> None:
    """The names of the classes, where the shards come from one folder that has them."""
    sources = {Path(path).parent for path in shards}
    path = next(iter(sources), Path()) / CLASSES_NAME
    if len(sources) == 1 and path.is_file():
        publish_bytes(folder / CLASSES_NAME, read_bytes(str(path), limit=MAX_CLASSES_BYTES), disk=disk)
