"""`wdskit plan`: the steps of a run, what its ranks read, and how well its batches are mixed, from the index alone."""

from __future__ import annotations

from collections.abc import Iterator
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
from wdskit.cli.options import ConfigArgument, JsonOption, OverridesOption, PipelineOption, Plugins, import_plugins

if TYPE_CHECKING:
    from wdskit.tune.downloads import DownloadPlan
    from wdskit.tune.mixing import QualityPlan
    from wdskit.tune.plan import EpochPlan, StreamPlan


def plan_command(
    config: ConfigArgument,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
    world_size: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of the run.", rich_help_panel="Run")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Worker processes per rank. Default: as configured.",
            rich_help_panel="Run",
            show_default=False,
        ),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks per node.", rich_help_panel="Run")] = 8,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="The epoch.", rich_help_panel="Run")] = 0,
    downloads: Annotated[
        bool | None,
        typer.Option(
            "--downloads/--no-downloads",
            help="Compute what each node downloads from a store. Default: only if that takes a few seconds.",
            rich_help_panel="Run",
            show_default=False,
        ),
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Compare batches with a uniform draw.", rich_help_panel="Quality")
    ] = False,
    classes: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Classes for --quality. Default: those of classes.json, or 1000.",
            rich_help_panel="Quality",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw what ranks read, as .png or .svg.", rich_help_panel="Quality", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the steps of a run and what its ranks read.

    Only the index is read, no samples. --quality compares the classes in the batches of some steps with a uniform
    draw, for the worst case: data sorted by class. --plot needs matplotlib.

    In Python: wdskit.plan

    Examples:
        wdskit plan configs/imagenet.yaml --pipeline train --world-size 64
    """
    from wdskit.tune.plan import StreamPlan, plan

    import_plugins(plugins)
    found = plan(
        config,
        pipeline=pipeline,
        overrides=overrides or [],
        world_size=world_size,
        workers=workers,
        gpus_per_node=gpus_per_node,
        epoch=epoch,
        downloads=downloads,
        quality=quality,
        classes=classes,
        plot=plot,
    )
    if json:
        print_json(found)
        return
    if isinstance(found, StreamPlan):
        print_tables([details_table(_stream_rows(found))])
        return
    tables = [details_table(_epoch_rows(found))]
    if len(found.parts) > 1:
        rows = (
            (
                part.name,
                format_count(part.num_shards),
                format_count(part.num_samples),
                format_bytes(part.num_bytes),
                f"{part.share_ratio:.2%}",
                f"{part.repeats:,.2f}",
            )
            for part in found.parts
        )
        tables.append(numbers_table(("part", "shards", "samples", "size", "share", "repeats"), rows))
    if found.downloads is not None:
        tables.append(details_table(_download_rows(found.downloads)))
    if found.quality is not None:
        tables.append(details_table(_quality_rows(found.quality)))
    print_tables(tables)
    if found.quality is not None:
        print(found.quality.verdict)
    for warning in found.warnings:
        print(f"\nWarning: {escape_lines(warning)}")


def _epoch_rows(plan: EpochPlan) -> Iterator[tuple[str, str]]:
    yield "source", f"{plan.source}, {plural(plan.num_shards, 'shard')} of {format_bytes(plan.num_bytes)}"
    yield "on", _ranks(plan)
    if plan.threads_reason:
        yield "threads", f"1: {plan.threads_reason}"
    yield f"epoch {plan.epoch}", f"{plural(plan.num_samples, 'sample')}"
    sizes = f"{plan.batch:,} x {plan.world_size:,} = {plan.global_batch:,}"
    yield "steps", f"{format_count(plan.steps)}, each a global batch of {sizes}"
    if plan.num_padded:
        yield "padded", f"{plural(plan.num_padded, 'row')} of the last step"
    else:
        share = f" ({plan.num_dropped / plan.num_samples:.2%})" if plan.num_dropped else ""
        yield "dropped", f"{plural(plan.num_dropped, 'sample')}{share}"
    if plan.lanes is not None:
        yield "lanes", f"a node reads {plan.lanes.per_node:,} of {plan.lanes.num_lanes:,}"
    shards = _shards(round(plan.rank_shards.least), round(plan.rank_shards.most))
    num_bytes = _between(*map(format_bytes, (plan.rank_bytes.least, plan.rank_bytes.most)))
    yield "a rank reads", f"{shards}, {num_bytes}"
    of_node = f"a node of {plural(plan.gpus_per_node, 'rank')}"
    yield (
        "at once",
        f"{of_node} reads from {plural(plan.open_shards, 'shard')}, in windows of {format_bytes(plan.node_bytes)}",
    )


def _download_rows(plan: DownloadPlan) -> Iterator[tuple[str, str]]:
    about = "" if plan.is_exact else "about "
    yield "downloads", f"{about}{format_bytes(plan.node_bytes)} per node in {plural(plan.requests, 'part')}"
    yield "all nodes", f"{plan.first_ratio:.2f} times the data, {plan.second_ratio:.2f} times in the next epoch"
    if plan.homes:
        other = "without homes" if plan.other_homes == 1 else f"with `homes: {plan.other_homes}`"
        yield "homes", f"{plan.homes}; {other} the next epoch is {plan.other_ratio:.2f} times"
    yield "needed again", f"{about}{format_bytes(plan.live_bytes)} per node at once: the smallest `cache`"


def _quality_rows(quality: QualityPlan) -> Iterator[tuple[str, str]]:
    yield "classes", f"{quality.num_classes:,}, as if the data were sorted by them; {plural(quality.num_steps, 'step')}"
    least = f"at least {quality.rank_classes_least:,}"
    yield "in a rank's batch", f"{quality.rank_classes:,.1f}, {least}; uniform {quality.rank_ideal:,.1f}"
    yield "in a global batch", f"{quality.global_classes:,.1f}; uniform {quality.global_ideal:,.1f}"


def _stream_rows(plan: StreamPlan) -> Iterator[tuple[str, str]]:
    how = ", drawn with replacement" if plan.resampled else ""
    yield "source", f"stream, {plural(plan.num_shards, 'shard')}{how}"
    yield "on", _ranks(plan)
    if plan.steps is None:
        yield "steps", "unknown before the run: there is no with_epoch"
    else:
        yield "steps", f"{format_count(plan.steps)} per rank and epoch"
    for name, shards in (("a rank draws", plan.rank_shards), ("a worker draws", plan.worker_shards)):
        if shards is not None:
            yield name, f"{_shards(*shards)} in a pass over all"


def _ranks(plan: EpochPlan | StreamPlan) -> str:
    workers = plural(plan.workers, "worker") if plan.workers else "no worker"
    return f"{plural(plan.world_size, 'rank')}, each with {workers}"


def _shards(least: int, most: int) -> str:
    return plural(most, "shard") if least == most else f"{format_count(least)} to {format_count(most)} shards"


def _between(least: str, most: str) -> str:
    return most if least == most else f"{least} to {most}"
