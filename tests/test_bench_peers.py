"""The benchmark with other loaders measures what it claims, and checks what each loader delivers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
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


CHECK = """
import json, sys
sys.path.insert(0, {tools!r})  # where `peers` is another package than here in the tests
from peers.common import Job
from peers.report import problems
job = Job({kind!r}, "", 8, 100 * ({kind!r} == "bytes"), 4)
shape = "uint8 (4, 3, 224, 224)" if job.kind == "images" else "4"
right = dict(samples=8, distinct=8, mixed=0, in_order=0.1, shapes=[shape], num_bytes=8 * job.size, digest=7)
right |= dict(mean=100, deviation=50)
bare = dict(tallies=[right])
print(json.dumps([problems(job, dict(tallies=[right | changes, right | changes]), bare) for changes in {cheats!r}]))
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
def test_who_delivers_something_else_is_found_out(
    kind: str, cheats: dict, repository: Path, tmp_path: Path, python: Interpreter
) -> None:
    """Each fault is tried alone."""
    code = CHECK.format(tools=str(repository / "tools" / "bench"), kind=kind, cheats=[*cheats.values()])
    done = python.run(tmp_path / "script.py", code)
    assert done.stderr == ""
    for name, found in zip(cheats, json.loads(done.stdout), strict=True):
        assert bool(found) == (name != "nothing"), (name, found)


def test_a_reason_names_no_place_of_this_machine(load_tool) -> None:
    """A path keeps only its last part, an address is removed."""
    lines = [
        "Looking in https://host.example/simple",
        "ERROR: No file /opt/a/b.so at https://h.example/x (host='h.example')",
    ]
    found = load_tool("environments").reason("\n".join(lines))
    assert found == "ERROR: No file b.so at (address) (host=(address))"
