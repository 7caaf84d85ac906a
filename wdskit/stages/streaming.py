"""Stages of streams only, each in one place: `shuffle`, `select`, `slice`, `with_epoch`, `with_length`.

A class has the stage's settings and its line of YAML; its `bind(context)` gives what runs: a callable `iterator ->
iterator` that can be pickled before its first use. The stage to copy for a new one is `Slice`. The source `stream` and
its splitters stand in `stream_source`, `tarfile_to_samples` in `shard_reader`.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

from pydantic import Field, field_validator, model_validator

from wdskit.config.messages import show
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.config.values import Count, Natural
from wdskit.dataset.patterns import ShardList
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws, share
from wdskit.order.keys import philox
from wdskit.stages.base import Context, Find, Function, Origin, Run, note_place, stage_error

_WORDS = 1024  # random words drawn at a time: 0.1 us each, against 5 us one by one


class StreamContext(Context):
    """What is known of a stream while its stages are bound, in their order.

    Attributes:
        stages: All of the pipeline.
        patience: Samples that the stages may hold or pass over before silence is an error.
        shards: Those of `stream`; None for a source that is not wdskit's.
        draws: Their order; None for a source that is not wdskit's.
        is_cut: Whether `with_epoch` stands before.
        length: The number of `with_length`.
    """

    def __init__(self, run: Run, find: Find, stages: Sequence[Any], patience: int) -> None:
        super().__init__(run, find, stages)
        self.stages = stages
        self.patience = patience
        self.shards: ShardList | None = None
        self.draws: Draws | None = None
        self.is_cut = False
        self.length: int | None = None


class StreamStage(StageSpec):
    """A stage that takes a stream of values and gives another.

    Attributes:
        is_counted: Whether `num_items` gives how many values come out. Else only running shows it.
        is_rebuilt: Whether what it holds can be read again in another process.
    """

    is_counted: ClassVar[bool] = False
    is_rebuilt: ClassVar[bool] = True

    @abstractmethod
    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]] | None:
        """What runs; None for a stage that changes no values."""

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """How many values come out where so many go in, in worker `worker` of `num_workers` of a rank."""
        return num_values

    def num_held(self) -> int:
        """Values of its own input that it takes before it gives one."""
        return 0

    def samples_each(self, samples: int) -> int:
        """Samples in each value that comes out, at most, where `samples` are in each that goes in."""
        return samples


class Keeps(Protocol):
    """What runs of a stage that holds values between two yields. Its input can be rebuilt from their origins.

    Attributes:
        name: In messages.
        kept: What it holds, in its own order; what is put there before a call is what the call starts with.
        count: How many values it has given since the stream began, where that matters to it.
        capacity: How many values it holds at most.
    """

    name: str
    kept: list[tuple[Origin, Any]]
    count: int
    capacity: int


class Shuffle(StreamStage):
    """Shuffle in a buffer."""

    name: ClassVar[str] = "shuffle"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "size"
    is_counted: ClassVar[bool] = True

    size: Count = Field(description="Number of values in the buffer.", examples=[2000])
    initial: Count | None = Field(None, description="Number of values in the buffer before the first one comes out.")

    @field_validator("initial")
    @classmethod
    def _check_initial(cls, initial: int | None, info: Any) -> int | None:
        size = info.data.get("size")
        if initial is not None and size is not None and initial > size:
            raise refuse(f"{show(initial)} is more than the buffer holds (`size` is {show(size)}).")
        return initial

    def bind(self, context: StreamContext) -> ShuffleBuffer:
        """A buffer with random numbers of its own."""
        initial = 100 if self.initial is None else self.initial
        return ShuffleBuffer(context.run, context.label(self), self.size, initial, each_epoch=context.is_cut)

    def num_held(self) -> int:
        """The whole buffer."""
        return self.size


class ShuffleBuffer:
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


class Select(StreamStage):
    """Keep the values for which a function returns true."""

    name: ClassVar[str] = "select"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """The function, found by its name, asked of each value."""
        return functools.partial(_select, context.run, context.call("select", self.fn, context.label(self)))


def _select(run: Run, predicate: Callable[[Any, Origin], Any], source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that hold."""
    for value in source:
        try:
            keep = bool(predicate(value, run.origin))
        except Exception as err:
            raise stage_error("select", run.origin, err) from err
        except BaseException as err:
            note_place("select", run.origin, err)
            raise
        if keep:
            yield value


class Slice(StreamStage):
    """Keep a range of the values, like a slice in Python."""

    name: ClassVar[str] = "slice"
    kind: ClassVar[Kind] = "stream"
    is_starred: ClassVar[str] = "bounds"
    shorthand: ClassVar[str | None] = "stop"
    is_counted: ClassVar[bool] = True
    is_rebuilt: ClassVar[bool] = False

    start: Natural = Field(0, description="Number of the first value.")
    stop: Natural | None = Field(
        description="Number of the first value after the range, or start, stop and step. null: no end.", examples=[1000]
    )
    step: Count = Field(1, description="Keep one of every `step` values.")

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """`stop`, `[start, stop]` or `[start, stop, step]`, as a mapping."""
        if not isinstance(value, (list, tuple)):
            return super().expand(value)
        if not 2 <= len(value) <= 3:
            raise ValueError(f"{show(value)} has {len(value)} items; write stop, [start, stop] or [start, stop, step].")
        return dict(zip(("start", "stop", "step"), value, strict=False))

    def shorten(self) -> Any:
        """The shortest way to write it."""
        if self.step != 1:
            return [self.start, self.stop, self.step]
        return [self.start, self.stop] if self.start or self.stop is None else self.stop

    @model_validator(mode="after")
    def _check_range(self) -> Slice:
        if self.stop is not None and self.stop <= self.start:
            raise refuse(f"it keeps nothing: `stop` {show(self.stop)} is not greater than `start` {show(self.start)}.")
        return self

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Of what the *rank* would yield: value n of worker w of W is number n * W + w, as a loader takes them."""
        return functools.partial(_slice, context.run, self.start, self.stop, self.step)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Those of this worker's numbers that the slice holds."""
        stop = num_workers * num_values if self.stop is None else min(self.stop, num_workers * num_values)
        mine = range(worker, stop, num_workers)
        return sum(number >= self.start and (number - self.start) % self.step == 0 for number in mine)

    def num_held(self) -> int:
        """What it passes over, whatever the number of workers that share it."""
        return self.start + self.step


def _slice(run: Run, start: int, stop: int | None, step: int, source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of the slice, and stop reading behind it."""
    values = iter(source)
    number = run.worker
    while stop is None or number < stop:
        for value in itertools.islice(values, 1):
            if number >= start and (number - start) % step == 0:
                yield value
            break
        else:
            return
        number += run.num_workers


class WithEpoch(StreamStage):
    """End an epoch after `n` values on each rank; the next epoch continues there."""

    name: ClassVar[str] = "with_epoch"
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"
    is_counted: ClassVar[bool] = True

    n: Count = Field(description="Number per rank: of samples before `batched`, of batches after it.", examples=[1000])

    def bind(self, context: StreamContext) -> EpochCut:
        """The cut, behind which everything begins anew in each epoch."""
        context.is_cut = True
        return EpochCut(context.run, self.n)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """This worker's share of n, whatever goes in."""
        return share(self.n, worker, num_workers)


class EpochCut:
    """This worker's share of n values, taken from a stream that goes on behind them.

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
                raise PipelineError(f"{msg}\n  No stage before with_epoch can end the stream.")

    def finish(self, source: Iterator[Any]) -> None:
        """Take what a stage behind has left of the epoch, as a slice does: the next one starts behind it all."""
        for _ in itertools.islice(source, self.left):
            self.run.num_heard += 1
        self.left = 0


class WithLength(StreamStage):
    """Set what `len()` returns; nothing else changes."""

    name: ClassVar[str] = "with_length"
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"
    is_counted: ClassVar[bool] = True

    n: Count = Field(description="The length.", examples=[1000])

    def bind(self, context: StreamContext) -> None:
        """Nothing runs."""
        context.length = self.n
