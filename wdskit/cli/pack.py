"""`wdskit pack`: images and tables into shards."""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.console import escape
from wdskit.cli.options import JsonOption
from wdskit.cli.pack_result import run_packing

MaxSamples = Annotated[int | None, typer.Option(metavar="N", min=1, help="Most samples in a shard. Default: 10,000.")]
MaxBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Most bytes of a shard: 200MB. Default: 1GB.")]
NumShards = Annotated[int | None, typer.Option(metavar="N", min=1, help="Exactly N shards of equal size.")]
Shuffle = Annotated[int | None, typer.Option(metavar="SEED", min=0, help="Shuffle with this seed.")]
Split = Annotated[str | None, typer.Option(metavar="SHARES", help="Shards for each split: train=0.9,val=0.1.")]
Columns = Annotated[str, typer.Option(metavar="NAMES", help="Columns beside the index: width,cls,json.a.")]
Append = Annotated[bool, typer.Option("--append", help="Add shards to those in DEST.")]
MapName = Annotated[str | None, typer.Option("--map", metavar="NAME", help="Change samples by this function.")]
Plugin = Annotated[
    list[str] | None, typer.Option("--plugin", metavar="PKG", help="Module that registers it. Repeatable.")
]
Part = Annotated[str | None, typer.Option(metavar="I/N", help="Fill part I of N only. Run without it to end.")]
On = Annotated[str | None, typer.Option(metavar="ray", help="Fill on a Ray cluster, or ray://HOST:PORT.")]
Workers = Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes. Default: all cores.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be written, but write nothing.")]


def pack_command(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What to pack; see above.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder, or s3://bucket/folder.")],
    *,
    image: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the image. Default: image, ...")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column with the key. Default: key, or path.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="FIELD=COLUMN", help="Further fields: --field cls=label. Repeatable."),
    ] = None,
    sidecars: Annotated[str, typer.Option(metavar="EXT,...", help="Files beside an image: json,txt,seg.png.")] = "",
    files: Annotated[str, typer.Option(metavar="EXT,...", help="Files to pack in place of images: wav,flac.")] = "",
    images: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the images of COCO annotations.")] = None,
    classes: Annotated[
        str | None, typer.Option(metavar="FILE", help="Class names: a packed folder, or a list.")
    ] = None,
    keys: Annotated[str, typer.Option(metavar="KIND", help="clean: odd characters become _; given; hashed.")] = "clean",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out bad rows; rejected.jsonl lists them.")
    ] = False,
    validate: Annotated[
        str, typer.Option(metavar="LEVEL", help="Check images: none, structure, decode.")
    ] = "structure",
    resize: Annotated[int | None, typer.Option(metavar="N", min=1, help="Shrink the shorter side to N pixels.")] = None,
    keep_json: Annotated[bool, typer.Option("--keep-json", help="No number in JSON describes the pixels.")] = False,
    format: Annotated[  # noqa: A002 (the name of the option)
        str | None, typer.Option(metavar="jpg|webp|png", help="New format of images. Default: theirs.")
    ] = None,
    quality: Annotated[
        int | None, typer.Option(metavar="1..100", min=1, max=100, help="Of new images. Default: 90.")
    ] = None,
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
    """Pack images and tables into shards.

    SOURCE is a folder of images (a sub-folder is a class), a table (.csv .tsv .jsonl .parquet, a .json array), COCO
    annotations (.json), or tars: a file, a folder, a quoted pattern, also in a store. After a kill, run the same
    command again: it continues. In Python: wdskit.pack

    Examples:
        wdskit pack photos data/train
        wdskit pack labels.csv data --field cls=label --split train=.9,val=.1
    """
    from wdskit.packing.pack import pack

    if context.args:  # the shell has replaced a pattern by names
        names = f"{len(context.args) + 2} names: {source} {dest} ... {context.args[-1]}"
        msg = f"pack takes one SOURCE and one DEST, but got {names}. Name the folder, or quote a pattern: '*.tar'."
        raise typer.BadParameter(escape(msg))
    run_packing(pack, context)
