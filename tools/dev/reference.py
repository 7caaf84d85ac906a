"""Build the reference pages docs/cli.md and docs/api.md from the source, for tools/dev/generate.py.

Exits with a message if a public name, or a public method of a class, has no docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

import typer
import typer.main

import wdskit
from wdskit import cli, errors
from wdskit.loader.loader import Loader
from wdskit.testing import assert_resumes_exactly

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
    return f"[`wdskit.{name}`](api.md#{name.lower()})" if name in wdskit.__all__ else match[0]


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
              "LoaderStats", "plan", "EpochPlan", "bench", "BenchResult"],
    "Look at shards": ["info", "Summary", "ShardRow", "SampleRow", "view", "LocalShard", "cat"],
    "Check, index and split": ["verify", "VerifyResult", "Finding", "index_folder", "IndexReport", "columns", "Columns",
                               "TextColumn", "split", "SplitReport"],
}  # fmt: skip
METHODS = {"Pipeline": ["stage", "build", "loader"]}
"""The methods that the page shows of a class; of any other class, all public ones."""


def api_page() -> str:
    """Return docs/api.md: signature, first paragraph, attributes and methods of each public name.

    Raises:
        SystemExit: A public name is in no group, or has no docstring.
    """
    public = {name: getattr(wdskit, name) for name in wdskit.__all__ if name != "__version__"}
    kinds = sorted(name for name in public if name in vars(errors))
    groups = {**API_GROUPS, "Errors": kinds}
    grouped = [name for names in groups.values() for name in names]
    if left := sorted(public.keys() ^ set(grouped)):
        raise SystemExit(f"tools/dev/reference.py: API_GROUPS and wdskit.__all__ differ in {', '.join(left)}")
    if bare := [name for name, value in public.items() for name in undocumented(name, value)]:
        raise SystemExit(f"public names without a docstring: {', '.join(bare)}")
    public |= {"Loader": Loader, "assert_resumes_exactly": assert_resumes_exactly}
    groups["Train"] = [*groups["Train"], "Loader"]
    groups["Test"] = ["assert_resumes_exactly"]
    head = f"""# API reference

The public names of `import wdskit`: signatures and first lines. `help(wdskit.pack)` prints the arguments and errors.
{NOTE.format("`wdskit.__all__`")} `Loader` is the class that `make_loader` returns, and no public name;
`assert_resumes_exactly` is in `wdskit.testing`.
"""
    sections = [
        f"## {title}\n\n" + "\n".join(entry(name, public[name]) for name in names) for title, names in groups.items()
    ]
    return "\n".join([head, *sections])


def entry(name: str, value: Any) -> str:
    """Return the section of a public name."""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    is_function = inspect.isfunction(value)
    lines = [f"### {name}", ""]
    if is_function:
        lines += ["```python", signature(name, value), "```", ""]
    lines += [summary(value), ""]
    if is_function:
        return "\n".join(lines)
    if is_error:
        bases = " and ".join(f"`{base.__name__}`" for base in value.__bases__)
        return "\n".join([*lines[:-1], f"Subclass of {bases}.", ""])
    about = (inspect.getdoc(value) or "").partition("\nAttributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", about, re.MULTILINE)
    lines += [f"- `{attribute}`: {' '.join(text.split())}" for attribute, text in found]
    for method in METHODS.get(name, [each for each in vars(value) if not each.startswith("_")]):
        member = inspect.getattr_static(value, method)
        call = "" if isinstance(member, property) else "()"
        lines.append(f"- `.{method}{call}`: {summary(getattr(value, method))}")
    if name == "Pipeline":
        lines.append("- and a method for each [stage](stages.md), with the stage's settings as arguments.")
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, ""]))


def summary(value: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def plain_name(module: ModuleType, name: re.Match[str]) -> str:
    """Return the name of a type, or the type that `Annotated` checks: `int` for `Count`."""
    kind = getattr(module, name[0], None)
    return inspect.formatannotation(get_args(kind)[0]) if get_origin(kind) is Annotated else name[0]


def signature(name: str, function: Any) -> str:
    """Return the signature of a function as Python; a long one has one parameter on a line."""
    whole = inspect.signature(function)
    shown = []
    for parameter in whole.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        options = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if options:  # the options that `pack` and `reshard` share
            found = function.__globals__[options[1]]
            for each, kind in found.__annotations__.items():
                text = re.sub(r"\w+", partial(plain_name, sys.modules[found.__module__]), kind.__forward_arg__)
                shown.append(f"{each}: {text} = ...")
        else:
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
            shown.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    line = f"{name}({', '.join(shown)}) -> {whole.return_annotation}"
    if len(line) <= 100:
        return line
    rows = ",\n    ".join(shown)
    return f"{name}(\n    {rows},\n) -> {whole.return_annotation}"


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
