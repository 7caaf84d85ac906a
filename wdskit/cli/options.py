"""Arguments and options that several commands have, with one text each."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from wdskit.cli.console import print_error
from wdskit.packing.options import WriteOptions

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
SplitNameOption = Annotated[
    str, typer.Option(metavar="NAME", help="The split for timm and energon. Default: from the shards' names.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.", show_default=False)]
PipelineOption = Annotated[
    str | None,
    typer.Option(
        "--pipeline", metavar="NAME", help="Which pipeline; needed where there are several.", show_default=False
    ),
]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting first. Repeatable.", show_default=False),
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


def takes(kind: type[WriteOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all options of a class; it gets them as its parameter `options`, an object of that class."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {one.name: values.pop(one.name) for one in fields(kind)}
            command(**values, options=kind(**{name: value for name, value in given.items() if value is not None}))

        signature = inspect.signature(command, eval_str=True)
        own = [one.replace(kind=one.KEYWORD_ONLY) for one in signature.parameters.values()]
        at = next(place for place, one in enumerate(own) if one.name == "options")
        parameters = [*own[:at], *map(_parameter, fields(kind)), *own[at + 1 :]]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameter(one: Field[Any]) -> inspect.Parameter:
    """What typer makes an option of. One that is not given is None, and has the default of its class."""
    least, most = one.metadata["least"], one.metadata["most"]
    is_repeated = one.name == "fields"
    flag = "--field" if is_repeated else f"--{one.name.rstrip('_').replace('_', '-')}"
    kind: Any = str | None
    default: Any = one.default if isinstance(one.default, str) and one.default else None
    if isinstance(one.default, bool):
        kind, default = bool, False
    elif least is not None:
        kind, default = int | None, one.default
    elif is_repeated:
        kind = list[str] | None
    metavar = one.metadata["metavar"] or None
    shown = typer.Option(flag, metavar=metavar, min=least, max=most, help=one.metadata["help"])
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def other_options(options: WriteOptions, but: Sequence[str]) -> Iterator[str]:
    """The options that were given, as on the command line, but some."""
    for one in fields(options):
        if one.name not in but and getattr(options, one.name) != one.default:
            yield f"--{one.name.rstrip('_').replace('_', '-')}"


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
