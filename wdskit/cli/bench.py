"""`wdskit bench`: the speed of loaders with different numbers of workers and threads, compared with a bare loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import make_console, numbers_table, plural, print_json, print_tables, show_steps
from wdskit.cli.options import ConfigArgument, JsonOption, OverridesOption, PipelineOption, Plugins, import_plugins

if TYPE_CHECKING:
    from wdskit.benchmark import BenchResult


def bench_command(
    config: ConfigArgument,
    pipeline: PipelineOption = None,
    overrides: OverridesOption = None,
    plugins: Plugins = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Worker processes to try. Default: as configured."),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Threads to try with each number of workers. Default: as configured."),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Length of each measurement.")] = 1.0,
    repeats: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Number of times that each measurement is made."),
    ] = 3,
    json: JsonOption = False,
) -> None:
    """Measure this machine with several workers and threads.

    Loads the shards of CONFIG on the CPUs that this process may use; the source must have an index. `taskset -c 0-7`
    limits it to eight CPUs, as for one rank of several on a node. The bare loop makes the same batches in one thread,
    without a loader.

    In Python: wdskit.bench

    Examples:
        wdskit bench train.yaml --pipeline train --workers 0,2,4 --threads 1,2
        taskset -c 0-7 wdskit bench train.yaml --workers 1,2,4 --threads 1,2,4
    """
    tried_workers = _parse_numbers("--workers", workers, 0)
    tried_threads = _parse_numbers("--threads", threads, 1)
    import_plugins(plugins)
    from wdskit.benchmark import bench

    with show_steps() as progress:
        result = bench(
            config,
            pipeline=pipeline,
            overrides=overrides or [],
            workers=tried_workers,
            threads=tried_threads,
            seconds=seconds,
            repeats=repeats,
            progress=progress,
        )
    if json:
        print_json(result)
    else:
        show_result(result)


def _parse_numbers(option: str, text: str | None, least: int) -> list[int] | None:
    """Return the numbers in a text such as `0,1,4`; None if `text` is None.

    Raises:
        typer.BadParameter: `text` is not a list of whole numbers of at least `least`. The message names `option`.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and len(word) < 6 and int(word) >= least for word in words):
        msg = f"{text!r} is not a list of whole numbers, each {least} or more: `{least},{least + 1},4`."
        raise typer.BadParameter(msg, param_hint=option)
    return [int(word) for word in words]


def show_result(result: BenchResult) -> None:
    """Print a result as a table."""
    console = make_console()
    repeats = f"; medians of {result.repeats}" if result.repeats > 1 else ""
    console.print(f"Batches of {result.batch:,}, on {plural(result.num_cpus, 'CPU')}{repeats}\n")
    rows = [("bare loop", _rate(result.bare_samples_per_s), "")]
    for each in result.loaders:
        setting = "{} x {}".format(*each.setting) + (" now" if each.setting == result.configured else "")
        rows.append((setting, _rate(each.samples_per_s), f"{each.first_batch_s:.2f} s"))
    print_tables([numbers_table(("workers x threads", "samples/s", "first batch"), rows)])


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"
