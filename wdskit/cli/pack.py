"""`wdskit pack`: images and tables into shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, print_json, show_packing, split_names
from wdskit.cli.options import (
    AlsoOption,
    BackgroundOption,
    DeriveOption,
    FormatOption,
    ImageFieldsOption,
    JsonOption,
    MaxBytesOption,
    MaxPixelsOption,
    MaxSamplesOption,
    MultipleOfOption,
    NumShardsOption,
    OnlyOption,
    OnOption,
    OrientOption,
    PartOption,
    PatternOption,
    QualityOption,
    ResizeModeOption,
    ResizeOption,
    RestartOption,
    SplitNameOption,
    SplitOption,
    ThreadsOption,
    UpscaleOption,
    ValidateOption,
)
from wdskit.cli.packed import print_result, to_json

if TYPE_CHECKING:
    from wdskit.packing.api import PackResult

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_size(text: str) -> int:
    """`200MB`, `1.5 GiB` or a number of bytes, as bytes."""
    number = text.strip().lower()
    digits = number.rstrip("kmgib ")
    unit = number[len(digits) :].strip()
    try:
        num_bytes = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is no size. Write 200MB, 1.5GiB or a number of bytes.") from None
    if not 0 < num_bytes < 1e15:
        raise typer.BadParameter(f"{text!r} is no size for a shard.")
    return int(num_bytes)


def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="What to pack: a folder, table, tar, ...; see above.",
            show_default=False,
        ),
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to write the shards to.", show_default=False)],
    max_samples: MaxSamplesOption = None,
    max_bytes: MaxBytesOption = None,
    num_shards: NumShardsOption = None,
    multiple_of: MultipleOfOption = None,
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Shuffle all rows with this seed. Default: keep their order."),
    ] = None,
    split: SplitOption = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that pack.")] = 1,
    on: OnOption = None,
    pattern: PatternOption = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out and list them in DEST/rejected.jsonl.")
    ] = False,
    keys: Annotated[
        str,
        typer.Option(
            metavar="given|clean|hashed", help="Keys: key column or path; with _ for odd characters; or a hash."
        ),
    ] = "given",
    append: Annotated[bool, typer.Option("--append", help="Add to a folder that is indexed already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is packed there.")] = False,
    restart: RestartOption = False,
    part: PartOption = None,
    only: OnlyOption = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="KIND", help="What SOURCE is, where its path does not say so; see above."),
    ] = None,
    sidecars: Annotated[
        str,
        typer.Option(metavar="EXT,...", help="Files beside an image that belong to its sample: json,txt,seg.png."),
    ] = "",
    files: Annotated[
        str, typer.Option(metavar="EXT,...", help="Files of a folder that are samples, instead of images: wav,flac.")
    ] = "",
    images: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of a COCO file's images. Default: the file's own."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Classes by number: a packed folder, classes.json, or a name a line."),
    ] = None,
    image_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Table's column with the image. Default: image, file_name, path, filepath."),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Table's column with the key. Default: key, else the image's path."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=COLUMN", help="Make a field of a column: txt=caption, cls=label. Again for more."),
    ] = None,
    allow_no_image: Annotated[
        bool, typer.Option("--allow-no-image", help="Pack rows of a table that have no image, too.")
    ] = False,
    exports: AlsoOption = None,
    split_name: SplitNameOption = "",
    validate: ValidateOption = None,
    resize: ResizeOption = None,
    resize_mode: ResizeModeOption = None,
    upscale: UpscaleOption = False,
    format_: FormatOption = None,
    quality: QualityOption = None,
    orient: OrientOption = False,
    background: BackgroundOption = None,
    image_fields: ImageFieldsOption = "",
    derive: DeriveOption = "",
    require: Annotated[
        str, typer.Option(metavar="FIELDS", help="Fields that each sample must have: jpg;png,json.")
    ] = "",
    missing: Annotated[
        str | None, typer.Option(metavar="error|warn|skip", help="Samples that lack one. Default: error.")
    ] = None,
    duplicates: Annotated[
        str, typer.Option(metavar="keep|report|drop", help="Samples with the same image, in DEST/duplicates.jsonl.")
    ] = "keep",
    max_pixels: MaxPixelsOption = None,
    threads: ThreadsOption = 1,
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

    In Python: wdskit.pack
    """
    from wdskit.errors import PackError
    from wdskit.limits import MAX_PIXELS
    from wdskit.packing.api import pack

    if source == "finish" and not Path(source).exists():
        hint = f"Did you mean `wdskit pack-finish {dest}`?"
        raise PackError(f"{source}: there is no such folder or file. {hint}")
    size = None if max_bytes is None else parse_size(max_bytes)
    with show_packing() as show:
        result = pack(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=size,
            num_shards=num_shards,
            multiple_of=multiple_of,
            shuffle=shuffle,
            split=split,
            workers=workers,
            on=on,
            pattern=pattern,
            skip_bad=skip_bad,
            keys=keys,
            append=append,
            dry_run=dry_run,
            overwrite=overwrite,
            restart=restart,
            part=part,
            only=only,
            from_=from_,
            sidecars=split_names(sidecars),
            files=split_names(files),
            fields=field or (),
            images=images,
            classes=classes,
            image_column=image_column,
            key_column=key_column,
            allow_no_image=allow_no_image,
            exports=split_names(exports),
            split_name=split_name,
            validate=validate,
            resize=resize,
            resize_mode=resize_mode,
            upscale=upscale,
            format=format_,
            quality=quality,
            orient=orient,
            background=background,
            image_fields=image_fields or (),
            derive=derive or (),
            require=require or (),
            missing=missing,
            duplicates=duplicates,
            max_pixels=MAX_PIXELS if max_pixels is None else max_pixels,
            threads=threads,
            progress=show,
        )
    _print(result, json=json)
    if part is not None and not json:
        print(f"That is part {escape(part)}. When all are through: wdskit pack-finish {escape(dest)}")


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
