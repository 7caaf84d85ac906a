"""The kinds of files for other readers: which are kept beside the shards, writing them, and checking them.

`index.json` says which kinds are kept beside its shards, so that `index` and `pack --append` renew them and `verify`
compares them. Where a kind is not listed there, a file that stands in its place was made by something else, and is
never replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from wdskit.dataset.index import (
    INDEX_NAME,
    INFO_NAMES,
    NO_EXPORTS,
    SIZES_NAME,
    Exports,
    FolderIndex,
    ShardEntry,
    join_url,
    read_other_counts,
)
from wdskit.errors import ConfigError, FolderIndexError, StorageError
from wdskit.export.dali import ShardMembers, dali_index, dali_problem
from wdskit.export.energon import (
    DATASET_NAME,
    DATASET_YAML,
    INFO_NAME,
    SPLIT_NAME,
    info_json,
    info_problem,
    split_problem,
    split_yaml,
)
from wdskit.export.timm import sizes_json, timm_info_json
from wdskit.files import Disk, make_folders, publish_bytes, remove_temp_files
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.urls import is_local, read_bytes

KINDS = ("wids", "open_clip", "timm", "energon", "dali")
"""`wids` writes nothing more: `index.json` is an index of wids, which never compares the `md5sum` that one may have."""

NONE = "none"
"""In place of kinds: from now on nothing is kept beside the shards. The files that are there stay."""

_FOLDER_FILES = {
    "open_clip": (SIZES_NAME,),
    "timm": (INFO_NAMES[0],),
    "energon": (INFO_NAME, SPLIT_NAME, DATASET_NAME),
}


def parse_exports(kinds: str | Sequence[str], *, split_name: str = "", before: Exports = NO_EXPORTS) -> Exports:
    """What is to be kept beside the shards: what was, and these kinds.

    Args:
        kinds: Some of `KINDS`, or `none` alone; names, or a text of them with commas.
        split_name: The split of all shards, for timm and energon; "" keeps what was said before.
        before: What the folder's index says.

    Raises:
        ConfigError: A kind is not known.
    """
    if isinstance(kinds, str):
        kinds = [kind.strip() for kind in kinds.split(",")]
    wanted = before.kinds + tuple(kinds)
    if NONE in kinds:
        if len(set(kinds)) > 1:
            raise ConfigError(f"export: {NONE!r} cannot be combined with {', '.join(sorted({*kinds} - {NONE}))}.")
        wanted = ()
    unknown = next((kind for kind in wanted if kind not in KINDS), None)
    if unknown is not None:
        raise ConfigError(
            f"export: {unknown!r} is not a kind of file for another reader. There are: {', '.join(KINDS)}."
        )
    if not split_name.isprintable():
        raise ConfigError(f"split_name: {split_name!r} holds characters that cannot be printed.")
    return Exports(tuple(kind for kind in KINDS if kind in wanted), split_name or before.split_name)


def new_members(kinds: Sequence[str]) -> ShardMembers | None:
    """What collects the members of a shard, for `export_shard`; None where no kind needs them."""
    return ShardMembers() if "dali" in kinds else None


def shard_export_names(shard: str, kinds: Iterable[str]) -> tuple[str, ...]:
    """Names of the files beside one shard."""
    return (f"{shard.removesuffix('.tar')}.idx",) if "dali" in kinds else ()


def folder_export_names(kinds: Iterable[str]) -> tuple[str, ...]:
    """Names of the files of all shards together, those of energon below `.nv-meta`."""
    return tuple(name for kind in kinds for name in _FOLDER_FILES.get(kind, ()))


def check_export_names(shards: Iterable[str], kinds: Sequence[str]) -> None:
    """Refuse shards whose exported file would have the name of another shard's `.tar.idx`.

    Raises:
        FolderIndexError: Names both.
    """
    if "dali" not in kinds:
        return
    names = set(shards)
    for shard in sorted(names):
        if (owner := shard.removesuffix(".tar")) in names:
            msg = f"{shard}: its file for dali would be {owner}.idx, which is one of {owner}."
            raise FolderIndexError(f"{msg}\n  Leave out `dali`, or rename the shard.")


def export_shard(path: Path, members: ShardMembers, *, exports: Exports, before: Exports, disk: Disk) -> None:
    """Write the files beside one shard, which itself is in its place.

    Args:
        path: The shard.
        members: What it holds.
        exports: The kinds.
        before: The kinds that the index before had, whose files are replaced.
        disk: Performs the file operations; tests replace it.

    Raises:
        FolderIndexError: A kind cannot hold this shard, or something else has written a file in the way.
        OSError: The disk fails.
    """
    for name in shard_export_names(path.name, exports.kinds):
        data = dali_index(members, str(path))
        _check_way(path.with_name(name), data, ours="dali" in before.kinds)
        publish_bytes(path.with_name(name), data, disk=disk)


def export_folder(
    folder: Path,
    entries: Sequence[ShardEntry],
    *,
    exports: Exports,
    before: Exports,
    earlier: Sequence[ShardEntry],
    disk: Disk,
) -> None:
    """Write the files of all shards together. The folder's index comes after them. Arguments as `folder_files`.

    Raises:
        FolderIndexError: As `export_shard`.
        OSError: The disk fails.
    """
    for name, data in folder_files(folder, entries, exports=exports, before=before, earlier=earlier):
        path = folder / name
        if path.parent != folder:
            make_folders(path.parent, disk=disk)
            remove_temp_files(path.parent, disk=disk)
        publish_bytes(path, data, disk=disk)


def folder_files(
    folder: Path, entries: Sequence[ShardEntry], *, exports: Exports, before: Exports, earlier: Sequence[ShardEntry]
) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the files of all shards together that are to be written into their folder.

    What a user may write in energon's YAML files stays, unless it is what wdskit wrote for the shards before.

    Args:
        folder: Where the shards are.
        entries: Their lines in the index.
        exports: The kinds.
        before: The kinds that the index before had, whose files are replaced.
        earlier: The lines that it had.

    Raises:
        FolderIndexError: Something else has written a file in the way.
    """
    for kind in exports.kinds:
        if kind == "open_clip":
            name, data = SIZES_NAME, sizes_json(entries)
        elif kind == "timm":
            name, data = INFO_NAMES[0], timm_info_json(entries, exports.split_name)
        elif kind == "energon":
            name, data = INFO_NAME, info_json(entries)
        else:
            continue
        _check_way(folder / name, data, ours=kind in before.kinds)
        yield name, data
    if "energon" in exports.kinds:
        split_path = folder / SPLIT_NAME
        wrote = split_yaml(earlier, before.split_name) if "energon" in before.kinds else None
        if not split_path.exists() or split_path.read_bytes() == wrote:
            yield SPLIT_NAME, split_yaml(entries, exports.split_name)
        if not (folder / DATASET_NAME).exists():
            yield DATASET_NAME, DATASET_YAML


def _check_way(path: Path, data: bytes, *, ours: bool) -> None:
    if path.exists() and not ours and path.read_bytes() != data:
        msg = f"{path}: this file exists already and holds something else."
        raise FolderIndexError(f"{msg} It was not overwritten.\n  Move it away.", folder=str(path.parent))


ExportProblem = tuple[Literal["beside", "index"], str, str]
"""What is wrong with an exported file, or with what the index says of exports: that, the file, and the problem."""


def check_shard_exports(path: str, members: ShardMembers, kinds: Sequence[str]) -> Iterator[ExportProblem]:
    """What is wrong with the files of these kinds beside one shard, which is whole and has these members."""
    folder, _, shard = path.rpartition("/")
    for name in shard_export_names(shard, kinds):
        yield from _check(join_url(folder, name), "dali", lambda data: dali_problem(data, members, path))


def check_folder_exports(index: FolderIndex) -> Iterator[ExportProblem]:
    """What is wrong with the files of all shards of a folder together, by its index."""
    folder, entries = index.folder, index.entries
    for kind in index.exports.kinds:
        if kind not in KINDS:
            problem = f"it says that files for {kind!r} are kept here, which this version does not support"
            yield "index", join_url(folder, INDEX_NAME), problem
    counts = read_other_counts(index.folder)
    for kind, name in (("open_clip", SIZES_NAME), ("timm", INFO_NAMES[0])):
        if kind in index.exports.kinds:
            problem = _count_problem(counts[name], entries) if name in counts else "it is missing"
            if problem:
                yield "beside", join_url(folder, name), f"{kind}: {problem}"
    if "energon" in index.exports.kinds:
        yield from _check(join_url(folder, INFO_NAME), "energon", lambda data: info_problem(data, entries))
        yield from _check(join_url(folder, SPLIT_NAME), "energon", lambda data: split_problem(data, entries))
        empty = "it is empty"
        yield from _check(join_url(folder, DATASET_NAME), "energon", lambda data: "" if data.strip() else empty)


def _check(file: str, kind: str, check: Callable[[bytes], str]) -> Iterator[ExportProblem]:
    """`check` returns what is wrong with the bytes of a file, "" where nothing is."""
    path = Path(file) if is_local(file) else None
    try:
        if path is not None and not path.is_file():
            problem = "this is not a file" if path.exists() else "it is missing"
        else:
            problem = check(read_bytes(file, limit=MAX_INDEX_BYTES))
    except StorageError as err:
        problem = "it is missing" if err.status == HTTPStatus.NOT_FOUND else f"it cannot be read: {err}"
    if problem:
        yield "beside", file, f"{kind}: {problem}"


def _count_problem(counts: Mapping[str, int] | None, entries: Sequence[ShardEntry]) -> str:
    """What is wrong with the counts of a file, None where it does not read."""
    if counts is None:
        return "it is not what its program reads"
    wanted = {entry.name: entry.num_samples for entry in entries}
    wrong = next((name for name in {**wanted, **counts} if counts.get(name) != wanted.get(name)), None)
    if wrong is None:
        return ""
    if wrong not in counts or wrong not in wanted:
        return f"{wrong} {'is in it, but not in the index' if wrong in counts else 'is missing from it'}"
    return f"it says that {wrong} has {counts[wrong]} samples, not {wanted[wrong]}"
