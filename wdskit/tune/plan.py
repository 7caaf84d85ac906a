"""`wdskit.plan`: the steps of a run and what its ranks read, from the index alone, without a sample read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wdskit.config.spec import parse_settings
from wdskit.engine.shard_cache import USUAL_OPEN_SHARDS
from wdskit.errors import PipelineError
from wdskit.order.lanes import cuts_of
from wdskit.order.mixture import MixtureOrder
from wdskit.order.steps import Steps
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.settings import CacheSpec, ErrorsSpec, LoaderSpec, choose_workers
from wdskit.stages.sources import PlannedData, PlannedSource, epoch_length
from wdskit.text import as_int, format_bytes
from wdskit.tune.downloads import QUICK, DownloadPlan, plan_downloads
from wdskit.tune.mixing import QualityPlan, draw, measure_quality
from wdskit.tune.reads import Floats, Nodes, read_epoch

_MUCH_SHARED = 1.25


class Spread(NamedTuple):
    """A number that differs from rank to rank."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, values: Floats) -> Spread:
        """Of at least one value."""
        return cls(float(values.min()), float(values.mean()), float(values.max()))


@dataclass(frozen=True)
class PartPlan:
    """One data set of a source.

    Attributes:
        name: Its shards as the configuration names them, with its split and range.
        num_shards: Shards with a selected sample, repeats left out.
        num_samples: Selected samples.
        num_bytes: Their bytes, headers and padding included.
        share_ratio: Its share of the epoch's samples.
        repeats: How often each of its samples comes in an epoch, on average.
    """

    name: str
    num_shards: int
    num_samples: int
    num_bytes: int
    share_ratio: float
    repeats: float


@dataclass(frozen=True)
class LanesPlan:
    """The lanes of an order.

    Attributes:
        num_lanes: L.
        per_node: The most from which a node takes.
        num_shared: How many nodes take from a lane, on average: about so often is the data downloaded.
        fitting: Numbers of lanes near L of which a node has its own.
    """

    num_lanes: int
    per_node: int
    num_shared: float
    fitting: tuple[int, ...]


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a planned source. A shard that a source lists several times counts each time.

    Steps and samples are exact. The shards of a rank are those in the lanes of its node, the most that it can read
    from; for `resampled`, the expected number. Each sample counts with the mean size of its shard.

    Attributes:
        source: "exact", "resampled" or "sequential".
        world_size: Number of ranks, R.
        workers: Worker processes per rank, 0 for none. If they are not set, those of a loader on this machine.
        threads_reason: Why each worker has one thread, if functions of the user are the reason.
        gpus_per_node: Ranks per node, with consecutive numbers: a divisor of R.
        epoch: Number of the epoch.
        num_samples: Samples of the epoch, over all ranks.
        batch: B, samples of a rank's batch; 1 without `batched`.
        global_batch: R x B.
        steps: Batches of each rank.
        num_dropped: Samples at the end of the epoch that are in no step.
        num_padded: Rows of the last step without a sample.
        num_shards: Shards of all parts with a selected sample.
        num_bytes: Bytes of the samples of all parts.
        lanes: The lanes of the order; None for `sequential`.
        rank_shards: Shards that a rank, like all of its node, reads from in the epoch.
        rank_bytes: Bytes of the samples that a rank reads in the epoch.
        open_shards: Most shards that a node reads from at once: those in the windows of its lanes, or for `sequential`
            in its share of a step.
        node_bytes: Bytes of all samples of these windows: what a node must have at once.
        parts: The data set, or those of a mixture.
        warnings: What to change, and how.
        downloads: What nodes download of shards in a store; None if it was not computed.
        quality: How far batches are from a uniform draw; None without `quality`.
    """

    source: str
    world_size: int
    workers: int
    threads_reason: str
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
    lanes: LanesPlan | None
    rank_shards: Spread
    rank_bytes: Spread
    open_shards: int
    node_bytes: int
    parts: tuple[PartPlan, ...]
    warnings: tuple[str, ...]
    downloads: DownloadPlan | None = None
    quality: QualityPlan | None = None


@dataclass(frozen=True)
class StreamPlan:
    """An epoch of a stream.

    Attributes:
        source: "stream".
        world_size: Number of ranks.
        workers: Worker processes per rank, 0 for none.
        num_shards: Shards of the stream.
        resampled: Whether shards are drawn with replacement, so that there is no pass over all.
        rank_shards: Least and most shards that a rank draws in a pass; None if they are resampled.
        worker_shards: The same for one worker.
        batch: Samples of a batch; 1 without `batched`.
        steps: Items of each rank in an epoch; None if it is unknown before the run.
    """

    source: str
    world_size: int
    workers: int
    num_shards: int
    resampled: bool
    rank_shards: tuple[int, int] | None
    worker_shards: tuple[int, int] | None
    batch: int
    steps: int | None


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
    world_size: int = 1,
    workers: int | None = None,
    gpus_per_node: int = 8,
    epoch: int = 0,
    downloads: bool | None = None,
    quality: bool = False,
    classes: int | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> EpochPlan | StreamPlan:
    """Plan an epoch from the index alone.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `make_loader`.
        world_size: Number of ranks, R.
        workers: Worker processes per rank. Default: those of the configuration, or of a loader on this machine.
        gpus_per_node: Most ranks per node; the largest divisor of R up to this number is used.
        epoch: Number of the epoch; epochs differ if weights have a schedule.
        downloads: Whether to compute what each node downloads from a store. Default: only if that takes a few seconds.
        quality: Whether to compare batches with a uniform draw. Needs a planned source.
        classes: Number of classes for `quality`. Default: those of `classes.json`, or 1000.
        plot: File for a picture of the order, `.png` or `.svg`. Needs a planned source.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It cannot run on this number of ranks and workers, or an argument is out of range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
    """
    world_size, gpus_per_node, epoch = as_int(world_size), as_int(gpus_per_node), as_int(epoch)
    workers, classes = as_int(workers), as_int(classes)
    numbers = {"world_size": (world_size, 1), "gpus_per_node": (gpus_per_node, 1), "epoch": (epoch, 0)}
    numbers |= {} if workers is None else {"workers": (workers, 0)}
    numbers |= {} if classes is None else {"classes": (classes, 1)}
    for name, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise PipelineError(f"plan({name}={value!r}): pass a whole number, {least} or more.")
    if classes is not None and not quality:
        raise PipelineError(f"plan(classes={classes}): only `quality` counts classes.\n  Add quality=True (--quality).")
    pipe, _, loader, errors, cache = open_pipeline(config, pipeline, overrides, caller="plan")
    if workers is not None:
        loader = parse_settings(LoaderSpec, loader.model_dump(exclude_unset=True) | {"workers": workers}, where="plan")
    source = pipe.stages[0]
    if not isinstance(source, PlannedSource):
        if quality or plot is not None:
            msg = "the order of a stream comes from its shuffle buffers, so only a run shows it."
            raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`) and plan `exact`.")
        return _plan_stream(pipe, world_size, loader.workers, errors)
    data = source.plan()
    length = epoch_length(pipe.stages, data.num_samples, world_size)
    steps = Steps(length.num_samples, length.batch, world_size, pipe.stages[0].tail)
    start = epoch * steps.num_samples
    node_size = fitting_node(gpus_per_node, world_size)
    lanes = _plan_lanes(data, steps, node_size)
    if plot is not None:
        title = f"{source.name}: {steps.num_samples:,} samples on {world_size} ranks, batches of {steps.batch}"
        if lanes is not None:
            title += f", {lanes.num_lanes} lanes, windows of {getattr(source, 'window', 0):,}"
        draw(data, steps, start, path=plot, title=title)
    run = choose_workers(loader, pipe.stages, {"LOCAL_WORLD_SIZE": str(node_size)})
    reads, of_parts = read_epoch(data, steps, start, node_size)
    parts = tuple(_plan_parts(source, data, of_parts))
    open_shards = math.ceil(reads.open_shards)
    fetched = None
    is_remote = any(table.is_remote for table in data.tables)
    if is_remote and (steps.num_samples <= QUICK if downloads is None else downloads):
        fetched = plan_downloads(source, data, steps, epoch, node_size)
    return EpochPlan(
        source=source.name,
        world_size=world_size,
        workers=run.workers,
        threads_reason=run.reason,
        gpus_per_node=node_size,
        epoch=epoch,
        num_samples=steps.num_samples,
        batch=steps.batch,
        global_batch=steps.global_batch,
        steps=len(steps),
        num_dropped=steps.num_dropped,
        num_padded=steps.num_padded,
        num_shards=sum(part.num_shards * data.parts.count(number) for number, part in enumerate(parts)),
        num_bytes=sum(part.num_bytes for part in parts),
        lanes=lanes,
        rank_shards=Spread.of(reads.shards),
        rank_bytes=Spread.of(reads.num_bytes / node_size),
        open_shards=open_shards,
        node_bytes=round(reads.live_bytes),
        parts=parts,
        warnings=tuple(_warnings(lanes, open_shards, steps, fetched, cache)),
        downloads=fetched,
        quality=measure_quality(data, steps, start, classes, node_size=node_size) if quality else None,
    )


def fitting_node(gpus_per_node: int, world_size: int) -> int:
    """Ranks of a node: the largest number that divides all ranks and is no more than `gpus_per_node`."""
    return max(each for each in range(1, gpus_per_node + 1) if world_size % each == 0)


def _plan_lanes(data: PlannedData, steps: Steps, node_size: int) -> LanesPlan | None:
    orders = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    num_lanes = max(getattr(order, "num_lanes", 0) for order in orders)
    if not num_lanes:
        return None
    nodes = Nodes(steps.world_size // node_size, steps.global_batch, is_dealt=steps.tail == "drop")
    is_taken = nodes.shares(cuts_of(num_lanes)) > 0
    fitting = fitting_lanes(num_lanes, nodes)
    return LanesPlan(num_lanes, int(is_taken.sum(axis=1).max()), float(is_taken.sum() / num_lanes), fitting)


def fitting_lanes(num_lanes: int, nodes: Nodes) -> tuple[int, ...]:
    """The numbers of lanes nearest to `num_lanes`, below and above, of which each node has its own: multiples of the
    nodes that divide what a step takes.
    """
    step = nodes.num
    below = range(num_lanes - num_lanes % step, 0, -step)
    above = range(-(-num_lanes // step) * step, 4 * num_lanes + step, step)
    fits = [[each for each in near if nodes.batch % each == 0][:1] for near in (below, above)]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(fits)))


def _plan_parts(source: PlannedSource, data: PlannedData, samples: Sequence[int]) -> Iterator[PartPlan]:
    for number, (spec, num) in enumerate(zip(source.parts, samples, strict=True)):
        table = data.tables[data.parts.index(number)]
        name = spec.shards if isinstance(spec.shards, str) else "::".join(spec.shards)
        name += f" split {spec.split}" if spec.split is not None else ""
        name += f" range {spec.range[0]} to {spec.range[1]}" if spec.range is not None else ""
        num_samples, num_bytes = int(table.counts.sum()), round(float(table.counts @ table.sample_bytes()))
        num_shards = int(np.count_nonzero(table.counts))
        yield PartPlan(name, num_shards, num_samples, num_bytes, num / sum(samples), num / num_samples)


def _warnings(
    lanes: LanesPlan | None, open_shards: int, steps: Steps, fetched: DownloadPlan | None, cache: CacheSpec
) -> Iterator[str]:
    if lanes is not None and lanes.num_shared > _MUCH_SHARED:
        near = " or ".join(map(str, lanes.fitting))
        yield (
            f"a lane is read by {lanes.num_shared:.1f} nodes on average, which read the same shards.\n"
            f"  Before a run begins, set `lanes: {near or 'a multiple of the number of nodes'}`. A "
            "different number gives a different order."
        )
    num_bytes = cache.size
    if fetched is not None and num_bytes is not None and fetched.live_bytes > num_bytes:
        size, live = format_bytes(num_bytes), format_bytes(fetched.live_bytes)
        part = num_bytes / fetched.live_bytes
        yield (
            f"a node needs {live} at once, but `cache.size` is {size}: what it drops is downloaded again.\n"
            f"  Set `cache.size: {live}`, or a `window` or `lanes` of {part:.0%} of its value. That "
            "gives a different order."
        )
    if open_shards > USUAL_OPEN_SHARDS:
        yield (
            f"a rank reads from {open_shards:,} shards at a time, and a process keeps {USUAL_OPEN_SHARDS} open where "
            "`ulimit -n` is 1024: the others are reopened again and again.\n"
            "  Raise that limit, or use larger shards, fewer lanes or a smaller window."
        )
    if dropped := steps.describe_dropped():
        yield dropped


def _plan_stream(pipe: Pipeline, world_size: int, workers: int, errors: ErrorsSpec) -> StreamPlan:
    """Plan a source that is no planned one: it is built as for a run, but without the user's functions."""
    from wdskit.engine.stream import (  # these import torch, a planned source needs none
        StreamPipeline,
        check_splits,
        splitters_of,
    )

    built = pipe.build(rank=0, world_size=world_size, max_workers=workers, transforms=_AnyFunction(), errors=errors)
    assert isinstance(built, StreamPipeline)
    draws = built.layout.draws
    if draws is None:
        raise PipelineError("the source is not wdskit's, so nothing is known about it before a run.")
    check_splits(built.pipeline, built.layout, world_size, max(1, workers))
    by_node, by_worker = splitters_of(built.pipeline)
    num_ranks = world_size if by_node else 1
    num_readers = num_ranks * (max(1, workers) if by_worker else 1)
    of_rank, of_worker = ((draws.num_shards // num, -(-draws.num_shards // num)) for num in (num_ranks, num_readers))
    return StreamPlan(
        source="stream",
        world_size=world_size,
        workers=workers,
        num_shards=draws.num_shards,
        resampled=draws.resampled,
        rank_shards=None if draws.resampled else of_rank,
        worker_shards=None if draws.resampled else of_worker,
        batch=built.layout.batch,
        steps=built.num_items(workers),
    )


class _AnyFunction(dict[str, Callable[..., Any]]):
    """Has a function of every name: which ones there are does not matter to a plan."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda value, **kwargs: value  # noqa: ARG005 (the settings of a stage, whatever they are)
