"""`wdskit.plan`: the steps of a run and what its ranks read, from the index alone, without a sample read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wdskit.config.spec import parse_settings
from wdskit.engine.shard_cache import USUAL_OPEN_SHARDS
from wdskit.errors import PipelineError
from wdskit.order.mixture import MixtureOrder
from wdskit.order.steps import Steps
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.pipeline.settings import ErrorsSpec, LoaderSpec, choose_workers
from wdskit.stages.sources import PlannedData, PlannedSource, epoch_length
from wdskit.tune.mixing import QualityPlan, draw, measure_quality
from wdskit.tune.reads import Floats, read_epoch

_MUCH_DROPPED = 0.05  # of an epoch
_MAX_RANKS = 16  # of a mixture whose shares are sampled, and
_MAX_SAMPLED = 1 << 14  # positions of each of them


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
        per_rank: From how many a rank takes: L / gcd(R, L), for a mixture L.
        fitting: Numbers of lanes nearest to L at which a rank takes from no more than twice L / R.
    """

    num_lanes: int
    per_rank: int
    fitting: tuple[int, ...]


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a planned source. Shards that stand in a source several times count each time.

    Steps, samples and lanes are exact. Shards of a rank are those into which its lanes reach: exact in whole passes
    where R divides the number of lanes, else the most that it reads from; of `resampled` the expectation. Ranks of a
    mixture are taken to read from all lanes of its parts. Samples are taken to be of their shard's mean size.

    Attributes:
        source: "exact", "resampled" or "sequential".
        world_size: R.
        workers: Worker processes of a rank, 0 for none; where nobody says, those of a loader on this machine.
        threads_reason: Why each of them has one thread, where functions of the user's are the reason.
        gpus_per_node: Ranks of a node, which follow each other; at most R.
        epoch: Its number.
        num_samples: Samples of the epoch, over all ranks.
        batch: B, samples of a rank's batch; 1 without `batched`.
        global_batch: R x B.
        steps: Batches of each rank.
        num_dropped: Samples at the end of the epoch that no step holds.
        num_padded: Rows of the last step that hold no sample.
        num_shards: Shards of all parts with a selected sample.
        num_bytes: Bytes of the samples of all parts.
        lanes: None for `sequential`.
        rank_shards: Shards that a rank reads from in the epoch.
        rank_bytes: Bytes of the samples that a rank reads in the epoch.
        open_shards: The shards into which the windows of a rank's lanes (for `sequential` a global batch) reach at
            once, at the moment with most, on the rank with most.
        node_shards: The same of the ranks of one node together: the shards that must be at hand on it at once.
        node_bytes: Bytes of all samples of these windows, or of the global batch.
        parts: One data set, or those of a mixture.
        warnings: What should be changed, each with what to do.
        quality: How far batches are from a uniform draw, where that was asked for.
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
    node_shards: int
    node_bytes: int
    parts: tuple[PartPlan, ...]
    warnings: tuple[str, ...]
    quality: QualityPlan | None = None


@dataclass(frozen=True)
class StreamPlan:
    """An epoch of a stream.

    Attributes:
        source: "stream".
        world_size: R.
        workers: Worker processes of a rank, 0 for none.
        num_shards: Shards of the stream.
        resampled: Whether they are drawn with replacement, so that there is no pass over them.
        rank_shards: Least and most shards that a rank draws in a pass; None where it is resampled.
        worker_shards: The same of one worker.
        batch: Samples of a batch; 1 without `batched`.
        steps: Items of each rank in an epoch; None where only reading shows it.
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
    quality: bool = False,
    classes: int | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> EpochPlan | StreamPlan:
    """Plan an epoch from the index alone.

    Args:
        config: A YAML file, the same as a dict, or a `Pipeline`.
        pipeline: Which of a configuration's pipelines; may be left out where there is one.
        overrides: `a.b.c=VALUE` each, as `make_loader` takes them.
        world_size: R, number of ranks.
        workers: Worker processes of a rank; without, the configuration's, or those that a loader would choose here.
        gpus_per_node: Ranks of a node.
        epoch: Which one: a schedule of weights makes them differ.
        quality: Whether to compare batches with a uniform draw, of planned sources.
        classes: Number of classes for `quality`; without, those of `classes.json`, or 1000.
        plot: Where to draw a picture of the order, `.png` or `.svg`; of planned sources.

    Raises:
        ConfigError: The configuration has problems; all of them are listed.
        PipelineError: It cannot run on so many ranks and workers, or an argument is out of range.
        StorageError, FolderIndexError, SelectionError: The shards cannot be listed, or have no index.
    """
    numbers = {"world_size": (world_size, 1), "gpus_per_node": (gpus_per_node, 1), "epoch": (epoch, 0)}
    numbers |= {} if workers is None else {"workers": (workers, 0)}
    numbers |= {} if classes is None else {"classes": (classes, 1)}
    for name, (value, least) in numbers.items():
        if type(value) is not int or value < least:
            raise PipelineError(f"plan({name}={value!r}): it is a whole number, {least} or more.")
    if classes is not None and not quality:
        raise PipelineError(f"plan(classes={classes}): only `quality` counts classes.\n  Add quality=True (--quality).")
    pipe, _, loader, errors, _ = open_pipeline(config, pipeline, overrides, caller="plan")
    if workers is not None:
        loader = parse_settings(LoaderSpec, loader.model_dump(exclude_unset=True) | {"workers": workers}, where="plan")
    source = pipe.stages[0]
    if not isinstance(source, PlannedSource):
        if quality or plot is not None:
            msg = "a stream's order is that of its shuffle buffers, which only a run shows."
            raise PipelineError(f"{msg}\n  Index the shards (`wdskit index FOLDER`) and plan `exact`.")
        return _plan_stream(pipe, world_size, loader.workers, errors)
    data = source.plan()
    length = epoch_length(pipe.stages, data.num_samples, world_size)
    steps = Steps(length.num_samples, length.batch, world_size, pipe.stages[0].tail)
    start = epoch * steps.num_samples
    lanes = _plan_lanes(source, data, world_size)
    if plot is not None:
        title = f"{source.name}: {steps.num_samples:,} samples on {world_size} ranks, batches of {steps.batch}"
        if lanes is not None:
            title += f", {lanes.num_lanes} lanes, windows of {getattr(source, 'window', 0):,}"
        draw(data, steps, start, path=plot, title=title)
    node_size = min(gpus_per_node, world_size)
    run = choose_workers(loader, pipe.stages, {"LOCAL_WORLD_SIZE": str(node_size)})
    reads, of_parts = read_epoch(data, steps, start, node_size)
    parts = tuple(_plan_parts(source, data, of_parts))
    open_shards = math.ceil(reads.rank_open)
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
        rank_bytes=Spread.of(reads.num_bytes),
        open_shards=open_shards,
        node_shards=math.ceil(reads.node_open),
        node_bytes=round(reads.node_bytes),
        parts=parts,
        warnings=tuple(_warnings(data, parts, lanes, open_shards, steps, start)),
        quality=measure_quality(data, steps, start, classes) if quality else None,
    )


def _plan_lanes(source: PlannedSource, data: PlannedData, world_size: int) -> LanesPlan | None:
    num_lanes: int | None = getattr(source, "lanes", None)
    if num_lanes is None:
        return None
    shared = 1 if isinstance(data.order, MixtureOrder) else math.gcd(num_lanes, world_size)
    return LanesPlan(num_lanes, num_lanes // shared, fitting_lanes(num_lanes, world_size))


def fitting_lanes(num_lanes: int, world_size: int) -> tuple[int, ...]:
    """The numbers of lanes L nearest to `num_lanes`, below and above, of which a rank touches at most 2 L / R.

    A rank touches L / gcd(R, L), so the divisor must be R or half of it.
    """
    unit = world_size // 2 if world_size % 2 == 0 else world_size
    below = num_lanes - num_lanes % unit
    return tuple(dict.fromkeys(each for each in (below, -(-num_lanes // unit) * unit) if each))


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
    data: PlannedData, parts: Sequence[PartPlan], lanes: LanesPlan | None, open_shards: int, steps: Steps, start: int
) -> Iterator[str]:
    if isinstance(data.order, MixtureOrder):
        yield from _warn_of_uneven_ranks(data.order, parts, steps, start)
    elif lanes is not None and lanes.per_rank * steps.world_size > 2 * lanes.num_lanes:
        near = " or ".join(map(str, lanes.fitting))
        yield (
            f"a rank takes from {lanes.per_rank} of {lanes.num_lanes} lanes, more than twice "
            f"{lanes.num_lanes} / {steps.world_size}, and shares each with other ranks, which read the same shards.\n"
            f"  Before a run begins, set `lanes: {near}`: another number is another order."
        )
    if open_shards > USUAL_OPEN_SHARDS:
        yield (
            f"a rank reads from {open_shards:,} shards at a time, and a process keeps {USUAL_OPEN_SHARDS} open where "
            "`ulimit -n` is 1024: the others are opened again and again.\n"
            "  Raise that limit, or use larger shards, fewer lanes or a smaller window."
        )
    if steps.num_dropped > _MUCH_DROPPED * steps.num_samples:
        yield (
            f"{steps.num_dropped / steps.num_samples:.0%} of each epoch is dropped, since it fills no batch of "
            f"{steps.global_batch:,} on all ranks.\n  Use smaller batches or `tail: pad`."
        )


def _warn_of_uneven_ranks(order: MixtureOrder, parts: Sequence[PartPlan], steps: Steps, start: int) -> Iterator[str]:
    """Sample what the first ranks take of each part of a mixture: parts can take turns in step with the ranks."""
    num = max(1, min(_MAX_SAMPLED, steps.num_samples // steps.world_size))
    ranks = np.arange(min(steps.world_size, _MAX_RANKS))
    positions = start + ranks[:, None] + steps.world_size * np.arange(num)
    taken = order.shares.take(positions.ravel())[0].reshape(positions.shape)
    shares = np.array([np.bincount(mine, minlength=len(parts)) / num for mine in taken])
    whole = shares.mean(axis=0)
    off = np.abs(shares - whole)
    rank, part = divmod(int(off.argmax()), len(parts))
    if off[rank, part] > max(0.005, 0.05 * whole[part]):
        yield (
            f"rank {rank} takes {shares[rank, part]:.0%} of its samples from {parts[part].name}, all ranks together "
            f"{whole[part]:.0%}: the parts take turns in step with the ranks. Global batches have the right shares, "
            "those of one rank have not.\n  Weights that add up to a number without a common factor with "
            f"{steps.world_size}, as 50 and 51, break it."
        )


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
        raise PipelineError("the source is not wdskit's, so nothing is known of it before it runs.")
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
        return lambda value: value
