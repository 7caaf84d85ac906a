"""The benchmark with other loaders runs, and names who is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from folders import ALL

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
