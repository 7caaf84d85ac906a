"""`wdskit reshard`: finished shards into others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wdskit.cli.console import escape, format_bytes, format_count, make_console, plural, print_json, split_kinds
from wdskit.cli.pack import parse_size
from wdskit.cli.packed import WAS_DONE
from wdskit.cli.progress import show_progress, told_when_stopped
from wdskit.cli.shared_options import AlsoOption, SplitNameOption

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
    max_samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most samples in a shard. Default: 10000.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of a shard's file: 200MB, 1GiB. Default: 1GB.")
    ] = None,
    num_shards: Annotated[int | None, typer.Option(metavar="N", min=1, help="So many shards, all equal.")] = None,
    multiple_of: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="A multiple of N shards, all equal: ranks x workers.")
    ] = None,
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
    restart: Annotated[
        bool, typer.Option("--restart", help="Remove what a run has written that was stopped, and begin anew.")
    ] = False,
    also: AlsoOption = None,
    split_name: SplitNameOption = "",
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that read and write.")] = 1,
    pattern: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Names of the shards. Default: DEST's name and -%06d.tar."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Write finished shards anew: merge, split, re-size, shuffle, filter.

    Samples are copied by ranges of bytes, nothing is decoded. The same sources and options give the same bytes. A file
    has its name only once it is whole and on disk; after a kill, run the same command again. Sources without an index
    are read by the strict reader first, and get headers that every reader takes.

    In Python: wdskit.reshard, and wdskit.select for --selection
    """
    from wdskit.packing.reshard import reshard

    if selection is not None:
        others = {
            "DEST": dest, "--max-samples": max_samples, "--max-bytes": max_bytes, "--num-shards": num_shards,
            "--multiple-of": multiple_of, "--shuffle": shuffle, "--keep": keep, "--drop": drop, "--rename": rename,
            "--keys": keys != "given" or None, "--duplicate-keys": duplicate_keys != "error" or None,
            "--pattern": pattern, "--dry-run": dry_run or None, "--restart": restart or None, "--also": also,
            "--split-name": split_name or None,
        }  # fmt: skip
        ignored = [option for option, value in others.items() if value is not None]
        if ignored:
            raise typer.BadParameter(f"{ignored[0]} says how shards are written, and --selection writes none.")
        how = {"filter": filter, "missing": missing, "sample": sample}
        _select(source, selection, how, seed=seed, check=check, overwrite=overwrite, workers=workers, json=json)
        return
    if dest is None:
        raise typer.BadParameter("name DEST, the folder to write to, or --selection.")
    with told_when_stopped(), show_progress() as show:
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
            pattern=pattern,
            dry_run=dry_run,
            overwrite=overwrite,
            restart=restart,
            also=split_kinds(also),
            split_name=split_name,
            progress=show,
        )
    if json:
        print_json(_to_json(result, dry_run=dry_run))
    else:
        _print_summary(result, dry_run=dry_run)


def _select(
    source: str,
    name: str,
    how: dict[str, Any],
    *,
    seed: int,
    check: str,
    overwrite: bool,
    workers: int,
    json: bool,
) -> None:
    """Store a selection, and say what is in it."""
    from wdskit.packing.select import select

    with show_progress() as show:
        result = select(
            source, name, **how, seed=seed, check=check, overwrite=overwrite, workers=workers, progress=show
        )
    if json:
        print_json({**vars(result), "folders": [str(folder) for folder in result.folders]})
        return
    read = f"{plural(result.num_source_samples, 'sample')} in {plural(result.num_source_shards, 'shard')}"
    print(f"Selected {format_count(result.num_samples)} of {read} as {name}.")
    for reason, count in _gone(result).items():
        if count:
            print(f"{reason.replace('_', ' ')}: {format_count(count)}")


def _gone(result: ReshardResult | SelectResult) -> dict[str, int]:
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
        **{f"num_{reason}": count for reason, count in _gone(result).items()},
        "num_copied": result.num_copied,
        "num_ignored": result.num_ignored,
        "num_bytes": result.num_bytes,
        "shards": [shard._asdict() for shard in result.shards],
    }


def _print_summary(result: ReshardResult, *, dry_run: bool) -> None:
    """The table that says what was written, and where every other sample is."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    first, last = result.shards[0].name, result.shards[-1].name
    names = first if first == last else f"{first} to {last}"
    table.add_row("folder", escape(str(result.folder)))
    table.add_row(
        "read", f"{plural(result.num_source_samples, 'sample')} in {plural(result.num_source_shards, 'shard')}"
    )
    for reason, count in _gone(result).items():
        if count:
            table.add_row(reason.replace("_", " "), format_count(count))
    table.add_row("planned" if dry_run else "written", f"{format_count(result.num_samples)}, {_form(result)}")
    table.add_row("shards", f"{format_count(len(result.shards))} ({escape(names)}), {_sizes(result)}")
    table.add_row("bytes", format_bytes(result.num_bytes))
    if not dry_run and not result.was_done:
        rate = f"{format_count(round(result.num_samples / result.seconds))} samples/s"
        table.add_row("time", f"{result.seconds:.1f} s, {rate}, {format_bytes(result.num_bytes / result.seconds)}/s")
    console = make_console()
    with console.capture() as text:
        console.print(table)
    with contextlib.suppress(BrokenPipeError):  # nobody reads (`| head`), and the shards are written nevertheless
        print(text.get(), end="")
        if result.was_done:
            print(WAS_DONE.format(escape(str(result.folder))))
        if result.num_ignored:
            print(f"Note: {plural(result.num_ignored, 'member')} in no sample, left out.")
        if result.classes_lost:
            print(f"Note: {escape(result.classes_lost)}")
        if dry_run:
            print("Nothing was written (--dry-run).")


def _form(result: ReshardResult) -> str:
    """How samples are written: `copied as they are`, or with how many new headers."""
    anew = result.num_samples - result.num_copied
    return "copied as they are" if not anew else f"{format_count(anew)} with new headers"


def _sizes(result: ReshardResult) -> str:
    counts = [shard.num_samples for shard in result.shards]
    least, most = min(counts), max(counts)
    return f"{plural(most, 'sample')} each" if least == most else f"{format_count(least)} to {plural(most, 'sample')}"
