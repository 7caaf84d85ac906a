"""Many samples at once, by columns: what `LocalShard.read` gives for each, in a tenth of the time.

The samples are read into one buffer and their headers parsed together, the first of each, then the second, and so on.
A sample with anything in it that is not plain is read by `LocalShard.read`, which knows all forms and all errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.shard import LocalShard
from wdskit.files import Buffer
from wdskit.limits import BLOCK_BYTES
from wdskit.tar.columns import Headers, key_sizes, parse_headers, says_its_name, start_alike

LARGE_BYTES = 32 << 10  # a larger sample is cut into its fields at once, while it is in the cache

Ints = NDArray[np.int64]
Run = tuple[LocalShard, int, int]
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
        IndexError, ShardError, StorageError: As `LocalShard.read`.
    """
    raw = _read(runs)
    plain = locate(raw.data, raw.starts, raw.stops) if raw.data else _NOTHING
    if plain is None:
        return None
    if raw.new:
        _note_edges(raw, plain)
    if not raw.apart and len(plain.keys) == len(raw.data):
        return Many(plain.keys, {name: Spans(raw.data, *at) for name, at in plain.fields.items()})
    return _mixed(runs, raw, plain, viewed)


class _Raw(NamedTuple):
    """Bytes of samples that have been read and not looked at yet.

    Attributes:
        data: For each small sample, bytes with it in them, and in these
        starts: where it starts, and
        stops: where it ends, with one block more behind it.
        apart: The others, which `LocalShard.read` has to read, by their place among all.
        new: Runs of small samples of which it is not known that they start and end where the offsets say, each with the
            place of its first sample among all.
        before: For each of `new`, bytes with the sample before it in them, and where in them it ends; None where its
            start is known.
    """

    data: list[Buffer]
    starts: list[int]
    stops: list[int]
    apart: set[int]
    new: list[tuple[int, Run]]
    before: list[tuple[Buffer, int] | None]

    def rows(self) -> list[int]:
        """The places of the small samples among all."""
        num_rows = len(self.data) + len(self.apart)
        return [row for row in range(num_rows) if row not in self.apart] if self.apart else [*range(num_rows)]

    def without(self, runs: Sequence[tuple[int, Run]]) -> _Raw:
        """The same with the samples of some runs put apart."""
        apart = {row + at for row, (_, _, count) in runs for at in range(count)}
        kept = [place for place, row in enumerate(self.rows()) if row not in apart]
        return self._replace(
            data=[self.data[place] for place in kept],
            starts=[self.starts[place] for place in kept],
            stops=[self.stops[place] for place in kept],
            apart=self.apart | apart,
        )


def _read(runs: Sequence[Run]) -> _Raw:
    """Read what is not for `LocalShard.read`. Written flat: this is half of what a small sample costs."""
    data: list[Buffer] = []
    starts: list[int] = []
    stops: list[int] = []
    apart: set[int] = set()
    new: list[tuple[int, Run]] = []
    before: list[tuple[Buffer, int] | None] = []
    pread = os.pread
    for shard, first, count in runs:
        offsets, edges = shard.offsets, shard.edges
        start = wanted = offsets[first]
        stop = offsets[first + count]
        if not edges[first]:
            start = offsets[first - 1]
        if stop - wanted > count * LARGE_BYTES or wanted - start > LARGE_BYTES:
            row = len(data) + len(apart)
            apart.update(range(row, row + count))
            continue
        size = stop - start + BLOCK_BYTES
        try:
            part = pread(shard.file.fd, size, start)
        except OSError:
            part = b""
        if len(part) != size:
            part = shard.read_at(start, size)  # which goes on where it stopped, or says what is wrong
        if not edges[first] or edges.find(0, first + 1, first + count + 1) >= 0:
            new.append((len(data) + len(apart), (shard, first, count)))
            before.append((part, wanted - start) if start < wanted else None)
        if count == 1:
            data.append(part)
            starts.append(wanted - start)
            stops.append(stop - start)
        else:
            ends = [offset - start for offset in offsets[first : first + count + 1]]
            data += [part] * count
            starts += ends[:-1]
            stops += ends[1:]
    raw = _Raw(data, starts, stops, apart, new, before)
    return _with_starts(raw) if new else raw


def _with_starts(raw: _Raw) -> _Raw:
    """With runs apart whose first sample may not start where the offsets say: the member before may be of its key."""
    asked = [(run, *before) for run, before in zip(raw.new, raw.before, strict=True) if before is not None]
    if not asked:
        return raw
    good = _parse([data for _, data, _ in asked], [0] * len(asked), [stop for _, _, stop in asked])[1]
    if good.all():
        return raw
    others = [run for (run, _, _), is_good in zip(asked, good.tolist(), strict=True) if not is_good]
    return raw.without(others)._replace(new=[run for run in raw.new if run not in others])


def _note_edges(raw: _Raw, plain: Located) -> None:
    """Let shards know of the new samples that are good where they start and end."""
    rows = raw.rows()
    good = {rows[place] for place in plain.rows.tolist()}
    for row, (shard, first, count) in raw.new:
        if good.issuperset(range(row, row + count)):
            shard.note_edges(first, count + 1)


def _mixed(runs: Sequence[Run], raw: _Raw, plain: Located, viewed: Callable[[str], bool]) -> Many | None:
    """The samples in their order, where `LocalShard.read` has to read some."""
    samples = [(shard, first + at) for shard, first, count in runs for at in range(count)]
    rows = raw.rows()
    places = {rows[at]: place for place, at in enumerate(plain.rows.tolist())}
    many: Many | None = None
    for row, (shard, number) in enumerate(samples):
        place = places.get(row)
        fields: dict[str, tuple[Buffer, int, int]]
        if place is None:
            key, views = shard.read(number)
            fields = {name: (view if viewed(name) else bytes(view), 0, len(view)) for name, view in views.items()}
        else:
            key, whole = plain.keys[place], raw.data[int(plain.rows[place])]
            fields = {name: (whole, starts[place], stops[place]) for name, (starts, stops) in plain.fields.items()}
        many = many or Many([], {name: Spans([], [], []) for name in fields})
        if [*fields] != [*many.fields]:
            return None
        many.keys.append(key)
        for name, (data, start, stop) in fields.items():
            many.fields[name].add(data, start, stop)
    return many


_Fields = dict[str, tuple[list[int], list[int]]]


class Located(NamedTuple):
    """Samples of plain members in a buffer.

    Attributes:
        rows: Which of the samples that were looked for they are, int64 (n,), ascending.
        keys: Their keys.
        fields: Where the data of each field start and stop, in the order of the members.
    """

    rows: Ints
    keys: list[str]
    fields: _Fields


_NOTHING = Located(np.empty(0, dtype=np.int64), [], {})


class _Round(NamedTuple):
    """The n-th member of each sample that has so many."""

    rows: Ints
    headers: Headers
    key_sizes: Ints
    starts: Ints
    stops: Ints

    def chosen(self, good: NDArray[np.bool_]) -> _Round:
        """The members of good samples only."""
        at = good[self.rows]
        return _Round(self.rows[at], self.headers.chosen(at), self.key_sizes[at], self.starts[at], self.stops[at])


def locate(data: Sequence[Buffer], starts: Sequence[int], stops: Sequence[int]) -> Located | None:
    """Parse samples, as far as they are plain members of one key which the member behind has not.

    Args:
        data: For each sample bytes with it in them, at least one; behind it stands the header of the next member, or
            the end marker.
        starts: Where in them it starts.
        stops: Where it ends.

    Returns:
        The samples that are so; None where their fields are not the same.
    """
    rounds, good = _parse(data, starts, stops)
    fields = _common_fields(rounds, good)
    names, sizes = rounds[0].headers.names, rounds[0].key_sizes
    return None if fields is None else Located(np.flatnonzero(good), _keys(names[good], sizes[good]), fields)


def _parse(
    data: Sequence[Buffer], starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[_Round], NDArray[np.bool_]]:
    """The members of samples, round by round, and which samples are as `locate` wants them, whatever their fields."""
    ends = np.array(stops)
    good = np.ones(len(data), dtype=np.bool_)
    rounds: list[_Round] = []
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
        rounds.append(_Round(rows, headers, sizes, first, first + headers.sizes))
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


def _common_fields(rounds: Sequence[_Round], good: NDArray[np.bool_]) -> _Fields | None:
    """Where each field of the good samples stands; None where they have not all the same."""
    fields: _Fields = {}
    for each in rounds:
        chosen = each if good.all() else each.chosen(good)
        if len(chosen.rows):
            name = _common_field(chosen) if len(chosen.rows) == good.sum() else None
            if name is None or name in fields or name.startswith("__"):
                return None
            fields[name] = chosen.starts.tolist(), chosen.stops.tolist()
    return fields


def _keys(names: NDArray[np.uint8], sizes: Ints) -> list[str]:
    text, width = names.tobytes().decode("ascii"), names.shape[1]
    starts = range(0, len(text), width)
    return [text[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]


def _common_field(each: _Round) -> str | None:
    """The field of all members of a round, None where they differ."""
    names, firsts = each.headers.names, each.key_sizes + 1
    lengths = each.headers.name_sizes - firsts
    first, length = int(firsts[0]), int(lengths[0])
    if (lengths != length).any():
        return None
    if (firsts == first).all():
        found = names[:, first : first + length]
    else:
        found = names[np.arange(len(names))[:, None], firsts[:, None] + np.arange(length)]
    return found[0].tobytes().decode("ascii").lower() if (found == found[0]).all() else None
