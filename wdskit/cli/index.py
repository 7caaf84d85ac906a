"""`wdskit index`: write the index of shards that another program wrote."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from wdskit.cli.console import escape, format_bytes, ignored_note, plural, print_json, show_bytes
from wdskit.cli.options import JsonOption, ReadersOption


def index_command(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder that holds the shards, local or in a bucket.")
    ],
    columns: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Columns to add: width,height,cls,json.score,json.caption.length. NAME=json.path sets the name.",
        ),
    ] = "",
    drop_columns: Annotated[str, typer.Option(metavar="NAMES", help="Columns to remove.")] = "",
    workers: ReadersOption = None,
    json: JsonOption = False,
) -> None:
    """Index a folder of shards that others wrote.

    Reads every *.tar from end to end, checks it, and writes index.json and an .idx beside each shard. If a shard is
    damaged, no index is written; `verify` lists all faults. `pack` writes the index itself.
    A column has one value per sample, for `where`, `weights`, `balance` and `bucketed` of a pipeline. Columns that the
    folder has already are made again.

    In Python: wdskit.index_folder, and wdskit.columns to read columns

    Examples:
        wdskit index data/train
        wdskit index data/train --columns width,height,cls,json.score
    """
    from wdskit.shards.index import index_folder

    start = time.perf_counter()
    with show_bytes("indexing") as show:
        report = index_folder(folder, columns=columns, drop_columns=drop_columns, workers=workers, progress=show)
    seconds = time.perf_counter() - start
    index = report.index
    num_bytes = sum(entry.num_bytes for entry in index.entries)
    if json:
        document = {"folder": folder, "num_shards": len(index.entries), "num_samples": index.num_samples}
        document |= {"num_bytes": num_bytes, "num_ignored": report.num_ignored}
        print_json({**document, "changed": report.changed, "columns": report.columns})
        return
    print(
        f"Indexed {escape(folder)}: {plural(len(index.entries), 'shard')}, {plural(index.num_samples, 'sample')}, "
        f"{format_bytes(num_bytes)} in {seconds:.1f} s ({format_bytes(num_bytes / seconds)}/s)."
    )
    if report.columns:
        print(f"Columns: {escape(', '.join(report.columns))}.")
    if report.changed:
        print(
            f"Note: {plural(len(report.changed), 'shard')} of the same size as before, but with other bytes, first "
            f"{escape(report.changed[0])}. If no program rewrote them, they are damaged."
        )
    if report.num_ignored:
        print(ignored_note(report.num_ignored))
