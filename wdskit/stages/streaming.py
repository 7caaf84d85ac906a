"""Stages of streams only: `shuffle`, `select`, `slice`, `with_epoch`, `with_length`.

A class has the stage's settings and its YAML form. Its `bind(context)` returns a callable `iterator -> iterator` that
can be pickled before its first use. Copy `Slice` to write a new stage. The source `stream` and its splitters are in
`stream_source`, `tarfile_to_samples` is in `shard_reader`.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from wdskit.config.messages import show
from wdskit.config.spec import Kind, StageSpec, refuse
from wdskit.config.values import Count, Natural
from wdskit.dataset.patterns import ShardList
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws, share
from wdskit.order.keys import philox
from wdskit.stages.base import Context, Function, Origin, Run, cause_of, note_place, stage_error

_END = object()
_WORDS = 1024  # random words drawn at a time: 0.1 us each, against 5 us one by one


class StreamContext:
    """The state of building a stream, whose stages are bound in their order.

    Attributes:
        known: The context of the stage that is bound.
        stages: All stages of the pipeline.
        shards: The shards of `stream`; None for a source that is not wdskit's.
        draws: Their order; None for a source that is not wdskit's.
        is_cut: Whether `with_epoch` is an earlier stage.
        length: The number of `with_length`.
    """

    def __init__(self, known: Context, stages: Sequence[Any]) -> None:
        self.known = known
        self.run = known.run
        self.stages = stages
        self.shards: ShardList | None = None
        self.draws: Draws | None = None
        self.is_cut = False
        self.length: int | None = None


class StreamStage(StageSpec):
    """A stage that turns a stream of values into another stream.

    Attributes:
        is_counted: Whether `num_items` is known before a run.
    """

    is_counted: ClassVar[bool] = False

    @abstractmethod
    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]] | None:
        """Return the callable that runs; None for a stage that changes no values."""

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return the number of results for `num_values` values, in worker `worker` of `num_workers` of a rank."""
        return num_values


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
        """Return a buffer with its own random numbers."""
        initial = 100 if self.initial is None else self.initial
        draws = context.draws
        shards_a_pass = None if draws is None or draws.resampled else draws.num_shards
        label, each_epoch = context.known.label(self), context.is_cut
        return ShuffleBuffer(context.run, label, self.size, initial, each_epoch=each_epoch, shards_a_pass=shards_a_pass)


class ShuffleBuffer:
    """webdataset's buffer shuffle, seeded by (seed, epoch, rank, worker).

    Before with_epoch, the epoch is the one in which the stream began; after with_epoch (`each_epoch`), the running one.

    While the buffer fills, it takes two values for each value that it yields. It yields from `initial` values on. The
    buffer is emptied at the end of each pass over the shards, so that `with_epoch` of all samples yields each of them
    once. The n-th pick depends on n and not on the running epoch, so that threads of later stages may read beyond the
    end of an epoch.

    Args:
        run: The running pipeline.
        name: The stage's label, a key of its random numbers.
        size: Most values in the buffer.
        initial: Values in the buffer before the first one comes out.
        each_epoch: Whether the stage is after `with_epoch`.
        shards_a_pass: Draws of a pass over the shards; None if the source has no passes.
    """

    def __init__(
        self, run: Run, name: str, size: int, initial: int, *, each_epoch: bool, shards_a_pass: int | None = None
    ) -> None:
        self.run = run
        self.name = name
        self.each_epoch = each_epoch
        self.shards_a_pass = shards_a_pass
        self.size = size
        self.initial = min(initial, size)

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of `source` in another order."""
        run = self.run
        kept: list[tuple[Origin, Any]] = []
        values = iter(source)
        words = self._words()

        def pick(num: int) -> Any:
            """Take a uniform member of the first `num` values out of the buffer."""
            at = next(words) * num >> 64
            kept[at], kept[num - 1] = kept[num - 1], kept[at]
            run.origin, value = kept.pop(num - 1)
            return value

        def starts_pass() -> bool:
            """Whether the newest value belongs to another pass than the rest of the buffer."""
            return len(kept) > 1 and self._pass_of(kept[0][0]) != self._pass_of(kept[-1][0])

        while True:
            if starts_pass():
                yield pick(len(kept) - 1)
                continue
            value = next(values, _END)
            if value is _END:
                break
            kept.append((run.origin, value))
            if len(kept) < self.size and not starts_pass():
                kept += ((run.origin, value) for value in itertools.islice(values, 1))
            if len(kept) >= self.initial and not starts_pass():
                yield pick(len(kept))
        while kept:
            yield pick(len(kept))

    def _pass_of(self, origin: Origin) -> int:
        """The number of the pass; 0 if the source, or a stage of another library before this one, hides it."""
        if self.shards_a_pass is None or origin.part >> 63:
            return 0
        return origin.major // self.shards_a_pass

    def _words(self) -> Iterator[int]:
        """Random words of the epoch."""
        run = self.run
        epoch = run.epoch if self.each_epoch else run.first_epoch
        for chunk in itertools.count():
            bits = philox(f"shuffle:{self.name}", run.seed, epoch, run.rank_info.rank, run.worker, chunk)
            yield from bits.random_raw(_WORDS).tolist()


class Select(StreamStage):
    """Keep the values for which a function returns true."""

    name: ClassVar[str] = "select"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return the filter, whose function is found by its name."""
        return functools.partial(_select, context.run, context.known.call("select", self.fn, context.known.label(self)))


def _select(run: Run, predicate: Callable[[Any, Origin], Any], source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values for which `predicate` is true."""
    for value in source:
        run.note(run.board.main, run.origin)
        try:
            keep = bool(predicate(value, run.origin))
        except Exception as err:  # noqa: BLE001 (the SampleError has it as its cause)
            raise stage_error("select", run.origin, err) from cause_of(err)
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

    def write_settings(self) -> Any:
        """Return `[start, stop, step]`."""
        return [self.start, self.stop, self.step]

    @model_validator(mode="after")
    def _check_range(self) -> Slice:
        if self.stop is not None and self.stop <= self.start:
            raise refuse(f"it keeps nothing: `stop` {show(self.stop)} is not greater than `start` {show(self.start)}.")
        return self

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return the slice of the *rank*'s values: value n of worker w of W is number n * W + w, as in a loader."""
        return functools.partial(_slice, context.run, self.start, self.stop, self.step)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return how many numbers of this worker are in the slice."""
        stop = num_workers * num_values if self.stop is None else min(self.stop, num_workers * num_values)
        mine = range(worker, stop, num_workers)
        return sum(number >= self.start and (number - self.start) % self.step == 0 for number in mine)


def _slice(run: Run, start: int, stop: int | None, step: int, source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of the slice, and do not read after its end."""
    values = iter(source)
    number = run.worker
    while (stop is None or number < stop) and (value := next(values, _END)) is not _END:
        if number >= start and (number - start) % step == 0:
            yield value
        number += run.num_workers


class WithEpoch(StreamStage):
    """End an epoch after `n` values on each rank; the next epoch continues there."""

    name: ClassVar[str] = "with_epoch"
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"
    is_counted: ClassVar[bool] = True

    n: Count = Field(description="Number per rank: of samples before `batched`, of batches after it.", examples=[1000])

    def bind(self, context: StreamContext) -> EpochCut:
        """Return the end of the epoch. Later stages start again in each epoch."""
        context.is_cut = True
        return EpochCut(context.run, self.n)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """This worker's share of n, whatever goes in."""
        return share(self.n, worker, num_workers)


class EpochCut:
    """Takes this worker's share of n values from a stream. The stream continues with the next epoch.

    Attributes:
        left: Values of the running epoch that are still to be taken.
    """

    def __init__(self, run: Run, n: int) -> None:
        self.run = run
        self.n = n
        self.left = 0

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield this worker's share of one epoch.

        Raises:
            PipelineError: The stream ended before.
        """
        values = iter(source)
        wanted = share(self.n, self.run.worker, self.run.num_workers)
        self.left = wanted
        for self.left in range(wanted - 1, -1, -1):
            value = next(values, _END)
            if value is _END:
                number = wanted - 1 - self.left
                msg = f"with_epoch: the stream ended after {number} of the {wanted} values of this worker's epoch."
                raise PipelineError(f"{msg}\n  No stage before with_epoch can end the stream.")
            self.run.num_heard += 1
            yield value

    def finish(self, source: Iterator[Any]) -> None:
        """Skip the values of the epoch that later stages, such as a slice, did not take."""
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
