"""`wdskit plan`: the steps of a run, what its ranks read, and how well its batches are mixed, told from the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    details_table,
    escape_lines,
    format_bytes,
    format_count,
    numbers_table,
    plural,
    print_json,
    print_tables,
)
from wdskit.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.loader.plan_types import EpochPlan, QualityPlan, Spread, StreamPlan


def plan_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")],
    pipeline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which pipeline; needed where there are several.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting first. Repeatable.")
    ] = None,
    world_size: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks.")] = 1,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Worker processes of a rank. Default: the configuration's.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of a node.")] = 8,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="Which epoch.")] = 0,
    quality: Annotated[
        bool, typer.Option("--quality", help="OnProgress how far batches are from a uniform draw.")
    ] = False,
    classes: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Classes for it. Default: those of classes.json, or 1000.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what ranks read, as .png or .svg.")] = None,
    json: JsonOption = False,
) -> None:
    """OnProgress the steps of a run and what its ranks read.

    Everything follows from the index; no sample is read. --quality takes the worst case for the data, that they are
    sorted by class, and compares the classes in a batch with those of a uniform draw. --plot needs matplotlib.

    In Python: wdskit.plan
    """
    from wdskit.loader.plan import plan
    from wdskit.loader.plan_types import EpochPlan

    found = plan(
        config,
        pipeline=pipeline,
        overrides=overrides or [],
        world_size=world_size,
        workers=workers,
        gpus_per_node=gpus_per_node,
        epoch=epoch,
        quality=quality,
        classes=classes,
        plot=plot,
    )
    if json:
        print_json(found)
        return
    print_tables(_tables(found))
    if isinstance(found, EpochPlan) and found.quality is not None:
        print(found.quality.verdict)
    for warning in found.warnings:
        print(f"\nWarning: {escape_lines(warning)}")


def _tables(found: EpochPlan | StreamPlan) -> Iterator[Table]:
    from wdskit.loader.plan_types import EpochPlan

    if not isinstance(found, EpochPlan):
        yield details_table(_of_stream(found))
        return
    yield details_table(_of_epoch(found))
    if len(found.parts) > 1:
        rows = [
            (
                part.name,
                format_count(part.num_shards),
                format_count(part.num_samples),
                format_bytes(part.num_bytes),
                f"{part.share_ratio:.2%}",
                f"{part.repeats:,.2f}",
            )
            for part in found.parts
        ]
        yield numbers_table(["part", "shards", "samples", "size", "share", "repeats"], rows)
    if found.quality is not None:
        yield details_table(_of_quality(found.quality))


def _of_epoch(found: EpochPlan) -> Iterator[tuple[str, str]]:
    yield "source", f"{found.source}, {plural(found.num_shards, 'shard')} of {format_bytes(found.num_bytes)}"
    yield "on", _ranks(found.world_size, found.workers)
    if found.threads_reason:
        yield "threads", f"1: {found.threads_reason}"
    yield f"epoch {found.epoch}", f"{plural(found.num_samples, 'sample')}"
    sizes = f"{found.batch:,} x {found.world_size:,} = {found.global_batch:,}"
    yield "steps", f"{format_count(found.steps)}, each a global batch of {sizes}"
    if found.num_padded:
        yield "padded", f"{plural(found.num_padded, 'row')} of the last step"
    else:
        share = f" ({found.num_dropped / found.num_samples:.2%})" if found.num_dropped else ""
        yield "dropped", f"{plural(found.num_dropped, 'sample')}{share}"
    if found.lanes is not None:
        yield "lanes", f"a rank takes from {found.lanes.per_rank:,} of {found.lanes.num_lanes:,}"
    yield "a rank reads", f"{_range(found.rank_shards, format_count)} shards, {_range(found.rank_bytes, format_bytes)}"
    of_node = ""
    if found.gpus_per_node > 1:
        of_node = f"; a node of {found.gpus_per_node} from {found.node_shards:,}"
        of_node = f"{of_node}, in windows of {format_bytes(found.node_bytes)}"
    yield "at once", f"a rank from {plural(found.open_shards, 'shard')}{of_node}"


def _of_quality(found: QualityPlan) -> Iterator[tuple[str, str]]:
    yield "classes", f"{found.num_classes:,}, taken to be sorted"
    least = f"at least {found.rank_classes_least:,}"
    yield "in a rank's batch", f"{found.rank_classes:,.1f}, {least}; uniform {found.rank_ideal:,.1f}"
    yield "in a global batch", f"{found.global_classes:,.1f}; uniform {found.global_ideal:,.1f}"
    if found.seen_again is not None:
        least_again, mean, most = (f"{each:.2%}" for each in found.seen_again)
        spread = mean if least_again == most else f"{mean}, {least_again} to {most}"
        yield "seen again", f"{spread} of a rank's samples in the next pass; uniform {found.seen_again_ideal:.2%}"


def _of_stream(found: StreamPlan) -> Iterator[tuple[str, str]]:
    how = ", drawn with replacement" if found.resampled else ""
    yield "source", f"stream, {plural(found.num_shards, 'shard')}{how}"
    yield "on", _ranks(found.world_size, found.workers)
    if found.steps is None:
        yield "steps", "known only by reading: there is no with_epoch"
    else:
        yield "steps", f"{format_count(found.steps)} of each rank in an epoch"
    for name, shards in (("a rank draws", found.rank_shards), ("a worker draws", found.worker_shards)):
        if shards is not None:
            least, most = shards
            both = f"{most:,}" if least == most else f"{least:,} to {most:,}"
            yield name, f"{both} shards in a pass over all"


def _ranks(world_size: int, workers: int) -> str:
    return f"{plural(world_size, 'rank')}, each with {plural(workers, 'worker') if workers else 'no worker'}"


def _range(spread: Spread, show: Callable[[float], str]) -> str:
    least, most = show(round(spread.least)), show(round(spread.most))
    return most if least == most else f"{least} to {most}"
