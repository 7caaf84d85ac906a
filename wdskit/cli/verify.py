"""`wdskit verify`: check shards against their index, and check their content."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, cast

import typer

from wdskit.cli.console import escape, exit_2_on_error, format_bytes, ignored_note, plural, print_json, show_bytes
from wdskit.cli.options import JsonOption, PathArgument

if TYPE_CHECKING:
    from wdskit.codecs.checks import ImageCheck
    from wdskit.shards.verify import VerifyResult

_DAMAGE = {"structure", "digest", "bytes", "missing"}
_STALE = {"index", "unlisted", "offsets", "samples", "fields"}


def verify_command(
    path: PathArgument,
    images: Annotated[
        str,
        typer.Option(
            metavar="none|structure|decode",
            help="structure: first bytes, JPEG markers, PNG checksums. decode: all pixels.",
            rich_help_panel="Images",
        ),
    ] = "structure",
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Check the images of this share of the samples only: 1%.", rich_help_panel="Images"
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed that chooses the share.", rich_help_panel="Images")
    ] = 0,
    world_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Ranks of a stream: does each get the same share?", rich_help_panel="Streams"
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --world-size: loader workers per rank.", rich_help_panel="Streams"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes that read. Default: one per CPU.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check shards against their index, and check their content.

    Reads every shard from end to end and checks size and sha256 against the index, every header, the .idx, the same
    fields in every sample, repeated keys, JSON and images. It continues after a fault and lists all faults.

    Exit code: 0 clean, perhaps with notes, 1 something was found, 2 it could not run.

    PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.verify

    Examples:
        wdskit verify data/train
        wdskit verify data/train --images decode --sample 1%
    """
    from wdskit.shards.verify import verify

    if workers is not None and world_size is None:
        raise typer.BadParameter("--workers needs --world-size. To set how many processes read, use --processes.")
    start = time.perf_counter()
    with exit_2_on_error(), show_bytes("verifying") as show:
        result = verify(
            path,
            images=cast("ImageCheck", images),
            sample=sample,
            seed=seed,
            world_size=world_size,
            loader_workers=workers or 1,
            workers=processes,
            progress=show,
        )
    if json:
        print_json({**vars(result), "is_clean": result.is_clean})
    else:
        _print(result, time.perf_counter() - start)
    raise typer.Exit(0 if result.is_clean else 1)


def _print(result: VerifyResult, seconds: float) -> None:
    from wdskit.shards.verify_shard import NOTES

    for finding in result.findings:
        print(escape(f"Note: {finding}" if finding.kind in NOTES else str(finding)))
    kinds = {finding.kind for finding in result.findings}
    if not result.is_indexed and "unfinished" not in kinds:
        print("No index: sizes and digests could not be compared. `wdskit index FOLDER` creates one.")
    if kinds & _DAMAGE:
        print("Damaged or missing shards: fetch or pack them again, into a new folder.")
    if "structure" in kinds:
        print("`wdskit pack --skip-bad SHARD.tar DEST` saves the samples before the damage.")
    stale = [one for one in result.findings if one.kind in _STALE and not one.file.endswith("classes.json")]
    if stale and not kinds & _DAMAGE and "unfinished" not in kinds:
        print("If the shards are right, `wdskit index FOLDER` writes their index and offsets again.")
    if result.num_ignored:
        print(ignored_note(result.num_ignored))
    if result.num_large:
        print(f"Note: {plural(result.num_large, 'field')} over 32 MiB: the digests are checked, the contents are not.")
    num = sum(1 + finding.more for finding in result.findings if finding.kind not in NOTES)
    num_notes = sum(1 + finding.more for finding in result.findings if finding.kind in NOTES)
    what = plural(num, "finding") if num else "clean"
    what += f", {plural(num_notes, 'note')}" if num_notes else ""
    print(
        f"Verified {escape(result.path)}: {what}. {plural(result.num_shards, 'shard')}, "
        f"{plural(result.num_samples, 'sample')}, {plural(result.num_images, 'image')}, "
        f"{format_bytes(result.num_bytes)} in {seconds:.1f} s ({format_bytes(result.num_bytes / seconds)}/s)."
    )
