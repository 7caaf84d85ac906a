"""The data of a planned source and the length of its epochs: all that is known before anything runs, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdskit.dataset.classes import check_labels
from wdskit.dataset.index import folder_has_labels
from wdskit.dataset.table import ShardTable
from wdskit.errors import PipelineError
from wdskit.order.base import Order
from wdskit.order.exact import ExactOrder
from wdskit.order.keys import philox
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.sequential import SequentialOrder
from wdskit.stages.source_specs import PartSpec, PlannedSpec, bound_of

ORDER_VERSION = 1
"""Part of each state: raised when the same settings give another sequence of samples."""


@dataclass(frozen=True)
class PlannedData:
    """The data of a planned source, without a sample read.

    Attributes:
        tables: The shards of each part, as often as it is repeated.
        parts: For each of `tables`, the number of its part.
        order: Which sample stands where.
        num_samples: Of a pass over all; None for a mixture by weights, which has none.
        fingerprint: What the order follows from, as plain JSON.
    """

    tables: tuple[ShardTable, ...]
    parts: tuple[int, ...]
    order: Order
    num_samples: int | None
    fingerprint: dict[str, Any]


def plan_data(source: PlannedSpec) -> PlannedData:
    """Find a source's shards and put their samples in order.

    Raises:
        StorageError, FolderIndexError: The shards cannot be listed, or have no index; or their labels mean different
            classes.
    """
    parts = source.mixture or (PartSpec(shards=source.shards or "", split=source.split, range=source.range),)
    tables = [_table(part) for part in parts]
    if source.classes == "same":
        check_labels((folder for table in tables for folder in table.folders), folder_has_labels)
    numbers = [number for number, part in enumerate(parts) for _ in range(part.repeat or 1)]
    told = source.model_dump(exclude={"shards", "mixture", "split", "range", "classes"})
    fingerprint = {
        "source": source.name,
        "order_version": ORDER_VERSION,
        **(told if source.is_weighted else {name: value for name, value in told.items() if name != "schedule"}),
        "parts": [_fingerprint(part, table) for part, table in zip(parts, tables, strict=True)],
    }
    if source.is_weighted:
        seeds = [_part_seed(source.seed, number) for number in range(len(parts))] if len(parts) > 1 else [source.seed]
        orders = [_order(source, [table], seed) for table, seed in zip(tables, seeds, strict=True)]
        weights = [1.0 if part.weight is None else part.weight for part in parts]
        order: Order = MixtureOrder(orders, [len(table) for table in tables], weights, change=source.schedule)
        return PlannedData(tuple(tables), tuple(numbers), order, None, fingerprint)
    repeated = [tables[number] for number in numbers]
    total = sum(int(table.counts.sum()) for table in repeated)
    return PlannedData(tuple(repeated), tuple(numbers), _order(source, repeated, source.seed), total, fingerprint)


def _table(part: PartSpec) -> ShardTable:
    bounds = part.range and (bound_of(part.range[0]), bound_of(part.range[1]))
    return ShardTable(part.shards, split=part.split, bounds=bounds)


def _fingerprint(part: PartSpec, table: ShardTable) -> dict[str, Any]:
    weight: Any = part.weight
    if isinstance(weight, Mapping):
        weight = {str(at): value for at, value in weight.items()}  # keys as JSON gives them back
    told = {"weight": weight, "repeat": part.repeat}
    return {
        "digest": table.digest(),
        "content": table.content(),
        **{name: value for name, value in told.items() if value is not None},
    }


def _part_seed(seed: int, number: int) -> int:
    """Parts of one list of shards must not be in one order."""
    return int(philox("mixture-part", seed, number).random_raw())


def _order(source: Any, tables: Sequence[ShardTable], seed: int) -> Any:
    counts = np.concatenate([table.counts for table in tables])
    match source.name:
        case "exact":
            return ExactOrder(counts, seed=seed, lanes=source.lanes, window=source.window)
        case "resampled":
            return ResampledOrder(counts, seed=seed, chunk=source.chunk, lanes=source.lanes, window=source.window)
        case _:
            return SequentialOrder(counts)


@dataclass(frozen=True)
class EpochLength:
    """How long an epoch is.

    Attributes:
        num_samples: Positions of an epoch, over all ranks.
        batch: Samples of a rank's batch; 1 without `batched`.
        with_epoch: What `with_epoch` says, None without.
    """

    num_samples: int
    batch: int
    with_epoch: int | None


def epoch_length(specs: Sequence[Any], num_samples: int | None, world_size: int) -> EpochLength:
    """The length of an epoch on so many ranks.

    Args:
        specs: One planned source, then stages, as `rules.check_order` accepts them.
        num_samples: Of a pass over all; None for a mixture by weights.
        world_size: Number of ranks.

    Raises:
        PipelineError: The epoch, or the global batch, does not come out even.
    """
    names = [spec.name for spec in specs]
    batch = specs[names.index("batched")].size_on(world_size) if "batched" in names else 1
    n = None
    if "with_epoch" in names:
        n = specs[names.index("with_epoch")].n
        counts_batches = "batched" in names[: names.index("with_epoch")]
        if not counts_batches and n % batch:
            near = [each for each in (n - n % batch, n - n % batch + batch) if each]
            msg = f"with_epoch: {n} samples of a rank are no whole number of batches of {batch}."
            near_ones = " and ".join(map(str, near))
            raise PipelineError(f"{msg}\n  {near_ones} are; or count batches, with `with_epoch` behind `batched`.")
        num_samples = n * world_size * (batch if counts_batches else 1)
    assert num_samples is not None  # rules: a mixture by weights has with_epoch
    whole = batch * world_size
    if specs[0].tail == "drop" and num_samples < whole:
        msg = f"{num_samples} samples cannot fill one batch of {batch} on each of {world_size} ranks, which "
        msg += f"takes {whole}, and `tail: drop` drops what does not."
        raise PipelineError(f"{msg}\n  Use `tail: pad`, smaller batches or fewer ranks.")
    return EpochLength(num_samples, batch, n)
