"""The benchmarks with other loaders, from the disk and from a store, run and name who is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from folders import ALL
from forking import Interpreter

METRICS = ("samples_per_s", "cpu_ms", "first_s", "start_s", "next_epoch_s", "pss_mb")


def test_the_driver_measures_those_who_are_there_and_names_the_others(repository: Path, tmp_path: Path) -> None:
    """With little data: the numbers mean nothing, but each of three loaders delivers each sample once.

    `make long WHAT=peers` also runs the images.
    """
    parts = {"small": "small-2000"} | ({"images": "images-uint8"} if ALL else {})
    command = [sys.executable, repository / "tools" / "bench" / "bench_peers.py", "--quick", "--no-install"]
    command += ["--parts", ",".join(parts), "--only", "bare", "wdskit", "webdataset", "litdata", "--json", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["missing"] == {"litdata": "not installed, and --no-install was given"}
    assert "litdata is missing: not installed" in done.stdout
    assert [part["key"] for part in found["parts"]] == [*parts.values()]
    for part in found["parts"]:
        assert [line["peer"] for line in part["lines"]] == ["bare", "wdskit", "webdataset"]
        for line in part["lines"]:
            assert line["problem"] == ""
            assert min(line[metric] for metric in METRICS) > 0
            assert line["title"] in done.stdout
        assert part["lines"][0]["cpu_ms_ratio"] == 1
        assert all(line["cpu_ms_ratio"] > 0 for line in part["lines"])
    assert found["versions"].keys() >= {"wdskit", "webdataset", "torch"}
    assert str(tmp_path) not in done.stdout


RUN = """
import bench_remote, json
sys.argv += WORDS
found = bench_remote.run(bench_remote.arguments())
print(json.dumps(found))
print(bench_remote.markdown(found), file=sys.stderr)
"""


def test_nodes_and_epochs_are_measured_and_who_is_missing_is_named(
    python: Interpreter, repository: Path, tmp_path: Path
) -> None:
    """In its own process, because `peers` is another package in the tests."""
    words = ["--only", "wdskit", "litdata", "--nodes", "2", "--num", "32", "--batch", "4", "--workers", "0"]
    words += ["--delay-ms", "1", "--shard-mb", "0.5", "--no-install"]
    folders = [str(repository / "tools" / "bench"), str(repository)]
    begin = f"import os, sys\nsys.path[:0] = {folders!r}\nos.environ['PYTHONPATH'] = {os.pathsep.join(folders)!r}\n"
    done = python.run(tmp_path / "script.py", begin + RUN.replace("WORDS", str(words)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == ["litdata is missing: not installed, and --no-install was given"]
    assert [(row["name"], row["nodes"], row["epoch"]) for row in found["rows"]] == [("wdskit", 2, 1), ("wdskit", 2, 2)]
    first, second = found["rows"]
    assert first["ratio"] > 1 > second["ratio"] / 2
    for row in found["rows"]:
        assert min(row["samples_per_s"], row["cpu_s_per_gb"], row["first_s"]) > 0
    assert "| 2 x 2 | wdskit | 1 |" in done.stderr
    assert str(tmp_path) not in done.stderr
