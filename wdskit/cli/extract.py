"""`wdskit extract`: samples as files."""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, plural


def extract_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.", show_default=False)],
    to: Annotated[
        str, typer.Option("--to", metavar="DEST", help="Folder to write to, empty or not there.", show_default=False)
    ],
    fields: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME", help="Only this field. Repeatable.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Only this sample. Repeatable.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after so many samples.", show_default=False)
    ] = None,
) -> None:
    """Write the fields of samples as files called KEY.FIELD.

    Nothing is written outside of DEST: a name that is no plain relative path is listed and left out, with exit code 1.

    In Python: wdskit.shards.extracting.extract
    """
    from wdskit.shards.extracting import extract

    done = extract(path, to, fields=fields or (), keys=keys or (), limit=limit)
    for name, reason in done.refused:
        print(f"left out: {escape(repr(name))}: {reason}")
    if done.num_refused > len(done.refused):
        print(f"left out: {format_count(done.num_refused - len(done.refused))} more.")
    print(
        f"Extracted {escape(str(done.folder))}: {plural(done.num_samples, 'sample')}, "
        f"{plural(done.num_files, 'file')}, {format_bytes(done.num_bytes)}."
    )
    raise typer.Exit(1 if done.num_refused else 0)
