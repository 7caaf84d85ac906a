"""README.md and docs/ are right: the blocks of a page run, in order, in one folder, and print what the page shows.

WDSKIT_UPDATE_GOLDEN=1 writes the outputs that differ into the pages.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import pytest
from folders import HELPERS, REPOSITORY
from forking import Interpreter

from wdskit import load_config

RUN = {"bash", "python"}  # run in the reader's folder; a `text` block directly after such a block is its output
KEPT = {"yaml"}  # written to the file named in the first line, and checked; also python blocks with `# NAME.py`
SET_UP = {"sh"}  # for a new machine or for developers: checked, not run
OPTIONAL = {"albumentations", "datasets", "open_clip", "transformers"}
"""A block that imports one of these packages runs only if the package is installed."""
WITH_TORCHVISION = "import sys; sys.path.insert(1, {!r}); import with_torchvision as t; t.make_importable()"
"""First line of a block that needs torchvision, which `make setup` hides from all other tests."""
GENERATED = {"api.md", "cli.md", "stages.md"}  # tools/dev/generate.py writes these; it has its own tests
OWN_DATA = {"README.md", "docs/index.md"}  # these pages pack the data that other pages use
SLURM = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo localhost",
    "sbatch": "export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=localhost SLURM_NNODES=1 SLURM_GPUS_ON_NODE=1; bash -eu $1",
}
"""Stand-ins for the commands of Slurm, which a page runs: `sbatch` runs the job at once, on this machine."""
PACK = "wdskit pack photos data --split train=0.8,val=0.2 --shuffle 1 --max-samples 100"
NUM_PHOTOS = 240


class Block(NamedTuple):
    """One fenced block: its language, its text, the line of its first fence, and the output that the page shows."""

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
    """Replace times and speeds, which differ between runs."""
    return re.sub(r"[\d.,]+(\s?(samples/s|[kMG]?B/s|us|ms|s)\b|\s?%| CPUs\b)", "N", text)


def matches(expected: str, actual: str) -> bool:
    """Return whether the output is the expected one; `...` matches any text, trailing spaces do not count."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(without_speeds(expected), without_speeds(actual), flags)


def find_pages() -> list[str]:
    """Return the paths, in the repository, of README.md, CONTRIBUTING.md and all pages that are not generated."""
    written = [path for path in sorted((REPOSITORY / "docs").glob("*.md")) if path.name not in GENERATED]
    return ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in written)]


PAGES = find_pages()


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page of the repository."""
    return read_blocks((REPOSITORY / page).read_text(encoding="utf-8"))


ALL_BLOCKS = [(page, block) for page in PAGES for block in blocks_of(page)]


def name_of_file(block: Block) -> str:
    """Return the file name in the first line of a block, `# NAME`; empty for a block that is only run."""
    named = re.match(r"# (\S+\.(?:yaml|py))\n", block.text)
    return named[1] if named and block.language in {"yaml", "python"} else ""


def missing_packages(block: Block) -> set[str]:
    """Return the optional packages that a python block imports and that are not installed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name for name in OPTIONAL & {name.partition(".")[0] for name in names} if not PathFinder.find_spec(name)}


@pytest.fixture(scope="module")
def sample_data(tmp_path_factory: pytest.TempPathFactory, load_tool, script_environment: dict[str, str]) -> Path:
    """The data of a reader of Get started: a folder of photographs, and `data`, packed from it."""
    folder = tmp_path_factory.mktemp("reader")
    load_tool("make_photos").make_photos(folder / "photos", num=NUM_PHOTOS, seed=0)
    subprocess.run(PACK.split(), cwd=folder, env=script_environment, check=True, capture_output=True)
    return folder


@pytest.fixture
def folder(tmp_path: Path, sample_data: Path, page: str) -> Path:
    """The folder of a page's reader: a clone, the photographs and, from the second page on, the packed data."""
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "slurm").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "slurm" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "slurm" / name).chmod(0o755)
    for name in ["photos"] if page in OWN_DATA else ["photos", "data"]:
        shutil.copytree(sample_data / name, tmp_path / name, copy_function=os.link)
    return tmp_path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, script_environment: dict[str, str]) -> Iterator[Interpreter]:
    """An interpreter that runs the Python blocks as separate scripts."""
    folder = tmp_path_factory.mktemp("python")
    with Interpreter(folder, script_environment, "-W", "error::UserWarning") as python:
        yield python


def run_block(
    block: Block, folder: Path, environment: dict[str, str], python: Interpreter
) -> subprocess.CompletedProcess[str]:
    """Run one bash or python block as a separate script."""
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        return subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=240
        )
    script = folder / f"block_{block.line}.py"
    head = f"{WITH_TORCHVISION.format(str(HELPERS))}\n" if needs_torchvision(block.text, folder) else ""
    script.write_text(head + block.text)
    return python.start(script).wait()


def needs_torchvision(text: str, folder: Path) -> bool:
    """Return whether a block, or a configuration that the block names, uses the stage `torchvision`."""
    used = [text, *(path.read_text() for path in folder.glob("*.yaml") if path.name in text)]
    return any(re.search(r"^import torchvision$|\.torchvision\(|- torchvision:", each, re.MULTILINE) for each in used)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_and_print_what_the_page_shows(
    page: str, folder: Path, script_environment: dict[str, str], python: Interpreter
) -> None:
    """Every bash and python block exits with 0, and prints the output that the page shows."""
    path = os.pathsep.join([script_environment["PATH"], str(folder / "slurm")])
    for block in blocks_of(page):
        if name := name_of_file(block):
            (folder / name).write_text(block.text)
        if block.language == "yaml":
            load_config(folder / name)
        if name or block.language not in RUN or (block.language == "python" and missing_packages(block)):
            continue
        done = run_block(block, folder, {**script_environment, "PATH": path}, python)
        report = f"{page}:{block.line}\n{block.text}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
        assert done.returncode == 0, report
        assert "Traceback" not in done.stderr, report  # not even of an exception that Python ignores
        if block.output is not None and not matches(block.output, done.stdout):
            assert os.environ.get("WDSKIT_UPDATE_GOLDEN"), report
            write_output(REPOSITORY / page, block, done.stdout)


def write_output(path: Path, block: Block, output: str) -> None:
    """Replace the output that a page shows of a block."""
    printed = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    head = f"```{block.language}\n{block.text}```\n"
    before, _, after = path.read_text(encoding="utf-8").partition(head)
    shown = f"```text\n{block.output}```\n"
    path.write_text(before + head + after.replace(shown, f"```text\n{printed}\n```\n", 1), encoding="utf-8")


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    """No block escapes the tests through its language; a python block that is not run is at least valid Python."""
    assert {block.language for _, block in ALL_BLOCKS} <= RUN | KEPT | SET_UP | {"text"}
    assert sum(block.language in RUN for _, block in ALL_BLOCKS) >= 8
    for page, block in ALL_BLOCKS:
        assert block.language not in KEPT or name_of_file(block), f"{page}:{block.line}: the first line names the file"
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")


def test_get_started_packs_the_data_that_the_other_pages_use() -> None:
    """The fixtures make the same data as the reader's commands."""
    for page in OWN_DATA:
        commands = [line for block in blocks_of(page) if block.language == "bash" for line in block.text.splitlines()]
        assert PACK in commands, page
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert f"python tools/make_photos.py --num {NUM_PHOTOS} photos" in text, page


def test_set_up_commands_exist() -> None:
    """`make x` is a target of the Makefile, `pip install .[x]` an extra of pyproject.toml."""
    environment = {**os.environ, "MAKEFLAGS": ""}
    pyproject = (REPOSITORY / "pyproject.toml").read_text()
    for page, block in ALL_BLOCKS:
        is_batch_job = block.text.startswith("#!")  # for a cluster, which this machine is not
        for line in block.text.splitlines() if block.language in SET_UP and not is_batch_job else []:
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                subprocess.run(
                    ["make", "-n", *words[1:]], cwd=REPOSITORY, env=environment, check=True, capture_output=True
                )
            elif words[0] == "git":
                assert words == ["git", "clone", "URL", "wdskit", "&&", "cd", "wdskit"], f"{page}: {line}"
            elif words[0] == "python":
                assert (REPOSITORY / words[1]).is_file(), f"{page}: {line}"
            else:
                assert words[:2] == ["pip", "install"], f"{page}: {line}"
                extras = [name for word in words[2:] for name in re.findall(r"\[(.*)\]", word)]
                assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), f"{page}: {line}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link names a file or folder, and the heading in it. `make docs` checks the links in docs/."""
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", (REPOSITORY / page).read_text())
    targets = [target for target in map("".join, links) if "://" not in target]
    assert targets
    for target in targets:
        name, _, heading = target.partition("#")
        path = REPOSITORY / (name or page)
        assert path.exists(), target
        assert not heading or heading in {slug(line) for line in path.read_text().splitlines() if line[:1] == "#"}, (
            target
        )


def slug(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).strip().replace(" ", "-")


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_source() -> None:
    """Each part of a quoted message, between its values, is a text in the source of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "wdskit").rglob("*.py")]
    constants = {
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value
    }
    examples = (REPOSITORY / "tests" / "promises" / "bad_configs" / "messages.txt").read_text(encoding="utf-8")
    source = "\n".join([examples, *(text for text in constants if isinstance(text, str))]).replace("`", "'")
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) > 25
    for text in quoted:
        for part in re.split("[^\\w']*…[^\\w']*", text.replace("`", "'")):
            for sentence in re.split(r"(?<=[.;:]) ", part):
                assert sentence.strip(" .'") in source, (text, sentence)
