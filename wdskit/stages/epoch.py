"""The epochs of a pipeline with a planned source: the data, their order and the steps. No sample is read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.shard_table import ShardTable
from wdskit.dataset.subset import Subset
from wdskit.errors import PipelineError, SelectionError
from wdskit.order.base import Lanes, Tail
from wdskit.order.buckets import BucketOrder, BucketPlan, Buckets, BucketSteps
from wdskit.order.steps import AnySteps, Steps
from wdskit.order.subset import PickedOrder
from wdskit.stages.buckets import Bucketed
from wdskit.stages.sources import Exact, PlannedData, Resampled

_CHUNK = 1 << 20


@dataclass(frozen=True)
class EpochLayout:
    """The length of an epoch of a planned pipeline, and its steps. A position is the place of a sample in the order.

    Attributes:
        tail: What happens to positions at the end that do not fill a global batch: "drop", or "pad" to a whole batch.
        batch: Number of samples in one rank's batch; with `bucketed`, in the largest batch. 1 if the pipeline has
            neither `batched` nor `bucketed`.
        num_samples: Number of positions in an epoch, over all ranks.
        fingerprint: The settings that decide the order, as plain JSON, for the loader's state.
        buckets: The buckets of the stage `bucketed`; None without this stage.
    """

    tail: Tail
    batch: int
    num_samples: int
    fingerprint: dict[str, Any]
    buckets: Buckets | None = None

    def steps(self, world_size: int, *, start: int = 0, consumed: int = 0, num_samples: int | None = None) -> AnySteps:
        """Return the steps of an epoch that are not consumed yet.

        Args:
            world_size: Number of ranks. With `bucketed`, each size of a global batch is a multiple of it.
            start: The epoch's first position in the endless sequence of all epochs. Has an effect only with `bucketed`.
            consumed: Number of the epoch's positions that have been consumed already, over all ranks. 0 gives
                all steps of the epoch. With `bucketed`, this number is a result of `resume_point`.
            num_samples: Number of all positions in this epoch; None for `self.num_samples`. Has no effect with
                `bucketed`.
        """
        if self.buckets is not None:
            return BucketSteps(self.buckets.plan, start // self.num_samples, world_size, consumed)
        total = self.num_samples if num_samples is None else num_samples
        return Steps(total, self.batch, world_size, self.tail, consumed)

    def resume_point(self, epoch: int, consumed: int) -> int:
        """Return the largest number of consumed positions, at most `consumed`, after which the epoch with the number
        `epoch` can be resumed. The number is at most the number of positions in the epoch.

        With `bucketed`, an epoch can be resumed only between two steps. Without it, `epoch` has no effect.
        """
        if self.buckets is None:
            return min(consumed, self.num_samples)
        edges = self.buckets.plan.epoch(epoch).edges
        return int(edges[np.searchsorted(edges, consumed, side="right") - 1])


def plan_epoch(stages: Sequence[Any], world_size: int) -> tuple[PlannedData, EpochLayout]:
    """Return the data of a pipeline and the layout of its epochs.

    Args:
        stages: One planned source, then other stages, in an order that `config.order.check_order` accepts.
        world_size: Number of ranks.

    Raises:
        PipelineError: The epoch is not a whole number of batches or has no full batch, a global batch is not a multiple
            of `world_size`, the weights of all parts of a mixture are 0 at a position, or `bucketed` is used with
            `with_epoch` or with weights.
        StorageError: The shards cannot be listed, or a `classes.json` cannot be read.
        FolderIndexError: A folder has no valid index, no sample is selected, or the labels of two folders mean
            different classes.
        SelectionError: A split, condition or column is missing or invalid, or a sample fits in no bucket.
    """
    source: Any = stages[0]
    bucketed = next((stage for stage in stages if isinstance(stage, Bucketed)), None)
    if bucketed is None:
        data = source.plan()
        layout = _lay_out(stages, data, world_size)
        num_samples, least = layout.num_samples, layout.batch * world_size
    else:
        _check_bucketed(stages)
        batch = bucketed.size_on(world_size)
        data, buckets = _divide(source, source.plan(has_columns=True), bucketed)
        layout = EpochLayout(source.tail, batch, buckets.plan.num_samples, data.fingerprint, buckets)
        num_samples, least = sum(buckets.plan.counts), min(buckets.plan.sizes)
    if source.tail == "drop" and layout.num_samples < least:
        msg = f"{num_samples} samples cannot fill one batch of {least // world_size} on each of {world_size} ranks, "
        msg += f"which takes {least}, and `tail: drop` drops an incomplete batch."
        raise PipelineError(f"{msg}\n  Use `tail: pad`, smaller batches or fewer ranks.")
    return data, layout


def _check_bucketed(stages: Sequence[Any]) -> None:
    """Raise PipelineError if an epoch of a pipeline with `bucketed` is not one pass over the data."""
    source = stages[0]
    if any(stage.name == "with_epoch" for stage in stages):
        msg = "with_epoch: an epoch of `bucketed` is one pass over the data, whose batches differ in size."
        raise PipelineError(f"{msg}\n  Leave `with_epoch` out.")
    if source.is_weighted or (isinstance(source, Resampled) and source.reads_columns):
        msg = "bucketed: samples that are drawn by weights have no epoch that could be divided into buckets."
        raise PipelineError(f"{msg}\n  Use `exact`, with `repeat` for samples that should come more often.")


def _lay_out(stages: Sequence[Any], data: PlannedData, world_size: int) -> EpochLayout:
    """Return the layout of the epochs of a pipeline without `bucketed`. `stages` and `world_size` are those of
    `plan_epoch`. `data` is the result of the source's `plan`.

    Raises:
        PipelineError: The samples of `with_epoch` are not a whole number of batches, or the global batch is not a
            multiple of `world_size`.
    """
    source, num_samples = stages[0], data.num_samples
    names = [stage.name for stage in stages]
    batch = stages[names.index("batched")].size_on(world_size) if "batched" in names else 1
    n = None
    if "with_epoch" in names:
        n = stages[names.index("with_epoch")].n
        counts_batches = "batched" in names[: names.index("with_epoch")]
        if not counts_batches and n % batch:
            msg = f"with_epoch: {n} samples per rank are not a whole number of batches of {batch}."
            raise PipelineError(f"{msg}\n  Write a multiple; or count batches, with `with_epoch` after `batched`.")
        num_samples = n * world_size * (batch if counts_batches else 1)
    assert num_samples is not None  # check_order: a mixture by weights has with_epoch
    # `with_epoch` is always present: torch.distributed.checkpoint loads only keys that the loader's own state has.
    return EpochLayout(source.tail, batch, num_samples, {**data.fingerprint, "with_epoch": n})


def _divide(source: Any, data: PlannedData, bucketed: Bucketed) -> tuple[PlannedData, Buckets]:
    """Divide the samples into buckets. Return a copy of `data` with the order of the buckets' batches, and the buckets
    that have samples; buckets without samples are left out. `data` is the result of `source.plan`, with the columns.
    SelectionError: A sample fits in no bucket, or a column is missing, damaged or text.
    """
    bucket_numbers = np.concatenate([_assign(bucketed, table) for table in data.tables])
    counts = np.concatenate([table.counts for table in data.tables])
    times = source.times(data.tables[0]) if isinstance(source, Exact) and source.repeat else None
    orders: list[PickedOrder] = []
    digest = hashlib.sha256()
    num_lanes = Lanes.default_number(len(bucket_numbers))
    kept = []
    for bucket in range(len(bucketed.labels)):
        mask = bucket_numbers == bucket
        layers = [mask] if times is None else [mask & (times > layer) for layer in range(int(times.max(initial=0)))]
        subsets = [Subset(counts, layer) for layer in layers if layer.any()]
        if not subsets:
            continue
        bucket_counts = np.concatenate([subset.counts for subset in subsets])
        lanes = min(num_lanes, int(bucket_counts.sum()))  # one number for all, so that all buckets read the same shards
        orders.append(PickedOrder(source.order_of(bucket_counts, source.seed, lanes=lanes), subsets))
        for subset in subsets:
            digest.update(subset.digest())
        kept.append(bucket)
    labels, sizes = (tuple(each[bucket] for bucket in kept) for each in (bucketed.labels, bucketed.sizes))
    plan = BucketPlan(tuple(order.num_samples for order in orders), sizes, source.tail, source.seed)
    plain = [list(label) if isinstance(label, tuple) else label for label in labels]
    settings = {"by": bucketed.by, "labels": plain, "sizes": list(sizes)}
    fingerprint = {**data.fingerprint, "buckets": {**settings, "digest": digest.hexdigest()}, "with_epoch": None}
    fingerprint.pop("columns", None)
    order = BucketOrder(plan, orders)
    return replace(data, order=order, num_samples=plan.num_samples, fingerprint=fingerprint), Buckets(plan, labels)


def _assign(bucketed: Bucketed, table: ShardTable) -> NDArray[np.uint8]:
    """Return the bucket of each used sample of a table, uint8 (num_used,). SelectionError: A sample fits in no bucket,
    or a column is missing, damaged or text.
    """
    views, columns = zip(*(table.column(name) for name in bucketed.columns), strict=True)
    for column in itertools.chain(*columns):
        if column.values is not None:
            raise column.unfit("`bucketed` needs numbers, and its values are text")
    used, parts = table.used(), [np.zeros(0, np.uint8)]
    for first in range(0, len(used), _CHUNK):
        numbers = first + np.flatnonzero(used[first : first + _CHUNK])
        try:
            parts.append(bucketed.assign([view.take(numbers) for view in views]).astype(np.uint8))
        except ValueError as err:
            problem, at = err.args
            msg = f"{table.folders[0]}: bucketed: sample {numbers[at]} (counted over all shards from 0): {problem}."
            raise SelectionError(msg, folder=table.folders[0]) from err
    return np.concatenate(parts)
