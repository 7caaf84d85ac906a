"""Folders of shards in a store: their index, kept in a local copy, and their samples, read by ranges.

What a planned source needs before it reads a sample (`index.json`, `index.bin`, a selection) is copied to
`$XDG_CACHE_HOME/wdskit/folders`, once for each version of it, by ETags. All processes of a machine share the copy.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BINARY_NAME
from wdskit.dataset.index import INDEX_NAME, ShardEntry, join_url
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.shard import IDX_SUFFIX, IndexedShard, parse_offsets
from wdskit.errors import FolderIndexError, SelectionError, StorageError
from wdskit.files import make_folders, publish_bytes
from wdskit.limits import BLOCK_BYTES, MAX_INDEX_BYTES
from wdskit.storage.cache import PartCache
from wdskit.storage.parts import PartName
from wdskit.storage.traffic import Traffic

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

PART_BYTES = 8 << 20
"""Approximate size of the parts of a shard that are fetched and kept."""

T = TypeVar("T")
Ints = NDArray[np.int64]


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
        msg = f"{err}\n  A planned source needs the index of its folder. Run `wdskit index` where the shards are."
        raise FolderIndexError(msg, folder=url) from err
    digest = hashlib.sha256("\n".join([url, *versions]).encode()).hexdigest()
    folder = user_cache() / "folders" / digest[:32]
    try:
        make_folders(folder)
        with lock_folder(folder, wait=True):
            for name, file in files.items():
                if not (folder / name).exists():
                    publish_bytes(folder / name, _whole(file))
    except OSError as err:
        msg = f"{folder}: the index of {url} cannot be stored here: {err.strerror or err}."
        raise StorageError(f"{msg}\n  Set XDG_CACHE_HOME to a folder with free space.", url=url) from err
    return folder


def user_cache() -> Path:
    """The folder of files on their way from or to stores: `$XDG_CACHE_HOME/wdskit`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (no home is no error)
    return Path(home) / "wdskit"


def _whole(file: ObjectFile) -> bytes:
    if file.num_bytes > MAX_INDEX_BYTES:
        msg = f"{file.url}: it holds more than {MAX_INDEX_BYTES} bytes, too many for such a file."
        raise StorageError(msg, url=file.url)
    return file.read_at(0, file.num_bytes)


class RemoteShard(IndexedShard):
    """A shard of a store, read by ranges.

    Where its samples start is what the index says, by the digest of the `.idx`: to look at the sample before would be a
    request more for each. So unlike with a local shard, the first member of a sample is compared with the one before
    only where both are read. Its ETag is that of its first reply: an object that is replaced later is an error.

    Args:
        file: The object.
        entry: What the index says of it.
        idx: The bytes of its `.idx`.
        cache: Where parts of it are kept; None for nowhere. The object's version is known then.

    Raises:
        FolderIndexError: The index does not say the digest of its `.idx`, or another one.
    """

    file: _ShardFile

    def __init__(self, file: ObjectFile, entry: ShardEntry, idx: bytes, cache: PartCache | None = None) -> None:
        url = file.url
        if entry.idx_sha256 is None:
            msg = f"{url}: the index of its folder has no digest of its {IDX_SUFFIX}; an older version wrote it."
            raise FolderIndexError(f"{msg}\n  Run `wdskit index` where the shards are.", folder=url.rpartition("/")[0])
        offsets = parse_offsets(idx, url, num_bytes=entry.num_bytes, sha256=entry.idx_sha256)
        kept = None
        if cache is not None:
            version = file.version if file.etag else f"{url} {file.version}"
            kept = _KeptParts(cache, hashlib.sha256(f"{entry.sha256} {version}".encode()).hexdigest(), offsets)
        super().__init__(url, _ShardFile(file, kept), offsets)
        self.edges[:] = b"\1" * len(self.edges)

    def ahead(self, numbers: Sequence[int], *, at_once: bool) -> IndexedShard:
        """This shard, with some of its samples on their way. Nothing is waited for.

        Args:
            numbers: Of the samples, rising.
            at_once: Whether they come by ranges though their parts are on their way, which takes less long and fetches
                them twice.
        """
        ranges: list[tuple[int, int]] = []
        for number in self.file.missing(numbers, at_once=at_once):
            start, stop = self.offsets[number], self.offsets[number + 1] + BLOCK_BYTES
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        begun = IndexedShard(self.path, self.file.ahead(ranges), np.asarray(self.offsets))
        begun.edges = self.edges
        return begun

    def keep(self, numbers: Sequence[int]) -> None:
        """Begin to fetch the parts of some samples, whose numbers rise, where parts are kept."""
        self.file.keep(numbers)


class _ShardFile:
    """The object of a shard, some ranges of which are on their way, and parts of which are kept on this disk."""

    fd = -1

    def __init__(self, file: ObjectFile, kept: _KeptParts | None, ranges: Sequence[tuple[int, int]] = ()) -> None:
        from wdskit.storage.requests import loop_of_this_process  # which needs obstore

        self._object = file
        self._kept = kept
        self._ahead = file.ahead(ranges)
        self._loop = loop_of_this_process(file.url)

    @property
    def num_bytes(self) -> int:
        """Size of the object."""
        return self._object.num_bytes

    def read_whole(self, offset: int, size: int) -> bytes:
        """`size` bytes, fewer only where the object ends."""
        data = None if self._kept is None else self._kept.read(offset, size)
        if data is not None:
            self._loop.count(Traffic(from_cache=len(data)))
            return data
        start_s = time.perf_counter()
        if self._kept is not None and not self._ahead.covers(offset, size):
            data = self._kept.read(offset, size, wait=True)
        if data is None:
            data = self._ahead.read_whole(offset, size)
            found = Traffic(by_ranges=len(data))
        else:
            found = Traffic(from_cache=len(data))
        self._loop.count(found._replace(wait_s=time.perf_counter() - start_s))
        return data

    def keep(self, numbers: Sequence[int]) -> None:
        """Begin to fetch the parts of some samples, whose numbers rise."""
        if self._kept is not None:
            self._kept.keep(numbers, self._object)

    def missing(self, numbers: Sequence[int], *, at_once: bool) -> Sequence[int]:
        """Those of some samples, rising, that are not kept, or with `at_once` not yet; their parts are fetched from now
        on.
        """
        return numbers if self._kept is None else self._kept.missing(numbers, self._object, at_once=at_once)

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> _ShardFile:
        """The same, with some ranges on their way."""
        return _ShardFile(self._object, self._kept, ranges)

    def close(self) -> None:
        """Nothing: others may read the object on."""


def part_edges(offsets: Ints) -> Ints:
    """The first sample of each part of a shard, and the number of its samples, from where its samples start."""
    slots = (offsets[:-1] - offsets[0]) // PART_BYTES
    return np.append(np.flatnonzero(np.diff(slots, prepend=-1)), len(slots))


class _KeptParts:
    """The parts of a shard, each the samples that start in one stretch of `PART_BYTES`, as far as they are kept."""

    def __init__(self, cache: PartCache, digest: str, offsets: Ints) -> None:
        self._cache = cache
        self._digest = digest
        self._offsets: memoryview[int] = memoryview(offsets.data)
        self._firsts: list[int] = part_edges(offsets).tolist()

    def missing(self, numbers: Sequence[int], file: ObjectFile, *, at_once: bool) -> list[int]:
        """See `_ShardFile`."""
        found: list[int] = []
        for at, group in itertools.groupby(numbers, self._part_of):
            if self._cache.find(self._name(at)) is None and (not self._fetch(at, file) or at_once):
                found += group
        return found

    def keep(self, numbers: Sequence[int], file: ObjectFile) -> None:
        """See `_ShardFile`."""
        for at, _ in itertools.groupby(numbers, self._part_of):
            if not self._cache.has(self._name(at)):
                self._fetch(at, file)

    def _fetch(self, at: int, file: ObjectFile) -> bool:
        first, stop = self._firsts[at : at + 2]
        return self._cache.keep(self._name(at), file, self._offsets[first : stop + 1].tolist())

    def read(self, offset: int, size: int, *, wait: bool = False) -> bytes | None:
        """Bytes of whole samples and the block behind them, where all of them are kept, or with `wait` on their way."""
        offsets, end = self._offsets, offset + size - BLOCK_BYTES
        first = bisect.bisect_left(offsets, offset)
        stop = bisect.bisect_left(offsets, end, first)
        if stop == len(offsets) or offsets[first] != offset or offsets[stop] != end:
            return None
        found: list[bytes] = []
        for number in range(first, stop):
            at = self._part_of(number)
            part = self._cache.find(self._name(at))
            if part is None and wait:
                self._cache.wait_for(self._name(at))
                part = self._cache.find(self._name(at))
            if part is None:
                return None
            data = part.read(number - self._firsts[at], self._offsets[number], self._offsets[number + 1])
            if data is None:
                self._cache.drop(part.name, f"{part.file.url}: its copy of sample {number} of the shard is damaged.")
                return None
            found.append(data)
        return found[0] if len(found) == 1 else b"".join([*(data[:-BLOCK_BYTES] for data in found[:-1]), *found[-1:]])

    def _part_of(self, number: int) -> int:
        return bisect.bisect_right(self._firsts, number) - 1

    def _name(self, at: int) -> PartName:
        first, stop = self._firsts[at : at + 2]
        return PartName(self._digest, self._offsets[first], self._offsets[stop])


def open_remote_shards(named: Sequence[tuple[str, ShardEntry]], cache: PartCache | None = None) -> list[RemoteShard]:
    """Open shards by their URLs and what the index says of them; what is read of them is read at the same time. Raises
    as `RemoteShard`, and `StorageError` where a store cannot be read.
    """
    from wdskit.storage.objects import PROBE_BYTES, ObjectFile

    files = [ObjectFile(url, num_bytes=entry.num_bytes) for url, entry in named]
    sizes = [8 * (entry.num_samples + 1) for _, entry in named]
    reads = [ObjectFile(f"{url}{IDX_SUFFIX}").ahead([(0, size)]) for (url, _), size in zip(named, sizes, strict=True)]
    if cache is not None:  # the version of each, before a part of another one is taken for its own
        for read in [file.ahead([(0, PROBE_BYTES)]) for file in files]:
            read.read_whole(0, PROBE_BYTES)
    return [
        RemoteShard(file, entry, read.read_whole(0, size), cache)
        for file, (_, entry), read, size in zip(files, named, reads, sizes, strict=True)
    ]
