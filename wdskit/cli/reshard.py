"""`wdskit reshard`: write new shards from finished shards."""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.options import JsonOption
from wdskit.cli.pack import (
    Append,
    Columns,
    DryRun,
    MapName,
    MaxBytes,
    MaxSamples,
    NumShards,
    On,
    Part,
    Plugin,
    Shuffle,
    Split,
    Workers,
)
from wdskit.cli.pack_result import run_packing


def reshard_command(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Shards: a folder, a glob or braces, several joined by ::.")
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder for the shards, or s3://bucket/folder.")],
    *,
    where: Annotated[
        str | None, typer.Option(metavar="CONDITION", help='Keep samples by columns: "width >= 256".')
    ] = None,
    keep: Annotated[str, typer.Option(metavar="FIELDS", help="Keep only these fields: jpg,cls.")] = "",
    drop: Annotated[str, typer.Option(metavar="FIELDS", help="Leave out these fields: txt.")] = "",
    rename: Annotated[str, typer.Option(metavar="OLD=NEW", help="Rename fields: jpeg=jpg,class=cls.")] = "",
    map_name: MapName = None,
    plugin: Plugin = None,
    max_samples: MaxSamples = None,
    max_bytes: MaxBytes = None,
    num_shards: NumShards = None,
    shuffle: Shuffle = None,
    split: Split = None,
    columns: Columns = "",
    append: Append = False,
    part: Part = None,
    on: On = None,
    workers: Workers = None,
    dry_run: DryRun = False,
    json: JsonOption = False,
) -> None:
    """Write new shards from finished ones: merge, split, select, shuffle.

    The bytes of the fields are copied. The same sources and options give the same bytes. After a kill, run the same
    command again: it continues. In Python: wdskit.reshard

    Examples:
        wdskit reshard old new --shuffle 1 --max-bytes 500MB
        wdskit reshard "a/*.tar::b/*.tar" merged
        wdskit reshard data small --where "width >= 256" --drop txt
    """
    from wdskit.packing.pack import reshard

    run_packing(reshard, context)
