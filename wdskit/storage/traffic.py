"""Count the bytes that are read from stores and from the cache."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Counts of bytes and requests of stores and of the cache.

    Attributes:
        fetched: Bytes received from stores, including bytes that were read ahead or twice, and bytes between samples.
        by_ranges: Bytes of samples that were read directly from a store. Each sample has the header after it.
        from_cache: Bytes of samples that were read from cached parts, counted in the same way.
        retries: Repeated requests.
        wait_s: Seconds that threads waited for samples from a store, summed over all threads.
    """

    fetched: int = 0
    by_ranges: int = 0
    from_cache: int = 0
    retries: int = 0
    wait_s: float = 0.0


NO_TRAFFIC = Traffic()
