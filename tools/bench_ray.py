"""Compare two workers on a Ray cluster of this machine with two worker processes: samples/s, and CPU time per sample.

    PYTHONPATH=. .venv/peers/ray/bin/python tools/bench_ray.py SHARDS [--rounds 5] [--seconds 10]

`tools/environments.py .venv/peers ray` makes this Python; `tools/make_photos.py` and `wdskit pack` make shards. The
ways take turns, each in a process of its own. The CPU time is that of the main process and its workers, without Ray's
own daemons. Both must give the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from wdskit import Pipeline

BATCH = 64
NUM_WARM = 30  # batches before the clock starts


def actors() -> list[int]:
    """Return the process numbers of the actors on this machine. Ray names them after their class."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has ended
            if path.name.isdigit() and b"ray::NodeWorker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def cpu_s(workers: list[int]) -> float:
    """Return the CPU seconds of this process and of its workers, all threads included."""
    clocks = [(~pid << 3) | 2 for pid in workers]  # of clock_getcpuclockid(3)
    return time.process_time() + sum(map(time.clock_gettime, clocks))


def measure(shards: str, way: str, seconds: float) -> dict[str, Any]:
    """Measure one way in this process; return samples/s, CPU ms per sample and the digest of the first batches."""
    cluster: Any = None
    if way == "ray":
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 1 << 30}
        cluster = Cluster(initialize_head=True, head_node_args=size)
        os.environ["RAY_ADDRESS"] = cluster.address
    pipe = Pipeline().exact(shards, seed=3).decode("rgb8").random_resized_crop(224).random_flip()
    loader = pipe.to_tuple("jpg;png", "cls").batched(BATCH).loader(workers=2, threads=1, on=cluster and "ray")
    items: Any = itertools.chain.from_iterable(itertools.repeat(loader))
    digest = hashlib.sha256()
    for images, _ in itertools.islice(items, NUM_WARM):
        digest.update(images.numpy().tobytes())
    workers = actors() if cluster else [child.pid for child in multiprocessing.active_children() if child.pid]
    num_samples, start_s, used_s = 0, time.perf_counter(), cpu_s(workers)
    while time.perf_counter() - start_s < seconds:
        num_samples += len(next(items)[0])
    took_s, used_s = time.perf_counter() - start_s, cpu_s(workers) - used_s
    loader.close()
    if cluster:
        cluster.shutdown()
    return {"rate": num_samples / took_s, "cpu_ms": 1000 * used_s / num_samples, "digest": digest.hexdigest()}


def main() -> int:
    """Print the medians of both ways, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--way", choices=["local", "ray"], help="measure one way, and print it as JSON")
    options = parser.parse_args()
    if options.way:
        print(f"\n{json.dumps(measure(options.shards, options.way, options.seconds))}")
        return 0
    found: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    for _ in range(options.rounds):
        for way, results in found.items():
            command = [sys.executable, __file__, options.shards, "--way", way, "--seconds", str(options.seconds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            results.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    if len({result["digest"] for results in found.values() for result in results}) != 1:
        print("the batches differ", file=sys.stderr)
        return 1
    rates, cpus = (
        {way: statistics.median(one[key] for one in found[way]) for way in found} for key in ("rate", "cpu_ms")
    )
    for way in found:
        print(f"{way:5}  {rates[way]:7,.0f} samples/s  {cpus[way]:.3f} ms of CPU per sample")
    print(f"samples/s: {rates['ray'] / rates['local']:.2f} of local; CPU: {cpus['ray'] / cpus['local']:.2f} of local")
    return 0


if __name__ == "__main__":
    sys.exit(main())
