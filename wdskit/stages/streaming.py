"""Stages for streams only: `shuffle`, `select`, `slice`, `with_epoch`, `with_length`.

A class has the stage's settings and its YAML form. Its `bind(context)` returns a callable `iterator -> iterator` that
can be pickled before its first use. `Slice` is a template for a new stage. The source `stream` and its splitters are in
`stream_source`; `tarfile_to_samples` is in `shard_reader`.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from wdskit.config.types import Count, Kind, Natural, StageSpec, refuse, show
from wdskit.dataset.patterns import ShardList
from wdskit.errors import PipelineError
from wdskit.order.draws import Draws, share
from wdskit.order.keys import philox
from wdskit.stages.base import Context, Function, Origin, Run, add_origin_note, cause_of, stage_error

_END = object()
_CHUNK = 1024  # random words per call: 0.1 us each, against 5 us in single calls
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples are spread evenly, also every second or third one


class StreamContext:
    """What the `bind` of a stage knows while a stream is built. A stage may change the attributes for later stages.

    Attributes:
        stage_context: The context of the stage that is bound now.
        run: The running pipeline.
        shards: The shards of the source `stream`; None for a foreign source.
        check: The setting `check` of the source `stream`; "size" for a foreign source.
        draws: The order of the shards; None for a foreign source.
        is_after_with_epoch: Whether `with_epoch` is an earlier stage.
        length: `n` of `with_length`; None without `with_length`.
    """

    def __init__(self, stage_context: Context) -> None:
        self.stage_context = stage_context
        self.run = stage_context.run
        self.shards: ShardList | None = None
        self.check = "size"
        self.draws: Draws | None = None
        self.is_after_with_epoch = False
        self.length: int | None = None


class StreamStage(StageSpec):
    """A stage that turns a stream of values into another stream.

    Attributes:
        is_counted: Whether `num_items` can tell the number of values before a run.
    """

    is_counted: ClassVar[bool] = False

    @abstractmethod
    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]] | None:
        """Return a callable that takes the iterator of the stage before and returns the iterator of this stage. Return
        None for a stage that changes no values.

        Raises:
            PipelineError: The stage cannot run in this pipeline, for example because a function's name is unknown.
        """

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return the number of values that the stage yields in one worker process of a rank.

        Args:
            num_values: Number of values that the stage gets in this worker.
            worker: Number of the worker, from 0.
            num_workers: Number of workers of the rank; 1 in the main process.
            world_size: Number of ranks.
        """
        return num_values


class Shuffle(StreamStage):
    """Shuffle the values in a buffer."""

    name: ClassVar[str] = "shuffle"
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "size"
    is_counted: ClassVar[bool] = True

    size: Count = Field(description="Number of values in the buffer.", examples=[2000])
    initial: Count | None = Field(
        None, description="Number of values in the buffer before the first one comes out. Default: 100, at most `size`."
    )

    @field_validator("initial")
    @classmethod
    def _check_initial(cls, initial: int | None, info: Any) -> int | None:
        size = info.data.get("size")
        if initial is not None and size is not None and initial > size:
            raise refuse(f"{show(initial)} is more than the buffer holds (`size` is {show(size)}).")
        return initial

    def bind(self, context: StreamContext) -> ShuffleBuffer:
        """Return the `ShuffleBuffer` with the settings of this stage."""
        initial = 100 if self.initial is None else self.initial
        draws = context.draws
        num_shards = None if draws is None or draws.resampled else draws.num_shards
        label, each_epoch = context.stage_context.label(self), context.is_after_with_epoch
        return ShuffleBuffer(context.run, label, self.size, initial, each_epoch=each_epoch, num_shards=num_shards)


class ShuffleBuffer:
    """Shuffles a stream as webdataset does: values enter a buffer, and leave it in random order.

    Until the buffer is full, it takes two values for each value that it yields. At the end of each pass over the
    shards, the buffer yields all its values, so that an epoch of the size of the data has each sample once.

    The random numbers depend on the seed, the epoch, the rank and the worker. The epoch is the running epoch if
    `each_epoch` is True, otherwise the epoch in which the stream started.

    Args:
        run: The running pipeline.
        name: The stage's label, a key of its random numbers.
        size: Largest number of values in the buffer.
        initial: Number of values in the buffer before the first value is yielded.
        each_epoch: Whether the stage is after `with_epoch`.
        num_shards: Number of shards in a pass over all shards; None if the source has no passes.
    """

    def __init__(
        self, run: Run, name: str, size: int, initial: int, *, each_epoch: bool, num_shards: int | None = None
    ) -> None:
        self.run = run
        self.name = name
        self.each_epoch = each_epoch
        self.num_shards = num_shards
        self.size = size
        self.initial = min(initial, size)

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield each value of `source` once, in random order. Before each value, set `run.origin` to its origin."""
        run = self.run
        buffer: list[tuple[Origin, Any]] = []
        values = iter(source)
        words = self._words()

        def pick(num: int) -> Any:
            """Remove a random one of the first `num` values from the buffer, set `run.origin`, and return the value."""
            at = next(words) * num >> 64
            buffer[at], buffer[num - 1] = buffer[num - 1], buffer[at]
            run.origin, value = buffer.pop(num - 1)
            return value

        def starts_pass() -> bool:
            """Return whether the last value in the buffer is from a later pass over the shards than the first value."""
            return len(buffer) > 1 and self._pass_of(buffer[0][0]) != self._pass_of(buffer[-1][0])

        while True:
            if starts_pass():
                yield pick(len(buffer) - 1)
                continue
            value = next(values, _END)
            if value is _END:
                break
            buffer.append((run.origin, value))
            if len(buffer) < self.size and not starts_pass():
                buffer += ((run.origin, value) for value in itertools.islice(values, 1))
            if len(buffer) >= self.initial and not starts_pass():
                yield pick(len(buffer))
        while buffer:
            yield pick(len(buffer))

    def _pass_of(self, origin: Origin) -> int:
        """Return the number of the pass over the shards in which the value of `origin` was read, from 0. Return 0
        without passes, or if an earlier stage is foreign.
        """
        if self.num_shards is None or origin.part >> 63:
            return 0
        return origin.major // self.num_shards

    def _words(self) -> Iterator[int]:
        """Yield random 64-bit words, without end, for the stage, the seed, the epoch, the rank and the worker."""
        run = self.run
        epoch = run.epoch if self.each_epoch else run.first_epoch
        for chunk in itertools.count():
            bits = philox(f"shuffle:{self.name}", run.seed, epoch, run.rank_info.rank, run.worker, chunk)
            yield from bits.random_raw(_CHUNK).tolist()


class Select(StreamStage):
    """Keep the values for which a function returns true."""

    name: ClassVar[str] = "select"
    calls_user: ClassVar[bool] = True
    kind: ClassVar[Kind] = "stream"
    shorthand: ClassVar[str | None] = "fn"

    fn: Function = Field(description="A function, or the name of a registered one.", examples=["my_filter"])

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return a callable that yields the values for which the function returns true. PipelineError: The name of the
        function is unknown, or is that of a class that needs settings.
        """
        stage_context = context.stage_context
        return functools.partial(_select, context.run, stage_context.call("select", self.fn, stage_context.label(self)))


def _select(run: Run, predicate: Callable[[Any, Origin], Any], source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values for which `predicate` is true. A sample on which `predicate` raises an Exception is skipped if
    `Run.skips` allows it; otherwise this raises its SampleError.
    """
    for value in source:
        run.mark_busy(run.board.main, run.origin)
        try:
            keep = bool(predicate(value, run.origin))
        except Exception as err:  # noqa: BLE001 (the SampleError has it as its cause)
            if _skips(run, err):
                continue
            raise stage_error("select", run.origin, err) from cause_of(err)
        except BaseException as err:
            add_origin_note("select", run.origin, err)
            raise
        if keep:
            yield value


def _skips(run: Run, err: Exception) -> bool:
    """Return `Run.skips` for the sample on which `select` failed with `err`."""
    failed = stage_error("select", run.origin, err)
    failed.__cause__ = cause_of(err)
    return run.skips(failed, run.origin)


class Slice(StreamStage):
    """Keep a range of the values, like a slice in Python.

    The values of all workers of a rank are counted together: one of each worker in each turn. The first worker of a
    turn depends on the number of the turn.
    """

    name: ClassVar[str] = "slice"
    kind: ClassVar[Kind] = "stream"
    is_starred: ClassVar[str] = "bounds"
    shorthand: ClassVar[str | None] = "stop"
    is_counted: ClassVar[bool] = True

    start: Natural = Field(0, description="Number of the first value.")
    stop: Natural | None = Field(
        None,
        description="The end of the range, which is excluded; or its start and end; or start, end and step. No number "
        "is negative. null: no end.",
        examples=[1000],
    )
    step: Count = Field(1, description="Keep one of every `step` values.")

    @classmethod
    def expand(cls, value: object) -> dict[str, Any]:
        """Return the settings as a dict. `value` is their form in YAML: the number `stop`, `[start, stop]`, `[start,
        stop, step]` or a mapping. None gives an empty dict. The settings are not checked.

        Raises:
            ValueError: `value` is a list with fewer than 2 or more than 3 items.
        """
        if not isinstance(value, (list, tuple)):
            return super().expand(value)
        if not 2 <= len(value) <= 3:
            raise ValueError(f"{show(value)} has {len(value)} items; write stop, [start, stop] or [start, stop, step].")
        return dict(zip(("start", "stop", "step"), value, strict=False))

    @model_validator(mode="after")
    def _check_range(self) -> Slice:
        if self.stop is not None and self.stop <= self.start:
            raise refuse(f"it keeps nothing: `stop` {show(self.stop)} is not greater than `start` {show(self.start)}.")
        return self

    def bind(self, context: StreamContext) -> Callable[..., Iterator[Any]]:
        """Return a callable that keeps this worker's values of the slice (see `_numbers_of`)."""
        return functools.partial(_slice, context.run, self.start, self.stop, self.step)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return the number of values that the slice keeps in one worker, if each worker of the rank gets `num_values`.
        The arguments are those of `StreamStage.num_items`.
        """
        return _num_kept(self.start, self.stop, self.step, num_values, worker, num_workers)


@functools.lru_cache(maxsize=1024)  # `len(loader)` may be asked for at each step; a million values take 0.6 s
def _num_kept(start: int, stop: int | None, step: int, num_values: int, worker: int, num_workers: int) -> int:
    """Return how many of the first `num_values` values of a worker are in the slice."""
    numbers: Iterator[int] = itertools.islice(_numbers_of(worker, num_workers), num_values)
    if stop is not None:
        numbers = itertools.takewhile(stop.__gt__, numbers)
    return sum(number >= start and (number - start) % step == 0 for number in numbers)


def _slice(run: Run, start: int, stop: int | None, step: int, source: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of this worker that are in the slice (see `_numbers_of`). Values from number `stop` on are not
    read from `source`.
    """
    values = iter(source)
    for number in _numbers_of(run.worker, run.num_workers):
        if (stop is not None and number >= stop) or (value := next(values, _END)) is _END:
            return
        if number >= start and (number - start) % step == 0:
            yield value


def _numbers_of(worker: int, num_workers: int) -> Iterator[int]:
    """Yield the numbers of a worker's values among the values of all workers of the rank, without end.

    Each turn has one value of each worker. Its first worker is drawn from the number of the turn: if it were always the
    same, a slice with a step of 2 would have only values of one of two workers.
    """
    for turn in itertools.count():
        first = (turn * _GOLDEN % 2**64) * num_workers >> 64
        yield turn * num_workers + (worker - first) % num_workers


class WithEpoch(StreamStage):
    """End an epoch after `n` values on each rank. The next epoch continues with the next value."""

    name: ClassVar[str] = "with_epoch"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"
    is_counted: ClassVar[bool] = True

    n: Count = Field(description="Number per rank: of samples before `batched`, of batches after it.", examples=[1000])

    def bind(self, context: StreamContext) -> EpochCut:
        """Return the callable that ends epochs, and set `context.is_after_with_epoch`."""
        context.is_after_with_epoch = True
        return EpochCut(context.run, self.n)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return the number of this worker's values in an epoch: its near-equal share of the setting `n`, the number of
        values of its rank. Only `worker` and `num_workers` have an effect.
        """
        return share(self.n, worker, num_workers)


class EpochCut:
    """Cuts a stream into epochs. The workers of a rank share the `n` values of the rank's epoch.

    Attributes:
        left: Number of this worker's values of the running epoch that have not been read from the stream yet.
    """

    def __init__(self, run: Run, n: int) -> None:
        self.run = run
        self.n = n
        self.left = 0

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield this worker's values of one epoch. For the next epoch, call this method again with the same iterator.

        Before each value, `run.num_yielded` is increased by 1.

        Raises:
            PipelineError: The stream ended before the epoch was complete.
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
            self.run.num_yielded += 1
            yield value

    def finish(self, source: Iterator[Any]) -> None:
        """Read from `source` the last `left` values of this worker's epoch, which later stages did not take, and drop
        them. Then `left` is 0. `source` may end earlier.
        """
        for _ in itertools.islice(source, self.left):
            self.run.num_yielded += 1
        self.left = 0


class WithLength(StreamStage):
    """Set the length that `len(loader)` returns. The values of an epoch do not change."""

    name: ClassVar[str] = "with_length"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "epoch"
    shorthand: ClassVar[str | None] = "n"
    is_counted: ClassVar[bool] = True

    n: Count = Field(description="The length.", examples=[1000])

    def bind(self, context: StreamContext) -> None:
        """Set `context.length` to `n`. Return None, because the stage changes no values."""
        context.length = self.n
