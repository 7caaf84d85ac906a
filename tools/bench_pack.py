"""Speed of packing, indexing and verifying beside what everybody has: tar, webdataset's writer, sha256sum.

    python tools/bench_pack.py [--rounds N] [--megabytes N] [--folder FOLDER] [--json]

Each round runs the ways of a case in turns, the other way round in the next. Printed are medians; a ratio is the median
of the rounds' own ratios, so that a machine that slows down in between hurts both alike. Of other programs the CPU time
of the whole process counts. The files are in the page cache; FOLDER says on which disk they are, a temporary one by
default. What each way wrote is
compared first, and no figure is printed of anything that differs.

  pack 100 kB  image files of 100 kB, one worker, digest and fsync, beside `tar cf` and `sync` of the archive
  pack 3 kB    image files of 3 kB, one worker, digest and fsync, beside a loop with webdataset's ShardWriter, which has
               neither
  index, verify  one shard of images of 2.5 kB or 97 kB and a little JSON, beside `sha256sum`: CPU time of one core.
               verify looks at the structure of every image
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bench_verify import check, make_jpeg, write_shard
from outputs import digests_of, must_equal

from wdskit import pack
from wdskit.checking.shard import ShardJob, check_shard
from wdskit.shards.index import scan_shard

MIN_ROUNDS = 3
NUM_JPEGS = 16


class Times(NamedTuple):
    """Seconds of one run: on the clock, and of all processes."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Line:
    """One way beside the other.

    Attributes:
        case: What is done.
        way: Ours.
        beside: Theirs.
        mb_s: Megabytes a second of ours, wall clock.
        beside_mb_s: Of theirs.
        cpu_mb_s: Megabytes a second of CPU time of ours.
        beside_cpu_mb_s: Of theirs.
        wall_ratio: Our speed by theirs on the clock.
        cpu_ratio: By CPU time.
        target: What the ratio should reach.
        by: Which ratio: wall or cpu.
    """

    case: str
    way: str
    beside: str
    mb_s: float
    beside_mb_s: float
    cpu_mb_s: float
    beside_cpu_mb_s: float
    wall_ratio: float
    cpu_ratio: float
    target: float
    by: str


Way = Callable[[], object]


def measure(way: Way) -> Times:
    """Run it once."""
    wall, cpu = time.perf_counter(), _cpu()
    way()
    return Times(time.perf_counter() - wall, _cpu() - cpu)


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def race(ways: dict[str, Way], rounds: int, clean: Way = lambda: None) -> dict[str, list[Times]]:
    """Run the ways in turns; the first round warms up."""
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in ways if number % 2 else reversed(ways):
            clean()
            took = measure(ways[name])
            if number >= 0:
                times[name].append(took)
    clean()
    return times


def compare(
    case: str, num_bytes: int, times: dict[str, list[Times]], way: str, beside: str, target: float, by: str
) -> Line:
    """The line of two ways."""
    ours, theirs = times[way], times[beside]

    def speed(each: list[float]) -> float:
        return num_bytes / 1e6 / statistics.median(each)

    return Line(
        case,
        way,
        beside,
        speed([one.wall_s for one in ours]),
        speed([one.wall_s for one in theirs]),
        speed([one.cpu_s for one in ours]),
        speed([one.cpu_s for one in theirs]),
        statistics.median(b.wall_s / a.wall_s for a, b in zip(ours, theirs, strict=True)),
        statistics.median(b.cpu_s / a.cpu_s for a, b in zip(ours, theirs, strict=True)),
        target,
        by,
    )


def make_files(folder: Path, side: int, num_bytes: int) -> int:
    """Images of this side in ten classes, no two alike, of so many bytes in all; how many bytes it became."""
    jpegs = [make_jpeg(side, seed) for seed in range(NUM_JPEGS)]
    made = number = 0
    while made < num_bytes:
        data = jpegs[number % NUM_JPEGS][:-2] + b"\xff\xfe\x00\x0a%08d\xff\xd9" % number  # a comment
        path = folder / f"class{number % 10}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        made += len(data)
        number += 1
    return made


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"there is no {name} on this machine")
    return path


def pack_with_tar(source: Path, target: Path) -> None:
    """`tar cf` and `sync` of the archive."""
    target.mkdir()
    archive = str(target / "a.tar")
    subprocess.run([_program("tar"), "cf", archive, "-C", str(source), "."], check=True)
    subprocess.run([_program("sync"), archive], check=True)


def pack_with_webdataset(source: Path, target: Path) -> None:
    """The loop that its documentation shows, with the fields that we write."""
    import webdataset

    target.mkdir()
    paths = sorted(source.rglob("*.jpg"))
    classes = {name: number for number, name in enumerate(sorted({path.parent.name for path in paths}))}
    with webdataset.ShardWriter(str(target / "a-%06d.tar"), maxcount=10_000, verbose=0) as writer:
        for path in paths:
            name = path.relative_to(source).as_posix()
            number = classes[path.parent.name]
            facts = {"cls": number, "class": path.parent.name, "path": name}
            key = name.removesuffix(".jpg")
            writer.write({"__key__": key, "jpg": path.read_bytes(), "cls": number, "json": facts})


def bench_packing(folder: Path, case: str, num_bytes: int, rounds: int) -> Line:
    """Pack a folder of image files in one of the two cases."""
    is_large = case == "pack 100 kB"
    source, target = folder / "files", folder / "packed"
    made = make_files(source, 448 if is_large else 72, num_bytes)
    theirs = "tar cf + sync" if is_large else "ShardWriter"
    way = pack_with_tar if is_large else pack_with_webdataset
    ways: dict[str, Way] = {"wdskit pack": lambda: pack(source, target), theirs: lambda: way(source, target)}
    files = {
        path.relative_to(source).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in source.rglob("*.jpg")
    }
    for name, run in ways.items():
        run()
        found = digests_of(target.glob("*.tar"))
        must_equal(f"{case}, {name}", {key: value for key, value in found.items() if key.endswith(".jpg")}, files)
        shutil.rmtree(target)
    times = race(ways, rounds, clean=lambda: shutil.rmtree(target, ignore_errors=True))
    shutil.rmtree(source)
    return compare(case, made, times, "wdskit pack", theirs, 0.8 if is_large else 5, "wall")


def bench_reading(folder: Path, side: int, num_bytes: int, rounds: int) -> list[Line]:
    """Index and verify one shard."""
    program = _program("sha256sum")
    jpegs = [make_jpeg(side, seed) for seed in range(NUM_JPEGS)]
    path = folder / "a.tar"
    write_shard(path, jpegs, num_bytes)
    size = f"{len(jpegs[0]) / 1000:.1f} kB"
    ways: dict[str, Way] = {
        "index": lambda: scan_shard(str(path), name="a.tar"),
        "sha256sum": lambda: subprocess.run([program, str(path)], check=True, stdout=subprocess.DEVNULL),
        "verify": lambda: check_shard(ShardJob(str(path), images="structure")),
    }
    digest = subprocess.run([program, str(path)], check=True, capture_output=True, text=True).stdout.split()[0]
    must_equal(f"index {size}", {"sha256": scan_shard(str(path), name="a.tar").entry.sha256}, {"sha256": digest})
    check(path)
    times = race(ways, rounds)
    made = path.stat().st_size
    path.unlink()
    return [compare(f"{way} {size}", made, times, way, "sha256sum", 0.7, "cpu") for way in ("index", "verify")]


def show(lines: list[Line]) -> None:
    """The table."""
    titles = ("MB/s", "theirs", "of CPU", "theirs", "x faster", "x less CPU", "target")
    print(f"{'':<16}{'beside':<15}" + "".join(f"{title:>12}" for title in titles))
    for one in lines:
        speeds = (one.mb_s, one.beside_mb_s, one.cpu_mb_s, one.beside_cpu_mb_s)
        reached = (one.wall_ratio if one.by == "wall" else one.cpu_ratio) >= one.target
        target = f"{one.by} {one.target:g} {'ok' if reached else 'NO'}"
        cells = [*(f"{speed:,.0f}" for speed in speeds), f"{one.wall_ratio:.2f}", f"{one.cpu_ratio:.2f}", target]
        print(f"{one.case:<16}{one.beside:<15}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description="Speed of packing, indexing and verifying beside other programs.")
    parser.add_argument("--rounds", type=int, default=5, help=f"runs of each way, {MIN_ROUNDS} or more")
    parser.add_argument("--megabytes", type=int, default=200, help="size of each case; a third of it for 3 kB files")
    parser.add_argument("--folder", type=Path, help="where to work: a disk whose fsync is to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS or args.megabytes < 1:
        parser.error(f"--rounds is {MIN_ROUNDS} or more, --megabytes 1 or more")
    num_bytes = args.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        lines = [
            bench_packing(folder, "pack 100 kB", num_bytes, args.rounds),
            bench_packing(folder, "pack 3 kB", num_bytes // 3, args.rounds),
            *bench_reading(folder, 64, num_bytes, args.rounds),
            *bench_reading(folder, 448, num_bytes, args.rounds),
        ]
    if args.json:
        print(json.dumps({"num_cpus": os.cpu_count(), "rounds": args.rounds, "lines": [asdict(one) for one in lines]}))
    else:
        show(lines)


if __name__ == "__main__":
    main()
