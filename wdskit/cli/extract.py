"""`wdskit extract`: samples as files."""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, plural, print_json
from wdskit.cli.options import EmptyFolderOption, JsonOption, PathArgument


def extract_command(
    path: PathArgument,
    to: EmptyFolderOption,
    fields: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME", help="Only this field. Repeatable.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="Only this sample. Repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after this many samples.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the fields of samples as files called KEY.FIELD.

    Nothing is written outside of DEST: a name that is not a plain relative path is listed and left out.

    Exit code: 0, or 1 if a name was left out, or if no sample has a given key or field.

    In Python: wdskit.extract

    Examples:
        wdskit extract data/train --to photos --limit 10
        wdskit extract data/train --to photos --key cat/000003 --field jpg
    """
    from wdskit.shards.extract import extract

    done = extract(path, to, fields=fields or (), keys=keys or (), limit=limit)
    code = 1 if done.num_refused or done.missing_keys or done.missing_fields else 0
    if json:
        print_json(done)
        raise typer.Exit(code)
    for name, reason in done.refused:
        print(f"left out: {escape(repr(name))}: {reason}")
    if done.num_refused > len(done.refused):
        print(f"left out: {format_count(done.num_refused - len(done.refused))} more.")
    for what, names in (("key", done.missing_keys), ("field", done.missing_fields)):
        for name in names:
            print(f"not found: no sample has the {what} {escape(repr(name))}")
    print(
        f"Extracted {escape(str(done.folder))}: {plural(done.num_samples, 'sample')}, "
        f"{plural(done.num_files, 'file')}, {format_bytes(done.num_bytes)}."
    )
    raise typer.Exit(code)
