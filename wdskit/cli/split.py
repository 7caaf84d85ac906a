"""`wdskit split`: train, val and test of a folder, as a column."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from wdskit.cli.console import (
    by_name,
    escape,
    format_count,
    numbers_table,
    plural,
    print_json,
    print_tables,
    show_bytes,
)
from wdskit.cli.options import JsonOption, ReadersOption


def split_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Local folder with its index.")],
    shares: Annotated[
        str, typer.Argument(metavar="SHARES", help="Names and shares that add up to 1: train=0.8,val=0.1,test=0.1")
    ],
    by: Annotated[
        str,
        typer.Option(
            metavar="key|json:PATH",
            help="Split by the key, or by a value of the JSON (json:patient.id), whose samples stay together.",
        ),
    ] = "key",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="A different seed gives a different split.")] = 0,
    missing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The split for samples without that value. Default: such samples are an error."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a split that was made differently.")] = False,
    workers: ReadersOption = None,
    json: JsonOption = False,
) -> None:
    """Split a folder into train, val and test.

    Writes the column `split` beside the index, which `exact: {shards: ..., split: train}` reads; the shards do not
    change. A sample's split depends only on the seed, the shares, and its key or value: it stays the same when shards
    are added, reordered or packed again.
    After such a change, run the same command again.

    In Python: wdskit.split

    Examples:
        wdskit split data/train train=.8,val=.1,test=.1
        wdskit split data/train train=.9,val=.1 --by json:patient.id
    """
    from wdskit.shards.split import split

    start = time.perf_counter()
    with show_bytes("splitting") as show:
        report = split(
            folder, shares, by=by, seed=seed, missing=missing, overwrite=overwrite, workers=workers, progress=show
        )
    if json:
        print_json({"folder": folder, "num_samples": report.num_samples, "splits": by_name(report.parts)})
        return
    seconds = time.perf_counter() - start
    print(f"Split {escape(folder)} by {escape(by)}: {plural(report.num_samples, 'sample')} in {seconds:.1f} s.")
    print()
    rows = []
    for part in report.parts:
        share = part.num_samples / report.num_samples
        rows.append([part.name, format_count(part.num_samples), f"{share:.2%}", f"{part.wanted_ratio:.2%}"])
    print_tables([numbers_table(["split", "samples", "share", "wanted"], rows)])
