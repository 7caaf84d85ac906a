"""What is read from stores, in numbers."""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """What came from stores, and from parts of their objects that are kept on a disk.

    Attributes:
        fetched: Bytes that came from a store, with what was fetched ahead, or twice.
        by_ranges: Bytes of samples that were read from a store, and
        from_cache: those that were read from parts.
        retries: Requests that were tried again.
        wait_s: How long threads waited for the samples that were read from a store, together.
    """

    fetched: int = 0
    by_ranges: int = 0
    from_cache: int = 0
    retries: int = 0
    wait_s: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.fetched + other.fetched,
            self.by_ranges + other.by_ranges,
            self.from_cache + other.from_cache,
            self.retries + other.retries,
            self.wait_s + other.wait_s,
        )


NO_TRAFFIC = Traffic()
