"""Divide rows into shards by the number of rows and the exact file size, before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PackError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.row import Row, row_error, size_of
from wdskit.tar.writer import END_BYTES, member_bytes

# A name cannot have slashes, a second %, and the characters with a meaning in patterns of shards.
_PATTERN = re.compile(r"([^%/\\{}\[\]*?:]*)%(?:0(\d{1,2}))?d([^%/\\{}\[\]*?:]*\.tar)")


MAX_SAMPLES = 10_000  # the default limits of a shard
MAX_BYTES = 1_000_000_000
NO_LIMIT = 1 << 62


class PlannedShard(NamedTuple):
    """One shard to write.

    Attributes:
        name: File name.
        num_samples: Samples in the shard.
        num_bytes: Bytes of the file; 0 if the samples are changed, because their sizes are not known yet.
    """

    name: str
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class Limits:
    """The largest allowed size of a shard, and the number of shards.

    Attributes:
        max_samples: The largest number of samples in a shard.
        max_bytes: The largest size of a shard's file, including headers, padding and end marker.
        num_shards: Number of shards. Their numbers of samples differ by at most one. With None, each shard gets as many
            samples as the limits allow.

    Raises:
        PackError: A value is not a whole number, or is too small.
    """

    max_samples: int
    max_bytes: int
    num_shards: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int and (value is not None or name in {"max_samples", "max_bytes"}):
                raise PackError(
                    f"{name}: {value!r} is not a whole number. In Python, pass a number, such as 1_000_000_000."
                )
        if self.max_samples < 1:
            raise PackError(f"max_samples: {self.max_samples} is too small; a shard holds at least one sample.")
        if self.max_bytes < END_BYTES + member_bytes(1):
            raise PackError(f"max_bytes: {self.max_bytes} is too small; an empty sample takes more.")
        if self.num_shards is not None and self.num_shards < 1:
            raise PackError(f"num_shards: {self.num_shards} is not a number of shards; it is 1 or more.")

    def described(self) -> dict[str, int | None]:
        """Return each limit by its attribute name, as values for JSON; None for no limit."""
        return {name: None if value == NO_LIMIT else value for name, value in vars(self).items()}


def make_limits(
    max_samples: int | None,
    max_bytes: int | None,
    *,
    num_shards: int | None = None,
    by_count: bool = False,
) -> Limits:
    """Return the limits of a shard, with default values.

    A limit that is None gets its default value or, if `num_shards` is set, `NO_LIMIT`. With `by_count`, the bytes of a
    shard are not limited, because the sizes of the samples are not known.

    Raises:
        PackError: A limit is too small or not a whole number, or `by_count` and `max_bytes` are both set.
    """
    if by_count:
        if max_bytes is not None:
            msg = "max_bytes: the sizes of changed samples are known too late for this limit."
            raise PackError(f"{msg}\n  Leave it out, and give --max-samples or --num-shards.")
        max_bytes = NO_LIMIT
    defaults = (MAX_SAMPLES, MAX_BYTES) if num_shards is None else (NO_LIMIT, NO_LIMIT)
    most = defaults[0] if max_samples is None else max_samples
    return Limits(most, defaults[1] if max_bytes is None else max_bytes, num_shards)


class RowRange(NamedTuple):
    """The rows [start, stop) of one shard, as places in the packing order.

    `num_bytes` is the size of a file with these rows, packed unchanged.
    """

    start: int
    stop: int
    num_bytes: int


class RowTooLarge(Exception):
    """The row at `place` in the packing order, from 0, is too large: its shard would have `num_bytes` bytes."""

    def __init__(self, place: int, num_bytes: int) -> None:
        super().__init__(place, num_bytes)
        self.place = place
        self.num_bytes = num_bytes


def divide(blocks: NDArray[Any], limits: Limits) -> list[RowRange]:
    """Divide rows into shards, in the order of the rows.

    A new shard begins where the next row would break a limit. With `limits.num_shards` the sample counts of the shards
    differ by at most one, and the larger shards come first.

    Args:
        blocks: Number of 512-byte blocks of each row, integers (num_rows,).
        limits: The limits of a shard.

    Raises:
        RowTooLarge: A row is larger than `max_bytes` allows.
        PackError: `num_shards` shards would be over the limits, or there are fewer rows than shards.
    """
    max_blocks = (limits.max_bytes - END_BYTES) // BLOCK_BYTES
    too_large = np.flatnonzero(blocks > max_blocks)
    if len(too_large):
        place = int(too_large[0])
        raise RowTooLarge(place, int(blocks[place]) * BLOCK_BYTES + END_BYTES)
    ends = blocks.astype(np.int64)
    np.cumsum(ends, out=ends)  # in place: `dtype=` would double the memory
    if limits.num_shards is None:
        return list(_divide_at_limits(ends, limits, max_blocks))
    return _divide_evenly(ends, limits, limits.num_shards)


def _divide_at_limits(ends: NDArray[np.int64], limits: Limits, max_blocks: int) -> Iterator[RowRange]:
    """Yield shards with as many rows as the limits allow. A shard has at most `max_blocks` blocks of 512 bytes.

    `ends[i]` is the number of blocks of the rows 0 to i together, int64 (num_rows,). No row may have more than
    `max_blocks` blocks.
    """
    start = done = 0
    while start < len(ends):
        most = ends[start : start + limits.max_samples]
        stop = start + int(most.searchsorted(done + max_blocks, side="right"))
        yield RowRange(start, stop, (int(ends[stop - 1]) - done) * BLOCK_BYTES + END_BYTES)
        start, done = stop, int(ends[stop - 1])


def _divide_evenly(ends: NDArray[np.int64], limits: Limits, num_shards: int) -> list[RowRange]:
    """Return `num_shards` shards. The first shards may have one row more than the last shards.

    `ends[i]` is the number of 512-byte blocks of the rows 0 to i together, int64 (num_rows,).
    Raises PackError if there are fewer rows than shards, or a shard exceeds the limits.
    """
    if num_shards > len(ends):
        msg = f"{len(ends)} samples cannot fill {num_shards} shards; each holds at least one. Use fewer shards."
        raise PackError(msg)
    least, more = divmod(len(ends), num_shards)
    numbers = np.arange(1, num_shards + 1)
    stops = numbers * least + np.minimum(numbers, more)
    sizes = np.diff(ends[stops - 1], prepend=0) * BLOCK_BYTES + END_BYTES
    what = ""
    if least + bool(more) > limits.max_samples:
        what = f"{least + bool(more)} samples, more than max_samples {limits.max_samples}"
    elif sizes.max() > limits.max_bytes:
        what = f"{sizes.max()} bytes, more than max_bytes {limits.max_bytes}"
    if what:
        msg = f"num_shards: with {num_shards} shards, one would have {what}."
        raise PackError(f"{msg}\n  Use more shards, or raise the limit.")
    return [RowRange(*three) for three in zip([0, *stops[:-1].tolist()], stops.tolist(), sizes.tolist(), strict=True)]


def row_bytes(row: Row) -> int:
    """Return the number of bytes that a row adds to a shard, with headers and padding."""
    return sum([member_bytes(size_of(data)) for _, data in row.fields])


class StreamedShard:
    """The rows of one shard, from a source that can be read only once. Iterate over the rows once.

    Args:
        first: The first row of the shard.
        rows: Iterator over all rows after `first`, including the rows of later shards.
        limits: The limits of the shard.

    Attributes:
        num_bytes: Bytes of a file with the rows yielded so far, packed unchanged.
        following: After the iteration: the first row of the next shard, or None if no row is left.
    """

    def __init__(self, first: Row, rows: Iterator[Row], limits: Limits) -> None:
        self.num_bytes = END_BYTES
        self.following: Row | None = first
        self._rows = rows
        self._limits = limits

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of the shard.

        Raises:
            RowError: A row of the shard, or the first row after it, is larger than `max_bytes` allows.
        """
        num_rows, most = 0, self._limits.max_bytes
        while self.following is not None:
            row = self.following
            added = row_bytes(row)
            if END_BYTES + added > most:
                problem = f"even alone in its shard it takes {END_BYTES + added} bytes, more than max_bytes {most}"
                raise row_error(row.where, problem, "Raise --max-bytes.")
            if num_rows and (num_rows == self._limits.max_samples or self.num_bytes + added > most):
                return
            num_rows += 1
            self.num_bytes += added
            yield row
            self.following = next(self._rows, None)


def divide_stream(rows: Iterable[Row], limits: Limits) -> Iterator[StreamedShard]:
    """Divide rows into shards while the rows are read. A new shard begins where the next row would break a limit.

    The caller must take all rows of a shard before it takes the next shard.
    """
    rows = iter(rows)
    row = next(rows, None)
    while row is not None:
        shard = StreamedShard(row, rows, limits)
        yield shard
        row = shard.following


class ShardNames:
    """File names of shards by number: `names[3]` is `train-000003.tar` for the `pattern` `train-%06d.tar`.

    Raises:
        PackError: The pattern does not have exactly one `%d` or `%0Nd`, does not end in `.tar`, begins with a dot, or
            contains a folder, a control character, or a character of brace patterns and globs.
    """

    def __init__(self, pattern: str) -> None:
        match = _PATTERN.fullmatch(pattern)
        if match is None or pattern.startswith(".") or not pattern.isprintable():
            msg = f"pattern: {pattern!r} must be a file name with one %0Nd that ends in .tar: train-%06d.tar."
            raise PackError(f"{msg}\n  No folder, no leading dot, and none of {{}}[]*?:\\ in it.")
        self.pattern = pattern
        self._width = int(match[2] or 1)
        self._regex = re.compile(f"{re.escape(match[1])}([0-9]{{1,18}}){re.escape(match[3])}")

    def __getitem__(self, number: int) -> str:
        """Return the name of shard `number`.

        Raises:
            PackError: The number has more digits than the N of `%0Nd`, so the names would not sort. With `%d` or
                `%01d`, every number has a name.
        """
        if self._width > 1 and number >= 10**self._width:
            raise PackError(f"pattern: {self.pattern!r} has no name for shard {number}. Use more digits.")
        return self.pattern % number

    def number_of(self, name: str) -> int | None:
        """Return the number of the shard with this name; None if the pattern does not match the name."""
        match = self._regex.fullmatch(name)
        if match is None or (self._width > 1 and len(match[1]) > self._width):
            return None
        number = int(match[1])
        return number if self.pattern % number == name else None


def names_of(folder: Path, pattern: str | None, splits: Iterable[str] | None) -> Sequence[ShardNames]:
    """Return the rule for the file names of the shards: one `ShardNames`, or one for each name in `splits`.

    The names of a split's shards begin with the split's name; `pattern` is then ignored. If both are None, the names
    begin with the name of `folder`.

    Raises:
        PackError: The pattern is invalid, or the name of the folder or of a split cannot begin a file name of a shard.
    """
    if splits is not None:
        return [ShardNames(f"{split}-%06d.tar") for split in splits]
    if pattern is not None:
        return [ShardNames(pattern)]
    try:
        return [ShardNames(f"{os.path.basename(os.path.abspath(folder)) or 'shard'}-%06d.tar")]
    except PackError as err:
        raise PackError(
            f"{folder}: shards cannot be named after this folder. Name them: --pattern train-%06d.tar."
        ) from err
