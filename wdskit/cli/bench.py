"""`wdskit bench`: how fast this machine reads and loads, and the workers and threads to take on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    escape_lines,
    format_bytes,
    make_console,
    numbers_table,
    plural,
    print_json,
    print_tables,
    show_steps,
)
from wdskit.cli.options import ConfigArgument, JsonOption, OverridesOption, PipelineOption, Plugins, import_plugins

if TYPE_CHECKING:
    from wdskit.tune.bench import BenchResult, Measured


def bench_command(
    config: ConfigArgument,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Worker processes to try. Default: what suits the CPUs.",
            rich_help_panel="Measurement",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Threads to try with each number of workers.",
            rich_help_panel="Measurement",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Ranks of the run; one is measured. Default: 1.",
            rich_help_panel="Measurement",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", help="Length of each measurement.", rich_help_panel="Measurement")
    ] = 1.0,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Number of times that each measurement is made.", rich_help_panel="Measurement"
        ),
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Measure this machine and recommend workers and threads.

    Reads and loads the shards of CONFIG on the CPUs that this process may use; the source must have an index.
    `taskset -c 0-7` limits it to eight CPUs, as for one rank of several on a node. The decode limit is the rate of one
    thread in its CPU time, times the number of CPUs. It takes some minutes.

    In Python: wdskit.bench

    Examples:
        wdskit bench configs/imagenet.yaml --pipeline train
        taskset -c 0-7 wdskit bench train.yaml --workers 1,2,4 --threads 1,2,4
    """
    tried_workers = _parse_numbers("--workers", workers, 0)
    tried_threads = _parse_numbers("--threads", threads, 1)
    import_plugins(plugins)
    from wdskit.tune.bench import bench

    with show_steps() as progress:
        result = bench(
            config,
            pipeline=pipeline,
            overrides=overrides or [],
            workers=tried_workers,
            threads=tried_threads,
            world_size=world_size,
            seconds=seconds,
            repeats=repeats,
            progress=progress,
        )
    if json:
        print_json(result)
    else:
        show_result(result)


def _parse_numbers(option: str, text: str | None, least: int) -> list[int] | None:
    """`0,1,4` as numbers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and len(word) < 6 and int(word) >= least for word in words):
        msg = f"{text!r} is not a list of whole numbers, each {least} or more: `{least},{least + 1},4`."
        raise typer.BadParameter(msg, param_hint=option)
    return [int(word) for word in words]


def show_result(result: BenchResult) -> None:
    """Print a result for people."""
    console = make_console()
    batch = f" in batches of {result.batch:,}" if result.batch > 1 else ""
    ranks = f", one rank of {result.world_size:,}" if result.world_size > 1 else ""
    repeats = f"; medians of {result.repeats} and their spread" if result.repeats > 1 else ""
    cpus = plural(result.num_cpus, "CPU")
    console.print(f"Samples of {format_bytes(result.sample_bytes)}{batch}{ranks}, on {cpus}{repeats}")
    rate, spread = _rate(result.read_samples_per_s)
    reading = f"{rate} samples/s{spread and f' {spread}'}"
    num_bytes = format_bytes(result.read_samples_per_s.median * result.sample_bytes)
    console.print(f"Reading only, by one thread: {reading}, {num_bytes}/s, CPU ms {result.read_cpu_ms.median:#.3g}")
    console.print(f"Decode limit: {_rate(result.limit)[0]} samples/s, what one thread makes in its CPU time x {cpus}\n")
    advice = result.advice
    loaders = (
        (
            "{} x {}".format(*each.setting)
            + (" *" if each.setting == advice.setting else "")
            + (" now" if each.setting == result.configured else ""),
            *_rate(each.samples_per_s),
            f"{each.limit_ratio.median:.0%}",
            "" if each.cpu_ms is None else f"{each.cpu_ms.median:#.3g}",
            f"{each.first_batch_s.median:.2f} s",
        )
        for each in result.loaders
    )
    titles = ("workers x threads", "samples/s", "", "of the limit", "CPU ms", "first batch")
    print_tables([numbers_table(titles, loaders)])
    print(f"\n{escape_lines(advice.yaml)}\n")
    reached = f"It reaches {advice.limit_ratio:.0%} of the decode limit"
    if advice.setting == result.configured:
        reached += ", and is what the configuration already uses"
    console.print(f"{reached}; {advice.reason}")
    for warning in advice.warnings:
        print(f"\nWarning: {escape_lines(warning)}")


def _rate(rate: Measured) -> tuple[str, str]:
    """Samples/s, and how far repeats are from it."""
    spread = f"±{rate.spread_ratio:.0%}" if rate.least < rate.most else ""
    return f"{rate.median:,.0f}" if rate.median >= 100 else f"{rate.median:,.1f}", spread
