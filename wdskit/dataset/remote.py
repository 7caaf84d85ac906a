"""Folders of shards in a store: their index, kept in a local copy, and their samples, read by ranges.

What a planned source needs before it reads a sample (`index.json`, `index.bin`, a selection) is copied to
`$XDG_CACHE_HOME/wdskit/folders`, once for each version of it, told by ETags. All processes of a machine share the copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from wdskit.dataset.binary import BINARY_NAME
from wdskit.dataset.index import INDEX_NAME, ShardEntry, join_url
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.shard import IDX_SUFFIX, IndexedShard, parse_offsets
from wdskit.errors import FolderIndexError, SelectionError, StorageError
from wdskit.files import make_folders, publish_bytes
from wdskit.limits import BLOCK_BYTES, MAX_INDEX_BYTES

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

T = TypeVar("T")


def read_copy(url: str, names: Sequence[str], read: Callable[[Path], T]) -> T:
    """What `read` makes of a folder that holds copies of a remote folder's files, as these are now.

    Args:
        url: Of the remote folder.
        names: Of files in it, beside the two of the index.
        read: Called with the local folder; once more where it finds the copies damaged.

    Raises:
        FolderIndexError: The folder has no index.
        StorageError: A file cannot be read, or the copies cannot be written.
    """
    folder = _copy(url, (INDEX_NAME, BINARY_NAME, *names))
    try:
        return read(folder)
    except FolderIndexError:
        for name in (INDEX_NAME, BINARY_NAME, *names):
            (folder / name).unlink(missing_ok=True)
        return read(_copy(url, (INDEX_NAME, BINARY_NAME, *names)))


def _copy(url: str, names: Sequence[str]) -> Path:
    from wdskit.storage.objects import ObjectFile

    files = {name: ObjectFile(join_url(url, name)) for name in names}
    try:
        versions = [f"{name} {file.version}" for name, file in files.items()]
    except StorageError as err:
        if err.status != HTTPStatus.NOT_FOUND:
            raise
        if err.url not in (files[INDEX_NAME].url, files[BINARY_NAME].url):
            raise SelectionError(f"{err}\n  Run `wdskit split` where the shards are.", folder=url) from err
        msg = f"{err}\n  A planned source reads a folder with its index. Run `wdskit index` where the shards are."
        raise FolderIndexError(msg, folder=url) from err
    digest = hashlib.sha256("\n".join([url, *versions]).encode()).hexdigest()
    folder = _copies() / digest[:32]
    try:
        make_folders(folder)
        with lock_folder(folder, wait=True):
            for name, file in files.items():
                if not (folder / name).exists():
                    publish_bytes(folder / name, _whole(file))
    except OSError as err:
        msg = f"{folder}: the index of {url} cannot be kept there: {err.strerror or err}."
        raise StorageError(f"{msg}\n  Set XDG_CACHE_HOME to a folder with some space.", url=url) from err
    return folder


def _copies() -> Path:
    """Where the copies are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (no home is no error)
    return Path(home) / "wdskit" / "folders"


def _whole(file: ObjectFile) -> bytes:
    if file.num_bytes > MAX_INDEX_BYTES:
        msg = f"{file.url}: it holds more than {MAX_INDEX_BYTES} bytes, which is no file of this kind."
        raise StorageError(msg, url=file.url)
    return file.read_at(0, file.num_bytes)


class RemoteShard(IndexedShard):
    """A shard of a store, read by ranges.

    Where its samples start is what the index says, by the digest of the `.idx`: to look at the sample before would be a
    request more for each. So unlike with a local shard, the first member of a sample is compared with the one before
    only where both are read. Its ETag is that of its first reply: an object that is replaced later is an error.

    Args:
        url: Of the shard.
        entry: What the index says of it.
        idx: The bytes of its `.idx`.

    Raises:
        FolderIndexError: The index does not say the digest of its `.idx`, or another one.
    """

    def __init__(self, url: str, entry: ShardEntry, idx: bytes) -> None:
        from wdskit.storage.objects import ObjectFile

        if entry.idx_sha256 is None:
            msg = f"{url}: the index of its folder has no digest of its {IDX_SUFFIX}: an older version made it."
            raise FolderIndexError(f"{msg}\n  Run `wdskit index` where the shards are.", folder=url.rpartition("/")[0])
        offsets = parse_offsets(idx, url, num_bytes=entry.num_bytes, sha256=entry.idx_sha256)
        self._object = ObjectFile(url, num_bytes=entry.num_bytes)
        super().__init__(url, self._object.ahead([]), offsets)
        self.edges[:] = b"\1" * len(self.edges)

    def ahead(self, numbers: Sequence[int]) -> IndexedShard:
        """This shard, with some of its samples on their way: their numbers, rising. Nothing is waited for."""
        ranges: list[tuple[int, int]] = []
        for number in numbers:  # each with a header behind it
            start, stop = self.offsets[number], self.offsets[number + 1] + BLOCK_BYTES
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        begun = IndexedShard(self.path, self._object.ahead(ranges), np.asarray(self.offsets))
        begun.edges = self.edges
        return begun


def open_remote_shards(named: Sequence[tuple[str, ShardEntry]]) -> list[RemoteShard]:
    """Open shards by their URLs and what the index says of them; their `.idx` are read at the same time. Raises as
    `RemoteShard`.
    """
    from wdskit.storage.objects import ObjectFile

    files = [ObjectFile(f"{url}{IDX_SUFFIX}") for url, _ in named]
    reads = [file.ahead([(0, 8 * (entry.num_samples + 1))]) for file, (_, entry) in zip(files, named, strict=True)]
    return [
        RemoteShard(url, entry, read.read_whole(0, 8 * (entry.num_samples + 1)))
        for read, (url, entry) in zip(reads, named, strict=True)
    ]
