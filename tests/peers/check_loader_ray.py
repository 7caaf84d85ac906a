"""Batches from a Ray cluster of three nodes on this machine. `make long` installs Ray and runs this, `make test` does
not.

`WDSKIT_ALL=1` kills actors and nodes at 200 random moments; the default is a few.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import ALL, REPOSITORY
from shards import write_pictures

from wdskit import Pipeline
from wdskit.shards.index import index_folder

PYTHON = Path(os.environ.get("WDSKIT_RAY_PYTHON", Path(sys.prefix, "peers", "ray", "bin", "python")))
NUM_KILLS = 200 if ALL else 6
STEPS = 250  # steps of each rank
BATCH = 4

CLUSTER = """
import contextlib, os, random, re, signal, socket, subprocess, sys, time
from pathlib import Path
from ray._private.internal_api import memory_summary
from ray.cluster_utils import Cluster

out, sys.stdout = sys.stdout, sys.stderr  # Ray's threads print too

def processes():
    "Actors of loaders, which Ray names after their class."
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if b"ray::NodeWorker" in (path / "cmdline").read_bytes():
                    yield int(path.name)
            except OSError:
                pass

size = {"num_cpus": 2, "object_store_memory": 200 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
nodes = [cluster.add_node(**size) for _ in range(2)]  # the third one has the head
print(cluster.address, file=out, flush=True)
client = None
for line in sys.stdin:
    what = line.strip()
    if what == "node":
        cluster.remove_node(nodes.pop(random.randrange(2)), allow_graceful=False)
        nodes.append(cluster.add_node(**size))
    while len(found := list(processes())) < 2 and what == "actor":
        time.sleep(0.05)  # they are being replaced; without one that is spared, none would ever start
    if what == "actor":
        os.kill(random.choice(found), signal.SIGKILL)
    if what == "objects":
        report, until = "", time.monotonic() + 60
        while not report:
            try:
                report = memory_summary(cluster.address, stats_only=True)
            except Exception:  # a node that was killed just now is listed still
                if time.monotonic() > until:
                    raise
                time.sleep(1)
        found = range(sum(map(int, re.findall(r", (\\d+) objects", report))))
    if what == "client":  # a server, which is a driver of one node
        command = [sys.executable, "-m", "ray.util.client.server", "--address", cluster.address, "--port", "20123"]
        client = subprocess.Popen([*command, "--mode", "specific-server"], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", 20123), 1).close()
                break
            time.sleep(0.1)
    print(what, len(found), file=out, flush=True)
if client is not None:
    client.kill()
    client.wait()
cluster.shutdown()
"""

RANK = """
import json, sys
from wdskit import Pipeline
from functions import digest_of, slowly

out, sys.stdout = sys.stdout, sys.stderr  # Ray's threads print too
given = json.loads(sys.argv[1])
pipe = Pipeline().exact(given["folder"], seed=5, lanes=4, window=50)
pipe = pipe.map(slowly)
pipe = pipe.decode("rgb8").random_resized_crop(96).to_tuple("jpg;png", "cls", "__key__").batched(given["batch"])
loader = pipe.loader(rank=given["rank"], world_size=2, workers=given["workers"], on=given["on"], prefetch=8,
                     timeout=given["timeout"])
if given["state"]:
    loader.load_state_dict(given["state"])
for step, batch in zip(range(given["steps"]), loader):
    print(json.dumps({"digest": digest_of(batch)}), file=out, flush=True)
    batch[0].fill_(7)  # in place
    if given["how"] == "paced":
        sys.stdin.readline()
    if given["how"] == "wait":
        __import__("time").sleep(600)
print(json.dumps({"state": loader.state_dict()}), file=out, flush=True)
loader.close()
"""

FUNCTIONS = """
import hashlib, time

def digest_of(batch):
    images, labels, keys = batch
    return hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes() + repr(keys).encode()).hexdigest()

def slowly(sample):
    time.sleep(0.01)
    return sample
"""


class Cluster:
    """Runs a cluster in another process, and scripts on it."""

    def __init__(self, folder: Path) -> None:
        assert PYTHON.exists(), f"{PYTHON} is not there. Run `make long WHAT=peers`."
        self.folder = folder
        for name, text in (
            ("cluster.py", CLUSTER),
            ("rank.py", RANK),
            ("functions.py", FUNCTIONS),
        ):
            (folder / name).write_text(text)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(folder)]),
            "OMP_NUM_THREADS": "1",
        }
        self.lock = threading.Lock()
        self.running = self.start("cluster.py", stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.address = self.running.stdout.readline().strip()

    def start(self, script: str, *words: str, **options: Any) -> subprocess.Popen[str]:
        command = [str(PYTHON), str(self.folder / script), *words]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True, **options)

    def rank(self, shards: Path, **given: Any) -> subprocess.Popen[str]:
        given = {"how": "", "rank": 0, "workers": 2, "on": "ray", "state": None, "batch": BATCH, "steps": STEPS} | given
        given = {"folder": str(shards), "timeout": 400} | given
        self.environment["RAY_ADDRESS"] = self.address
        return self.start("rank.py", json.dumps(given), stderr=subprocess.PIPE, stdin=subprocess.PIPE)

    def do(self, what: str) -> int:
        """Kill an actor or a node, or do nothing. Return the number of actors before that; for "objects", of objects.

        "client" starts a server of Ray Client on port 20123.
        """
        with self.lock:
            self.running.stdin.write(f"{what}\n")
            self.running.stdin.flush()
            return int(self.running.stdout.readline().split()[1])

    def wait_for_none(self, what: str) -> None:
        until = time.monotonic() + 30
        while left := self.do(what):
            assert time.monotonic() < until, f"{what}: {left} left"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    yield cluster
    cluster.running.communicate(timeout=60)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [2 * STEPS * BATCH // 5] * 5)
    index_folder(folder)
    return folder


@pytest.fixture(scope="module")
def expected(shards: Path) -> list[list[str]]:
    """Return the digests of each rank's batches, made without workers."""
    space: dict[str, Any] = {}
    exec(FUNCTIONS, space)
    pipe = Pipeline().exact(str(shards), seed=5, lanes=4, window=50).decode("rgb8").random_resized_crop(96)
    pipe = pipe.to_tuple("jpg;png", "cls", "__key__").batched(BATCH)
    loaders = [pipe.loader(rank=rank, world_size=2, workers=0) for rank in range(2)]
    return [[space["digest_of"](batch) for batch in loader] for loader in loaders]


def run_ranks(cluster: Cluster, shards: Path, kills: list[int], *, workers: int, steps: int, states: list[Any]) -> Any:
    """Run two ranks at once. At each step of rank 0 in `kills`, kill an actor or, in one of eight cases, a node."""
    given = {"workers": workers, "steps": steps, "how": "paced"}
    ranks = [cluster.rank(shards, rank=rank, state=states[rank], **given) for rank in range(2)]
    lines: list[list[dict[str, Any]]] = [[], []]
    logs = ["", ""]

    def read(rank: int) -> None:
        for line in ranks[rank].stdout:
            lines[rank].append(json.loads(line))
            for _ in range(kills.count(len(lines[rank])) if rank == 0 else 0):
                time.sleep(random.random() * 0.05)
                cluster.do(random.choice(["actor"] * 7 + ["node"]))
            if "digest" in line:  # the rank waits for this line, so that no kill comes after its epoch
                ranks[rank].stdin.write("\n")
                ranks[rank].stdin.flush()

    def read_log(rank: int) -> None:
        logs[rank] = ranks[rank].stderr.read()

    threads = [threading.Thread(target=each, args=(rank,)) for rank in range(2) for each in (read, read_log)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        for pipe in (rank.stdin, rank.stdout, rank.stderr):
            pipe.close()
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(log[-2000:] for log in logs)
    digests = [[line["digest"] for line in found[:-1]] for found in lines]
    return digests, [found[-1] for found in lines]


def test_killed_actors_and_nodes_change_no_batch_even_of_two_ranks_that_resume(cluster, shards, expected):
    """Each position comes exactly once, in order; after half of the epoch with another number of workers."""
    kills = sorted(random.Random(1).choices(range(1, STEPS), k=NUM_KILLS))
    half = STEPS // 2
    early = [each for each in kills if each <= half]
    first, ends = run_ranks(cluster, shards, early, workers=3, steps=half, states=[None, None])
    states = [end["state"] for end in ends]
    late = [each - half for each in kills if each > half]
    second, _ = run_ranks(cluster, shards, late, workers=2, steps=STEPS - half, states=states)
    assert [first[rank] + second[rank] for rank in range(2)] == expected
    cluster.wait_for_none("actors")
    cluster.wait_for_none("objects")  # Ray frees answers of killed actors within a second after their driver has ended


def test_batches_come_through_a_server_of_ray_client(cluster, shards, expected):
    cluster.do("client")
    running = cluster.rank(shards, on="ray://127.0.0.1:20123", steps=20)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    cluster.wait_for_none("actors")
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [line["digest"] for line in lines[:-1]] == expected[0][:20]


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_actor(cluster, shards, kind):
    running = cluster.rank(shards, how="wait")
    assert running.stdout.readline()
    running.send_signal(kind)
    running.communicate(timeout=30)
    cluster.wait_for_none("actors")
