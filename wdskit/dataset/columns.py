"""Many samples at once, by columns: what `IndexedShard.read` gives for each, in a tenth of the time.

The samples are read into one buffer and their headers parsed together, the first of each, then the second, and so on.
A sample with anything in it that is not plain is read by `IndexedShard.read`, which knows all forms and all errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.shard import IndexedShard
from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES
from wdskit.tar.columns import Headers, key_sizes, parse_headers, says_its_name, start_alike

LARGE_BYTES = 32 << 10  # a larger sample is cut into its fields at once, while it is in the cache

Ints = NDArray[np.int64]
Run = tuple[IndexedShard, int, int]
"""Consecutive samples of a shard: the first one's number, and how many."""


class Spans(NamedTuple):
    """One field of many samples: bytes `starts[i]` to `stops[i]` of `data[i]`."""

    data: list[Buffer]
    starts: list[int]
    stops: list[int]

    def add(self, data: Buffer, start: int, stop: int) -> None:
        """Append the field of another sample."""
        self.data.append(data)
        self.starts.append(start)
        self.stops.append(stop)

    def part(self, at: slice) -> Spans:
        """Some of them."""
        return Spans(self.data[at], self.starts[at], self.stops[at])

    def cut(self) -> list[bytes]:
        """The field's bytes."""
        return [bytes(data[start:stop]) for data, start, stop in zip(*self, strict=True)]


class Many(NamedTuple):
    """Samples by columns: their keys, and their fields in the order of the members, which is that of all."""

    keys: list[str]
    fields: dict[str, Spans]


def read_samples(runs: Sequence[Run], *, viewed: Callable[[str], bool]) -> Many | None:
    """The samples of some runs, in their order; None where their fields, or the order of those, are not the same.

    Args:
        runs: Each is read at once.
        viewed: Whether a field's bytes are only looked at, so that they need not be copied out of a large sample.

    Raises:
        IndexError, ShardError, StorageError: As `IndexedShard.read`.
    """
    raw = _read(runs)
    num_small = len(raw.places)
    if not num_small:
        return _read_apart(runs, raw, [], [], {}, viewed)
    rounds, good = parse_samples(raw.data, raw.starts, raw.stops)
    if raw.checks:
        _check_edges(raw.checks, good)
        good[num_small:] = False
    fields = _common_fields(rounds, good)
    if fields is None:
        return None
    keys = _keys(rounds[0].headers.names[good], rounds[0].key_sizes[good])
    if len(keys) == raw.num_samples:
        return Many(keys, {name: Spans(raw.data[:num_small], *at) for name, at in fields.items()})
    return _read_apart(runs, raw, np.flatnonzero(good).tolist(), keys, fields, viewed)


class _Raw(NamedTuple):
    """Bytes of samples that have been read and not looked at yet.

    Attributes:
        data: For each small sample, bytes with it in them, and in these
        starts: where it starts, and
        stops: where it ends, with one block more behind it. Behind the small samples stand those before some runs.
        places: Of each small sample, its place among all. `IndexedShard.read` has to read the others.
        num_samples: How many samples there are in all.
        checks: Runs of small samples of which it is not known that they start and end where the offsets say: the run,
            where in `data` its first sample stands, and where the sample before it; -1 where its start is known.
    """

    data: list[Buffer]
    starts: list[int]
    stops: list[int]
    places: list[int]
    num_samples: int
    checks: list[tuple[Run, int, int]]


def _read(runs: Sequence[Run]) -> _Raw:
    """Read what is not for `IndexedShard.read`. Written flat: this is half of what a small sample costs."""
    data: list[Buffer] = []
    starts: list[int] = []
    stops: list[int] = []
    places: list[int] = []
    checks: list[tuple[Run, int, int]] = []
    before: list[tuple[Buffer, int]] = []  # bytes with the sample before a run in front, and where that ends
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
            part = pread(fd, size, start) if fd >= 0 else b""  # which only a local file has
        except OSError:
            part = b""
        if len(part) != size:
            part = shard.read_at(start, size)  # which goes on where it stopped, or says what is wrong
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
    return _Raw(data, starts, stops, places, num_samples, checks)


def _check_edges(checks: Sequence[tuple[Run, int, int]], good: NDArray[np.bool_]) -> None:
    """Let shards know of new samples that are good where they start and end. Those behind a sample that is not good may
    go on with its key: they are not good either.
    """
    known = good.tolist()
    for (shard, first, count), row, before in checks:
        if before >= 0 and not known[before]:
            good[row : row + count] = False
        elif all(known[row : row + count]):
            shard.edges[first : first + count + 1] = b"\1" * (count + 1)


def _read_apart(
    runs: Sequence[Run],
    raw: _Raw,
    rows: list[int],
    keys: list[str],
    fields: _Fields,
    viewed: Callable[[str], bool],
) -> Many | None:
    """The samples in their order, where `IndexedShard.read` has to read some; those of `rows` are known."""
    known = {raw.places[row]: at for at, row in enumerate(rows)}
    samples = ((shard, first + at) for shard, first, count in runs for at in range(count))
    many: Many | None = None
    for place, (shard, number) in enumerate(samples):
        at = known.get(place)
        found: dict[str, tuple[Buffer, int, int]]
        if at is None:
            key, views = shard.read(number)
            found = {name: (view if viewed(name) else bytes(view), 0, len(view)) for name, view in views.items()}
        else:
            key, whole = keys[at], raw.data[rows[at]]
            found = {name: (whole, starts[at], stops[at]) for name, (starts, stops) in fields.items()}
        many = many or Many([], {name: Spans([], [], []) for name in found})
        if [*found] != [*many.fields]:
            return None
        many.keys.append(key)
        for name, span in found.items():
            many.fields[name].add(*span)
    return many


_Fields = dict[str, tuple[list[int], list[int]]]
"""Where the data of each field start and stop, in the order of the members."""


class Round(NamedTuple):
    """The n-th member of each sample that has so many."""

    rows: Ints
    headers: Headers
    key_sizes: Ints
    starts: Ints
    stops: Ints


def parse_samples(
    data: Sequence[Buffer], starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[Round], NDArray[np.bool_]]:
    """Parse the members of samples round by round.

    Args:
        data: For each sample bytes with it in them, at least one; behind it stands the header of the next member, or
            the end marker.
        starts: Where in them it starts.
        stops: Where it ends.

    Returns:
        The rounds, and which samples are plain members of one key that the member behind has not, bool (n,).
    """
    ends = np.array(stops)
    good = np.ones(len(data), dtype=np.bool_)
    rounds: list[Round] = []
    rows, at = np.arange(len(data)), np.array(starts)
    while len(rows):
        chosen = data if len(rows) == len(data) else [data[row] for row in rows.tolist()]
        headers = parse_headers(_blocks(chosen, at.tolist(), BLOCK_BYTES))
        sizes = key_sizes(headers)
        first = at + BLOCK_BYTES
        after = first + -(-headers.sizes // BLOCK_BYTES) * BLOCK_BYTES
        fine = headers.plain & (sizes > 0) & (after <= ends[rows])
        if rounds:
            fine &= sizes == rounds[0].key_sizes[rows]
            fine &= start_alike(headers.names, rounds[0].headers.names[rows], sizes)
        good[rows[~fine]] = False
        rounds.append(Round(rows, headers, sizes, first, first + headers.sizes))
        more = fine & (after < ends[rows])
        rows, at = rows[more], after[more]
    names, sizes = rounds[0].headers.names, rounds[0].key_sizes
    behind = _blocks(data, stops, BLOCK_BYTES)
    good &= ~start_alike(behind[:, : names.shape[1]], names, sizes + 1)  # with the dot
    good &= says_its_name(behind)
    return rounds, good


def _blocks(data: Sequence[Buffer], starts: Sequence[int], size: int) -> NDArray[np.uint8]:
    """`size` bytes from `starts[i]` of each of `data`, uint8 (n, size)."""
    parts = [one[start : start + size] for one, start in zip(data, starts, strict=True)]
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(-1, size)


def _common_fields(rounds: Sequence[Round], good: NDArray[np.bool_]) -> _Fields | None:
    """Where each field of the good samples stands; None where they have not all the same."""
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
    """The field that all names end in, from their bytes `firsts` on; None where they differ."""
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
