"""The developers' tools and the files that set the project up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from forking import Interpreter


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


BENCH_WAYS = {
    "tar": {"webdataset", "wdskit"},
    "pack": {"tar cf, sync", "ShardWriter", "wdskit pack"},
    "reshard": {"webdataset", "merge", "shuffle", "drop cls", "where"},
    "verify": {"sha256sum", "hashlib", "index", "verify --images none", "verify"},
}


def test_each_part_of_the_bench_compares_all_ways_and_leaves_no_file(
    python: Interpreter, repository: Path, tmp_path: Path
) -> None:
    """Every line has four numbers, whose values are not checked."""
    tools = repository / "tools" / "bench"
    (tmp_path / "work").mkdir()
    words = [*BENCH_WAYS, "--quick", "--folder", str(tmp_path / "work")]
    done = python.run(
        tmp_path / "script.py",
        f"""
import runpy, sys
sys.path.insert(0, {str(tools)!r})
sys.argv = ["bench_parts.py", *{words!r}]
runpy.run_path({str(tools / "bench_parts.py")!r}, run_name="__main__")
""",
    )
    assert done.returncode == 0, done.stderr
    assert [*(tmp_path / "work").iterdir()] == []
    found: dict[str, set[str]] = {}
    for table in done.stdout.strip().split("\n\n"):
        title, _, *lines = table.splitlines()
        rows = {name: cells for name, *cells in (re.split(r"\s{2,}", line) for line in lines)}
        assert all(len(cells) == 4 and float(cells[0].replace(",", "")) > 0 for cells in rows.values())
        found.setdefault(title.partition(":")[0], set()).update(rows)
    assert found == BENCH_WAYS


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
