"""Compare wdskit with other loaders that read from an object store with latency.

    python tools/bench/bench_remote.py [--only NAME ...] [--nodes 1,4] [--num PHOTOS] [--batch N] [--shard-mb MB]
                                 [--delay-ms MS] [--workers N] [--homes H] [--rounds N] [--folder DIR] [--no-install]
                                 [--json FILE]

Needs the extras `bench` and `dev`. An S3 server on loopback holds the same photographs in the format of each loader; a
proxy delays each chunk in each direction. A node is a group of processes: the ranks that torchrun would start, with one
cache folder. Each loader reads epochs 1 and 2, starting with an empty cache. Nothing is decoded: the benchmark measures
how samples get to a node. The loaders take turns, and the table shows the medians of all rounds. The default size is
for a first look: a window of wdskit (4,096 samples) then spans all shards, so that each node needs every shard. Use
`--num 16384` or more for a comparison.

    samples/s     of all ranks, from the request for an epoch until the last rank has read it
    CPU s/GB      of all processes of the nodes, per gigabyte of samples
    first batch   seconds until the last rank has its first batch; in epoch 1 with opening
    downloaded    bytes that the store sent, headers included, divided by the bytes of all samples

A loader that does not deliver each photograph once, with its label and unchanged, is listed with the fault, without
numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench_peers import HERE, PATHS, Failed, log, prepare
from environments import NotInstalled, python_of, reason
from peers import report
from peers.common import Job
from peers.harness import mark
from slow_proxy import SlowProxy

sys.path.append(str(HERE.parents[1] / "tests" / "helpers"))
from object_server import BUCKET, put, s3_server  # the server that the tests read from

RANKS = 2
NUM_EPOCHS = 2
TIMEOUT_S = 300
FORMATS = {"wdskit": "bare/tar", "webdataset": "bare/tar", "streaming": "streaming/mds", "litdata": "litdata/chunks"}
TITLES = {"wdskit": "wdskit", "webdataset": "webdataset", "streaming": "MosaicML streaming", "litdata": "litdata"}
COLUMNS = {
    "samples_per_s": "samples/s",
    "cpu_s_per_gb": "CPU s/GB",
    "first_s": "first batch s",
    "ratio": "downloaded x",
}
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
TRIAL = [*UNSHARE, "mount -t tmpfs none /mnt"]
MAY_MOUNT = bool(shutil.which("unshare")) and not subprocess.run(TRIAL, capture_output=True, check=False).returncode
OWN_MEMORY = [*UNSHARE, 'mount -t tmpfs none /dev/shm && exec "$@"', "node"] if MAY_MOUNT else []
"""Start of a command that gives a node a /dev/shm of its own; empty if mounting is forbidden."""
DIGITS = {"samples_per_s": 0, "cpu_s_per_gb": 1}


def upload(folder: Path, url: str) -> None:
    """Put all files of a format into the bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            put(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def measure(job: Job, num_nodes: int, proxy: SlowProxy, python: str, folder: Path) -> list[dict[str, Any]]:
    """Read both epochs with one loader on `num_nodes` nodes; return the results of `read_epoch`. Raises Failed."""
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        master = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = [each.getsockname()[1] for each in (listener, master)]
        master.close()
        nodes = []
        for number in range(num_nodes):
            home = folder / f"node-{number}"
            (home / "tmp").mkdir(parents=True)
            environment = {**os.environ, **settings_of(home, proxy.url), "MASTER_PORT": str(ports[1])}
            text = json.dumps(asdict(replace(job, cache=str(home / "kept"))))
            words = [python, "-m", "peers.node", text, *map(str, (number, num_nodes, RANKS, ports[0]))]
            output = stack.enter_context((home / "log").open("wb"))
            node = subprocess.Popen(
                [*OWN_MEMORY, *words], env=environment, stdout=output, stderr=output, start_new_session=True
            )
            nodes.append(node)
            stack.callback(end, node)
        try:
            ranks = [stack.enter_context(lines) for lines in connections(listener, nodes, num_nodes * RANKS)]
            return [read_epoch(ranks, proxy) for _ in range(NUM_EPOCHS)]
        except (OSError, ValueError):  # a rank ended, or did not answer in time
            with suppress(subprocess.TimeoutExpired):
                nodes[0].wait(2)
            texts = [(folder / f"node-{number}" / "log").read_text() for number in range(num_nodes)]
            raise Failed(reason(max(texts, key=lambda text: "Error" in text))) from None


def settings_of(home: Path, endpoint: str) -> dict[str, str]:
    """Return the environment of a node: its folders, and the store, in the variables that cloud tools read."""
    return {
        "PYTHONPATH": PATHS,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TMPDIR": str(home / "tmp"),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": "127.0.0.1",
    }


def connections(listener: socket.socket, nodes: list[subprocess.Popen[bytes]], num: int) -> list[Any]:
    """Return a text stream to each rank when all have loaded their peer. Raises OSError if a rank does not connect."""
    listener.settimeout(1)
    found: list[Any] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(found) < num:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline_s or any(node.poll() is not None for node in nodes):
                raise
            continue
        connection.settimeout(TIMEOUT_S)
        found.append(connection.makefile("rw"))
        found[-1].readline()
    return found


def end(node: subprocess.Popen[bytes]) -> None:
    """Kill a node and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(node.pid, 9)
    node.wait()


def read_epoch(ranks: list[Any], proxy: SlowProxy) -> dict[str, Any]:
    """Let all ranks read their next epoch; return their results. Raises OSError or ValueError if a rank has none."""
    before = proxy.num_bytes
    for lines in ranks:
        print("next", file=lines, flush=True)
    return {"ranks": [json.loads(lines.readline()) for lines in ranks], "downloaded": proxy.num_bytes - before}


def problem(job: Job, epoch: dict[str, Any]) -> str:
    """Return what is wrong with the samples that the ranks delivered together; empty if all are right."""
    counts = [sum(column) for column in zip(*(rank["seen"] for rank in epoch["ranks"]), strict=True)]
    missing, twice = counts.count(0), sum(count > 1 for count in counts)
    if missing or twice:
        return f"{missing} of {job.num} samples were not delivered, and {twice} more than once"
    digest = sum(mark(number, job.photo(number).read_bytes()) for number in range(job.num))
    is_right = digest == sum(rank["digest"] for rank in epoch["ranks"])
    return "" if is_right else "other bytes or labels than the photographs'"


def row(job: Job, number: int, epoch: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an epoch. Raises Failed if samples are missing, repeated or changed."""
    if text := problem(job, epoch):
        raise Failed(f"epoch {number}: {text}")
    ranks = epoch["ranks"]
    start_s = min(rank["start_s"] for rank in ranks)
    return {
        "name": job.peer,
        "epoch": number,
        "samples_per_s": job.num / (max(rank["end_s"] for rank in ranks) - start_s),
        "cpu_s_per_gb": sum(rank["cpu_s"] for rank in ranks) / job.num_bytes * 1e9,
        "first_s": max(rank["begin_s"] for rank in ranks) - start_s,
        "ratio": epoch["downloaded"] / job.num_bytes,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Install the loaders, write and upload the data, measure; return rows and problems."""
    found: dict[str, Any] = {"machine": report.machine(), "rows": [], "problems": []}
    pythons: dict[str, str] = {}
    for name in options.only:
        log(f"the environment of {name}")
        try:
            pythons[name] = python_of(name, options.folder / "venvs", install=not options.no_install)
        except NotInstalled as error:
            found["problems"].append(f"{TITLES[name]} is missing: {error}")
    data = options.folder.resolve() / "data" / f"photos-{options.num}-{options.shard_mb}"
    shard_bytes = int(options.shard_mb * 1e6)
    job = Job("photos", str(data), options.num, 0, options.batch, workers=options.workers, shard_bytes=shard_bytes)
    wrong = prepare(job, list(pythons), pythons)
    if wrong["bare"]:
        sys.exit(wrong["bare"])
    found["problems"] += [f"{TITLES[name]}: {wrong[name]}" for name in pythons if wrong[name]]
    pythons = {name: python for name, python in pythons.items() if not wrong[name]}
    found |= {"num_bytes": job.num_bytes, "delay_ms": options.delay_ms}
    with s3_server() as endpoint, ExitStack() as stack:
        proxy = SlowProxy(int(endpoint.rpartition(":")[2]), options.delay_ms / 1000)
        stack.enter_context(proxy.run())
        for folder in {FORMATS[name] for name in pythons}:
            log(f"upload {folder}")
            upload(data / folder, f"{endpoint}/{BUCKET}/{folder}")
        for num_nodes, turn in itertools.product(options.nodes, range(options.rounds)):
            for name, python in pythons.items():
                log(f"{num_nodes} x {RANKS}, round {turn + 1}: {name}")
                scheme = f"{proxy.url}/{BUCKET}" if name == "webdataset" else f"s3://{BUCKET}"
                mine = replace(job, peer=name, url=f"{scheme}/{FORMATS[name]}", homes=options.homes)
                try:
                    epochs = measure(mine, num_nodes, proxy, python, options.folder.resolve() / "nodes")
                    found["rows"] += [
                        {"nodes": num_nodes, **row(mine, number, epoch)} for number, epoch in enumerate(epochs, 1)
                    ]
                except Failed as error:
                    found["problems"].append(f"{TITLES[name]}, {num_nodes} x {RANKS}: {error}")
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return one table, the problems and a line about the machine."""
    lines = [["nodes x ranks", "", "epoch", *COLUMNS.values()], ["---:", "---", "---:", *("---:" for _ in COLUMNS)]]
    rounds: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for one in found["rows"]:
        rounds.setdefault((one["nodes"], one["name"], one["epoch"]), []).append(one)
    for (nodes, name, epoch), rows in rounds.items():
        numbers = [f"{median(one[key] for one in rows):,.{DIGITS.get(key, 2)}f}" for key in COLUMNS]
        lines.append([f"{nodes} x {RANKS}", TITLES[name], str(epoch), *numbers])
    machine = found["machine"]
    problems = [f"{text} ({num} times)" if num > 1 else text for text, num in Counter(found["problems"]).items()]
    texts = ["\n".join(f"| {' | '.join(line)} |" for line in lines), *(f"{text}." for text in problems)]
    num_rounds = max(map(len, rounds.values()), default=0)
    of_each = f"Medians of {num_rounds}; " if num_rounds > 1 else ""
    texts.append(
        f"{of_each}{found['num_bytes'] / 1e6:,.0f} MB of photographs, {found['delay_ms']:g} ms each way, nodes "
        f"simulated on {machine['cores']} cores ({machine['cpu']}), load {machine['load']} before, "
        f"Python {machine['python']}."
    )
    return "\n\n".join(texts)


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="wdskit beside other loaders that read from a store.")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=[*TITLES], metavar="NAME", help=", ".join(TITLES))
    parser.add_argument(
        "--nodes",
        type=lambda text: [*map(int, text.split(","))],
        default=[1, 4],
        help="numbers of nodes (default: 1,4)",
    )
    parser.add_argument("--num", type=int, default=1024, help="photographs (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples in a rank's batch (default: %(default)s)")
    parser.add_argument("--shard-mb", type=float, default=4, help="size of a shard, any format (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=30, help="delay in one direction (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of a rank (default: %(default)s)")
    parser.add_argument("--homes", type=int, default=0, help="setting of wdskit's `exact` (default: not set)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all loaders (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="folder for samples and environments")
    parser.add_argument("--no-install", action="store_true", help="use only loaders that are installed already")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number to FILE")
    options = parser.parse_args()
    if any(options.num % (options.batch * RANKS * num_nodes) for num_nodes in options.nodes):
        parser.error("--num: whole batches on all ranks are needed, so that each sample can come once in each epoch")
    return options


if __name__ == "__main__":
    options = arguments()
    found = run(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))
