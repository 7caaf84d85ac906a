"""`wdskit pack`: images and tables into shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wdskit.cli.console import escape, print_json, show_packing
from wdskit.cli.options import JsonOption, takes
from wdskit.cli.pack_result import print_result, to_json
from wdskit.packing.options import PackOptions
from wdskit.processes import usable_cores

if TYPE_CHECKING:
    from wdskit.packing.api import PackResult

_SLOW_S = 10
"""A run that takes longer in one process ends with a hint at `--workers`."""


@takes(PackOptions)
def pack_command(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What to pack: a folder, a table, ...; see above.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to write the shards to, or s3://bucket/folder.")],
    options: dict[str, Any],
    json: JsonOption = False,
) -> None:
    """Pack images and tables into shards.

    Writes shards (POSIX tar) with an .idx beside each, classes.json if folders are classes, and the index last. The
    same input gives the same bytes. A file gets its name only when it is complete and on disk. After a kill, run the
    same command again: it continues.

    SOURCE is a folder of images whose sub-folders are classes, a table (.jsonl, .csv, .tsv, .parquet), COCO annotations
    (.json), a data set saved by Hugging Face's datasets, tars, zips, or - for paths on standard input. Several
    .parquet, .tar or .zip files are given as a folder or a quoted pattern. Tars may be in a store:
    s3://bucket/old/part-{000000..000012}.tar, or a pattern or folder of a bucket.

    --from names the kind if the path does not show it: folder, table (JSON lines on standard input), parquet, coco, hf,
    tar, zip, list (one path per line).

    Images are copied byte for byte, unless --resize, --format or --orient changes them. Changed images keep their
    colour profile and EXIF, and only --max-samples limits their shards, because sizes are not known beforehand.
    --validate sets how each image is checked: magic compares its first bytes with its name, structure (the default)
    also reads the parts of its file, decode also all pixels. JSON is parsed, too.

    Several machines can share DEST: each packs one part, for example --part $SLURM_ARRAY_TASK_ID/8, and
    `wdskit pack-finish DEST` then writes the index.

    If DEST is in a bucket (s3://, gs://, az://), each shard is uploaded when it is filled, and the index last.

    In Python: wdskit.pack

    Examples:
        wdskit pack photos data/train
        wdskit pack labels.csv data/train --field cls=label --split train=.9,val=.1
        find photos -name '*.jpg' | wdskit pack - data/train
    """
    from wdskit.errors import PackError
    from wdskit.packing.api import pack

    if context.args:  # the shell has replaced a pattern by names
        num = len(context.args) + 2
        msg = f"pack takes one SOURCE and one DEST, but got {num} names: {source} {dest} ... {context.args[-1]}."
        raise typer.BadParameter(
            f"{escape(msg)} Name the folder, quote a pattern ('*.tar'), or send the names: "
            "find FOLDER -name '*.jpg' | wdskit pack - DEST"
        )

    if source == "finish" and not Path(source).exists():
        hint = f"Did you mean `wdskit pack-finish {dest}`?"
        raise PackError(f"{source}: there is no such folder or file. {hint}")
    with show_packing() as show:
        result = pack(source, dest, **options, progress=show)
    _print(result, json=json, is_part="part" in options)
    num_cpus = usable_cores()
    if (
        result.seconds >= _SLOW_S
        and options.get("workers", 1) == 1 < num_cpus
        and "on" not in options
        and result.plan
        and not json
    ):
        print(f"It ran in one process. `--workers {num_cpus}` uses all CPUs of this machine.")
    if "part" in options and not json:
        print(f"This is part {escape(options['part'])}. When all parts are done: wdskit pack-finish {escape(dest)}")


def pack_finish_command(
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder that holds the shards of all parts.")],
    json: JsonOption = False,
) -> None:
    """Write the index of a folder that was packed in parts.

    The index has the same bytes as that of a single run. If shards are missing, the parts to run again are listed.

    In Python: wdskit.finish_pack

    Examples:
        wdskit pack photos data/train --part 0/2
        wdskit pack photos data/train --part 1/2
        wdskit pack-finish data/train
    """
    from wdskit.packing.api import finish_pack

    _print(finish_pack(dest), json=json)


def _print(result: PackResult, *, json: bool, is_part: bool = False) -> None:
    if json:
        print_json(to_json(result))
    else:
        print_result(result, is_part=is_part)
