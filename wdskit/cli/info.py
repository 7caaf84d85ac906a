"""`wdskit info`: what a shard or a folder of shards holds."""

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
from wdskit.cli.options import JsonOption, PathArgument

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.shards.info import ColumnSummary, Summary

NUM_CLASSES_SHOWN = 8
NUM_VALUES_SHOWN = 5
MAX_VALUE_CHARS_SHOWN = 40


def info_command(
    path: PathArgument,
    num: Annotated[
        int, typer.Option(metavar="N", min=0, help="List the first N shards of a folder, or samples of a shard.")
    ] = 5,
    where: Annotated[
        str | None,
        typer.Option(metavar="CONDITION", help="Count classes and values of columns only where: 'width >= 256'."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what a shard or a folder of shards holds.

    Counts samples, fields, classes and the values of columns, and lists the shards of a folder or the samples of a
    shard: number, byte offset, key, fields with sizes. A folder with an index is described from it, without opening a
    shard. Other shards are read from end to end. PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.info

    Examples:
        wdskit info data/train --where 'width >= 256 and cls in [1, 2]'
        wdskit info data/train/train-000000.tar --num 20
        wdskit info https://host/data/train-000000.tar
    """
    from wdskit.shards.info import info

    with show_bytes("reading") as show:
        summary = info(path, num=num, where=where, progress=show)
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
    if summary.shards or summary.samples:
        tables.append(_rows(summary))
    print_tables(tables)
    total = summary.num_samples if summary.kind == "shard" else summary.num_shards
    if num and (num_more := total - len(summary.shards or summary.samples)):
        print(f"... and {format_count(num_more)} more: --num {total}")
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
    if summary.num_matching is not None:
        yield "matching", f"{format_count(summary.num_matching)}: classes and columns are counted for them"
    mean = summary.num_bytes / summary.num_samples if summary.num_samples else 0
    yield "size", f"{format_bytes(summary.num_bytes)} ({format_bytes(mean)} a sample)"
    if summary.kind != "shard":
        yield "shards", format_count(summary.num_shards)
        least, median, most = map(format_count, summary.samples_per_shard)
        yield "samples a shard", f"{least} in each" if least == most else f"{least} to {most}, median {median}"
    counts = summary.class_counts or {}
    if names := [*dict.fromkeys([*(summary.classes or ()), *counts])]:
        shown = ", ".join(_counted(name, counts.get(name, 0) if counts else None) for name in names[:NUM_CLASSES_SHOWN])
        yield "classes", f"{format_count(len(names))}: {shown}{', ...' if len(names) > NUM_CLASSES_SHOWN else ''}"
    if summary.source == "scan":
        yield "based on", "a full read"
    else:
        compared = "names and sizes of the files agree" if is_local(summary.path) else "its files were not checked"
        yield "based on", f"the folder's index; {compared}"


def _fields(summary: Summary) -> Table:
    """Return a table with one line per field. Samples and bytes are shown only if the shards were read."""
    titles = ["field", "shards"] + ["samples", "mean size", "size"] * (summary.source == "scan")
    rows = []
    for field in summary.fields:
        rows.append([field.name, _part(field.num_shards, summary.num_shards)])
        if field.num_samples is not None and field.num_bytes is not None:
            sizes = [format_bytes(field.num_bytes / field.num_samples), format_bytes(field.num_bytes)]
            rows[-1] += [_part(field.num_samples, summary.num_samples), *sizes]
    return numbers_table(titles, rows)


def _columns(summary: Summary) -> Table:
    """Return a table with one line per column of the index. A line has at most 5 values, with their sample counts."""
    rows = [[one.name, one.kind, one.source, _values(one)] for one in summary.columns]
    return numbers_table(
        ["column", "kind", "made from", "samples by value"], rows, texts=["made from", "samples by value"]
    )


def _values(column: ColumnSummary) -> str:
    if column.values is None:
        return "-" if column.limits is None else "{:,.6g} to {:,.6g}".format(*column.limits)
    shown = ", ".join(_counted(*each) for each in [*column.values.items()][:NUM_VALUES_SHOWN])
    return f"{shown}, ..." if len(column.values) > NUM_VALUES_SHOWN else shown or "-"


def _counted(name: str, count: int | None) -> str:
    """Return a value and its number of samples: `cat 12`; `(none)` for "", and `...` after 40 characters."""
    shown = name[:MAX_VALUE_CHARS_SHOWN] + ("..." if len(name) > MAX_VALUE_CHARS_SHOWN else "") or "(none)"
    return shown if count is None else f"{shown} {format_count(count)}"


def _rows(summary: Summary) -> Table:
    """Return a table of the first shards of a folder, or of the first samples of a shard."""
    if summary.shards:
        shards = [
            [one.name, format_count(one.num_samples), format_bytes(one.num_bytes), " ".join(one.fields)]
            for one in summary.shards
        ]
        return numbers_table(["shard", "samples", "size", "fields"], shards, texts=["fields"])
    samples = []
    for one in summary.samples:
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in one.fields.items())
        samples.append([one.key, str(one.number), str(one.offset), sizes])
    return numbers_table(["key", "number", "offset", "fields"], samples, texts=["fields"])


def _part(count: int, total: int) -> str:
    return "all" if count == total else f"{format_count(count)} of {format_count(total)}"
