"""Every command has help with examples and its Python twin; the command line is light. docs/cli.md shows the help."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import typer.main
from folders import REPOSITORY

import wdskit
from wdskit.cli import app

HEAVY = ("torch", "webdataset", "numpy", "PIL", "pydantic", "yaml", "rich.table", "rich.progress")


def all_commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command, groups included."""
    below = getattr(command, "commands", {})
    return [words, *(found for name, sub in below.items() for found in all_commands(sub, (*words, name)))]


COMMANDS = all_commands(typer.main.get_command(app))


def command_of(words: tuple[str, ...]) -> Any:
    """Return the command with these words."""
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return command


def test_help_names_the_python_twin_of_every_command() -> None:
    for words in COMMANDS:
        if words and words[0] != "config":
            text = f"{command_of(words).help} {command_of(words).epilog}"
            twins = re.findall(r"\bwdskit\.(\w+)", text.partition("In Python: ")[2])
            assert twins
            assert set(twins) <= set(wdskit.__all__)


OPTIONS = {
    words: {name for param in command_of(words).params for name in (*param.opts, *param.secondary_opts)}
    for words in COMMANDS
}


def test_every_command_that_reads_a_configuration_takes_plugins() -> None:
    """A pipeline may call functions that only a module registers."""
    readers = {words for words, options in OPTIONS.items() if "--set" in options}
    assert {("plan",), ("view",), ("bench",), ("config", "show")} <= readers
    assert all("--plugin" in OPTIONS[words] for words in readers)


def test_every_command_and_option_that_a_message_or_docstring_names_exists() -> None:
    known = {"--help", "--head", *itertools.chain(*OPTIONS.values())}  # `ray start --head`
    for path in (REPOSITORY / "wdskit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)} <= known, (path, text)
            for line in re.findall(r"`wdskit ([^`]+)`", text):
                own = next((words for words in reversed(COMMANDS) if line.split()[: len(words)] == [*words]), ())
                assert own or line.startswith("-"), (path, line)
                assert {*re.findall(r"--[a-z][a-z-]*", line)} <= OPTIONS[own], (path, line)


LEAVES = [words for words in COMMANDS if words and not hasattr(command_of(words), "commands")]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_examples_that_it_takes_and_that_fit_80_columns(words: tuple[str, ...]) -> None:
    command = command_of(words)
    lines = textwrap.dedent(command.epilog).strip().splitlines()
    assert 1 <= len(lines) <= 3
    assert any(line.partition("wdskit ")[2].startswith(" ".join(words)) for line in lines)
    for line in lines:
        assert len(line) <= 78
        given = shlex.split(line.partition("wdskit ")[2].partition(" > ")[0])
        own = next(each for each in LEAVES if tuple(given[: len(each)]) == each)
        assert not command_of(own).make_context("wdskit", given[len(own) :]).args


@pytest.mark.parametrize(
    ("line", "expected"),
    [("wdskit res", {"reshard"}), ("wdskit pack --sh", {"--shuffle"}), ("wdskit config ch", {"check"})],
)  # fmt: skip
def test_a_shell_completes_commands_options_and_words(line: str, expected: set[str]) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_WDSKIT_COMPLETE": "complete_bash"}
    script = [sys.executable, "-c", "from wdskit.cli import main; main()"]
    done = subprocess.run(script, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (expected, "")


def test_the_command_line_loads_nothing_heavy() -> None:
    script = f"import sys, wdskit.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
