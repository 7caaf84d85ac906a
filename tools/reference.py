"""The reference pages that tools/generate.py writes from the source: commands and public names.

It fails where a public name or one of its methods has no docstring.
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
from wdskit.packing.options import PackOptions, ReshardOptions, RunOptions, SelectOptions, declared_options

ROOT = Path(__file__).parents[1]
NOTE = "`tools/generate.py` writes this page from {}."


def cli_page() -> str:
    """docs/cli.md: the help of every command, as tables."""
    head = f"""# CLI reference

Every command of `wdskit`. `wdskit COMMAND --help` prints the same text. {NOTE.format("the commands")}
Exit codes: 0, 1 for an error or a finding, 2 for a wrong command line, 130 for Ctrl-C.
"""
    found = list(commands_below(typer.main.get_command(cli.app), ("wdskit",)))
    table = [f"| [`{' '.join(words)}`](#{'-'.join(words)}) | {first_sentence(command)} |" for words, command in found]
    sections = [command_section(words, command) for words, command in found]
    return "\n".join([head, "| Command | What it does |", "|---|---|", *table, "", *sections])


def commands_below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands of a group with all their words, groups replaced by what is in them."""
    for name, sub in command.commands.items():
        if hasattr(sub, "commands"):
            yield from commands_below(sub, (*words, name))
        else:
            yield (*words, name), sub


def first_sentence(command: Any) -> str:
    """What stands beside a command in a list."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def command_section(words: tuple[str, ...], command: Any) -> str:
    """A command with its arguments and options, as `--help` has them."""
    context = typer.Context(command, info_name=" ".join(words))
    paragraphs = [cell(" ".join(text.split())) for text in (command.help or "").replace("\f", "").split("\n\n")]
    paragraphs = [re.sub(r"\bwdskit\.([\w\\]+)", python_twin, text) for text in paragraphs]
    rows = [row for row in (parameter.get_help_record(context) for parameter in command.params) if row is not None]
    lines = [f"## {' '.join(words)}", "", "\n\n".join(paragraphs), ""]
    lines += ["| Argument or option | What it is |", "|---|---|"]
    lines += [f"| `{name.removesuffix(' <str>').replace('|', chr(92) + '|')}` | {cell(text)} |" for name, text in rows]
    return "\n".join([*lines, ""])


def python_twin(match: re.Match[str]) -> str:
    """`wdskit.pack`, as a link into the API reference."""
    name = match[1].replace("\\", "")
    return f"[`wdskit.{name}`](api.md#wdskit.{name})" if name in wdskit.__all__ else match[0]


def cell(text: str) -> str:
    """Text of a program as Markdown shows it: what stands in backticks and `--options` are code, the rest is text."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    for at in range(0, len(parts), 2):
        plain = re.sub(r"([<*_\[])", r"\\\1", parts[at])
        parts[at] = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", plain)
    return "".join(parts)


API_GROUPS = {
    "Pack": ["pack", "PackResult", "finish_pack", "reshard", "ReshardResult", "select", "SelectResult"],
    "Train": ["Pipeline", "make_loader", "load_config", "register", "thread_safe", "gather_valid",
              "Ragged",
              "LoaderStats", "StageStats", "plan", "EpochPlan", "StreamPlan", "bench", "BenchResult"],
    "Look at shards": ["info", "Summary", "ls", "ShardRow", "SampleRow", "MemberRow", "stats", "write_report",
                       "ShardStats", "LocalShard", "cat", "diff", "DiffResult"],
    "Check, index and split": ["verify", "VerifyResult", "Finding", "index_folder", "export", "ExportReport",
                               "IndexReport", "columns", "Columns", "TextColumn", "split", "SplitReport"],
}  # fmt: skip
OPTIONS = {"pack": PackOptions, "reshard": ReshardOptions, "select": SelectOptions}
"""The functions whose keyword arguments are the fields of a class: a table lists them."""
AFTER = {
    **{name: ["    options:", "      show_signature: false"] for name in OPTIONS},  # the table has the keywords
    "Pipeline": ["    options:", "      inherited_members: true"],  # a method for each stage
    "make_loader": ["", "::: wdskit.loader.base.Loader"],  # what it returns; its name is no public one
}
"""Lines behind the directive of a name."""


def api_page() -> str:
    """docs/api.md: a directive of mkdocstrings for each public name."""
    public = {name for name in wdskit.__all__ if name != "__version__"}
    kinds = {name for name in public if name in vars(errors)}
    groups = {**API_GROUPS, "Errors": sorted(kinds)}
    grouped = [name for names in groups.values() for name in names]
    if left := sorted(public.symmetric_difference(grouped)):
        raise SystemExit(f"tools/reference.py: API_GROUPS and wdskit.__all__ differ in {', '.join(left)}")
    if bare := [name for name in grouped for name in undocumented(name, getattr(wdskit, name))]:
        raise SystemExit(f"public names without a docstring: {', '.join(bare)}")
    lines = ["# API reference", "", f"Every public name of `import wdskit`. {NOTE.format('`wdskit.__all__`')}", ""]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: wdskit.{name}", *AFTER.get(name, []), ""]
            lines += options_table(OPTIONS[name]) if name in OPTIONS else []
    return "\n".join([*lines, "## Test", "", "::: wdskit.testing.assert_resumes_exactly", ""])


def options_table(kind: type[RunOptions]) -> list[str]:
    """The options of a function: those of the command line in their groups, then the ones that take Python objects."""
    lines = ["| Option | Type | Default | What it is |", "|---|---|---|---|"]
    for one in declared_options(kind):
        default = "" if one.default is None or one.name == "disk" else f"`{one.default!r}`"
        shown = str(one.type).replace(" | None", "").replace("os.PathLike[str]", "path").replace("|", "or")
        lines.append(f"| `{one.name}` | {cell(shown)} | {default} | {cell(one.metadata['help'])} |")
    return [*lines, ""]


def undocumented(name: str, value: Any) -> Iterable[str]:
    """The name, or those of its public methods and properties, whose docstring is missing."""
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
