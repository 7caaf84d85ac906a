"""What resizing and encoding cost while packing, and how they scale: images/s and CPU ms an image.

    python tools/bench_treat.py [--num N] [--rounds N] [--size WIDTHxHEIGHT@QUALITY ...]

The photographs are those of make_photos.py, in turns, written to a folder that is packed with `--resize 256`, in the
page cache, by so many worker processes and threads in each. A table a size: images/s of the wall, its ratio to one
worker with one thread, CPU ms an image of the whole process tree; medians of interleaved rounds. Processes take seconds
to start (torch is loaded in each), which is in the figures as it is in a run: take many images.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_photos import load_photos
from outputs import Digests, digests_of, must_equal

from wdskit import pack

SIZES = ("500x375@90", "1600x1200@90")
WAYS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
"""Workers and threads."""
OPTIONS: dict[str, Any] = {"resize": 256, "format": "jpg", "quality": 90}
NUM_SHARDS = 16


def write_photos(folder: Path, width: int, height: int, quality: int, num: int) -> None:
    """So many JPEG files of one size."""
    folder.mkdir()
    files = []
    for number, photo in enumerate(load_photos().values()):
        path = folder / f"source-{number}.bin"
        photo.resize((width, height), Image.Resampling.BICUBIC).save(path, "JPEG", quality=quality)
        files.append(path.read_bytes())
        path.unlink()
    for number in range(num):
        (folder / f"{number:06d}.jpg").write_bytes(files[number % len(files)])


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(source: Path, dest: Path, workers: int, threads: int) -> tuple[float, float]:
    """Seconds of the wall and of CPU that packing took."""
    shutil.rmtree(dest, ignore_errors=True)
    start, cpu = time.perf_counter(), cpu_s()
    pack(source, dest, workers=workers, threads=threads, num_shards=NUM_SHARDS, **OPTIONS)
    return time.perf_counter() - start, cpu_s() - cpu


def check(source: Path, dest: Path) -> None:
    """Every way gives the same bytes, of all images, with the side that was asked for or that of a smaller original."""
    first: Digests = {}
    for way in WAYS:
        measure(source, dest, *way)
        found = digests_of(dest.glob("*.tar"))
        first = first or found
        must_equal(f"{way[0]} x {way[1]}", found, first)
    images, sides = {}, {}
    for path in source.glob("*.jpg"):
        with Image.open(path) as image:
            images[path.name] = min(*image.size, OPTIONS["resize"])
    for path in dest.glob("*.tar"):
        with tarfile.open(path) as tar:
            for name in tar.getnames():
                if name.endswith(".jpg"):
                    with Image.open(tar.extractfile(name)) as image:  # type: ignore[arg-type]
                        sides[name] = min(image.size)
    must_equal("the shorter side", sides, images)


def compare(source: Path, dest: Path, rounds: int) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Times of each way; round -1 warms up."""
    check(source, dest)
    found: dict[tuple[int, int], list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(-1, rounds):
        for way in WAYS[:1] if number < 0 else WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            took = measure(source, dest, *way)
            if number >= 0:
                found[way].append(took)
    return found


def main() -> None:
    """Print a table a size."""
    parser = argparse.ArgumentParser(description="Speed of packing with --resize.")
    parser.add_argument("--num", type=int, default=4000, help="images a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--size", action="append", help=f"default: {' '.join(SIZES)}")
    args = parser.parse_args()
    for size in args.size or SIZES:
        shape, _, quality = size.partition("@")
        width, height = map(int, shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "photos")
            write_photos(source, width, height, int(quality), args.num)
            found = compare(source, Path(folder, "out"), args.rounds)
        print(f"{size}, {args.num} images\nworkers  threads  images/s  ratio  CPU ms")
        first = statistics.median(wall for wall, _ in found[1, 1])
        for (workers, threads), times in found.items():
            wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
            told = f"{args.num / wall:>8.0f}  {first / wall:>5.2f}  {cpu / args.num * 1e3:>6.2f}"
            print(f"{workers:>7}  {threads:>7}  {told}", flush=True)


if __name__ == "__main__":
    main()
