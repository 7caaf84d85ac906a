"""README.md is true: its blocks run, in order, in one folder, and print what it says they print."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from forking import Interpreter

RUN = {"bash", "python"}  # run in the reader's folder; a `text` block right behind is their output
KEPT = {"yaml"}  # written to the file that their first line names, and checked
SET_UP = {"sh"}  # for a fresh machine or for developers: looked at, not run
NUM_PHOTOS = 240


class Block(NamedTuple):
    """One fenced block: its language, its text, the line of its first fence, and the output that the README shows."""

    language: str
    text: str
    line: int
    output: str | None


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a Markdown text in order, each with the `text` block that follows it as its output."""
    blocks: list[Block] = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, body = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        if language == "text" and blocks and blocks[-1].language in RUN and blocks[-1].output is None:
            blocks[-1] = blocks[-1]._replace(output=body)
        else:
            blocks.append(Block(language, body, line, None))
    return blocks


def without_speeds(text: str) -> str:
    """Replace what no two runs share: times and speeds."""
    return re.sub(r"[\d.,]+(\s?(samples/s|[kMG]?B/s|us|ms|s)\b|\s?%| CPUs\b)", "N", text)


def matches(expected: str, actual: str) -> bool:
    """Whether the output is the expected one; `...` stands for anything, trailing spaces do not count."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(without_speeds(expected), without_speeds(actual), flags)


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(readme: str) -> list[Block]:
    return read_blocks(readme)


@pytest.fixture
def folder(tmp_path: Path, repository: Path, load_tool) -> Path:
    """What the reader has: a clone, and a folder of photographs in it."""
    load_tool("make_photos").make_photos(tmp_path / "photos", num=NUM_PHOTOS, seed=0)
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(repository / name)
    return tmp_path


@pytest.fixture
def python(folder: Path, script_environment: dict[str, str]) -> Iterator[Interpreter]:
    """Runs the Python blocks, as scripts of their own."""
    with Interpreter(folder, script_environment, "-W", "error::UserWarning") as python:
        yield python


def run_block(
    block: Block, folder: Path, environment: dict[str, str], python: Interpreter
) -> subprocess.CompletedProcess[str]:
    """Run one bash or python block as a script of its own."""
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        return subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=240
        )
    script = folder / f"block_{block.line}.py"
    script.write_text(block.text)
    return python.start(script).wait()


def test_blocks_run_and_print_what_the_readme_shows(
    blocks: list[Block], folder: Path, script_environment: dict[str, str], python: Interpreter
) -> None:
    """Every bash and python block exits with 0; where an output is shown, it is that."""
    for block in blocks:
        if block.language == "yaml":
            name = re.match(r"# (\S+\.yaml)\n", block.text)
            assert name, f"README.md:{block.line}: the first line names the file"
            (folder / name.group(1)).write_text(block.text)
        if block.language not in RUN:
            continue
        done = run_block(block, folder, script_environment, python)
        told = f"README.md:{block.line}\n{block.text}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        assert done.returncode == 0, told
        assert "Traceback" not in done.stderr, told  # not even one that Python ignores
        assert block.output is None or matches(block.output, done.stdout), told


def test_every_block_is_of_a_kind_that_is_looked_at(blocks: list[Block]) -> None:
    """No block escapes the tests by its language."""
    assert {block.language for block in blocks} <= RUN | KEPT | SET_UP | {"text"}
    assert sum(block.language in RUN for block in blocks) >= 8


def test_set_up_commands_exist(blocks: list[Block], repository: Path) -> None:
    """`make x` is a target of the Makefile, `pip install .[x]` an extra of pyproject.toml."""
    environment = {**os.environ, "MAKEFLAGS": ""}
    pyproject = (repository / "pyproject.toml").read_text()
    for block in blocks:
        for line in block.text.splitlines() if block.language in SET_UP else []:
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                subprocess.run(
                    ["make", "-n", *words[1:]], cwd=repository, env=environment, check=True, capture_output=True
                )
            else:
                assert words[:2] == ["pip", "install"], line
                extras = re.findall(r"\[(.*)\]", words[2])
                assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), line


def test_the_layers_are_those_that_are_checked(blocks: list[Block], load_tool) -> None:
    """The one `text` block that is no output draws the layers."""
    tool = load_tool("check_layers")
    drawn = [block.text.strip() for block in blocks if block.language == "text"]
    assert drawn == [" > ".join([*tool.LAYERS, ", ".join(sorted(tool.BASE))])]


def test_links_lead_somewhere(readme: str, repository: Path) -> None:
    """Every relative link names a file or folder of the repository."""
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in target]
    assert targets
    assert [target for target in targets if not (repository / target).exists()] == []


def test_the_table_of_stages_is_complete(readme: str) -> None:
    """Each stage of YAML stands in the README's table once, under the name it has there."""
    from wdskit.stages.registry import STAGES

    named = re.findall(r"^\| `(\w+)`", readme, re.MULTILINE)
    assert sorted(named) == sorted(STAGES)


def test_matching_sees_a_difference() -> None:
    """A number that is no speed, a missing line and another word are differences; a speed is none."""
    assert matches("3 shards, 120 samples/s\n", "3 shards, 95.2 samples/s\n")
    assert matches("a\n...\nb\n", "a\n1\n2\nb\n")
    assert not matches("3 shards\n", "4 shards\n")
    assert not matches("3 shards\n4 shards\n", "3 shards\n")
