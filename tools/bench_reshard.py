"""`wdskit reshard` beside webdataset's read-and-write loop: samples/s and CPU time, medians of interleaved rounds.

Both read the same packed shards from a warm page cache and write others of 2,000 samples; ours computes digests, writes
offsets and an index and flushes all of it to the disk, theirs does none of that. Every payload is compared
before a figure is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import webdataset

sys.path.insert(0, str(Path(__file__).resolve().parent))
from outputs import digests_of, must_equal

from wdskit import pack, reshard

ROUNDS = 5
SAMPLES_PER_SHARD = 2_000


def copy_with_webdataset(source: Path, dest: Path) -> None:
    """The loop that webdataset's documentation shows."""
    dest.mkdir()
    urls = [str(path) for path in sorted(source.glob("*.tar"))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False)
    with webdataset.ShardWriter(str(dest / "o-%06d.tar"), maxcount=SAMPLES_PER_SHARD, maxsize=1e12, verbose=0) as out:
        for sample in dataset:
            out.write({name: data for name, data in sample.items() if name == "__key__" or not name.startswith("__")})


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "webdataset": copy_with_webdataset,
    "merge": lambda source, dest: reshard(str(source), dest, max_samples=SAMPLES_PER_SHARD),
    "shuffle": lambda source, dest: reshard(str(source), dest, max_samples=SAMPLES_PER_SHARD, shuffle=1),
    "drop cls": lambda source, dest: reshard(str(source), dest, max_samples=SAMPLES_PER_SHARD, drop="cls"),
    "filter": lambda source, dest: reshard(str(source), dest, max_samples=SAMPLES_PER_SHARD, filter="cls >= 0"),
}


def measure(way: Callable[[Path, Path], object], source: Path, dest: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one copy. What the one before left to be written is no matter of this one."""
    os.sync()
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    way(source, dest)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    shutil.rmtree(dest)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def bench(num_samples: int, sample_bytes: int, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each way in each round; a first round warms up and does not count."""
    chance = random.Random(0)
    payloads = {f"k{n:07d}": chance.randbytes(sample_bytes) for n in range(num_samples)}
    rows = [{"__key__": key, "jpg.bin": data, "cls": n} for n, (key, data) in enumerate(payloads.items())]
    pack(rows, folder / "source", max_samples=3_000)
    members = {f"{key}.jpg.bin": hashlib.sha256(data).hexdigest() for key, data in payloads.items()}
    classes = {f"{key}.cls": hashlib.sha256(b"%d" % n).hexdigest() for n, key in enumerate(payloads)}
    for name, way in WAYS.items():
        way(folder / "source", folder / "copy")
        must_equal(name, digests_of((folder / "copy").glob("*.tar")), members | (classes if name != "drop cls" else {}))
        shutil.rmtree(folder / "copy")
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            result = measure(way, folder / "source", folder / "copy")
            if number:
                results[name].append(result)
    return results


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the system's")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves files open
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = bench(args.samples, args.bytes, args.rounds, Path(folder))
    walls = {name: statistics.median(wall for wall, _ in rounds) for name, rounds in results.items()}
    cpus = {name: statistics.median(cpu for _, cpu in rounds) for name, rounds in results.items()}
    print(
        f"{args.samples} samples of {args.bytes} bytes and cls, medians of {args.rounds} rounds, {os.cpu_count()} CPUs"
    )
    print(f"{'':12}{'samples/s':>12}{'CPU us':>10}{'times':>8}{'in CPU':>8}")
    for name in WAYS:
        rate, cpu = args.samples / walls[name], cpus[name] / args.samples * 1e6
        times, in_cpu = walls["webdataset"] / walls[name], cpus["webdataset"] / cpus[name]
        print(f"{name:12}{rate:12,.0f}{cpu:10.1f}{times:8.1f}{in_cpu:8.1f}")


if __name__ == "__main__":
    main()
