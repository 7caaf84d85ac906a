"""`--help` of every command is a golden file, quick, and light. WDSKIT_UPDATE_GOLDEN=1 writes the files anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from folders import GOLDEN

import wdskit
from wdskit.cli import app, main

GOLDEN_FOLDER = GOLDEN / "help"
HEAVY = ("torch", "webdataset", "numpy", "PIL", "pydantic", "yaml", "rich.table", "rich.progress")


def all_commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command, groups included."""
    below = getattr(command, "commands", {})
    return [words, *(found for name, sub in below.items() for found in all_commands(sub, (*words, name)))]


COMMANDS = all_commands(typer.main.get_command(app))


def golden_path(words: tuple[str, ...]) -> Path:
    return GOLDEN_FOLDER / ("-".join(("wdskit", *words)) + ".txt")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_as_written(words: tuple[str, ...], capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["wdskit", *words, "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr()
    path = golden_path(words)
    if os.environ.get("WDSKIT_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told.out)
    assert (end.value.code, told.out, told.err) == (0, path.read_text(), "")


def test_no_golden_help_is_left_of_a_command_that_went() -> None:
    assert {path.name for path in GOLDEN_FOLDER.iterdir()} == {golden_path(words).name for words in COMMANDS}


def test_help_names_the_python_twin_of_every_command() -> None:
    for words in COMMANDS:
        if words and words[0] not in {"config", "cache"}:
            twins = re.findall(r"\bwdskit\.(\w+)", golden_path(words).read_text().partition("In Python: ")[2])
            assert twins
            assert set(twins) <= set(wdskit.__all__)


def test_the_command_line_loads_nothing_heavy() -> None:
    script = f"import sys, wdskit.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
