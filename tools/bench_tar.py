"""Speed of the tar reader against `webdataset.tarfile_to_samples`, on local shards in the page cache.

Both read the same shards in this process, round after round in turns, and both check the checksum of every header. The
table shows medians; the ratio is the median of the rounds' own ratios, so that a machine that slows down in between
hurts both alike.

    python tools/bench_tar.py [--rounds 7] [--megabytes 200]
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from outputs import digests_of, must_equal

from wdskit.dataset.samples import ShardReader
from wdskit.storage.urls import LocalFile
from wdskit.tar.writer import TarWriter

SIZES = (3_000, 100_000)  # bytes of an image; a sample has a `cls` of two bytes beside it
MIN_ROUNDS = 5


class Times(NamedTuple):
    """Seconds of one pass: on the clock, and of this process."""

    wall_s: float
    cpu_s: float


def write_shard(path: Path, num_samples: int, image_bytes: int) -> None:
    """Write samples of two members, `jpg` of random bytes and `cls`."""
    random_bytes = random.Random(0)
    with path.open("wb") as file:
        writer = TarWriter(file.write)
        for number in range(num_samples):
            writer.add(f"{number:08d}.jpg", random_bytes.randbytes(image_bytes))
            writer.add(f"{number:08d}.cls", b"%02d" % (number % 100))
        writer.finish()


def read_with_wdskit(path: Path) -> Iterable[Mapping[str, Any]]:
    """The samples, by the reader that the stream uses."""
    stream = LocalFile(str(path))
    try:
        yield from ShardReader(stream.read, shard=str(path))
    finally:
        stream.close()


def read_with_webdataset(path: Path) -> Iterable[Mapping[str, Any]]:
    """The samples, by webdataset's stage."""
    import webdataset

    yield from webdataset.tarfile_to_samples()(iter([{"url": str(path)}]))


def check(read: Callable[[Path], Iterable[Mapping[str, Any]]], path: Path) -> None:
    """Compare every field with what tarfile finds in the shard."""
    found = {
        f"{sample['__key__']}.{name}": hashlib.sha256(data).hexdigest()
        for sample in read(path)
        for name, data in sample.items()
        if not name.startswith("__")
    }
    must_equal(read.__name__, found, digests_of([path]))


def run(read: Callable[[Path], Iterable[object]], path: Path, num_samples: int) -> Times:
    """Time one pass over a shard, and check that all samples came."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in read(path))
    times = Times(time.perf_counter() - wall, time.process_time() - cpu)
    if count != num_samples:
        raise SystemExit(f"{read.__name__} gave {count} of {num_samples} samples")
    return times


def compare(path: Path, num_samples: int, image_bytes: int, rounds: int) -> str:
    """One line of the table: both readers in turns, who goes first changing over."""
    check(read_with_wdskit, path)
    check(read_with_webdataset, path)
    ours: list[Times] = []
    theirs: list[Times] = []
    for number in range(-1, rounds):  # round -1 warms up
        pair = [(read_with_wdskit, ours), (read_with_webdataset, theirs)]
        for read, times in pair if number % 2 else reversed(pair):
            took = run(read, path, num_samples)
            if number >= 0:
                times.append(took)

    def speed(times: list[Times]) -> float:
        return num_samples / statistics.median(one.wall_s for one in times)

    wall = statistics.median(b.wall_s / a.wall_s for a, b in zip(ours, theirs, strict=True))
    cpu = statistics.median(b.cpu_s / a.cpu_s for a, b in zip(ours, theirs, strict=True))
    return f"{image_bytes:>10,}  {speed(ours):>14,.0f}  {speed(theirs):>18,.0f}  {wall:>10.1f}  {cpu:>9.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Speed of the tar reader against webdataset.tarfile_to_samples.")
    parser.add_argument("--rounds", type=int, default=7, help=f"passes of each reader, {MIN_ROUNDS} or more")
    parser.add_argument("--megabytes", type=int, default=200, help="size of each shard")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS or args.megabytes < 1:
        parser.error(f"--rounds is {MIN_ROUNDS} or more, --megabytes 1 or more")
    warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files open
    print("image bytes  wdskit, /s  webdataset, /s  x faster, wall  x less CPU")
    with tempfile.TemporaryDirectory() as folder:
        for image_bytes in SIZES:
            num_samples = max(1, args.megabytes * 1_000_000 // (image_bytes + 2_000))
            path = Path(folder, f"{image_bytes}.tar")
            write_shard(path, num_samples, image_bytes)
            print(compare(path, num_samples, image_bytes, args.rounds), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
