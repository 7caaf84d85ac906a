"""Speed of `wdskit verify` on one core against `sha256sum` and Python's hashlib, which is what it can reach at best.

    python tools/bench_verify.py [--rounds N] [--megabytes N]

Each round runs all of them on the same shard in the page cache, in another order; printed are medians of CPU time, that
of `sha256sum` its whole process, and of verify's ratio to each within a round. GNU sha256sum is slow where it was built
without OpenSSL, so the second ratio is the harder one.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from wdskit.checking.shard import ShardJob, check_shard
from wdskit.tar.writer import TarWriter

SIDES = (64, 256, 448)
MIN_ROUNDS = 3


def make_jpeg(side: int, seed: int) -> bytes:
    """A photograph's worth of detail: coarse patches and fine noise."""
    rng = np.random.default_rng(seed)
    patches = np.kron(rng.integers(0, 256, (side // 8, side // 8, 3)), np.ones((8, 8, 1), dtype=np.int64))
    stream = io.BytesIO()
    pixels = (patches + rng.integers(-20, 20, patches.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def write_shard(path: Path, jpegs: list[bytes], num_bytes: int) -> int:
    """Samples of `jpg` and `json` up to so many bytes; how many."""
    number = 0
    with path.open("wb") as file:
        writer = TarWriter(file.write)
        while writer.offset < num_bytes:
            writer.add(f"{number:08d}.jpg", jpegs[number % len(jpegs)])
            writer.add(f"{number:08d}.json", b'{"label": 3, "caption": "a few words"}')
            number += 1
        writer.finish()
    return number


def cpu_of_child(words: list[str]) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_of(work: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def digest(path: Path) -> None:
    """The sha256 of a file, as `hashlib` reads it."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 18):
            whole.update(part)


def check(path: Path) -> None:
    """Nothing is wrong with the whole shard, and one flipped byte of its last header is found."""
    for job in (ShardJob(str(path)), ShardJob(str(path), images="structure")):
        if problems := check_shard(job).findings:
            raise SystemExit(f"{path}: verify finds {problems[0]}. No figure is printed.")
    damaged = path.with_suffix(".damaged.tar")
    shutil.copy(path, damaged)
    with damaged.open("r+b") as file:
        file.seek(-2048, io.SEEK_END)
        file.write(b"\xff")
    if not check_shard(ShardJob(str(damaged))).findings:
        raise SystemExit(f"{path}: verify does not see a damaged header. No figure is printed.")
    damaged.unlink()


def compare(path: Path, rounds: int, program: str) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of CPU seconds, and of the ratios within a round."""
    ways: dict[str, Callable[[], float]] = {
        "sha256sum": lambda: cpu_of_child([program, str(path)]),
        "hashlib": lambda: cpu_of(lambda: digest(path)),
        "headers": lambda: cpu_of(lambda: check_shard(ShardJob(str(path)))),
        "images": lambda: cpu_of(lambda: check_shard(ShardJob(str(path), images="structure"))),
    }
    check(path)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):  # round -1 warms up
        names = sorted(ways, reverse=number % 2 == 0)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            took = ways[name]()
            if number >= 0:
                times[name].append(took)
    ratios = {
        f"{ours}/{theirs}": statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))
        for ours in ("headers", "images")
        for theirs in ("sha256sum", "hashlib")
    }
    return {name: statistics.median(found) for name, found in times.items()}, ratios


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Speed of verify on one core against sha256.")
    parser.add_argument("--rounds", type=int, default=7, help=f"passes of each, {MIN_ROUNDS} or more")
    parser.add_argument("--megabytes", type=int, default=200, help="size of each shard")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS or args.megabytes < 1:
        parser.error(f"--rounds is {MIN_ROUNDS} or more, --megabytes 1 or more")
    program = shutil.which("sha256sum")
    if program is None:
        raise SystemExit("there is no sha256sum on this machine")
    print("MB a second of CPU; `headers` is verify --images none, `images` --images structure; both parse JSON")
    print("jpeg bytes  sha256sum  hashlib  headers  images  headers/sha256sum  /hashlib  images/sha256sum  /hashlib")
    with tempfile.TemporaryDirectory() as folder:
        for side in SIDES:
            jpegs = [make_jpeg(side, seed) for seed in range(8)]
            path = Path(folder, f"{side}.tar")
            write_shard(path, jpegs, args.megabytes * 1_000_000)
            size = path.stat().st_size / 1e6
            times, ratios = compare(path, args.rounds, program)
            speeds = [f"{size / times[name]:>7,.0f}" for name in ("sha256sum", "hashlib", "headers", "images")]
            shares = [f"{ratio:>8.2f}" for ratio in ratios.values()]
            print(f"{len(jpegs[0]):>10,}  {'  '.join(speeds)}  {'  '.join(shares)}", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
