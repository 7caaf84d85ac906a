"""`on="ray"` with a stand-in for Ray; `peers/check_ray.py` tests it with a real cluster."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from formats import files_in, make_photos
from rays import FakeRay

from wdskit import PackError, pack
from wdskit.packing import ray as on_ray
from wdskit.pipeline import ray_connection

pytestmark = pytest.mark.usefixtures("hasty_disk")

OPTIONS: dict[str, Any] = {"max_samples": 2}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.chdir(Path.cwd())  # a task changes the current folder
    return fake


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", {"cat": 5, "dog": 4})


def rows(num: int = 7) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(num)]


def check_same(source: Any, tmp_path: Path, **options: Any) -> None:
    """Compare a run on Ray with a local one."""
    pack(source, tmp_path / "local" / "d", workers=1, **OPTIONS, **options)
    pack(source, tmp_path / "ray" / "d", **OPTIONS, **options, on="ray")
    assert files_in(tmp_path / "ray" / "d") == files_in(tmp_path / "local" / "d")


@pytest.mark.parametrize(
    "options", [{}, {"skip_bad": True}, {"split": "a=0.5,b=0.5"}, {"resize": 4, "keep_json": True}, {"columns": "cls"}]
)
def test_a_cluster_writes_the_bytes_of_a_local_run(tmp_path: Path, ray: FakeRay, photos: Path, options: Any) -> None:
    check_same(photos, tmp_path, shuffle=3, **options)
    assert ray.calls == [("init", None), "shutdown"]
    assert ray.options == {"max_retries": 3, "num_cpus": 1}


def test_a_task_runs_in_another_process_with_relative_paths(
    tmp_path: Path, ray: FakeRay, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments and results can be pickled, and relative paths are found from another current folder."""
    script = "import pickle, sys; f, *w = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(pickle.dumps(f(*w)))"

    def run(*words: Any) -> Any:
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, check=False, input=pickle.dumps(words), capture_output=True, cwd="/", env=paths)
        assert not done.stderr
        return pickle.loads(done.stdout)

    ray.run = run
    monkeypatch.chdir(tmp_path)
    check_same(Path("photos"), Path())


def leave_a_draft(job: Any, filler: Any, *words: Any) -> None:
    """Leave a temporary file, as a worker that is killed while it writes."""
    (filler.work / f".{job.digest}.tar.0badcafe.wdskit-temp").write_bytes(b"half")


def fill_half(job: Any, filler: Any, *words: Any) -> None:
    """Leave the shard without its entry, as a worker that is killed between them."""
    filler.fill(job)
    (filler.work / f"{job.digest}.json").unlink()


@pytest.mark.parametrize("die", [lambda *_: None, leave_a_draft, fill_half])
def test_a_shard_whose_worker_died_is_filled_again(tmp_path: Path, ray: FakeRay, die: Any) -> None:
    ray.deaths = {"d-000000.tar": 1, "d-000002.tar": 3}
    ray.die = die
    check_same(rows(), tmp_path)
    assert not any(ray.deaths.values())


def test_a_shard_that_kills_each_worker_ends_the_run_which_the_same_call_continues(
    tmp_path: Path, ray: FakeRay
) -> None:
    ray.deaths = {"d-000001.tar": 100}
    with pytest.raises(PackError, match=r"d-000001\.tar: a node of the cluster cannot fill it: The worker died"):
        pack(rows(), tmp_path / "ray" / "d", **OPTIONS, on="ray")
    assert ray.calls[1:] == [*(("cancel", f"d-00000{n}.tar") for n in (1, 2, 3)), "wait", "shutdown"]
    ray.deaths = {}
    check_same(rows(), tmp_path)


def test_ctrl_c_cancels_the_tasks_that_are_not_done(tmp_path: Path, ray: FakeRay) -> None:
    def interrupt(*words: Any) -> None:
        leave_a_draft(*words)
        raise KeyboardInterrupt

    ray.deaths, ray.die = {"d-000001.tar": 1}, interrupt
    with pytest.raises(KeyboardInterrupt):
        pack(rows(), tmp_path / "ray" / "d", **OPTIONS, on="ray")
    assert ray.calls[1:] == [*(("cancel", f"d-00000{n}.tar") for n in (1, 2, 3)), "wait", "shutdown"]
    assert not files_in(tmp_path / "ray" / "d").keys() & {"index.json", "d-000000.tar"}
    check_same(rows(), tmp_path)


def test_parts_and_additions_run_on_a_cluster_that_is_connected(tmp_path: Path, ray: FakeRay) -> None:
    ray.connected = True
    for part in ("0/2", "1/2"):
        pack(rows(), tmp_path / "ray" / "d", **OPTIONS, on="ray", part=part)
    check_same(rows(), tmp_path)
    check_same([{**row, "__key__": "more" + row["__key__"]} for row in rows(3)], tmp_path, append=True)
    assert ray.calls == []


@pytest.mark.parametrize("what", ["version", "rows", "source"])
def test_a_node_with_another_version_or_without_the_files_is_named(
    tmp_path: Path, ray: FakeRay, photos: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def elsewhere(function: Any, job: Any, *words: Any) -> Any:
        monkeypatch.setattr(on_ray.socket, "gethostname", lambda: "node7")
        if what == "version":
            monkeypatch.setattr(on_ray, "__version__", "0.0.1")
        elif what == "rows":
            Path(job.rows.path).unlink()
        else:
            photos.rename(tmp_path / "gone")
        return function(job, *words)

    ray.run = elsewhere
    with pytest.raises(PackError, match="photos/cat/0000.jpg" if what == "source" else "host node7"):
        pack(photos, tmp_path / "ray" / "d", **OPTIONS, on="ray")
    assert not [*tmp_path.glob("ray/d/*.tar")]


def test_a_cluster_that_cannot_be_reached_or_a_missing_ray_is_an_error(
    tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_connection, "_ANSWER_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for problem in ("Connection refused", "timed out"):
            with pytest.raises(PackError, match=f"^on: the cluster {address} cannot be reached: .*{problem}"):
                pack(rows(3), tmp_path / "d", on="ray")
            server.listen()
    ray.connected = True
    with pytest.raises(PackError, match="already connected to Ray, but not to ray://other:1"):
        pack(rows(3), tmp_path / "d", on="ray://other:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PackError, match=r"\[ray\]"):
        pack(rows(3), tmp_path / "d", on="ray")


@pytest.mark.parametrize("on", ["", "Ray", "ray:", "ray://", "ray://head", "ray://:1", "head:1", "ray://a:1 b"])
def test_another_address_is_refused(tmp_path: Path, on: str) -> None:
    with pytest.raises(PackError, match=r"^on: String should match pattern"):
        pack(rows(3), tmp_path / "d", on=on)
