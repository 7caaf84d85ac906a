"""The folder's index: what is known of its shards without opening them.

`index.json` is for people and other tools: a valid wids index whose entries also carry sha256 and field names, one
shard a line. `index.bin` is its binary twin for programs (`dataset.binary`). They are written together, the JSON last,
and the twin carries the JSON's digest, so that one can never be taken with another's twin.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.binary import BINARY_NAME, build_binary
from wdskit.errors import FolderIndexError, StorageError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.storage.urls import is_local, local_path, read_bytes

INDEX_NAME = "index.json"
INDEX_VERSION = 1
MAX_INDEX_BYTES = 4 << 30

_KIND = "wids-shard-index-v1"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ShardEntry:
    """One line of the index.

    Attributes:
        name: File name of the shard, in the index's folder.
        num_samples: Samples in it.
        num_bytes: Size of the file.
        sha256: Hex digest of the file.
        fields: Names of all fields that occur in it, sorted.
    """

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class FolderIndex:
    """The shards of a folder in the order of its index. `folder` is a path or a URL without a trailing slash."""

    folder: str
    entries: tuple[ShardEntry, ...]

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(entry.num_samples for entry in self.entries)

    @functools.cached_property
    def by_name(self) -> dict[str, ShardEntry]:
        """The entries by file name."""
        return {entry.name: entry for entry in self.entries}

    def url(self, entry: ShardEntry) -> str:
        """Path or URL of a shard."""
        return join_url(self.folder, entry.name)

    def check_files(self) -> None:
        """Compare the index with the folder's files: names and sizes. Digests are compared by `verify`.

        Raises:
            FolderIndexError: A shard is missing, is not listed, or has another size. Remote folders are not looked at.
        """
        if not is_local(self.folder):
            return
        folder = Path(local_path(self.folder) or ".")
        known = self.by_name
        names = fnmatch.filter((path.name for path in folder.iterdir()), "[!.]*.tar")
        found = {name: _size_of(folder / name) for name in names}
        for name in sorted(found.keys() - known.keys()):
            raise self._mismatch(f"{name} stands in the folder but not in the index")
        for name, entry in known.items():
            if found.get(name) is None:
                raise self._mismatch(f"{name} stands in the index but not in the folder")
            if found[name] != entry.num_bytes:
                raise self._mismatch(f"{name} has {found[name]} bytes, the index says {entry.num_bytes}")

    def _mismatch(self, problem: str) -> FolderIndexError:
        msg = f"{join_url(self.folder, INDEX_NAME)}: {problem}."
        msg += f"\n  If the shards are right, run `wdskit index {self.folder}`."
        return FolderIndexError(msg, folder=self.folder)


def _size_of(path: Path) -> int | None:
    """Size of a file in bytes, None where a link points nowhere."""
    return path.stat().st_size if path.exists() else None


def join_url(folder: str, name: str) -> str:
    """Path or URL of a file in a folder; the folder `""` is the current one."""
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"{folder}{name}"


def has_index(folder: str) -> bool:
    """Whether a local folder holds an index."""
    return (Path(local_path(folder) or ".") / INDEX_NAME).is_file()


def write_index(folder: Path, entries: Sequence[ShardEntry], *, disk: Disk = DISK) -> None:
    """Publish both forms of the index of `folder`, in the order of `entries`: the binary twin, then the JSON."""
    data = _to_json(entries)
    publish_bytes(folder / BINARY_NAME, build_binary(entries, hashlib.sha256(data).digest()), disk=disk)
    publish_bytes(folder / INDEX_NAME, data, disk=disk)


def _to_json(entries: Iterable[ShardEntry]) -> bytes:
    lines = ",\n".join(
        "    "
        + json.dumps(
            {
                "url": entry.name,
                "nsamples": entry.num_samples,
                "filesize": entry.num_bytes,
                "sha256": entry.sha256,
                "fields": list(entry.fields),
            },
            ensure_ascii=False,
        )
        for entry in entries
    )
    shards = f"[\n{lines}\n  ]" if lines else "[]"
    head = f'  "__kind__": "{_KIND}",\n  "wids_version": 1,\n  "wdskit_index_version": {INDEX_VERSION},\n'
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
        msg = f"{err}\n  {where} to make it."
        raise FolderIndexError(msg, folder=folder) from err
    except (ValueError, RecursionError) as err:
        msg = f"{url}: it is no JSON: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    try:
        entries = tuple(_parse(document))
    except (KeyError, TypeError, ValueError) as err:
        msg = f"{url}: it is no index of wdskit: {err}.\n  Run `wdskit index {folder or '.'}` to make it again."
        raise FolderIndexError(msg, folder=folder) from err
    return FolderIndex(folder, entries)


def _parse(document: Any) -> Iterable[ShardEntry]:
    if not isinstance(document, dict) or document.get("__kind__") != _KIND:
        msg = f"`__kind__` is not {_KIND!r}"
        raise ValueError(msg)
    version = document.get("wdskit_index_version")
    if version != INDEX_VERSION:
        msg = f"`wdskit_index_version` is {version!r}, this version reads {INDEX_VERSION}"
        raise ValueError(msg)
    seen = set()
    for number, item in enumerate(document["shardlist"]):
        if not _is_entry(item) or item["url"] in seen:
            msg = f"entry {number} of its shardlist is not valid: {item!r}"
            raise ValueError(msg)
        seen.add(item["url"])
        yield ShardEntry(item["url"], item["nsamples"], item["filesize"], item["sha256"], tuple(item["fields"]))


def _is_entry(item: Any) -> bool:
    """Whether an entry of the shardlist has all its parts, each of the right kind."""
    name, fields = item["url"], item["fields"]
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and all(type(item[part]) is int and item[part] >= 0 for part in ("nsamples", "filesize"))
        and isinstance(item["sha256"], str)
        and _DIGEST.fullmatch(item["sha256"]) is not None
        and isinstance(fields, list)
        and all(isinstance(field, str) for field in fields)
    )
