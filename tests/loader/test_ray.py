"""Workers on a Ray cluster, with a stand-in for Ray; `peers/check_loader_ray.py` has a real cluster."""

from __future__ import annotations

import gc
import random
import shutil
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import digest_of
from object_server import BUCKET, put, read_from, s3_server
from rays import ActorDiedError, FakeCluster, ObjectLostError, RayError
from shards import fail_on_7, number_of, write_numbers

from wdskit import ConfigError, Pipeline, PipelineError, SampleError, make_loader
from wdskit.engine.outcome import WorkerTraceback
from wdskit.loader import node
from wdskit.loader import ray as on_ray
from wdskit.pipeline import ray_connection as connections
from wdskit.shards.index import index_folder


@pytest.fixture
def ray(monkeypatch):
    """A stand-in for Ray. Its actors are threads of this process, which must not seed it as a worker."""
    fake = FakeCluster()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(node, "seed_worker", lambda *_: None)
    monkeypatch.setattr(connections, "_addresses", {})
    monkeypatch.setattr(connections, "_check_server", lambda address: None)
    monkeypatch.chdir(Path.cwd())
    yield fake
    for pool in fake.pools:
        pool.shutdown(cancel_futures=True)
    gc.collect()
    assert not fake.living


CHECK_SERVER = connections._check_server


def exact(shards: str) -> Pipeline:
    return Pipeline().exact(shards, seed=5, lanes=4, window=9)


def crops(shards: str) -> Pipeline:
    return exact(shards).decode("rgb8").random_resized_crop(200).to_tuple("jpg;png", "cls", "__key__").batched(4)


# --- the same batches


@pytest.mark.parametrize("way", [{"workers": 1}, {"workers": 2, "threads": 3}, {"workers": 3, "prefetch": 1}], ids=str)
def test_the_batches_of_a_cluster_are_those_of_this_machine_to_the_bit(pictures, ray, way):
    wanted = [digest_of(batch) for batch in crops(pictures).loader(workers=0)]
    with crops(pictures).loader(**way, on="ray") as loader:
        for _ in range(2):
            loader.set_epoch(0)
            found = [*loader]
            assert [digest_of(batch) for batch in found] == wanted
            assert found[0][0].is_contiguous(memory_format=torch.channels_last)
            assert found[0][0].dtype == torch.uint8
    assert ray.calls == [("init", "head:6379")]
    assert ray.options["num_cpus"] == way.get("threads", 1)
    assert (ray.options["max_restarts"], ray.options["max_task_retries"]) == (100, 0)


# --- failures


class Chaos:
    """A hook that ends actors, or loses their results, before random calls."""

    def __init__(self, seed: int, errors: list[type[RayError]], methods: set[str]) -> None:
        self.random, self.errors, self.methods, self.num = random.Random(seed), errors, methods, 0

    def __call__(self, actor: Any, method: str) -> None:
        if method in self.methods and self.random.random() < 0.2:
            self.num += 1
            raise self.random.choice(self.errors if method == "make" else [ActorDiedError])("lost")


@pytest.mark.parametrize("seed", range(5))
def test_lost_jobs_are_made_again_and_each_batch_comes_once_and_in_order(numbers, ray, seed):
    ray.before = Chaos(seed, [ActorDiedError, ObjectLostError], {"begin", "make"})
    with exact(numbers).map(number_of).batched(3).loader(workers=3, on="ray") as loader:
        wanted = [batch.tolist() for batch in exact(numbers).map(number_of).batched(3).loader(workers=0)]
        for _ in range(4):
            loader.set_epoch(0)
            assert [batch.tolist() for batch in loader] == wanted
    assert ray.before.num


def test_jobs_of_an_actor_that_has_no_place_any_more_go_to_others(numbers, ray):
    """A cluster may lose a node for good."""
    lost: list[Any] = []

    def lose(actor: Any, method: str) -> None:
        if actor.number == 0 and method == "make":
            lost.append(actor)
            actor.has_cpu = False
            raise ActorDiedError("The node died.")

    ray.before = lose
    with exact(numbers).map(number_of).batched(3).loader(workers=2, on="ray", timeout=60) as loader:
        wanted = [batch.tolist() for batch in exact(numbers).map(number_of).batched(3).loader(workers=0)]
        assert [batch.tolist() for batch in loader] == wanted
    assert lost


def test_a_job_that_ends_each_worker_is_an_error(numbers, ray):
    def die(actor: Any, method: str) -> None:
        if method == "make":
            raise ActorDiedError("The worker ran out of memory.")

    ray.before = die
    message = r"^on: a worker died 10 times at the same batches: worker \d( on \S+)?: The actor died"
    with pytest.raises(PipelineError, match=message):
        list(exact(numbers).batched(3).loader(workers=2, on="ray"))
    assert not ray.living


def test_too_small_a_cluster_ends_with_the_numbers_after_the_timeout(numbers, ray):
    ray.num_cpus = 0
    message = (
        r"^no batch came within 0.2 s \(timeout\): no batch has come from one of 4 workers on ray \(2 CPUs each\) for "
        r"0 s. It has not started. The cluster has 0 CPUs, 0 of them free.\n  Correct what hangs, or raise `timeout`; "
        r"0 is no limit.$"
    )
    with pytest.raises(PipelineError, match=message):
        list(exact(numbers).batched(3).loader(workers=4, threads=2, on="ray", timeout=0.2))


def test_errors_of_samples_come_after_the_batches_before_them_with_their_cause(numbers, ray):
    seen: list[int] = []
    pipe = Pipeline().sequential(numbers).map(fail_on_7).batched(3)
    with pipe.loader(workers=2, on="ray") as loader, pytest.raises(SampleError, match=r"n000007") as caught:
        for batch in loader:
            seen += map(int, batch["cls"])
    assert seen == list(range(6))
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert isinstance(cause.__cause__, WorkerTraceback)
    assert "in fail_on_7" in str(cause.__cause__)


# --- requirements of nodes


def test_another_version_is_named(numbers, ray, monkeypatch):
    versions = on_ray.describe_versions()
    assert all(name in versions for name in ("wdskit ", "Python 3.", "torch ", "native code"))
    monkeypatch.setattr(node, "describe_versions", lambda: "wdskit 0.0")
    message = rf"^on: a worker on a node of ray cannot run: .*has wdskit 0.0, but \S+ has {versions}"
    with pytest.raises(PipelineError, match=message):
        list(exact(numbers).batched(3).loader(workers=1, on="ray"))


def test_a_module_that_nodes_lack_is_named_with_the_way_to_send_it(numbers, ray, monkeypatch):
    module = types.ModuleType("only_here")
    exec("def function(sample): return sample", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    loader = exact(numbers).map(module.function).batched(3).loader(workers=1, on="ray")
    monkeypatch.delitem(sys.modules, "only_here")
    lacks = r"No module named 'only_here'.*\n.*`ray.init\(runtime_env=...\)`"
    with pytest.raises(PipelineError, match=rf"^on: a worker on a node of ray cannot run: .*{lacks}"):
        list(loader)


# --- settings


@pytest.mark.parametrize("way", [{}, {"workers": 0}])
def test_the_number_of_workers_must_be_set(numbers, ray, way):
    with pytest.raises(PipelineError, match=r"^loader.on: ray: workers is not set, .*\n  .*workers: 32"):
        exact(numbers).loader(on="ray", **way)


@pytest.mark.parametrize("on", ["dask", "ray:/head:1", "ray://head", 3, "ray://me:secret@head:1"])
def test_other_addresses_are_refused_and_a_password_is_not_shown(numbers, ray, on):
    with pytest.raises(ConfigError, match=r"^make_loader: on: ") as caught:
        exact(numbers).loader(workers=1, on=on)
    assert "secret" not in str(caught.value)


def test_a_configuration_names_the_cluster_and_each_worker_gets_jobs(numbers, ray):
    busy = [threading.Event(), threading.Event()]
    ray.before = lambda actor, method: method == "make" and (busy[actor.number].set(), busy[1 - actor.number].wait(5))
    config = {"version": 1, "pipeline": [{"exact": numbers}, {"batched": 3}], "loader": {"workers": 2, "on": "ray"}}
    with make_loader(config) as loader:
        assert len([*loader]) == 13
    assert all(each.is_set() for each in busy)
    assert ray.options["scheduling_strategy"] == "SPREAD"


# --- the connection


def test_a_cluster_that_is_not_there_is_an_error(numbers, ray, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(PipelineError, match=r"^on: the cluster ray cannot be reached: Could not.*\n  Start one with"):
        list(exact(numbers).loader(workers=1, on="ray"))
    with pytest.raises(PipelineError, match=r"^on: the cluster ray://nobody:1 cannot be reached: Could not"):
        list(exact(numbers).loader(workers=1, on="ray://nobody:1"))


def test_ray_that_is_not_installed_is_an_error_when_the_loader_is_made(numbers, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PipelineError, match=r"^on: Ray is not installed. Install it: `pip install"):
        exact(numbers).loader(workers=1, on="ray")


def test_loaders_share_a_connection(numbers, ray):
    train, val = (exact(numbers).loader(workers=1, on="ray://head:10001") for _ in range(2))
    for loader in (train, val):
        assert len([*loader]) == 39
    with pytest.raises(PipelineError, match=r"already connected to Ray, but not to ray://other:10001"):
        list(exact(numbers).loader(workers=1, on="ray://other:10001"))
    train.close()
    assert len(ray.living) == 1
    val.close()
    assert ray.calls == [("init", "ray://head:10001")]


def test_a_server_that_does_not_answer_as_ray_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(connections, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        for reply, is_ray in ((b"\0\0\0\4\0\0\0\0\0", True), (b"HTTP/1.1 400", False), (b"", False)):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(answer, free, reply)
                if is_ray:
                    CHECK_SERVER(f"127.0.0.1:{port}")
                else:
                    with pytest.raises(OSError, match=r"not Ray|reset"):
                        CHECK_SERVER(f"127.0.0.1:{port}")
    for other in (None, "auto", "ray://nobody", "local"):
        CHECK_SERVER(other)


def answer(server: socket.socket, reply: bytes) -> None:
    with server.accept()[0] as client:
        client.recv(64)
        client.sendall(reply)


# --- bounds and leaks


@pytest.mark.parametrize("num_steps", [0, 1, 13])
def test_a_dropped_loader_leaves_no_actor(numbers, ray, num_steps):
    loader = exact(numbers).batched(3).loader(workers=2, on="ray")
    for step, _ in enumerate(loader):
        if step == num_steps:
            break
    del loader, _
    gc.collect()
    assert not ray.living


def test_local_loaders_do_not_import_ray(numbers):
    script = (
        "import sys, wdskit; loader = wdskit.Pipeline().exact(sys.argv[1]).batched(3).loader(workers=0); list(loader);"
        "assert not {'ray', 'wdskit.loader.ray', 'wdskit.pipeline.ray_connection'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script, numbers], check=True)


def test_each_node_fetches_index_and_columns_from_the_store_with_its_own_settings(ray, monkeypatch, tmp_path):
    """A node has no copy of the files that the training machine has fetched."""
    write_numbers(tmp_path / "numbers", [4, 5, 6])
    index_folder(tmp_path / "numbers", columns=["cls"])
    given = {"seed": 5, "balance": "cls"}
    with s3_server() as endpoint:
        for path in (tmp_path / "numbers").iterdir():
            if path.is_file():
                put(f"{endpoint}/{BUCKET}/numbers/{path.name}", path.read_bytes())
        read_from(endpoint, monkeypatch, tmp_path / "here")
        pipe = Pipeline().resampled(f"s3://{BUCKET}/numbers/s-*.tar", **given).map(number_of).batched(3).with_epoch(9)
        loader = pipe.loader(workers=1, on="ray", persistent_workers=False)
        read_from(endpoint, monkeypatch, tmp_path / "node")
        shutil.rmtree(tmp_path / "here")
        with loader:
            found = [batch.tolist() for batch in loader]
    local = Pipeline().resampled(str(tmp_path / "numbers"), **given).map(number_of).batched(3).with_epoch(9)
    assert found == [batch.tolist() for batch in local.loader(workers=0)]
    assert list((tmp_path / "node").rglob("*.npy"))
