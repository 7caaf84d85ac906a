"""`wdskit.plan`: compute the steps of a run and what a rank reads, from the index, without reading samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdskit.errors import PipelineError, check_whole
from wdskit.order.base import DEPTHS, Ints
from wdskit.order.mixture import MixtureOrder
from wdskit.order.steps import AnySteps, rank_positions
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.settings import choose_workers
from wdskit.stages.epoch import EpochLayout, plan_epoch
from wdskit.stages.sources import PlannedData, PlannedSource

_MAX_POSITIONS = 1 << 21  # positions of the epoch that are computed: about a second
_MAX_STEPS = 1 << 14


@dataclass(frozen=True)
class BucketRow:
    """The plan of one bucket of `bucketed`.

    Attributes:
        bucket: Shape of the bucket's images, height x width. For buckets of lengths, the largest length.
        num_samples: Number of samples of the bucket.
        global_batch: Size of the bucket's batches, on all ranks together.
        steps: Number of batches of the bucket in an epoch.
        num_dropped: Number of samples of the bucket that are in no batch.
        num_padded: Number of rows without a sample in the bucket's last batch.
    """

    bucket: str
    num_samples: int
    global_batch: int
    steps: int
    num_dropped: int
    num_padded: int


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a planned source.

    Attributes:
        source: "exact", "resampled" or "sequential".
        world_size: Number of ranks, R.
        workers: Worker processes per rank; 0 if there are no workers. If the setting is not set, the default of a
            loader on this machine.
        gpus_per_node: Ranks per node, a divisor of R. The ranks of a node have consecutive numbers.
        epoch: Number of the epoch.
        num_samples: Number of samples of the epoch, over all ranks.
        batch: B, the size of a rank's batch, or with `bucketed` of the largest batch; 1 without both stages.
        global_batch: R x B.
        steps: Number of batches of each rank.
        num_dropped: Number of samples at the end of the epoch, or of its buckets, that no rank gets.
        num_padded: Number of rows without a sample, over all ranks, in the last step or in the buckets' last batches.
        num_shards: Number of shards with a selected sample. A shard counts each time the source lists or repeats it.
        num_bytes: Bytes of the selected samples, headers and padding included.
        num_lanes: Number of lanes of the order; the largest number of a mixture; 0 for an order without lanes.
        rank_lanes: Number of lanes from which rank 0 takes samples; other ranks differ little.
        rank_shards: Number of shards from which rank 0 takes samples. None for an epoch of more than 2 million samples
            or 16,384 steps, because all its positions would have to be computed.
        rank_bytes: Bytes of the samples of a rank, about, from the mean sample size of each shard.
        buckets: The buckets of `bucketed`; empty without `bucketed`.
    """

    source: str
    world_size: int
    workers: int
    gpus_per_node: int
    epoch: int
    num_samples: int
    batch: int
    global_batch: int
    steps: int
    num_dropped: int
    num_padded: int
    num_shards: int
    num_bytes: int
    num_lanes: int
    rank_lanes: int
    rank_shards: int | None
    rank_bytes: int
    buckets: tuple[BucketRow, ...]


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    world_size: int = 1,
    gpus_per_node: int = 8,
    epoch: int = 0,
) -> EpochPlan:
    """Plan an epoch of a planned source from the index, without reading samples.

    Args:
        config: The path of a YAML file, its content as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `make_loader`.
        world_size: Number of ranks, R.
        gpus_per_node: Limit for the ranks per node. The largest divisor of R up to this number is used.
        epoch: Number of the epoch.

    Raises:
        ConfigError: The configuration has problems; all are listed.
        PipelineError: The source is a stream, the pipeline cannot run on this number of ranks, or an argument is out of
            range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or do not have an index or column.
    """
    world_size = check_whole("world_size", world_size, PipelineError, least=1)
    gpus_per_node = check_whole("gpus_per_node", gpus_per_node, PipelineError, least=1)
    epoch = check_whole("epoch", epoch, PipelineError)
    _, stages, settings = open_pipeline(config, pipeline, overrides)
    source = stages[0]
    if not isinstance(source, PlannedSource):
        msg = "plan: a stream knows its samples only when it reads them; `with_epoch` sets its steps."
        raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`), and plan `exact`.")
    data, layout = plan_epoch(stages, world_size)
    start = epoch * layout.num_samples
    steps = layout.steps(world_size, start=start)
    node_size = max(each for each in range(1, min(gpus_per_node, world_size) + 1) if world_size % each == 0)
    tables = dict(zip(data.parts, data.tables, strict=True))
    num_lanes, rank_lanes, rank_shards, rank_bytes = _plan_rank(data, steps, start, node_size)
    return EpochPlan(
        source=source.name,
        world_size=world_size,
        workers=choose_workers(settings.loader, stages, {"LOCAL_WORLD_SIZE": str(node_size)}).workers,
        gpus_per_node=node_size,
        epoch=epoch,
        num_samples=steps.num_samples,
        batch=steps.batch,
        global_batch=steps.global_batch,
        steps=len(steps),
        num_dropped=steps.num_dropped,
        num_padded=steps.num_padded,
        num_shards=sum(int(np.count_nonzero(table.counts)) for table in data.tables),
        num_bytes=sum(round(float(table.counts @ table.sample_bytes())) for table in tables.values()),
        num_lanes=num_lanes,
        rank_lanes=rank_lanes,
        rank_shards=rank_shards,
        rank_bytes=rank_bytes,
        buckets=tuple(_bucket_rows(layout)),
    )


def _plan_rank(data: PlannedData, steps: AnySteps, start: int, node_size: int) -> tuple[int, int, int | None, int]:
    """Return `num_lanes`, `rank_lanes`, `rank_shards` and `rank_bytes` of an `EpochPlan`.

    `start` is the first position of the epoch in the order, `node_size` the number of ranks per node.
    """
    if steps.world_size == 1:
        used = min(_MAX_POSITIONS, steps.consumed_after(len(steps) - 1))
        is_whole, positions = used < _MAX_POSITIONS, np.arange(used)
    else:
        num = min(len(steps), _MAX_STEPS, max(1, _MAX_POSITIONS // steps.global_batch))
        own = [rank_positions(data.order, start, steps, step, rank=0, ranks_per_node=node_size) for step in range(num)]
        is_whole, positions = num == len(steps), np.concatenate(own)
        positions = positions[positions < steps.num_samples]  # without padding
    shards, _ = data.order.take(positions + start)
    sizes = np.concatenate([table.sample_bytes() for table in data.tables])
    num_samples = steps.consumed_after(len(steps) - 1) / steps.world_size
    rank_bytes = round(float(sizes[shards].sum()) / max(1, len(shards)) * num_samples)
    num_lanes, rank_lanes = _count_lanes(data, positions + start)
    return num_lanes, rank_lanes, len(np.unique(shards)) if is_whole else None, rank_bytes


def _count_lanes(data: PlannedData, positions: Ints) -> tuple[int, int]:
    """Return the number of lanes of the order, and of the lanes that `positions` use: the largest of all parts."""
    parts, depths = data.order.locate(positions)
    orders = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    num_lanes = [getattr(order, "num_lanes", 0) for order in orders]
    used = [len(np.unique(-(-depths[parts == part] * num // DEPTHS))) for part, num in enumerate(num_lanes) if num]
    return max(num_lanes), max(used, default=0)


def _bucket_rows(layout: EpochLayout) -> Iterator[BucketRow]:
    if layout.buckets is None:
        return
    plan, labels = layout.buckets.plan, layout.buckets.labels
    for label, count, size, number in zip(labels, plan.counts, plan.sizes, plan.num_batches, strict=True):
        name = "x".join(map(str, label)) if isinstance(label, tuple) else str(label)
        rest = number * size - count
        yield BucketRow(name, count, size, number, max(0, -rest), max(0, rest))
