"""Make the batches of a program with `make_batches`, in this thread, in threads or in worker processes."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdskit.config.types import VALID
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import WHOLE_BATCH, Job, OpenJob, Program
from wdskit.engine.sample import add_advice
from wdskit.engine.threads import Threads
from wdskit.errors import PROCESS_ERRORS, FolderIndexError, PipelineError, SampleError, ShardError, StorageError
from wdskit.order.steps import AnySteps
from wdskit.processes import block_sigint
from wdskit.stages.base import NO_ORIGIN, Origin, RejectedSample
from wdskit.stages.collate import FRESH, Collate, Memory, Ragged, as_tensors, count_rows, empty_images
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.progress import IDLE, Slot
from wdskit.stages.roles import names_image
from wdskit.stages.timing import Timings

BUCKET = "__bucket__"

CHUNK = 8
"""Most samples that a thread takes at a time."""

_MAX_SUBSTITUTES = 100
"""Number of samples that are tried in place of a bad sample. If all are bad, the pipeline is probably wrong."""

_NUM_VOTES = 9  # samples that decide between groups of one size


class Batch(NamedTuple):
    """One batch; without `batched`, one sample.

    Attributes:
        value: The result of the pipeline.
        num_samples: Number of samples, without padding.
        bad: One record for each bad sample that was replaced; in a stream, for each bad sample that was skipped before
            this batch.
        raw: Field name or tuple index of the images, if they are still uint8 and must become floats
            (`Program.with_uint8_images`); else None.
        timings: Timings of the job, on the first batch of the job; None on other batches.
        has_arrays: Whether the consumer must call `with_tensors`, because `value` has arrays in place of tensors.
    """

    value: Any
    num_samples: int
    bad: tuple[RejectedSample, ...] = ()
    raw: int | str | None = None
    timings: Timings | None = None
    has_arrays: bool = False

    def with_tensors(self) -> Batch:
        """Return a batch whose `value` has tensors in place of arrays; this batch if `has_arrays` is False."""
        return self._replace(value=as_tensors(self.value), has_arrays=False) if self.has_arrays else self


class BatchFactory(Protocol):
    """Makes the batches of one process. A pool of threads or processes calls `open` for each job, and then `__call__`
    with the result of `open`.

    Attributes:
        num_loops: Number of threads that the pool starts to call `__call__`; the factory sets it.
    """

    num_loops: int

    def open(self, job: Any) -> Any:
        """Return the argument for `__call__`, and request the data that the job needs, such as samples in a store.

        The pool calls this method in the order of the jobs, in one thread at a time. The method does not raise.
        """
        ...

    def __call__(self, job: Any, memory: Memory, is_cancelled: Callable[[], bool], /) -> Outcome[list[Batch]]:
        """Return the batches of an open job; after an error, the batches before the error, and the error.

        This method does not raise. At most `num_loops` threads call it at the same time.

        Args:
            job: The result of `open`.
            memory: Gives the memory of batches.
            is_cancelled: Returns True if the batches are not needed any more.
        """
        ...

    def close(self, deadline_s: float | None = None) -> None:
        """End the threads, and wait for their end. The next job starts new threads.

        The wait stops at `deadline_s` of the monotonic clock. If `deadline_s` is None, the wait stops after a short
        default time.
        """
        ...


def never() -> bool:
    """Return False: the `is_cancelled` of a job that cannot be cancelled."""
    return False


class PlannedBatches:
    """A `BatchFactory` that makes the batches of a program, in `program.run.num_threads` threads."""

    def __init__(self, program: Program) -> None:
        # With two loops, the samples of the next job start while the last samples of a job are made.
        self.num_loops = 2 if program.run.num_threads > 1 else 1
        self._program = program
        self._threads: Threads | None = None
        self._fetched: tuple[int, AnySteps] | None = None  # start and steps of the epoch whose parts are being fetched
        self._fetching: threading.Thread | None = None

    def open(self, job: Job) -> Outcome[OpenJob]:
        """Locate the samples of a job, and request those that are remote. Return an outcome with the open job or with
        the error. Start the threads before the first job.
        """
        program, reader = self._program, self._program.reader
        try:
            if program.run.num_threads > 1 and self._threads is None:
                with block_sigint():  # Ctrl-C comes after `close` knows the threads
                    self._threads = Threads(program.run.num_threads, "samples")
            places = program.locate(job)
            if reader.is_remote:
                reader = reader.request(places.shards, places.samples)
                if program.num_ahead:
                    self._fetch_ahead(job)
            return Outcome(program.open(job, reader, places))
        except Exception as err:  # noqa: BLE001 (the consumer receives the error after the batches before it)
            return Outcome(error=err)

    def _fetch_ahead(self, job: Job) -> None:
        """Start a thread that fetches parts of shards into the cache, for the steps that follow the job.

        The thread fetches for the next `program.num_ahead` positions in whole steps, and for at least one step. It
        ignores errors of shards: reading the sample raises the error later. Do nothing if the last thread still runs,
        or if no step is left to fetch.
        """
        program, steps, epoch = self._program, job.steps, (job.start, job.steps)
        num = max(1, program.num_ahead // steps.global_batch)
        first, stop = job.first + num if self._fetched == epoch else job.stop, min(job.stop + num, len(steps))
        if first >= stop or (self._fetching is not None and self._fetching.is_alive()):
            return  # no part is left to fetch, or the last fetch still runs

        def fetch() -> None:
            with contextlib.suppress(ShardError, StorageError, FolderIndexError):
                for step in range(first, stop):
                    places = program.locate(Job(job.start, steps, step, step + 1))
                    program.reader.fetch_parts(places.shards, places.samples)

        self._fetched = epoch
        self._fetching = threading.Thread(target=fetch, name="wdskit-ahead", daemon=True)
        self._fetching.start()

    def __call__(
        self, job: Outcome[OpenJob], memory: Memory = FRESH, is_cancelled: Callable[[], bool] = never
    ) -> Outcome[list[Batch]]:
        """Make the batches of a job from `open`, as `make_batches`. If `open` returned an error, return this error."""
        if job.value is None:
            return Outcome(error=job.error)
        return make_batches(self._program, job.value, memory, self._threads, is_cancelled)

    def close(self, deadline_s: float | None = None) -> None:
        """End the threads, and wait for their end. The next job starts new threads.

        The wait stops at `deadline_s` of the monotonic clock; with None, after 0.5 s.
        """
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close(deadline_s)


def make_batches(
    program: Program,
    job: OpenJob,
    memory: Memory = FRESH,
    threads: Threads | None = None,
    is_cancelled: Callable[[], bool] = never,
) -> Outcome[list[Batch]]:
    """Make the batches of a job. This function does not raise.

    The batches are the same in any process, and with any number of threads.

    Args:
        program: The program of the pipeline.
        job: The job with its samples and their reader.
        memory: Gives the memory of batches.
        threads: The threads that make the samples; None for this thread.
        is_cancelled: Returns True to end the job early. The outcome then may have an error, and not all batches.

    Returns:
        An outcome with all batches; or with an error and the batches before the error. The error may be any
        BaseException, for example a ShardError if a shard is damaged, a StorageError or FolderIndexError if a shard
        cannot be opened or read, or a SampleError if a stage failed on a sample that the error budget does not cover.
    """
    batches: list[Batch] = []
    board = program.run.board
    slot = board.claim()
    slot[0] = WHOLE_BATCH
    try:
        timings = _make(program, job, memory, threads, is_cancelled, batches, slot)
        batches[0] = batches[0]._replace(timings=timings)
    except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
        return Outcome(batches, err)
    finally:
        board.release(slot)
    return Outcome(batches)


_Collated: TypeAlias = tuple[Any, Origin, Any, tuple[RejectedSample, ...], int | str | None]
"""A batch, its origin, the mask of its good samples, its bad samples, and the place of images that are still uint8."""


class _Cancelled(Exception):
    """The job was cancelled."""


def _make(
    program: Program,
    job: OpenJob,
    memory: Memory,
    threads: Threads | None,
    is_cancelled: Callable[[], bool],
    batches: list[Batch],
    slot: Slot,
) -> Timings:
    """Append the batches of a job to `batches` one by one, and return the timings. Raise the first error; `batches`
    then has the batches before the error.

    `slot` is this thread's slot of `program.run.board`, which shows what each thread works on. Set the slot to the
    job's first sample while this thread reads columns or collates samples.
    """
    _, numbers, is_sample, shards, samples = job.places
    bounds = job.bounds
    columns, timings = program.columns, program.pace.begin()
    first = int(numbers[0])
    slot[1] = first if columns is not None else IDLE
    column_batches = None
    if columns is not None:
        column_batches = columns.make(job.reader, numbers, shards, samples, bounds, memory, epoch=job.epoch)
    if columns is not None and column_batches is None and len(bounds) > 1:  # a batch must be made sample by sample
        total = Timings()
        for number in range(len(bounds)):
            total.merge(_make(program, job.part(number), memory, threads, is_cancelled, batches, slot))
        return total
    total = Timings(bytes_read=program.reader.mean_bytes(shards))
    collated: Iterable[_Collated]
    if column_batches is not None:
        collated = ((value, origin, True, (), None) for value, origin in column_batches)
    else:
        rows = _SampleFactory(program, job, memory)
        slot[1] = IDLE
        rows.make(threads, is_cancelled, total)
        slot[1] = first
        if timings is not None:
            timings.start()
        collated = map(rows.collate, bounds)
    labels = job.labels or [None] * len(bounds)
    for bound, label, (value, origin, good, bad, raw) in zip(bounds, labels, collated, strict=True):
        mask = is_sample[bound]
        if label is not None and isinstance(value, Mapping):
            if BUCKET in value:
                msg = f"`{BUCKET}` is the name of the bucket that `bucketed` adds, but the samples have a field of this"
                raise PipelineError(f"{msg} name.\n  `rename` it.")
            value = with_item(value, BUCKET, label)
        if timings is not None and program.collate is not None:
            timings.lap("batched" if column_batches is None else "read-to-batched", len(mask))
        has_arrays = program.collate is not None and isinstance(program.collate.collate, Collate)
        is_padded, at = program.epoch.tail == "pad", program.mask_place
        valid: Any = mask & good
        if is_padded and not has_arrays:
            valid = bool(valid[0]) if program.collate is None else as_tensors(valid)
        has_mask = at is not None and isinstance(value, tuple)
        if is_padded and at is not None and has_mask:
            value = (*value[:at], valid, *value[at + 1 :])
        if program.batch_stages is not None:
            value, valid = (as_tensors(value), as_tensors(valid)) if has_arrays else (value, valid)
            has_arrays = False
            value = program.batch_stages.apply(value, origin, timings=timings, num=len(mask))
            has_mask = has_mask and isinstance(value, tuple)
        if is_padded and not has_mask:
            if program.collate is not None and program.batch_stages is not None:
                _check_rows(value, len(mask), origin)
            value = with_mask(value, valid)
        batches.append(Batch(value, int(np.count_nonzero(mask)), bad, raw, has_arrays=has_arrays))
    if timings is not None:
        total.merge(timings)
    total.traffic = total.traffic.plus(job.reader.take_traffic())
    return total


class _SampleFactory:
    """Makes the samples of a job one by one, in threads, and collates them to batches.

    After a sample failed, no later sample of the job is started. Earlier samples are still made, so that the batches
    before the error are complete.
    """

    def __init__(self, program: Program, job: OpenJob, memory: Memory) -> None:
        self._program = program
        self._job_samples = places = job.places
        self._reader = job.reader
        self._epoch = job.epoch
        rows = zip(places.numbers.tolist(), places.shards.tolist(), places.samples.tolist(), strict=True)
        self._locations: list[tuple[int, int, int]] = list(rows)  # position, shard and sample
        self._memory = memory
        self._results: list[tuple[Any, Origin, str | None]] = [(None, NO_ORIGIN, None)] * len(self._locations)
        self._errors: dict[int, BaseException] = {}
        self._images: NDArray[Any] | None = None  # of all samples; None without `writer`
        self._sample_images: list[NDArray[Any]] = []  # of each sample: its row of `_images`

    def make(self, threads: Threads | None, is_cancelled: Callable[[], bool], total: Timings) -> None:
        """Make all samples. The error of a sample is kept until `collate` raises it.

        Args:
            threads: The threads that make the samples; None for this thread.
            is_cancelled: Returns True if the job is cancelled.
            total: Receives the timings.

        Raises:
            _Cancelled: The job was cancelled.
        """
        program, num = self._program, len(self._locations)
        writer = program.writer
        if writer is not None:
            assert writer.out_shape is not None
            self._images = empty_images(self._memory, (num, *writer.out_shape), writer.batch_format.dtype)
            self._sample_images = [self._images[row : row + 1] for row in range(num)]
        size = max(1, min(CHUNK, num // program.run.num_threads))  # so that all threads work on small batches too
        num_chunks = -(-num // size)
        timed: list[Timings] = []  # from one thread each

        def run(chunk: int) -> None:
            timings = program.chunk_pace.begin()
            slot = program.run.board.claim()
            slot[0] = 0
            rows = range(chunk * size, min(num, (chunk + 1) * size))
            if self._make_chunk(rows, is_cancelled, timings, slot) and timings is not None:
                timed.append(timings)
            program.run.board.release(slot)

        if threads is None or num_chunks == 1:
            for chunk in range(num_chunks):
                run(chunk)
        else:
            threads.run_all(run, num_chunks)
        if is_cancelled():  # some samples are missing
            raise _Cancelled
        for each in timed:
            total.merge(each)

    def _make_chunk(self, rows: range, is_cancelled: Callable[[], bool], timings: Timings | None, slot: Slot) -> bool:
        """Make the samples in `rows`. Return True if all of them are made.

        Return False if one of them or an earlier sample failed, or if the job was cancelled. The error of a sample is
        kept until `collate` raises it. `timings` receives the timings, if not None. `slot` shows which sample is made.
        """
        at = rows.start
        decoded: dict[int, tuple[Any, Origin]] = {}
        try:
            for at in rows:
                if is_cancelled() or (self._errors and min(self._errors.copy()) < at):
                    return False
                if at == rows.start and self._program.first is not None:
                    decoded = self._decode_chunk(rows, timings, slot)
                slot[1] = self._locations[at][0]
                self._results[at] = self._make_sample(at, timings, decoded.pop(at, None))
        except BaseException as err:  # noqa: BLE001 (the consumer receives every error)
            self._errors[at] = err
            return False
        return True

    def _decode_chunk(self, rows: range, timings: Timings | None, slot: Slot) -> dict[int, tuple[Any, Origin]]:
        """Read the samples in `rows` and apply the first stage, which decodes an image.

        Return {row: (sample after the stage, origin)}. Rows that fail are missing: `_make_sample` makes these samples
        again, and raises their errors.
        """
        # All samples are read, then all are prepared, then all pixels are decoded. Sample by sample, all of this would
        # run with CPU caches that a decoder has filled, and hold Python's lock three to five times as long.
        first = self._program.first
        assert first is not None
        read, prepared, decoded = [], [], {}
        chunk = slice(rows.start, rows.stop)
        slot[1] = self._locations[rows.start][0]
        samples = self._reader.read_natively(self._job_samples.shards[chunk], self._job_samples.samples[chunk])
        for at in rows:
            place, shard, sample = self._locations[at]
            slot[1] = place
            with contextlib.suppress(Exception):
                one = samples[at - rows.start] if samples else self._reader.read(shard, sample, names_image)
                path, key, part, fields = one
                read.append((at, Origin(path, key, 0, place, part, epoch=self._epoch), fields))
        if timings is not None:
            timings.lap("read", len(rows))
        for at, origin, fields in read:
            with contextlib.suppress(Exception):
                prepared.append((at, first.prepare({"__key__": origin.key, "__url__": origin.url, **fields}, origin)))
        if timings is not None:
            timings.lap("headers", len(rows))
        label = self._program.stages[0].steps[0].label
        images = self._sample_images if first is self._program.writer else []
        if images and self._images is not None and first.is_native:
            at_rows = [at for at, _ in prepared]
            written = first.carry_out_many([each for _, each in prepared], self._images, at_rows, slot)
            left = []
            for (at, each), is_written in zip(prepared, written, strict=True):
                if is_written and each.field is not None:
                    each.values[each.field] = images[at]
                    decoded[at] = each.values, each.origin
                else:
                    left.append((at, each))
            prepared = left
            if timings is not None and decoded:
                timings.lap(label, len(decoded))
        for at, each in prepared:
            slot[1] = self._locations[at][0]
            with contextlib.suppress(Exception):
                decoded[at] = first.carry_out(each, images[at] if images else None), each.origin
                if timings is not None:
                    timings.lap(label)
        return decoded

    def _make_sample(
        self, at: int, timings: Timings | None, decoded: tuple[Any, Origin] | None
    ) -> tuple[Any, Origin, str | None]:
        """Return (sample, origin, None): the sample of row `at` after all one-to-one stages, and its origin.

        If the sample is bad and the error budget covers its error, return (substitute, origin, reason): `origin` is
        that of the bad sample, and `reason` is the text of the error.

        Args:
            at: The row.
            timings: Receives the timings, if not None.
            decoded: The row's result of `_decode_chunk`; None if there is no result.

        Raises:
            ShardError: The shard is damaged.
            StorageError, FolderIndexError: The shard cannot be opened or read.
            SampleError: A stage failed, and the error budget does not cover it or no substitute is good.
        """
        place, shard, sample = self._locations[at]
        writer = self._program.writer
        out = (writer, self._sample_images[at]) if writer is not None else None
        try:
            if decoded is not None:
                value, origin = decoded
                return self._program.stages[origin.part].apply(value, origin, out, timings, 1), origin, None
            return *self._read_and_make(place, shard, sample, out, timings), None
        except SampleError as err:
            if not self._forgives(err):
                add_advice(err)
                raise
            return self._substitute(err.with_traceback(None), place, out, timings)

    def _substitute(
        self,
        bad: SampleError,
        place: int,
        out: tuple[FusedStep, NDArray[Any]] | None,
        timings: Timings | None,
        check: Callable[[Any, Origin], object] = lambda *_: None,
    ) -> tuple[Any, Origin, str]:
        """Return a good sample in place of a bad sample, the origin of the bad sample, and the text of the error `bad`.

        Args:
            bad: The error of the bad sample.
            place: Position of the bad sample in the endless sequence of `program.order`.
            out: The stage that writes its image into given memory, and this memory; None without such a stage.
            timings: Receives the timings of the tried samples, if not None.
            check: Called with the value and the origin of each tried sample. Raises SampleError to reject the sample.

        Raises:
            SampleError: The order has no substitute, none of up to 100 substitutes is good, or the error budget does
                not cover the error of a substitute.
            ShardError, StorageError, FolderIndexError: A tried sample cannot be read.
        """
        num_tried = 0
        for attempt in range(1, _MAX_SUBSTITUTES + 1):
            other = self._program.order.substitute(place, attempt)
            if other is None:
                break
            num_tried = attempt
            try:
                value, origin = self._read_and_make(place, *other, out, timings)
                check(value, origin)
            except SampleError as err:
                if not self._forgives(err):
                    raise
            else:
                return value, Origin(bad.shard, bad.key, 0, place, 0, epoch=self._epoch), str(bad)
        reason = f"all {num_tried} are bad" if num_tried else "there is no other"
        msg = f"{bad}\n  No sample near it can replace it: {reason}."
        raise SampleError(msg, stage=bad.stage, shard=bad.shard, key=bad.key) from bad

    def _read_and_make(
        self,
        place: int,
        shard: int,
        sample: int,
        out: tuple[FusedStep, NDArray[Any]] | None,
        timings: Timings | None,
    ) -> tuple[Any, Origin]:
        path, key, part, fields = self._reader.read(shard, sample)
        if timings is not None:
            timings.lap("read")
        origin = Origin(path, key, 0, place, part, epoch=self._epoch)
        stages = self._program.stages[part]
        return stages.apply({"__key__": key, "__url__": path, **fields}, origin, out, timings), origin

    def _forgives(self, err: SampleError) -> bool:
        """Return True if the error budget covers `err`, so that a substitute replaces the sample."""
        program = self._program
        if isinstance(err.__cause__, PROCESS_ERRORS):
            return False
        return program.forgives and (program.forgives_functions or not err.is_function)

    def collate(self, bound: slice) -> _Collated:
        """Return the batch of the rows `bound`, with its origin, mask and bad samples: see `_Collated`. Without
        `batched`, the batch is one sample.

        Raises:
            BaseException: The error of the first sample of the job that failed, if this sample is in this batch or an
                earlier batch.
            SampleError: The samples cannot be collated, and the error budget does not cover this error or no substitute
                fits.
            ShardError, StorageError, FolderIndexError: A sample near the batch, needed as a substitute, cannot be read.
        """
        self._raise_before(bound.stop)
        try:
            return self._collate(bound)
        except SampleError as err:
            if not self._forgives(err):
                raise
            self._replace_misfits(bound)
        return self._collate(bound)

    def _replace_misfits(self, bound: slice) -> None:
        """Replace the misfits among the rows `bound`: samples that cannot be collated with most samples of their batch.

        The samples are divided into groups; the samples of a group can be collated with the group's first sample. The
        largest group stays. `_vote` decides between several largest groups. A sample outside this group is replaced if
        it cannot be collated with the first sample of this group.

        Raises:
            SampleError: No substitute fits, or the error budget does not cover the error of a substitute.
            ShardError, StorageError, FolderIndexError: A sample near the batch cannot be read.
        """
        batched = self._program.collate
        assert batched is not None
        rows = range(*bound.indices(len(self._locations)))
        is_sample = self._job_samples.is_sample
        voters = [at for at in rows if is_sample[at]] or rows  # padded rows are copies
        owned = {at: self._with_image_value(self._results[at][0], at) for at in rows}
        groups: list[list[int]] = []

        def check(at: int, value: Any, origin: Origin) -> None:
            """Raise SampleError if `value`, the sample of row `at`, does not fit the first sample of the largest group.

            If there is no group, raise SampleError if `value` alone cannot be collated.
            """
            firsts = [max(groups, key=len)[0]] if groups else []
            values = [*(owned[first] for first in firsts), self._with_image_value(value, at)]
            batched.collated(values, [*(self._results[first][1] for first in firsts), origin])

        for at in voters:
            for group in [*groups, None]:
                try:
                    pair = [at] if group is None else [group[0], at]
                    batched.collated([owned[each] for each in pair], [self._results[each][1] for each in pair])
                except SampleError:
                    continue
                groups.append([at]) if group is None else group.append(at)
                break
        if sum(len(group) == len(max(groups, key=len)) for group in groups) > 1:
            groups.insert(0, groups.pop(self._vote(owned, groups, rows[0])))
        usual = max(groups, key=len, default=[])
        for at in rows:
            if at in usual:
                continue
            value, origin, reason = self._results[at]
            try:
                check(at, value, origin)
                continue  # this sample fits; only the whole batch cannot be collated
            except SampleError as err:
                bad = err.with_traceback(None)
            writer = self._program.writer
            out = (writer, self._sample_images[at]) if writer is not None else None
            found = self._substitute(bad, self._locations[at][0], out, None, functools.partial(check, at))
            self._results[at] = found if reason is None else (found[0], origin, reason)

    def _vote(self, owned: Mapping[int, Any], groups: Sequence[Sequence[int]], at: int) -> int:
        """Return the index in `groups` of one of the largest groups: the one with which most samples near row `at` can
        be collated, the first of these if several have equally many. Bad samples near the row are left out.

        Args:
            owned: The value of each row, as `_with_image_value` returns it.
            groups: Rows that can be collated with each other.
            at: A row of the batch.

        Raises:
            ShardError, StorageError, FolderIndexError: A sample near the row cannot be read.
        """
        batched = self._program.collate
        assert batched is not None
        place = self._locations[at][0]
        most = max(map(len, groups))
        votes = {number: 0 for number, group in enumerate(groups) if len(group) == most}
        for attempt in range(1, _NUM_VOTES + 1):
            other = self._program.order.substitute(place, attempt)
            if other is None:
                break
            try:
                value, origin = self._read_and_make(place, *other, None, None)
            except SampleError:
                continue
            for number in votes:
                first = groups[number][0]
                with contextlib.suppress(SampleError):
                    batched.collated([owned[first], value], [self._results[first][1], origin])
                    votes[number] += 1
        return max(votes, key=votes.__getitem__)

    def _with_image_value(self, value: Any, at: int) -> Any:
        """Return `value`, which is the sample of row `at`, with its image in the form that the user gets (see
        `_replace_image`). Return `value` itself if the program has no `writer`.
        """
        writer = self._program.writer
        return value if writer is None else _replace_image(value, self._sample_images[at], writer)

    def _collate(self, bound: slice) -> _Collated:
        values, origins, reasons = map(list, zip(*self._results[bound], strict=True))
        good: Any = True
        bad: tuple[RejectedSample, ...] = ()
        if any(reasons):
            good = np.array([reason is None for reason in reasons])
            rows = self._job_samples
            bad = tuple(
                RejectedSample(position, origin.url, origin.key, reason)
                for position, is_sample, origin, reason in zip(
                    rows.positions[bound].tolist(), rows.is_sample[bound], origins, reasons, strict=True
                )
                if reason is not None and is_sample
            )
        batched, writer = self._program.collate, self._program.writer
        if batched is None:
            return values[0], origins[0], good, bad, None
        images = self._sample_images[bound]
        place = None if writer is None else _find_image_place(images, values)
        if writer is not None and place is None:
            values = [_replace_image(value, image, writer) for value, image in zip(values, images, strict=True)]
        written = {} if self._images is None or place is None else {place: self._images[bound]}
        batch, origin = batched.collated(values, origins, self._memory, written)
        is_raw = writer is not None and writer.batch_format != writer.output_format
        return batch, origin, good, bad, place if is_raw else None

    def _raise_before(self, stop: int) -> None:
        """Raise the error of the first failed sample of the job if its row is below `stop`. The errors are then
        forgotten, so a second call does not raise.
        """
        if not self._errors or min(self._errors) >= stop:
            return
        err = self._errors[min(self._errors)]
        try:
            raise err
        finally:
            self._errors.clear()  # its traceback refers to this frame: a cycle would keep the batch alive
            del err


def _find_image_place(images: list[NDArray[Any]], values: list[Any]) -> int | str | None:
    """Return the field name or tuple index at which sample i in `values` has the array `images[i]` itself, for all i.

    Return None if there is no such place, if the samples differ in type, or if the first sample has its image twice.
    """
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


def _replace_image(sample: Any, image: NDArray[Any], writer: FusedStep) -> Any:
    """Return a sample in which the result of `writer.value_of(image)` replaces `image`, a row of the batch's images.
    Return a sample that is neither a dict nor a tuple unchanged.
    """
    if isinstance(sample, dict):
        return {name: writer.value_of(image) if value is image else value for name, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(writer.value_of(image) if value is image else value for value in sample)
    return sample


def _check_rows(value: Any, num_rows: int, origin: Origin) -> None:
    """Check that each column of the batch `value` has `num_rows` rows. Only lists, ragged batches, and arrays and
    tensors with at least one axis are checked.

    Raises:
        PipelineError: A function after `batched` changed the number of rows. The message names the column.
    """
    columns = (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, tuple) else (value,))
    )
    for name, column in columns:
        if not isinstance(column, (list, Ragged)) and not getattr(column, "ndim", 0):
            continue
        found = count_rows(column)
        if found != num_rows:
            raise PipelineError(
                f"{origin}: after `batched`, a function made {found} rows of {num_rows} in `{name}`. `tail: pad` "
                f"adds a mask of {num_rows} rows, `{VALID}`.\n  Keep the number of rows, or use `tail: drop`."
            )


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

    Raises:
        PipelineError: The mapping has a field `__valid__` already.
    """
    if isinstance(value, Mapping):
        if VALID in value:
            msg = f"`{VALID}` is the mask that `tail: pad` adds, but the samples have a field of this name."
            raise PipelineError(f"{msg}\n  `rename` it, or use `tail: drop`.")
        return with_item(value, VALID, mask)
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
