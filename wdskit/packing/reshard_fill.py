"""Filling one shard with samples of others: what runs in each process.

What is written is looked at as if somebody else had made it: each sample must stand where it was planned, under the key
that it was planned with, in headers that are ours to the byte. So a source that changed since is noticed, and so is a
mistake here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wdskit.dataset.index import NO_EXPORTS, Exports, ShardEntry
from wdskit.dataset.lock import hold
from wdskit.dataset.samples import read_span
from wdskit.dataset.shard import digest_offsets, write_offsets
from wdskit.errors import PackError, ShardError
from wdskit.export.api import export_shard, new_members
from wdskit.export.dali import ShardMembers
from wdskit.files import DISK, Disk, publish
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.fill import OnSample
from wdskit.packing.reshard_fields import Changes, find_fields
from wdskit.packing.reshard_look import Bools, Bytes, Ints, Look, hash_keys, look_at
from wdskit.packing.reshard_read import Sources, blocks_in, read_into
from wdskit.packing.reshard_samples import Samples
from wdskit.tar.header import build_header
from wdskit.tar.reader import locate_members
from wdskit.tar.walk import Span
from wdskit.tar.writer import END_BYTES, member_bytes

BATCH_BYTES = 4 << 20
# For each number of bytes that data leave in their last block, a mask over the others.
_BEHIND = ((np.arange(BLOCK_BYTES) >= np.arange(BLOCK_BYTES)[:, None]) * np.uint8(255)).view(np.uint64)


@dataclass(frozen=True)
class ReshardJob:
    """A shard to fill: its file, its samples in order, the bytes that it will have, what happens to the samples that
    are not copied, and what is kept beside it.
    """

    path: Path
    samples: Samples
    num_bytes: int
    changes: Changes
    also: Exports = NO_EXPORTS


def fill_in_worker(job: ReshardJob, *, held: Path, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: the log of its run is held until the process ends."""
    hold(held)
    return fill_shard(job, disk=disk)


def fill_shard(job: ReshardJob, *, disk: Disk = DISK, on_sample: OnSample | None = None) -> ShardEntry:
    """Write one shard and what stands beside it, and return its line of the index.

    Raises:
        ShardError: A source is not what it was when the run was planned.
        StorageError: A source cannot be read.
        PackError: The folder cannot be written, or the name is taken by a shard with other bytes.
        FolderIndexError: A kind of `also` cannot hold this shard, or its file stands in the way.
    """
    fields: set[str] = set()
    record = new_members(job.also.kinds)
    filling = _Filling(job)
    try:
        with publish(job.path, disk=disk) as draft:
            memory = bytearray(BATCH_BYTES)
            for first, stop, num_bytes in _batches(job.samples):
                if num_bytes > len(memory):
                    memory = bytearray(num_bytes)
                data = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
                fields |= filling.fill(data, first, stop)
                if record:
                    _note(record, data, str(job.path), draft.num_bytes)
                memory = draft.hand_over(memory, num_bytes) or bytearray(BATCH_BYTES)
                if on_sample:
                    on_sample(stop - first, num_bytes)
            draft.write(bytes(END_BYTES))
            if draft.num_bytes != job.num_bytes:
                raise PackError(f"{job.path}: it has {draft.num_bytes} bytes, {job.num_bytes} were planned.")
        offsets = [0, *(np.cumsum(job.samples.size, dtype=np.int64) * BLOCK_BYTES).tolist()]
        write_offsets(job.path, offsets, disk=disk)
        told = draft.sha256, tuple(sorted(fields)), digest_offsets(offsets)
        entry = ShardEntry(job.path.name, len(job.samples), draft.num_bytes, *told)
        if record:
            export_shard(job.path, record, also=job.also, before=NO_EXPORTS, disk=disk)
    except OSError as err:
        raise PackError(f"{job.path}: cannot be written: {err.strerror or err}.") from err
    finally:
        filling.sources.close()
    return entry


def _note(record: ShardMembers, data: Bytes, shard: str, offset: int) -> None:
    """Note the members of some samples, for files for other readers, as they stand in the new shard."""
    members = data.tobytes()
    for name, start, stop in locate_members(members, shard=shard, offset=offset, stop=len(members)):
        record.add(name, offset + start, memoryview(members)[start:stop])


def _batches(samples: Samples) -> Iterator[tuple[int, int, int]]:
    """First sample, the one behind the last, and their bytes: some megabytes at a time, one sample at least."""
    ends = np.cumsum(samples.size, dtype=np.int64) * BLOCK_BYTES
    first = done = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, done + BATCH_BYTES, side="right")))
        yield first, stop, int(ends[stop - 1]) - done
        first, done = stop, int(ends[stop - 1])


class _Filling:
    """Puts samples into memory as they are to be written, in the order in which their sources have them."""

    def __init__(self, job: ReshardJob) -> None:
        self._samples = job.samples
        self._changes = job.changes
        self.sources = Sources(job.samples.sources)

    def fill(self, data: Bytes, first: int, stop: int) -> set[str]:
        """Put samples `first` to `stop` into `data`, which has as many bytes as they, and return the names of their
        fields.

        Raises:
            ShardError, StorageError: As `fill_shard`.
        """
        rows = slice(first, stop)
        ends = np.cumsum(self._samples.size[rows], dtype=np.int64) * BLOCK_BYTES
        places = ends - self._samples.size[rows].astype(np.int64) * BLOCK_BYTES
        copied = self._samples.copied[rows]
        self._copy(data, places, first + np.flatnonzero(copied), first)
        fields: set[str] = set()
        keys = {row: self._rewrite(data, row, int(places[row - first]), fields) for row in self._others(rows)}
        look = look_at(places, ends, blocks_in(data))
        self._check(first, copied, look, keys)
        _clear_padding(data, look)
        return fields | {look.members.names[field] for field in np.unique(look.members.fields).tolist()}

    def _others(self, rows: slice) -> list[int]:
        """Samples that are not copied, as their sources have them."""
        others = rows.start + np.flatnonzero(~self._samples.copied[rows])
        rows_by_place: list[int] = self._by_place(others).tolist()
        return rows_by_place

    def _by_place(self, rows: Ints) -> Ints:
        order: Ints = rows[np.lexsort((self._samples.start[rows], self._samples.source[rows]))]
        return order

    def _copy(self, data: Bytes, places: Ints, rows: Ints, first: int) -> None:
        """Read samples to their places; those that are neighbours here and there at once."""
        if not len(rows):
            return
        samples, rows = self._samples, self._by_place(rows)
        source, start = samples.source[rows], samples.start[rows].astype(np.int64)
        span, place = samples.span[rows].astype(np.int64), places[rows - first] // BLOCK_BYTES
        apart = (source[1:] != source[:-1]) | (start[1:] != start[:-1] + span[:-1])
        apart |= place[1:] != place[:-1] + span[:-1]
        runs = np.concatenate([[0], np.flatnonzero(apart) + 1])
        lengths = np.add.reduceat(span, runs) * BLOCK_BYTES
        view = data.data
        columns = source[runs], start[runs] * BLOCK_BYTES, place[runs] * BLOCK_BYTES, lengths
        for number, offset, at, length in zip(*(column.tolist() for column in columns), strict=True):
            read_into(self.sources[number], view[at : at + length], offset)

    def _rewrite(self, data: Bytes, row: int, place: int, fields: set[str]) -> bytes:
        """Put a sample to its place with headers that are made anew, and return its key."""
        samples = self._samples
        file = self.sources[int(samples.source[row])]
        start, span = int(samples.start[row]) * BLOCK_BYTES, int(samples.span[row]) * BLOCK_BYTES
        raw = read_span(file, Span(start, span))
        try:
            found = find_fields(raw, shard=file.url, offset=start)
            key, members = self._changes.rewrite(found, memoryview(raw))
        except ValueError as err:
            raise self._changed(row, str(err)) from err
        size = int(samples.size[row]) * BLOCK_BYTES
        if sum(member_bytes(len(field)) for _, field in members) != size:
            raise self._changed(row, f"it would not have {size} bytes any more")
        view = data.data
        view[place : place + size] = bytes(size) if size < BATCH_BYTES else memoryview(np.zeros(size, np.uint8).data)
        for name, field in members:
            view[place : place + BLOCK_BYTES] = build_header(f"{key}.{name}".encode(), len(field))
            view[place + BLOCK_BYTES : place + BLOCK_BYTES + len(field)] = field
            place += member_bytes(len(field))
            fields.add(name)
        return key.encode()

    def _check(self, first: int, copied: Bools, look: Look, keys: dict[int, bytes]) -> None:
        """Compare what is going to be written with the plan."""
        check = self._samples.check[first : first + len(copied)]
        right = look.exact & ((look.hashes & np.uint64(0xFFFFFFFF)) == check)
        if keys:  # made by our writer; what `look_at` does not take for plain may be right, as a key that is no ASCII
            rows = np.array([*keys]) - first
            right[rows] = (hash_keys([*keys.values()]) & np.uint64(0xFFFFFFFF)) == check[rows]
        if not right.all():
            row = first + int(np.flatnonzero(~right)[0])
            raise self._changed(row, "another sample, or none, stands there now")

    def _changed(self, row: int, problem: str) -> ShardError:
        samples = self._samples
        problem = f"the shard changed since the run was planned: {problem}"
        shard, offset = samples.sources[samples.source[row]], int(samples.start[row]) * BLOCK_BYTES
        return ShardError(shard=shard, offset=offset, problem=problem, remedy="Start again when nobody writes there.")


def _clear_padding(data: Bytes, look: Look) -> None:
    """Behind a member's data up to the next block are zeros in our shards, whatever stood there."""
    members = look.members
    used = members.sizes % BLOCK_BYTES
    places, used = (members.starts + BLOCK_BYTES + members.sizes - used)[used > 0], used[used > 0]
    blocks = data.reshape(-1, BLOCK_BYTES)
    dirty = blocks[places // BLOCK_BYTES].view(np.uint64) & _BEHIND[used]
    for member in np.flatnonzero(dirty.any(axis=1)).tolist():
        blocks[places[member] // BLOCK_BYTES, used[member] :] = 0
