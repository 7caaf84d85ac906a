"""`pack --on ray` with a stand-in for Ray; `peers/check_ray.py` tests it with a real cluster."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk
from images import make_folder
from pack_cases import staged
from rays import FakeRay, RayTaskError
from shards import bytes_in

from wdskit import PackError, finish_pack, pack
from wdskit.files import Disk
from wdskit.packing import plan
from wdskit.packing import ray as on_ray
from wdskit.packing.ray import RunContext, check_address, fill_on_node

OPTIONS: dict[str, Any] = {"max_samples": 2, "disk": HastyDisk()}


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.chdir(Path.cwd())  # a task changes the current folder
    return fake


def rows(num: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(num)]


def local(folder: Path, source: Any, **options: Any) -> dict[str, bytes]:
    pack(source, folder, **OPTIONS, **{"pattern": "p-%d.tar", **options})
    return bytes_in(folder)


def check_same(tmp_path: Path, **options: Any) -> None:
    source = make_folder(tmp_path / "photos", {"cat": 5, "dog": 4})
    whole = local(tmp_path / "local", source, shuffle=3, **options)
    pack(source, tmp_path / "ray", **OPTIONS, **{"pattern": "p-%d.tar", **options}, shuffle=3, on="ray")
    assert bytes_in(tmp_path / "ray") == whole


@pytest.mark.parametrize("options", [{}, {"skip_bad": True}, {"split": "a=0.5,b=0.5", "pattern": None}, {"resize": 4}])
def test_a_cluster_writes_the_same_bytes(tmp_path, ray, options):
    check_same(tmp_path, **options)
    assert ray.calls == [("init", None), "shutdown"]
    assert ray.options == {"max_retries": 3, "num_cpus": 1}


def test_more_shards_than_wait_at_a_time_and_a_plan_on_disk(tmp_path, ray, monkeypatch):
    monkeypatch.setattr(on_ray, "_MIN_SUBMITTED", 2)
    monkeypatch.setattr(plan, "ROWS_IN_MEMORY", 3)
    check_same(tmp_path)


def test_a_task_runs_in_another_process_with_relative_paths(tmp_path, ray, monkeypatch):
    """Arguments and results can be pickled, and relative paths are found from another current folder."""
    script = (
        "import pickle, sys; f, j, s = pickle.load(sys.stdin.buffer); sys.stdout.buffer.write(pickle.dumps(f(j, s)))"
    )

    def run(function, job, site):
        sent = pickle.dumps((function, job, site))
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, check=False, input=sent, capture_output=True, cwd="/", env=paths)
        assert not done.stderr
        return pickle.loads(done.stdout)

    ray.run = run
    monkeypatch.chdir(tmp_path)
    source = make_folder(Path("photos"), {"cat": 3})
    whole = local(Path("local"), source)
    pack(source, "ray", max_samples=2, pattern="p-%d.tar", on="ray")
    assert bytes_in(Path("ray")) == whole


def leave_a_draft(job, site):
    """Leave a temporary file, as a worker that is killed while it writes."""
    temp = job.path.with_name(f".{job.path.name}.0badcafe.wdskit-temp")
    temp.write_bytes(b"half")


def publish(job, site):
    """Publish only the shard, as a worker that is killed before it writes offsets and returns."""
    assert not isinstance(fill_on_node(job, site), Exception)
    job.path.with_name(f"{job.path.name}.idx").unlink()


@pytest.mark.parametrize("die", [lambda job, site: None, leave_a_draft, publish])
def test_a_shard_whose_worker_died_is_filled_again(tmp_path, ray, die):
    ray.deaths = {"p-0.tar": 1, "p-2.tar": 3}
    ray.die = die
    check_same(tmp_path)
    assert not any(ray.deaths.values())


def test_no_second_try_is_caught(tmp_path, ray, monkeypatch):
    monkeypatch.setattr(on_ray, "_MAX_TRIES", 1)
    with pytest.raises(PackError, match="died 1 times"):
        test_a_shard_whose_worker_died_is_filled_again(tmp_path, ray, leave_a_draft)


def test_a_shard_that_kills_every_worker_ends_the_run_which_can_go_on(tmp_path, ray):
    ray.deaths = {"p-1.tar": 100}
    with pytest.raises(PackError) as caught:
        pack(rows(7), tmp_path / "out", **OPTIONS, pattern="p-%d.tar", on="ray")
    assert "p-1.tar: its worker on the cluster died 4 times: The worker died unexpectedly.\n" in str(caught.value)
    assert ray.calls[1:] == [*(("cancel", f"p-{n}.tar") for n in (1, 2, 3)), "wait", "shutdown"]
    assert [path.name for path in staged(tmp_path / "out").glob("*.tar")] == ["p-0.tar"]
    ray.deaths = {}
    whole = local(tmp_path / "local", rows(7))
    pack(rows(7), tmp_path / "out", **OPTIONS, pattern="p-%d.tar", on="ray")
    assert bytes_in(tmp_path / "out") == whole


def test_ctrl_c_cancels_what_is_not_done(tmp_path, ray):
    def interrupt(job, site):
        leave_a_draft(job, site)
        raise KeyboardInterrupt

    ray.deaths, ray.die = {"p-1.tar": 1}, interrupt
    with pytest.raises(KeyboardInterrupt):
        pack(rows(7), tmp_path / "out", **OPTIONS, pattern="p-%d.tar", on="ray")
    assert ray.calls[1:] == [*(("cancel", f"p-{n}.tar") for n in (1, 2, 3)), "wait", "shutdown"]
    assert not [*(tmp_path / "out").glob("*temp*")]


def test_an_error_of_a_row_is_that_of_a_local_run(tmp_path, ray):
    source = make_folder(tmp_path / "photos", {"cat": 3})
    ray.deaths, ray.die = {"p-1.tar": 1}, lambda job, site: (source / "cat" / "0002.jpg").unlink()
    with pytest.raises(PackError, match=r"^[^\n]*0002\.jpg: "):
        pack(source, tmp_path / "out", **OPTIONS, pattern="p-%d.tar", on="ray")
    assert ray.calls[-1] == "shutdown"


def test_parts_and_additions_may_be_on_a_cluster(tmp_path, ray):
    whole = local(tmp_path / "local", rows(7))
    ray.connected = True
    for part in ("0/2", "1/2"):
        pack(rows(7), tmp_path / "parts", **OPTIONS, pattern="p-%d.tar", on="ray", part=part)
    finish_pack(tmp_path / "parts")
    assert bytes_in(tmp_path / "parts") == whole
    more = [{**row, "__key__": "more" + row["__key__"]} for row in rows(3)]
    pack(more, tmp_path / "parts", **OPTIONS, pattern="p-%d.tar", on="ray", append=True)
    pack(more, tmp_path / "local", **OPTIONS, pattern="p-%d.tar", append=True)
    assert bytes_in(tmp_path / "parts") == bytes_in(tmp_path / "local")
    assert ray.calls == []


# Refusals.


def test_a_node_that_sees_another_disk_is_named(tmp_path, ray, monkeypatch):
    def elsewhere(function, job, site):
        monkeypatch.setattr(on_ray.socket, "gethostname", lambda: "node7")
        with monkeypatch.context() as there:
            there.setattr(Path, "exists", lambda _: False)
            return function(job, site)

    ray.run = elsewhere
    with pytest.raises(PackError, match=r"run\.json: host node7 does not see the same file as .*\.\n"):
        pack(rows(7), tmp_path / "out", **OPTIONS, on="ray")


@pytest.mark.parametrize("what", ["version", "plan", "source"])
def test_a_node_with_another_version_plan_or_source_is_named(tmp_path, ray, monkeypatch, what):
    source = make_folder(tmp_path / "photos", {"cat": 9})

    def elsewhere(function, job, site):
        monkeypatch.setattr(on_ray.socket, "gethostname", lambda: "node7")
        if what == "version":
            monkeypatch.setattr(on_ray, "__version__", "0.0.1")
        elif what == "plan":
            Path(job.rows.path).unlink()
        else:
            source.rename(tmp_path / "gone")
        return function(job, site)

    ray.run = elsewhere
    monkeypatch.setattr(plan, "ROWS_IN_MEMORY", 3)
    with pytest.raises(PackError, match="host node7"):
        pack(source, tmp_path / "out", **OPTIONS, on="ray")
    assert not [*tmp_path.glob("out/*.tar")]


def test_a_node_without_wdskit_is_told_what_to_install(tmp_path, ray):
    def fail(function, job, site):
        raise RayTaskError("Traceback\n  ...\nModuleNotFoundError: No module named 'wdskit'\n")

    ray.run = fail
    with pytest.raises(PackError, match=r"cannot write it: ModuleNotFoundError: No module named 'wdskit'\.\n  Install"):
        pack(rows(7), tmp_path / "out", **OPTIONS, on="ray")


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PackError, match=r"pip install '\.\[ray\]'` in a clone"):
        pack(rows(3), tmp_path / "out", on="ray")
    assert not (tmp_path / "out").exists()  # not even a lock


def test_a_cluster_that_cannot_be_reached_is_named(tmp_path, ray):
    with pytest.raises(PackError, match=r"ray://nobody:1 cannot be reached: ray client connection timeout\."):
        pack(rows(3), tmp_path / "out", on="ray://nobody:1")
    ray.connected = True
    with pytest.raises(PackError, match="already connected to Ray, but not to ray://other:1"):
        pack(rows(3), tmp_path / "out", on="ray://other:1")


@pytest.mark.parametrize("on", ["", "Ray", "ray:", "ray://", "ray://head", "ray://:1", "head:1", "ray://a:1 b"])
def test_what_is_no_cluster_is_refused(tmp_path, on):
    with pytest.raises(PackError, match=r"is neither ray nor the address of a cluster"):
        pack(rows(3), tmp_path / "out", on=on)
    check_address("ray://head.example.org:10001")


def test_workers_are_refused_with_a_cluster(tmp_path):
    with pytest.raises(PackError, match="cannot be combined"):
        pack(rows(3), tmp_path / "out", on="ray", workers=2)


def test_rows_that_come_once_are_refused(tmp_path):
    with pytest.raises(PackError, match="on: rows that can be read only once"):
        pack(iter(rows(3)), tmp_path / "out", on="ray")


def test_a_site_says_nothing_of_this_process(tmp_path):
    site = RunContext(tmp_path, tmp_path, "/", "host", Disk())
    assert pickle.loads(pickle.dumps(site)).description == tmp_path
