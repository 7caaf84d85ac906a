"""`batched` makes batches of values, `unbatched` splits them: the settings of each stage, and the class that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from wdskit.config.types import Bool, Count, FieldNames, Kind, refuse
from wdskit.errors import PipelineError
from wdskit.stages.base import Context, Function, FunctionFailed, Origin, Run, add_origin_note, cause_of, stage_error
from wdskit.stages.collate import FRESH, Collate, Memory, as_tensors
from wdskit.stages.streaming import StreamContext, StreamStage
from wdskit.stages.timing import TimingSampler


class Batched(StreamStage):
    """Make batches of consecutive values. By default, arrays and numbers are stacked; other values become lists."""

    name: ClassVar[str] = "batched"
    is_light: ClassVar[bool] = True
    kind: ClassVar[Kind] = "batch"
    shorthand: ClassVar[str | None] = "size"
    is_counted: ClassVar[bool] = True

    size: Count | None = Field(None, description="Samples per batch of one rank.", examples=[64])
    global_size: Count | None = Field(
        None, description="In place of `size`: samples in the batches of all ranks together."
    )
    partial: Bool = Field(
        True,
        description="For a stream: whether to keep a last, smaller batch; otherwise it is dropped. With a planned "
        "source, whose `tail` decides, false is an error.",
    )
    collate: Function | None = Field(None, description="Function from a list of samples to a batch.")
    ragged: FieldNames | None = Field(
        None, description="Fields with arrays of different lengths, which become values and offsets."
    )

    @model_validator(mode="after")
    def _check_one(self) -> Batched:
        if (self.size is None) == (self.global_size is None):
            what = "a size is missing" if self.size is None else "`size` and `global_size` exclude each other"
            raise refuse(f"{what}. Write `batched: 64`, or `batched: {{global_size: 4096}}`.")
        if self.ragged is not None and self.collate is not None:
            raise refuse("`ragged` has no effect with your own `collate`; remove one.")
        return self

    def size_on(self, world_size: int) -> int:
        """Return the number of samples in a batch of one of `world_size` ranks.

        Raises:
            PipelineError: `global_size` is not a multiple of `world_size`.
        """
        if self.size is not None:
            return self.size
        assert self.global_size is not None
        size, rest = divmod(self.global_size, world_size)
        if rest:
            near = [each * world_size for each in (size, size + 1) if each]
            msg = f"batched: global_size {self.global_size} is not a multiple of {world_size} ranks."
            raise PipelineError(f"{msg}\n  {' and '.join(map(str, near))} {'is' if len(near) == 1 else 'are'}.")
        return size

    def bind(self, context: StreamContext) -> Batcher:
        """See `StreamStage.bind`."""
        return self.make_batcher(context.stage_context)

    def make_batcher(self, context: Context) -> Batcher:
        """Return the callable that makes the batches.

        Raises:
            PipelineError: `global_size` is not a multiple of the number of ranks, or the name of a function or of a
                ragged field is unknown.
        """
        return make_batcher(self, context, partial=self.partial)

    def num_items(self, num_values: int, worker: int, num_workers: int, world_size: int) -> int:  # noqa: ARG002
        """Return the number of batches that one worker makes of `num_values` values. A smaller last batch counts if
        `partial` is set. PipelineError: `global_size` is not a multiple of `world_size`.
        """
        size = self.size_on(world_size)
        return -(-num_values // size) if self.partial else num_values // size


def make_batcher(stage: Any, context: Context, *, partial: bool) -> Batcher:
    """Return the `Batcher` of `stage`, a `Batched` or `Bucketed`. `partial` is the argument of `Batcher`.

    Raises:
        PipelineError: A global batch is not a multiple of the number of ranks, or the name of a function or of a ragged
            field is unknown.
    """
    collate: Callable[..., Any] = Collate(context.roles, frozenset(stage.ragged or ()))
    if stage.collate is not None:
        collate = context.resolve(stage.name, stage.collate)
    return Batcher(context.run, collate, stage.size_on(context.run.rank_info.world_size), partial=partial)


class Batcher:
    """Makes batches of `size` consecutive values, and yields each batch as soon as it is full.

    Args:
        run: The running pipeline.
        collate: A `Collate`, or a user's function that takes a list of values and returns a batch.
        size: Number of values in a batch.
        partial: Whether a smaller last batch is yielded; otherwise its values are dropped.
    """

    def __init__(self, run: Run, collate: Callable[..., Any], size: int, *, partial: bool) -> None:
        self.run = run
        self.collate = collate
        self.size = size
        self.partial = partial
        self._sampler = TimingSampler()

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the values of `source`. Before each batch, set `run.origin` to the origin of the batch.
        The default collate makes tensors, not arrays.

        Raises:
            SampleError: The values cannot be collated, or the user's function fails. The message names the first and
                the last sample of the batch.
        """
        values: list[Any] = []
        origins: list[Origin] = []
        for value in source:
            values.append(value)
            origins.append(self.run.origin)
            if len(values) == self.size:
                yield self._timed(values, origins)
                values, origins = [], []
        if values and self.partial:
            yield self._timed(values, origins)

    def _timed(self, values: list[Any], origins: list[Origin]) -> Any:
        timings = self._sampler.begin()
        batch, self.run.origin = self.collated(values, origins)
        if isinstance(self.collate, Collate):
            batch = as_tensors(batch)
        if timings is not None:
            timings.lap("batched", len(values))
            self.run.keep_timings(timings)
        return batch

    def collated(
        self,
        values: list[Any],
        origins: list[Origin],
        memory: Memory | None = None,
        ready: Mapping[Any, Any] | None = None,
    ) -> tuple[Any, Origin]:
        """Return a batch of these values, and the batch's origin. The default collate makes arrays, as `Collate` does.

        Args:
            values: At least one value.
            origins: Origin of each value.
            memory: Allocates the arrays of the default collate; None for new memory. A user's function ignores it.
            ready: Finished columns of the batch, by key of the dicts or position in the tuples. The default collate
                then ignores these items of `values`.

        Raises:
            SampleError: The values cannot be collated, or the user's function fails. The message names the first and
                the last sample of the batch.
        """
        origin = origins[-1]._replace(members=tuple(origins))
        try:
            if isinstance(self.collate, Collate):
                return self.collate(values, memory or FRESH, ready), origin
            try:
                with self.run.call_lock(self.collate, origin):
                    return self.collate(values), origin
            except Exception as err:
                raise FunctionFailed(err) from err
        except Exception as err:  # noqa: BLE001 (the SampleError has it as its cause)
            raise stage_error("batched", origin, err) from cause_of(err)
        except BaseException as err:
            add_origin_note("batched", origin, err)
            raise


class Unbatched(StreamStage):
    """Split each batch into its samples again."""

    name: ClassVar[str] = "unbatched"
    kind: ClassVar[Kind] = "stream"

    def bind(self, context: StreamContext) -> Unbatcher:
        """See `StreamStage.bind`."""
        return Unbatcher(context.run)


class Unbatcher:
    """Splits batches into samples."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples of each batch in order. Before each sample, set `self.run.origin` to the origin that the
        sample had before `batched`.

        If a function has changed the number of samples in the batch, a sample gets the shard and the position of the
        batch, with the sample's number in the batch + 1 as `part`, and no key.

        Raises:
            SampleError: The columns of a batch differ in length, or the batch cannot be iterated.
        """
        for batch in source:
            origin = self.run.origin
            try:
                samples = list(_split_batch(batch))
            except Exception as err:  # noqa: BLE001 (the SampleError has it as its cause)
                raise stage_error("unbatched", origin, err) from cause_of(err)
            if len(samples) == len(origin.members):
                origins = origin.members
            else:  # a function after `batched` has changed the number of samples
                origins = tuple(Origin(origin.url, "", *origin[2:4], part=part + 1) for part in range(len(samples)))
            for self.run.origin, value in zip(origins, samples, strict=True):
                yield value


def _split_batch(batch: Any) -> Iterator[Any]:
    """Return an iterator over the samples of a batch. A tuple of columns gives tuples, a dict of columns gives dicts,
    and a single column gives its values. PipelineError: Columns differ in length. TypeError: A column cannot be
    iterated.
    """
    if not isinstance(batch, (Mapping, tuple)):
        return iter(batch)
    columns = batch if isinstance(batch, Mapping) else dict(enumerate(batch))
    lengths = {name: _length(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        by_name = {name: "no column" if length is None else length for name, length in lengths.items()}
        raise PipelineError(
            f"unbatched: the columns of a batch differ in length: {by_name}. Put it directly after batched."
        )
    rows = zip(*map(iter, columns.values()), strict=True)
    return rows if isinstance(batch, tuple) else (dict(zip(batch, row, strict=True)) for row in rows)


def _length(column: Any) -> int | None:
    """Return the number of values of a column; None if `column` is a text, bytes, or a value without a length."""
    if isinstance(column, (str, bytes)):
        return None
    try:
        return len(column)
    except TypeError:  # a number, or a tensor without axes
        return None
