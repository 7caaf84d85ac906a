"""Options that several commands have, with one text each."""

from __future__ import annotations

from typing import Annotated

import typer

AlsoOption = Annotated[
    str | None,
    typer.Option(metavar="KINDS", help="Files for other readers too: wids,open_clip,timm,energon,dali."),
]
SplitNameOption = Annotated[
    str, typer.Option(metavar="NAME", help="The split for timm and energon. Default: from the shards' names.")
]
