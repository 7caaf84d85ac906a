"""Read, write and check the index of a folder: name, number of samples, size, digests and fields of each shard.

`index.json` is for people and other tools: a valid wids index, one shard per line, whose entries also have digests and
field names. `index.bin` has the same values except the field names, in binary form (`dataset.binary_index`).
`write_index` writes both files, `index.json` last. `index.bin` also has the digest of its `index.json`, and is used
only with this `index.json`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from wdskit.dataset.binary_index import BINARY_NAME, ShardEntry, build_binary, read_identities, write_identities
from wdskit.errors import FolderIndexError, StorageError
from wdskit.files import DISK, Disk, is_file_name, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.file_identity import FileIdentity
from wdskit.storage.urls import ABSENT_STATUSES, is_local, local_path, read_bytes

INDEX_NAME = "index.json"
RUN_FOLDER = ".wdskit-run"  # has the staging folders of unfinished runs (packing.publish)
INDEX_VERSION = 1

_KIND = "wids-shard-index-v1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape a surrogate, but UTF-8 cannot encode it
_SHORT = reprlib.Repr()  # to keep messages short
_SHORT.maxstring = _SHORT.maxother = 200


@dataclass(frozen=True)
class FolderIndex:
    """The shards of a folder in the order of its index.

    Attributes:
        folder: Path or URL; `""` is the current folder.
        entries: The shards.
        sha256: Hex digest of `index.json`; empty if the index was not read from a file.
    """

    folder: str
    entries: tuple[ShardEntry, ...]
    sha256: str = field(default="", compare=False)

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(entry.num_samples for entry in self.entries)

    @functools.cached_property
    def by_name(self) -> dict[str, ShardEntry]:
        """The entry of each shard by file name, in the order of the index."""
        return {entry.name: entry for entry in self.entries}

    def url(self, entry: ShardEntry) -> str:
        """Return the path or URL of a shard. In a URL, the name is percent-encoded."""
        return join_url(self.folder, entry.name if is_local(self.folder) else quote(entry.name))

    def check_files(self) -> None:
        """Compare the names and sizes of the shards in a local folder with the index. Do nothing for a remote folder.

        Raises:
            FolderIndexError: A shard is missing, is not listed, or has another size, or the folder cannot be read.
        """
        if not is_local(self.folder):
            return
        folder = Path(local_path(self.folder) or ".")
        try:
            found = {
                path.name: path.stat().st_size for path in folder.iterdir() if path.suffix == ".tar" and path.exists()
            }
        except OSError as err:
            msg = f"{err.filename}: cannot be compared with the folder's index: {err.strerror}."
            raise FolderIndexError(msg, folder=self.folder) from err
        missing, unlisted = compare_names(found, self.by_name)
        if unlisted:
            raise self._mismatch(f"{unlisted[0]} is in the folder but not in the index")
        if missing:
            raise self._mismatch(f"{missing[0]} is in the index but not in the folder")
        for name, entry in self.by_name.items():
            if found[name] != entry.num_bytes:
                raise self._mismatch(f"{name} has {found[name]} bytes, the index says {entry.num_bytes}")

    def _mismatch(self, problem: str) -> FolderIndexError:
        msg = f"{join_url(self.folder, INDEX_NAME)}: {problem}."
        msg += f"\n  If the shards are right, run `wdskit index {self.folder or '.'}`."
        return FolderIndexError(msg, folder=self.folder)


def compare_names(found: Collection[str], listed: Collection[str]) -> tuple[list[str], list[str]]:
    """Compare `found`, the names of the files in a folder, with `listed`, the names of the shards in its index.

    Returns:
        (missing, unlisted), both sorted: shards of `listed` that are not in `found`, and shards of `found` that are not
        in `listed`. A file is a shard if its name ends in `.tar` and does not start with a dot.
    """
    unlisted = sorted(name for name in found if name.endswith(".tar") and name[0] != "." and name not in listed)
    return sorted(name for name in listed if name not in found), unlisted


def join_url(folder: str, name: str) -> str:
    """Return the path or URL of the file `name` in a folder; `""` is the current folder. There, `a:b` becomes `./a:b`,
    because `a:b` would be a URL.
    """
    if not folder.strip("/"):
        return f"{folder or './'}{name}" if ":" in name else f"{folder}{name}"
    return f"{folder.rstrip('/')}/{name}"


def has_index(folder: str) -> bool:
    """Return whether a local folder has an `index.json`. Raises StorageError if the folder cannot be read."""
    path = Path(local_path(folder) or ".") / INDEX_NAME
    try:
        return path.is_file()
    except OSError as err:
        raise StorageError(f"{path}: cannot be read: {err.strerror}.", url=folder) from err


def is_label(field: str) -> bool:
    """Return True if a field of this name has the number of a class: the name is `cls` or ends in `.cls`."""
    return field.rpartition(".")[2] == "cls"


def folder_has_labels(folder: str) -> bool:
    """Return whether any shard of a folder has a field `cls` or `*.cls`, according to the folder's index. The folder is
    a path or a URL. Raises FolderIndexError and StorageError as `read_index` does.
    """
    return any(is_label(field) for entry in read_index(folder).entries for field in entry.fields)


def write_index(folder: Path, entries: Sequence[ShardEntry], *, data: bytes | None = None, disk: Disk = DISK) -> None:
    """Write the index of a local folder: `index.bin`, then `.wdskit.files` (see `write_identities`), then
    `index.json`.

    Args:
        folder: The folder of the shards.
        entries: One entry per shard, in the order of the index.
        data: The result of `index_json(entries)`; None computes it.
        disk: Performs the file operations; tests replace it.

    Raises:
        OSError: An operation of `disk` fails.
    """
    data = index_json(entries) if data is None else data
    publish_bytes(folder / BINARY_NAME, build_binary(entries, hashlib.sha256(data).digest()), disk=disk)
    write_identities(folder / BINARY_NAME, entries, disk=disk)
    publish_bytes(folder / INDEX_NAME, data, disk=disk)


def index_json(entries: Iterable[ShardEntry]) -> bytes:
    """Return the bytes of an `index.json` with these entries, in their order."""
    dumps = json.JSONEncoder(ensure_ascii=False).encode
    fields_json = functools.cache(lambda fields: dumps([*fields]))  # most shards have the same fields
    lines = ",\n".join(
        f'    {{"url": {dumps(entry.name)}, "nsamples": {entry.num_samples}, "filesize": {entry.num_bytes}, '
        f'"sha256": "{entry.sha256}", '
        + (f'"idx_sha256": "{entry.idx_sha256}", ' if entry.idx_sha256 else "")
        + f'"fields": {fields_json(entry.fields)}}}'
        for entry in entries
    )
    shards = f"[\n{lines}\n  ]" if lines else "[]"
    head = f'  "__kind__": "{_KIND}",\n  "wids_version": 1,\n  "wdskit_index_version": {INDEX_VERSION},\n'
    return f'{{\n{head}  "shardlist": {shards}\n}}\n'.encode()


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collection_paused()
def read_index(folder: str | Path) -> FolderIndex:
    """Return the index in the `index.json` of a local or remote folder.

    Raises:
        FolderIndexError: `index.json` is missing, unreadable or invalid.
        StorageError: The URL of the folder is invalid, or its scheme is not supported.
    """
    folder = str(folder)
    url = join_url(folder, INDEX_NAME)
    try:
        data = read_bytes(url, limit=MAX_INDEX_BYTES)
        document = orjson.loads(data)
    except StorageError as err:
        if not is_local(folder) and err.status not in ABSENT_STATUSES:  # the index may exist
            raise FolderIndexError(str(err), folder=folder) from err
        where = f"Run `wdskit index {folder or '.'}`" if is_local(folder) else "Run `wdskit index` where the shards are"
        raise FolderIndexError(f"{err}\n  {where} to make it.", folder=folder) from err
    except ValueError as err:
        msg = f"{url}: it is not JSON: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    path = Path(local_path(folder)) / BINARY_NAME if is_local(folder) else None
    try:
        entries = _parse_entries(document, path)
    except ValueError as err:
        msg = f"{url}: it is not an index of wdskit: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    return FolderIndex(folder, tuple(entries), hashlib.sha256(data).hexdigest())


def _parse_entries(document: Any, path: Path | None) -> list[ShardEntry]:
    """Return the entries of `document`, a parsed `index.json`. Raises ValueError if `document` is not a valid index.

    `path` is the path of `index.bin`, from which `read_identities` finds the identities of the shards. An unknown inode
    or mtime is 0. If `path` is None (a remote folder), `identity` is None.
    """
    if not isinstance(document, dict) or document.get("__kind__") != _KIND:
        raise ValueError(f"`__kind__` is not {_KIND!r}")
    version = document.get("wdskit_index_version")
    if type(version) is int and version > INDEX_VERSION:
        msg = f"a newer wdskit wrote it, in version {_SHORT.repr(version)}; this one reads {INDEX_VERSION}. Upgrade it"
        raise ValueError(msg)
    if version != INDEX_VERSION:
        raise ValueError(f"`wdskit_index_version` is {_SHORT.repr(version)}, but this wdskit reads {INDEX_VERSION}")
    shards = document.get("shardlist")
    if not isinstance(shards, list):
        raise ValueError(f"`shardlist` is {_SHORT.repr(shards)}, not a list")  # noqa: TRY004 (the file is invalid)
    known = None if path is None else read_identities(path, len(shards))
    files = [(0, 0)] * len(shards) if known is None else known.tolist()
    entries: dict[str, ShardEntry] = {}
    for number, (item, (inode, mtime_ns)) in enumerate(zip(shards, files, strict=True)):
        problem = entry_problem(item)
        if not problem and item["url"] in entries:
            problem = f"{_SHORT.repr(item['url'])} appears twice"
        if problem:
            raise ValueError(f"entry {number} of its shardlist: {problem}")
        entries[item["url"]] = ShardEntry(
            name=item["url"],
            num_samples=item["nsamples"],
            num_bytes=item["filesize"],
            sha256=item["sha256"],
            fields=tuple(item["fields"]),
            idx_sha256=item.get("idx_sha256"),
            identity=None if path is None else FileIdentity(item["filesize"], mtime_ns, inode),
        )
    return list(entries.values())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # bool is a subclass of int


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _are_fields(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(field, str) and not _SURROGATE.search(field) for field in value)


_RULES = {
    "url": is_file_name, "nsamples": _is_count, "filesize": _is_count, "sha256": _is_digest, "fields": _are_fields
}  # fmt: skip


def entry_problem(item: Any) -> str:
    """Return why an entry in the `shardlist` of an `index.json` is invalid, for a message; "" if the entry is valid."""
    if not isinstance(item, dict):
        return f"{_SHORT.repr(item)} is not a shard"
    for part, is_right in _RULES.items():
        if part not in item:
            return f"it has no `{part}`"
        if not is_right(item[part]):
            hint = ", not the name of a file in this folder" if part == "url" else ""
            return f"`{part}` is {_SHORT.repr(item[part])}{hint}"
    if "idx_sha256" in item and not _is_digest(item["idx_sha256"]):
        return f"`idx_sha256` is {_SHORT.repr(item['idx_sha256'])}"
    return ""
