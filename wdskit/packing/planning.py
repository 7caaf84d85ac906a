"""The plan pass: all rows of a source, which of them are good, and which goes where, before any is packed."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import PackError, RowError
from wdskit.order.keys import permutation
from wdskit.packing.duplicates import Digests, find_duplicates, look_at_rows
from wdskit.packing.fill import ShardJob, packed_names, required_rows
from wdskit.packing.plan import Limits, Names, PackPlan, PlannedShard, RowTooLarge, Span, divide
from wdskit.packing.row import OnProgress, Progress, Row, row_error
from wdskit.packing.samples.store import SampleRows
from wdskit.packing.sources import Source
from wdskit.packing.store import Ints, Rows, Spool, check_unique
from wdskit.packing.transforms import UNTOUCHED, Transforms
from wdskit.shards.split import SPLIT_SEED, Shares, choose_splits, draws_of, make_draw

_TELL_ROWS = 1000


class Store(Protocol):
    """All rows that may be packed, by their numbers: `store.Spool` of rows one by one, `samples.store.Samples`."""

    @property
    def blocks(self) -> Any:
        """Blocks of 512 bytes that each takes in its shard: a buffer of uint32."""

    @property
    def hashes(self) -> Any:
        """A hash of each key: a buffer of int64 or uint64."""

    @property
    def num_fields(self) -> Mapping[tuple[str, ...], int]:
        """Rows by the names of their fields; empty where that is not known."""

    @property
    def has_labels(self) -> bool:
        """Whether a row may have the field `cls`."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, number: int) -> Row:
        """One row."""

    def take(self, numbers: Ints) -> Rows | SampleRows:
        """Some rows in their order, for this process or another."""

    def hash_keys(self, keys: Iterable[str]) -> NDArray[Any]:
        """A hash of each of some keys, as `hashes` has them."""

    def where(self, number: int) -> str:
        """Where a row comes from, for messages."""

    def forget_hashes(self) -> None:
        """Keys are compared: what that needed may go."""


class Series(NamedTuple):
    """Shards that are numbered on their own: all of them, or those of a split.

    Attributes:
        names: Their file names.
        first: Number of the first one.
        length: How many there are.
        split: Name of the split, "" where nothing is split.
    """

    names: Names
    first: int
    length: int
    split: str = ""


@dataclass(frozen=True)
class Jobs:
    """The shards to fill, in order.

    Attributes:
        store: All rows.
        order: Numbers of the rows in the order in which they are packed; None for all, in the source's.
        spans: The rows of each shard, by their places in that order.
        series: How the shards are numbered.
        transforms: What happens to their samples.
        threads: So many samples of a shard at a time.
    """

    store: Store
    order: Ints | None
    spans: Sequence[Span]
    series: Sequence[Series]
    transforms: Transforms
    threads: int

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.spans)

    def job(self, number: int, folder: Path) -> ShardJob:
        """What fills one shard in a folder."""
        span = self.spans[number]
        return ShardJob(
            path=folder / self.name(number),
            rows=self.store.take(_places(self.order, span.start, span.stop)),
            num_bytes=span.num_bytes,
            transforms=self.transforms,
            threads=self.threads,
        )

    def name(self, number: int) -> str:
        """File name of one shard."""
        for names, first, length, _ in self.series:
            if number < length:
                return names[first + number]
            number -= length
        raise IndexError(number)

    def plan(self) -> PackPlan:
        """What is going to be written."""
        shards = tuple(
            PlannedShard(self.name(number), span.stop - span.start, span.num_bytes)
            for number, span in enumerate(self.spans)
        )
        splits, done = {}, 0
        for series in self.series:
            if series.split:
                splits[series.split] = shards[done : done + series.length]
            done += series.length
        num_fields: Counter[str] = Counter()
        for names, count in self.store.num_fields.items():
            num_fields.update(dict.fromkeys(packed_names(names, self.transforms), count))
        first, last = (self.store[int(_places(self.order, at, at + 1)[0])] for at in (0, self.spans[-1].stop - 1))
        return PackPlan(shards, dict(sorted((+num_fields).items())), first.key, last.key, splits)


@dataclass(frozen=True)
class LazyJobs(Sequence[ShardJob]):
    """Some of the shards to fill, each made when it is asked for, as its rows take memory."""

    jobs: Jobs
    numbers: Sequence[int]
    folder: Path

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> ShardJob: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[ShardJob]: ...

    def __getitem__(self, at: int | slice) -> ShardJob | Sequence[ShardJob]:
        """One job, or several."""
        if isinstance(at, slice):
            return [self.jobs.job(number, self.folder) for number in self.numbers[at]]
        return self.jobs.job(self.numbers[at], self.folder)


def _places(order: Ints | None, start: int, stop: int) -> Ints:
    return np.arange(start, stop) if order is None else order[start:stop]


def read_rows(
    found: Source,
    spool: Spool,
    *,
    transforms: Transforms = UNTOUCHED,
    skip_bad: bool,
    workers: int,
    on_progress: OnProgress,
) -> Ints | None:
    """Read all rows of a source into `spool`, and return the numbers of those that are packed, None for all.

    Args:
        found: The source; rows that are left out are noted as its rejected ones.
        spool: Where the rows go.
        transforms: What is required of a row, and what happens to it and to duplicates.
        skip_bad: Leave bad rows out instead of raising the first. All are read for that, in `workers` processes.
        workers: Processes that read them.
        on_progress: Called with how far it is.

    Raises:
        RowError: A row is bad, or two rows have one key.
        PackError: No row is left.
    """
    kept = _read(found, spool, transforms, skip_bad=skip_bad, workers=workers, on_progress=on_progress)
    if not (len(spool) if kept is None else len(kept)):
        raise found.nothing()
    check_unique(spool, kept)
    return kept


def divide_rows(
    store: Store, kept: Ints | None, *, limits: Limits, shuffle: int | None, by_count: bool = False
) -> tuple[Ints | None, list[Span]]:
    """In which order rows are packed, None for all in the source's, and where in it each shard begins.

    With `by_count` their bytes are not known, and those of the shards are 0.

    Raises:
        RowError: A row alone is over the limit.
        PackError: So many shards cannot be made of them.
    """
    order = kept
    if shuffle is not None:
        order = permutation(len(store) if kept is None else len(kept), "pack-shuffle", shuffle)
        order = order if kept is None else kept[order]
    blocks = np.frombuffer(store.blocks, dtype=np.uint32)
    if by_count:
        spans = divide(np.ones(len(store) if order is None else len(order), np.uint32), limits)
        return order, [span._replace(num_bytes=0) for span in spans]
    try:
        return order, divide(blocks if order is None else blocks[order], limits)
    except RowTooLarge as err:
        problem = f"even alone in its shard it takes {err.num_bytes} bytes, more than max_bytes {limits.max_bytes}"
        where = store.where(int(_places(order, err.place, err.place + 1)[0]))
        raise row_error(where, problem, "Raise --max-bytes.") from None


def _read(
    found: Source, spool: Spool, transforms: Transforms, *, skip_bad: bool, workers: int, on_progress: OnProgress
) -> Ints | None:
    """Fill the spool, and return the numbers of the rows that are good, None for all."""
    bad: list[tuple[int, RowError]] = []
    with contextlib.ExitStack() as stack:
        # What an error leaves suspended is closed at once, not when its traceback goes: a manifest is open in it.
        if isinstance(found.rows, Generator):
            stack.callback(found.rows.close)
        for row in required_rows(_counted(found.rows, on_progress), transforms, found.rejected):
            if isinstance(row, Row):
                spool.add(row)
            elif skip_bad:
                bad.append((len(spool), row))
            else:
                raise row
    spool.finish()
    if len(spool):
        transforms.check_used(name for names in spool.num_fields for name in names)
    if not skip_bad and transforms.duplicates == "keep":
        return None
    is_good = np.ones(len(spool), dtype=np.bool_)
    digests = Digests()
    for number, verdict in look_at_rows(spool, transforms, workers, on_progress, transform=skip_bad):
        if not isinstance(verdict, RowError):
            digests.add(number, verdict)
        elif not skip_bad:
            raise verdict
        else:
            _leave_out(spool, is_good, number)
            bad.append((number, verdict))
    if transforms.duplicates != "keep":
        found.duplicates += find_duplicates(digests, spool.__getitem__, transforms.image_fields)
        for one in found.duplicates if transforms.duplicates == "drop" else ():
            _leave_out(spool, is_good, one.number)
    found.rejected += [err for _, err in sorted(bad, key=lambda each: each[0])]
    return None if is_good.all() else np.flatnonzero(is_good)


def _leave_out(spool: Spool, is_good: NDArray[np.bool_], number: int) -> None:
    is_good[number] = False
    spool.num_fields[tuple([name for name, _ in spool[number].fields])] -= 1


def _counted(rows: Iterable[Row | RowError], on_progress: OnProgress) -> Iterator[Row | RowError]:
    for number, row in enumerate(rows):
        if number % _TELL_ROWS == 0:
            on_progress(Progress("reading", number, 0, None, None))
        yield row


_DRAWN_ROWS = 4096


class Splitter:
    """Finds the split of each key. One byte a key is kept: there are at most a hundred splits."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._draw = make_draw(SPLIT_SEED)
        self._draws: list[bytes] = []
        self._splits = array("B")

    def add(self, key: str) -> None:
        """One key more."""
        self._draws.append(self._draw(key))
        if len(self._draws) == _DRAWN_ROWS:
            self._choose()

    def add_draws(self, draws: NDArray[np.uint64]) -> None:
        """Many keys more, by their draws."""
        self._choose()
        self._splits.frombytes(choose_splits(draws, self.shares).astype(np.uint8).tobytes())

    def _choose(self) -> None:
        if not self._draws:
            return
        self._splits.frombytes(choose_splits(draws_of(self._draws), self.shares).astype(np.uint8).tobytes())
        self._draws = []

    def rows_of(self, split: int, kept: Ints | None) -> Ints:
        """The numbers of its keys, of which only `kept` count, all where that is None."""
        self._choose()
        splits = np.frombuffer(self._splits, dtype=np.uint8)
        if kept is None:
            return np.flatnonzero(splits == split)
        rows: Ints = kept[splits[kept] == split]
        return rows


def divide_splits(
    store: Store, kept: Ints | None, splitter: Splitter, *, limits: Limits, shuffle: int | None, by_count: bool
) -> tuple[Ints, list[list[Span]]]:
    """As `divide_rows`, split by split: the order of all rows, and the shards of each split.

    A split is shuffled and divided as if its rows were all there are. So its shards depend on its own rows only. One
    without rows has no shards.

    Raises:
        RowError: A row alone is over the limit.
        PackError: So many shards cannot be made of a split.
    """
    orders, shards, start = [], [], 0
    for number, name in enumerate(splitter.shares):
        rows = splitter.rows_of(number, kept)
        try:
            order, spans = _divide(store, rows, limits, shuffle, by_count=by_count)
        except RowError:
            raise
        except PackError as err:
            raise PackError(f"split {name}: {err}") from err
        orders.append(order)
        shards.append([Span(start + span.start, start + span.stop, span.num_bytes) for span in spans])
        start += len(rows)
    return np.concatenate(orders), shards


def _divide(
    store: Store, rows: Ints, limits: Limits, shuffle: int | None, *, by_count: bool
) -> tuple[Ints, list[Span]]:
    if not len(rows):
        if limits.num_shards is not None:
            raise PackError(f"it has no samples, but num_shards asks for {limits.num_shards} shards.")
        return rows, []
    order, spans = divide_rows(store, rows, limits=limits, shuffle=shuffle, by_count=by_count)
    assert order is not None
    return order, spans
