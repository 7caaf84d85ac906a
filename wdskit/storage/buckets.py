"""List and write the objects of a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from wdskit.errors import StorageError
from wdskit.storage.objects import PART_S, quote_etag
from wdskit.storage.requests import LARGE_UNITS, call_with_retries, loop_of_this_process, wait_for_result
from wdskit.storage.stores import Location, locate
from wdskit.storage.urls import LISTED_SCHEMES

UPLOAD_BYTES = 16 << 20
"""Size of the parts in which larger files are uploaded."""
MAX_PARTS = 10_000
"""Most parts of one object in S3. Files of over 156 GiB have larger parts."""
PARTS_AT_ONCE = 4
"""Parts of a file that are held in memory and uploaded at the same time."""


class ObjectInfo(NamedTuple):
    """An object of a folder: its URL, its size in bytes, and its ETag in quotes. `etag` is None if the store has no
    ETags.
    """

    url: str
    num_bytes: int
    etag: str | None


def list_objects(url: str) -> list[ObjectInfo]:
    """Return the objects of the folder `url` in a bucket, sorted by URL. Objects of its subfolders are not listed. The
    list is empty if the folder has no objects or does not exist.

    Raises:
        StorageError: The URL is invalid, or the store cannot be reached, refuses the request, or cannot list objects.
    """
    location = check_bucket(url)
    loop = loop_of_this_process(location.url)
    listing = call_with_retries(location, lambda store: store.list_with_delimiter_async(location.key or None), PART_S)
    objects = wait_for_result(loop.submit(listing), location.url)["objects"]
    base = f"{location.scheme}://{location.root}"
    return sorted(ObjectInfo(f"{base}/{quote(one['path'])}", one["size"], quote_etag(one["e_tag"])) for one in objects)


def check_bucket(url: str) -> Location:
    """Return the location of the object `url`. No request is sent.

    Raises StorageError if the URL is invalid, or if its scheme is not one of `LISTED_SCHEMES`.
    """
    location = locate(url)
    if location.scheme not in LISTED_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in LISTED_SCHEMES)
        raise StorageError(f"{location.url}: only buckets of {known} can be listed or written to.", url=location.url)
    return location


def upload(url: str, path: Path) -> str | None:
    """Upload a file, and return the object's ETag; None if the store has no ETags. The complete object replaces an
    existing object of this URL. The store has reported the object's size and ETag.

    Raises:
        StorageError: `check_bucket` refuses the URL; or the store cannot be reached, refuses the object, or reports a
            size or ETag that differs from the uploaded file's; or this process is ending, or was forked after its
            parent had used a store.
        OSError: The file does not exist.
    """
    location = check_bucket(url)
    sending = loop_of_this_process(location.url).submit(_upload(location, path, path.stat().st_size))
    return wait_for_result(sending, location.url)


async def _upload(location: Location, path: Path, num_bytes: int) -> str | None:
    chunk_bytes = max(UPLOAD_BYTES, -(-num_bytes // (MAX_PARTS - 1)))
    in_parts = num_bytes > UPLOAD_BYTES
    limit_s = PART_S * (1 + num_bytes // UPLOAD_BYTES)
    async with loop_of_this_process(location.url).slot(LARGE_UNITS if in_parts else 1):
        reply = await call_with_retries(
            location,
            lambda store: store.put_async(
                location.key, path, use_multipart=in_parts, chunk_size=chunk_bytes, max_concurrency=PARTS_AT_ONCE
            ),
            limit_s,
        )
        meta = await call_with_retries(location, lambda store: store.head_async(location.key), PART_S)
    sent, stored = quote_etag(reply["e_tag"]), quote_etag(meta["e_tag"])
    if meta["size"] != num_bytes or (sent is not None and stored != sent):
        what = f"{meta['size']} bytes with ETag {stored}, but {num_bytes} with ETag {sent} were sent"
        msg = f"{location.url}: the store has {what}. Another program writes there too. Wait until it ends, or stop it."
        raise StorageError(msg, url=location.url)
    return stored
