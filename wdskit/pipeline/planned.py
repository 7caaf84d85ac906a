"""A planned pipeline: samples by position, batches by step. Stateless, so any process can make any batch.

What stands at a position follows from integers (`order`), so epochs, ranks and resume points are the loader's
arithmetic; here a job, which is the positions of one batch, becomes that batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import webdataset

from wdskit.dataset.local import LocalShard
from wdskit.dataset.table import ShardTable
from wdskit.errors import ShardError
from wdskit.order.base import Ints, Order
from wdskit.order.steps import Tail
from wdskit.pipeline.run import Origin, Run

MAX_OPEN_SHARDS = 256  # of the 1024 descriptors that a process has by default

VALID = "__valid__"


class Job(NamedTuple):
    """One batch to make.

    Attributes:
        epoch: Part of the random keys.
        start: Where the epoch starts in the order's endless sequence.
        positions: int64 (batch,), positions of the epoch.
        num_samples: Positions of the epoch; those at or behind it are padding, for which any sample does.
    """

    epoch: int
    start: int
    positions: Ints
    num_samples: int


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
    """

    order: Order
    tail: Tail
    batch: int
    epoch_samples: int
    is_batched: bool
    fingerprint: dict[str, Any]


class PlannedSource:
    """Reads the samples of a job through the offsets of their shards."""

    def __init__(self, run: Run, table: ShardTable, order: Order) -> None:
        self.run = run
        self.table = table
        self.order = order
        self.job: Job | None = None
        self._open: OrderedDict[int, LocalShard] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "job": None}

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples of `job`, with their positions as origins."""
        job = self.job
        assert job is not None
        places = np.minimum(job.positions, job.num_samples - 1) + job.start
        shards, samples = self.order.take(places)
        for position, shard, sample in zip(job.positions.tolist(), shards.tolist(), samples.tolist(), strict=True):
            url = self.table.paths[shard]
            key, fields = self._shard(shard).read(sample)
            self.run.origin = Origin(url, key, job.epoch, position, 0)
            yield {"__key__": key, "__url__": url, **fields}

    def _shard(self, number: int) -> LocalShard:
        """The open shard; the one that was not read for longest makes room."""
        shard = self._open.get(number)
        if shard is None:
            path = self.table.paths[number]
            shard = LocalShard(path)
            expected = int(self.table.counts[number])
            if len(shard) != expected:
                shard.close()
                problem = f"its offsets are those of {len(shard)} samples, the folder's index says {expected}"
                raise ShardError(shard=path, offset=0, problem=problem, remedy="Run `wdskit index` on its folder.")
            if len(self._open) >= MAX_OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
            self._open[number] = shard
        else:
            self._open.move_to_end(number)
        return shard


class PlannedPipeline(webdataset.DataPipeline):  # type: ignore[misc]  # webdataset ships no annotations that mypy can use
    """The running form of a `Pipeline` with a planned source.

    `make` turns a job into a batch, in any process and any order. Iterated, it yields epoch 0 of its rank.
    """

    def __init__(self, stages: list[Any], run: Run, plan: Plan) -> None:
        super().__init__(*stages)
        self.run = run
        self.plan = plan

    def make(self, job: Job) -> Any:
        """The batch of a job (without `batched`, a list of samples), with its mask if the tail is padded.

        Raises:
            ShardError: A shard is not right.
            SampleError: A stage failed on a sample.
        """
        source = self.pipeline[0]
        source.job = job
        values: Iterator[Any] = source()
        for stage in self.pipeline[1:]:
            values = self.invoke(stage, values)
        made = list(values)
        if self.plan.tail == "drop":
            return made[0] if self.plan.is_batched else made
        valid = job.positions < job.num_samples
        if self.plan.is_batched:
            return with_mask(made[0], torch.from_numpy(valid))
        return [with_mask(sample, bool(one)) for sample, one in zip(made, valid, strict=True)]


def with_mask(value: Any, mask: Any) -> Any:
    """A batch or sample that carries its mask: as `__valid__` in a dict, as the last element of a tuple."""
    if isinstance(value, Mapping):
        return {**value, VALID: mask}
    if isinstance(value, tuple):
        return (*value, mask)
    return (value, mask)
