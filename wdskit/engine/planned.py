"""The running form of a planned pipeline, and what makes its batches in each process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from wdskit.engine.batch import WHOLE_BATCH, Batch, Task, make_batches
from wdskit.engine.outcome import Outcome
from wdskit.engine.program import Job, Places, Program
from wdskit.engine.shard_cache import ShardCache
from wdskit.errors import FolderIndexError, PipelineError, ShardError, StorageError
from wdskit.order.steps import Steps
from wdskit.stages.base import Run
from wdskit.stages.collate import FRESH, Memory


class PlannedPipeline(IterableDataset[Any]):
    """The running form of a `Pipeline` with a planned source. A loader iterates it; it cannot be iterated by itself.

    Args:
        program: What makes its batches.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    @property
    def run(self) -> Run:
        """Seed, rank, number of threads."""
        return self.program.run

    @property
    def num_threads(self) -> int:
        """Threads of each process that make its batches."""
        return self.program.run.num_threads

    @property
    def pipeline(self) -> list[Any]:
        """What its workers get."""
        program = self.program
        found = (program.shards, program.stages, program.batched, program.behind)
        return [part for part in found if part is not None]

    def start(self, worker: int, num_workers: int) -> BatchMaker:  # noqa: ARG002 (all are alike)
        """What makes the batches of jobs in one worker."""
        return BatchMaker(self.program)

    def describe(self, major: int, minor: int) -> str:
        """Name the sample, or the batch, that a slot of the `Board` says. It reads the key from a local shard."""
        [shard], [sample] = self.program.plan.order.take(np.array([minor]))
        name = f"sample {self.program.shards.describe(int(shard), int(sample))}"
        return f"the batch of {name}" if major == WHOLE_BATCH else name

    def __iter__(self) -> Iterator[Any]:
        """Refuse.

        Raises:
            PipelineError: Only a loader makes its batches.
        """
        raise PipelineError(
            "a planned pipeline is run by a loader: it counts epochs and gives its workers their batches.\n"
            "  Use pipe.loader(workers=...), or wdskit.make_loader, in place of build() and torch's DataLoader."
        )


class BatchMaker:
    """Makes the batches of a planned pipeline, as a `Maker`.

    Args:
        program: Of the pipeline.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._looked_ahead: tuple[int, Steps] | None = None  # the epoch in which that has begun
        self._thread: threading.Thread | None = None

    def begin(self, job: Job) -> OpenJob:
        """A job whose samples are found, and on their way where they come from a store. It raises nothing."""
        shards = self._program.shards
        try:
            places = self._program.places(job)
            if shards.is_remote:
                shards = shards.begin(places.shards, places.samples)
                if self._program.ahead:
                    self._look_ahead(job)
            return OpenJob(places, shards)
        except Exception as err:  # noqa: BLE001 (the consumer's to see, behind the batches before)
            return OpenJob(None, shards, err)

    def _look_ahead(self, job: Job) -> None:
        """Begin to fetch the parts of the job that comes `ahead` behind this one, in a thread, as its shards are opened
        too. With the first job of an epoch, those of all jobs up to it. Who needs a sample there is told what is wrong.
        """
        program, steps, epoch = self._program, job.steps, (job.start, job.steps)
        num = max(1, program.ahead // steps.global_batch)
        first, stop = job.first + num if self._looked_ahead == epoch else job.stop, min(job.stop + num, len(steps))
        if first >= stop or (self._thread is not None and self._thread.is_alive()):
            return  # a store that does not answer: what is needed there comes when it is needed

        def keep() -> None:
            with contextlib.suppress(ShardError, StorageError, FolderIndexError):
                for step in range(first, stop):
                    places = program.places(Job(job.start, steps, step, step + 1))
                    program.shards.keep(places.shards, places.samples)

        self._looked_ahead = epoch
        self._thread = threading.Thread(target=keep, name="wdskit-ahead", daemon=True)
        self._thread.start()

    def __call__(self, work: OpenJob, memory: Memory = FRESH, task: Task | None = None) -> Outcome[list[Batch]]:
        """The batches of a job that has begun."""
        if work.places is None:
            return Outcome(error=work.error)
        # Bound to no name: the traceback of an error leads to this frame, and would be a cycle with it.
        return make_batches(self._program, work.places, memory, task, shards=work.shards)

    def close(self) -> None:
        """See `Maker`: jobs share shards that stay open."""


class OpenJob(NamedTuple):
    """A job that has begun: its samples and where they are read, or what went wrong."""

    places: Places | None
    shards: ShardCache
    error: Exception | None = None
