"""Read and write the index of a folder: name, number of samples, size, digests and fields of each shard.

`index.json` is the only truth about a folder: a file that it does not list is not part of the data. It is a valid wids
index with one shard per line. `read_index` reads it into arrays, `write_index` publishes it.

A run of `wdskit pack` works in the sub-folder `.wdskit` and publishes `index.json` last. `.wdskit/commit.json` exists
from the moment when the run begins to move its shards into place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.errors import FolderIndexError, StorageError
from wdskit.files import DISK, Disk, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.urls import ABSENT_STATUSES, is_local, local_path, read_bytes

INDEX_NAME = "index.json"
RUN_FOLDER = ".wdskit"
COMMIT_NAME = "commit.json"
INDEX_VERSION = 1

_KIND = "wids-shard-index-v1"
_SHORT = reprlib.Repr()  # to keep messages short
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxdict = 9
_NO_ENTRY = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index of its folder.

    Attributes:
        name: File name of the shard.
        num_samples: Number of samples.
        num_bytes: Size of the file in bytes.
        sha256: Hex digest of the file.
        fields: Names of all fields of the samples, sorted.
        idx_sha256: Hex digest of the shard's `.idx`.
    """

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    fields: tuple[str, ...]
    idx_sha256: str


class Index:
    """The shards of a folder in the order of its index, as arrays. The shards are numbered from 0.

    A pickle has all values, so unpickling does not read the index again. 10^5 shards take 15 MB.

    Args:
        folder: Path or URL of the folder; `""` is the current folder.
        shards: The `shardlist` of an `index.json`.
        copy: Local folder with the `index.json` and the columns of a remote folder.
        sha256: Hex digest of the `index.json`; empty if the index was not read from a file.

    Attributes:
        local: Local folder with `index.json` and the columns: `copy`, or `folder`.
        names: File name of each shard.
        counts: Number of samples of each shard, int64 (num_shards,).
        sizes: Bytes of each shard, int64 (num_shards,).
        digests: sha256 of each shard, uint8 (num_shards, 32).
        digest: 32 bytes that identify the shards: sha256 of all counts, sizes, digests and names.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: A shard of `shards` is not valid, or two shards
            have the same name.
    """

    def __init__(
        self, folder: str, shards: Sequence[Mapping[str, Any]], *, copy: Path | None = None, sha256: str = ""
    ) -> None:
        self.is_remote = not is_local(folder)
        self.folder = folder if self.is_remote else local_path(folder)
        self.local = copy or Path(self.folder)
        self.sha256 = sha256
        self.names: tuple[str, ...] = tuple([shard["url"] for shard in shards])
        text, distinct = "".join(self.names), {*self.names}
        if not text.isprintable() or "/" in text or distinct & {"", ".", ".."}:
            raise ValueError("its name is not that of a file in this folder")
        if len(distinct) < len(shards):
            raise ValueError(f"{Counter(self.names).most_common(1)[0][0]!r} appears twice")
        self.counts = _numbers([shard["nsamples"] for shard in shards])
        self.sizes = _numbers([shard["filesize"] for shard in shards])
        self.digests = _digests([shard["sha256"] for shard in shards])
        self._idx_digests = _digests([shard["idx_sha256"] for shard in shards])
        known: dict[tuple[str, ...], int] = {}
        self._field_codes = [known.setdefault(tuple(shard["fields"]), len(known)) for shard in shards]
        self._field_sets = [*known]
        are_names = all(isinstance(name, str) for names in known for name in names)
        if not are_names or not all(isinstance(shard["fields"], list) for shard in shards):
            raise TypeError("its fields are not a list of names")
        encoded = [name.encode() for name in self.names]
        ends = np.cumsum([*map(len, encoded)], dtype="<u8")
        columns = self.counts.astype("<u8"), self.sizes.astype("<u8"), self.digests, ends
        self.digest = hashlib.sha256(b"".join([*(column.tobytes() for column in columns), *encoded])).digest()

    @classmethod
    def of(cls, folder: str, entries: Iterable[ShardEntry]) -> Index:
        """Return the index of a folder with these entries."""
        return cls(folder, [_to_json(entry) for entry in entries])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in {"by_name", "entries"}}

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.names)

    @property
    def place(self) -> str:
        """Path or URL of the folder, for messages and commands: `.` for the current folder."""
        return self.folder if self.is_remote else str(self.local)

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        return sum(self.counts.tolist())  # numpy's sum may overflow

    @functools.cached_property
    def by_name(self) -> dict[str, int]:
        """The number of each shard by its file name, in the order of the index."""
        return {name: number for number, name in enumerate(self.names)}

    @functools.cached_property
    def entries(self) -> tuple[ShardEntry, ...]:
        """The entries of all shards."""
        return tuple(map(self.entry, range(len(self))))

    def entry(self, shard: int) -> ShardEntry:
        """Return the entry of shard number `shard`."""
        return ShardEntry(
            name=self.names[shard],
            num_samples=int(self.counts[shard]),
            num_bytes=int(self.sizes[shard]),
            sha256=self.digests[shard].tobytes().hex(),
            fields=self.fields(shard),
            idx_sha256=self._idx_digests[shard].tobytes().hex(),
        )

    def fields(self, shard: int) -> tuple[str, ...]:
        """Return the names of all fields of the samples of shard number `shard`, sorted."""
        return self._field_sets[self._field_codes[shard]]

    def url(self, shard: int) -> str:
        """Return the path or URL of shard number `shard`. In a URL, the name is percent-encoded."""
        return join_url(self.folder, quote(self.names[shard]) if self.is_remote else self.names[shard])


def _numbers(values: list[int]) -> NDArray[np.int64]:
    if {*map(type, values)} - {int}:  # bool is a subclass of int
        raise TypeError("its count or size is not an integer")
    array = np.array(values, dtype=np.int64)
    if (array < 0).any():
        raise ValueError("its count or size is negative")
    return array


def _digests(values: list[str]) -> NDArray[np.uint8]:
    text = "".join(values)
    data = bytes.fromhex(text)
    if {*map(len, values)} - {64} or data.hex() != text:  # upper case, or spaces
        raise ValueError("its digest does not have 64 hexadecimal digits")
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, 32)


def join_url(folder: str, name: str) -> str:
    """Return the path or URL of the file `name` in a folder; `""` is the current folder."""
    return f"{folder.rstrip('/')}/{name}" if folder.strip("/") else f"{folder}{name}"


def has_index(folder: str | Path) -> bool:
    """Return whether a local folder has an `index.json` that may be read."""
    return os.path.isfile(os.path.join(local_path(str(folder)), INDEX_NAME))  # noqa: PTH113, PTH118 (no error)


def has_run(folder: str | Path) -> bool:
    """Return whether a local folder has the sub-folder of a run of `wdskit pack` that is active or was stopped."""
    path = os.path.join(folder, RUN_FOLDER)  # noqa: PTH118 (no error)
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def unfinished(folder: str | Path) -> FolderIndexError:
    """Return the error for a local folder in which a run of `wdskit pack` is unfinished."""
    msg = f"{folder or '.'}: a run of `wdskit pack` here is unfinished.\n  Run the same command again: it continues."
    return FolderIndexError(msg, folder=str(folder))


def refuse_commit(folder: Path) -> None:
    """Raise FolderIndexError if a run of `wdskit pack` was stopped in a local folder while it moved its shards into
    place. The same command, run again, would replace the index by its own.
    """
    if (folder / RUN_FOLDER / COMMIT_NAME).exists():
        raise unfinished(folder)


def write_index(folder: Path, entries: Iterable[ShardEntry], *, disk: Disk = DISK) -> None:
    """Publish the `index.json` of a local folder.

    Args:
        folder: The folder of the shards.
        entries: One entry per shard, in the order of the index.
        disk: Performs the file operations; tests replace it.

    Raises:
        OSError: An operation of `disk` fails.
    """
    publish_bytes(folder / INDEX_NAME, index_json(entries), disk=disk)


def index_json(entries: Iterable[ShardEntry]) -> bytes:
    """Return the bytes of an `index.json` with these entries, in their order."""
    dumps = json.JSONEncoder(ensure_ascii=False).encode
    lines = ",\n".join([f"    {dumps(_to_json(entry))}" for entry in entries])
    shards = f"[\n{lines}\n  ]" if lines else "[]"
    start = f'  "__kind__": "{_KIND}",\n  "wids_version": 1,\n  "wdskit_index_version": {INDEX_VERSION},\n'
    return f'{{\n{start}  "shardlist": {shards}\n}}\n'.encode()


def _to_json(entry: ShardEntry) -> dict[str, Any]:
    """Return the entry of a shard as it is in the `shardlist` of an `index.json`."""
    numbers = {"nsamples": entry.num_samples, "filesize": entry.num_bytes}
    digests = {"sha256": entry.sha256, "idx_sha256": entry.idx_sha256}
    return {"url": entry.name, **numbers, **digests, "fields": [*entry.fields]}


def read_index(folder: str | Path, *, copy: Path | None = None) -> Index:
    """Read the `index.json` of a local or remote folder. 10^5 shards take 0.45 s.

    Args:
        folder: Path or URL of the folder.
        copy: Local folder with the copy of a remote index to read; None reads the index of `folder`.

    Raises:
        FolderIndexError: `index.json` is missing or invalid, or a local file is unreadable. Or a local folder has no
            index because a run of `wdskit pack` is unfinished.
        StorageError: The URL of the folder is invalid, its scheme is not supported, or the store cannot be read.
    """
    folder = str(folder)
    url, is_here = join_url(folder, INDEX_NAME), is_local(folder)
    try:
        data = read_bytes(url if copy is None else str(copy / INDEX_NAME), limit=MAX_INDEX_BYTES)
    except StorageError as err:
        if is_here and not has_index(folder) and has_run(folder):
            raise unfinished(folder) from err
        if not is_here and err.status not in ABSENT_STATUSES:  # the index may exist
            raise
        way = "Move it away, and run" if os.path.lexists(local_path(url)) else "Run"
        how = f"{way} `wdskit index {folder or '.'}` to make it" if is_here else "If none is there, run `wdskit index`"
        raise FolderIndexError(f"{err}\n  {how}.", folder=folder) from err
    try:
        return _parse(folder, orjson.loads(data), copy, hashlib.sha256(data).hexdigest())
    except ValueError as err:
        msg = f"{url}: it is not an index of wdskit: {err}.\n  Move it away, and run `wdskit index {folder or '.'}`."
        raise FolderIndexError(msg, folder=folder) from err


def _parse(folder: str, document: Any, copy: Path | None, sha256: str) -> Index:
    """Return the index in `document`, a parsed `index.json`. Raises ValueError if `document` is not a valid index. For
    the other arguments, see `Index`.
    """
    if not isinstance(document, dict) or document.get("__kind__") != _KIND or document.get("wids_version") != 1:
        raise ValueError(f"`__kind__` is not {_KIND!r}, or `wids_version` is not 1")
    version = document.get("wdskit_index_version")
    if version != INDEX_VERSION:
        raise ValueError(f"`wdskit_index_version` is {_SHORT.repr(version)}, but this wdskit reads {INDEX_VERSION}")
    shards = document.get("shardlist")
    if not isinstance(shards, list):
        raise ValueError(f"`shardlist` is {_SHORT.repr(shards)}, not a list")  # noqa: TRY004 (the file is invalid)
    try:
        return Index(folder, shards, copy=copy, sha256=sha256)
    except _NO_ENTRY as err:
        for number, item in enumerate(shards):  # find the first invalid entry: the arrays are checked as a whole
            try:
                Index(folder, [item])
            except _NO_ENTRY as one:
                what = f"{type(one).__name__}: {one}"
                raise ValueError(f"entry {number} of its shardlist is {_SHORT.repr(item)}: {what}") from one
        raise ValueError(f"its shardlist: {err}") from err
