"""`wdskit bench`: how fast this machine reads, decodes and loads, and the workers and threads to take on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    details_table,
    escape_lines,
    format_bytes,
    make_console,
    plural,
    print_json,
    print_tables,
    show_steps,
)
from wdskit.cli.options import JsonOption, Plugins, import_plugins

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.loader.bench_types import BenchResult, Measured


def bench_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")],
    pipeline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which pipeline; needed where there are several.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting first. Repeatable.")
    ] = None,
    plugins: Plugins = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Worker processes to try. Default: what suits the CPUs.")
    ] = None,
    threads: Annotated[str | None, typer.Option(metavar="N,N", help="Threads to try with each of them.")] = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Ranks of the run; one is measured. Default: 1.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of each measurement.")] = 1.0,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="How often each is made, in turns.")] = 3,
    alone: Annotated[
        bool, typer.Option("--alone", help="Leave out what is measured beside Python code and training.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the rates, as .png or .svg.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure this machine and recommend workers and threads.

    Reads, decodes and loads the shards of CONFIG, whose source must have an index, on the CPUs that this process may
    use: with `taskset -c 0-7` on eight of them, as one rank of several on a node would. The decode limit is what its
    stages reach on samples in memory, on all CPUs and without a loader; headspace is the loader with batches that cost
    nothing. It takes some minutes. --plot needs matplotlib.

    In Python: wdskit.bench
    """
    tried_workers = _numbers("--workers", workers, 0)
    tried_threads = _numbers("--threads", threads, 1)
    import_plugins(plugins)
    from wdskit.loader.bench import bench

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
            alone=alone,
            plot=plot,
            progress=progress,
        )
    if json:
        print_json(result)
        return
    show_result(result)


def show_result(result: BenchResult) -> None:
    """Print a result for people."""
    print_tables([details_table(_details(result)), _parts(result), _loaders(result)])
    _print_advice(result)


def _numbers(option: str, text: str | None, least: int) -> list[int] | None:
    """`0,1,4` as numbers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and len(word) < 6 and int(word) >= least for word in words):
        msg = f"{text!r} is no list of whole numbers, each {least} or more: `{least},{least + 1},4`."
        raise typer.BadParameter(msg, param_hint=option)
    return [int(word) for word in words]


def _details(result: BenchResult) -> Iterator[tuple[str, str]]:
    batch = f" in batches of {result.batch:,}" if result.batch > 1 else ""
    ranks = f", one rank of {result.world_size:,}" if result.world_size > 1 else ""
    shards = plural(result.num_shards, "shard")
    yield "source", f"{result.source}, {shards}; samples of {format_bytes(result.sample_bytes)}{batch}{ranks}"
    device = "no GPU" if result.device == "cpu" else result.device
    yield "machine", f"{plural(result.num_cpus, 'CPU')}, {device}; Python {result.python}, torch {result.torch}"
    turns = f", {result.repeats} times in turns: medians, and how far the repeats are from them"
    yield "measured", f"{result.seconds:g} s each{turns if result.repeats > 1 else ', once'}"


def _table(*titles: str) -> Table:
    """A table with narrow gaps; columns without a title are flushed left."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number and title else "left", no_wrap=True)
    return table


def _parts(result: BenchResult) -> Table:
    """Reading and decoding alone."""
    table = _table("  without a loader", "samples/s", "", "bytes/s", "CPU ms", "")
    for part in result.parts:
        is_limit = part.what == "decode" and part.samples_per_s == result.limit
        many = f"{part.processes} processes" if part.processes > 1 else plural(part.threads, "thread")
        table.add_row(
            f"  {'raw read' if part.what == 'read' else 'decode only'}, {many}",
            _rate(part.samples_per_s),
            _spread(part.samples_per_s),
            format_bytes(part.bytes_per_s),
            _ms(part.cpu_ms),
            "= the limit" if is_limit else "",
            style="bold" if is_limit else None,
        )
    return table


def _loaders(result: BenchResult) -> Table:
    """The loader, one setting a line."""
    has_busy = any(each.beside_python is not None for each in result.loaders)
    titles = ["  workers x\n  threads", "loader\nsamples/s", "", "of the\nlimit", "CPU\nms", "first\nbatch"]
    titles += ["beside\nPython", "beside\ntraining"] if has_busy else []
    table = _table(*titles, "head-\nspace")
    for each in result.loaders:
        workers, threads = each.setting
        is_best = each.setting == result.advice.setting
        busy = [_rate(each.beside_python), _rate(each.beside_training)] if has_busy else []
        table.add_row(
            f"{'*' if is_best else ' '} {workers} x {threads}{' now' if each.setting == result.configured else ''}",
            _rate(each.alone),
            _spread(each.alone),
            f"{each.limit_ratio.median:.0%}",
            _ms(each.cpu_ms),
            f"{each.first_batch_s.median:.2f} s",
            *busy,
            _rate(each.headspace),
            style="bold" if is_best else None,
        )
    return table


def _rate(rate: Measured | None) -> str:
    if rate is None:
        return ""
    return f"{rate.median:,.0f}" if rate.median >= 100 else f"{rate.median:,.1f}"


def _ms(cpu_ms: Measured | None) -> str:
    return "" if cpu_ms is None else f"{cpu_ms.median:#.3g}"


def _spread(rate: Measured) -> str:
    from wdskit.loader.bench_advice import spread_ratio

    return f"±{spread_ratio(rate):.0%}" if rate.least < rate.most else ""


def _print_advice(result: BenchResult) -> None:
    advice = result.advice
    print(f"\n{escape_lines(advice.yaml)}\n")
    reached = f"It reaches {advice.limit_ratio:.0%} of the decode limit"
    if advice.cpu_ratio is not None:
        reached += f" with {advice.cpu_ratio:.2f} times its CPU time a sample"
    if advice.setting == result.configured:
        reached += ", and is what the configuration comes to already"
    make_console().print(f"{reached}: {advice.reason}")
    for (workers, threads), reason in ((one.setting, one.reason) for one in result.refused):
        print(f"\nNot tried: workers: {workers}, threads: {threads}: {escape_lines(reason)}")
    for warning in advice.warnings:
        print(f"\nWarning: {escape_lines(warning)}")
