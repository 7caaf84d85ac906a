"""The developers' tools and the files that set the project up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_the_same_arguments_make_the_same_photos(tmp_path: Path, photos: Path, load_tool) -> None:
    """Bytes depend only on seed and number: a smaller set is a part of a larger one, another seed gives another set."""
    make_photos = load_tool("make_photos").make_photos
    make_photos(tmp_path / "again", num=24, seed=0)
    make_photos(tmp_path / "other", num=24, seed=1)
    whole, again, other = (files_below(folder) for folder in (photos, tmp_path / "again", tmp_path / "other"))
    assert len(whole) == 48
    assert again == {name: data for name, data in whole.items() if int(Path(name).stem) < 24}
    assert again.keys() == other.keys()
    assert not set(again.values()) & set(other.values())


def test_each_make_target_can_be_planned_and_is_in_make_help_and_contributing(repository: Path) -> None:
    """`make -n` plans it, and each test file that it names exists; `make help` and `make setup` are not listed."""
    environment = {**os.environ, "MAKEFLAGS": ""}

    def make(*words: str) -> str:
        return subprocess.run(
            ["make", *words], cwd=repository, env=environment, check=True, capture_output=True, text=True
        ).stdout

    makefile, page, listed = (
        (repository / "Makefile").read_text(),
        (repository / "CONTRIBUTING.md").read_text(),
        make("help"),
    )
    [targets] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    suites = re.findall(r"^long-(\w+):", makefile, re.MULTILINE)
    for name in [*{*targets.split()} - {"help", "setup"}, *(f"long WHAT={suite}" for suite in suites)]:
        planned = make("-n", *name.split())
        assert planned
        assert all([*repository.glob(path)] for path in re.findall(r" (tests/\S+)", planned)), planned
        assert re.search(rf"^make {name}\b", page, re.MULTILINE), name
        assert re.search(rf"^(make| +) {name.removeprefix('long ')} ", listed, re.MULTILINE), name


def test_the_demo_installs_what_it_runs_and_nothing_for_developers(repository: Path, script_environment) -> None:
    words = ["make", "--always-make", "-n", "demo"]
    done = subprocess.run(words, cwd=repository, env=script_environment, check=True, capture_output=True, text=True)
    installed = [line.rpartition("constraints.txt ")[2] for line in done.stdout.splitlines() if "pip install" in line]
    assert installed == ["torch==2.13.0", "--editable .", "--no-deps scikit-image"]


def test_every_dependency_is_pinned(repository: Path) -> None:
    """constraints.txt has only `name==version` lines, without local versions, and every package that wdskit names."""
    lines = [line for line in (repository / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r'[\w.-]+==[\w.]+(; python_version (<|>=) "3\.11")?', line), line
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    pyproject = (repository / "pyproject.toml").read_text()
    named = {
        re.match(r"[\w-]+", requirement).group().lower()
        for table in re.findall(r"^(?:dependencies|dev) = \[\n(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
        for requirement in re.findall(r'"([^"]+)"', table)
    }
    assert len(named) >= 20
    assert named <= pinned
