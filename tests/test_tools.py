"""The developers' tools and the files that set the project up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from forking import Interpreter
from PIL import Image


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


def test_photos_have_imagenet_like_sizes_in_at_least_8_classes(photos: Path) -> None:
    """Whole JPEG files in RGB of 300 to 600 pixels a side, the same number in each class."""
    classes = [path for path in photos.iterdir() if path.is_dir()]
    assert len(classes) >= 8
    assert {len(list(path.iterdir())) for path in classes} == {4}
    for path in photos.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert all(300 <= side <= 600 for side in image.size)


def test_all_photographs_are_in_the_installed_package(load_tool) -> None:
    """No photograph is downloaded."""
    assert len(load_tool("make_photos").load_photos()) >= 8


BENCH_WAYS = {
    "tar": {"webdataset", "wdskit"},
    "pack": {"tar cf, sync", "ShardWriter", "wdskit pack"},
    "reshard": {"webdataset", "merge", "shuffle", "drop cls", "where"},
    "verify": {"sha256sum", "hashlib", "index", "verify --images none", "verify"},
}


def run_bench(python: Interpreter, repository: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python tools/bench/bench_parts.py WORDS`, from a script in a folder."""
    tools = repository / "tools" / "bench"
    return python.run(
        folder / "script.py",
        f"""
import runpy, sys
sys.path.insert(0, {str(tools)!r})
sys.argv = ["bench_parts.py", *{words!r}]
runpy.run_path({str(tools / "bench_parts.py")!r}, run_name="__main__")
""",
    )


@pytest.fixture(scope="module")
def bench_tables(python: Interpreter, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of a quick run of these parts, which leaves no file."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "work").mkdir()
    done = run_bench(python, repository, folder, *BENCH_WAYS, "--quick", "--folder", str(folder / "work"))
    assert done.returncode == 0, done.stderr
    assert [*(folder / "work").iterdir()] == []
    return done.stdout.strip().split("\n\n")


@pytest.mark.parametrize(("part", "ways"), BENCH_WAYS.items(), ids=BENCH_WAYS)
def test_each_part_of_the_bench_compares_all_ways(part: str, ways: set[str], bench_tables: list[str]) -> None:
    """Every line has four positive numbers, whose values are not checked."""
    found = set()
    tables = [table for table in bench_tables if table.startswith(f"{part}: ")]
    assert tables
    for table in tables:
        _, _, *lines = table.splitlines()
        rows = {name: cells for name, *cells in (re.split(r"\s{2,}", line) for line in lines)}
        assert all(len(cells) == 4 and float(cells[0].replace(",", "")) > 0 for cells in rows.values())
        assert [next(iter(rows.values()))[at] for at in (1, 3)] == ["1.00", "1.00"]
        found |= rows.keys()
    assert found == ways


def test_the_bench_runs_no_other_part(bench_tables: list[str]) -> None:
    assert {table.partition(":")[0] for table in bench_tables} == BENCH_WAYS.keys()


def test_the_bench_refuses_too_few_rounds_and_unknown_parts(
    python: Interpreter, repository: Path, tmp_path: Path
) -> None:
    for words, message in (("tar --rounds 4", "--rounds: 4: fewer than 5"), ("tra", "tra: no such part")):
        done = run_bench(python, repository, tmp_path, *words.split())
        assert (done.returncode, message in done.stderr) == (2, True)


def test_the_training_script_stays_small(repository: Path) -> None:
    """It is an example to read."""
    assert len((repository / "tools" / "train.py").read_text().splitlines()) <= 150


def test_ci_runs_make_test(repository: Path) -> None:
    """.ci/run can be executed from anywhere and calls `make test`."""
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text().splitlines()


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
