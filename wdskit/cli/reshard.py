"""`wdskit reshard`: write new shards from finished shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wdskit.cli.console import format_bytes, format_count, plural, print_json, print_summary, show_packing
from wdskit.cli.options import JsonOption, flag_of, takes
from wdskit.cli.pack_result import WAS_DONE, format_names, format_rates
from wdskit.packing.options import ReshardOptions, SelectOptions

if TYPE_CHECKING:
    from wdskit.packing.reshard import ReshardResult
    from wdskit.packing.select import SelectResult


@takes(ReshardOptions)
def reshard_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Shards, local or remote: a folder, a glob or braces, several joined by ::."
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Folder to write the shards to, or s3://bucket/folder; none with --selection."
        ),
    ] = None,
    *,
    options: dict[str, Any],
    selection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Write no shards: store what is kept as a column beside the index (`where: NAME`)."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write new shards from finished ones: merge, split, shuffle, filter, change.

    The bytes of the fields are copied, and nothing is decoded unless --validate, --resize, --format, --orient or
    --derive asks for that. The same sources and options give the same bytes. A file gets its name only when it is
    complete and on disk; after a kill, run the same command again. Sources without an index are first read as a whole.
    Images are not checked (--validate none), except those that are changed (structure) or renamed to another format
    (magic). A field that is renamed to cls must be a whole number.

    In Python: wdskit.reshard, and wdskit.select for --selection

    Examples:
        wdskit reshard data/train data/small --max-bytes 200MB --shuffle 7
        wdskit reshard 'raw-{000..127}.tar' data/train --resize 256 --format jpg
        wdskit reshard data/train --selection large --filter 'json.width >= 512'
    """
    from wdskit.packing.reshard import reshard
    from wdskit.packing.select import select

    if selection is not None:
        known = {opt.name for opt in fields(SelectOptions)}
        ignored = [*(flag_of(name) for name in options if name not in known), *(["DEST"] if dest else [])]
        if ignored:
            raise typer.BadParameter(f"{ignored[0]} is for writing shards, and --selection writes none.")
        with show_packing() as show:
            selected = select(source, selection, **options, progress=show)
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
        result = reshard(source, dest, **options, progress=show)
    dry_run = "dry_run" in options
    if json:
        print_json(_to_json(result, dry_run=dry_run))
    else:
        print_summary(_details(result, dry_run=dry_run), _notes(result, dry_run=dry_run))


def _read(result: ReshardResult | SelectResult) -> str:
    return f"{plural(result.num_source_samples, 'sample')} in {plural(result.num_source_shards, 'shard')}"


def _left_out(result: ReshardResult | SelectResult) -> dict[str, int]:
    """Return {reason: number of samples that were left out for this reason}, with all reasons; the number may be 0."""
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
        "num_cleaned": result.num_cleaned,
        "num_ignored": result.num_ignored,
        "num_bytes": result.num_bytes,
        "merged": result.merged,
        "shards": [shard._asdict() for shard in result.shards],
    }


def _details(result: ReshardResult, *, dry_run: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary, as (name, value).

    If `dry_run` is True, the samples are called "planned" in place of "written".
    """
    yield "folder", str(result.folder)
    yield "read", _read(result)
    for reason, count in _left_out(result).items():
        if count:
            yield reason.replace("_", " "), format_count(count)
    yield "planned" if dry_run else "written", plural(result.num_samples, "sample")
    if not result.shards:
        yield "shards", "0 (this part of the run has none)"
        return
    least, most = (pick(shard.num_samples for shard in result.shards) for pick in (min, max))
    sizes = f"{plural(most, 'sample')} each" if least == most else f"{format_count(least)} to {plural(most, 'sample')}"
    yield "shards", f"{format_names(result.shards)}, {sizes}"
    yield "bytes", format_bytes(result.num_bytes) if result.num_bytes else "not known before the images are changed"
    if not dry_run and not result.was_done:
        yield "time", format_rates(result)


def _notes(result: ReshardResult, *, dry_run: bool) -> Iterator[str]:
    if result.was_done:
        yield WAS_DONE.format(result.folder)
    if result.num_cleaned:
        yield f"Note: {plural(result.num_cleaned, 'key')} cleaned."
    if result.num_ignored:
        yield f"Note: {plural(result.num_ignored, 'member')} in no sample, left out."
    if result.merged:
        yield f"Note: {result.merged}"
    if result.classes_lost:
        yield f"Note: {result.classes_lost}"
    for note in result.notes:
        yield f"Note: {note}"
    if dry_run:
        yield "Nothing was written (--dry-run)."
