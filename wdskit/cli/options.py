"""Arguments and options that several commands share."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from wdskit.cli.console import print_error
from wdskit.text import hide_secrets

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
ReadersOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Processes that read. Default: one per CPU, fewer for little data."),
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")]
PipelineOption = Annotated[
    str | None,
    typer.Option("--pipeline", metavar="NAME", help="The pipeline. Required if CONFIG has several."),
]
OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting first: loader.workers=4. Repeatable."),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", metavar="PKG", help="Import this module, which registers functions. Repeatable."),
]


_UsageError: Any = typer.BadParameter.__base__  # class of click, which newer versions of typer contain


class Group(typer.core.TyperGroup):
    """A group of commands. Messages about a wrong command line do not show the secrets of a URL."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the command line names, and return its result. Hide secrets in a usage error."""
        try:
            return super().invoke(ctx)
        except _UsageError as err:
            err.message = hide_secrets(err.message)
            raise


class Command(typer.core.TyperCommand):
    """A command whose help is plain text, without typer's boxes.

    The help has the lines under `Examples:` of the docstring unchanged.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help, _, self.epilog = (self.help or "").partition("\n\nExamples:\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments as click does. Raise typer.BadParameter if an option with one value is given twice."""
        _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        options: Counter[Any] = Counter(each for each in given if each.param_type_name == "option")
        for param, count in options.items():
            if count > 1 and not (param.multiple or param.is_flag):
                raise typer.BadParameter("it is given twice. Give it once; a list is A,B.", ctx=ctx, param=param)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the examples."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write(textwrap.indent(textwrap.dedent(self.epilog), " " * formatter.current_indent) + "\n")


def import_plugins(plugins: Sequence[str] | None) -> None:
    """Import modules by name, also from the current folder, which is added to the end of `sys.path`; None does nothing.

    Raises:
        typer.Exit: With code 2 if a module cannot be imported. The error is printed.
    """
    for plugin in plugins or ():
        with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
            if os.getcwd() not in sys.path:  # noqa: PTH109 (sys.path holds text)
                sys.path.append(os.getcwd())  # noqa: PTH109
        try:
            importlib.import_module(plugin)
        except (Exception, SystemExit) as err:
            print_error(ImportError(f"--plugin {plugin}: cannot be imported: {type(err).__name__}: {err}"))
            raise typer.Exit(2) from err


def find_function(name: str | None, plugins: Sequence[str] | None) -> Callable[[str, dict[str, bytes]], Any] | None:
    """Import the modules `plugins`, and return the function that one of them registered as `name`; None for no name.

    Raises:
        PipelineError: No function is registered with this name.
        typer.Exit: With code 2 if a module cannot be imported. The error is printed.
    """
    import_plugins(plugins)
    if name is None:
        return None
    from wdskit.stages.registry import resolve

    return resolve(name, {})
