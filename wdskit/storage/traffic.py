"""Counts of the bytes that are read from stores."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes and requests of stores and of the cache.

    Attributes:
        fetched: Bytes received from stores, also those that were fetched ahead or twice.
        by_ranges: Bytes of samples that were read from a store.
        from_cache: Bytes of samples that were read from cached parts.
        retries: Repeated requests.
        wait_s: Seconds that all threads together waited for samples from a store.
    """

    fetched: int = 0
    by_ranges: int = 0
    from_cache: int = 0
    retries: int = 0
    wait_s: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum."""
        return Traffic(
            self.fetched + other.fetched,
            self.by_ranges + other.by_ranges,
            self.from_cache + other.from_cache,
            self.retries + other.retries,
            self.wait_s + other.wait_s,
        )


NO_TRAFFIC = Traffic()
