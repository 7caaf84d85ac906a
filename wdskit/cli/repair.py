"""`wdskit repair`: what can be saved of damaged shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from wdskit.cli.console import escape, exit_2_on_error, plural, print_json, show_bytes
from wdskit.cli.options import EmptyFolderOption, JsonOption, PathArgument

if TYPE_CHECKING:
    from wdskit.codecs.checks import ImageCheck


def repair_command(
    path: PathArgument,
    to: EmptyFolderOption,
    images: Annotated[
        str, typer.Option(metavar="none|structure|decode", help="A sample whose image fails this check is lost.")
    ] = "structure",
    json: JsonOption = False,
) -> None:
    """Save the whole samples of damaged shards in another folder.

    After damage it continues at the next sample of the .idx, or else at the next valid header, and lists what was lost.
    Samples that the damage may have touched are not saved. Shards without damage are copied unchanged; DEST gets an
    index.

    Exit code: 0 all was saved, 1 something was lost or is in doubt, 2 it could not run.

    In Python: wdskit.repair

    Examples:
        wdskit repair data/train --to data/saved
    """
    from wdskit.shards.repair import repair

    with exit_2_on_error(), show_bytes("repairing") as show:
        result = repair(path, to, images=cast("ImageCheck", images), progress=show)
    suspects = [one.path for one in result.shards if one.is_suspect]
    code = 1 if result.lost or suspects else 0
    if json:
        print_json({"folder": result.folder, "num_saved": result.num_saved, "shards": result.shards})
        raise typer.Exit(code)
    for loss in result.lost:
        print(f"lost: {escape(str(loss))}")
    for shard in suspects:
        print(f"doubt: {escape(shard)}: its SHA-256 differs from the index, so the saved samples may be damaged too.")
    lost = {(loss.file, loss.key) for loss in result.lost if loss.key is not None}
    num_shards = sum(one.num_saved > 0 for one in result.shards)
    print(
        f"Repaired {escape(str(result.folder))}: {plural(result.num_saved, 'sample')} saved in "
        f"{plural(num_shards, 'shard')}, {plural(len(lost), 'sample')} known by key lost."
    )
    raise typer.Exit(code)
