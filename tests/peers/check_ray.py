"""`pack --on ray` on a cluster of this machine. `make long` installs Ray and runs this; `make test` does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import REPOSITORY
from formats import files_in
from images import make_folder

from wdskit import pack

PYTHON = Path(os.environ.get("WDSKIT_RAY_PYTHON", Path(sys.prefix, "peers", "ray", "bin", "python")))

PACK = """
import json, os, sys, time
from pathlib import Path
from wdskit import pack
from wdskit.testing import Disk, use_disk

class Killed(Disk):
    "On a worker of the cluster: kills it, once, in the middle of a shard; or is so slow that it can be stopped."
    def __init__(self, how, mark):
        self.how, self.mark, self.main = how, mark, os.getpid()
    def write(self, fd, data):
        is_worker = os.getpid() != self.main
        if is_worker and self.how == "kill":
            try:
                os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), 9)
        if is_worker and self.how == "slow":
            Path(self.mark).touch()
            time.sleep(600)
        return super().write(fd, data)

source, dest, how, options = *sys.argv[1:4], json.loads(sys.argv[4])
disk = Disk() if how == "plain" else Killed(how, source + "-mark")
with use_disk(disk):
    pack(source, dest, on="ray", **options)
"""


@pytest.fixture
def script(tmp_path):
    assert PYTHON.exists(), f"{PYTHON} is not there. Run `make long WHAT=peers`."
    (tmp_path / "run_pack.py").write_text(PACK)
    return tmp_path / "run_pack.py"


def start(script: Path, source: Path, dest: Path, how: str, **options: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(REPOSITORY), str(script.parent)])
    command = [str(PYTHON), str(script), str(source), str(dest), how, json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": "local"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", ["plain", "kill"])
@pytest.mark.parametrize("options", [{}, {"split": "train=0.7,val=0.3", "resize": 8}])
def test_a_cluster_writes_the_bytes_of_a_local_run_even_when_a_worker_is_killed(tmp_path, script, how, options):
    source = make_folder(tmp_path / "photos", {"cat": 40, "dog": 30})
    pack(source, tmp_path / "a" / "out", max_samples=5, shuffle=1, **options)
    done = start(script, source, tmp_path / "b" / "out", how, max_samples=5, shuffle=1, **options)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert (tmp_path / "photos-mark").exists() == (how == "kill")
    assert files_in(tmp_path / "b" / "out") == files_in(tmp_path / "a" / "out")


def test_ctrl_c_ends_the_workers_and_the_run_goes_on_later(tmp_path, script):
    source = make_folder(tmp_path / "photos", {"cat": 20})
    running = start(script, source, tmp_path / "b" / "out", "slow", max_samples=5)
    end = time.monotonic() + 120
    while not (tmp_path / "photos-mark").exists():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        os.sched_yield()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode != 0
    assert "KeyboardInterrupt" in err
    assert not [*(tmp_path / "b" / "out").glob("*.tar*")]
    pack(source, tmp_path / "a" / "out", max_samples=5)
    pack(source, tmp_path / "b" / "out", max_samples=5)
    assert files_in(tmp_path / "b" / "out") == files_in(tmp_path / "a" / "out")
