"""What a stream must know of its own stages, and whether ranks and workers share its shards as they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wdskit.errors import PipelineError
from wdskit.order.draws import Draws
from wdskit.stages.foreign import splits_nodes, splits_workers


@dataclass(frozen=True)
class Layout:
    """What a running pipeline must know of its own list, positions being those of `DataPipeline.pipeline`.

    Attributes:
        draws: The order of the shards; None where the source is not ours.
        cut: Position of with_epoch, None without.
        tars: Position of the stage that opens the shards, None where it is not ours.
        split_none: Whether a missing splitter was asked for.
        count: Number of items that an epoch of a worker yields, as a function of (worker, workers); None where unknown.
        length: What with_length says.
        stateless: Why the part before with_epoch cannot be rebuilt in another process, "" where it can.
        unsaved: The same of the whole pipeline, in the middle of an epoch.
        batch: Samples of an item.
        fingerprint: What the order of samples follows from, as plain JSON, for the state.
    """

    draws: Draws | None
    cut: int | None
    tars: int | None
    split_none: bool
    count: Callable[[int, int], int] | None = field(repr=False)
    length: int | None
    stateless: str
    unsaved: str
    batch: int
    fingerprint: dict[str, Any]


def check_splits(stages: list[Any], layout: Layout, world_size: int, num_workers: int) -> None:
    """Refuse a stream that ranks or workers would read twice, or that has too few shards.

    Raises:
        PipelineError: Says which splitter is missing, or the numbers.
    """
    if layout.draws is None:
        return
    by_node, by_worker = splitters_of(stages)
    if not layout.split_none:
        if world_size > 1 and not by_node:
            raise PipelineError(_no_splitter("split_by_node", f"{world_size} ranks"))
        if num_workers > 1 and not by_worker:
            raise PipelineError(_no_splitter("split_by_worker", f"{num_workers} workers"))
    if layout.cut is not None:
        return
    if world_size > 1 and not layout.split_none:
        msg = f"a stream over {world_size} ranks ends at another step on each, and DDP hangs."
        raise PipelineError(
            f"{msg}\n  Add with_epoch: n, which counts per rank and goes on where the last epoch ended."
        )
    num_readers = (world_size if by_node else 1) * (num_workers if by_worker else 1)
    if layout.draws.num_shards < num_readers and not layout.draws.resampled:
        msg = f"{layout.draws.num_shards} shards cannot feed {world_size} ranks x {num_workers} workers one shard each."
        raise PipelineError(f"{msg}\n  Use fewer workers, more shards (`wdskit pack --max-samples`), or with_epoch.")


def splitters_of(stages: list[Any]) -> tuple[bool, bool]:
    """Whether the stages split the shards by node, and by worker."""
    return any(map(splits_nodes, stages)), any(map(splits_workers, stages))


def _no_splitter(name: str, who: str) -> str:
    msg = f"{who} would each read every shard: {name} is missing."
    return f"{msg}\n  Add it behind stream, or say `split: none` if that is meant."
