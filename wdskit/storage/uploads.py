"""Objects written to a bucket."""

from __future__ import annotations

from wdskit.errors import StorageError
from wdskit.storage.objects import PART_S
from wdskit.storage.requests import loop_of_this_process, result, try_whole
from wdskit.storage.stores import locate
from wdskit.storage.urls import LISTED_SCHEMES


def check_bucket(url: str) -> None:
    """Raise `StorageError` for a URL below which nothing can be written."""
    location = locate(url)
    if location.scheme not in LISTED_SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in LISTED_SCHEMES)
        raise StorageError(f"{location.url}: only buckets of {known} can be written to.", url=location.url)


def put_object(url: str, data: bytes) -> None:
    """Write an object, in place of one that was there. Readers see all of it or none.

    Raises:
        StorageError: Nothing can be written there, or the store cannot be reached or refuses.
    """
    check_bucket(url)
    shown = locate(url).url
    result(loop_of_this_process(shown).submit(_put(url, data)), shown)


async def _put(url: str, data: bytes) -> None:
    location = locate(url)
    await try_whole(location, lambda store: store.put_async(location.key, data), PART_S)
