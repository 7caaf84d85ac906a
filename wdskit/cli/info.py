"""`wdskit info`: what a shard or a folder of shards holds, in a few numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, ignored_note, make_console, print_json, show_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.shards.inspect import Summary

NUM_CLASSES_SHOWN = 8


def info_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a shard or a folder of shards holds.

    A folder with an index is told from it, without opening a shard. Shards without one, and a single shard, are read
    from end to end. PATH may be an http(s) URL.

    In Python: wdskit.info
    """
    from wdskit.shards.inspect import info

    with show_bytes("reading") as show:
        summary = info(path, progress=show)
    if json:
        print_json(_to_json(summary))
        return
    console = make_console()
    console.print(_numbers(summary))
    if summary.fields:
        console.print()
        console.print(_fields(summary))
    if summary.selections:
        console.print()
        console.print(_selections(summary))
    if summary.unfinished:
        print(f"Note: {escape(summary.unfinished)}")
    elif summary.kind == "folder" and summary.source == "scan":
        print(f"No index: every shard was read. `wdskit index {escape(path)}` makes one.")
    if summary.num_ignored:
        print(ignored_note(summary.num_ignored))


def _to_json(summary: Summary) -> dict[str, object]:
    least, median, most = summary.samples_per_shard
    return {
        "path": summary.path,
        "kind": summary.kind,
        "source": summary.source,
        "num_shards": summary.num_shards,
        "num_samples": summary.num_samples,
        "num_bytes": summary.num_bytes,
        "samples_per_shard": {"min": least, "median": median, "max": most},
        "fields": {
            field.name: {
                "num_shards": field.num_shards,
                "num_samples": field.num_samples,
                "num_bytes": field.num_bytes,
            }
            for field in summary.fields
        },
        "num_ignored": summary.num_ignored,
        "unfinished": summary.unfinished,
        "classes": None if summary.classes is None else list(summary.classes),
        "selections": {
            selection.name: {
                "num_samples": selection.num_samples,
                "recipe": selection.recipe,
                "problem": selection.problem,
            }
            for selection in summary.selections
        },
    }


def _numbers(summary: Summary) -> Table:
    """The first table: one fact a line."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from wdskit.storage.urls import is_local

    table = Table(
        box=box.SIMPLE,
        show_edge=False,
        show_header=False,
        title=Text(escape(summary.path), style="bold"),
        title_justify="left",
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("samples", format_count(summary.num_samples))
    table.add_row("size", _size(summary))
    if summary.kind != "shard":
        table.add_row("shards", format_count(summary.num_shards))
        table.add_row("samples a shard", _spread(summary))
    if summary.classes is not None:
        table.add_row("classes", _classes(summary.classes))
    source = "a full read"
    if summary.source == "index":
        was_compared = is_local(summary.path)
        source = "the folder's index; "
        source += "names and sizes of the files agree" if was_compared else "its files were not looked at"
    table.add_row("told by", source)
    return table


def _size(summary: Summary) -> str:
    mean = summary.num_bytes / summary.num_samples if summary.num_samples else 0
    return f"{format_bytes(summary.num_bytes)} ({format_bytes(mean)} a sample)"


def _spread(summary: Summary) -> str:
    least, median, most = map(format_count, summary.samples_per_shard)
    if least == most:
        return f"{least} in each"
    return f"{least} to {most}, median {median}"


def _classes(classes: tuple[str, ...]) -> str:
    shown = ", ".join(map(escape, classes[:NUM_CLASSES_SHOWN]))
    more = ", ..." if len(classes) > NUM_CLASSES_SHOWN else ""
    return f"{format_count(len(classes))}: {shown}{more}"


def _fields(summary: Summary) -> Table:
    """The second table: one field a line."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("field", style="bold", overflow="fold")
    if summary.kind != "shard":
        table.add_column("shards", justify="right", no_wrap=True)
    if summary.source == "scan":
        for title in ("samples", "mean size", "size"):
            table.add_column(title, justify="right", no_wrap=True)
    for field in summary.fields:
        cells = [escape(field.name)]
        if summary.kind != "shard":
            cells.append(_part(field.num_shards, summary.num_shards))
        if field.num_samples is not None and field.num_bytes is not None:
            mean = field.num_bytes / field.num_samples
            cells += [_part(field.num_samples, summary.num_samples), format_bytes(mean), format_bytes(field.num_bytes)]
        table.add_row(*cells)
    return table


def _selections(summary: Summary) -> Table:
    """The third table: one selection a line."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("selection", style="bold", no_wrap=True)
    for title in ("samples", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    has_problems = any(selection.problem for selection in summary.selections)
    if has_problems:
        table.add_column("problem", no_wrap=True)
    for selection in summary.selections:
        count = selection.num_samples
        share = "-"
        if count is not None and summary.num_samples and not selection.problem:
            share = f"{count / summary.num_samples:.2%}"
        cells = [selection.name, "-" if count is None else format_count(count), share]
        table.add_row(*cells, *([selection.problem or ""] if has_problems else []))
    return table


def _part(count: int, total: int) -> str:
    return "all" if count == total else f"{format_count(count)} of {format_count(total)}"
