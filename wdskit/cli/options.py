"""Arguments and options that several commands have, with one text each."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from wdskit.cli.console import print_error

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.", show_default=False)
]
EmptyFolderOption = Annotated[
    str, typer.Option("--to", metavar="DEST", help="Folder to write to, empty or not there.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
ReadersOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Processes that read. Default: the CPUs, fewer for little data.", show_default=False
    ),
]
PatternOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Names of the shards. Default: DEST's name and -%06d.tar.")
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Remove what a run has written that was stopped, and begin anew.")
]
AlsoOption = Annotated[
    str | None,
    typer.Option(metavar="KINDS", help="Files for other readers too: wids,open_clip,timm,energon,dali."),
]
SplitNameOption = Annotated[
    str, typer.Option(metavar="NAME", help="The split for timm and energon. Default: from the shards' names.")
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="PKG",
        help="Import this module, which registers functions. Repeatable.",
        show_default=False,
    ),
]


def import_plugins(plugins: Sequence[str] | None) -> None:
    """Import them; like `python -m`, also from the current folder.

    Raises:
        typer.Exit: With code 2; one cannot be imported, which is printed.
    """
    for plugin in plugins or ():
        if os.getcwd() not in sys.path:  # noqa: PTH109 (sys.path holds text)
            sys.path.append(os.getcwd())  # noqa: PTH109
        try:
            importlib.import_module(plugin)
        except Exception as err:
            print_error(ImportError(f"--plugin {plugin}: cannot be imported: {type(err).__name__}: {err}"))
            raise typer.Exit(2) from err
