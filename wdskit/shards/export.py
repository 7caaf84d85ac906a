"""`wdskit export`: write the files that other readers need next to the shards.

`.wdskit.exports` lists the written files, their digests, and the digest of the index from which they were made.
`verify` reports listed files that are outdated or damaged. A file that another program wrote is never replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wdskit.dataset.index import INDEX_NAME, ShardEntry, read_index, refuse_commit
from wdskit.dataset.lock import lock_folder
from wdskit.errors import ConfigError, FolderIndexError, StorageError
from wdskit.files import (
    DISK,
    Disk,
    describe_foreign,
    is_file_name,
    make_folders,
    publish_bytes,
    read_own,
    remove_temp_files,
)
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.shards.parallel import Progress, local_folder
from wdskit.storage.urls import LocalFile, read_bytes
from wdskit.tar.names import split_name as split_key
from wdskit.tar.walk import TarWalk

KINDS = ("open_clip", "timm", "energon", "dali")
RECORD_NAME = ".wdskit.exports"
ENERGON_VERSION = "7.4.1"
"""The version of Megatron-Energon that these files were tested with."""

_SIZES_NAME, _TIMM_NAME = "sizes.json", "_info.json"
_META = ".nv-meta"
_INFO_NAME, _SPLIT_NAME, _DATASET_NAME = f"{_META}/.info.json", f"{_META}/split.yaml", f"{_META}/dataset.yaml"
_USERS = (_SPLIT_NAME, _DATASET_NAME)
"""Files in which a user chooses what to train on. A file that the user changed is not replaced."""
_OWN_NAMES = frozenset({_SIZES_NAME, _TIMM_NAME, _INFO_NAME, *_USERS})
_DATASET_YAML = b"__module__: megatron.energon\n__class__: CrudeWebdataset\n"

_TRAIN = "train"
_PARTS = {
    "train": _TRAIN, "training": _TRAIN, "val": "val", "valid": "val", "validation": "val", "dev": "val", "eval": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
"""Energon's part for each split that the name of a shard may have."""
_WORDS = re.compile(r"[-_.]+")
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


@dataclass(frozen=True)
class ExportReport:
    """Result of `export`.

    Attributes:
        folder: The folder of the files.
        kinds: The kinds of all exported files, in the order of `KINDS`.
        num_files: Number of exported files that are up to date now.
        kept: Names of energon's files that a user has changed and that were therefore not replaced.
    """

    folder: Path
    kinds: tuple[str, ...]
    num_files: int
    kept: tuple[str, ...] = ()


def parse_kinds(kinds: str | Sequence[str]) -> tuple[str, ...]:
    """Parse names of kinds, or a text with commas. Return the kinds in the order of `KINDS`; () for an empty list.

    Raises:
        ConfigError: A kind is unknown. The empty text is an unknown kind, too.
    """
    names = [kind.strip() for kind in kinds.split(",")] if isinstance(kinds, str) else [*kinds]
    for name in names:
        if name not in KINDS:
            hint = " wids reads index.json as it is." if name == "wids" else ""
            known = ", ".join(KINDS)
            raise ConfigError(f"export: {name!r} is not a kind of file for another reader. Known are {known}.{hint}")
    return tuple(kind for kind in KINDS if kind in names)


def export(
    folder: str | Path,
    kinds: str | Sequence[str],
    *,
    split_name: str = "",
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> ExportReport:
    """Write the files that other readers need next to the shards: `wdskit export`.

    The files are made from the folder's index; the files for DALI also need the headers of the shards. Existing files
    of these kinds are replaced if wdskit wrote them; energon's split.yaml and dataset.yaml stay if the user has changed
    them. Files of other kinds that were exported before are written again too. The exported .idx files of shards that
    the index does not list are removed.

    Args:
        folder: A local folder with an index.
        kinds: The readers: `open_clip` (sizes.json), `timm` (_info.json), `energon` (.nv-meta/) and `dali` (one .idx
            per shard). wids and webdataset need no files.
        split_name: The split of all shards, for timm and energon. Default: the `split_name` of the previous export. If
            it was empty too, each shard belongs to the split in its name (see `split_of`).
        progress: Called after each shard whose headers were read, with the bytes of these shards and of all shards.
        disk: Performs the file operations; tests replace it.

    Raises:
        ConfigError: A kind is unknown, no kind is named, or `split_name` has unprintable characters.
        FolderIndexError: The folder has no index, `pack` has not finished here, another process is writing here,
            another program's file has a needed name, or a reader cannot use the name of a shard or field.
        ShardError: A shard is damaged.
        StorageError: The folder does not exist or cannot be written.
    """
    wanted = parse_kinds(kinds)
    if not wanted:
        raise ConfigError(f"export: no kind of file for another reader. Known are {', '.join(KINDS)}.")
    if not split_name.isprintable():
        raise ConfigError(f"split_name: {split_name!r} holds characters that cannot be printed.")
    path = local_folder(folder, command="export", done="exported")
    try:
        with lock_folder(path):
            refuse_commit(path)
            remove_temp_files(path, disk=disk)
            return _export(path, wanted, split_name, progress, disk)
    except OSError as err:
        raise StorageError(f"{path}: cannot be written: {err.strerror}.", url=str(path)) from err


class _ExportList(NamedTuple):
    """Content of `.wdskit.exports`. `files` maps the name of each file to its digests, the newest last. `index_sha256`
    is "" until the export has finished.
    """

    index_sha256: str
    kinds: tuple[str, ...]
    split_name: str
    files: dict[str, list[str]]

    def to_json(self) -> bytes:
        return (json.dumps(self._asdict(), ensure_ascii=False, indent=0) + "\n").encode()


def _export(path: Path, kinds: tuple[str, ...], split_name: str, progress: Progress | None, disk: Disk) -> ExportReport:
    entries = read_index(path).entries
    index = hashlib.sha256(read_bytes(str(path / INDEX_NAME), limit=MAX_INDEX_BYTES)).hexdigest()
    previous = _read_export_list(path) or _ExportList("", (), "", {})
    kinds = tuple(kind for kind in KINDS if kind in {*kinds, *previous.kinds})
    split_name = split_name or previous.split_name
    for name in sorted(entry.name for entry in entries) if "dali" in kinds else ():
        if (owner := name.removesuffix(".tar")).endswith(".tar"):
            msg = f"{path / name}: its file for dali would be {owner}.idx, which is the name of the offsets of {owner}."
            raise FolderIndexError(f"{msg}\n  Rename the shard.", folder=str(path))
    _check_meta(path)
    if "energon" in kinds:
        make_folders(path / _META, disk=disk)
        remove_temp_files(path / _META, disk=disk)
    folder_files = dict(_folder_files(entries, kinds, split_name))
    dali_names = [f"{entry.name.removesuffix('.tar')}.idx" for entry in entries] if "dali" in kinds else []
    kept = _changed_by_user(path, previous, folder_files)
    for name in (*folder_files, *dali_names):
        if name in kept or name in previous.files or not os.path.lexists(path / name):
            continue
        if name not in folder_files or read_own(path / name) != folder_files[name]:
            msg = f"{path / name}: this file exists already, and wdskit did not write it. It was not overwritten."
            raise FolderIndexError(f"{msg}\n  Move it away.", folder=str(path))
    # During the export, the list names no index and has the old and the new digest of each file.
    files = {name: previous.files.get(name, []) for name in (*previous.files, *folder_files, *dali_names)}
    files |= {name: [*files[name], _digest(data)] for name, data in folder_files.items() if name not in kept}
    publish_bytes(path / RECORD_NAME, _ExportList("", kinds, split_name, files).to_json(), disk=disk)
    for name, data in folder_files.items():
        if name not in kept:
            publish_bytes(path / name, data, disk=disk)
    total, done = sum(entry.num_bytes for entry in entries), 0
    for entry, name in zip(entries, dali_names, strict=False):
        data = dali_index(path / entry.name)
        publish_bytes(path / name, data, disk=disk)
        files[name] = [_digest(data)]
        done += entry.num_bytes
        if progress:
            progress(done, total)
    for name in previous.files.keys() - {*folder_files, *dali_names}:  # the shards of these files were removed
        disk.remove(path / name)
    files = {name: files[name][-1:] for name in (*folder_files, *dali_names)}
    publish_bytes(path / RECORD_NAME, _ExportList(index, kinds, split_name, files).to_json(), disk=disk)
    return ExportReport(path, kinds, len(files) - len(kept), tuple(sorted(kept)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_meta(path: Path) -> None:
    """Raise FolderIndexError if energon's folder `.nv-meta` in the folder `path` is a link."""
    if (path / _META).is_symlink():
        raise FolderIndexError(describe_foreign(path / _META, "is a link"), folder=str(path))


def _changed_by_user(path: Path, previous: _ExportList, folder_files: dict[str, bytes]) -> set[str]:
    """Return the names of the files in `_USERS` that a user has changed: files that differ from the new content in
    `folder_files` and from all digests in `previous`. FolderIndexError: Such a file is a link or not a plain file.
    """
    found = {name: read_own(path / name) for name in _USERS if name in folder_files and os.path.lexists(path / name)}
    return {
        name
        for name, data in found.items()
        if data is not None and data != folder_files[name] and _digest(data) not in previous.files.get(name, ())
    }


def _read_export_list(folder: Path) -> _ExportList | None:
    """Return the list of the exported files of a folder; None if the list does not exist or is invalid.
    FolderIndexError: The list is a link or not a plain file.
    """
    try:
        found = _ExportList(**json.loads(read_own(folder / RECORD_NAME) or b""))
        texts = [found.index_sha256, found.split_name, *found.kinds, *found.files]
        texts += [digest for digests in found.files.values() for digest in digests]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if not all(isinstance(text, str) for text in texts) or not {*found.kinds} <= {*KINDS}:
        return None
    others = [name for name in found.files if name not in _OWN_NAMES]
    if not all(is_file_name(name) and name.endswith(".idx") and not name.endswith(".tar.idx") for name in others):
        return None  # a file of another folder, or the offsets of a shard, must not be removed
    return found


def remove_exports(folder: Path, disk: Disk) -> None:
    """Remove the exported files of a folder and their list. Files in `_USERS` stay if a user has changed them. Do
    nothing without a valid list. The caller must hold the folder's lock.

    Raises:
        FolderIndexError: The list, energon's folder, or energon's split.yaml or dataset.yaml is a link.
        OSError: A file cannot be read or removed.
    """
    exports = _read_export_list(folder)
    if exports is None:
        return
    _check_meta(folder)
    for name, digests in exports.files.items():
        if name not in _USERS or _digest(read_own(folder / name) or b"") in digests:
            disk.remove(folder / name)
    disk.remove(folder / RECORD_NAME)


def describe_outdated(folder: Path) -> str:
    """Return a message if exported files are older than the folder's index, with the command to run. Return "" if the
    files are up to date, or if the folder has no exported files or no index. FolderIndexError: The list of the exported
    files is not a plain file.
    """
    exports = _read_export_list(folder)
    if exports is None or not (folder / INDEX_NAME).exists():
        return ""
    if exports.index_sha256 == _digest(read_bytes(str(folder / INDEX_NAME), limit=MAX_INDEX_BYTES)):
        return ""
    kinds = ",".join(exports.kinds)
    return f"The files for {kinds} are older than the index. Run `wdskit export {folder} --for {kinds}`."


def export_problems(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, problem) for each exported file that is missing or damaged. Files that users may change (`_USERS`)
    only have to exist. If the files are older than the index, or `.wdskit.exports` is not a plain file, yield only one
    problem, with the path of `.wdskit.exports`. Without a valid `.wdskit.exports`, yield nothing.
    """
    try:
        exports = _read_export_list(folder)
    except FolderIndexError as err:  # a link, or another file that wdskit did not write
        yield str(folder / RECORD_NAME), str(err).removeprefix(f"{folder / RECORD_NAME}: ").partition(",")[0]
        return
    if exports is None:
        return
    problem = describe_outdated(folder)
    if problem:
        yield str(folder / RECORD_NAME), problem.rstrip(".")
        return
    for name, digests in exports.files.items():
        path = folder / name
        if not path.is_file():
            yield str(path), "this is not a file" if path.exists() else "it is missing"
        elif name not in _USERS and _digest(read_bytes(str(path), limit=MAX_INDEX_BYTES)) not in digests:
            yield str(path), "it is not what `wdskit export` wrote"


# The files of each reader.


def _folder_files(entries: Sequence[ShardEntry], kinds: Sequence[str], split_name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each exported file that describes the whole folder. If `split_name` is empty,
    the names of the shards give the splits. FolderIndexError: Energon would read the name of a shard as a pattern.
    """
    if "open_clip" in kinds:
        lines = ",\n".join(f"{json.dumps(one.name, ensure_ascii=False)}: {one.num_samples}" for one in entries)
        yield _SIZES_NAME, f"{{\n{lines}\n}}\n".encode()
    if "timm" in kinds:
        splits = {
            split: {
                "name": split,
                "num_samples": sum(one.num_samples for one in found),
                "filenames": [one.name for one in found],
                "shard_lengths": [one.num_samples for one in found],
                "alt_label": "",
            }
            for split, found in _shards_by_split(entries, split_name).items()
        }
        yield _TIMM_NAME, (json.dumps({"splits": splits}, ensure_ascii=False, indent=1) + "\n").encode()
    if "energon" in kinds:
        counts = {one.name: one.num_samples for one in entries if one.num_samples}  # energon refuses empty shards
        info = {"energon_version": ENERGON_VERSION, "shard_counts": counts}
        yield _INFO_NAME, (json.dumps(info, ensure_ascii=False, indent=2) + "\n").encode()
        yield _SPLIT_NAME, _split_yaml(entries, split_name)
        yield _DATASET_NAME, _DATASET_YAML


def _split_yaml(entries: Sequence[ShardEntry], split_name: str) -> bytes:
    parts: dict[str, list[str]] = {_TRAIN: [], "val": [], "test": []}
    for split, found in _shards_by_split(entries, split_name).items():
        parts[_PARTS.get(split.lower(), _TRAIN)] += [one.name for one in found if one.num_samples]
    bad = next((one.name for one in entries if re.search(r"[{}\\]", one.name)), None)
    if bad is not None:
        raise FolderIndexError(f"{bad}: energon reads a name with {{, }} or \\ as a pattern.\n  Rename the shard.")
    lines = ["split_parts:"]
    for part, names in parts.items():
        lines.append(f"  {part}:" if names else f"  {part}: []")
        lines += [f"  - {json.dumps(name, ensure_ascii=False)}" for name in _collapse(names)]
    return ("\n".join([*lines, "exclude: []"]) + "\n").encode()


def _collapse(names: Sequence[str]) -> Iterator[str]:
    """Yield the names in order. Successive names with consecutive numbers become one pattern: `a-{00..07}.tar`."""

    def run_of(item: tuple[int, str]) -> object:
        position, name = item
        match = _NUMBERED.fullmatch(name)
        return (match[1], match[3], len(match[2]), int(match[2]) - position) if match else position

    for _, group in itertools.groupby(enumerate(names), run_of):
        run = [name for _, name in group]
        first, last = _NUMBERED.fullmatch(run[0]), _NUMBERED.fullmatch(run[-1])
        yield f"{first[1]}{{{first[2]}..{last[2]}}}{first[3]}" if first and last and len(run) > 1 else run[0]


def _shards_by_split(entries: Sequence[ShardEntry], split_name: str) -> dict[str, list[ShardEntry]]:
    """Return the shards of each split, in the order of the index. A `split_name` puts all shards in one split; if it is
    empty, the name of each shard gives its split.
    """
    splits: dict[str, list[ShardEntry]] = {}
    for one in entries:
        splits.setdefault(split_name or split_of(one.name), []).append(one)
    return splits


def split_of(name: str) -> str:
    """Return the split in a shard's name: the last word that is not a number, in lower case. If this word is not a
    known split, return `train`.

    `imagenet1k-validation-0003.tar` belongs to `validation`, `photos-000000.tar` to `train`.
    """
    words = _WORDS.split(name.removesuffix(".tar").lower())
    last = next((word for word in reversed(words) if not word.isdecimal()), "")
    return last if last in _PARTS else _TRAIN


def dali_index(shard: Path) -> bytes:
    """Return DALI's index of a shard: one line per sample with extension, offset, size and name of each field.

    The format has version 1.2. If the name of a member has a space, the format has version 1.1, which has no names:
    docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/dataloading_webdataset.html

    Raises:
        FolderIndexError: A field has white space in its name, which neither version allows.
        ShardError: The shard is damaged.
        StorageError: The shard cannot be opened or read.
    """
    samples: list[list[tuple[str, str]]] = []
    last, with_names = None, True
    with contextlib.closing(LocalFile(str(shard))) as file:
        for name, _, span in TarWalk(file.read_at, file.num_bytes, shard=str(shard)):
            with_names &= not _has_space(name)
            split = split_key(name)
            if split is None:
                continue
            extension = name[len(split[0]) + 1 :]  # `split[1]` is in lower case
            if _has_space(extension):
                msg = f"{shard}: DALI's index cannot hold the field {extension!r}, which has white space in its name."
                raise FolderIndexError(f"{msg}\n  Rename the field.", folder=str(shard.parent))
            if split[0] != last:
                samples.append([])
            samples[-1].append((f"{extension} {span.offset} {span.size}", name))
            last = split[0]
    words: Callable[[tuple[str, str]], str] = " ".join if with_names else lambda field: field[0]
    lines = [f"v1.{2 if with_names else 1} {len(samples)}", *(" ".join(map(words, fields)) for fields in samples)]
    return ("\n".join(lines) + "\n").encode()


def _has_space(name: str) -> bool:
    return any(map(str.isspace, name))
