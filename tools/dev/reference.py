"""Build the reference pages docs/cli.md and docs/api.md from the source, for tools/dev/generate.py.

Exits with a message if a public name, or a public method of a class, has no docstring.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

import wdskit
from wdskit import cli, errors

ROOT = Path(__file__).parents[2]
NOTE = "`tools/dev/generate.py` writes this page from {}."


def cli_page() -> str:
    """Return docs/cli.md: the help of every command, as tables."""
    head = f"""# CLI reference

This page has the help of every command. `wdskit COMMAND --help` prints the same text. {NOTE.format("the commands")}
Exit codes: 0 success, 1 an error or a finding, 2 a wrong command line, 130 Ctrl-C.
"""
    found = list(commands_below(typer.main.get_command(cli.app), ("wdskit",)))
    table = [f"| [`{' '.join(words)}`](#{'-'.join(words)}) | {first_paragraph(command)} |" for words, command in found]
    sections = [command_section(words, command) for words, command in found]
    return "\n".join([head, "| Command | What it does |", "|---|---|", *table, "", *sections])


def commands_below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command of a group with all its words; for a group inside the group, yield that group's commands."""
    for name, sub in command.commands.items():
        if hasattr(sub, "commands"):
            yield from commands_below(sub, (*words, name))
        else:
            yield (*words, name), sub


def first_paragraph(command: Any) -> str:
    """Return the first paragraph of a command's help, on one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def command_section(words: tuple[str, ...], command: Any) -> str:
    """Return the section of a command: its help, arguments and options, as `--help` prints them."""
    context = typer.Context(command, info_name=" ".join(words))
    paragraphs = [cell(" ".join(text.split())) for text in (command.help or "").replace("\f", "").split("\n\n")]
    paragraphs = [re.sub(r"\bwdskit\.([\w\\]+)", python_twin, text) for text in paragraphs]
    rows = [row for row in (parameter.get_help_record(context) for parameter in command.params) if row is not None]
    lines = [f"## {' '.join(words)}", "", "\n\n".join(paragraphs), ""]
    lines += ["| Argument or option | What it is |", "|---|---|"]
    lines += [f"| `{name.removesuffix(' <str>').replace('|', chr(92) + '|')}` | {cell(text)} |" for name, text in rows]
    return "\n".join([*lines, ""])


def python_twin(match: re.Match[str]) -> str:
    """Return a public name such as `wdskit.pack` as a link into the API reference, any other name unchanged."""
    name = match[1].replace("\\", "")
    return f"[`wdskit.{name}`](api.md#wdskit.{name})" if name in wdskit.__all__ else match[0]


def cell(text: str) -> str:
    """Return plain text as Markdown: text in backticks and `--options` become code, markup in the rest is escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    for at in range(0, len(parts), 2):
        plain = re.sub(r"([<*_\[])", r"\\\1", parts[at])
        parts[at] = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", plain)
    return "".join(parts)


API_GROUPS = {
    "Pack": ["pack", "PackResult", "reshard"],
    "Train": ["Pipeline", "make_loader", "load_config", "register", "thread_safe", "gather_valid",
              "Ragged",
              "LoaderStats", "StageStats", "plan", "EpochPlan", "StreamPlan", "bench", "BenchResult"],
    "Look at shards": ["info", "Summary", "ShardRow", "SampleRow", "view", "LocalShard", "cat"],
    "Check, index and split": ["verify", "VerifyResult", "Finding", "index_folder", "IndexReport", "columns", "Columns",
                               "TextColumn", "split", "SplitReport"],
}  # fmt: skip
AFTER = {
    "Pipeline": ["    options:", "      inherited_members: true"],  # a method for each stage
    "make_loader": ["", "::: wdskit.loader.base.Loader"],  # the class that it returns, which is not a public name
}
"""Lines after the directive of a name."""


def api_page() -> str:
    """Return docs/api.md: a directive of mkdocstrings for each public name.

    Raises:
        SystemExit: A public name is in no group, or has no docstring.
    """
    public = {name for name in wdskit.__all__ if name != "__version__"}
    kinds = {name for name in public if name in vars(errors)}
    groups = {**API_GROUPS, "Errors": sorted(kinds)}
    grouped = [name for names in groups.values() for name in names]
    if left := sorted(public.symmetric_difference(grouped)):
        raise SystemExit(f"tools/dev/reference.py: API_GROUPS and wdskit.__all__ differ in {', '.join(left)}")
    if bare := [name for name in grouped for name in undocumented(name, getattr(wdskit, name))]:
        raise SystemExit(f"public names without a docstring: {', '.join(bare)}")
    lines = ["# API reference", "", f"Every public name of `import wdskit`. {NOTE.format('`wdskit.__all__`')}", ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: wdskit.{name}", *AFTER.get(name, []), ""]
    return "\n".join([*lines, "## Test", "", "::: wdskit.testing.assert_resumes_exactly", ""])


def undocumented(name: str, value: Any) -> Iterable[str]:
    """Yield `name`, and `name.member` for public methods and properties, if they have no docstring."""
    if not inspect.getdoc(value):
        yield name
    if inspect.isclass(value):
        for member, one in vars(value).items():
            is_code = inspect.isfunction(one) or isinstance(one, property | classmethod | staticmethod)
            if is_code and not member.startswith("_") and not inspect.getdoc(one):
                yield f"{name}.{member}"


PAGES: dict[str, typing.Callable[[], str]] = {
    "docs/cli.md": cli_page,
    "docs/api.md": api_page,
}
