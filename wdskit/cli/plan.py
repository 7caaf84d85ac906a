"""`wdskit plan`: compute the steps of a run, and what a rank reads, from the index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    details_table,
    format_bytes,
    format_count,
    numbers_table,
    plural,
    print_json,
    print_tables,
)
from wdskit.cli.options import ConfigArgument, JsonOption, OverridesOption, PipelineOption, Plugins, import_plugins

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.planning import EpochPlan


def plan_command(
    config: ConfigArgument,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
    world_size: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks of the run.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="Ranks per node.")] = 8,
    epoch: Annotated[int, typer.Option(metavar="N", min=0, help="The epoch.")] = 0,
    json: JsonOption = False,
) -> None:
    """Show the steps of a run, and the shards and bytes that a rank reads.

    Reads only the index.

    In Python: wdskit.plan

    Examples:
        wdskit plan configs/imagenet.yaml --pipeline train --world-size 64
    """
    from wdskit.planning import plan

    import_plugins(plugins)
    result = plan(
        config,
        pipeline=pipeline,
        overrides=overrides or [],
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        epoch=epoch,
    )
    if json:
        print_json(result)
        return
    tables = [details_table(_epoch_rows(result))]
    print_tables([*tables, _buckets(result)] if result.buckets else tables)


def _epoch_rows(plan: EpochPlan) -> Iterator[tuple[str, str]]:
    yield "source", f"{plan.source}, {plural(plan.num_shards, 'shard')} of {format_bytes(plan.num_bytes)}"
    workers = plural(plan.workers, "worker") if plan.workers else "no worker"
    yield "on", f"{plural(plan.world_size, 'rank')}, each with {workers}"
    yield f"epoch {plan.epoch}", plural(plan.num_samples, "sample")
    sizes = f"a global batch of {plan.batch:,} x {plan.world_size:,} = {plan.global_batch:,}"
    yield "steps", f"{format_count(plan.steps)}, each {'a global batch of one bucket' if plan.buckets else sizes}"
    if plan.num_padded:
        where = f"the last batches of {plural(len(plan.buckets), 'bucket')}" if plan.buckets else "the last step"
        yield "padded", f"{plural(plan.num_padded, 'row')} of {where}"
    else:
        share = f" ({plan.num_dropped / plan.num_samples:.2%})" if plan.num_dropped else ""
        yield "dropped", f"{plural(plan.num_dropped, 'sample')}{share}"
    lanes = f"{plan.rank_lanes:,} of {plural(plan.num_lanes, 'lane')}, " if plan.num_lanes else ""
    shards = "" if plan.rank_shards is None else f"{plural(plan.rank_shards, 'shard')}, "
    yield "a rank", f"reads {lanes}{shards}{format_bytes(plan.rank_bytes)}"


def _buckets(plan: EpochPlan) -> Table:
    """Return a table with one line per bucket."""
    rest = "padded" if plan.num_padded else "dropped"
    rows = [
        [
            row.bucket,
            *map(format_count, (row.num_samples, row.global_batch, row.steps, row.num_padded or row.num_dropped)),
        ]
        for row in plan.buckets
    ]
    return numbers_table(["bucket", "samples", "global batch", "steps", rest], rows)
