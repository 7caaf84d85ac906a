"""One batch of a planned pipeline in the making: its samples in chunks, by any threads in any order, then the batch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.engine.jobs import Bad, Job, Made
from wdskit.engine.shards import ManySamples
from wdskit.errors import PROCESS_ERRORS, SampleError
from wdskit.order.base import Ints
from wdskit.stages.base import Origin
from wdskit.stages.collate import Memory
from wdskit.stages.layouts import names_image
from wdskit.stages.timing import Timings, started

if TYPE_CHECKING:
    from wdskit.engine.planned import PlannedPipeline

VALID = "__valid__"

CHUNK = 8
"""Samples that a thread takes at a time."""

_FIELD_STAGES = frozenset({"decode", "to_tuple", "to_dict", "rename"})
"""Stages whose failure means that a field is missing or cannot be decoded."""


class Making:
    """One job at work. `prepare` it, `run` each chunk once, in any thread, then `finish`.

    A chunk never raises: what went wrong is raised by `finish`, of several errors that of the first sample. Samples
    behind one that failed are not begun.

    Args:
        pipeline: Whose batch it is.
        job: Which batch.
        memory: Where it is written.
    """

    def __init__(self, pipeline: PlannedPipeline, job: Job, memory: Memory) -> None:
        self.job = job
        self._pipeline = pipeline
        self._memory = memory
        self._found: list[tuple[int, int, int]] = []
        self._results: list[tuple[Any, Origin, str | None]] = []
        self._errors: dict[int, BaseException] = {}
        self._timings = Timings()
        self._timed: dict[int, int] = {}  # chunks that are, and for how many each counts
        self._chunk_timings: list[Timings] = []  # each from one thread
        self._slot: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, ...] = ()
        self._is_raw = False
        self._is_dropped = False
        self._read: ManySamples | None = None

    def drop(self) -> None:
        """Begin no sample any more: nobody wants the batch. `finish` is not called then."""
        self._is_dropped = True

    def prepare(self) -> int:
        """Find out which samples these are, and give the number of chunks."""
        return self.prepare_found(*find(self._pipeline, self.job))

    def prepare_found(self, places: Ints, shards: Ints, samples: Ints, read: ManySamples | None = None) -> int:
        """As `prepare`, where it is known what `find` says, and where the samples may have been read."""
        self._read = read
        batched = self._pipeline.batched
        self._found = list(zip(places.tolist(), shards.tolist(), samples.tolist(), strict=True))
        self._results = [(None, _NOBODY, None)] * len(self._found)
        self._timings.bytes_read = self._pipeline.shards.mean_bytes(shards)
        writer = self._pipeline.each.writer
        if writer is not None and batched is not None:
            assert writer.out_shape is not None
            shape = (len(self._found), *writer.out_shape)
            self._slot = self._memory.empty(shape, writer.out_ending.dtype, channels_last=True)
            self._rows = self._slot.split(1)
            self._is_raw = writer.out_ending != writer.ending
        num_chunks = -(-len(self._found) // CHUNK)
        self._timed = self._pipeline.chunk_pace.pick(num_chunks)
        return num_chunks

    def run(self, chunk: int) -> None:
        """Make the samples of one chunk."""
        weight = self._timed.get(chunk)
        timings = None if weight is None else started(weight)
        rows = range(chunk * CHUNK, min(len(self._found), (chunk + 1) * CHUNK))
        decoded = self._decode(rows, timings) if self._pipeline.each.first else {}
        for at in rows:
            if self._is_dropped or (self._errors and min(self._errors.copy()) < at):
                return
            try:
                self._results[at] = self._one(at, timings, decoded.pop(at, None))
            except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
                self._errors[at] = err
                return
        if timings is not None:
            self._pipeline.chunk_pace.end(timings)
            self._chunk_timings.append(timings)

    def _decode(self, rows: range, timings: Timings | None) -> dict[int, tuple[Any, Origin]]:
        """Samples behind the first step, which decodes an image: first all are read, then all prepared, then the pixels
        follow. One by one, all of it would run with caches that a decoder has filled, and hold Python's lock three to
        five times as long. What goes wrong with one is left to `_one`.
        """
        first, shards = self._pipeline.each.first, self._pipeline.shards
        assert first is not None
        read, prepared, decoded = [], [], {}
        for at in rows:
            place, shard, sample = self._found[at]
            with contextlib.suppress(Exception):
                path, key, part, fields = shards.read(shard, sample, names_image)
                read.append((at, Origin(path, key, 0, place, part), fields))
        if timings is not None:
            timings.lap("read", len(rows))
        for at, origin, fields in read:
            with contextlib.suppress(Exception):
                prepared.append((at, first.prepare({"__key__": origin.key, "__url__": origin.url, **fields}, origin)))
        if timings is not None:
            timings.lap("headers", len(rows))
        for at, each in prepared:
            with contextlib.suppress(Exception):
                decoded[at] = first.carry_out(each, self._rows[at] if self._rows else None), each.origin
                if timings is not None:
                    timings.lap(self._pipeline.each.steps[0].label)
        return decoded

    def finish(self) -> Made:
        """The batch, with its mask if the tail is padded.

        Raises:
            ShardError: A shard is not right.
            SampleError: A stage failed on a sample, and that is not forgiven.
        """
        self._raise_first()
        ready = self._place_of_slot()
        if ready is None:
            self._take_apart()
        values, origins, reasons = zip(*self._results, strict=True)
        bad = tuple(
            Bad(position, origin.url, origin.key, reason)
            for position, origin, reason in zip(self.job.positions, origins, reasons, strict=True)
            if reason is not None and position < self.job.num_samples
        )
        valid = is_sample(self.job) & np.array([reason is None for reason in reasons])
        tail = self._pipeline.plan.tail
        for each in self._chunk_timings:
            self._timings.merge(each)
        if self._pipeline.batched is None:
            samples = list(values) if tail == "drop" else list(map(with_mask, values, valid.tolist()))
            return Made(samples, bad, timings=self._timings)
        batch = self._together(list(values), list(origins), ready)
        raw = ready if self._is_raw else None
        return Made(batch if tail == "drop" else with_mask(batch, torch.from_numpy(valid)), bad, raw, self._timings)

    def _raise_first(self) -> None:
        if not self._errors:
            return
        err = self._errors[min(self._errors)]
        try:
            raise err
        finally:
            self._errors.clear()  # its traceback refers to this frame: a cycle would keep the batch alive
            del err

    def _together(self, values: list[Any], origins: list[Origin], ready: Any) -> Any:
        batched, pace = self._pipeline.batched, self._pipeline.batch_pace
        assert batched is not None
        timings = pace.begin()
        batch, origin = batched.collated(values, origins, self._memory, {} if ready is None else {ready: self._slot})
        if timings is not None:
            timings.lap("batched")
        batch = run_behind(self._pipeline, batch, origin, timings)
        if timings is not None:
            pace.end(timings)
            self._timings.merge(timings)
        return batch

    def _place_of_slot(self) -> Any:
        """The field or place at which each sample has its own row of the slot; None if there is no such."""
        if not self._rows:
            return None
        values = [value for value, _, _ in self._results]
        first = values[0]
        items = first.items() if isinstance(first, dict) else enumerate(first) if isinstance(first, tuple) else ()
        places = [place for place, value in items if value is self._rows[0]]
        if len(places) != 1 or any(type(value) is not type(first) for value in values):
            return None
        [place] = places
        try:
            written = all(value[place] is row for value, row in zip(values, self._rows, strict=True))
        except (KeyError, IndexError):
            return None
        return place if written else None

    def _take_apart(self) -> None:
        """Let the samples have their images as each stage by itself gives them, for batches in which not all stand in
        the slot: one of the samples is not the common case (two images, or one that is decoded already).
        """
        writer, rows = self._pipeline.each.writer, self._rows
        self._slot, self._rows = None, ()
        if writer is None or not rows:
            return

        def own(value: Any, row: torch.Tensor) -> Any:
            return writer.value_of(row) if value is row else value

        for at, ((sample, origin, reason), row) in enumerate(zip(self._results, rows, strict=True)):
            if isinstance(sample, dict):
                self._results[at] = {name: own(value, row) for name, value in sample.items()}, origin, reason
            elif isinstance(sample, tuple):
                self._results[at] = tuple(own(value, row) for value in sample), origin, reason

    def _one(
        self, at: int, timings: Timings | None, decoded: tuple[Any, Origin] | None
    ) -> tuple[Any, Origin, str | None]:
        """A sample behind all one-to-one stages; with the origin of the bad one and the reason, where another stands
        in for it.
        """
        place, shard, sample = self._found[at]
        out = self._rows[at] if self._rows else None
        try:
            if decoded is not None:
                value, origin = decoded
                return self._pipeline.each.apply(value, origin, None, timings, 1), origin, None
            read = None if self._read is None else self._read.one(at)
            return *self._sample(place, shard, sample, out, timings, read), None
        except SampleError as err:
            if not self._forgives(err):
                raise
            return self._substitute(err.with_traceback(None), place, out, timings)

    def _substitute(
        self, bad: SampleError, place: int, out: torch.Tensor | None, timings: Timings | None
    ) -> tuple[Any, Origin, str]:
        for attempt in itertools.count(1):
            other = self._pipeline.plan.order.substitute(place, attempt)
            if other is None:
                msg = f"{bad}\n  No sample near it can stand in for it: all {attempt} are bad."
                raise SampleError(msg, stage=bad.stage, shard=bad.shard, key=bad.key) from bad
            try:
                value, _ = self._sample(place, *other, out, timings)
            except SampleError as err:
                if not self._forgives(err):
                    raise
            else:
                return value, Origin(bad.shard, bad.key, 0, place, 0), str(bad)
        raise AssertionError

    def _sample(
        self,
        place: int,
        shard: int,
        sample: int,
        out: torch.Tensor | None,
        timings: Timings | None,
        read: tuple[str, str, dict[str, bytes]] | None = None,
    ) -> tuple[Any, Origin]:
        shards = self._pipeline.shards
        if read is None:
            path, key, part, fields = shards.read(shard, sample)
        else:
            (path, key, fields), part = read, shards.part(shard)
        if timings is not None:
            timings.lap("read")
        origin = Origin(path, key, 0, place, part)
        return self._pipeline.each.apply({"__key__": key, "__url__": path, **fields}, origin, out, timings), origin

    def _forgives(self, err: SampleError) -> bool:
        plan = self._pipeline.plan
        if isinstance(err.__cause__, PROCESS_ERRORS):
            return False
        return plan.forgives and (err.stage in _FIELD_STAGES or plan.forgives_functions)


_NOBODY = Origin("", "", 0, 0, 0)


def find(pipeline: PlannedPipeline, job: Job) -> tuple[Ints, Ints, Ints]:
    """Places of a job's samples in the endless sequence, their shards, and their numbers in these, (n,) each."""
    places = places_of(job)
    return places, *pipeline.plan.order.take(places)


def places_of(job: Job) -> Ints:
    """Places of a job's samples in the endless sequence, (n,)."""
    return np.minimum(_as_array(job.positions), job.num_samples - 1) + job.start


def is_sample(job: Job) -> NDArray[np.bool_]:
    """Which positions of a job are no padding."""
    return _as_array(job.positions) < job.num_samples


def run_behind(pipeline: PlannedPipeline, batch: Any, origin: Origin, timings: Timings | None) -> Any:
    """A batch behind the stages that take whole ones."""
    return batch if pipeline.behind is None else pipeline.behind.apply(batch, origin, timings=timings)


def _as_array(positions: range) -> Ints:
    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)


def with_mask(value: Any, mask: Any) -> Any:
    """A batch or sample that carries its mask: as `__valid__` in a dict, as the last element of a tuple."""
    if isinstance(value, Mapping):
        return {**value, VALID: mask}
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
