"""The reference pages that tools/generate.py writes from the source: commands, public names, and messages.

It fails where a public name or one of its methods has no docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main

import wdskit
from wdskit import cli, errors

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
    "Pack": ["pack", "PackResult", "finish_pack", "PackOptions", "reshard", "ReshardOptions", "ReshardResult", "select",
             "SelectResult"],
    "Train": ["Pipeline", "make_loader", "load_config", "register", "gather_valid", "check_same_batches", "Ragged",
              "LoaderStats", "StageStats", "plan", "EpochPlan", "StreamPlan", "bench", "BenchResult"],
    "Look at shards": ["info", "Summary", "ls", "ShardRow", "SampleRow", "MemberRow", "stats", "ShardStats",
                       "LocalShard", "cat", "extract", "Extracted", "diff", "DiffResult"],
    "Check, index and split": ["verify", "VerifyResult", "Finding", "repair", "RepairResult", "index_folder",
                               "IndexReport", "split", "SplitReport"],
}  # fmt: skip
AFTER = {
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
    return "\n".join([*lines, "## Test", "", "::: wdskit.testing.assert_resumes_exactly", ""])


def undocumented(name: str, value: Any) -> Iterable[str]:
    """The name, or those of its public methods and properties, whose docstring is missing."""
    if not inspect.getdoc(value):
        yield name
    if inspect.isclass(value):
        for member, one in vars(value).items():
            is_code = inspect.isfunction(one) or isinstance(one, property | classmethod | staticmethod)
            if is_code and not member.startswith("_") and not inspect.getdoc(one):
                yield f"{name}.{member}"


MESSAGES_HEAD = f"""# Error messages

Every message that wdskit raises, by the class of its error; `…` stands for a name or a number. Search this page for the
words that you see. Most messages end with what to do; [Troubleshooting](troubleshooting.md) says more about the common
ones. {NOTE.format("the source")}
"""
CARRIERS = {
    "HeaderError": ("ShardError", 0),
    "cut": ("ShardError", 0),
    "damaged": ("ShardError", 1),
    "_fault": ("ShardError", 2),
    "refuse": ("ConfigError", 0),
}
"""Calls whose text becomes that of a public error, and the place of the text among their arguments."""


def messages_page() -> str:
    """docs/messages.md: the text of every error, from the calls that make it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "wdskit").rglob("*.py")):
        for name, text in messages_in(ast.parse(path.read_text(encoding="utf-8"))):
            found[name].add(text)
    lines = [MESSAGES_HEAD]
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.WdskitError) and (found[name] or name == "ConfigError"):
            summary = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
            lines += [f"## {name}", "", summary, "", *bullets(found[name])]
        if name == "ConfigError":
            lines += ["### Examples of every rule of a configuration file", "", *bullets(config_examples())]
    return "\n".join(lines)


def bullets(texts: Iterable[str]) -> list[str]:
    """A list, sorted by its first words."""
    return [*(f"- `` {text} ``" for text in sorted(texts, key=lambda text: text.lstrip("…:,. ").casefold())), ""]


def config_examples() -> set[str]:
    """What the tests expect of configurations that are wrong, without the names of their files."""
    lines = (ROOT / "tests" / "bad_configs" / "messages.txt").read_text(encoding="utf-8").splitlines()
    return {match[1] for line in lines if (match := re.match(r"[\w.]+\.yaml:\d+: (.*)", line))}


Known = dict[str, list[ast.expr]]
"""What names stand for: values that are assigned to a variable, or that a function returns."""


def messages_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class of the error, text) of each call in a module that makes one with words of its own."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    shared = assigned(tree.body)
    for function in functions:
        returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
        shared[f"{function.name}()"] = [node.value for node in returns if node.value is not None]
    for owner in functions:
        raises = [node.lineno for node in ast.walk(owner) if isinstance(node, ast.Raise)]
        own = assigned(ast.walk(owner))
        for call in ast.walk(owner):
            if not isinstance(call, ast.Call):
                continue
            since = max((line for line in raises if line < call.lineno), default=0)
            known = {**shared, **{name: nearest(values, since, call.lineno) for name, values in own.items()}}
            name = ast.unparse(call.func).rpartition(".")[2]
            name, at = CARRIERS.get(name, (name, 0))
            if not inspect.isclass(kind := getattr(errors, name, None)) or not issubclass(kind, errors.WdskitError):
                continue
            named = {each.arg: each.value for each in call.keywords}
            parts = call.args[at : at + 1] or [named[key] for key in ("problem", "remedy") if key in named]
            for text in joined([list(texts(part, known)) for part in parts]):
                if text[:1] not in {".", ","} and len(re.findall(r"[a-z]{2,}", text)) >= 3:
                    yield name, text


def assigned(nodes: Iterable[ast.AST]) -> Known:
    """What is assigned to each name; what is added to it later is one more value."""
    found: Known = defaultdict(list)
    changes = [node for node in nodes if isinstance(node, ast.Assign | ast.AugAssign)]
    for node in sorted(changes, key=lambda node: node.lineno):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id].append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and found[node.target.id]:
            longer = ast.BinOp(found[node.target.id][-1], node.op, node.value)
            found[node.target.id].append(ast.copy_location(longer, node))
    return found


def nearest(values: list[ast.expr], since: int, until: int) -> list[ast.expr]:
    """Of what is assigned to a name, what was since the last `raise` above a call; else the last of it, else all."""
    before = sorted((value for value in values if value.lineno <= until), key=lambda value: value.lineno)
    return [value for value in before if value.lineno >= since] or before[-1:] or values


def joined(parts: list[list[str]]) -> Iterator[str]:
    """Each way to put the sentences together, on one line, without repeated gaps."""
    whole = [""]
    for choices in parts:
        whole = [f"{before}. {each}" if before else each for before in whole for each in choices][:8]
    for text in whole:
        yield re.sub(r"…(?:[ :]*…)+", "…", " ".join(text.replace("`", "'").split()))


def texts(node: ast.expr, known: Known, depth: int = 3) -> Iterator[str]:
    """What an expression of text can be; `…` where only a run knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        whole = [""]
        for part in node.values:
            whole = [before + each for before in whole for each in texts(part, known, depth)][:8]
        yield from whole
    elif isinstance(node, ast.FormattedValue):
        yield from texts(node.value, known, depth)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in texts(node.left, known, depth):
            yield from (left + right for right in texts(node.right, known, depth))
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body, known, depth)
        yield from texts(node.orelse, known, depth)
    elif isinstance(node, ast.Name) and depth and node.id in known:
        inner = {name: values for name, values in known.items() if name != node.id}
        choices = [each for value in known[node.id] for each in texts(value, inner, depth - 1)]
        yield from dict.fromkeys(choices)
    elif isinstance(node, ast.Call) and depth and f"{ast.unparse(node.func)}()" in known:
        for value in known[f"{ast.unparse(node.func)}()"]:
            yield from texts(value, known, depth - 1)
    else:
        yield "…"


PAGES: dict[str, typing.Callable[[], str]] = {
    "docs/cli.md": cli_page,
    "docs/api.md": api_page,
    "docs/messages.md": messages_page,
}
