"""After `kill -9` of a command, main process and workers, at a random moment, the same command gives the same result as
without the kill.

WDSKIT_ALL_FAULTS=1 (`make faults`) kills each command 24 times.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disks import OWN
from images import make_folder
from pack_cases import remains_of, without_temp_files
from shards import bytes_in

from wdskit import pack

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))
NUM_KILLS = 24 if ALL else 1
RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A folder of images, and its shards."""
    base = tmp_path_factory.mktemp("kills")
    make_folder(base / "photos", {"cat": 90, "dog": 70})
    pack(base / "photos", base / "shards", max_samples=40)
    return base


def commands(sources: Path) -> dict[str, list[str]]:
    small = ["--max-samples", "4", "--pattern", "p-%03d.tar", "--shuffle", "3", "--workers", "2"]
    return {
        "pack": ["pack", str(sources / "photos"), *small],
        "reshard": ["reshard", str(sources / "shards"), *small, "--drop", "json"],
    }


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    words = [command[0], command[1], str(folder), *command[2:]]
    return subprocess.Popen(
        [*RUN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, cwd=folder.parent
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for_files(process: subprocess.Popen[bytes], folder: Path, number: int, rng: random.Random) -> None:
    """Wait until that number of files exists, or the command has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and num_files(folder) < number:
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=rng.random() / 50)


def num_files(folder: Path) -> int:
    return sum(path.name not in OWN for path in folder.glob("*"))


@pytest.mark.parametrize("name", ["pack", "reshard"] if ALL else ["pack"])
def test_a_command_that_is_killed_with_all_its_processes_is_done_by_the_same_again(tmp_path, sources, name):
    """The kill comes when a random number of files exists or, in one of four cases, shortly after the start."""
    command = commands(sources)[name]
    whole = start(command, tmp_path / "whole")
    assert (whole.communicate()[1], whole.returncode) == (b"", 0)
    after = bytes_in(tmp_path / "whole")
    rng = random.Random(0)
    num_killed = 0
    for number in range(NUM_KILLS):
        folder = tmp_path / f"{number}"
        for _ in range(rng.choice([1, 2]) if ALL else 1):
            process = start(command, folder)
            wait_for_files(process, folder, rng.randrange(len(after)) if rng.random() < 0.75 else 1, rng)
            num_killed += process.poll() is None
            kill_group(process)
            left = without_temp_files(remains_of(folder))
            assert left.items() <= after.items()
            assert "index.json" not in left or left == after
        if remains_of(folder) != after:  # also if only a run journal is left of the run
            again = start(command, folder)
            assert (again.communicate()[1], again.returncode) == (b"", 0)
        assert bytes_in(folder) == after
    assert num_killed >= NUM_KILLS
