"""`Program`: a built pipeline with a planned source. It is frozen, and equal in every process of a loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.images import IMAGE_SPECS
from wdskit.engine.columns import BatchColumns, columns_of
from wdskit.engine.reader import SampleReader
from wdskit.errors import PipelineError
from wdskit.native import native
from wdskit.order.base import Ints, Order
from wdskit.order.buckets import BucketSteps
from wdskit.order.steps import AnySteps, rank_positions
from wdskit.stages.collate import Batcher, Collate
from wdskit.stages.epoch import EpochLayout
from wdskit.stages.fields import FieldDecoder, Rename, ToDict, ToTuple
from wdskit.stages.images.fused import FusedStep
from wdskit.stages.run import Run, SampleStages, Step, TimingSampler

_BYTES_A_JOB = 4 << 20
"""Most bytes of a job with several batches, because several jobs are in memory at a time."""

WHOLE_BATCH = 1
"""`major` in the slot of a thread that works on a batch, not on one of its samples."""

_MOST_BATCHES_A_JOB = 16
_UNBATCHED_A_JOB = 64  # sending one sample to another process costs 0.2 ms


@dataclass(frozen=True)
class Job:
    """A range of steps of an epoch, for which a rank makes its batches. Equal jobs give equal batches.

    Attributes:
        start: Position in the order's endless sequence at which the epoch starts.
        steps: The steps of the epoch.
        first: The first step.
        stop: The step after the last step.
        epoch: Number of the epoch.
    """

    start: int
    steps: AnySteps
    first: int
    stop: int
    epoch: int = 0


class SampleLocations(NamedTuple):
    """The location of each row of a job's batches. Each array has shape (n,), with the rows of the first batch first.

    Attributes:
        epoch_positions: Positions in the epoch; for a padded row, the number of samples of the epoch.
        positions: Positions in the order's endless sequence; padded rows have the last position of their step.
        is_sample: False for padded rows.
        shards: Numbers of the samples' shards in the order.
        samples: Numbers of the samples in their shards.
    """

    epoch_positions: Ints
    positions: Ints
    is_sample: NDArray[np.bool_]
    shards: Ints
    samples: Ints


class OpenJob(NamedTuple):
    """A job whose samples are located. Remote samples are already requested.

    Attributes:
        job: The job.
        locations: The locations of the job's samples.
        reader: Reads the samples.
        bounds: For each batch, the slice of the rows of `locations` that belong to it.
        labels: Shape or largest length of each batch's bucket; None without buckets.
    """

    job: Job
    locations: SampleLocations
    reader: SampleReader
    bounds: list[slice]
    labels: list[Any] | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """A pipeline with a planned source, ready to run: `engine.batch.BatchMaker` makes its batches.

    A program never changes, and is equal in every process.

    Attributes:
        reader: Reads samples by (shard, sample).
        stages: For each part of a mixture (`origin.part`), the stages that its samples pass. Without a mixture, one
            item.
        collate: Makes a batch of samples; None without `batched`.
        order: Gives the (shard, sample) of each position.
        batch_stages: Run on each batch; None if no stage follows `batched`.
        epoch: Number of samples, batch size and `tail` of an epoch.
        run: Seed, rank and number of threads.
        forgives: Whether bad samples are replaced.
        forgives_functions: Whether samples on which a transform or a user's function fails are replaced too.
        num_ahead: Parts of shards are fetched in advance, up to this number of positions after a job. The positions of
            all ranks count. 0 fetches nothing in advance.
        columns: Makes batches field by field. None if the stages do not allow it or differ between parts, if bad
            samples are replaced, if a shard is remote, or without native code.
        decoder: `writer`, if it is the first stage of all samples and C decodes its images; None otherwise.
        writer: The stage that writes its image straight into the batch; None without such a stage, if parts differ, or
            if `batched` has a collate function of the user.
        mask_place: The place of `__valid__` in the tuples of `to_tuple`; None if no `to_tuple` names it.
        pace: Decides which jobs are timed.
        chunk_pace: Decides which chunks of samples are timed.
    """

    reader: SampleReader
    stages: tuple[SampleStages, ...]
    collate: Batcher | None
    order: Order
    batch_stages: SampleStages | None
    epoch: EpochLayout
    run: Run
    forgives: bool = False
    forgives_functions: bool = False
    num_ahead: int = 0
    mask_place: int | None = None
    columns: BatchColumns | None = field(init=False)
    decoder: FusedStep | None = field(init=False)
    writer: FusedStep | None = field(init=False)
    chunk_pace: TimingSampler = field(init=False, default_factory=TimingSampler)
    pace: TimingSampler = field(init=False, default_factory=TimingSampler)

    def __post_init__(self) -> None:
        is_native = native() is not None  # with `WDSKIT_NATIVE=require`, the error is raised here, not in a worker
        steps = self.stages[0].steps
        is_uniform = all(each == self.stages[0] for each in self.stages)
        collates = self.collate is not None and isinstance(self.collate.collate, Collate)
        has_columns = is_uniform and is_native and not self.reader.is_remote and not self.forgives
        has_origins = self.batch_stages is not None
        writers = [_writer(each.steps) for each in self.stages] if collates else [None]
        writer = writers[0] if all(each is writers[0] for each in writers) else None
        is_first = writer is not None and is_uniform and steps[0].function is writer
        found = {
            "columns": columns_of(self.stages[0], self.collate, has_origins=has_origins) if has_columns else None,
            "decoder": writer if is_native and is_first else None,
            "writer": writer,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of samples of an epoch, on all ranks together."""
        return self.epoch.num_samples

    def __iter__(self) -> Iterator[Any]:
        """Raise PipelineError, because only a loader can run a planned pipeline.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            "a planned pipeline is run by a loader: it counts epochs and gives its workers their batches.\n"
            "  Use pipe.loader(workers=...), or wdskit.make_loader, in place of build() and torch's DataLoader."
        )

    def __getitem__(self, _: object) -> Any:
        """Raise the PipelineError of `__iter__`, because torch's DataLoader asks for samples by number."""
        return iter(self)

    @property
    def parts(self) -> list[Any]:
        """The objects that worker processes must be able to unpickle."""
        found = (self.reader, self.stages, self.collate, self.batch_stages)
        return [part for part in found if part is not None]

    def describe(self, major: int, minor: int) -> str:
        """Return the name of the sample or batch on which a thread works: the number and the shard of its sample. No
        shard is read, because the disk may be what hangs.

        `major` and `minor` are the values of the thread's slot of the `Board`: `major` is `WHOLE_BATCH` for a batch,
        and `minor` is a position in the order's endless sequence.
        """
        [shard], [sample] = self.order.take(np.array([minor]))
        name = f"sample {self.reader.describe(int(shard), int(sample))}"
        return f"the batch of {name}" if major == WHOLE_BATCH else name

    def locate(self, job: Job) -> SampleLocations:
        """Return the locations of a job's rows. A padded row has the location of the last sample of its step."""
        rank, _, ranks_per_node = self.run.rank_info
        steps = job.steps
        parts = [
            rank_positions(self.order, job.start, steps, step, rank=rank, ranks_per_node=ranks_per_node)
            for step in range(job.first, job.stop)
        ]
        epoch_positions = np.concatenate(parts)
        positions = epoch_positions + job.start
        if steps.tail == "pad":  # a padded row gets the last sample of its step, whose shape fits
            lasts = [steps.consumed_after(step) - 1 + job.start for step in range(job.first, job.stop)]
            positions = np.minimum(positions, np.repeat(lasts, [len(part) for part in parts]))
        is_sample = epoch_positions < steps.num_samples
        return SampleLocations(epoch_positions, positions, is_sample, *self.order.take(positions))

    def divide(self, job: Job, reader: SampleReader) -> OpenJob:
        """Return the open job for `BatchMaker`: its rows located, and divided into batches. `reader` reads them."""
        locations = self.locate(job)
        steps = range(job.first, job.stop)
        edges = np.cumsum([0, *(job.steps.batch_at(step) for step in steps)]).tolist()
        bounds = [slice(*pair) for pair in itertools.pairwise(edges)]
        buckets = self.epoch.buckets
        if buckets is None or not isinstance(job.steps, BucketSteps):
            return OpenJob(job, locations, reader, bounds)
        labels = [buckets.labels[job.steps.bucket_at(step)] for step in steps]
        return OpenJob(job, locations, reader, bounds, labels)

    @property
    def needs_torch(self) -> bool:
        """True if the stages need torch for samples with JPEGs. If False, samples without JPEGs may still need it."""
        return self.batch_stages is not None or any(
            self._step_needs_torch(step.function) for each in self.stages for step in each.steps
        )

    def _step_needs_torch(self, function: Any) -> bool:
        if isinstance(function, FieldDecoder):
            return function.images in IMAGE_SPECS and IMAGE_SPECS[function.images].kind == "torch"
        if isinstance(function, FusedStep):
            return function is not self.writer or not function.is_native
        return not isinstance(function, (Rename, ToDict, ToTuple))

    @property
    def batches_a_job(self) -> int:
        """Number of batches, or of samples without `batched`, that one `Job` should have. A `Job` is the piece of an
        epoch that a worker makes at a time.
        """
        if self.collate is None:
            return _UNBATCHED_A_JOB
        if self.columns is None or self.batch_stages is not None:
            return 1
        samples = min(self.reader.most_samples(self.run.num_threads), int(_BYTES_A_JOB / self.reader.most_mean_bytes()))
        return max(1, min(_MOST_BATCHES_A_JOB, samples // self.epoch.batch))


def _writer(steps: Sequence[Step]) -> FusedStep | None:
    """Return the last step that does more than move fields, if it can write its image into the batch; else None."""
    last = next(
        (step.function for step in reversed(steps) if not isinstance(step.function, (Rename, ToDict, ToTuple))), None
    )
    return last if isinstance(last, FusedStep) and last.out_shape is not None else None
