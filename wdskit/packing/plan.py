"""Which rows go into which shard: by their number and by the true size of the file, decided before anything is
written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from wdskit.errors import PackError
from wdskit.packing.rows import Row, row_error
from wdskit.tar.writer import END_BYTES, member_bytes

# Not in a name: what ends it, what a pattern of shards would read as more than a name, a second %.
_PATTERN = re.compile(r"([^%/\\{}\[\]*?:]*)%(?:0(\d{1,2}))?d([^%/\\{}\[\]*?:]*\.tar)")


@dataclass(frozen=True)
class Limits:
    """How large a shard may become.

    Attributes:
        max_samples: Most samples.
        max_bytes: Most bytes of the file, headers, padding and end marker included.
    """

    max_samples: int
    max_bytes: int

    def __post_init__(self) -> None:
        for name, value in (("max_samples", self.max_samples), ("max_bytes", self.max_bytes)):
            if type(value) is not int:
                raise PackError(f"{name}: {value!r} is no whole number. From Python it is a number, as 1_000_000_000.")
        if self.max_samples < 1:
            raise PackError(f"max_samples: {self.max_samples} is too small; a shard holds at least one sample.")
        if self.max_bytes < END_BYTES + member_bytes(1):
            raise PackError(f"max_bytes: {self.max_bytes} is too small; an empty sample takes more.")


class Shard(NamedTuple):
    """The rows of one shard, in order, and the bytes that its file will have."""

    rows: tuple[Row, ...]
    num_bytes: int


def row_bytes(row: Row) -> int:
    """Bytes that a row adds to a shard."""
    return sum(map(member_bytes, row.sizes()))


def fill_in_turn(rows: Iterable[Row], limits: Limits) -> Iterator[Shard]:
    """The shards: rows in their order, a new shard where the next one would break a limit.

    Raises:
        RowError: A row alone is over `max_bytes`.
    """
    shard: list[Row] = []
    num_bytes = END_BYTES
    for row in rows:
        added = row_bytes(row)
        if END_BYTES + added > limits.max_bytes:
            problem = (
                f"its shard would have {END_BYTES + added} bytes, over max_bytes {limits.max_bytes}, with it alone"
            )
            raise row_error(row.where, problem, "Raise --max-bytes.")
        if shard and (len(shard) == limits.max_samples or num_bytes + added > limits.max_bytes):
            yield Shard(tuple(shard), num_bytes)
            shard, num_bytes = [], END_BYTES
        shard.append(row)
        num_bytes += added
    if shard:
        yield Shard(tuple(shard), num_bytes)


class Names:
    """File names of shards by number, from a pattern such as `train-%06d.tar`.

    Raises:
        PackError: The pattern has not one `%d` or `%0Nd`, does not end in `.tar`, or holds what the name of a shard
            cannot: a folder, control characters, or what brace patterns and globs are made of.
    """

    def __init__(self, pattern: str) -> None:
        match = _PATTERN.fullmatch(pattern)
        if match is None or pattern.startswith(".") or not pattern.isprintable():
            msg = f"pattern: {pattern!r} must be a file name with one %0Nd that ends in .tar: train-%06d.tar."
            raise PackError(f"{msg}\n  No folder, no leading dot, and none of {{}}[]*?:\\ in it.")
        self._pattern = pattern
        self._width = int(match[2] or 1)
        self._known = re.compile(f"{re.escape(match[1])}([0-9]{{1,18}}){re.escape(match[3])}")

    def __getitem__(self, number: int) -> str:
        """The name of shard `number`.

        Raises:
            PackError: The number has more digits than the pattern, so that names would not sort.
        """
        if self._width > 1 and number >= 10**self._width:
            raise PackError(f"pattern: {self._pattern!r} has no name for shard {number}. Use more digits.")
        return self._pattern % number

    def number_of(self, name: str) -> int | None:
        """The number of the shard that has this name, None where the pattern does not give it."""
        match = self._known.fullmatch(name)
        if match is None or (self._width > 1 and len(match[1]) > self._width):
            return None
        number = int(match[1])
        return number if self._pattern % number == name else None
