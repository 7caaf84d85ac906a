"""One source shard, looked at before anything is written: its samples as columns, and which of them stay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import Verified
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.dataset.shard import IDX_SUFFIX, LocalShard, parse_offsets
from wdskit.errors import FolderIndexError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.samples.batch import Batch, Gone
from wdskit.packing.samples.changes import Changes
from wdskit.packing.samples.choice import Choice
from wdskit.packing.samples.headers import Bools, Ints, Words, look_at
from wdskit.packing.samples.read import (
    SourcePath,
    blocks_in,
    blocks_of,
    check_unchanged,
    identity_of,
    open_path,
    read_into,
)
from wdskit.shards.lazy_shard import LazyShard
from wdskit.storage.urls import LocalFile, RangeFile, read_bytes
from wdskit.tar.names import split_name
from wdskit.tar.reader import locate_members
from wdskit.tar.walk import Span

BATCH_BYTES = 8 << 20
LARGE_BYTES = 32 << 10  # a mean sample from which on only headers are read, each for itself
_BATCH_SAMPLES = 1 << 14

Blocks = NDArray[np.uint32]
"""Places and lengths in blocks of 512 bytes: a shard of 2 TiB is the largest."""


@dataclass(frozen=True)
class ScanJob:
    """A shard to look at. It is sent to a worker process.

    Attributes:
        path: The shard.
        entry: Its line in its folder's index, None for one that is walked.
        choice: Which samples stay.
        changes: What they become; None where nothing is written, and samples are numbered instead.
        has_check: Whether the whole shard is compared with its digest.
        has_draws: Whether the draws that decide splits are wanted.
    """

    path: str
    entry: ShardEntry | None
    choice: Choice
    changes: Changes | None
    has_check: bool = False
    has_draws: bool = False


@dataclass(frozen=True)
class Scanned:
    """What a shard has.

    Attributes:
        path: The shard, and which file it was.
        num_samples: Samples in it.
        gone: Of these, those that do not stay.
        num_ignored: Members that belong to no sample.
        num_cleaned: Samples whose keys were changed, by `keys="clean"`.
        fields: Names of all fields of its samples.
        starts: Where each sample that stays starts.
        spans: How long it is there.
        sizes: How long it becomes. Empty without changes.
        hashes: 64 bits for its key as it becomes. Empty without changes.
        copied: Whether its bytes are copied as they are. Empty without changes.
        numbers: Which sample of the shard it is. Empty with changes.
        draws: What decides its split, by its key as it becomes. Empty unless wanted.
    """

    path: SourcePath
    num_samples: int
    gone: Gone
    num_ignored: int
    num_cleaned: int
    fields: frozenset[str]
    starts: Blocks
    spans: Blocks
    sizes: Blocks
    hashes: Words
    copied: Bools
    numbers: Ints
    draws: Words


class _Part(NamedTuple):
    """The samples of a batch that stay: the columns of `Scanned`, and how many went for which reason."""

    starts: Blocks
    spans: Blocks
    sizes: Blocks
    hashes: Words
    copied: Bools
    numbers: Ints
    draws: Words


_NONE = np.zeros(0, np.uint32)
_NO_WORDS = np.zeros(0, np.uint64)
_NOTHING = _Part(_NONE, _NONE, _NONE, _NO_WORDS, np.zeros(0, np.bool_), np.zeros(0, np.int64), _NO_WORDS)


def scan_source(job: ScanJob) -> Scanned:
    """Look at a shard.

    Raises:
        ShardError: It is not right.
        FolderIndexError: It is not what its folder's index says.
        SelectionError: The filter has no answer for a sample.
        RowError: A sample cannot be written as it has to be.
        StorageError: It cannot be read.
    """
    file = open_path(job.path)
    try:
        identity = identity_of(file)
        offsets, num_ignored = _offsets_of(job, file)
        if job.has_check and isinstance(file, LocalFile):
            _check_digest(job, file)
        scan = _Scan(job, num_ignored)
        if not isinstance(file, LocalFile):
            scan.sha256.update(read_span(file, Span(0, int(offsets[0]))))
        parts = [scan.part(of, first, offsets[first : stop + 1]) for of, first, stop in _batches(file, offsets)]
        check_unchanged(file, identity)
        if job.entry is not None and job.entry.fields and (others := sorted(scan.fields - {*job.entry.fields})):
            raise _not_indexed(job.path, f"it has fields that are not in the index: {', '.join(others)}")
        if not isinstance(file, LocalFile) and job.entry is not None:  # all of it was read
            stop = int(offsets[-1])
            scan.sha256.update(read_span(file, Span(stop, file.num_bytes - stop)))
            if scan.sha256.hexdigest() != job.entry.sha256:
                raise _other_bytes(job)
    finally:
        file.close()
    columns = _Part(*(np.concatenate(column) for column in zip(_NOTHING, *parts, strict=True)))
    path = SourcePath.of(job.path, identity)
    return Scanned(
        path, len(offsets) - 1, scan.gone, scan.num_ignored, scan.num_cleaned, frozenset(scan.fields), *columns
    )


def _offsets_of(job: ScanJob, file: RangeFile) -> tuple[Ints, int]:
    """Where samples start and the last one ends, and how many members before them belong to none."""
    entry = job.entry
    if entry is None:
        if isinstance(file, LocalFile):
            reader: ShardReader = HeaderReader(file, shard=job.path)
            for _ in reader:
                pass
        else:
            with LazyShard(job.path) as whole:
                for _ in whole:
                    pass
            reader = whole.reader
        return np.array([*reader.starts, reader.stop], dtype=np.int64), 0
    if file.num_bytes != entry.num_bytes:
        problem = f"it has {file.num_bytes} bytes, but the folder's index says {entry.num_bytes}"
        raise _not_indexed(job.path, problem)
    if isinstance(file, LocalFile):
        Verified().check(file, entry.identity, entry.sha256)
        with LocalShard(file.url, idx_sha256=entry.idx_sha256) as shard:
            offsets = np.array(shard.offsets, dtype=np.int64)
    else:
        idx = read_bytes(f"{job.path}{IDX_SUFFIX}", limit=8 * (entry.num_samples + 1))
        offsets = parse_offsets(idx, job.path, num_bytes=entry.num_bytes, sha256=entry.idx_sha256)
    if len(offsets) - 1 != entry.num_samples:
        problem = f"its .idx has {len(offsets) - 1} samples, but the folder's index says {entry.num_samples}"
        raise _not_indexed(job.path, problem)
    head = read_span(file, Span(0, int(offsets[0])))
    members = locate_members(head, shard=job.path, offset=0, stop=len(head))
    return offsets, sum(split_name(name) is None for name, _, _ in members)


def _not_indexed(path: str, problem: str) -> FolderIndexError:
    folder = path.rpartition("/")[0] or "."
    msg = f"{path}: {problem}.\n  If the shard is right, run `wdskit index {folder}`."
    return FolderIndexError(msg, folder=folder)


def _check_digest(job: ScanJob, file: LocalFile) -> None:
    assert job.entry is not None
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    if digest.hexdigest() != job.entry.sha256:
        raise _other_bytes(job)


def _other_bytes(job: ScanJob) -> FolderIndexError:
    return _not_indexed(job.path, "its sha256 is not the one in the folder's index: its bytes changed")


def _batches(file: RangeFile, offsets: Ints) -> Iterator[tuple[RangeFile, int, int]]:
    """What to read some samples from, and their numbers, first and behind the last: some megabytes at a time, one
    sample at least. Of a remote shard the next of them are on their way meanwhile.
    """
    batches = [*_divide(offsets)]
    if isinstance(file, LocalFile):
        yield from ((file, *batch) for batch in batches)
        return
    from wdskit.storage.objects import ObjectFile, ReadAhead

    assert isinstance(file, ObjectFile)
    ahead: ReadAhead | None = None
    for number, (first, stop) in enumerate(batches):
        now = ahead or file.ahead([(int(offsets[first]), int(offsets[stop]))])
        following = batches[number + 1 : number + 2]
        ahead = file.ahead([(int(offsets[a]), int(offsets[b])) for a, b in following]) if following else None
        yield now, first, stop


def _divide(offsets: Ints) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[first] + BATCH_BYTES, side="right")) - 1
        stop = min(max(stop, first + 1), first + _BATCH_SAMPLES)
        yield first, stop
        first = stop


class _Scan:
    """Looks at the samples of one shard, a batch at a time."""

    def __init__(self, job: ScanJob, num_ignored: int) -> None:
        self.job = job
        self.sha256 = hashlib.sha256()
        self.num_ignored = num_ignored
        self.num_cleaned = 0
        self.fields: set[str] = set()
        self.gone = Gone()
        self._memory = np.empty(BATCH_BYTES, dtype=np.uint8)

    def part(self, file: RangeFile, number: int, offsets: Ints) -> _Part:
        """The samples between these offsets, of which the first is sample `number`. Of a remote shard all is read."""
        starts, stops = offsets[:-1], offsets[1:]
        base, size = int(starts[0]), int(stops[-1] - starts[0])
        is_small = size <= len(self._memory) and size <= LARGE_BYTES * len(starts)
        if is_small or not isinstance(file, LocalFile):
            data = self._memory[:size] if size <= len(self._memory) else np.empty(size, dtype=np.uint8)
            read_into(file, data.data, base)
            if not isinstance(file, LocalFile):
                self.sha256.update(data.data)
            look = look_at(starts - base, stops - base, blocks_in(data))
        else:
            base = 0
            look = look_at(starts, stops, blocks_of(file))
        batch = Batch(file, self.job.path, number, starts, stops, base, look)
        self.num_ignored += batch.num_ignored
        self.fields |= batch.fields
        keep = batch.choose(self.job.choice, self.gone)
        places = _blocks(starts[keep]), _blocks((stops - starts)[keep])
        if self.job.changes is None:
            return _NOTHING._replace(starts=places[0], spans=places[1], numbers=number + np.flatnonzero(keep))
        sizes, hashes, copied = batch.become(self.job.changes, keep)
        self.num_cleaned += batch.num_cleaned
        draws = batch.draws(self.job.changes, keep) if self.job.has_draws else _NO_WORDS
        return _Part(*places, _blocks(sizes[keep]), hashes[keep], copied[keep], _NOTHING.numbers, draws)


def _blocks(num_bytes: Ints) -> Blocks:
    blocks: Blocks = (num_bytes // BLOCK_BYTES).astype(np.uint32)
    return blocks
