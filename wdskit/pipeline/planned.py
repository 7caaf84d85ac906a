"""A planned pipeline: samples by position, batches by step. Stateless, so any process can make any batch.

What stands at a position follows from integers (`order`), so epochs, ranks and resume points are the loader's
arithmetic; here a job, which is the positions of one batch, becomes that batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset

from wdskit.errors import PipelineError, SampleError
from wdskit.order.base import Ints, Order
from wdskit.order.steps import Steps, Tail
from wdskit.pipeline.buffering import Batched
from wdskit.pipeline.columns import columns_of
from wdskit.pipeline.each import Each
from wdskit.pipeline.run import Origin, Run
from wdskit.pipeline.shards import OpenShards

VALID = "__valid__"

_FIELD_STAGES = frozenset({"decode", "to_tuple", "to_dict", "rename"})
"""Stages whose failure means that a field is missing or cannot be decoded."""


class Job(NamedTuple):
    """One batch to make.

    Attributes:
        start: Where the epoch starts in the order's endless sequence.
        positions: int64 (batch,), positions of the epoch.
        num_samples: Positions of the epoch; those at or behind it are padding, for which any sample does.
    """

    start: int
    positions: Ints
    num_samples: int


class Bad(NamedTuple):
    """A sample that could not be had, and for which another stands."""

    position: int
    shard: str
    key: str
    reason: str


class Made(NamedTuple):
    """What became of a job: the batch (without `batched`, a list of samples), and the samples that were bad."""

    value: Any
    bad: tuple[Bad, ...]


@dataclass(frozen=True)
class Plan:
    """What the loader must know to count through a planned pipeline.

    Attributes:
        order: The endless sequence.
        tail: What becomes of the positions behind the last full global batch.
        batch: Samples of a batch of a rank.
        epoch_samples: Positions of an epoch.
        is_batched: Whether items are batches; without `batched` they are samples.
        fingerprint: What the order follows from, as plain JSON, for the state.
        forgives: Whether bad samples are replaced, and
        forgives_functions: those too on which a transform or a user's function fails.
    """

    order: Order
    tail: Tail
    batch: int
    epoch_samples: int
    is_batched: bool
    fingerprint: dict[str, Any]
    forgives: bool = False
    forgives_functions: bool = False


class PlannedPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a planned source.

    `make` turns a job into a batch, in any process and any order. Iterated, it yields one epoch of its rank, and the
    next time the next one.

    Args:
        shards: Where samples are read.
        each: What is done to each sample.
        batched: What makes batches of them, None without.
        behind: What is done to each batch, None without.
        run: Seed, rank, threads.
        plan: For the loader.
    """

    def __init__(
        self, shards: OpenShards, each: Each, batched: Batched | None, behind: Each | None, run: Run, plan: Plan
    ) -> None:
        super().__init__(*(stage for stage in (shards, each, batched, behind) if stage is not None))
        self.shards, self.each, self.batched, self.behind = shards, each, batched, behind
        self.run = run
        self.plan = plan
        self.columns = columns_of(shards, each, batched)
        self._pool: ThreadPoolExecutor | None = None
        self._next_epoch = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def make(self, job: Job) -> Made:
        """The batch of a job, with its mask if the tail is padded.

        Raises:
            ShardError: A shard is not right.
            SampleError: A stage failed on a sample, and that is not forgiven.
        """
        plan = self.plan
        places = np.minimum(job.positions, job.num_samples - 1) + job.start
        shards, samples = plan.order.take(places)
        made = None if self.columns is None else self.columns.make(places, shards, samples)
        if made is not None:
            batch, origin = made
            if self.behind is not None:
                batch = self.behind.apply(batch, origin)
            mask = torch.from_numpy(job.positions < job.num_samples)
            return Made(batch if plan.tail == "drop" else with_mask(batch, mask), ())
        found = zip(places.tolist(), shards.tolist(), samples.tolist(), strict=True)
        results = list(self._each_of(found))
        values, origins, reasons = zip(*results, strict=True)
        bad = tuple(
            Bad(position, origin.url, origin.key, reason)
            for position, origin, reason in zip(job.positions.tolist(), origins, reasons, strict=True)
            if reason is not None and position < job.num_samples
        )
        valid = (job.positions < job.num_samples) & np.array([reason is None for reason in reasons])
        if self.batched is None:
            return Made(self._with_masks(list(values), valid), bad)
        batch, origin = self.batched.collated(list(values), list(origins))
        if self.behind is not None:
            batch = self.behind.apply(batch, origin)
        return Made(batch if plan.tail == "drop" else with_mask(batch, torch.from_numpy(valid)), bad)

    def _with_masks(self, values: list[Any], valid: Any) -> list[Any]:
        if self.plan.tail == "drop":
            return values
        return [with_mask(value, bool(one)) for value, one in zip(values, valid, strict=True)]

    def _each_of(self, found: Iterator[tuple[int, int, int]]) -> Iterator[tuple[Any, Origin, str | None]]:
        if self.run.num_threads == 1:
            return itertools.starmap(self._one, found)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.run.num_threads, thread_name_prefix="wdskit")
        return self._pool.map(self._one, *zip(*found, strict=True))

    def _one(self, place: int, shard: int, sample: int) -> tuple[Any, Origin, str | None]:
        """A sample behind all one-to-one stages; with the origin of the bad one and the reason, where another stands
        in for it.
        """
        try:
            return *self._sample(place, shard, sample), None
        except SampleError as err:
            if not self._forgives(err):
                raise
            first = err
        for attempt in itertools.count(1):
            other = self.plan.order.substitute(place, attempt)
            if other is None:
                msg = f"{first}\n  No sample near it can stand in for it: all {attempt} are bad."
                raise SampleError(msg, stage=first.stage, shard=first.shard, key=first.key) from first
            try:
                value, _ = self._sample(place, *other)
            except SampleError as err:
                if not self._forgives(err):
                    raise
            else:
                return value, Origin(first.shard, first.key, 0, place, 0), str(first)
        raise AssertionError

    def _sample(self, place: int, shard: int, sample: int) -> tuple[Any, Origin]:
        path, key, part, fields = self.shards.read(shard, sample)
        origin = Origin(path, key, 0, place, part)
        return self.each.apply({"__key__": key, "__url__": path, **fields}, origin), origin

    def _forgives(self, err: SampleError) -> bool:
        return self.plan.forgives and (err.stage in _FIELD_STAGES or self.plan.forgives_functions)

    def __iter__(self) -> Iterator[Any]:
        """One epoch in this process: what `make_loader` gives, without worker processes, resume and error budget.

        Raises:
            PipelineError: It runs in a worker of another loader, which would read everything in each; or it forgives
                bad samples, which only a loader counts.
        """
        from torch.utils.data import get_worker_info

        if self.plan.forgives:
            msg = "errors: nobody counts and lists bad samples where a built pipeline is iterated."
            raise PipelineError(f"{msg}\n  Use pipe.loader(errors=...), or leave `errors` out.")

        if get_worker_info() is not None:
            msg = "a planned pipeline is not shared by the workers of another loader."
            raise PipelineError(f"{msg}\n  Use pipe.loader(workers=...), or wdskit.make_loader.")
        plan, place = self.plan, self.run.place
        start = self._next_epoch * plan.epoch_samples
        steps = Steps(plan.epoch_samples, plan.batch, place.world_size, plan.tail)
        for step in range(len(steps)):
            made = self.make(Job(start, steps.positions(place.rank, step), plan.epoch_samples))
            yield from [made.value] if plan.is_batched else made.value
        self._next_epoch += 1


def with_mask(value: Any, mask: Any) -> Any:
    """A batch or sample that carries its mask: as `__valid__` in a dict, as the last element of a tuple."""
    if isinstance(value, Mapping):
        return {**value, VALID: mask}
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
