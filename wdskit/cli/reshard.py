"""`wdskit reshard`: finished shards into others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import format_bytes, format_count, plural, print_json, print_summary, show_packing, split_names
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
from wdskit.cli.pack import parse_size
from wdskit.cli.packed import WAS_DONE, format_names, format_rates

if TYPE_CHECKING:
    from wdskit.packing.reshard import ReshardResult
    from wdskit.packing.select import SelectResult


def reshard_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Shards: a folder, a glob or braces, several joined by ::.", show_default=False
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Folder to write the shards to; none with --selection.", show_default=False
        ),
    ] = None,
    max_samples: MaxSamplesOption = None,
    max_bytes: MaxBytesOption = None,
    num_shards: NumShardsOption = None,
    multiple_of: MultipleOfOption = None,
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Shuffle all samples with this seed. Default: keep their order."),
    ] = None,
    filter: Annotated[  # noqa: A002 (the option's name)
        str | None,
        typer.Option(metavar="EXPR", help='Keep samples for which this holds: "json.width >= 256 and cls in (1, 2)".'),
    ] = None,
    missing: Annotated[
        str, typer.Option(metavar="error|skip", help="Samples that lack what the filter asks for: stop, or leave out.")
    ] = "error",
    sample: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Keep a share of the samples, by a hash of the key: 10%."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another seed keeps another share.")] = 0,
    keep: Annotated[str | None, typer.Option(metavar="FIELDS", help="Keep these fields only: jpg,cls.")] = None,
    drop: Annotated[str | None, typer.Option(metavar="FIELDS", help="Drop these fields: txt.")] = None,
    rename: Annotated[str | None, typer.Option(metavar="OLD=NEW", help="Rename fields: jpeg=jpg,class=cls.")] = None,
    keys: Annotated[
        str, typer.Option(metavar="given|hashed", help="Keys as they are, or a hash of each for those that do not fit.")
    ] = "given",
    duplicate_keys: Annotated[
        str, typer.Option(metavar="error|first", help="A key that comes twice: stop, or keep its first sample.")
    ] = "error",
    check: Annotated[
        str,
        typer.Option(
            metavar="headers|sha256", help="sha256: compare all bytes of the sources with their index before writing."
        ),
    ] = "headers",
    selection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Write no shards: store what is kept as a selection beside the index (`split: NAME`)."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is packed in DEST, or another selection of that name.")
    ] = False,
    restart: RestartOption = False,
    exports: AlsoOption = None,
    split_name: SplitNameOption = "",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that read and write.")] = 1,
    split: SplitOption = None,
    on: OnOption = None,
    part: PartOption = None,
    only: OnlyOption = None,
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
    max_pixels: MaxPixelsOption = None,
    threads: ThreadsOption = 1,
    pattern: PatternOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Write finished shards anew: merge, split, re-size, shuffle, filter.

    Samples are copied by ranges of bytes, and nothing is decoded unless --validate, --resize, --format, --orient or
    --derive asks for that. The same sources and options give the same bytes. A file has its name only once it is whole
    and on disk; after a kill, run the same command again. Sources without an index are read by the strict reader first,
    and get headers that every reader takes. By default no image is looked at (--validate none), or, where images are
    changed, each is checked to be whole (structure).

    In Python: wdskit.reshard, and wdskit.select for --selection
    """
    from wdskit.limits import MAX_PIXELS
    from wdskit.packing.reshard import reshard
    from wdskit.packing.select import select

    if selection is not None:
        others = {
            "DEST": dest, "--max-samples": max_samples, "--max-bytes": max_bytes, "--num-shards": num_shards,
            "--multiple-of": multiple_of, "--shuffle": shuffle, "--keep": keep, "--drop": drop, "--rename": rename,
            "--keys": keys != "given" or None, "--duplicate-keys": duplicate_keys != "error" or None,
            "--pattern": pattern, "--dry-run": dry_run or None, "--restart": restart or None, "--export": also,
            "--split-name": split_name or None, "--split": split, "--on": on, "--part": part, "--only": only,
            "--validate": validate, "--resize": resize, "--format": format_, "--orient": orient or None,
            "--derive": derive or None,
        }  # fmt: skip
        ignored = [option for option, value in others.items() if value is not None]
        if ignored:
            raise typer.BadParameter(f"{ignored[0]} says how shards are written, and --selection writes none.")
        with show_packing() as show:
            selected = select(
                source,
                selection,
                filter=filter,
                missing=missing,
                sample=sample,
                seed=seed,
                check=check,
                overwrite=overwrite,
                workers=workers,
                progress=show,
            )
        if json:
            print_json({**vars(selected), "folders": [str(folder) for folder in selected.folders]})
            return
        print(f"Selected {format_count(selected.num_samples)} of {_read(selected)} as {selection}.")
        for reason, count in _left_out(selected).items():
            if count:
                print(f"{reason.replace('_', ' ')}: {format_count(count)}")
        return
    if dest is None:
        raise typer.BadParameter("name DEST, the folder to write to, or --selection.")
    with show_packing() as show:
        result = reshard(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=None if max_bytes is None else parse_size(max_bytes),
            num_shards=num_shards,
            multiple_of=multiple_of,
            shuffle=shuffle,
            filter=filter,
            missing=missing,
            sample=sample,
            seed=seed,
            keep=keep,
            drop=drop,
            rename=rename,
            keys=keys,
            duplicate_keys=duplicate_keys,
            check=check,
            workers=workers,
            split=split,
            on=on,
            part=part,
            only=only,
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
            max_pixels=MAX_PIXELS if max_pixels is None else max_pixels,
            threads=threads,
            pattern=pattern,
            dry_run=dry_run,
            overwrite=overwrite,
            restart=restart,
            exports=split_names(exports),
            split_name=split_name,
            progress=show,
        )
    if json:
        print_json(_to_json(result, dry_run=dry_run))
    else:
        print_summary(_facts(result, dry_run=dry_run), _notes(result, dry_run=dry_run))


def _read(result: ReshardResult | SelectResult) -> str:
    return f"{plural(result.num_source_samples, 'sample')} in {plural(result.num_source_shards, 'shard')}"


def _left_out(result: ReshardResult | SelectResult) -> dict[str, int]:
    """How many samples did not stay, by the reason."""
    return {
        "sampled_out": result.num_sampled_out,
        "filtered": result.num_filtered,
        "missing": result.num_missing,
        "duplicates": getattr(result, "num_duplicates", 0),
    }


def _to_json(result: ReshardResult, *, dry_run: bool) -> dict[str, object]:
    return {
        "folder": str(result.folder),
        "dry_run": dry_run,
        "was_done": result.was_done,
        "num_source_shards": result.num_source_shards,
        "num_source_samples": result.num_source_samples,
        "num_samples": result.num_samples,
        **{f"num_{reason}": count for reason, count in _left_out(result).items()},
        "num_copied": result.num_copied,
        "num_ignored": result.num_ignored,
        "num_bytes": result.num_bytes,
        "shards": [shard._asdict() for shard in result.shards],
    }


def _facts(result: ReshardResult, *, dry_run: bool) -> Iterator[tuple[str, str]]:
    """What was written, and where every other sample is."""
    yield "folder", str(result.folder)
    yield "read", _read(result)
    for reason, count in _left_out(result).items():
        if count:
            yield reason.replace("_", " "), format_count(count)
    anew = result.num_samples - result.num_copied
    form = f"{format_count(anew)} with new headers" if anew else "copied as they are"
    yield "planned" if dry_run else "written", f"{format_count(result.num_samples)}, {form}"
    least, most = (pick(shard.num_samples for shard in result.shards) for pick in (min, max))
    sizes = f"{plural(most, 'sample')} each" if least == most else f"{format_count(least)} to {plural(most, 'sample')}"
    yield "shards", f"{format_names(result.shards)}, {sizes}"
    yield "bytes", format_bytes(result.num_bytes)
    if not dry_run and not result.was_done:
        yield "time", format_rates(result)


def _notes(result: ReshardResult, *, dry_run: bool) -> Iterator[str]:
    if result.was_done:
        yield WAS_DONE.format(result.folder)
    if result.num_ignored:
        yield f"Note: {plural(result.num_ignored, 'member')} in no sample, left out."
    if result.classes_lost:
        yield f"Note: {result.classes_lost}"
    if dry_run:
        yield "Nothing was written (--dry-run)."
