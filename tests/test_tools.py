"""The developers' tools and the files that set the project up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image


def files_below(folder: Path) -> dict[str, bytes]:
    """Contents of all files by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jpg")}


def test_the_same_arguments_make_the_same_photos(tmp_path: Path, photos: Path, load_tool) -> None:
    """Bytes depend on seed and number alone: a smaller set is a part of a larger one, another seed another set."""
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
    """None of them would be fetched."""
    assert len(load_tool("make_photos").load_photos()) >= 8


def test_the_tar_bench_compares_at_both_sizes(repository: Path) -> None:
    """One line a size, each with four positive numbers. What they are is for a quiet machine."""
    command = [sys.executable, "tools/bench_tar.py", "--rounds", "5", "--megabytes", "1"]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    lines = [[float(cell.replace(",", "")) for cell in line.split()] for line in done.stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == [3_000, 100_000]
    assert all(len(line) == 5 and min(line) > 0 for line in lines)


def test_the_packing_bench_compares_every_case(repository: Path, tmp_path: Path) -> None:
    """One line a case, all its numbers over 0, and no file left. What they are is for a quiet machine."""
    command = [sys.executable, "-W", "ignore", "tools/bench_pack.py", "--rounds", "3", "--megabytes", "1", "--json"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], cwd=repository, check=True, capture_output=True, text=True
    )
    lines = json.loads(done.stdout)["lines"]
    sizes = ("2.6 kB", "97.1 kB")
    cases = [
        "pack 100 kB",
        "pack 3 kB",
        *(f"{way} {size}" for size in sizes for way in ("index", "verify")),
    ]
    assert [line["case"] for line in lines] == cases
    assert all(value > 0 for line in lines for value in line.values() if isinstance(value, float))
    assert [*tmp_path.iterdir()] == []


def test_the_image_bench_compares_all_chains(repository: Path) -> None:
    """Uint8 and float, each with three positive numbers; in threads with images/s and their ratio as well."""
    command = [sys.executable, "tools/bench_image.py", "--rounds", "7", "--num", "2", "--size", "90x80@90"]
    done = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    lines = [line.split("  ") for line in done.stdout.splitlines() if line.startswith("  ") and "x bare" not in line]
    chains = ["bare", "fused", "fused, into a batch", "fused, by eights", "apart", "Pillow"]
    assert [line[1] for line in lines[:6]] == chains
    assert len(lines) == 12 + 6
    cells = [" ".join(line[2:]).split() for line in lines]
    assert [len(row) for row in cells] == [3] * 12 + [5] * 6
    assert all(float(cell) > 0 for row in cells for cell in row)


def test_the_engine_bench_tells_where_the_time_goes(load_tool, capsys, monkeypatch) -> None:
    """A line a part whose shares are of the whole, and a line for each way of running the loader."""
    tool = load_tool("bench_engine")
    monkeypatch.setattr(tool, "COMBINATIONS", ((0, 1), (0, 2)))
    monkeypatch.setattr(tool, "WARM", 1)
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--rounds", "1", "--epochs", "1", "--num", "128"])
    tool.main()
    lines = capsys.readouterr().out.splitlines()
    parts = [line.rsplit("%", 1)[0].split() for line in lines[1:7]]
    assert [line[0] for line in lines[1:7]] == ["o", "r", "i", "d", "s", "w"]
    us = [float(cells[-2]) for cells in parts]
    assert sum(us[:-1]) == pytest.approx(us[-1], abs=5)
    assert parts[-1][-1] == "100"
    ways = [line.split() for line in lines[8:]]
    assert [" ".join(cells[:3]) for cells in ways] == ["0 x 1", "0 x 2"]
    assert all(float(cell.replace(",", "")) > 0 for cells in ways for cell in cells[3:7])


def test_the_order_bench_tells_all_costs(load_tool, capsys, monkeypatch) -> None:
    """A line for each number of ranks, and one for the start of an epoch. What the times are is for a quiet machine."""
    tool = load_tool("bench_order")
    monkeypatch.setattr(tool, "RANKS", (1000, 3000))
    monkeypatch.setattr(tool, "MIN_STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["bench_order.py", "--rounds", "5", "--shards", "1000"])
    tool.main()
    head, titles, *lines, start = capsys.readouterr().out.splitlines()
    assert "1,000,000 samples in 1,000 shards, batches of 256" in head
    assert titles.split() == ["ranks", "exact", "1", "of", "8", "workers", "resampled", "mixture"]
    cells = [[float(cell.rstrip("%")) for cell in line.split()] for line in lines]
    assert [line[0] for line in cells] == [1000, 3000]
    assert all(len(line) == 9 and min(line) > 0 for line in cells)
    assert re.fullmatch(r"start of an epoch, .*: \d+\.\d\d s, \d+ MB", start)


def test_train_ddp_stays_small(repository: Path) -> None:
    """It is there to be read."""
    assert len((repository / "tools" / "train_ddp.py").read_text().splitlines()) <= 140


def test_ci_runs_make_test(repository: Path) -> None:
    """.ci/run can be executed from anywhere and calls `make test`."""
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text().splitlines()


def test_each_make_target_can_be_planned_and_is_told_by_make_help_and_the_readme(repository: Path) -> None:
    """`make -n` plans it; those that set up and tell need not be told."""
    environment = {**os.environ, "MAKEFLAGS": ""}

    def make(*words: str) -> str:
        done = subprocess.run(
            ["make", *words], cwd=repository, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    [targets] = re.findall(r"^\.PHONY: (.*)$", (repository / "Makefile").read_text(), re.MULTILINE)
    told, readme = make("help"), (repository / "README.md").read_text()
    for target in {*targets.split()} - {"help", "setup"}:
        assert make("-n", target)
        assert re.search(rf"^make {target} ", told, re.MULTILINE), target
        assert re.search(rf"^make {target}\b", readme, re.MULTILINE), target


def test_the_demo_installs_what_it_runs_and_nothing_for_developers(repository: Path, script_environment) -> None:
    words = ["make", "--always-make", "-n", "demo"]
    done = subprocess.run(words, cwd=repository, env=script_environment, check=True, capture_output=True, text=True)
    installed = [line.rpartition("constraints.txt ")[2] for line in done.stdout.splitlines() if "pip install" in line]
    assert installed == ["torch==2.13.0", "--editable .", "--no-deps scikit-image"]


def test_every_dependency_is_pinned(repository: Path) -> None:
    """constraints.txt holds `name==version` lines only, no local versions, and every package that we name."""
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
