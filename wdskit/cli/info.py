"""`wdskit info`: what a shard or a folder of shards holds, in a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    by_name,
    details_table,
    escape,
    format_bytes,
    format_count,
    ignored_note,
    numbers_table,
    plural,
    print_json,
    print_tables,
    show_bytes,
)
from wdskit.cli.options import PathArgument

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.shards.listing import Summary

NUM_CLASSES_SHOWN = 8
NUM_VALUES_SHOWN = 5
MAX_VALUE_CHARS_SHOWN = 40


def info_command(
    path: PathArgument, json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
) -> None:
    """Show what a shard or a folder of shards holds.

    A folder with an index is summarized from it, without opening a shard. Shards without one, and a single shard, are
    read from end to end. PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.info

    Examples:
        wdskit info data/train
        wdskit info https://host/data/train-000000.tar
    """
    from wdskit.shards.listing import info

    with show_bytes("reading") as show:
        summary = info(path, progress=show)
    if json:
        between = dict(zip(("min", "median", "max"), summary.samples_per_shard, strict=True))
        rows = {"fields": by_name(summary.fields), "columns": by_name(summary.columns)}
        print_json({**vars(summary), "samples_per_shard": between, **rows})
        return
    tables = [details_table(_details(summary), summary.path)]
    if summary.fields:
        tables.append(_fields(summary))
    if summary.columns:
        tables.append(_columns(summary))
    print_tables(tables)
    if summary.num_others:
        print(f"Note: {plural(summary.num_others, 'other tar')} beside the index: not part of the data.")
    if summary.is_unfinished:
        print("Note: a run of `wdskit pack` here is unfinished. Run the same command again: it continues.")
    elif summary.kind == "folder" and summary.source == "scan":
        print(f"No index: every shard was read. `wdskit index {escape(path)}` creates one.")
    if summary.num_ignored:
        print(ignored_note(summary.num_ignored))


def _details(summary: Summary) -> Iterator[tuple[str, str]]:
    from wdskit.storage.urls import is_local

    yield "samples", format_count(summary.num_samples)
    mean = summary.num_bytes / summary.num_samples if summary.num_samples else 0
    yield "size", f"{format_bytes(summary.num_bytes)} ({format_bytes(mean)} a sample)"
    if summary.kind != "shard":
        yield "shards", format_count(summary.num_shards)
        least, median, most = map(format_count, summary.samples_per_shard)
        yield "samples a shard", f"{least} in each" if least == most else f"{least} to {most}, median {median}"
    if summary.classes is not None:
        shown = ", ".join(summary.classes[:NUM_CLASSES_SHOWN])
        more = ", ..." if len(summary.classes) > NUM_CLASSES_SHOWN else ""
        yield "classes", f"{format_count(len(summary.classes))}: {shown}{more}"
    if summary.source == "scan":
        yield "based on", "a full read"
    else:
        compared = "names and sizes of the files agree" if is_local(summary.path) else "its files were not checked"
        yield "based on", f"the folder's index; {compared}"


def _fields(summary: Summary) -> Table:
    """Return a table with one line per field. Samples and bytes are shown only if the shards were read."""
    is_folder = summary.kind != "shard"
    titles = ["field"]
    if is_folder:
        titles.append("shards")
    if summary.source == "scan":
        titles += ["samples", "mean size", "size"]
    rows = []
    for field in summary.fields:
        row = [field.name]
        if is_folder:
            row.append(_part(field.num_shards, summary.num_shards))
        if field.num_samples is not None and field.num_bytes is not None:
            mean = field.num_bytes / field.num_samples
            row += [_part(field.num_samples, summary.num_samples), format_bytes(mean), format_bytes(field.num_bytes)]
        rows.append(row)
    return numbers_table(titles, rows)


def _columns(summary: Summary) -> Table:
    """Return a table with one line per column of the index. A line has at most 5 values, with their sample counts."""
    has_problems = any(column.problem for column in summary.columns)
    rows = []
    for column in summary.columns:
        counts = list((column.values or {}).items())
        shown = ", ".join(f"{_value(value)} {format_count(count)}" for value, count in counts[:NUM_VALUES_SHOWN])
        shown += ", ..." if len(counts) > NUM_VALUES_SHOWN else ""
        row = [column.name, column.kind, column.source, shown or "-"]
        rows.append([*row, column.problem or ""] if has_problems else row)
    titles = ["column", "kind", "made from", "samples by value", *(["problem"] if has_problems else [])]
    return numbers_table(titles, rows, texts=titles[2:])


def _value(text: str) -> str:
    """Return the value of a column as the table shows it: `(none)` for "", and `...` after 40 characters."""
    return text[:MAX_VALUE_CHARS_SHOWN] + ("..." if len(text) > MAX_VALUE_CHARS_SHOWN else "") or "(none)"


def _part(count: int, total: int) -> str:
    return "all" if count == total else f"{format_count(count)} of {format_count(total)}"
