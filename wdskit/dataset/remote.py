"""Remote folders of shards: their index, kept in a local copy, and their samples, read by range requests.

The files that a planned source needs before it reads a sample (`index.json`, the list of the columns) are copied to
`$XDG_CACHE_HOME/wdskit/folders`, once for each version (ETag). All processes of a user on a machine share the copy.
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

from wdskit.dataset.index import INDEX_NAME, ShardEntry, join_url
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.shard import IDX_SUFFIX, IndexedShard, foreign_offsets, parse_offsets
from wdskit.errors import FolderIndexError, SelectionError, StorageError
from wdskit.files import publish, publish_bytes, read_own, remove_temp_files
from wdskit.limits import BLOCK_BYTES, MAX_IDX_BYTES, MAX_INDEX_BYTES
from wdskit.storage.cache import PartCache, PartName, make_private_folder
from wdskit.storage.traffic import Traffic
from wdskit.storage.urls import ABSENT_STATUSES

if TYPE_CHECKING:
    from wdskit.storage.objects import ObjectFile

CACHE_PART_BYTES = 8 << 20
"""Approximate size of the parts of a shard that are fetched and cached."""

_HEAD_BYTES = 128 << 10
"""Bytes of the first request for each file of a folder: most files are not larger."""

_DIGEST_SUFFIX = ".sha256"

T = TypeVar("T")
Ints = NDArray[np.int64]


def read_copy(url: str, names: Sequence[str], read: Callable[[Path], T]) -> T:
    """Copy files of a remote folder, and return the result of `read` on the copies.

    Args:
        url: URL of the remote folder.
        names: Files to copy in addition to `index.json`, if they exist.
        read: Called with the local folder of the copies. If `read` raises FolderIndexError or SelectionError, the files
            are downloaded again and `read` is called once more.

    Raises:
        FolderIndexError: The folder has no index, or the second call of `read` raises this error.
        SelectionError: The second call of `read` raises this error.
        StorageError: A file cannot be read, or the copies cannot be written.
    """
    names = (INDEX_NAME, *names)
    folder = _copy(url, names)
    try:
        return read(folder)
    except (FolderIndexError, SelectionError):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        return read(_copy(url, names))


def _copy(url: str, names: Sequence[str]) -> Path:
    """Copy files of a remote folder if no copies of their current versions exist. Return the local folder of the
    copies. `names` are all files to copy, with `index.json`. A new version gets a new local folder. `read_copy` lists
    the errors.
    """
    from wdskit.storage.objects import ObjectFile

    files = {name: ObjectFile(join_url(url, name)) for name in names}
    heads = {name: file.ahead([(0, _HEAD_BYTES)]) for name, file in files.items()}  # one round trip for all files

    def read_whole(name: str) -> bytes:
        file = files[name]
        if file.num_bytes > MAX_INDEX_BYTES:
            msg = f"{file.url}: it holds more than {MAX_INDEX_BYTES} bytes, too many for such a file."
            raise StorageError(msg, url=file.url)
        return heads[name].read_at(0, file.num_bytes)

    versions = [url]
    found = []
    for name, file in files.items():
        try:
            heads[name].read_at(0, _HEAD_BYTES)
        except StorageError as err:
            if name != INDEX_NAME and err.status in ABSENT_STATUSES:
                continue
            if err.status != HTTPStatus.NOT_FOUND:
                raise
            msg = f"{err}\n  A planned source needs the index of its folder. Run `wdskit index` where the shards are."
            raise FolderIndexError(msg, folder=url) from err
        found.append(name)
        # Without a version, the sha256 of the bytes identifies the copy.
        versions.append(f"{name} {file.version or hashlib.sha256(read_whole(name)).hexdigest()}")
    digest = hashlib.sha256("\n".join(versions).encode()).hexdigest()
    copies = user_cache() / "folders"
    folder, remedy = copies / digest[:32], "Set XDG_CACHE_HOME to a folder of your own with free space"
    make_private_folder(copies, f"the index of {url}", remedy)
    make_private_folder(folder, f"the index of {url}", remedy)
    try:
        with lock_folder(folder, wait=True):
            remove_temp_files(folder)
            for name in found:
                if not _is_sound(folder / name):
                    data = read_whole(name)
                    publish_bytes(folder / (name + _DIGEST_SUFFIX), hashlib.sha256(data).digest())
                    publish_bytes(folder / name, data)
    except OSError as err:
        msg = f"{folder}: the index of {url} cannot be stored here: {err.strerror or err}."
        raise StorageError(f"{msg}\n  {remedy}.", url=url) from err
    return folder


def fetch_copy(folder: Path, url: str, name: str, sha256: str) -> None:
    """Copy a file of a remote folder into the local folder of its copies, unless the copy exists.

    Args:
        folder: Local folder of the copies.
        url: URL of the remote folder.
        name: Name of the file, which must contain a digest: an existing copy is not compared.
        sha256: Hex digest of the file.

    Raises:
        SelectionError: The remote file has another digest.
        StorageError: The file cannot be read, or the copy cannot be written.
    """
    from wdskit.storage.objects import ObjectFile

    if (folder / name).exists():
        return
    file = ObjectFile(join_url(url, name))
    try:
        with lock_folder(folder, wait=True):
            if (folder / name).exists():
                return
            with publish(folder / name) as temp:
                for start in range(0, file.num_bytes, CACHE_PART_BYTES):
                    temp.write(file.read_at(start, CACHE_PART_BYTES))
                if temp.sha256 != sha256:
                    msg = f"{file.url}: its sha256 differs from the digest in the list of the columns."
                    raise SelectionError(f"{msg}\n  Run `wdskit index {url}`, which makes them again.", folder=url)
    except OSError as err:
        msg = f"{folder}: {file.url} cannot be stored here: {err.strerror or err}."
        raise StorageError(f"{msg}\n  Set XDG_CACHE_HOME to a folder of your own with free space.", url=url) from err


def _is_sound(path: Path) -> bool:
    """Return whether a copy exists and has the digest that was stored with it."""
    data = read_own(path)
    return data is not None and hashlib.sha256(data).digest() == read_own(path.with_name(path.name + _DIGEST_SUFFIX))


def user_cache() -> Path:
    """Return the folder of copies and uploads: `$XDG_CACHE_HOME/wdskit`, by default `~/.cache/wdskit`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (a missing home is not an error)
    return Path(home) / "wdskit"


class RemoteShard(IndexedShard):
    """A remote shard, read by range requests.

    A read of a sample compares its key with the key in the next header if this header is plain, but not with the key of
    the sample before. The digest of the `.idx` in the index confirms the offsets of the samples. If the object is
    replaced after the first reply of the server, a later request raises StorageError.

    Args:
        file: The object.
        entry: Index entry of the shard.
        idx: The bytes of the shard's `.idx`.
        cache: Keeps parts of the shard on a local disk; None for no cache. With a cache, the constructor reads the
            object's version.

    Raises:
        FolderIndexError: The `.idx` does not belong to the shard.
        StorageError: The object's version cannot be read.
    """

    file: _ShardFile

    def __init__(
        self,
        file: ObjectFile,
        entry: ShardEntry,
        idx: bytes,
        cache: PartCache | None = None,
    ) -> None:
        url = file.url
        offsets = parse_offsets(idx, url, num_bytes=entry.num_bytes, sha256=entry.idx_sha256)
        if len(offsets) != entry.num_samples + 1:
            raise foreign_offsets(url, f"it has {len(offsets) - 1} samples, but the index says {entry.num_samples}")
        kept = None
        if cache is not None and (version := file.version) is not None:
            kept = _CachedParts(cache, hashlib.sha256(f"{entry.sha256} {version}".encode()).hexdigest(), offsets)
        super().__init__(url, _ShardFile(file, kept), offsets, is_trusted=True)

    def ahead(self, numbers: Sequence[int], *, at_once: bool) -> IndexedShard:
        """Start to fetch samples without waiting. Return another reader of this shard, which uses the fetched bytes. If
        no sample has to be fetched by range requests, return this object. A failed request raises its error only when
        a sample is read.

        Args:
            numbers: Numbers of the samples, in increasing order.
            at_once: Fetch the samples by range requests even if their parts are being fetched into the cache. The
                samples arrive earlier, but their bytes are fetched twice.
        """
        ranges: list[tuple[int, int]] = []
        for number in self.file.fetch_parts(numbers, at_once=at_once):
            start, stop = self.offsets[number], self.offsets[number + 1] + BLOCK_BYTES
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
            else:
                ranges.append((start, stop))
        if not ranges:
            return self
        reader = IndexedShard(self.path, self.file.ahead(ranges), np.asarray(self.offsets))
        reader.edges = self.edges
        return reader

    def keep(self, numbers: Sequence[int]) -> None:
        """Start to fetch the parts with these samples into the cache, if there is a cache. `numbers` increase."""
        self.file.fetch_parts(numbers, at_once=False)


class _ShardFile:
    """The file of a remote shard, read from cached parts, from ranges that are being fetched, or from the object."""

    fd = -1

    def __init__(
        self,
        file: ObjectFile,
        kept: _CachedParts | None,
        ranges: Sequence[tuple[int, int]] = (),
    ) -> None:
        from wdskit.storage.requests import loop_of_this_process

        self.url = file.url
        self._object = file
        self._kept = kept
        self._ahead = file.ahead(ranges)
        self._loop = loop_of_this_process(file.url)

    @property
    def num_bytes(self) -> int:
        """Size of the object."""
        return self._object.num_bytes

    def read_at(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer bytes only at the end of the object.

        Raises:
            StorageError: The object cannot be read, or is replaced while it is read.
        """
        start_s = time.perf_counter()
        kept = None
        if self._kept is not None:
            kept = self._kept.read(offset, size, wait=not self._ahead.covers(offset, size))
        data = self._ahead.read_at(offset, size) if kept is None else kept
        found = Traffic(by_ranges=len(data)) if kept is None else Traffic(from_cache=len(data))
        self._loop.count(found._replace(wait_s=time.perf_counter() - start_s))
        return data

    def fetch_parts(self, numbers: Sequence[int], *, at_once: bool) -> Sequence[int]:
        """Start to fetch the parts with these samples into the cache. `numbers` increase. Return the samples that the
        caller must request by ranges: samples whose parts cannot be cached, and with `at_once` all samples that are not
        in the cache yet. Without a cache, return `numbers`.
        """
        return numbers if self._kept is None else self._kept.fetch_parts(numbers, self._object, at_once=at_once)

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> _ShardFile:
        """Start to fetch ranges (start, stop) of bytes, and return a file that uses the fetched bytes."""
        return _ShardFile(self._object, self._kept, ranges)

    def close(self) -> None:
        """Do nothing: other readers may use the object."""


class _CachedParts:
    """The parts of a shard in the cache. A part has all samples that start in the same range of `CACHE_PART_BYTES`
    bytes, counted from the first sample.
    """

    def __init__(self, cache: PartCache, digest: str, offsets: Ints) -> None:
        self._cache = cache
        self._digest = digest
        self._offsets: memoryview[int] = memoryview(offsets.data)
        slots = (offsets[:-1] - offsets[0]) // CACHE_PART_BYTES
        # The number of the first sample in each part, and the number of samples of the shard.
        self._firsts: list[int] = [*np.flatnonzero(np.diff(slots, prepend=-1)).tolist(), len(slots)]

    def fetch_parts(self, numbers: Sequence[int], file: ObjectFile, *, at_once: bool) -> list[int]:
        """Start to fetch the parts with these samples into the cache. `numbers` increase. Return the samples that the
        caller must request by ranges: samples whose parts cannot be cached, and with `at_once` all samples that are not
        in the cache yet.
        """
        found: list[int] = []
        for at, group in itertools.groupby(numbers, self._part_of):
            name = self._name(at)
            if not self._cache.has(name):
                first, stop = self._firsts[at : at + 2]
                is_fetched = self._cache.keep(name, file, self._offsets[first : stop + 1].tolist())
                found += group if at_once or not is_fetched else ()
        return found

    def read(self, offset: int, size: int, *, wait: bool) -> bytes | None:
        """Return `size` bytes from `offset`, read from the cache. The range must be one or more whole samples and the
        512 bytes after them. Return None for any other range, or if a part is not in the cache. If `wait` is True,
        first wait for parts that are being fetched.
        """
        offsets, end = self._offsets, offset + size - BLOCK_BYTES
        first = bisect.bisect_left(offsets, offset)
        stop = bisect.bisect_left(offsets, end, first)
        if stop == len(offsets) or offsets[first] != offset or offsets[stop] != end:
            return None
        found: list[bytes] = []
        for number in range(first, stop):
            at = self._part_of(number)
            name = self._name(at)
            where = number - self._firsts[at], self._offsets[number], self._offsets[number + 1]
            data = self._cache.read(name, *where)
            if data is None and wait:
                self._cache.wait_for(name)
                data = self._cache.read(name, *where)
            if data is None:
                return None
            found.append(data)
        return found[0] if len(found) == 1 else b"".join([*(data[:-BLOCK_BYTES] for data in found[:-1]), *found[-1:]])

    def _part_of(self, number: int) -> int:
        return bisect.bisect_right(self._firsts, number) - 1

    def _name(self, at: int) -> PartName:
        first, stop = self._firsts[at : at + 2]
        return PartName(self._digest, self._offsets[first], self._offsets[stop])


def open_remote_shards(
    named: Sequence[tuple[str, ShardEntry]],
    cache: PartCache | None = None,
) -> list[RemoteShard]:
    """Return open shards in the order of `named`. All requests are sent at the same time.

    Args:
        named: URL and index entry of each shard.
        cache: Keeps parts of the shards on a local disk; None for no cache.

    Raises:
        FolderIndexError: The index has an impossible number of samples, or an `.idx` does not belong to its shard.
        StorageError: A shard or its `.idx` cannot be read.
    """
    from wdskit.storage.objects import PROBE_BYTES, ObjectFile

    files = [ObjectFile(url, num_bytes=entry.num_bytes) for url, entry in named]
    sizes = [8 * (entry.num_samples + 1) for _, entry in named]
    for (url, entry), size in zip(named, sizes, strict=True):
        most = min(8 * (entry.num_bytes // BLOCK_BYTES + 1), MAX_IDX_BYTES)
        if size > most:  # checked before the request
            what = f"{entry.num_samples} samples in {entry.num_bytes} bytes"
            raise foreign_offsets(url, f"the index says that the shard has {what}, too many to be true")
    reads = [ObjectFile(f"{url}{IDX_SUFFIX}").ahead([(0, size)]) for (url, _), size in zip(named, sizes, strict=True)]
    if cache is not None:  # a cached part is used only if its version is known
        for read in [file.ahead([(0, PROBE_BYTES)]) for file in files]:
            read.read_at(0, PROBE_BYTES)
    return [
        RemoteShard(file, entry, read.read_at(0, size), cache)
        for file, (_, entry), read, size in zip(files, named, reads, sizes, strict=True)
    ]
