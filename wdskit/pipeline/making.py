"""One batch of a planned pipeline in the making: its samples in chunks, by any threads in any order, then the batch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from wdskit.errors import SampleError
from wdskit.order.base import Ints
from wdskit.pipeline.memory import Memory
from wdskit.pipeline.run import Origin

if TYPE_CHECKING:
    from wdskit.pipeline.planned import PlannedPipeline

VALID = "__valid__"

CHUNK = 8
"""Samples that a thread takes at a time."""

_FIELD_STAGES = frozenset({"decode", "to_tuple", "to_dict", "rename"})
"""Stages whose failure means that a field is missing or cannot be decoded."""


class Job(NamedTuple):
    """One batch to make. Equal jobs give equal batches.

    Attributes:
        start: Where the epoch starts in the order's endless sequence.
        positions: Of the epoch, one a sample.
        num_samples: Positions of the epoch; those at or behind it are padding, for which any sample does.
    """

    start: int
    positions: range
    num_samples: int


class Bad(NamedTuple):
    """A sample that could not be had, and for which another stands."""

    position: int
    shard: str
    key: str
    reason: str


class Made(NamedTuple):
    """What became of a job.

    Attributes:
        value: The batch; without `batched`, a list of samples.
        bad: The samples that were bad.
        raw: Field or place of images that are uint8 as yet, where numbers were to follow (`finish_numbers`).
    """

    value: Any
    bad: tuple[Bad, ...]
    raw: int | str | None = None


class Making:
    """One job at work. `prepare` it, `run` each chunk once, in any thread, then `finish`.

    A chunk never raises: what went wrong is raised by `finish`, of several errors that of the first sample.

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
        self._slot: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, ...] = ()
        self._is_raw = False
        self._asked: tuple[Ints, Ints, Ints] | None = None  # positions, shards, samples, for `Columns.make`
        self._by_columns: tuple[Any, Origin] | None = None

    def prepare(self) -> int:
        """Find out which samples these are, and give the number of chunks."""
        positions = _as_array(self.job.positions)
        places = np.minimum(positions, self.job.num_samples - 1) + self.job.start
        asked = (places, *self._pipeline.plan.order.take(places))
        if self._pipeline.columns is not None and self._pipeline.columns.is_of_use:
            self._asked = asked
            return 1
        return self._prepare_samples(*asked)

    def _prepare_samples(self, *columns: Ints) -> int:
        batched = self._pipeline.batched
        self._found = list(zip(*(column.tolist() for column in columns), strict=True))
        self._results = [(None, _NOBODY, None)] * len(self._found)
        writer = self._pipeline.each.writer
        if writer is not None and batched is not None:
            assert writer.out_shape is not None
            shape = (len(self._found), *writer.out_shape)
            self._slot = self._memory.empty(shape, writer.out_ending.dtype, channels_last=True)
            self._rows = self._slot.unbind()
            self._is_raw = writer.out_ending != writer.ending
        return -(-len(self._found) // CHUNK)

    def run(self, chunk: int) -> None:
        """Make the samples of one chunk."""
        if self._asked is not None:
            self._run_columns(*self._asked)
            return
        for at in range(chunk * CHUNK, min(len(self._found), (chunk + 1) * CHUNK)):
            try:
                self._results[at] = self._one(at, self._rows[at] if self._rows else None)
            except BaseException as err:  # noqa: BLE001 (the consumer's to see, whatever it is)
                self._errors[at] = err
                return

    def _run_columns(self, places: Ints, shards: Ints, samples: Ints) -> None:
        """Make the whole batch, or else its samples."""
        columns, self._asked = self._pipeline.columns, None
        assert columns is not None
        self._by_columns = columns.make(places, shards, samples, self._memory)
        if self._by_columns is None:
            for chunk in range(self._prepare_samples(places, shards, samples)):
                self.run(chunk)

    def finish(self) -> Made:
        """The batch, with its mask if the tail is padded.

        Raises:
            ShardError: A shard is not right.
            SampleError: A stage failed on a sample, and that is not forgiven.
        """
        self._raise_first()
        positions = _as_array(self.job.positions)
        tail = self._pipeline.plan.tail
        if self._by_columns is not None:
            batch, mask = self._behind(*self._by_columns), torch.from_numpy(positions < self.job.num_samples)
            return Made(batch if tail == "drop" else with_mask(batch, mask), ())
        ready = self._place_of_slot()
        if self._slot is not None and ready is None:
            self._write_apart()
        values, origins, reasons = zip(*self._results, strict=True)
        bad = tuple(
            Bad(position, origin.url, origin.key, reason)
            for position, origin, reason in zip(self.job.positions, origins, reasons, strict=True)
            if reason is not None and position < self.job.num_samples
        )
        valid = (positions < self.job.num_samples) & np.array([reason is None for reason in reasons])
        if self._pipeline.batched is None:
            return Made(list(values) if tail == "drop" else list(map(with_mask, values, valid.tolist())), bad)
        batch = self._together(list(values), list(origins), ready)
        raw = ready if self._is_raw else None
        return Made(batch if tail == "drop" else with_mask(batch, torch.from_numpy(valid)), bad, raw)

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
        batched = self._pipeline.batched
        assert batched is not None
        done = {} if ready is None else {ready: self._slot}
        return self._behind(*batched.collated(values, origins, self._memory, done))

    def _behind(self, batch: Any, origin: Origin) -> Any:
        behind = self._pipeline.behind
        return batch if behind is None else behind.apply(batch, origin)

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

    def _write_apart(self) -> None:
        """Make all samples again, each in memory of its own: one of them is not the common case (two images, or one
        that is decoded already), and where there is one there are more.
        """
        self._pipeline.each.writer = self._slot = None
        self._rows = ()
        for chunk in range(-(-len(self._found) // CHUNK)):
            self.run(chunk)
        self._raise_first()

    def _one(self, at: int, out: torch.Tensor | None) -> tuple[Any, Origin, str | None]:
        """A sample behind all one-to-one stages; with the origin of the bad one and the reason, where another stands
        in for it.
        """
        place, shard, sample = self._found[at]
        try:
            return *self._sample(place, shard, sample, out), None
        except SampleError as err:
            if not self._forgives(err):
                raise
            first = err
        for attempt in itertools.count(1):
            other = self._pipeline.plan.order.substitute(place, attempt)
            if other is None:
                msg = f"{first}\n  No sample near it can stand in for it: all {attempt} are bad."
                raise SampleError(msg, stage=first.stage, shard=first.shard, key=first.key) from first
            try:
                value, _ = self._sample(place, *other, out)
            except SampleError as err:
                if not self._forgives(err):
                    raise
            else:
                return value, Origin(first.shard, first.key, 0, place, 0), str(first)
        raise AssertionError

    def _sample(self, place: int, shard: int, sample: int, out: torch.Tensor | None) -> tuple[Any, Origin]:
        path, key, part, fields = self._pipeline.shards.read(shard, sample)
        origin = Origin(path, key, 0, place, part)
        return self._pipeline.each.apply({"__key__": key, "__url__": path, **fields}, origin, out), origin

    def _forgives(self, err: SampleError) -> bool:
        plan = self._pipeline.plan
        return plan.forgives and (err.stage in _FIELD_STAGES or plan.forgives_functions)


_NOBODY = Origin("", "", 0, 0, 0)


def _as_array(positions: range) -> Ints:
    return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)


def with_mask(value: Any, mask: Any) -> Any:
    """A batch or sample that carries its mask: as `__valid__` in a dict, as the last element of a tuple."""
    if isinstance(value, Mapping):
        return {**value, VALID: mask}
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
