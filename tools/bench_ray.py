"""Compare two workers on a Ray cluster of this machine with two worker processes: samples/s, and CPU time per sample.

    PYTHONPATH=. .venv/peers/ray/bin/python tools/bench_ray.py SHARDS [--rounds 20] [--seconds 3]

`tools/environments.py .venv/peers ray` makes this Python; `tools/make_photos.py` and `wdskit pack` make shards. The
ways take turns in one process, so that a change of the machine's speed meets both. A ratio is the median of the ratios
of the rounds. The CPU time is that of the main process and of the workers, without Ray's own daemons. Both ways must
give the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wdskit import Pipeline

BATCH = 64
NUM_AHEAD = 20  # batches before each measurement
NUM_WARM = 60  # batches before the clock starts, which are compared


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


def measure(batches: Iterator[Any], workers: list[int], seconds: float) -> tuple[float, float]:
    """Return (samples/s, CPU ms per sample). First take the batches that were made ahead; meanwhile the other way makes
    its own ones.
    """
    for _ in itertools.islice(batches, NUM_AHEAD):
        pass
    num_samples, start_s, used_s = 0, time.perf_counter(), cpu_s(workers)
    while time.perf_counter() - start_s < seconds:
        num_samples += len(next(batches)[0])
    return num_samples / (time.perf_counter() - start_s), 1000 * (cpu_s(workers) - used_s) / num_samples


def main() -> int:
    """Print the medians of both ways, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3)
    options = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 1 << 30}
    pipe = Pipeline().exact(options.shards, seed=3).decode("rgb8").random_resized_crop(224).random_flip()
    pipe = pipe.to_tuple("jpg;png", "cls").batched(BATCH)
    local = pipe.loader(workers=2, threads=1)
    local_batches = itertools.chain.from_iterable(itertools.repeat(local))
    first = next(local_batches)  # its processes start before Ray's threads
    cluster = Cluster(initialize_head=True, head_node_args=size)
    os.environ["RAY_ADDRESS"] = cluster.address
    remote = pipe.loader(workers=2, threads=1, on="ray")
    ray_batches = itertools.chain.from_iterable(itertools.repeat(remote))
    are_equal = torch.equal(first[0], next(ray_batches)[0])
    for one, other in itertools.islice(zip(local_batches, ray_batches, strict=False), NUM_WARM):
        are_equal &= torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    if not are_equal:
        print("the batches differ", file=sys.stderr)
        return 1
    ways = {
        "local": (local_batches, [child.pid for child in multiprocessing.active_children() if child.pid]),
        "ray": (ray_batches, actors()),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, (batches, workers) in ways.items():
            found[way].append(measure(batches, workers, options.seconds))
    for way, results in found.items():
        rate, cpu_ms = map(statistics.median, zip(*results, strict=True))
        print(f"{way:5}  {rate:7,.0f} samples/s  {cpu_ms:.3f} ms of CPU per sample")
    pairs = list(zip(found["ray"], found["local"], strict=True))
    rate, cpu = (statistics.median(one[at] / other[at] for one, other in pairs) for at in (0, 1))
    print(f"samples/s: {rate:.2f} of local; CPU: {cpu:.2f} of local")
    local.close()
    remote.close()
    ray.shutdown()
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
