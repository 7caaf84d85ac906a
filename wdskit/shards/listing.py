"""What shards hold, line by line: `wdskit ls`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from wdskit.errors import ConfigError, WdskitError
from wdskit.limits import MAX_HELD_BYTES
from wdskit.shards.contents import Target, find_shards, join_faults, read_all
from wdskit.shards.payloads import Payloads, payload_size
from wdskit.storage.urls import open_stream
from wdskit.tar.reader import TarReader
from wdskit.tar.window import size_of


@dataclass(frozen=True)
class ShardRow:
    """One shard in a listing: `name` is the file name in a folder, the path or URL elsewhere."""

    name: str
    num_samples: int
    num_bytes: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class SampleRow:
    """One sample in a listing.

    Attributes:
        number: Its place in the shard, from 0.
        key: Its key.
        offset: Byte offset of its first header.
        fields: Name and size in bytes of each field, in the order of the members.
    """

    number: int
    key: str
    offset: int
    fields: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MemberRow:
    """One member in a listing: `offset` is that of its first header, `num_bytes` the size of its data."""

    name: str
    offset: int
    num_bytes: int


def ls(path: str, *, limit: int | None = None, members: bool = False) -> Iterator[ShardRow | SampleRow | MemberRow]:
    """The shards of a folder or pattern, the samples of a shard, or its members: `wdskit ls`.

    Args:
        path: As `find_shards` takes it.
        limit: Stop after so many.
        members: List a shard's members.

    Yields:
        Rows of one kind.

    Raises:
        ConfigError: `members` of what is not one shard.
        ShardError: A shard is not right; what is right has been yielded, of several shards those behind it too.
        StorageError: There is nothing, or it cannot be read.
        FolderIndexError: The folder's index does not match its files.
    """
    target = find_shards(path)
    if target.kind != "shard":
        if members:
            raise ConfigError(f"{path} is a {target.kind}, but members are those of one shard.")
        yield from list_right_shards(target, limit=limit)
    elif members:
        yield from islice(list_members(target.urls[0]), limit)
    else:
        yield from islice(list_samples(target.urls[0]), limit)


def list_right_shards(target: Target, *, limit: int | None = None) -> Iterator[ShardRow]:
    """The rows of the shards that are right; then an error that lists the others, if there are any."""
    faults: list[WdskitError] = []
    for row in list_shard_rows(target, limit=limit):
        if isinstance(row, WdskitError):
            faults.append(row)
        else:
            yield row
    if faults:
        raise join_faults(target.path, faults, len(target.urls[:limit])) from faults[0]


def list_shard_rows(
    target: Target, *, limit: int | None = None, workers: int | None = None
) -> Iterator[ShardRow | WdskitError]:
    """One row a shard, in order: `wdskit ls FOLDER`.

    Args:
        target: What `find_shards` found.
        limit: Stop after so many shards.
        workers: Processes that read where there is no index; default as for `shards.indexing.index_folder`.

    Yields:
        A row, or the error of a shard that is not right.
    """
    if target.entries is not None:
        for url, entry in zip(target.urls[:limit], target.entries, strict=False):
            yield ShardRow(_name(target, url), entry.num_samples, entry.num_bytes, entry.fields)
        return
    for result in read_all(target.urls[:limit], workers, None):
        if isinstance(result, WdskitError):
            yield result
        else:
            names = tuple(field.name for field in result.fields)
            yield ShardRow(_name(target, result.url), result.num_samples, result.num_bytes, names)


def list_samples(url: str) -> Iterator[SampleRow]:
    """One row a sample of a shard, while it is read: `wdskit ls SHARD`.

    Raises:
        ShardError: The shard is not right; the whole samples before the fault have been yielded.
        StorageError: It cannot be read.
    """
    with Payloads(url) as shard:
        for number, sample in enumerate(shard):
            fields = tuple((name, payload_size(data)) for name, data in sample.items() if not name.startswith("__"))
            yield SampleRow(number, sample["__key__"], shard.reader.starts[-1], fields)


def list_members(url: str) -> Iterator[MemberRow]:
    """One row a member of a tar, those of no sample included: `wdskit ls SHARD --members`. Raises as `list_samples`."""
    stream = open_stream(url)
    try:
        for name, offset, data in TarReader(stream.read, shard=url, hold_bytes=MAX_HELD_BYTES):
            yield MemberRow(name, offset, size_of(data))
    finally:
        stream.close()


def _name(target: Target, url: str) -> str:
    """What a listing calls a shard."""
    return url.rpartition("/")[2] if target.kind == "folder" else url
