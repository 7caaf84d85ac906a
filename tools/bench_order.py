"""Cost of the order: per sample beside one JPEG, and of the start of an epoch at a million shards.

Per sample is what stands between a step and its reads: the positions of a rank's batch, the job, and the samples that
stand there. Every round measures every line once, so that a machine that slows down in between hurts all alike; the
table shows medians of CPU time. Over whole turns of a window, so that making windows counts with its true share.
An epoch is started in a new process each time, from the mapped index to the first positions.

    python tools/bench_order.py [--rounds 7] [--shards 1000000]
"""

from __future__ import annotations

import argparse
import hashlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import skimage.data
from PIL import Image

from wdskit.dataset.index import ShardEntry, write_index
from wdskit.order.base import Order
from wdskit.order.exact import ExactOrder
from wdskit.order.lanes import DEFAULT_LANES, DEFAULT_WINDOW
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.order.steps import Steps
from wdskit.pipeline.jobs import Job

RANKS = (1, 8, 64, 1000)
BATCH = 256
WORKERS = 8
MIN_ROUNDS = 5
MIN_STEPS = 64
CHECKED_SAMPLES = 512 * BATCH
SHARD_SAMPLES = 1000

START = """
import sys, time
from wdskit.dataset.table import ShardTable
from wdskit.order.exact import ExactOrder
import numpy as np

def peak_mb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

before, start = peak_mb(), time.perf_counter()
table = ShardTable(sys.argv[1])
table.digest()
ExactOrder(table.counts, seed=0).take(np.arange(0, 256 * 64, 64))
print(time.perf_counter() - start, peak_mb() - before)
"""


class Runner:
    """One rank, or one worker of it, that takes step after step.

    Args:
        order: The order.
        num_samples: Of an epoch.
        world_size: R; it is rank 0.
        every: 1 for all steps, W for those of one of W workers.
    """

    def __init__(self, order: Order, num_samples: int, world_size: int, every: int = 1) -> None:
        self.order = order
        self.steps = Steps(num_samples, BATCH, world_size, "drop")
        self.every = every
        turn = DEFAULT_WINDOW * DEFAULT_LANES // (BATCH * world_size) + 1
        self.num_steps = max(1, min(len(self.steps), max(turn, MIN_STEPS * every)) // every)
        self.next_step = 0

    def check(self) -> None:
        """No sample comes twice within a pass of an exact order, and every one is in a shard."""
        found = [self.order.take(np.arange(first, first + BATCH)) for first in range(0, CHECKED_SAMPLES, BATCH)]
        shards, samples = (np.concatenate(column) for column in zip(*found, strict=True))
        if samples.min() < 0 or samples.max() >= SHARD_SAMPLES or shards.min() < 0:
            raise SystemExit("A position has no sample. No figure is printed.")
        numbers = shards * SHARD_SAMPLES + samples
        if isinstance(self.order, ExactOrder) and len(np.unique(numbers)) != len(numbers):
            raise SystemExit("A sample comes twice. No figure is printed.")

    def microseconds(self) -> float:
        """CPU time of a sample over a whole turn of a window."""
        start = time.process_time()
        for _ in range(self.num_steps):
            self.next_step = (self.next_step + self.every) % len(self.steps)
            job = Job(0, self.steps.range(0, self.next_step, self.next_step + 1), self.steps.num_samples)
            places = np.minimum(job.positions, job.num_samples - 1) + job.start
            shards, samples = self.order.take(places)
            list(zip(places.tolist(), shards.tolist(), samples.tolist(), strict=True))
        return (time.process_time() - start) * 1e6 / (self.num_steps * BATCH)


def decode_microseconds() -> Callable[[], float]:
    """A function that times decoding one photograph of 400x350."""
    photograph = skimage.data.astronaut()  # type: ignore[no-untyped-call]
    stream = io.BytesIO()
    Image.fromarray(photograph).resize((400, 350)).save(stream, "JPEG", quality=95)
    data = stream.getvalue()

    def measure(num: int = 100) -> float:
        start = time.process_time()
        for _ in range(num):
            simplejpeg.decode_jpeg(data)
        return (time.process_time() - start) * 1e6 / num

    return measure


def write_big_index(folder: Path, num_shards: int) -> None:
    """The index of a folder of shards that are not there."""
    entries = [
        ShardEntry(
            f"t-{at:06d}.tar", SHARD_SAMPLES, 110_000_000, hashlib.sha256(b"%d" % at).hexdigest(), ("cls", "jpg")
        )
        for at in range(num_shards)
    ]
    write_index(folder, entries)
    if num_shards <= 100_000:  # of a folder of more, the files are not listed
        for entry in entries:
            (folder / entry.name).touch()


def start_of_epoch(folder: Path) -> tuple[float, float]:
    """Seconds, and megabytes of memory that came with it."""
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


def runners(num_shards: int, world_size: int) -> dict[str, Runner]:
    """What is measured for so many ranks, by its title."""
    counts = np.full(num_shards, SHARD_SAMPLES)
    num_samples = num_shards * SHARD_SAMPLES
    halves = [ExactOrder(counts[: num_shards // 2], seed=seed) for seed in (1, 2)]
    mixture = MixtureOrder(halves, [num_shards // 2] * 2, [0.7, 0.3])
    return {
        "exact": Runner(ExactOrder(counts, seed=0), num_samples, world_size),
        f"1 of {WORKERS} workers": Runner(ExactOrder(counts, seed=0), num_samples, world_size, WORKERS),
        "resampled": Runner(ResampledOrder(counts, seed=0), num_samples, world_size),
        "mixture": Runner(mixture, num_samples, world_size),
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Cost of the order beside decoding, and of the start of an epoch.")
    parser.add_argument("--rounds", type=int, default=7, help=f"{MIN_ROUNDS} or more")
    parser.add_argument("--shards", type=int, default=10**6, help=f"of {SHARD_SAMPLES} samples each, 1000 or more")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS or args.shards < 1000:
        parser.error(f"--rounds is {MIN_ROUNDS} or more, --shards 1000 or more")
    measured = {ranks: runners(args.shards, ranks) for ranks in RANKS}
    for runner in measured[RANKS[0]].values():
        runner.check()
    decode = decode_microseconds()
    titles = list(measured[RANKS[0]])
    times: dict[tuple[int, str], list[float]] = {(ranks, title): [] for ranks in RANKS for title in titles}
    decodes: list[float] = []
    for number in range(-1, args.rounds):  # round -1 warms up
        took = {(ranks, title): measured[ranks][title].microseconds() for ranks, title in times}
        decoded = decode()
        if number >= 0:
            decodes.append(decoded)
            for key, one in took.items():
                times[key].append(one)
    decoded = statistics.median(decodes)
    samples = f"{args.shards * SHARD_SAMPLES:,} samples in {args.shards:,} shards"
    print(f"CPU microseconds a sample and share of one decode ({decoded:,.0f} us): {samples}, batches of {BATCH}")
    print("ranks" + "".join(f"  {title:>18}" for title in titles))
    for ranks in RANKS:
        cells = [statistics.median(times[ranks, title]) for title in titles]
        print(f"{ranks:>5}" + "".join(f"  {one:>9.2f} {one / decoded:>8.2%}" for one in cells), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_big_index(Path(folder), args.shards)
        starts = [start_of_epoch(Path(folder)) for _ in range(args.rounds)]
    seconds, megabytes = (statistics.median(column) for column in zip(*starts, strict=True))
    print(f"start of an epoch, from the mapped index to the first positions: {seconds:.2f} s, {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
