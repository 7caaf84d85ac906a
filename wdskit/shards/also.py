"""Files for other readers beside the shards: `--also` of `pack` and `index`.

`index.json` says which kinds are kept beside its shards, so that `index` and `pack --append` renew them and `verify`
compares them. Where a kind is not listed there, a file that stands in its place was made by something else, and is
never replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from wdskit.dataset.binary import BINARY_NAME
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.counts import INFO_NAMES, SIZES_NAME
from wdskit.dataset.index import INDEX_NAME, NOTHING_ELSE, Also, ShardEntry
from wdskit.dataset.offsets import SUFFIX
from wdskit.errors import ConfigError, FolderIndexError
from wdskit.files import Disk, make_folders, publish_bytes, remove_drafts
from wdskit.shards.also_counts import info_file, sizes_file
from wdskit.shards.also_dali import dali_index
from wdskit.shards.also_energon import DATASET_NAME, DATASET_YAML, INFO_NAME, SPLIT_NAME, info_json, split_yaml
from wdskit.shards.also_parquet import check_pyarrow, parquet_file, stats_file
from wdskit.shards.also_record import ShardRecord
from wdskit.shards.also_webshart import webshart_index

KINDS = ("wids", "open_clip", "timm", "energon", "dali", "webshart", "parquet")
"""`wids` writes nothing more: `index.json` is an index of wids, which never compares the `md5sum` that one may have."""

NONE = "none"
"""In place of kinds: from now on nothing is kept beside the shards. The files that are there stay."""

_ENDINGS = {"dali": (".idx",), "webshart": (".json",), "parquet": (".parquet", "_stats.json")}
_TAKEN = (INDEX_NAME, BINARY_NAME, CLASSES_NAME, SIZES_NAME, *INFO_NAMES, "rejected.jsonl")


def parse_also(kinds: Sequence[str], *, split_name: str = "", before: Also = NOTHING_ELSE) -> Also:
    """What is to be kept beside the shards: what was, and these kinds.

    Args:
        kinds: Some of `KINDS`, or `none` alone.
        split_name: The split of all shards, for timm and energon; "" keeps what was said before.
        before: What the folder's index says.

    Raises:
        ConfigError: A kind is not known, or what it needs is not installed.
    """
    wanted = before.kinds + tuple(kinds)
    if NONE in kinds:
        if len(set(kinds)) > 1:
            raise ConfigError(f"also: {NONE!r} stands alone, not with {', '.join(sorted({*kinds} - {NONE}))}.")
        wanted = ()
    unknown = next((kind for kind in wanted if kind not in KINDS), None)
    if unknown is not None:
        raise ConfigError(f"also: {unknown!r} is no kind of file for another reader. There are: {', '.join(KINDS)}.")
    if not split_name.isprintable():
        raise ConfigError(f"split_name: {split_name!r} holds characters that cannot be printed.")
    if "parquet" in wanted:
        check_pyarrow()
    return Also(tuple(kind for kind in KINDS if kind in wanted), split_name or before.split_name)


def new_record(also: Also) -> ShardRecord | None:
    """What to note the members of a shard in; None where no kind asks for them."""
    if not any(kind in _ENDINGS for kind in also.kinds):
        return None
    return ShardRecord(keep_json="parquet" in also.kinds)


def shard_names(shard: str, kinds: Iterable[str]) -> dict[str, str]:
    """The files beside a shard, by name: the kind of each."""
    stem = shard.removesuffix(".tar")
    return {f"{stem}{ending}": kind for kind in kinds for ending in _ENDINGS.get(kind, ())}


def check_names(shards: Iterable[str], also: Also) -> None:
    """Refuse shards whose files would have the name of another file.

    Raises:
        FolderIndexError: Names both.
    """
    if not any(kind in _ENDINGS for kind in also.kinds):
        return
    shards = list(shards)
    owners = dict.fromkeys(_TAKEN, "the folder") | {f"{shard}{SUFFIX}": shard for shard in shards}
    for shard in shards:
        for name, kind in shard_names(shard, also.kinds).items():
            if name in owners:
                msg = f"{shard}: its file for {kind} would be {name}, which is one of {owners[name]}."
                raise FolderIndexError(f"{msg}\n  Leave out `{kind}`, or rename the shard.")
            owners[name] = shard


def publish_beside_shard(
    path: Path, entry: ShardEntry, record: ShardRecord, *, also: Also, before: Also, disk: Disk
) -> None:
    """Write the files of one shard, which itself is in its place.

    Args:
        path: The shard.
        entry: Its line in the index.
        record: Its members.
        also: The kinds.
        before: The kinds that the index before had, whose files are replaced.
        disk: What writes.

    Raises:
        FolderIndexError: A kind cannot hold this shard, or something else has written a file in the way.
        OSError: The disk fails.
    """
    made: dict[str, Callable[[], bytes]] = {
        ".idx": lambda: dali_index(record, str(path)),
        ".json": lambda: webshart_index(record, entry),
        ".parquet": lambda: parquet_file(record, str(path)),
        "_stats.json": lambda: stats_file(entry.num_samples),
    }
    stem = path.name.removesuffix(".tar")
    for name, kind in shard_names(path.name, also.kinds).items():
        _publish(path.with_name(name), made[name[len(stem) :]](), ours=kind in before.kinds, disk=disk)


def publish_beside_folder(
    folder: Path, entries: Sequence[ShardEntry], *, also: Also, before: Also, earlier: Sequence[ShardEntry], disk: Disk
) -> None:
    """Write the files of all shards together. The folder's index comes after them.

    Args:
        folder: Where the shards are.
        entries: Their lines in the index.
        also: The kinds.
        before: The kinds that the index before had, whose files are replaced.
        earlier: The lines that it had.
        disk: What writes.

    Raises:
        FolderIndexError: As `publish_beside_shard`.
        OSError: The disk fails.
    """
    for name, data, kind in _folder_files(folder, entries, also, before, earlier):
        path = folder / name
        if path.parent != folder:
            make_folders(path.parent, disk=disk)
            remove_drafts(path.parent, disk=disk)
        _publish(path, data, ours=kind in before.kinds, disk=disk)


def _folder_files(
    folder: Path, entries: Sequence[ShardEntry], also: Also, before: Also, earlier: Sequence[ShardEntry]
) -> Iterator[tuple[str, bytes, str]]:
    """Name, bytes and kind of each."""
    if "open_clip" in also.kinds:
        yield SIZES_NAME, sizes_file(entries), "open_clip"
    if "timm" in also.kinds:
        yield INFO_NAMES[0], info_file(entries, also.split_name), "timm"
    if "energon" in also.kinds:
        wrote = split_yaml(earlier, before.split_name) if "energon" in before.kinds else None
        yield INFO_NAME, info_json(entries), "energon"
        if not (folder / SPLIT_NAME).exists() or (folder / SPLIT_NAME).read_bytes() == wrote:
            yield SPLIT_NAME, split_yaml(entries, also.split_name), "energon"
        if not (folder / DATASET_NAME).exists():
            yield DATASET_NAME, DATASET_YAML, "energon"


def folder_names(also: Also) -> tuple[str, ...]:
    """The files of all shards together."""
    names = {"open_clip": (SIZES_NAME,), "timm": (INFO_NAMES[0],), "energon": (INFO_NAME, SPLIT_NAME, DATASET_NAME)}
    return tuple(name for kind in also.kinds for name in names.get(kind, ()))


def _publish(path: Path, data: bytes, *, ours: bool, disk: Disk) -> None:
    if path.exists() and not ours and path.read_bytes() != data:
        msg = f"{path}: this file exists already and holds something else."
        raise FolderIndexError(f"{msg} It was not overwritten.\n  Move it away.", folder=str(path.parent))
    publish_bytes(path, data, disk=disk)
