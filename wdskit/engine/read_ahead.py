"""Samples of several batches that are read at once, where batches are small: what numpy takes for each call, not for
each sample, is 0.5 ms a batch, as much as 50 small samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wdskit.dataset.columns import LARGE_BYTES
from wdskit.engine.jobs import Job
from wdskit.engine.making import places_of
from wdskit.engine.shards import ManySamples
from wdskit.order.base import Ints

if TYPE_CHECKING:
    from wdskit.engine.planned import PlannedPipeline

_SAMPLES = 512
"""Read at once, and more only for one batch. Bytes of 3 KB in batches of 64 take 18 us a sample without, 10 with it."""

_MOST_JOBS = 16
_MOST_MISSES = 6  # in a row that count: at most 1/32 of what is read is read for nothing


class Read(NamedTuple):
    """The samples of one job.

    Attributes:
        found: As `making.find` gives them.
        samples: As they were read.
        seconds: What that took.
    """

    found: tuple[Ints, Ints, Ints]
    samples: ManySamples
    seconds: float


class ReadAhead:
    """Reads what several jobs need. It never raises: whatever goes wrong comes again where one job is made by itself.

    Args:
        pipeline: Whose jobs they are.

    Attributes:
        num_jobs: How many are read at once; 1 where that is no gain.
    """

    def __init__(self, pipeline: PlannedPipeline) -> None:
        self._pipeline = pipeline
        self._known: dict[Job, Read] = {}
        self._num_apart = self._misses = 0
        self.num_jobs = _num_jobs(pipeline)

    def take(self, job: Job, following: Sequence[Job]) -> Read | None:
        """The samples of a job; None where they are for whoever makes it to read.

        Args:
            job: The one to make now.
            following: Those that come next, which may be read along. What was read for others is forgotten.
        """
        if job not in self._known:
            self._known = {}
            if self._num_apart:
                self._num_apart -= 1
            elif following and self.num_jobs > 1:
                self._try([job, *following[: self.num_jobs - 1]])
        return self._known.pop(job, None)

    def _try(self, jobs: Sequence[Job]) -> None:
        """Read at once; where it does not work, each of these jobs is made by itself, and of those behind them the more
        the more often that happens in a row: what is read for nothing stays a small share.
        """
        self._known = self._read(jobs)
        self._misses = 0 if self._known else min(_MOST_MISSES, self._misses + 1)
        self._num_apart = 0 if self._known else (len(jobs) << self._misses - 1) - 1

    def _read(self, jobs: Sequence[Job]) -> dict[Job, Read]:
        begun = perf_counter()
        try:
            parts = [places_of(job) for job in jobs]
            places = np.concatenate(parts)
            shards, samples = self._pipeline.plan.order.take(places)
            assert self._pipeline.columns is not None
            many = self._pipeline.columns.read(shards, samples)
        except Exception:  # noqa: BLE001 (it comes again job by job, where it is told or forgiven)
            return {}
        if many is None:
            return {}
        seconds = (perf_counter() - begun) / len(jobs)
        stops = list(itertools.accumulate(map(len, parts)))
        found = {}
        for job, start, stop in zip(jobs, [0, *stops[:-1]], stops, strict=True):
            at = slice(start, stop)
            found[job] = Read((places[at], shards[at], samples[at]), many.part(at), seconds)
        return found


def _num_jobs(pipeline: PlannedPipeline) -> int:
    if pipeline.columns is None or pipeline.shards.largest_mean() > LARGE_BYTES:
        return 1
    return max(1, min(_MOST_JOBS, _SAMPLES // pipeline.plan.batch))
