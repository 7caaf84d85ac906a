"""Batches of a program: the only way in which they are made, in this thread, in threads or in worker processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Places, Program
from wdskit.engine.shard_cache import ShardCache
from wdskit.errors import PROCESS_ERRORS, PipelineError, SampleError
from wdskit.stages.base import NOWHERE, Origin
from wdskit.stages.collate import FRESH, Memory, Ragged
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.marks import names_image
from wdskit.stages.progress import IDLE, Slot
from wdskit.stages.timing import Timings

VALID = "__valid__"

WHOLE_BATCH = 1
"""`major` on the board of a thread that works on a batch, not on one of its samples."""

CHUNK = 8
"""Most samples that a thread takes at a time."""

_MAX_SUBSTITUTES = 100
"""Neighbours that are tried in place of a bad sample. If all are bad, the pipeline is wrong rather than the samples."""


_DO_DECODE = "Pack it again without this sample (`--skip-bad`), or allow some: `errors: {max_bad: 10}`."


class Bad(NamedTuple):
    """A sample that could not be had, and for which another stands."""

    position: int
    shard: str
    key: str
    reason: str


class Batch(NamedTuple):
    """One batch, or one sample where nothing is batched.

    Attributes:
        value: What the pipeline gives.
        num_samples: Samples in it, without padding.
        bad: Those that were bad.
        raw: Field or place of images that are uint8 as yet, where numbers are to follow (`Program.without_numbers`).
        timings: What it took to make it and those behind it in its job.
        is_end: Of a stream: the epoch of the worker is over, and there is no value.
    """

    value: Any
    num_samples: int
    bad: tuple[Bad, ...] = ()
    raw: int | str | None = None
    timings: Timings | None = None
    is_end: bool = False


class Task(Protocol):
    """Who works on a job.

    Attributes:
        is_cancelled: Whether nobody wants it any more.
    """

    is_cancelled: bool

    def map(self, function: Callable[[int], None], num: int) -> None:
        """Call a function, which raises nothing, with 0 to num - 1, in any threads and order."""
        ...


class Here:
    """Works in this thread."""

    is_cancelled = False

    def map(self, function: Callable[[int], None], num: int) -> None:
        """See `Task`."""
        for number in range(num):
            function(number)


class Maker(Protocol):
    """What pools have their jobs done by."""

    def begin(self, job: Any) -> Any:
        """Let what a job needs be on its way; gives what the call takes. It raises nothing."""

    def __call__(self, work: Any, memory: Memory, task: Task, /) -> Outcome[list[Batch]]:
        """Do a job that has begun. It raises nothing."""
        ...

    def close(self) -> None:
        """Let go of what jobs share; the next job begins anew."""
        ...


def make_batches(
    program: Program,
    places: Places,
    memory: Memory = FRESH,
    task: Task | None = None,
    *,
    shards: ShardCache | None = None,
) -> Outcome[list[Batch]]:
    """The batches of some samples: the same whoever makes them. It raises nothing.

    Args:
        program: Of the pipeline.
        places: The samples of a job.
        memory: Where they are written.
        task: Who works on it; this thread without.
        shards: Where its samples are read; without, where the program says.

    Returns:
        All batches; or those before the first that failed, with the error: a ShardError where a shard is damaged, a
        SampleError where a stage failed on a sample and that is not forgiven.
    """
    batches: list[Batch] = []
    board = program.run.board
    slot = board.claim()
    slot[0] = WHOLE_BATCH
    try:
        timings = _make(program, places, shards or program.shards, memory, task or Here(), batches, slot)
        batches[0] = batches[0]._replace(timings=timings)
    except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
        return Outcome(batches, err)
    finally:
        board.release(slot)
    return Outcome(batches)


class _Cancelled(Exception):
    """Nobody wants the job any more."""


def _make(
    program: Program,
    places: Places,
    cache: ShardCache,
    memory: Memory,
    task: Task,
    batches: list[Batch],
    slot: Slot,
) -> Timings:
    """Add the batches of a job one by one. `slot` says so on the board, but not while single samples are made."""
    _, numbers, is_sample, shards, samples = places
    size = program.plan.batch
    bounds = [slice(first, first + size) for first in range(0, len(numbers), size)]
    columns, timings = program.columns, program.pace.begin()
    first = int(numbers[0])
    slot[1] = first if columns is not None else IDLE
    columnar = None if columns is None else columns.make(cache, numbers, shards, samples, bounds, memory)
    if columns is not None and columnar is None and len(bounds) > 1:  # one of the batches is not like that
        total = Timings()
        for at in bounds:
            total.merge(_make(program, places.part(at), cache, memory, task, batches, slot))
        return total
    total = Timings(bytes_read=program.shards.mean_bytes(shards))
    collated: Iterable[tuple[Any, Origin, Any, tuple[Bad, ...], int | str | None]]
    if columnar is not None:
        if timings is not None:
            timings.lap("read-to-batched", len(numbers))
        collated = ((value, origin, True, (), None) for value, origin in columnar)
    else:
        rows = _Rows(program, places, cache, memory)
        slot[1] = IDLE
        rows.make(bounds, task, total)
        slot[1] = first
        if timings is not None:
            timings.start()
        collated = itertools.starmap(rows.collate, enumerate(bounds))
    for bound, (value, origin, good, bad, raw) in zip(bounds, collated, strict=True):
        mask = is_sample[bound]
        if timings is not None and columnar is None and program.batched is not None:
            timings.lap("batched", len(mask))
        if program.behind is not None:
            value = program.behind.apply(value, origin, timings=timings, num=len(mask))
        if program.plan.tail == "pad":
            if program.batched is not None and program.behind is not None:
                _check_rows(value, len(mask), origin)
            value = with_mask(value, torch.from_numpy(mask & good) if program.batched else bool((mask & good)[0]))
        batches.append(Batch(value, int(np.count_nonzero(mask)), bad, raw))
    if timings is not None:
        total.merge(timings)
    total.traffic = total.traffic.plus(cache.take_traffic())
    return total


class _Rows:
    """The samples of a job one by one, in chunks that any threads take in any order. Samples behind one that failed are
    not begun.
    """

    def __init__(self, program: Program, places: Places, cache: ShardCache, memory: Memory) -> None:
        self._program = program
        self._places = places
        self._cache = cache
        columns = (places.numbers, places.shards, places.samples)
        found = list(zip(*(each.tolist() for each in columns), strict=True))
        self._found: list[tuple[int, int, int]] = found
        self._memory = memory
        self._results: list[tuple[Any, Origin, str | None]] = [(None, NOWHERE, None)] * len(found)
        self._errors: dict[int, BaseException] = {}
        self._slots: list[torch.Tensor | None] = []  # of each batch: what its images are written into
        self._images: list[torch.Tensor] = []  # of each sample: its own there

    def make(self, bounds: list[slice], task: Task, total: Timings) -> None:
        """Make all samples; what that took is added to `total`."""
        program, num = self._program, len(self._found)
        writer = program.writer
        for bound in bounds:
            slot = None
            if writer is not None:
                assert writer.out_shape is not None
                shape = (len(range(*bound.indices(num))), *writer.out_shape)
                slot = self._memory.empty(shape, writer.out_ending.dtype, channels_last=True)
                self._images += slot.split(1)
            self._slots.append(slot)
        size = max(1, min(CHUNK, num // program.run.num_threads))  # small batches too are made in all threads
        num_chunks = -(-num // size)
        timed: list[Timings] = []  # each from one thread

        def run(chunk: int) -> None:
            timings = program.chunk_pace.begin()
            slot = program.run.board.claim()
            slot[0] = 0
            rows = range(chunk * size, min(num, (chunk + 1) * size))
            if self._run(rows, task, timings, slot) and timings is not None:
                timed.append(timings)
            program.run.board.release(slot)

        task.map(run, num_chunks)
        if task.is_cancelled:  # not all are made
            raise _Cancelled
        for each in timed:
            total.merge(each)

    def _run(self, rows: range, task: Task, timings: Timings | None, slot: Slot) -> bool:
        """Make the samples of one chunk. False where one of them, or one before, failed."""
        at = rows.start
        try:
            decoded = self._decode(rows, timings, slot) if self._program.first is not None else {}
            for at in rows:
                if task.is_cancelled or (self._errors and min(self._errors.copy()) < at):
                    return False
                slot[1] = self._found[at][0]
                self._results[at] = self._one(at, timings, decoded.pop(at, None))
        except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
            self._errors[at] = err
            return False
        return True

    def _decode(self, rows: range, timings: Timings | None, slot: Slot) -> dict[int, tuple[Any, Origin]]:
        """Samples behind the first stage, which decodes an image: first all are read, then all prepared, then their
        pixels follow. One by one, all of it would run with caches that a decoder has filled, and hold Python's lock
        three to five times as long. What goes wrong with one is left to `_one`.
        """
        first = self._program.first
        assert first is not None
        read, prepared, decoded = [], [], {}
        for at in rows:
            place, shard, sample = self._found[at]
            slot[1] = place
            with contextlib.suppress(Exception):
                path, key, part, fields = self._cache.read(shard, sample, names_image)
                read.append((at, Origin(path, key, 0, place, part), fields))
        if timings is not None:
            timings.lap("read", len(rows))
        for at, origin, fields in read:
            with contextlib.suppress(Exception):
                prepared.append((at, first.prepare({"__key__": origin.key, "__url__": origin.url, **fields}, origin)))
        if timings is not None:
            timings.lap("headers", len(rows))
        label = self._program.stages.steps[0].label
        for at, each in prepared:
            slot[1] = self._found[at][0]
            with contextlib.suppress(Exception):
                decoded[at] = first.carry_out(each, self._images[at] if self._images else None), each.origin
                if timings is not None:
                    timings.lap(label)
        return decoded

    def _one(
        self, at: int, timings: Timings | None, decoded: tuple[Any, Origin] | None
    ) -> tuple[Any, Origin, str | None]:
        """A sample behind all one-to-one stages; with the origin of the bad one and the reason, where another stands
        in for it.
        """
        place, shard, sample = self._found[at]
        writer = self._program.writer
        out = (writer, self._images[at]) if writer is not None else None
        try:
            if decoded is not None:
                value, origin = decoded
                return self._program.stages.apply(value, origin, None, timings, 1), origin, None
            return *self._sample(place, shard, sample, out, timings), None
        except SampleError as err:
            if not self._forgives(err):
                if err.stage == "decode" and not isinstance(err.__cause__, PROCESS_ERRORS):
                    err.args = (f"{err}\n  {_DO_DECODE}",)
                raise
            return self._substitute(err.with_traceback(None), place, out, timings)

    def _substitute(
        self,
        bad: SampleError,
        place: int,
        out: tuple[FusedStep, torch.Tensor] | None,
        timings: Timings | None,
        check: Callable[[Any, Origin], object] = lambda *_: None,
    ) -> tuple[Any, Origin, str]:
        """The next good sample that `check` does not refuse with a SampleError."""
        for attempt in range(1, _MAX_SUBSTITUTES + 1):
            other = self._program.plan.order.substitute(place, attempt)
            if other is None:
                break
            try:
                value, origin = self._sample(place, *other, out, timings)
                check(value, origin)
            except SampleError as err:
                if not self._forgives(err):
                    raise
            else:
                return value, Origin(bad.shard, bad.key, 0, place, 0), str(bad)
        msg = f"{bad}\n  No sample near it can replace it: all {attempt} are bad."
        raise SampleError(msg, stage=bad.stage, shard=bad.shard, key=bad.key) from bad

    def _sample(
        self,
        place: int,
        shard: int,
        sample: int,
        out: tuple[FusedStep, torch.Tensor] | None,
        timings: Timings | None,
    ) -> tuple[Any, Origin]:
        path, key, part, fields = self._cache.read(shard, sample)
        if timings is not None:
            timings.lap("read")
        origin = Origin(path, key, 0, place, part)
        return self._program.stages.apply({"__key__": key, "__url__": path, **fields}, origin, out, timings), origin

    def _forgives(self, err: SampleError) -> bool:
        plan = self._program.plan
        if isinstance(err.__cause__, PROCESS_ERRORS):
            return False
        return plan.forgives and (plan.forgives_functions or not err.is_function)

    def collate(self, number: int, bound: slice) -> tuple[Any, Origin, Any, tuple[Bad, ...], int | str | None]:
        """One batch, or one sample where nothing is batched; its origin, which of its samples are good, those that are
        not, and where its images stand that are uint8 as yet.

        Raises:
            ShardError: A shard is damaged.
            SampleError: A stage failed on a sample, and that is not forgiven.
        """
        self._raise_before(bound.stop)
        try:
            return self._collate(number, bound)
        except SampleError as err:
            if not self._forgives(err):
                raise
            self._replace_misfits(bound)
        return self._collate(number, bound)

    def _replace_misfits(self, bound: slice) -> None:
        """Put other samples in place of those that do not batch with most of their batch, or not even alone."""
        batched = self._program.batched
        assert batched is not None
        rows = range(*bound.indices(len(self._found)))
        owned = {at: self._owned(self._results[at][0], at) for at in rows}
        groups: list[list[int]] = []

        def check(at: int, value: Any, origin: Origin) -> None:
            """Raise the SampleError of this value, alone or with the first one of the largest group."""
            firsts = [max(groups, key=len)[0]] if groups else []
            values = [*(owned[first] for first in firsts), self._owned(value, at)]
            batched.collated(values, [*(self._results[first][1] for first in firsts), origin])

        for at in rows:
            for group in [*groups, None]:
                try:
                    pair = [at] if group is None else [group[0], at]
                    batched.collated([owned[each] for each in pair], [self._results[each][1] for each in pair])
                except SampleError:
                    continue
                groups.append([at]) if group is None else group.append(at)
                break
        usual = max(groups, key=len, default=[])
        for at in rows:
            if at in usual:
                continue
            value, origin, reason = self._results[at]
            try:
                check(at, value, origin)
                continue  # it is the whole batch that does not fit
            except SampleError as err:
                bad = err.with_traceback(None)
            writer = self._program.writer
            out = (writer, self._images[at]) if writer is not None else None
            found = self._substitute(bad, self._found[at][0], out, None, functools.partial(check, at))
            self._results[at] = found if reason is None else (found[0], origin, reason)

    def _owned(self, value: Any, at: int) -> Any:
        """A sample whose image is not part of the batch."""
        writer = self._program.writer
        return value if writer is None else _own(value, self._images[at], writer)

    def _collate(self, number: int, bound: slice) -> tuple[Any, Origin, Any, tuple[Bad, ...], int | str | None]:
        values, origins, reasons = map(list, zip(*self._results[bound], strict=True))
        good: Any = True
        bad: tuple[Bad, ...] = ()
        if any(reasons):
            good = np.array([reason is None for reason in reasons])
            bad = tuple(
                Bad(position, origin.url, origin.key, reason)
                for position, is_sample, origin, reason in zip(
                    self._places.positions[bound].tolist(), self._places.is_sample[bound], origins, reasons, strict=True
                )
                if reason is not None and is_sample
            )
        batched, writer = self._program.batched, self._program.writer
        if batched is None:
            return values[0], origins[0], good, bad, None
        slot, images = self._slots[number], self._images[bound]
        place = None if slot is None else _place_of(images, values)
        if writer is not None and place is None:
            values = [_own(value, image, writer) for value, image in zip(values, images, strict=True)]
        batch, origin = batched.collated(values, origins, self._memory, {} if place is None else {place: slot})
        is_raw = writer is not None and writer.out_ending != writer.ending
        return batch, origin, good, bad, place if is_raw else None

    def _raise_before(self, stop: int) -> None:
        if not self._errors or min(self._errors) >= stop:
            return
        err = self._errors[min(self._errors)]
        try:
            raise err
        finally:
            self._errors.clear()  # its traceback refers to this frame: a cycle would keep the batch alive
            del err


def _place_of(images: list[torch.Tensor], values: list[Any]) -> int | str | None:
    """The field or place at which each sample has its own image of the batch; None if there is no such."""
    first = values[0]
    items = first.items() if isinstance(first, dict) else enumerate(first) if isinstance(first, tuple) else ()
    places = [place for place, value in items if value is images[0]]
    if len(places) != 1 or any(type(value) is not type(first) for value in values):
        return None
    [place] = places
    try:
        written = all(value[place] is image for value, image in zip(values, images, strict=True))
    except (KeyError, IndexError):
        return None
    return place if written else None


def _own(sample: Any, image: torch.Tensor, writer: FusedStep) -> Any:
    """A sample with its image as each stage by itself gives it, for batches in which not all stand where they were
    written: one of the samples is not the common case (two images, or one that is decoded already).
    """
    if isinstance(sample, dict):
        return {name: writer.value_of(image) if value is image else value for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(writer.value_of(image) if value is image else value for value in sample)
    return sample


def _check_rows(value: Any, num_rows: int, origin: Origin) -> None:
    """Refuse a batch whose columns do not have the rows of its mask, since a function has changed their number.

    Raises:
        PipelineError: It names the column.
    """
    columns = (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, tuple) else (value,))
    )
    for name, column in columns:
        is_column = isinstance(column, (list, Ragged)) or getattr(column, "ndim", 0) > 0
        if is_column and len(column) != num_rows:
            raise PipelineError(
                f"{origin}: after `batched`, a function made {len(column)} rows of {num_rows} in `{name}`. `tail: pad` "
                f"adds a mask of {num_rows} rows, `{VALID}`.\n  Keep the number of rows, or use `tail: drop`."
            )


def with_mask(value: Any, mask: Any) -> Any:
    """A batch or sample that carries its mask: as `__valid__` in a dict, as the last element of a tuple.

    Raises:
        PipelineError: The dict has a field of this name.
    """
    if isinstance(value, Mapping):
        if VALID in value:
            msg = f"`{VALID}` is the mask that `tail: pad` adds, but the samples have a field of this name."
            raise PipelineError(f"{msg}\n  `rename` it, or use `tail: drop`.")
        return {**value, VALID: mask}
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
