"""The benchmark beside other loaders measures what it says, and believes nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

METRICS = ("samples_per_s", "cpu_ms", "first_s", "start_s", "next_epoch_s", "pss_mb")


def python(*words: str, repository: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the tools in reach; `peers` is another package here in the tests."""
    environment = {**os.environ, "PYTHONPATH": str(repository / "tools")}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )


def test_the_driver_measures_those_who_are_there_and_names_the_others(repository: Path, tmp_path: Path) -> None:
    """On data so small that the numbers say nothing, but each sample came once, in each of three loaders."""
    tool = str(repository / "tools" / "bench_peers.py")
    words = ["--quick", "--no-install", "--parts", "small,images"]
    only = ["--only", "bare", "wdskit", "webdataset", "litdata"]
    done = python(tool, *words, *only, "--json", "found.json", repository=repository, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["missing"] == {"litdata": "not installed, and --no-install was given"}
    assert "litdata is missing: not installed" in done.stdout
    assert [part["key"] for part in found["parts"]] == ["small-2000", "images-uint8"]
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


CHECK = """
import json, sys
from peers.common import Job
from peers.report import problems
job = Job("{kind}", "", 8, 100 * ("{kind}" == "bytes"), 4)
shape = "uint8 (4, 3, 224, 224)" if job.kind == "images" else "4"
right = dict(samples=8, distinct=8, mixed=0, in_order=0.1, shapes=[shape], num_bytes=8 * job.size, digest=7)
right |= dict(mean=100, deviation=50)
bare = dict(tallies=[right])
cheats = json.loads(sys.argv[1])
print(json.dumps([problems(job, dict(tallies=[right | changes, right | changes]), bare) for changes in cheats]))
"""

CHEATS = {
    "nothing": {},
    "a sample less": {"samples": 7, "distinct": 7},
    "one twice": {"distinct": 7},
    "two mixed up": {"mixed": 2},
    "smaller crops": {"shapes": ["uint8 (4, 3, 192, 192)"]},
    "not shuffled": {"in_order": 0.9},
}


@pytest.mark.parametrize(
    ("kind", "cheats"),
    [
        ("images", CHEATS | {"darker": {"mean": -100}, "no antialiasing": {"deviation": 250}}),
        ("bytes", CHEATS | {"cut short": {"num_bytes": 700}, "other bytes": {"digest": 8}}),
    ],
)
def test_who_delivers_something_else_is_found_out(kind: str, cheats: dict, repository: Path) -> None:
    """Each cheat alone."""
    code = CHECK.replace("{kind}", kind)
    done = python("-c", code, json.dumps([*cheats.values()]), repository=repository, cwd=repository)
    assert done.stderr == ""
    for name, found in zip(cheats, json.loads(done.stdout), strict=True):
        assert bool(found) == (name != "nothing"), (name, found)


def test_a_reason_names_no_place_of_this_machine(repository: Path) -> None:
    """Of paths the last part stays, of addresses nothing."""
    code = "import sys; from environments import reason; print(reason(sys.argv[1]))"
    lines = [
        "Looking in https://host.example/simple",
        "ERROR: No file /opt/a/b.so at https://h.example/x (host='h.example')",
    ]
    done = python("-c", code, "\n".join(lines), repository=repository, cwd=repository)
    assert done.stdout == "ERROR: No file b.so at (address) (host=(address))\n"
