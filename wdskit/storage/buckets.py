"""Objects of a bucket: listed, written and deleted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from wdskit.errors import StorageError
from wdskit.storage.objects import PART_S, quoted
from wdskit.storage.requests import LARGE_UNITS, loop_of_this_process, result, try_whole
from wdskit.storage.stores import Location, locate
from wdskit.storage.urls import LISTED_SCHEMES

PART_BYTES = 16 << 20
"""Larger files are uploaded in parts of so many bytes; S3 takes 10,000 of them."""
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
"""Parts of a file that are held in memory and on their way."""


class ObjectInfo(NamedTuple):
    """One object of a folder: `etag` is None where the store has none."""

    url: str
    num_bytes: int
    etag: str | None


def list_objects(url: str) -> list[ObjectInfo]:
    """The objects of a folder of a bucket, by URL; those of the folders in it are not listed.

    Raises:
        StorageError: The store cannot be reached or refuses; or it is of a kind that has no lists.
    """
    location = locate(url)
    if location.scheme not in LISTED_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in LISTED_SCHEMES)
        raise StorageError(f"{location.url}: only folders of {known} can be listed. Name each file.", url=location.url)
    reply = _call(location, lambda store: store.list_with_delimiter_async(location.key or None))
    base = f"{location.scheme}://{location.root}"
    found = [ObjectInfo(f"{base}/{quote(one['path'])}", one["size"], quoted(one["e_tag"])) for one in reply["objects"]]
    return sorted(found)


def _call(location: Location, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the result of a call with the store of a location; raise `StorageError` if it fails after all tries."""
    return result(loop_of_this_process(location.url).submit(try_whole(location, call, PART_S)), location.url)


def check_bucket(url: str) -> Location:
    """Return the location of a URL below which objects can be written; raise `StorageError` for any other URL."""
    location = locate(url)
    if location.scheme not in LISTED_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in LISTED_SCHEMES)
        raise StorageError(f"{location.url}: only buckets of {known} can be written to.", url=location.url)
    return location


def put_object(url: str, data: bytes) -> None:
    """Write an object, or replace it. Readers see all of it or nothing.

    Raises:
        StorageError: The URL cannot be written, or the store cannot be reached or refuses.
    """
    location = check_bucket(url)
    _call(location, lambda store: store.put_async(location.key, data))


def start_upload(url: str, path: Path) -> Future[str | None]:
    """Start to upload a file in the background. It replaces an existing object; readers see all of it or nothing.

    Returns:
        A future of its ETag, set when the store confirms the object and its size; None if the store has no ETags. The
        future raises `StorageError` if the store cannot be reached, refuses the object, or reports another one.

    Raises:
        StorageError: The URL cannot be written.
        OSError: The file does not exist.
    """
    location = check_bucket(url)
    return loop_of_this_process(location.url).submit(_upload(location, path, path.stat().st_size))


async def _upload(location: Location, path: Path, num_bytes: int) -> str | None:
    chunk_bytes = max(PART_BYTES, -(-num_bytes // (MAX_PARTS - 1)))
    in_parts = num_bytes > PART_BYTES
    limit_s = PART_S * (1 + num_bytes // PART_BYTES)
    async with loop_of_this_process(location.url).slot(LARGE_UNITS if in_parts else 1):
        reply = await try_whole(
            location,
            lambda store: store.put_async(
                location.key, path, use_multipart=in_parts, chunk_size=chunk_bytes, max_concurrency=PARTS_AT_ONCE
            ),
            limit_s,
            extra_s=limit_s,
        )
        meta = await try_whole(location, lambda store: store.head_async(location.key), PART_S)
    sent, there = quoted(reply["e_tag"]), quoted(meta["e_tag"])
    if meta["size"] != num_bytes or (sent is not None and there != sent):
        what = f"{meta['size']} bytes with ETag {there}, but {num_bytes} with ETag {sent} were sent"
        msg = f"{location.url}: the store has {what}. Another program writes there too. Wait until it ends, or stop it."
        raise StorageError(msg, url=location.url)
    return there


def delete_object(url: str) -> None:
    """Delete an object; a missing object is no error. Raises as `put_object` does."""
    location = check_bucket(url)
    try:
        _call(location, lambda store: store.delete_async(location.key))
    except StorageError as err:
        if err.status != 404:
            raise
