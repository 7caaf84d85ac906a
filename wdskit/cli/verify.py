"""`wdskit verify`: check shards against their index, and check their content."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, cast

import typer

from wdskit.cli.console import escape, format_bytes, ignored_note, plural, print_error, print_json, show_bytes
from wdskit.cli.options import JsonOption, PathArgument, ReadersOption
from wdskit.errors import WdskitError

if TYPE_CHECKING:
    from wdskit.codecs.checks import ImageCheck
    from wdskit.shards.verify import VerifyResult

_DAMAGE = {"structure", "digest", "bytes", "missing"}
_STALE = {"unlisted", "offsets", "samples", "fields"}


def verify_command(
    path: PathArgument,
    images: Annotated[
        str,
        typer.Option(
            metavar="none|structure|decode", help="structure: first bytes, JPEG markers, PNG checksums. decode: pixels."
        ),
    ] = "structure",
    workers: ReadersOption = None,
    json: JsonOption = False,
) -> None:
    """Check shards against their index, and check their content.

    Reads every shard from end to end and checks size and sha256 against the index, every header, the .idx, the same
    fields in every sample, repeated keys, and every field that a loader decodes. It continues after a fault and lists
    all faults.

    Exit code: 0 clean, perhaps with notes, 1 something was found, 2 it could not run.

    PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.verify

    Examples:
        wdskit verify data/train
        wdskit verify data/train --images decode
    """
    from wdskit.shards.verify import verify

    start = time.perf_counter()
    try:
        with show_bytes("verifying") as show:
            result = verify(path, images=cast("ImageCheck", images), workers=workers, progress=show)
    except WdskitError as err:
        print_error(err)
        raise typer.Exit(2) from err
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
        print("Fetch or pack these shards again. `wdskit pack --skip-bad SHARD.tar DEST` saves whole samples.")
    elif kinds & _STALE and "unfinished" not in kinds:
        print("If the shards are right, `wdskit index FOLDER` writes their index and offsets again.")
    if result.num_ignored:
        print(ignored_note(result.num_ignored))
    if result.num_large:
        print(f"Note: {plural(result.num_large, 'field')} over 32 MiB: the digests are checked, the contents are not.")
    faults = [1 + finding.more for finding in result.findings if finding.kind not in NOTES]
    notes = [1 + finding.more for finding in result.findings if finding.kind in NOTES]
    what = plural(sum(faults), "finding") if faults else "clean"
    what += f", {plural(sum(notes), 'note')}" if notes else ""
    print(
        f"Verified {escape(result.path)}: {what}. {plural(result.num_shards, 'shard')}, "
        f"{plural(result.num_samples, 'sample')}, {plural(result.num_images, 'image')}, "
        f"{format_bytes(result.num_bytes)} in {seconds:.1f} s ({format_bytes(result.num_bytes / seconds)}/s)."
    )
