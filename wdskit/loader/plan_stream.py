"""The plan of an epoch of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wdskit.errors import PipelineError
from wdskit.loader.plan_types import StreamPlan
from wdskit.pipeline.builder import Pipeline
from wdskit.pipeline.loader_specs import ErrorsSpec


def plan_stream(pipe: Pipeline, world_size: int, workers: int, errors: ErrorsSpec) -> StreamPlan:
    """Plan an epoch of a pipeline whose source is no planned one: built as for a run, but for the user's functions.

    Raises:
        PipelineError: It cannot run on so many ranks and workers.
    """
    from wdskit.pipeline.splits import check_splits, splitters_of
    from wdskit.pipeline.streaming import StreamPipeline

    built = pipe.build(rank=0, world_size=world_size, max_workers=workers, transforms=_AnyFunction(), errors=errors)
    assert isinstance(built, StreamPipeline)
    draws = built.layout.draws
    if draws is None:
        raise PipelineError("the source is not wdskit's, so nothing is known of it before it runs.")
    check_splits(built.pipeline, built.layout, world_size, max(1, workers))
    by_node, by_worker = splitters_of(built.pipeline)
    num_ranks = world_size if by_node else 1
    num_readers = num_ranks * (max(1, workers) if by_worker else 1)
    return StreamPlan(
        source="stream",
        world_size=world_size,
        workers=workers,
        num_shards=draws.num_shards,
        resampled=draws.resampled,
        rank_shards=None if draws.resampled else _dealt(draws.num_shards, num_ranks),
        worker_shards=None if draws.resampled else _dealt(draws.num_shards, num_readers),
        batch=built.layout.batch,
        steps=built.num_items(workers),
        warnings=(),
    )


def _dealt(num_shards: int, num_readers: int) -> tuple[int, int]:
    """Least and most shards of a reader."""
    return num_shards // num_readers, -(-num_shards // num_readers)


class _AnyFunction(dict[str, Callable[..., Any]]):
    """Has a function of every name: which ones there are is no matter of a plan."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., Any]:
        return _itself


def _itself(value: Any) -> Any:
    return value
