"""`wdskit plan`: the steps of a run, what its ranks read, and how well its batches are mixed, told from the index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    escape,
    escape_lines,
    facts_table,
    format_bytes,
    format_count,
    make_console,
    plural,
    print_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.loader.plan_types import EpochPlan, PartPlan, QualityPlan, Spread, StreamPlan


def plan_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")],
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which pipeline; needed where there are several."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting first. Repeatable."),
    ] = None,
    world_size: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Worker processes of a rank. Default: the configuration's."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of a node.")] = 8,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="Which epoch.")] = 0,
    quality: Annotated[bool, typer.Option("--quality", help="Tell how far batches are from a uniform draw.")] = False,
    classes: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Classes for it. Default: those of classes.json, or 1000."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw what ranks read, as .png or .svg."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Tell the steps of a run and what its ranks read.

    Everything follows from the index; no sample is read. --quality takes the worst case for the data, that they are
    sorted by class, and compares the classes in a batch with those of a uniform draw. --plot needs matplotlib.

    In Python: wdskit.plan
    """
    from wdskit.loader.plan import plan
    from wdskit.loader.plan_types import EpochPlan

    told = plan(
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
        print_json(dataclasses.asdict(told))
        return
    console = make_console()
    console.print(facts_table(_of_epoch(told) if isinstance(told, EpochPlan) else _of_stream(told)))
    if isinstance(told, EpochPlan) and len(told.parts) > 1:
        console.print()
        console.print(_parts(told.parts))
    if isinstance(told, EpochPlan) and told.quality is not None:
        console.print()
        console.print(facts_table(_of_quality(told.quality)))
        print(told.quality.verdict)
    for warning in told.warnings:
        print(f"\nWarning: {escape_lines(warning)}")


def _of_epoch(told: EpochPlan) -> Iterator[tuple[str, str]]:
    yield "source", f"{told.source}, {plural(told.num_shards, 'shard')} of {format_bytes(told.num_bytes)}"
    yield "on", _ranks(told.world_size, told.workers)
    if told.threads_reason:
        yield "threads", f"1: {told.threads_reason}"
    yield f"epoch {told.epoch}", f"{plural(told.num_samples, 'sample')}"
    sizes = f"{told.batch:,} x {told.world_size:,} = {told.global_batch:,}"
    yield "steps", f"{format_count(told.steps)}, each a global batch of {sizes}"
    if told.num_padded:
        yield "padded", f"{plural(told.num_padded, 'row')} of the last step"
    else:
        share = f" ({told.num_dropped / told.num_samples:.2%})" if told.num_dropped else ""
        yield "dropped", f"{plural(told.num_dropped, 'sample')}{share}"
    if told.lanes is not None:
        yield "lanes", f"a rank takes from {told.lanes.per_rank:,} of {told.lanes.num_lanes:,}"
    yield "a rank reads", f"{_spread(told.rank_shards)} shards, {_bytes(told.rank_bytes)}"
    of_node = ""
    if told.gpus_per_node > 1:
        of_node = (
            f"; a node of {told.gpus_per_node} from {told.node_shards:,}, in windows of {format_bytes(told.node_bytes)}"
        )
    yield "at once", f"a rank from {plural(told.open_shards, 'shard')}{of_node}"


def _of_quality(told: QualityPlan) -> Iterator[tuple[str, str]]:
    yield "classes", f"{told.num_classes:,}, taken to be sorted"
    least = f"at least {told.rank_classes_least:,}"
    yield "in a rank's batch", f"{told.rank_classes:,.1f}, {least}; uniform {told.rank_ideal:,.1f}"
    yield "in a global batch", f"{told.global_classes:,.1f}; uniform {told.global_ideal:,.1f}"
    if told.seen_again is not None:
        least_again, mean, most = (f"{each:.2%}" for each in told.seen_again)
        spread = mean if least_again == most else f"{mean}, {least_again} to {most}"
        yield "seen again", f"{spread} of a rank's samples in the next pass; uniform {told.seen_again_ideal:.2%}"


def _of_stream(told: StreamPlan) -> Iterator[tuple[str, str]]:
    how = ", drawn with replacement" if told.resampled else ""
    yield "source", f"stream, {plural(told.num_shards, 'shard')}{how}"
    yield "on", _ranks(told.world_size, told.workers)
    if told.steps is None:
        yield "steps", "known only by reading: there is no with_epoch"
    else:
        yield "steps", f"{format_count(told.steps)} of each rank in an epoch"
    for name, shards in (("a rank draws", told.rank_shards), ("a worker draws", told.worker_shards)):
        if shards is not None:
            least, most = shards
            both = f"{most:,}" if least == most else f"{least:,} to {most:,}"
            yield name, f"{both} shards in a pass over all"


def _ranks(world_size: int, workers: int) -> str:
    return f"{plural(world_size, 'rank')}, each with {plural(workers, 'worker') if workers else 'no worker'}"


def _spread(spread: Spread) -> str:
    least, most = round(spread.least), round(spread.most)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _bytes(spread: Spread) -> str:
    least, most = format_bytes(spread.least), format_bytes(spread.most)
    return most if least == most else f"{least} to {most}"


def _parts(parts: tuple[PartPlan, ...]) -> Table:
    """One data set of a mixture a line."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("part", style="bold", overflow="fold")
    for title in ("shards", "samples", "size", "share", "repeats"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in parts:
        table.add_row(
            escape(part.name),
            format_count(part.num_shards),
            format_count(part.num_samples),
            format_bytes(part.num_bytes),
            f"{part.share_ratio:.2%}",
            f"{part.repeats:,.2f}",
        )
    return table
