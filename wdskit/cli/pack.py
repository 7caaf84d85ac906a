"""`wdskit pack`: images and tables into shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, print_json, show_packing
from wdskit.cli.options import JsonOption, takes
from wdskit.cli.packed import print_result, to_json
from wdskit.packing.options import PackOptions

if TYPE_CHECKING:
    from wdskit.packing.api import PackResult


@takes(PackOptions)
def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="What to pack: a folder, table, tar, ...; see above.",
            show_default=False,
        ),
    ],
    dest: Annotated[
        str,
        typer.Argument(
            metavar="DEST", help="Folder to write the shards to, or s3://bucket/folder.", show_default=False
        ),
    ],
    options: PackOptions,
    json: JsonOption = False,
) -> None:
    """Pack images and tables into shards.

    Writes shards (POSIX tar) with an .idx beside each, classes.json where folders are classes, and last index.bin and
    index.json. The same input gives the same bytes. A file has its name only once it is whole and on disk; after a
    kill, run the same command again.

    SOURCE is a folder of images (a sub-folder is a class), a table (.jsonl, .csv, .tsv, .parquet), COCO annotations
    (.json), a folder that Hugging Face's datasets saved, tars or zips, or - for paths on stdin. Of .parquet, .tar and
    .zip a folder or a pattern, too.

    --from says what it is where its path does not: folder, table (on stdin JSONL), parquet, coco, hf, tar, zip, list
    (paths, one a line), list0 (as find -print0 writes them).

    On several machines that share DEST, each does a part, as in a Slurm array 0-7 with --part $SLURM_ARRAY_TASK_ID/8.
    When all are through, `wdskit pack-finish DEST` writes the index.

    Images pass byte for byte, unless --resize, --format or --orient changes them; those that are right already pass
    then, too. Colour profile and EXIF are kept. By default each is checked to be a whole file of the format
    that its name says (structure); magic looks at its first bytes only, decode also at its pixels. JSON is parsed.
    Shards of changed samples go by count.

    A DEST in a bucket (s3://, gs://, az://) gets shard by shard as they are filled, its index last.

    In Python: wdskit.pack
    """
    from wdskit.errors import PackError
    from wdskit.packing.api import pack

    if source == "finish" and not Path(source).exists():
        hint = f"Did you mean `wdskit pack-finish {dest}`?"
        raise PackError(f"{source}: there is no such folder or file. {hint}")
    with show_packing() as show:
        result = pack(source, dest, options=options, progress=show)
    _print(result, json=json)
    if options.part is not None and not json:
        print(f"That is part {escape(options.part)}. When all are through: wdskit pack-finish {escape(dest)}")


def pack_finish_command(
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder whose shards are there.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Write the index of a folder whose shards `wdskit pack --part` has filled in parts.

    It is the index, byte for byte, that one run would have written. If shards are missing, it names the parts to run
    again.

    In Python: wdskit.finish_pack
    """
    from wdskit.packing.api import finish_pack

    _print(finish_pack(dest), json=json)


def _print(result: PackResult, *, json: bool) -> None:
    if json:
        print_json(to_json(result))
    else:
        print_result(result)
