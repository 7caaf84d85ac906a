"""Make the batches of a program: read the samples, decode images into the batch, run the stages, collate.

One thread makes one batch. Several threads of several processes may make batches of a program at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wdskit.config.types import VALID
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import WHOLE_BATCH, Job, OpenJob, Program
from wdskit.engine.reader import SampleReader
from wdskit.errors import PROCESS_ERRORS, FolderIndexError, PipelineError, SampleError, ShardError, StorageError
from wdskit.order.base import take_one
from wdskit.order.steps import AnySteps
from wdskit.stages.collate import FRESH, Collate, Memory, as_tensors, empty_images, is_tensor
from wdskit.stages.run import Origin, RejectedSample, Slot, Timings, add_advice

BUCKET = "__bucket__"

CHUNK = 32
"""Most samples that are read and decoded together."""

_MAX_SUBSTITUTES = 100
"""Number of samples that are tried in place of a bad sample. If all are bad, the pipeline is probably wrong."""


class Batch(NamedTuple):
    """One batch; without `batched`, one sample.

    Attributes:
        value: The result of the pipeline.
        num_samples: Number of samples, without padding.
        bad: One record for each bad sample that was replaced.
        timings: Timings of the job, on the first batch of the job; None on other batches.
        has_arrays: Whether the consumer must call `with_tensors`, because `value` has arrays in place of tensors.
    """

    value: Any
    num_samples: int
    bad: tuple[RejectedSample, ...] = ()
    timings: Timings | None = None
    has_arrays: bool = False

    def with_tensors(self) -> Batch:
        """Return a batch whose `value` has tensors in place of arrays; this batch if `has_arrays` is False."""
        return self._replace(value=as_tensors(self.value), has_arrays=False) if self.has_arrays else self


class Maker(Protocol):
    """Makes the batches of one process. A pool calls `open` for each job, and then `__call__` with the opened job."""

    def open(self, job: Any) -> Any:
        """Return the argument for `__call__`, and request the data that the job needs, such as samples in a store.

        The pool calls this method in the order of the jobs, in one thread at a time. The method does not raise.
        """
        ...

    def __call__(self, opened: Any, memory: Memory, is_cancelled: Callable[[], bool], /) -> Outcome[list[Batch]]:
        """Return the batches of an opened job; after an error, the batches before the error, and the error.

        This method does not raise. Several threads may call it at the same time.

        Args:
            opened: The result of `open`.
            memory: Gives the memory of the batches.
            is_cancelled: Returns True if the batches are not needed any more.
        """
        ...


def never() -> bool:
    """Return False: the `is_cancelled` of a job that cannot be cancelled."""
    return False


_Opened = tuple[Job, SampleReader]


class BatchMaker:
    """A `Maker` of the batches of a program. The batches are the same in any thread and process."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fetched: tuple[int, AnySteps] | None = None  # start and steps of the epoch whose parts are being fetched
        self._fetching: threading.Thread | None = None

    def open(self, job: Job) -> Outcome[_Opened]:
        """Request the samples of a job that are remote. Return an outcome with the job and the reader of its samples,
        or with the error.
        """
        program, reader = self._program, self._program.reader
        try:
            if reader.is_remote:
                locations = program.locate(job)
                reader = reader.request(locations.shards, locations.samples)
                self._fetch_ahead(job)
            return Outcome((job, reader))
        except Exception as err:  # noqa: BLE001 (the consumer receives the error after the batches before it)
            return Outcome(error=err)

    def _fetch_ahead(self, job: Job) -> None:
        """Start a thread that fetches parts of shards into the cache, for the steps that follow the job.

        The thread fetches for the next `program.num_ahead` positions in whole steps, and for at least one step. It
        ignores errors of shards: reading the sample raises the error later. Do nothing if `num_ahead` is 0, the last
        thread still runs, or no step is left to fetch.
        """
        program, steps, epoch = self._program, job.steps, (job.start, job.steps)
        num = max(1, program.num_ahead // steps.global_batch)
        first, stop = job.first + num if self._fetched == epoch else job.stop, min(job.stop + num, len(steps))
        if not program.num_ahead or first >= stop or (self._fetching is not None and self._fetching.is_alive()):
            return

        def fetch() -> None:
            with contextlib.suppress(ShardError, StorageError, FolderIndexError):
                for step in range(first, stop):
                    locations = program.locate(Job(job.start, steps, step, step + 1))
                    program.reader.fetch_parts(locations.shards, locations.samples)

        self._fetched = epoch
        self._fetching = threading.Thread(target=fetch, name="wdskit-ahead", daemon=True)
        self._fetching.start()

    def __call__(
        self, opened: Outcome[_Opened], memory: Memory = FRESH, is_cancelled: Callable[[], bool] = never
    ) -> Outcome[list[Batch]]:
        """Return the batches of a job from `open`; with an error, the batches before the error. This method does not
        raise. The error may be any BaseException, for example a ShardError if a shard is damaged, or a SampleError if a
        stage failed on a sample that the error budget does not cover.
        """
        batches: list[Batch] = []
        board = self._program.run.board
        slot = board.claim()
        try:
            asked = opened.result()
            assert asked is not None
            _make(self._program, self._program.divide(*asked), memory, is_cancelled, batches, slot)
        except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
            return Outcome(batches, err)
        finally:
            board.release(slot)
        return Outcome(batches)


class _Collated(NamedTuple):
    """A batch before the stages after `batched`.

    Attributes:
        value: The batch, or the sample without `batched`.
        origin: Origin of the batch.
        bad: The errors of its bad samples, by row of the job.
    """

    value: Any
    origin: Origin
    bad: Mapping[int, SampleError] = {}


class _Cancelled(Exception):
    """The job was cancelled."""


def _make(
    program: Program, job: OpenJob, memory: Memory, is_cancelled: Callable[[], bool], batches: list[Batch], slot: Slot
) -> None:
    """Append the batches of a job to `batches` one by one. Raise the first error; `batches` then has the batches before
    the error. `slot` is this thread's slot of `program.run.board`, and shows what the thread works on.
    """
    locations = job.locations
    timings = program.pace.begin()
    total = Timings(bytes_read=program.reader.mean_bytes(locations.shards))
    slot[0], slot[1] = WHOLE_BATCH, int(locations.positions[0])
    columns, by_columns = program.columns, None
    if columns is not None:
        _, positions, _, shards, numbers = locations
        by_columns = columns.make(job.reader, positions, shards, numbers, job.bounds, memory, epoch=job.job.epoch)
    name = "read-to-batched"
    collated: Iterator[_Collated] = itertools.starmap(_Collated, by_columns or ())
    if by_columns is None:
        samples = _Samples(program, job, memory, slot)
        samples.make(is_cancelled, total)
        name = "batched"
        collated = map(samples.collate, job.bounds)
        if timings is not None:
            timings.start()
    for number, (bound, made) in enumerate(zip(job.bounds, collated, strict=True)):
        if timings is not None and program.collate is not None:
            timings.lap(name, bound.stop - bound.start)
        label = job.labels[number] if job.labels is not None else None
        batches.append(_finish(program, job, bound, made, label, timings))
    if timings is not None:
        total.merge(timings)
    total.traffic = job.reader.take_traffic()
    batches[0] = batches[0]._replace(timings=total)


def _finish(
    program: Program, job: OpenJob, bound: slice, made: _Collated, label: Any, timings: Timings | None
) -> Batch:
    """Return a batch after the stages that follow `batched`, with the label of its bucket and the mask of its rows."""
    value, origin, bad = made
    is_sample = job.locations.is_sample[bound]
    if label is not None and isinstance(value, Mapping):
        value = with_item(value, BUCKET, label)
    has_arrays = program.collate is not None and isinstance(program.collate.collate, Collate)
    is_padded, at = program.epoch.tail == "pad", program.mask_place
    valid: Any = None
    if is_padded:
        valid = is_sample.copy()
        valid[[row - bound.start for row in bad]] = False
        if not has_arrays:
            valid = bool(valid[0]) if program.collate is None else as_tensors(valid)
    has_mask = at is not None and isinstance(value, tuple)
    if is_padded and at is not None and has_mask:
        for named in value[at : at + 1]:
            if not np.array_equal(named.cpu() if is_tensor(named) else named, np.ones_like(valid)):
                msg = f"to_tuple: `{VALID}` is at place {at}, but a function after it has put another value there."
                raise PipelineError(f"{msg}\n  Keep the place of `{VALID}`, or name it last and leave it out.")
        value = (*value[:at], valid, *value[at + 1 :])
    if program.batch_stages is not None:
        value, valid = (as_tensors(value), as_tensors(valid)) if has_arrays else (value, valid)
        has_arrays = False
        value = program.batch_stages.apply(value, origin, timings=timings, num=len(is_sample))
        has_mask = has_mask and isinstance(value, tuple)
    if is_padded and not has_mask:
        value = with_mask(value, valid)
    listed = tuple(
        RejectedSample(int(job.locations.epoch_positions[row]), err.shard, err.key, str(err))
        for row, err in sorted(bad.items())
        if job.locations.is_sample[row]  # padded rows are copies
    )
    return Batch(value, int(np.count_nonzero(is_sample)), listed, has_arrays=has_arrays)


class _Samples:
    """Makes the samples of a job one by one, and collates them to batches.

    After a sample failed, no later sample of the job is made. So the batches before the error are complete.
    """

    def __init__(self, program: Program, job: OpenJob, memory: Memory, slot: Slot) -> None:
        self._program = program
        self._job = job
        self._reader = job.reader
        self._memory = memory
        self._slot = slot
        locations = job.locations
        rows = zip(locations.positions.tolist(), locations.shards.tolist(), locations.samples.tolist(), strict=True)
        self._locations: list[tuple[int, int, int]] = list(rows)  # position, shard and sample
        self._made: list[tuple[Any, Origin]] = []
        self._bad: dict[int, SampleError] = {}  # errors of samples that are replaced, by row
        self._error: BaseException | None = None  # of the row after `_made`
        self._images: Any = None  # of all samples; None without `writer`
        self._rows: list[NDArray[Any]] = []  # the parts of `_images`
        if program.writer is not None:
            assert program.writer.out_shape is not None
            num = len(self._locations)
            self._images = empty_images(memory, (num, *program.writer.out_shape), program.writer.dtype)
            self._rows = [self._images[row : row + 1] for row in range(num)]

    def make(self, is_cancelled: Callable[[], bool], total: Timings) -> None:
        """Make all samples, up to the first that fails: `collate` raises its error. Add the timings to `total`.

        Raises:
            _Cancelled: The job was cancelled.
        """
        self._slot[0] = 0
        num = len(self._locations)
        try:
            for start in range(0, num, CHUNK):
                timings = self._program.chunk_pace.begin()
                self._make_chunk(range(start, min(num, start + CHUNK)), is_cancelled, timings)
                if timings is not None:
                    total.merge(timings)
        except _Cancelled:
            raise
        except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
            self._error = err
        self._slot[0], self._slot[1] = WHOLE_BATCH, self._locations[0][0]

    def _make_chunk(self, rows: range, is_cancelled: Callable[[], bool], timings: Timings | None) -> None:
        """Make the samples in `rows`. Raise the error of the first one that cannot be made or replaced."""
        if is_cancelled():
            raise _Cancelled
        read = self._read_chunk(rows, timings)
        decoded = self._decode_chunk(read, timings)
        for row in rows:
            if is_cancelled():
                raise _Cancelled
            position, shard, sample = self._locations[row]
            self._slot[1] = position
            try:
                if row in decoded:
                    value, origin = decoded.pop(row)
                    made = self._program.stages[origin.part].apply(value, origin, timings=timings, start=1), origin
                elif row in read:
                    made = self._make_one(row, *read.pop(row), timings)
                else:
                    made = self._read_and_make(row, position, shard, sample, timings)
            except SampleError as err:
                if not self._forgives(err):
                    add_advice(err)
                    raise
                made = self._substitute(row, err.with_traceback(None), timings)
            self._made.append(made)

    def _read_chunk(self, rows: range, timings: Timings | None) -> dict[int, tuple[Any, Origin]]:
        """Return {row: (sample, origin)} of the samples in `rows`. Rows that cannot be read are missing: they are read
        again one by one, which raises their errors.
        """
        # All samples are read, then all are prepared, then all pixels are decoded. Sample by sample, all of this would
        # run with CPU caches that a decoder has filled, and hold Python's lock three to five times as long.
        self._slot[1] = self._locations[rows.start][0]
        chunk = slice(rows.start, rows.stop)
        samples = self._reader.read_many(self._job.locations.shards[chunk], self._job.locations.samples[chunk])
        read = {}
        for row in rows:
            position, shard, sample = self._locations[row]
            self._slot[1] = position
            with contextlib.suppress(Exception):
                found = samples[row - rows.start] if samples else self._reader.read(shard, sample)
                read[row] = self._sample(position, *found)
        if timings is not None:
            timings.lap("read", len(rows))
        return read

    def _decode_chunk(
        self, read: dict[int, tuple[Any, Origin]], timings: Timings | None
    ) -> dict[int, tuple[Any, Origin]]:
        """Decode the images of read samples into the batch, in C. Return {row: (sample after the first stage, origin)}
        without the rows that C leaves.
        """
        decoder = self._program.decoder
        if decoder is None:
            return {}
        prepared = []
        for row, (value, origin) in read.items():
            with contextlib.suppress(Exception):  # raised again when the sample is made
                prepared.append((row, decoder.prepare(value, origin)))
        if timings is not None:
            timings.lap("headers", len(read))
        rows = [row for row, _ in prepared]
        written = decoder.carry_out_many([each for _, each in prepared], self._images, rows, self._slot)
        decoded = {}
        for (row, each), is_written in zip(prepared, written, strict=True):
            if is_written:
                each.values[each.field] = self._rows[row]
                decoded[row] = each.values, each.origin
        if timings is not None and decoded:
            timings.lap(self._program.stages[0].steps[0].label, len(decoded))
        return decoded

    def _sample(
        self, position: int, path: str, key: str, part: int, fields: dict[str, bytes]
    ) -> tuple[dict[str, Any], Origin]:
        """Return a read sample before its stages, and its origin. `position` decides its random numbers."""
        origin = Origin(path, key, 0, position, part, epoch=self._job.job.epoch)
        return {"__key__": key, "__url__": path, **fields}, origin

    def _read_and_make(
        self, row: int, position: int, shard: int, sample: int, timings: Timings | None
    ) -> tuple[Any, Origin]:
        """Return a sample after all one-to-one stages, and its origin. `position` decides its random numbers.

        Raises:
            ShardError: The shard is damaged.
            StorageError, FolderIndexError: The shard cannot be opened or read.
            SampleError: A stage failed.
        """
        found = self._reader.read(shard, sample)
        if timings is not None:
            timings.lap("read")
        return self._make_one(row, *self._sample(position, *found), timings)

    def _make_one(self, row: int, value: Any, origin: Origin, timings: Timings | None) -> tuple[Any, Origin]:
        """Return a read sample after all one-to-one stages, and its origin. SampleError: A stage failed."""
        writer = self._program.writer
        out = None if writer is None else (writer, self._rows[row])
        return self._program.stages[origin.part].apply(value, origin, out, timings), origin

    def _forgives(self, err: SampleError) -> bool:
        """Return True if the error budget covers the error of a sample, so that another sample replaces it. The caller
        raises `err`: raised here, its traceback and this frame would refer to each other.
        """
        program = self._program
        if isinstance(err.__cause__, PROCESS_ERRORS):
            return False
        return program.forgives and (program.forgives_functions or not err.is_function)

    def _substitute(
        self,
        row: int,
        bad: SampleError,
        timings: Timings | None = None,
        fits: Callable[[Any, Origin], bool] = lambda *_: True,
    ) -> tuple[Any, Origin]:
        """Return the next good sample in the block of a bad sample, with shard, key and position of the bad sample. The
        samples that are tried depend only on this position.

        Args:
            row: Row of the bad sample.
            bad: Its error.
            timings: Receives the timings of the tried samples, if not None.
            fits: Called with the value and the origin of each tried sample. Returns False to reject the sample.

        Raises:
            SampleError: None of up to 100 other samples is good, or the error budget does not cover the error of one.
            ShardError, StorageError, FolderIndexError: A tried sample cannot be read.
        """
        self._bad.setdefault(row, bad)
        position = self._locations[row][0]
        job = self._job.job
        first, stop = (job.start + edge for edge in job.steps.block_of(position - job.start))
        tried = range(1, min(stop - first, _MAX_SUBSTITUTES + 1))
        for step in tried:
            other = first + (position - first + step) % (stop - first)
            try:
                value, origin = self._read_and_make(row, position, *take_one(self._program.order, other), timings)
            except SampleError as err:
                if not self._forgives(err):
                    raise
                continue
            if fits(value, origin):
                return value, Origin(bad.shard, bad.key, 0, position, origin.part, epoch=self._job.job.epoch)
        reason = f"all {len(tried)} are bad" if tried else "there is no other"
        msg = f"{bad}\n  No sample near it can replace it: {reason}."
        raise SampleError(msg, stage=bad.stage, shard=bad.shard, key=bad.key) from bad

    def collate(self, bound: slice) -> _Collated:
        """Return the batch of the rows `bound`. Without `batched`, the batch is one sample.

        Raises:
            BaseException: The error of a sample of this batch that could not be made.
            SampleError: The samples cannot be collated, and the error budget does not cover this error or no substitute
                fits.
            ShardError, StorageError, FolderIndexError: A sample near the batch, needed as a substitute, cannot be read.
        """
        if bound.stop > len(self._made):
            err, self._error = self._error, None  # its traceback refers to this frame
            assert err is not None
            try:
                raise err
            finally:
                del err
        try:
            value, origin = self._collate(bound)
        except SampleError as err:
            if not self._forgives(err):
                raise
            self._replace_misfits(bound)
            value, origin = self._collate(bound)
        bad = {row: err for row, err in self._bad.items() if bound.start <= row < bound.stop}
        return _Collated(value, origin, bad)

    def _collate(self, bound: slice) -> tuple[Any, Origin]:
        values, origins = map(list, zip(*self._made[bound], strict=True))
        batched, writer = self._program.collate, self._program.writer
        if batched is None:
            return values[0], origins[0]
        if writer is None:
            return batched.collated(values, origins, self._memory)
        rows = range(bound.start, bound.stop)
        places = {_place_of(value, self._rows[row]) for value, row in zip(values, rows, strict=True)}
        place = places.pop() if len(places) == 1 else None
        if place is None:
            return batched.collated([self._owned(row)[0] for row in rows], origins, self._memory)
        return batched.collated(values, origins, self._memory, {place: self._images[bound]})

    def _owned(self, row: int, made: tuple[Any, Origin] | None = None) -> tuple[Any, Origin]:
        """Return a sample and its origin, with the image in the form that the user gets in place of the memory of the
        batch. Default: the made sample of `row`.
        """
        value, origin = made or self._made[row]
        writer = self._program.writer
        if writer is None or not isinstance(value, (dict, tuple)):
            return value, origin
        image = self._rows[row]
        if isinstance(value, dict):
            return {name: writer.value_of(image) if item is image else item for name, item in value.items()}, origin
        return tuple(writer.value_of(image) if item is image else item for item in value), origin

    def _replace_misfits(self, bound: slice) -> None:
        """Replace the samples of a batch that cannot be collated with its usual samples: those with the most common
        signature, of the first sample if several are equally common.

        Raises:
            SampleError: No substitute fits, or the error budget does not cover the error of a substitute.
            ShardError, StorageError, FolderIndexError: A sample near the batch cannot be read.
        """
        batched = self._program.collate
        assert batched is not None

        def problem(*made: tuple[Any, Origin]) -> SampleError | None:
            try:
                batched.collated([value for value, _ in made], [origin for _, origin in made])
            except SampleError as err:
                return err.with_traceback(None)
            return None

        rows = range(bound.start, bound.stop)
        made = {row: self._owned(row) for row in rows}
        good = [row for row in rows if problem(made[row]) is None]
        voters = [row for row in good if self._job.locations.is_sample[row]] or good  # padded rows are copies
        signatures = {row: _signature(made[row][0]) for row in voters}
        usual = max(signatures.values(), key=Counter(signatures.values()).__getitem__, default=None)
        model = [made[row] for row in voters if signatures[row] == usual][:1]

        for row in rows:
            if (err := problem(*model, made[row])) is None:
                continue
            self._made[row] = self._substitute(
                row, err, fits=lambda *other, row=row: problem(*model, self._owned(row, other)) is None
            )


def _place_of(sample: Any, image: NDArray[Any]) -> int | str | None:
    """Return the field name or tuple index of a sample's image in the batch; None if there is not exactly one."""
    items = sample.items() if isinstance(sample, dict) else enumerate(sample) if isinstance(sample, tuple) else ()
    places = [place for place, value in items if value is image]
    return places[0] if len(places) == 1 else None


def _signature(sample: Any) -> Any:
    """Return what samples that are collated have in common: their types, fields, shapes and dtypes."""
    items = sample.items() if isinstance(sample, dict) else enumerate(sample) if isinstance(sample, tuple) else ()
    values = [*items] or [("", sample)]
    return type(sample), tuple((name, type(value), _form(value)) for name, value in values)


def _form(value: Any) -> tuple[object, ...]:
    return tuple(getattr(value, "shape", ())), str(getattr(value, "dtype", ""))


def with_item(value: Mapping[Any, Any], name: str, item: Any) -> Any:
    """Return a copy of a mapping with one more item. The copy has the class of the mapping, such as transformers'
    BatchEncoding, or is a dict if this class cannot be copied or changed.
    """
    if type(value) is not dict and isinstance(value, MutableMapping):
        with contextlib.suppress(Exception):  # `__setitem__` of a user's class may raise anything
            changed = copy.copy(value)
            changed[name] = item
            if name not in value:
                return changed
    return {**value, name: item}


def with_mask(value: Any, mask: Any) -> Any:
    """Return a batch or sample with a mask in addition. The argument does not change.

    A mapping gets the field `__valid__`, a tuple gets a last element. Any other value becomes (value, mask).
    """
    if isinstance(value, Mapping):
        return with_item(value, VALID, mask)
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
