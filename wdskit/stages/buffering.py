"""Stages that keep values back or change how many there are: shuffle, select, slice, with_epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from wdskit.errors import PipelineError
from wdskit.order.draws import share
from wdskit.order.keys import philox
from wdskit.stages.base import Origin, Run, note_place, stage_error

_WORDS = 1024  # random words drawn at a time: 0.1 us each, against 5 us one by one


class Keeps(Protocol):
    """A stage that holds values between two yields. Its input can be rebuilt from their origins.

    Attributes:
        kept: What it holds, in its own order; what is put there before a call is what the call starts with.
        count: How many values it has given since the stream began, where that matters to it.
        capacity: How many values it holds at most.
    """

    name: str
    kept: list[tuple[Origin, Any]]
    count: int
    capacity: int


class Shuffle:
    """webdataset's buffer shuffle, seeded by (seed, epoch, rank, worker).

    Before with_epoch the epoch is the one that the stream began with, behind it (`each_epoch`) the one that runs.

    While the buffer is filling, two values are taken for each that is given; giving starts at `initial` values. The
    n-th pick depends on n, not on the epoch that it falls into, so that threads behind it may read ahead over the end
    of an epoch.
    """

    def __init__(self, run: Run, name: str, size: int, initial: int, *, each_epoch: bool) -> None:
        self.run = run
        self.name = name
        self.each_epoch = each_epoch
        self.size = self.capacity = size
        self.initial = min(initial, size)
        self.kept: list[tuple[Origin, Any]] = []
        self.count = 0

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of `source` in another order."""
        run = self.run
        kept = self.kept
        values = iter(source)
        words = self._words(self.count)
        for value in values:
            kept.append((run.origin, value))
            if len(kept) < self.size:
                for second in itertools.islice(values, 1):
                    kept.append((run.origin, second))
            if len(kept) >= self.initial:
                yield self._pick(words)
        while kept:
            yield self._pick(words)

    def _pick(self, words: Iterator[int]) -> Any:
        """Take a uniform member of the buffer out of it."""
        kept = self.kept
        at = next(words) * len(kept) >> 64
        kept[at], kept[-1] = kept[-1], kept[at]
        self.count += 1
        self.run.origin, value = kept.pop()
        return value

    def _words(self, first: int) -> Iterator[int]:
        """Random words from number `first` on."""
        run = self.run
        epoch = run.epoch if self.each_epoch else run.first_epoch
        while True:
            chunk, skipped = divmod(first, _WORDS)
            bits = philox(f"shuffle:{self.name}", run.seed, epoch, run.place.rank, run.worker, chunk)
            yield from bits.random_raw(_WORDS)[skipped:].tolist()
            first = (chunk + 1) * _WORDS


class Select:
    """Keeps the values for which a predicate holds."""

    def __init__(self, run: Run, predicate: Callable[[Any, Origin], Any]) -> None:
        self.run = run
        self.predicate = predicate

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the values that hold.

        Raises:
            SampleError, PipelineError: The predicate failed; it names shard and key.
        """
        for value in source:
            try:
                keep = bool(self.predicate(value, self.run.origin))
            except Exception as err:
                raise stage_error("select", self.run.origin, err) from err
            except BaseException as err:
                note_place("select", self.run.origin, err)
                raise
            if keep:
                yield value


class Slice:
    """Keeps values start, start + step, ... below stop of what the *rank* would yield.

    The n-th value of worker w of W is number n * W + w of its rank, as the loader takes from its workers in turn.
    """

    def __init__(self, run: Run, start: int, stop: int | None, step: int) -> None:
        self.run = run
        self.start, self.stop, self.step = start, stop, step

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of the slice, and stop reading behind it."""
        values = iter(source)
        number = self.run.worker
        while self.stop is None or number < self.stop:
            for value in itertools.islice(values, 1):
                if number >= self.start and (number - self.start) % self.step == 0:
                    yield value
                break
            else:
                return
            number += self.run.num_workers


class EpochCut:
    """`with_epoch`: this worker's share of n values, taken from a stream that goes on behind them.

    Attributes:
        left: Values of the running epoch that are still to be taken.
        resumed: What `left` was where the next epoch was stopped, if it is one that goes on; else None.
    """

    def __init__(self, run: Run, n: int) -> None:
        self.run = run
        self.n = n
        self.left = 0
        self.resumed: int | None = None

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield this worker's share of one epoch.

        Raises:
            PipelineError: The stream ended before.
        """
        values = iter(source)
        wanted = share(self.n, self.run.worker, self.run.num_workers)
        first, self.resumed = wanted if self.resumed is None else self.resumed, None
        self.left = first
        for self.left in range(first - 1, -1, -1):
            for value in itertools.islice(values, 1):
                self.run.num_heard += 1
                yield value
                break
            else:
                number = wanted - 1 - self.left
                msg = f"with_epoch: the stream ended after {number} of the {wanted} values of this worker's epoch."
                raise PipelineError(f"{msg}\n  Nothing before with_epoch may end a stream.")

    def finish(self, source: Iterator[Any]) -> None:
        """Take what a stage behind has left of the epoch, as a slice does: the next one starts behind it all."""
        for _ in itertools.islice(source, self.left):
            self.run.num_heard += 1
        self.left = 0


class Renumber:
    """Stands behind a stage that is not ours: gives each value a position of its own. `each_epoch` as in Shuffle."""

    def __init__(self, run: Run, *, each_epoch: bool) -> None:
        self.run = run
        self.each_epoch = each_epoch

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield what comes, numbered."""
        run = self.run
        part = 1 << 63 | run.place.rank << 31 | run.worker
        epoch = run.epoch if self.each_epoch else run.first_epoch
        for number, value in enumerate(source):
            url, key = (value.get("__url__", ""), value.get("__key__", "")) if isinstance(value, dict) else ("", "")
            run.origin = Origin(str(url), str(key), number, epoch, part)
            yield value
