"""`wdskit export`: files next to the shards that other readers need."""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.console import escape, plural, print_json, show_bytes
from wdskit.cli.options import JsonOption


def export_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Local folder with shards and an index.")],
    kinds: Annotated[str, typer.Option("--for", metavar="KINDS", help="The readers: open_clip,timm,energon,dali.")],
    split_name: Annotated[
        str, typer.Option(metavar="NAME", help="The split for timm and energon. Default: from the shards' names.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Write the files that other readers need next to the shards.

    open_clip reads sizes.json, timm _info.json, Megatron-Energon .nv-meta/ and NVIDIA DALI one .idx per shard. All are
    made from index.json; for DALI, the headers of the shards are read. `wdskit verify` reports files that are older
    than the index. Run the command again after `pack --append` or `index`.

    A file that another program wrote is never replaced, and neither are your changes to energon's YAML files.

    In Python: wdskit.export

    Examples:
        wdskit export data/train --for timm,energon
    """
    from wdskit.shards.export import export

    readers = [kind.strip() for kind in kinds.split(",")] if kinds else []
    with show_bytes("exporting") as show:
        report = export(folder, readers, split_name=split_name, progress=show)
    if json:
        print_json(report)
        return
    print(f"Exported {escape(folder)} for {', '.join(report.kinds)}: {plural(report.num_files, 'file')}.")
    for name in report.kept:
        print(f"Note: {name} was changed by hand and was not replaced.")
