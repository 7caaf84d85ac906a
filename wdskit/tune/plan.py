"""`wdskit.plan`: compute the steps of a run and the downloads of its nodes, from the index, without reading samples."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.config.types import parse_settings
from wdskit.dataset.remote import open_remote_shards, part_edges
from wdskit.dataset.shard_table import ShardTable
from wdskit.errors import PipelineError
from wdskit.limits import BLOCK_BYTES
from wdskit.order.base import Ints
from wdskit.order.lanes import lane_cuts
from wdskit.order.mixture import MixtureOrder
from wdskit.order.steps import AnySteps, find_nodes
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.settings import (
    CacheSpec,
    ErrorsSpec,
    LoaderSpec,
    choose_workers,
    describe_small_cache,
    measure_cache,
)
from wdskit.stages.base import RankInfo
from wdskit.stages.epoch import EpochLayout, plan_epoch
from wdskit.stages.sources import PlannedData, PlannedSource
from wdskit.text import as_int, format_at_least, format_bytes

QUICK_SAMPLES = 1 << 22
"""Largest epoch, in samples, for which downloads are computed by default; this takes a few seconds."""
MAX_OFFSETS = 4096
"""Limit for the shards whose offsets are read for exact downloads. With more shards, mean sample sizes are used."""
_SHARDS_AT_ONCE = 64  # shards whose offsets are requested at once
_CHANNELS = {"l": 1, "index": 1, "rgba": 4}  # image spec without prefix and 8 -> channels; other specs have 3
_MUCH_SHARED = 1.25
_MAX_POSITIONS = 1 << 21  # limit for the positions that are checked to find the lanes of each node


@dataclass(frozen=True)
class LanesPlan:
    """The lanes of an order. Each lane reads one of L consecutive pieces of the data.

    Attributes:
        num_lanes: Number of lanes, L.
        per_node: Number of lanes from which a node takes samples; the largest number of all nodes.
        num_shared: Number of nodes that take samples from one lane, on average.
        fitting: Numbers of lanes with which no two nodes share a lane: L, or at most two near L; may be empty.
    """

    num_lanes: int
    per_node: int
    num_shared: float
    fitting: tuple[int, ...]


@dataclass(frozen=True)
class DownloadPlan:
    """What a node fetches into its cache, in parts of about 8 MB. The cache is large enough to fetch no part twice.

    Nodes differ; each number of bytes is the largest of all nodes.

    Attributes:
        is_exact: Whether the sizes of parts are exact. If False, the mean sample size of each shard is used.
        node_bytes: Bytes that a node fetches in the epoch.
        next_bytes: Bytes that a node fetches in the next epoch if it keeps the parts of this epoch.
        cache_bytes: Smallest size of a node's cache that a loader accepts and that fetches no part twice.
    """

    is_exact: bool
    node_bytes: int
    next_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class NetworkPlan:
    """Bytes that a rank receives per sample if its workers run on other machines: the pixels of one image.

    Attributes:
        uint8_bytes: For uint8 images.
        float32_bytes: For float32 images, which `normalize` makes.
    """

    uint8_bytes: int
    float32_bytes: int


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
        lanes: The lanes of the order; None for an order without lanes.
        buckets: The buckets of `bucketed`; empty without `bucketed`.
        downloads: What nodes download from a store; None if it was not computed.
        network: What a rank receives from workers on a cluster (`loader.on`); None if the workers are on this machine,
            or if the stages do not determine the size of the images.
        warnings: Messages with a problem and what to change.
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
    lanes: LanesPlan | None
    buckets: tuple[BucketRow, ...]
    downloads: DownloadPlan | None
    network: NetworkPlan | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class StreamPlan:
    """An epoch of a stream.

    Attributes:
        source: "stream".
        world_size: Number of ranks.
        workers: Worker processes per rank; 0 if there are no workers.
        num_shards: Number of shards of the stream.
        batch: Size of a rank's batch; 1 without `batched`.
        steps: Number of items of each rank in an epoch; None if it is unknown before the run.
    """

    source: str
    world_size: int
    workers: int
    num_shards: int
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
) -> EpochPlan | StreamPlan:
    """Plan an epoch from the index, without reading samples.

    Args:
        config: The path of a YAML file, its content as a dict, or a `Pipeline`.
        pipeline: Name of the pipeline; needed only if the configuration has several.
        overrides: Settings to change, each as `a.b.c=VALUE`, as for `make_loader`.
        world_size: Number of ranks, R.
        workers: Worker processes per rank. Default: the number of the configuration, or of a loader on this machine.
        gpus_per_node: Limit for the ranks per node. The largest divisor of R up to this number is used.
        epoch: Number of the epoch.
        downloads: Whether to compute what each node downloads from a store. Default: only if it takes at most a few
            seconds.

    Returns:
        An `EpochPlan` for a planned source, a `StreamPlan` for a stream.

    Raises:
        ConfigError: The configuration has problems; the first 100 are listed.
        PipelineError: The pipeline cannot run on this number of ranks and workers, its source is not one of wdskit's,
            or an argument is out of range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or do not have an index or column.
    """
    world_size, gpus_per_node, epoch, workers = map(as_int, (world_size, gpus_per_node, epoch, workers))
    numbers = {"world_size": (world_size, 1), "gpus_per_node": (gpus_per_node, 1), "epoch": (epoch, 0)}
    numbers |= {} if workers is None else {"workers": (workers, 0)}
    for name, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise PipelineError(f"plan({name}={value!r}): pass a whole number, {least} or more.")
    pipe, _, loader, errors, cache = open_pipeline(config, pipeline, overrides, caller="plan")
    if workers is not None:
        loader = parse_settings(LoaderSpec, loader.model_dump(exclude_unset=True) | {"workers": workers}, where="plan")
    source = pipe.stages[0]
    if not isinstance(source, PlannedSource):
        return _plan_stream(pipe, world_size, loader.workers, errors)
    data, layout = plan_epoch(pipe.stages, world_size)
    steps = layout.steps(world_size, start=epoch * layout.num_samples)
    node_size = choose_ranks_per_node(gpus_per_node, world_size)
    rank_info = RankInfo(0, world_size, node_size)
    own_tables = [data.tables[data.parts.index(number)] for number in range(len(source.parts))]
    lanes = _plan_lanes(data, steps, world_size // node_size)
    fetched = None
    is_remote = any(table.is_remote for table in data.tables)
    if is_remote and (steps.num_samples <= QUICK_SAMPLES if downloads is None else downloads):
        fetched = _plan_downloads(data, own_tables, layout, world_size, epoch, node_size)
        needed = math.ceil(measure_cache(data, rank_info)[0])
        fetched = replace(fetched, cache_bytes=max(fetched.cache_bytes, needed))
    return EpochPlan(
        source=source.name,
        world_size=world_size,
        workers=choose_workers(loader, pipe.stages, {"LOCAL_WORLD_SIZE": str(node_size)}).workers,
        gpus_per_node=node_size,
        epoch=epoch,
        num_samples=steps.num_samples,
        batch=steps.batch,
        global_batch=steps.global_batch,
        steps=len(steps),
        num_dropped=steps.num_dropped,
        num_padded=steps.num_padded,
        num_shards=sum(int(np.count_nonzero(table.counts)) for table in data.tables),
        num_bytes=sum(round(float(table.counts @ table.sample_bytes())) for table in own_tables),
        lanes=lanes,
        buckets=tuple(_bucket_rows(layout)),
        downloads=fetched,
        network=None if loader.on is None else _plan_network(pipe.stages),
        warnings=tuple(_warnings(data, rank_info, lanes, steps, fetched, cache)),
    )


def _plan_network(stages: Sequence[Any]) -> NetworkPlan | None:
    """Return the bytes of one image after all `stages`; None if the stages do not give all images one size."""
    size: object = None
    channels = 3
    for stage in stages:
        name = getattr(stage, "name", "")
        if name in {"center_crop", "random_resized_crop"}:
            size = stage.size if isinstance(stage.size, tuple) else (stage.size, stage.size)
        elif name in {"resize", "resize_to_bucket", "torchvision"}:
            size = getattr(stage, "size", None)
        elif name == "decode" and stage.images is not None:
            channels = _CHANNELS.get(stage.images.removeprefix("torch").removeprefix("pil").removesuffix("8"), 3)
    if not isinstance(size, tuple):  # images have different sizes
        return None
    num_values = size[0] * size[1] * channels
    return NetworkPlan(num_values, 4 * num_values)


def _bucket_rows(layout: EpochLayout) -> Iterator[BucketRow]:
    if layout.buckets is None:
        return
    plan = layout.buckets.plan
    for label, count, size, number in zip(
        layout.buckets.labels, plan.counts, plan.sizes, plan.num_batches, strict=True
    ):
        name = "x".join(map(str, label)) if isinstance(label, tuple) else str(label)
        rest = number * size - count
        yield BucketRow(name, count, size, number, max(0, -rest), max(0, rest))


def choose_ranks_per_node(gpus_per_node: int, world_size: int) -> int:
    """Return the ranks of a node: the largest divisor of `world_size` that is at most `gpus_per_node`."""
    return max(each for each in range(1, min(gpus_per_node, world_size) + 1) if world_size % each == 0)


def _plan_lanes(data: PlannedData, steps: AnySteps, num_nodes: int) -> LanesPlan | None:
    orders = data.order.parts if isinstance(data.order, MixtureOrder) else (data.order,)
    num_lanes = max(getattr(order, "num_lanes", 0) for order in orders)
    if not num_lanes:
        return None
    is_taken = lanes_of_nodes(num_lanes, num_nodes, steps.global_batch, is_dealt=steps.tail == "drop")
    fitting = fitting_lanes(num_lanes, num_nodes, steps.global_batch)
    return LanesPlan(num_lanes, int(is_taken.sum(axis=1).max()), float(is_taken.sum() / num_lanes), fitting)


def lanes_of_nodes(num_lanes: int, num_nodes: int, batch: int, *, is_dealt: bool = True) -> NDArray[np.bool_]:
    """Return for each node and each piece of the data whether the node takes samples from the piece.

    The data has `num_lanes` consecutive pieces; each lane reads one of the pieces. Only the first 2 million positions
    are examined.

    Args:
        num_lanes: Number of lanes.
        num_nodes: Number of nodes.
        batch: Number of positions of a step, on all ranks.
        is_dealt: Whether the positions of a step are sorted by their depth in the data before the nodes take them
            (`tail: drop`).

    Returns:
        Bool (num_nodes, num_lanes), with the pieces in the order of the data.
    """
    if num_nodes == 1:
        return np.ones((1, num_lanes), dtype=np.bool_)
    period = num_lanes // math.gcd(batch, num_lanes)  # the lanes of steps repeat after this number of steps
    num_steps = min(period, -(-_MAX_POSITIONS // batch))
    cuts = lane_cuts(num_lanes)[np.arange(num_steps * batch).reshape(num_steps, batch) % num_lanes]
    if is_dealt:
        cuts.sort(axis=1)
    is_taken = np.zeros((num_nodes, num_lanes), dtype=np.bool_)
    is_taken[np.arange(batch) * num_nodes // batch, cuts] = True
    return is_taken


def fitting_lanes(num_lanes: int, num_nodes: int, batch: int) -> tuple[int, ...]:
    """Return the numbers of lanes near `num_lanes` with which no two nodes share a lane; may be empty.

    The result is `num_lanes` alone if it fits. Otherwise it has at most one smaller and one larger number. `batch` is
    the number of positions of a step, on all ranks.
    """
    below = range(num_lanes - num_lanes % num_nodes, 0, -num_nodes)
    above = range(-(-num_lanes // num_nodes) * num_nodes, 4 * num_lanes + num_nodes, num_nodes)
    fits = [[each for each in near if batch % each == 0][:1] for near in (below, above)]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(fits)))


def _plan_downloads(
    data: PlannedData,
    own_tables: Sequence[ShardTable],
    layout: EpochLayout,
    world_size: int,
    epoch: int,
    node_size: int,
) -> DownloadPlan:
    """Compute what each node downloads in `epoch`, and in the next epoch.

    `own_tables` has one table of shards for each part of the source, also if `data.tables` has several tables of the
    part. `node_size` is the number of ranks per node.

    Raises:
        StorageError, FolderIndexError: The offsets of shards cannot be read.
    """
    remote = [table.remote for table in own_tables if table.is_remote]
    is_exact = sum(map(len, own_tables)) <= MAX_OFFSETS and all(each.all() for each in remote)
    firsts: list[Ints] = []  # number of the first sample of each part; samples are numbered over all shards
    sizes: list[Ints] = []  # bytes of the download of each part; 0 for local shards
    before: list[Ints] = []  # for each dataset: number of the first sample of each shard
    num_samples = 0
    for table in own_tables:
        before.append(num_samples + np.cumsum(table.file_counts) - table.file_counts)
        for offsets, is_remote in zip(_offsets(table, is_exact=is_exact), table.remote, strict=True):
            edges = part_edges(offsets)
            firsts.append(num_samples + edges[:-1])
            sizes.append((np.diff(offsets[edges]) + BLOCK_BYTES) * is_remote)
            num_samples += len(offsets) - 1
    first_samples, part_bytes = np.concatenate(firsts), np.concatenate(sizes)
    table_stops = np.cumsum([len(table) for table in data.tables])

    def parts_of(shards: Ints, samples: Ints) -> Ints:
        """Return for each sample the index of its part in `part_bytes`, int64 (n,).

        `shards` and `samples` are (n,), as `Order.take` returns them.
        """
        tables = np.searchsorted(table_stops, shards, side="right")
        numbers = np.empty_like(samples)
        for at in np.unique(tables).tolist():
            rows, table = np.flatnonzero(tables == at), data.tables[at]
            inner = shards[rows] - (int(table_stops[at]) - len(table))
            numbers[rows] = before[data.parts[at]][inner] + table.numbers(inner, samples[rows])
        return np.searchsorted(first_samples, numbers, side="right") - 1

    # The first and the last step at which each node reads each part; -1 if it never reads the part.
    shape = 2, world_size // node_size, len(part_bytes)
    first_steps, last_steps = (np.full(shape, -1, dtype=np.int32) for _ in range(2))
    for number in range(2):
        start = (epoch + number) * layout.num_samples
        steps = layout.steps(world_size, start=start)
        for step in range(len(steps)):
            positions = np.arange(steps.first(step), steps.consumed_after(step))
            nodes = find_nodes(data.order, start, steps, step, ranks_per_node=node_size)
            parts = parts_of(*data.order.take(positions + start))
            is_new = first_steps[number, nodes, parts] < 0
            first_steps[number, nodes[is_new], parts[is_new]] = step
            last_steps[number, nodes, parts] = step
    is_taken = last_steps >= 0
    cache_bytes = 0
    for taken, first, last in zip(is_taken[0], first_steps[0], last_steps[0], strict=True):
        moments = np.concatenate([first[taken], last[taken] + 1])
        changes = np.concatenate([part_bytes[taken], -part_bytes[taken]])
        cache_bytes = max(cache_bytes, int(np.cumsum(np.bincount(moments, changes)).max(initial=0)))
    return DownloadPlan(
        is_exact=is_exact,
        node_bytes=int((is_taken[0] @ part_bytes).max()),
        next_bytes=int(((is_taken[1] & ~is_taken[0]) @ part_bytes).max()),
        cache_bytes=cache_bytes,
    )


def _offsets(table: ShardTable, *, is_exact: bool) -> Iterator[Ints]:
    """Yield for each shard the byte offsets of its samples and of its end, int64 (num_samples + 1,).

    If `is_exact` and the shards are remote, the offsets are read from the index. Otherwise they are estimates from the
    mean sample size of each shard.

    Raises:
        StorageError, FolderIndexError: The offsets of a remote shard cannot be read.
    """
    if is_exact and table.is_remote:
        for first in range(0, len(table), _SHARDS_AT_ONCE):
            named = [(table.path(at), table.entry(at)) for at in range(first, min(len(table), first + _SHARDS_AT_ONCE))]
            yield from (np.asarray(shard.offsets) for shard in open_remote_shards(named))
    else:
        for count, size in zip(table.file_counts.tolist(), table.sample_bytes().tolist(), strict=True):
            yield (np.arange(count + 1) * size).astype(np.int64)


def _warnings(
    data: PlannedData,
    rank_info: RankInfo,
    lanes: LanesPlan | None,
    steps: AnySteps,
    fetched: DownloadPlan | None,
    cache: CacheSpec,
) -> Iterator[str]:
    if lanes is not None and lanes.num_shared > _MUCH_SHARED:
        near = " or ".join(map(str, lanes.fitting))
        yield (
            f"a lane is read by {lanes.num_shared:.1f} nodes on average, which read the same shards.\n"
            f"  Before a run begins, set `lanes: {near or 'a multiple of the number of nodes'}`. A "
            "different number gives a different order."
        )
    if cache.size is not None:
        needed = measure_cache(data, rank_info)[0]
        if needed > cache.size and cache.small == "refuse":
            yield f"the loader refuses this: {describe_small_cache(cache.size, needed, rank_info.ranks_per_node)}"
        elif fetched is not None and fetched.cache_bytes > cache.size:
            size, least = format_bytes(cache.size), format_at_least(max(needed, fetched.cache_bytes))
            yield (
                f"a node needs {least} at once, but `cache.size` is {size}: parts are downloaded again.\n"
                f"  Set `cache.size: {least}`, or a `window` or `lanes` of {cache.size / fetched.cache_bytes:.0%} of "
                "its value. That gives a different order."
            )
    if dropped := steps.describe_dropped():
        yield dropped


def _plan_stream(pipe: Pipeline, world_size: int, workers: int, errors: ErrorsSpec) -> StreamPlan:
    """Plan an epoch of a stream. `workers` is the number of worker processes per rank.

    Raises:
        PipelineError: The pipeline cannot run on these ranks and workers, or its source is not a source of wdskit.
    """
    from wdskit.engine.stream import (  # imported here, because it imports torch
        StreamPipeline,
        check_splits,
    )

    built = pipe.build(rank=0, world_size=world_size, max_workers=workers, transforms=_AnyFunction(), errors=errors)
    assert isinstance(built, StreamPipeline)
    draws = built.layout.draws
    if draws is None:
        raise PipelineError("the source is not wdskit's, so nothing is known about it before a run.")
    check_splits(built.pipeline, built.layout, world_size, max(1, workers))
    return StreamPlan(
        source="stream",
        world_size=world_size,
        workers=workers,
        num_shards=draws.num_shards,
        batch=built.layout.batch,
        steps=built.num_items(workers),
    )


class _AnyFunction(dict[str, Callable[..., Any]]):
    """A mapping that has a function for every name, in place of the user's functions, which a plan does not call."""

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda value, **kwargs: value  # noqa: ARG005 (a stage's settings)
