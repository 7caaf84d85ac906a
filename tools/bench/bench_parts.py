"""Measure the speed of wdskit's parts, each compared with a reference.

    python tools/bench/bench_parts.py [PART ...] [--rounds N] [--folder DIR] [--quick]

    tar      the tar reader, compared with webdataset's
    stream   the loader of a stream with a shuffle buffer, compared with webdataset's
    pack     image files, compared with `tar` and `sync` of the archive, and webdataset's ShardWriter
    reshard  merge, shuffle and conditions, compared with a loop of webdataset that reads and writes
    verify   index and verify, compared with sha256sum and hashlib

Each case first compares the results of its ways. Then a round runs every way once, and the next round runs them in
the opposite order. Rates, CPU microseconds (of this process and its descendants) and the ratios to the first way are
medians over the rounds. A ratio is taken within a round, so that a machine that slows down affects both values. Files
are read from the page cache; DIR is the folder for them. `bench_peers.py` measures loaders with a plan.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import webdataset
from race import Case, Way, measure, must_equal, require

from wdskit import Pipeline, pack, reshard
from wdskit.dataset.samples import ShardReader
from wdskit.shards.index import scan_shard
from wdskit.shards.verify_shard import CheckJob, check_shard
from wdskit.storage.urls import LocalFile

sys.path.append(str(Path(__file__).parents[1]))
from make_photos import load_photos

MIN_ROUNDS = 5
QUICK = 0.01


def digests_of(shards: Iterable[Path]) -> dict[str, str]:
    """Return the sha256 of each member of these shards, read by tarfile, by its name without `./` at the start."""
    found: dict[str, str] = {}
    for path in shards:
        with tarfile.open(path, "r:") as tar:
            for member in filter(tarfile.TarInfo.isfile, tar):
                name, file = member.name.removeprefix("./"), tar.extractfile(member)
                require(file and name not in found, f"{path.name}: {name} comes twice")
                found[name] = hashlib.sha256(file.read() if file else b"").hexdigest()
    return found


def packing_case(
    title: str, num: float, dest: Path, ways: Mapping[str, Way], expected: Mapping[str, Any], suffix: str = ""
) -> Case:
    """Return the case of ways that write shards below `dest`; only members with `suffix` are compared.

    Each way must write the members that `expected` has for it, or else those of the first way. The files of the
    previous run are removed, with `sync`, so that no run pays for another run's writes.

    Raises:
        SystemExit: A way wrote other members.
    """

    def remove(_: str) -> None:
        shutil.rmtree(dest, ignore_errors=True)
        os.sync()

    first: dict[str, str] = {}
    for name, way in ways.items():
        remove(name)
        way()
        found = {key: value for key, value in digests_of(dest.glob("*.tar")).items() if key.endswith(suffix)}
        first = first or found
        must_equal(name, found, expected.get(name, first))
    return Case(title, num, ways, remove)


def program(*command: str) -> str:
    """Run a program and return what it prints. Raises SystemExit if it is not installed."""
    require(
        shutil.which(command[0]), f"{command[0]}: no such program on this machine; install it or leave the part out"
    )
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def pack_samples(folder: Path, num: int, size: int, *, max_samples: int) -> list[Path]:
    """Write indexed shards of samples with a `bin` of about `size` random bytes and a `cls`; return their paths."""
    chance = random.Random(0)
    rows: Iterable[dict[str, Any]] = (
        {"__key__": f"n{n:08d}", "bin": chance.randbytes(size + chance.randint(-size // 8, size // 8)), "cls": n}
        for n in range(num)
    )
    pack(rows, folder, max_samples=max_samples, columns="cls")
    return sorted(folder.glob("*.tar"))


def numbered_photos(size: str, num_bytes: float) -> Iterator[bytes]:
    """Yield JPEG files that all differ (each has its number in a comment), about `num_bytes` bytes in total.

    `size` is width, height and quality, such as `455x385@95`.
    """
    width, height, quality = map(int, size.replace("@", "x").split("x"))
    files = []
    for photo in load_photos().values():
        photo.resize((width, height)).save(stream := io.BytesIO(), format="JPEG", quality=quality)
        files.append(stream.getvalue())
    for number in range(int(num_bytes * len(files)) // sum(map(len, files)) + 1):
        yield files[number % len(files)][:-2] + b"\xff\xfe\x00\x0a%08d\xff\xd9" % number


def by_wdskit(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the samples of a shard, by the reader that streams use."""
    stream = LocalFile(str(path))
    yield from ShardReader(stream.read, shard=str(path))
    stream.close()


def by_webdataset(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the samples of a shard, by webdataset's reader."""
    yield from webdataset.tarfile_to_samples()(iter([{"url": str(path)}]))


def tar_case(folder: Path, scale: float, size: int) -> Case:
    """Return the case that reads a whole shard, sample by sample."""
    num = int(200e6 * scale) // size
    [path] = pack_samples(folder, num, size, max_samples=num)
    expected = digests_of([path])
    for read in (by_webdataset, by_wdskit):
        fields = ((sample["__key__"], *item) for sample in read(path) for item in sample.items())
        found = {f"{key}.{field}": hashlib.sha256(data).hexdigest() for key, field, data in fields if field[:2] != "__"}
        must_equal(read.__name__, found, expected)
    ways = {"webdataset": lambda: deque(by_webdataset(path), 0), "wdskit": lambda: deque(by_wdskit(path), 0)}
    return Case(f"tar: {num:,} samples of {size // 1000} kB", num, ways)


def stream_case(folder: Path, scale: float, workers: int) -> Case:
    """Return the case of a stream with a shuffle buffer, in batches of 64."""
    num = int(40_000 * scale)
    shards = [str(path) for path in pack_samples(folder, num, 3_000, max_samples=num // 8)]
    plain = webdataset.WebDataset(shards, shardshuffle=8).shuffle(1000).decode().to_tuple("bin", "cls").batched(64)
    ours = Pipeline().stream(shards).split_by_worker().shuffle(1000).decode().to_tuple("bin", "cls").batched(64)
    theirs = torch.utils.data.DataLoader(plain, None, num_workers=workers)
    loaders: dict[str, Any] = {"webdataset": theirs, "wdskit": ours.loader(workers=workers)}
    for name, loader in loaders.items():
        require(sorted(n for _, classes in loader for n in classes.tolist()) == [*range(num)], f"{name}: other samples")
    title = f"stream: {num:,} samples of 3 kB, {workers} workers"
    return Case(title, num, {name: partial(deque, loader, 0) for name, loader in loaders.items()})


def pack_case(folder: Path, scale: float, size: str, num_bytes: float) -> Case:
    """Return the case that packs image files in ten classes, with one worker, digests and fsync."""
    source, dest, digests = folder / "files", folder / "packed", {}
    for number, data in enumerate(numbered_photos(size, num_bytes * scale)):
        path = source / f"class{number % 10}" / f"{number:08d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digests[path.relative_to(source).as_posix()] = hashlib.sha256(data).hexdigest()

    def by_tar() -> None:
        dest.mkdir()
        program("tar", "cf", str(dest / "a.tar"), "-C", str(source), ".")
        program("sync", str(dest / "a.tar"))

    def by_shard_writer() -> None:
        dest.mkdir()
        with webdataset.ShardWriter(str(dest / "a-%06d.tar"), maxcount=10_000, verbose=0) as writer:
            for path in sorted(source.rglob("*.jpg")):
                name, number = path.relative_to(source).as_posix(), int(path.parent.name[-1])
                metadata = {"cls": number, "class": path.parent.name, "path": name}
                writer.write({"__key__": name[:-4], "jpg": path.read_bytes(), "cls": number, "json": metadata})

    by_wdskit = partial(pack, source, dest, workers=1)
    ways: dict[str, Way] = {"tar cf, sync": by_tar, "ShardWriter": by_shard_writer, "wdskit pack": by_wdskit}
    num_mb = sum(path.stat().st_size for path in source.rglob("*.jpg")) / 1e6
    title = f"pack: {len(digests):,} files of {num_mb / len(digests) * 1000:.1f} kB"
    case = packing_case(title, num_mb, dest, ways, dict.fromkeys(ways, digests), ".jpg")
    return replace(case, unit="MB")


def reshard_case(folder: Path, scale: float) -> Case:
    """Return the case that turns shards of 3,000 samples into shards of 2,000; wdskit adds digests, index, fsync."""
    num, size, source, dest = int(20_000 * scale), 5_000, folder / "source", folder / "copy"
    shards = pack_samples(source, num, size, max_samples=3_000)

    def by_loop() -> None:
        dest.mkdir()
        samples = webdataset.WebDataset([str(path) for path in shards], shardshuffle=False)
        with webdataset.ShardWriter(str(dest / "o-%06d.tar"), maxcount=2_000, maxsize=1e12, verbose=0) as out:
            for sample in samples:
                out.write({name: data for name, data in sample.items() if name == "__key__" or name[:2] != "__"})

    ours: Any = partial(reshard, str(source), dest, max_samples=2_000)
    ways: dict[str, Way] = {
        "webdataset": by_loop,
        "merge": ours,
        "shuffle": partial(ours, shuffle=1),
        "drop cls": partial(ours, drop="cls"),
        "where": partial(ours, where="cls >= 0"),
    }
    whole = digests_of(shards)
    without_cls = {name: value for name, value in whole.items() if not name.endswith(".cls")}
    expected = dict.fromkeys(ways, whole) | {"drop cls": without_cls}
    return packing_case(f"reshard: {num:,} samples of {size // 1000} kB", num, dest, ways, expected)


def verify_case(folder: Path, scale: float, size: str) -> Case:
    """Return the case that checks one shard of images and a little JSON, on one core."""
    rows: list[dict[str, Any]] = [
        {"__key__": f"n{n:08d}", "jpg": data, "json": {"label": 3, "caption": "a few words"}}
        for n, data in enumerate(numbered_photos(size, 200e6 * scale))
    ]
    pack(rows, folder, max_samples=len(rows))
    [path] = folder.glob("*.tar")

    def by_hashlib() -> str:
        whole = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 18):
                whole.update(part)
        return whole.hexdigest()

    headers, images = CheckJob(str(path)), CheckJob(str(path), images="structure")
    ways: dict[str, Way] = {
        "sha256sum": partial(program, "sha256sum", str(path)),
        "hashlib": by_hashlib,
        "index": partial(scan_shard, str(path)),
        "verify --images none": partial(check_shard, headers),
        "verify": partial(check_shard, images),
    }
    digests = {program("sha256sum", str(path)).split()[0], by_hashlib()}
    require(digests == {scan_shard(str(path)).entry.sha256}, "index: another digest")
    findings = [*check_shard(headers).findings, *check_shard(images).findings]
    require(not findings, f"verify finds {findings[:1]}")
    damaged = folder / "damaged.tar"
    damaged.write_bytes(b"\xff" + path.read_bytes()[1:])
    require(check_shard(CheckJob(str(damaged))).findings, "verify does not see a damaged header")
    title = f"verify: {len(rows):,} images of {len(rows[0]['jpg']) / 1000:.1f} kB"
    return Case(title, path.stat().st_size / 1e6, ways, unit="MB")


PARTS: dict[str, list[tuple[Any, ...]]] = {
    "tar": [(tar_case, 3_000), (tar_case, 100_000)],
    "stream": [(stream_case, 0), (stream_case, 2)],
    "pack": [(pack_case, "448x448@95", 200e6), (pack_case, "72x72@90", 70e6)],
    "reshard": [(reshard_case,)],
    "verify": [(verify_case, size) for size in ("64x64@90", "256x256@95", "448x448@95")],
}


def main() -> None:
    """Print the tables of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} or more (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one round with little data; its figures mean nothing")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: {options.rounds}: fewer than {MIN_ROUNDS}")
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such part. Name some of {', '.join(PARTS)}.")
    warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files open
    torch.set_num_threads(1)
    most = 2 if options.quick else None
    for make_case, *settings in [case for name in options.parts or PARTS for case in PARTS[name][:most]]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            case = make_case(Path(folder), QUICK if options.quick else 1.0, *settings)
            measure(case, 1 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
