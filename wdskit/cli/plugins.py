"""Modules that the user names on the command line, which register functions that pipelines call."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from wdskit.cli.console import print_error

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
