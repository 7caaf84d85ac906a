"""The benchmark of loaders that read from a store measures what it claims, and checks what each loader delivers."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request

import pytest
from http_server import serve_folder


@pytest.fixture
def tools(python, repository, tmp_path):
    """The benchmark and its proxy. They run in their own process, because `peers` is another package in the tests."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        folders = [str(repository / "tools" / "bench"), str(repository)]
        begin = f"import os, sys\nsys.path[:0] = {folders!r}\nos.environ['PYTHONPATH'] = {os.pathsep.join(folders)!r}\n"
        return python.run(tmp_path / "script.py", begin + code)

    return run


RUN = """
import bench_remote, json
sys.argv += WORDS
found = bench_remote.run(bench_remote.arguments())
print(json.dumps(found))
print(bench_remote.markdown(found), file=sys.stderr)
"""


def test_nodes_and_epochs_are_measured_and_who_is_missing_is_named(tools, tmp_path) -> None:
    words = ["--only", "wdskit", "litdata", "--nodes", "2", "--num", "32", "--batch", "4", "--workers", "0"]
    words += ["--delay-ms", "1", "--shard-mb", "0.5", "--no-install"]
    done = tools(RUN.replace("WORDS", str(words)))
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


CHEATS = """
import bench_remote, json
from pathlib import Path
from peers.common import Job
from peers.harness import mark
folder = Path("bare/photos")
folder.mkdir(parents=True)
job = Job("photos", ".", 4, 0, 2)
for number in range(4):
    job.photo(number).write_bytes(b"photo %d" % number)
def rank(*numbers, data=lambda number: b"photo %d" % number, label=lambda number: number):
    digest = sum(mark(label(number), data(number)) for number in numbers)
    return {"seen": [numbers.count(number) for number in range(4)], "digest": digest}
cheats = [
    [rank(0, 2), rank(1, 3)],
    [rank(0, 2), rank(1, 2)],
    [rank(0, 2), rank(1)],
    [rank(0, 2), rank(1, 3, data=lambda number: b"photo")],
    [rank(0, 2), rank(1, 3, label=lambda number: 4 - number)],
]
print(json.dumps([bench_remote.problem(job, {"ranks": ranks}) for ranks in cheats]))
"""


def test_who_delivers_something_else_is_found_out(tools) -> None:
    done = tools(CHEATS)
    assert done.stderr == ""
    wrong = "other bytes or labels than the photographs'"
    assert json.loads(done.stdout) == [
        "",
        "1 of 4 samples were not delivered, and 1 more than once",
        "1 of 4 samples were not delivered, and 0 more than once",
        wrong,
        wrong,
    ]


def test_the_proxy_delays_what_it_passes_on_and_counts_it(load_tool, tmp_path) -> None:
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)
    with serve_folder(tmp_path) as url:
        proxy = load_tool("slow_proxy").SlowProxy(int(url.rpartition(":")[2]), 0.1)
        with proxy.run():
            start_s = time.monotonic()
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{proxy.url}/a", timeout=10) as reply:
                assert time.monotonic() - start_s >= 0.2
                assert reply.read() == data
            assert time.monotonic() - start_s < 5
    assert len(data) < proxy.num_bytes < len(data) + 1000
