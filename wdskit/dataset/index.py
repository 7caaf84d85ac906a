"""The folder's index: what is known of its shards without opening them.

`index.json` is for people and other tools: a valid wids index whose entries also carry sha256 and field names, one
shard a line. `index.bin` is its binary twin for programs (`dataset.binary`). They are written together, the JSON last,
and the twin carries the JSON's digest, so that one can never be taken with another's twin.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from wdskit.dataset.binary import BINARY_NAME, UNKNOWN, Identity, build_binary, read_identities, write_identities
from wdskit.errors import FolderIndexError, StorageError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.urls import is_local, local_path, read_bytes

INDEX_NAME = "index.json"
RUN_FOLDER = ".wdskit-run"  # where a run that has not finished keeps its shards: packing.staging
INDEX_VERSION = 1
SIZES_NAME = "sizes.json"
INFO_NAMES = ("_info.json", "info.json")

_KIND = "wids-shard-index-v1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # which JSON can escape and UTF-8 cannot hold
_SHORT = reprlib.Repr()  # a message is no place for a megabyte
_SHORT.maxstring = _SHORT.maxother = 200
_PARTS = {"url": str, "nsamples": int, "filesize": int, "sha256": str, "fields": list}


@dataclass(frozen=True)
class ShardEntry:
    """One line of the index.

    Attributes:
        name: File name of the shard, in the index's folder.
        num_samples: Samples in it.
        num_bytes: Size of the file.
        sha256: Hex digest of the file.
        fields: Names of all fields that occur in it, sorted.
        idx_sha256: Hex digest of its `.idx`, None in an index that was made before it was written there.
        identity: Inode and mtime_ns of the file that the index was made of, zeros where they are not known; None for
            the file that is there when the index is written. It stands beside the index, not in it.
    """

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    fields: tuple[str, ...]
    idx_sha256: str | None = None
    identity: Identity | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Exports:
    """What is kept beside the shards for other readers.

    Attributes:
        kinds: `dali`, `timm`, ...; see `export.api.KINDS`.
        split_name: The split that all shards belong to, "" where their names say it.
    """

    kinds: tuple[str, ...] = ()
    split_name: str = ""


NO_EXPORTS = Exports()
"""Beside the shards is what wdskit needs, and no more."""


@dataclass(frozen=True)
class FolderIndex:
    """The shards of a folder in the order of its index. `folder` is a path or a URL without a trailing slash."""

    folder: str
    entries: tuple[ShardEntry, ...]
    exports: Exports = NO_EXPORTS

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(entry.num_samples for entry in self.entries)

    @functools.cached_property
    def by_name(self) -> dict[str, ShardEntry]:
        """The entries by file name."""
        return {entry.name: entry for entry in self.entries}

    def url(self, entry: ShardEntry) -> str:
        """Path or URL of a shard; in a URL its name is quoted."""
        return join_url(self.folder, entry.name if is_local(self.folder) else quote(entry.name))

    def check_files(self) -> None:
        """Compare the index with the folder's files: names and sizes. Digests are compared by `verify`.

        Raises:
            FolderIndexError: A shard is missing, is not listed, or has another size. Remote folders are not looked at.
        """
        if not is_local(self.folder):
            return
        folder = Path(local_path(self.folder) or ".")
        try:
            paths = [path for path in folder.iterdir() if fnmatch.fnmatch(path.name, "[!.]*.tar")]
            found = {path.name: path.stat().st_size if path.exists() else None for path in paths}  # of no dead link
        except OSError as err:
            msg = f"{err.filename}: cannot be compared with the folder's index: {err.strerror}."
            raise FolderIndexError(msg, folder=self.folder) from err
        for name in sorted(found.keys() - self.by_name.keys()):
            raise self._mismatch(f"{name} stands in the folder but not in the index")
        for name, entry in self.by_name.items():
            if found.get(name) is None:
                raise self._mismatch(f"{name} stands in the index but not in the folder")
            if found[name] != entry.num_bytes:
                raise self._mismatch(f"{name} has {found[name]} bytes, the index says {entry.num_bytes}")

    def _mismatch(self, problem: str) -> FolderIndexError:
        msg = f"{join_url(self.folder, INDEX_NAME)}: {problem}."
        msg += f"\n  If the shards are right, run `wdskit index {self.folder}`."
        return FolderIndexError(msg, folder=self.folder)


def join_url(folder: str, name: str) -> str:
    """Path or URL of a file in a folder; the folder `""` is the current one, where `a:b` would read as a URL."""
    if not folder.strip("/"):
        return f"{folder or './'}{name}" if ":" in name else f"{folder}{name}"
    return f"{folder.rstrip('/')}/{name}"


def has_index(folder: str) -> bool:
    """Whether a local folder holds an index."""
    return (Path(local_path(folder) or ".") / INDEX_NAME).is_file()


def is_label(field: str) -> bool:
    """Whether a field holds the number of a class, by its name."""
    return field.rpartition(".")[2] == "cls"


def folder_has_labels(folder: str) -> bool:
    """Whether samples of an indexed folder have the field `cls`.

    Raises:
        FolderIndexError, StorageError: As `read_index`.
    """
    return any(is_label(field) for entry in read_index(folder).entries for field in entry.fields)


def write_index(
    folder: Path, entries: Sequence[ShardEntry], *, exports: Exports = NO_EXPORTS, disk: Disk = DISK
) -> None:
    """Publish both forms of the index of `folder`, in the order of `entries`: the binary twin, which files the
    shards are, then the JSON.
    """
    data = index_json(entries, exports)
    publish_bytes(folder / BINARY_NAME, build_binary(entries, hashlib.sha256(data).digest()), disk=disk)
    write_identities(folder / BINARY_NAME, [(entry.name, entry.identity) for entry in entries], disk=disk)
    publish_bytes(folder / INDEX_NAME, data, disk=disk)


def index_json(entries: Iterable[ShardEntry], exports: Exports) -> bytes:
    """The bytes of `index.json`."""
    lines = ",\n".join(
        "    "
        + json.dumps(
            {
                "url": entry.name,
                "nsamples": entry.num_samples,
                "filesize": entry.num_bytes,
                "sha256": entry.sha256,
                **({"idx_sha256": entry.idx_sha256} if entry.idx_sha256 else {}),
                "fields": list(entry.fields),
            },
            ensure_ascii=False,
        )
        for entry in entries
    )
    shards = f"[\n{lines}\n  ]" if lines else "[]"
    head = f'  "__kind__": "{_KIND}",\n  "wids_version": 1,\n  "wdskit_index_version": {INDEX_VERSION},\n'
    if exports.kinds:
        split = {"split_name": exports.split_name} if exports.split_name else {}
        head += f'  "export": {json.dumps({"kinds": exports.kinds, **split}, ensure_ascii=False)},\n'
    return f'{{\n{head}  "shardlist": {shards}\n}}\n'.encode()


def read_index(folder: str | Path) -> FolderIndex:
    """Read a folder's `index.json`; the folder may be an http(s) URL.

    Raises:
        FolderIndexError: There is none, or it is not one that wdskit wrote.
    """
    folder = str(folder)
    url = join_url(folder, INDEX_NAME)
    try:
        data = read_bytes(url, limit=MAX_INDEX_BYTES)
        document = json.loads(data)
    except StorageError as err:
        where = f"Run `wdskit index {folder or '.'}`" if is_local(folder) else "Run `wdskit index` where the shards are"
        raise FolderIndexError(f"{err}\n  {where} to make it.", folder=folder) from err
    except (ValueError, RecursionError) as err:
        msg = f"{url}: it is no JSON: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    try:
        entries = tuple(_parse(document))
        exports = _parse_exports(document.get("export", document.get("also", {})))
    except ValueError as err:
        msg = f"{url}: it is no index of wdskit: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    if is_local(folder):
        identities = read_identities(Path(local_path(folder)) / BINARY_NAME, len(entries))
        known = itertools.repeat(UNKNOWN) if identities is None else map(tuple, identities.tolist())
        entries = tuple(replace(entry, identity=identity) for entry, identity in zip(entries, known, strict=False))
    return FolderIndex(folder, entries, exports)


def _parse_exports(value: Any) -> Exports:
    kinds, split_name = (value.get("kinds", []), value.get("split_name", "")) if isinstance(value, dict) else (None, "")
    texts = [*kinds, split_name] if isinstance(kinds, list) else [None]
    if kinds is None or not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise ValueError(f"`export` is {_SHORT.repr(value)}")
    return Exports(tuple(kinds), split_name)


def _parse(document: Any) -> Iterable[ShardEntry]:
    if not isinstance(document, dict) or document.get("__kind__") != _KIND:
        raise ValueError(f"`__kind__` is not {_KIND!r}")
    version = document.get("wdskit_index_version")
    if type(version) is int and version > INDEX_VERSION:
        msg = f"a newer wdskit wrote it, in version {_SHORT.repr(version)}; this one reads {INDEX_VERSION}. Upgrade it"
        raise ValueError(msg)
    if version != INDEX_VERSION:
        raise ValueError(f"`wdskit_index_version` is {_SHORT.repr(version)}, this version reads {INDEX_VERSION}")
    shards = document.get("shardlist")
    if not isinstance(shards, list):
        raise ValueError(f"`shardlist` is {_SHORT.repr(shards)}, not a list")  # noqa: TRY004 (what is wrong is the file)
    seen: set[str] = set()
    for number, item in enumerate(shards):
        problem = _entry_problem(item, seen)
        if problem:
            raise ValueError(f"entry {number} of its shardlist: {problem}")
        seen.add(item["url"])
        numbers = item["nsamples"], item["filesize"]
        yield ShardEntry(item["url"], *numbers, item["sha256"], tuple(item["fields"]), item.get("idx_sha256"))


def _entry_problem(item: Any, seen: set[str]) -> str | None:
    """What is wrong with an entry of the shardlist; `seen` are the names before it."""
    if not isinstance(item, dict):
        return f"{_SHORT.repr(item)} is no shard"
    for part, kind in _PARTS.items():
        if part not in item:
            return f"it has no `{part}`"
        if type(item[part]) is not kind:  # a bool is no count
            return f"`{part}` is {_SHORT.repr(item[part])}"
    name = item["url"]
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        return f"`url` is {_SHORT.repr(name)}, not the name of a file in this folder"
    if name in seen:
        return f"{_SHORT.repr(name)} stands there twice"
    for part in ("nsamples", "filesize"):
        if not 0 <= item[part] < 1 << 63:
            return f"`{part}` is {_SHORT.repr(item[part])}"
    for part in ("sha256", "idx_sha256"):
        digest = item.get(part, "0" * 64)
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            return f"`{part}` is {_SHORT.repr(digest)}"
    if not all(isinstance(field, str) and not _SURROGATE.search(field) for field in item["fields"]):
        return f"`fields` is {_SHORT.repr(item['fields'])}"
    return None


def read_other_counts(folder: str) -> dict[str, dict[str, int] | None]:
    """The counts that other programs keep beside shards: open_clip's `sizes.json` and timm's `_info.json`.

    Args:
        folder: Path or http(s) URL of the folder that holds them.

    Returns:
        For each file that is there, by its usual name, the samples of each shard by its path below the folder, in the
        order of the file; None where the file is not what its program reads, or its numbers contradict each other.
    """
    found: dict[str, dict[str, int] | None] = {}
    for names, parse in (((SIZES_NAME,), _parse_sizes), (INFO_NAMES, _parse_timm_info)):
        for name in names:
            try:
                data = read_bytes(join_url(folder, name), limit=MAX_INDEX_BYTES)
            except StorageError:
                continue  # it is not there
            try:
                document = json.loads(data, object_pairs_hook=_unique)
                found[names[0]] = dict(parse(document))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                found[names[0]] = None
            break
    return found


def _parse_sizes(document: Any) -> Iterator[tuple[str, int]]:
    for name, count in document.items():
        is_text = isinstance(count, str) and count.isascii() and count.isdecimal() and len(count) < 19
        yield _checked_count(name, int(count) if is_text else count, is_nested=False)  # open_clip calls int()


def _parse_timm_info(document: Any) -> Iterator[tuple[str, int]]:
    for name, split in document["splits"].items():
        filenames, lengths = split["filenames"], split["shard_lengths"]
        if not isinstance(filenames, list) or not isinstance(lengths, list) or split.get("name", name) != name:
            raise ValueError("no split")
        counts = _unique([_checked_count(*pair, is_nested=True) for pair in zip(filenames, lengths, strict=True)])
        if type(split["num_samples"]) is not int or split["num_samples"] != sum(counts.values()):
            raise ValueError("its shards have another number of samples in all")
        if not isinstance(split.get("alt_label", ""), str):
            raise TypeError("its label is no field")
        yield from counts.items()


def _checked_count(path: Any, count: Any, *, is_nested: bool) -> tuple[str, int]:
    parts = path.split("/")
    if not path.isprintable() or any(part in ("", ".", "..") for part in parts) or (len(parts) > 1 and not is_nested):
        raise ValueError("no path below the folder")
    if type(count) is not int or not 0 <= count < 1 << 63:
        raise ValueError("no count")
    return path, count


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object; the last of two with one name would win without a word."""
    several = list(pairs)
    found = dict(several)
    if len(found) < len(several):
        raise ValueError("a name stands there twice")
    return found
