"""Read many samples at once into columns, ten times as fast as `IndexedShard.read`.

Each run of small consecutive samples is one read, and plain headers are parsed together with numpy.
`IndexedShard.read` reads large samples, and samples with any other header.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.shard import IndexedShard
from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES
from wdskit.native import native
from wdskit.tar.columns import Headers, has_inline_name, have_equal_starts, key_sizes, parse_headers

LARGE_BYTES = 32 << 10  # larger samples are read one by one, and parsed while they are in the CPU cache

Ints = NDArray[np.int64]
Run = tuple[IndexedShard, int, int]
"""Consecutive samples of a shard: the shard, the number of the first sample, and the number of samples."""


class Spans(NamedTuple):
    """One field of many samples. The field of sample i is `data[i][starts[i]:stops[i]]`, or the whole `data[i]` if
    `starts` and `stops` are empty.
    """

    data: list[Buffer]
    starts: list[int]
    stops: list[int]

    def add(self, data: Buffer, start: int, stop: int) -> None:
        """Append the field of one more sample: `data[start:stop]`. All samples before it must have a start and stop."""
        self.data.append(data)
        self.starts.append(start)
        self.stops.append(stop)

    def part(self, at: slice) -> Spans:
        """Return the field of the samples in a slice."""
        return Spans(self.data[at], self.starts[at], self.stops[at])

    def ranges(self) -> Iterable[tuple[Buffer, int, int]]:
        """Return (data, start, stop) for each sample: the field is `data[start:stop]`."""
        if self.starts or not self.data:
            return zip(*self, strict=True)
        return ((data, 0, len(data)) for data in self.data)

    def to_bytes(self) -> list[bytes]:
        """Return the field of each sample as bytes."""
        if self.starts or not self.data:
            return [bytes(data[start:stop]) for data, start, stop in zip(*self, strict=True)]
        return cast("list[bytes]", self.data.copy())


class SampleColumns(NamedTuple):
    """Samples as columns: the key of each sample, and each field of all samples by name. All samples have the same
    fields in the same order.
    """

    keys: list[str]
    fields: dict[str, Spans]


def read_natively(shards: Sequence[IndexedShard], rows: Ints, numbers: Ints) -> SampleColumns | None:
    """Read sample `numbers[i]` of the local shard `shards[rows[i]]`, for each i, with wdskit-native. Return None if
    `read_samples` must read the samples instead: wdskit-native is not installed, a header is not plain, a sample cannot
    be read, or the samples differ in their fields.
    """
    module = native()
    if module is None:
        return None
    found = module.read_samples([shard.handle for shard in shards], rows, numbers)
    if found is None:
        return None
    keys, names, columns = found
    return SampleColumns(keys, {name: Spans(column, [], []) for name, column in zip(names, columns, strict=True)})


def read_samples(runs: Sequence[Run], *, viewed: Callable[[str], bool]) -> SampleColumns | None:
    """Read the samples of runs in order. Return None if `runs` is empty, or if the samples differ in their fields or in
    the fields' order. A repeated or reserved field gives None or a ShardError.

    Args:
        runs: Runs of consecutive samples. A run of small samples is one read.
        viewed: Called with the name of a field. Returns True if a field of a large sample may be a view of the sample's
            bytes; otherwise the field is copied.

    Raises:
        IndexError: The number of a sample is out of range.
        ShardError: The bytes are not whole samples.
        StorageError: A shard is closed, or the disk or the store fails.
    """
    raw = _read_small(runs)
    num_small = len(raw.places)
    if not num_small:
        return _merge_samples(runs, raw, [], [], {}, viewed)
    rounds, good = parse_samples(raw.data, raw.starts, raw.stops)
    if raw.checks:
        _check_edges(raw.checks, good)
        good[num_small:] = False
    fields = _common_fields(rounds, good)
    if fields is None:
        return None
    keys = _keys(rounds[0].headers.names[good], rounds[0].key_sizes[good])
    if len(keys) == raw.num_samples:
        return SampleColumns(keys, {name: Spans(raw.data[:num_small], *at) for name, at in fields.items()})
    return _merge_samples(runs, raw, np.flatnonzero(good).tolist(), keys, fields, viewed)


class _RawSamples(NamedTuple):
    """Bytes of samples that have been read and not parsed yet.

    Attributes:
        data: For each small sample (see `_read_small`), bytes that contain the sample. After them, for each run of
            small samples whose start is not verified, bytes that contain the sample before the run.
        starts: For each item of `data`, where its sample starts in the item.
        stops: For each item of `data`, where its sample ends in the item. At least 512 bytes follow.
        places: Index of each small sample among the samples of all runs.
        num_samples: Number of the samples of all runs, small or not.
        checks: (run, row, before) for each run of small samples with an offset that is not verified yet
            (`IndexedShard.edges`). `row` is the index in `data` of the run's first sample. `before` is the index in
            `data` of the sample before the run, or -1 if the start of the run is verified.
    """

    data: list[Buffer]
    starts: list[int]
    stops: list[int]
    places: list[int]
    num_samples: int
    checks: list[tuple[Run, int, int]]


def _read_small(runs: Sequence[Run]) -> _RawSamples:
    """Read the bytes of the small samples. Skip large samples. `read_samples` lists the errors.

    The samples of a run are small if their mean size is at most `LARGE_BYTES`. If the run's first offset is not
    verified yet, the sample before the run is read too, and this sample must also have at most `LARGE_BYTES`.
    """
    data: list[Buffer] = []  # the code is flat because it is half of the cost of a small sample
    starts: list[int] = []
    stops: list[int] = []
    places: list[int] = []
    checks: list[tuple[Run, int, int]] = []
    before: list[tuple[Buffer, int]] = []  # bytes that start with the sample before a run, and its end
    num_samples = 0
    pread = os.pread
    for run in runs:
        shard, first, count = run
        offsets, edges = shard.offsets, shard.edges
        start = wanted = offsets[first]
        stop = offsets[first + count]
        if not edges[first]:
            start = offsets[first - 1]
        num_samples += count
        if stop - wanted > count * LARGE_BYTES or wanted - start > LARGE_BYTES:
            continue
        size = stop - start + BLOCK_BYTES
        fd = shard.file.fd
        try:
            part = pread(fd, size, start) if fd >= 0 else b""  # only a local file has a descriptor
        except OSError:
            part = b""
        if len(part) != size:
            part = shard.read_at(start, size)  # reads until it has all bytes, or raises
        if not edges[first] or edges.find(0, first + 1, first + count + 1) >= 0:
            checks.append((run, len(data), len(before) if start < wanted else -1))
            if start < wanted:
                before.append((part, wanted - start))
        if count == 1:
            data.append(part)
            starts.append(wanted - start)
            stops.append(stop - start)
            places.append(num_samples - 1)
        else:
            ends = [offset - start for offset in offsets[first : first + count + 1]]
            data += [part] * count
            starts += ends[:-1]
            stops += ends[1:]
            places += range(num_samples - count, num_samples)
    if before:
        checks = [(run, row, guard if guard < 0 else guard + len(data)) for run, row, guard in checks]
        data += [part for part, _ in before]
        starts += [0] * len(before)
        stops += [stop for _, stop in before]
    return _RawSamples(data, starts, stops, places, num_samples, checks)


def _check_edges(checks: Sequence[tuple[Run, int, int]], good: NDArray[np.bool_]) -> None:
    """Verify the offsets of each run of `checks` (see `_RawSamples`). `good` is the result of `parse_samples`, with one
    value for each item of `_RawSamples.data`.

    If the sample before a run is not good, set `good` to False for the samples of the run. Otherwise, if all samples of
    the run are good, set the values of `IndexedShard.edges` from the run's start to its end to 1.
    """
    known = good.tolist()
    for (shard, first, count), row, before in checks:
        if before >= 0 and not known[before]:
            good[row : row + count] = False
        elif all(known[row : row + count]):
            shard.edges[first : first + count + 1] = b"\1" * (count + 1)


def _merge_samples(
    runs: Sequence[Run],
    raw: _RawSamples,
    rows: list[int],
    keys: list[str],
    fields: _Fields,
    viewed: Callable[[str], bool],
) -> SampleColumns | None:
    """Merge parsed samples with samples that are read now, in order. Return None if `runs` is empty, or if the samples
    differ in their fields or in the fields' order. `IndexedShard.read` lists the errors.

    Args:
        runs: The runs of all samples.
        raw: The bytes of the small samples.
        rows: Index in `raw.data` of each parsed sample. All other samples are read by `IndexedShard.read`.
        keys: Key of each parsed sample.
        fields: Fields of the parsed samples.
        viewed: As for `read_samples`.
    """
    known = {raw.places[row]: at for at, row in enumerate(rows)}
    samples = ((shard, first + at) for shard, first, count in runs for at in range(count))
    merged: SampleColumns | None = None
    for place, (shard, number) in enumerate(samples):
        at = known.get(place)
        found: dict[str, tuple[Buffer, int, int]]
        if at is None:
            key, views = shard.read(number)
            found = {name: (view if viewed(name) else bytes(view), 0, len(view)) for name, view in views.items()}
        else:
            key, whole = keys[at], raw.data[rows[at]]
            found = {name: (whole, starts[at], stops[at]) for name, (starts, stops) in fields.items()}
        merged = merged or SampleColumns([], {name: Spans([], [], []) for name in found})
        if [*found] != [*merged.fields]:
            return None
        merged.keys.append(key)
        for name, span in found.items():
            merged.fields[name].add(*span)
    return merged


_Fields = dict[str, tuple[list[int], list[int]]]
"""Starts and stops of each field in the data of all samples; fields in the order of their members."""


class MemberRound(NamedTuple):
    """The n-th members of all samples that have at least n members.

    Attributes:
        rows: Numbers of these samples.
        headers: Headers of the members.
        key_sizes: Number of bytes of the key in each member's name.
        starts: Where the data of each member starts, in the bytes of its sample.
        stops: Where the data of each member ends, in the same bytes.
    """

    rows: Ints
    headers: Headers
    key_sizes: Ints
    starts: Ints
    stops: Ints


def parse_samples(
    data: Sequence[Buffer], starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[MemberRound], NDArray[np.bool_]]:
    """Parse the headers of n samples, at least one, with numpy.

    Args:
        data: For each sample, bytes with the sample and the 512 bytes after it.
        starts: Where each sample starts in its bytes.
        stops: Where each sample ends in its bytes.

    Returns:
        (rounds, good). `rounds` has the first members of all samples, then the second members, and so on. `good`, bool
        (n,), is True for a sample of plain members with one key, if the block after the sample is the end marker, or a
        header that has a whole name with another key.
    """
    ends = np.array(stops)
    good = np.ones(len(data), dtype=np.bool_)
    rounds: list[MemberRound] = []
    rows, at = np.arange(len(data)), np.array(starts)
    while len(rows):
        chosen = data if len(rows) == len(data) else [data[row] for row in rows.tolist()]
        headers = parse_headers(_blocks(chosen, at.tolist()))
        sizes = key_sizes(headers)
        first = at + BLOCK_BYTES
        after = first + -(-headers.sizes // BLOCK_BYTES) * BLOCK_BYTES
        fine = headers.plain & (sizes > 0) & (after <= ends[rows])
        if rounds:
            fine &= sizes == rounds[0].key_sizes[rows]
            fine &= have_equal_starts(headers.names, rounds[0].headers.names[rows], sizes)
        good[rows[~fine]] = False
        rounds.append(MemberRound(rows, headers, sizes, first, first + headers.sizes))
        more = fine & (after < ends[rows])
        rows, at = rows[more], after[more]
    names, sizes = rounds[0].headers.names, rounds[0].key_sizes
    next_blocks = _blocks(data, stops)
    good &= ~have_equal_starts(next_blocks[:, : names.shape[1]], names, sizes + 1)  # with the dot
    good &= has_inline_name(next_blocks)
    return rounds, good


def _blocks(data: Sequence[Buffer], starts: Sequence[int]) -> NDArray[np.uint8]:
    """Return the 512 bytes from `starts[i]` of each `data[i]`, uint8 (n, 512)."""
    parts = [one[start : start + BLOCK_BYTES] for one, start in zip(data, starts, strict=True)]
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(-1, BLOCK_BYTES)


def _common_fields(rounds: Sequence[MemberRound], good: NDArray[np.bool_]) -> _Fields | None:
    """Return where each field of the good samples starts and ends, by name; empty if no sample is good. Return None if
    the good samples differ in their fields, or if they have a field twice or a field with a reserved name.
    """
    fields: _Fields = {}
    num_good = np.count_nonzero(good)
    for each in rounds:
        at = slice(None) if num_good == len(good) else good[each.rows]
        names = each.headers.names[at]
        if not len(names):
            continue
        name = _common_field(names, each.headers.name_sizes[at], each.key_sizes[at] + 1)
        if len(names) < num_good or name is None or name in fields or name.startswith("__"):
            return None
        fields[name] = each.starts[at].tolist(), each.stops[at].tolist()
    return fields


def _common_field(names: NDArray[np.uint8], name_sizes: Ints, firsts: Ints) -> str | None:
    """Return the field that all members have, in lower case. Return None if their fields differ, even in letter case
    only. The field in the member name `names[i]` starts at byte `firsts[i]` and ends before byte `name_sizes[i]`.
    """
    lengths = name_sizes - firsts
    first, length = int(firsts[0]), int(lengths[0])
    if (lengths != length).any():
        return None
    if (firsts == first).all():
        found = names[:, first : first + length]
    else:
        found = names[np.arange(len(names))[:, None], firsts[:, None] + np.arange(length)]
    return found[0].tobytes().decode("ascii").lower() if (found == found[0]).all() else None


def _keys(names: NDArray[np.uint8], sizes: Ints) -> list[str]:
    text, width = names.tobytes().decode("ascii"), names.shape[1]
    starts = range(0, len(text), width)
    return [text[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]
