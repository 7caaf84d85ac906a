"""One batch of a planned pipeline in the making by columns, and sample by sample where that does not work."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from wdskit.engine.jobs import Job, Made
from wdskit.engine.making import Making, find, is_sample, run_behind, with_mask
from wdskit.engine.read_ahead import Read
from wdskit.engine.shards import ManySamples
from wdskit.order.base import Ints
from wdskit.stages.base import Origin
from wdskit.stages.collate import Memory
from wdskit.stages.timing import Timings

if TYPE_CHECKING:
    from wdskit.engine.columns import Columns
    from wdskit.engine.planned import PlannedPipeline


class ByColumns:
    """As `Making`, of a single chunk where the samples fit: it takes microseconds a sample, and Python's lock.

    Args:
        columns: Of the pipeline.
        making: For what cannot be made so.
        memory: Where the batch is written.
        read: Its samples, where they have been read.
    """

    def __init__(
        self, pipeline: PlannedPipeline, columns: Columns, making: Making, memory: Memory, read: Read | None = None
    ) -> None:
        self.job = making.job
        self._pipeline = pipeline
        self._columns = columns
        self._making = making
        self._memory = memory
        self._read = read
        self._found: tuple[Ints, Ints, Ints] | None = None if read is None else read.found
        self._samples: ManySamples | None = None
        self._fits = False
        self._read_s = 0.0
        self._made: tuple[Any, Origin] | None = None
        self._timings: Timings | None = None

    def drop(self) -> None:
        """As `Making.drop`."""
        self._making.drop()

    def prepare(self) -> int:
        """Find out which samples these are, read them, and give the number of chunks: one where they fit columns."""
        self._found = found = self._found or find(self._pipeline, self.job)
        read, self._read = self._read, None
        begun = perf_counter()
        with contextlib.suppress(Exception):  # it comes again sample by sample, where it is told or forgiven
            self._samples = self._columns.read(*found[1:]) if read is None else read.samples
            self._fits = self._samples is not None and self._columns.fits(self._samples)
        self._read_s = perf_counter() - begun + (0.0 if read is None else read.seconds)
        return 1 if self._fits else self._making.prepare_found(*found, self._samples)

    def run(self, chunk: int) -> None:
        """Make the whole batch, or else a chunk of its samples."""
        if not self._fits:
            self._making.run(chunk)
            return
        assert self._found is not None
        assert self._samples is not None
        timings = self._pipeline.chunk_pace.begin()
        if timings is not None:
            timings.begin_earlier(self._read_s)
        self._made = self._columns.make(*self._found[:2], self._samples, self._memory)
        if self._made is None:
            for each in range(self._making.prepare_found(*self._found, self._samples)):
                self._making.run(each)
        elif timings is not None:
            timings.lap("read-to-batched", len(self._found[0]))
            self._timings = timings

    def finish(self) -> Made:
        """As `Making.finish`."""
        if self._made is None or self._found is None:
            return self._making.finish()
        batch = run_behind(self._pipeline, *self._made, self._timings)
        if self._timings is not None:
            self._pipeline.chunk_pace.end(self._timings)
        timings = self._timings or Timings()
        timings.bytes_read = self._pipeline.shards.mean_bytes(self._found[1])
        if self._pipeline.plan.tail == "pad":
            batch = with_mask(batch, torch.from_numpy(is_sample(self.job)))
        return Made(batch, (), timings=timings)


Work: TypeAlias = Making | ByColumns


def begin(pipeline: PlannedPipeline, job: Job, memory: Memory, read: Read | None = None) -> Work:
    """A job at work, in the way that suits the pipeline; `read` are its samples, where they have been read."""
    making = Making(pipeline, job, memory)
    columns = pipeline.columns
    return making if columns is None else ByColumns(pipeline, columns, making, memory, read)
