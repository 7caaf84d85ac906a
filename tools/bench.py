"""Speed of wdskit's own parts, each beside what it is to be measured by.

    python tools/bench.py [PART ...] [--rounds N] [--folder DIR] [--quick]

    tar      the tar reader, beside webdataset's
    small    small samples in batches, beside webdataset; the order, the system calls and the headers alone
    engine   the loader in workers x threads, beside the bare chain (bare.py) in four threads
    image    decode and crop in one thread, fused and apart, beside the bare chain; Pillow
    order    orders of a million shards for 1 to 1000 ranks; the start of an epoch
    pack     image files, beside `tar` and `sync` of the archive, and beside webdataset's ShardWriter
    reshard  merge, shuffle and filters, beside webdataset's loop of reading and writing
    verify   index and verify, beside sha256sum and hashlib
    treat    packing with `--resize 256` in workers x threads, beside one worker with one thread

Each case compares what its ways give before it measures. Then a round runs every way once, the next round in the
opposite order. Rates, CPU microseconds (of this process and all below it) and the ratios to the first way are medians
over the rounds; a ratio is taken within a round, so that a machine that slows down hurts both alike. Files come from
the page cache; DIR says on which disk they are.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bare
import numpy as np
import simplejpeg
import torch
import webdataset
from make_photos import load_photos
from outputs import digests_of, must_equal
from peers.measure import cpu_s
from peers.recipes import draw, pillow
from PIL import Image

from wdskit import Pipeline, pack, reshard
from wdskit.checking.shard import ShardJob, check_shard
from wdskit.dataset.columns import parse_samples
from wdskit.dataset.index import ShardEntry, write_index
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.table import ShardTable
from wdskit.limits import BLOCK_BYTES
from wdskit.order.base import Order
from wdskit.order.exact import ExactOrder
from wdskit.order.mixture import MixtureOrder
from wdskit.order.resampled import ResampledOrder
from wdskit.shards.index import scan_shard
from wdskit.storage.urls import LocalFile

MIN_ROUNDS = 5
QUICK = 0.01
BATCH = 64
SMALL_BATCH = 256
WARM_BATCHES = 8
MAX_LEVELS = 6.0  # of 255, in the mean: decoding at a smaller scale and the means of resizing differ by one to three
RANKS = (1, 8, 64, 1000)
Way = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One table: ways of doing the same, compared with the first of them.

    Args:
        title: Above the table.
        unit: What `num` counts, in the plural.
        num: How many a run of each way does.
        ways: By name.
        before: Called before each run, outside of its time, with the way's name.
    """

    title: str
    unit: str
    num: float
    ways: Mapping[str, Way]
    before: Callable[[str], object] = lambda name: None  # noqa: ARG005


class Times(NamedTuple):
    """Seconds of one run: on the clock, and of the CPU time of all processes."""

    wall_s: float
    cpu_s: float


def race(case: Case, rounds: int) -> dict[str, list[Times]]:
    """Run the ways in turns; a first round warms up and does not count."""
    times: dict[str, list[Times]] = {name: [] for name in case.ways}
    for number in range(-1, rounds):
        for name in list(case.ways)[:: 1 if number % 2 else -1]:
            case.before(name)
            cpu, start = cpu_s(), time.perf_counter()
            case.ways[name]()
            wall = time.perf_counter() - start
            if number >= 0:
                times[name].append(Times(wall, max(cpu_s() - cpu, 1e-6)))
    return times


def show(case: Case, times: dict[str, list[Times]]) -> None:
    """Print a line for each way: its rate, and its CPU time a unit, each with its ratio to the first way's."""
    width = max(24, *(len(name) + 2 for name in times))
    print(f"{case.title}\n{'':<{width}}{case.unit + '/s':>14}{'x first':>10}{'CPU us':>12}{'x first':>10}")
    base = next(iter(times.values()))
    for name, rows in times.items():
        rate = statistics.median(case.num / row.wall_s for row in rows)
        cpu_us = statistics.median(row.cpu_s / case.num * 1e6 for row in rows)
        faster = statistics.median(first.wall_s / row.wall_s for row, first in zip(rows, base, strict=True))
        dearer = statistics.median(row.cpu_s / first.cpu_s for row, first in zip(rows, base, strict=True))
        print(f"{name:<{width}}{rate:>14,.1f}{faster:>10.2f}{cpu_us:>12,.2f}{dearer:>10.2f}")
    print(flush=True)


def refuse(what: str) -> None:
    """End the benchmark: its figures would be of something else."""
    raise SystemExit(f"{what}. No figure is printed.")


def bench_tar(folder: Path, scale: float) -> Iterator[Case]:
    """Whole shards, sample by sample."""

    def by_webdataset(path: Path) -> Iterator[Mapping[str, Any]]:
        yield from webdataset.tarfile_to_samples()(iter([{"url": str(path)}]))

    for size in (3_000, 100_000):
        num = int(200e6 * scale) // size
        [path] = pack_samples(folder / str(size), num, size, max_samples=num)
        for read in (by_webdataset, read_shard):
            found = {
                f"{sample['__key__']}.{field}": hashlib.sha256(data).hexdigest()
                for sample in read(path)
                for field, data in sample.items()
                if not field.startswith("__")
            }
            must_equal(read.__name__, found, digests_of([path]))
        ways = {"webdataset": partial(consume, by_webdataset, path), "wdskit": partial(consume, read_shard, path)}
        yield Case(f"tar: {num:,} samples of {size // 1000} kB", "samples", num, ways)


def read_shard(path: Path) -> Iterator[Mapping[str, Any]]:
    """The samples of a shard, by the reader that streams use."""
    stream = LocalFile(str(path))
    yield from ShardReader(stream.read, shard=str(path))
    stream.close()


def pack_samples(folder: Path, num: int, size: int, *, max_samples: int, with_json: bool = False) -> list[Path]:
    """Indexed shards of samples with `bin` of about `size` random bytes, `cls`, and some 100 bytes of `json`."""
    chance = random.Random(0)
    rows: Iterable[dict[str, Any]] = (
        {"__key__": f"n{n:08d}", "bin": chance.randbytes(size + chance.randint(-size // 8, size // 8)), "cls": n}
        | ({"json": {"id": n, "caption": f"photo {n}", "tags": ["a", "b"], "score": n / 7}} if with_json else {})
        for n in range(num)
    )
    pack(rows, folder, max_samples=max_samples, allow_no_image=True)
    return sorted(folder.glob("*.tar"))


def consume(read: Callable[[Path], Iterable[object]], path: Path) -> None:
    """Take all samples and keep none."""
    deque(read(path), maxlen=0)


def bench_small(folder: Path, scale: float) -> Iterator[Case]:
    """Samples of a few kB, in one process, without workers and threads."""
    for size, with_json in ((3_000, False), (2_000, True)):
        num = max(int(80 * scale), 1) * SMALL_BATCH
        shards = pack_samples(folder / str(size), num, size, max_samples=2_000, with_json=with_json)
        source = Pipeline().exact(str(folder / str(size)), seed=1)
        loader = (source.decode() if with_json else source).batched(SMALL_BATCH).loader(workers=0, threads=1)
        decoding = [webdataset.decode()] if with_json else []
        urls = webdataset.SimpleShardList([str(path) for path in shards])
        batched = webdataset.batched(SMALL_BATCH, collation_fn=None)
        theirs = webdataset.DataPipeline(urls, webdataset.tarfile_to_samples(), *decoding, batched)
        names = ["bin", "json"] if with_json else ["bin"]
        ours = {
            key: [bytes(values[0]), *values[1:]]
            for batch in loader
            for key, *values in zip(batch["__key__"], *(batch[name] for name in names), strict=True)
        }
        rows = {sample["__key__"]: [sample[name] for name in names] for batch in theirs for sample in batch}
        must_equal("small", ours, rows)
        places = [np.arange(first, first + SMALL_BATCH) for first in range(0, num, SMALL_BATCH)]
        reads = Reads(shards, places)
        ways: dict[str, Way] = {
            "webdataset": partial(deque, theirs, 0),
            "wdskit": partial(deque, loader, 0),
            "order alone": reads.take,
            "pread alone": reads.pread,
            "headers and keys alone": reads.parse,
        }
        what = " with decoded JSON" if with_json else ""
        yield Case(f"small: {num:,} samples of {size // 1000} kB{what}", "samples", num, ways)


class Reads:
    """What a planned source cannot do without, each by itself: positions to samples, system calls, headers.

    Args:
        shards: In the order of the index.
        places: Positions, a batch each.
    """

    def __init__(self, shards: list[Path], places: list[Any]) -> None:
        offsets = [np.fromfile(f"{path}.idx", "<u8").astype(np.int64).tolist() for path in shards]
        self.files = [path.open("rb") for path in shards]
        self.places = places
        self.order = ExactOrder(np.array([len(rows) - 1 for rows in offsets]), seed=1)
        spans = [
            [(file.fileno(), stop - start + BLOCK_BYTES, start) for start, stop in itertools.pairwise(rows)]
            for file, rows in zip(self.files, offsets, strict=True)
        ]
        self.spans = [[spans[shard][at] for shard, at in zip(*found, strict=True)] for found in self.take()]
        self.raw = self.pread()

    def take(self) -> list[Any]:
        """Which samples stand at the positions."""
        return [self.order.take(batch) for batch in self.places]

    def pread(self) -> list[list[bytes]]:
        """One read a sample, with the header behind it."""
        return [[os.pread(*span) for span in batch] for batch in self.spans]

    def parse(self) -> None:
        """Headers and keys."""
        for batch in self.raw:
            parse_samples(batch, [0] * len(batch), [len(data) - BLOCK_BYTES for data in batch])


class Photos:
    """Photographs of one size, packed, and the loops that crop them into batches that are used again.

    Args:
        folder: For the shards.
        size: Width x height @ quality.
        num: How many, a multiple of BATCH; the photographs in turns.
        dtype: "uint8", or "float32", which is normalized.
    """

    def __init__(self, folder: Path, size: str, num: int, dtype: str) -> None:
        self.folder, self.num, self.dtype = folder, num, dtype
        width, height, quality = map(int, size.replace("@", "x").split("x"))
        self.photos = [encode(photo.resize((width, height)), quality) for photo in load_photos().values()]
        if not folder.exists():
            pack([{"__key__": f"n{n:06d}", "jpg": self.file(n), "cls": n} for n in range(num)], folder, max_samples=512)
        random.seed(0)
        self.boxes = [draw(height, width) for _ in range(num)]
        self.batch = bare.new_batch(BATCH, getattr(torch, dtype))

    def file(self, number: int) -> bytes:
        """The JPEG file of a sample."""
        return self.photos[number % len(self.photos)]

    def loader(self, workers: int, threads: int, *, fuse: bool = True) -> Any:
        """The whole way through wdskit: order, read, decode and crop, batch."""
        pipe = Pipeline().exact(str(self.folder), seed=1).decode("rgb8", fuse=fuse).random_resized_crop(bare.TARGET)
        pipe = pipe.normalize("imagenet") if self.dtype == "float32" else pipe
        return pipe.to_tuple("jpg", "cls").batched(BATCH).loader(workers=workers, threads=threads)

    def bare(self, threads: int) -> None:
        """The bare chain, with boxes known before."""

        def run(first: int) -> None:
            for n in range(first, self.num, threads):
                bare.write(self.batch[n % BATCH], bare.decode_and_crop(self.file(n), self.boxes[n]))

        running = [threading.Thread(target=run, args=(first,)) for first in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def pillow(self) -> None:
        """The common recipe, in one thread."""
        for n in range(self.num):
            self.batch[n % BATCH].copy_(pillow(self.file(n), self.dtype))

    def check(self, loaders: Mapping[str, Any], *, equal: bool) -> None:
        """The loaders give the same (`equal`: to the bit), all samples, and in the mean the bare chain's pixels."""
        levels = 1.0 if self.dtype == "uint8" else 255 * bare.STD[1]
        first: list[Any] = []
        for name, loader in loaders.items():
            batches = [(images.clone(), labels.clone()) for images, labels in loader]
            first = first or batches
            labels = torch.cat([labels for _, labels in batches])
            must_equal(name, dict.fromkeys(map(str, labels.tolist())), dict.fromkeys(map(str, range(self.num))))
            for (mine, numbers), (other, others) in zip(batches, first, strict=True):
                away = (mine.float() - other.float()).abs().mean() * levels
                if not torch.equal(numbers, others) or away > (0 if equal else MAX_LEVELS):
                    refuse(f"{name}: {away:.1f} levels away from {next(iter(loaders))} in the mean")
        ours = torch.cat([images for images, _ in first]).float().mean()
        means = []
        for n in range(self.num):
            bare.write(self.batch[n % BATCH], bare.decode_and_crop(self.file(n), self.boxes[n]))
            means.append(self.batch[n % BATCH].float().mean())
        if (away := (ours - torch.stack(means).mean()).abs() * levels) > MAX_LEVELS:
            refuse(f"the bare chain: {away:.1f} levels away from wdskit in the mean")

    def case(self, title: str, loaders: Mapping[str, Any], others: Mapping[str, Way], warm_batches: int = 0) -> Case:
        """`others` first; `warm_batches`, which workers made while nobody measured, are taken before each run."""
        endless = {name: itertools.chain.from_iterable(itertools.repeat(loader)) for name, loader in loaders.items()}

        def take(name: str, num_batches: int) -> None:
            deque(itertools.islice(endless[name], num_batches), maxlen=0)

        def before(name: str) -> None:
            if name in endless:
                take(name, warm_batches)

        ours = {name: partial(take, name, self.num // BATCH) for name in loaders}
        return Case(f"{title} to {self.dtype}, batches of {BATCH}", "images", self.num, {**others, **ours}, before)


def encode(photo: Image.Image, quality: int) -> bytes:
    """A photograph as JPEG."""
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def bench_image(folder: Path, scale: float) -> Iterator[Case]:
    """Decode and random resized crop, in one thread."""
    sizes = ("455x385@95", "1600x1200@90") if scale == 1 else ("455x385@95",)
    for size, dtype in itertools.product(sizes, ("uint8", "float32")):
        photos = Photos(folder / size, size, max(int(4 * scale), 1) * BATCH, dtype)
        loaders = {name: photos.loader(0, 1, fuse=name == "fused") for name in ("fused", "apart")}
        photos.check(loaders, equal=False)
        yield photos.case(f"image: {size}", loaders, {"bare": partial(photos.bare, 1), "Pillow": photos.pillow})


def bench_engine(folder: Path, scale: float) -> Iterator[Case]:
    """The loader with four decoders."""
    for dtype in ("uint8", "float32") if scale == 1 else ("uint8",):
        photos = Photos(folder / "photos", "455x385@95", max(int(24 * scale), 2) * BATCH, dtype)
        combinations = [(0, 4), (1, 4), (2, 2), (4, 1)]
        loaders = {f"{workers} x {threads}": photos.loader(workers, threads) for workers, threads in combinations}
        photos.check(loaders, equal=True)
        yield photos.case("engine: 455x385@95", loaders, {"bare, 4 threads": partial(photos.bare, 4)}, WARM_BATCHES)


def bench_order(folder: Path, scale: float) -> Iterator[Case]:
    """From the positions of a rank's batches to shards and samples, and what comes before the first of an epoch."""
    num_shards, shard_samples, batch, workers = int(1e6 * scale), 1_000, 256, 8
    counts = np.full(num_shards, shard_samples)
    num_samples = num_shards * shard_samples

    def run(order: Order, ranks: int, every: int) -> None:
        for step in range(0, num_steps * every, every):
            order.take(np.arange(step * batch * ranks, (step + 1) * batch * ranks, ranks) % num_samples)

    for ranks in RANKS:
        halves = [ExactOrder(counts[: num_shards // 2], seed=seed) for seed in (1, 2)]
        orders: dict[str, tuple[Order, int]] = {
            "exact": (ExactOrder(counts, seed=0), 1),
            f"exact, 1 of {workers} workers": (ExactOrder(counts, seed=0), workers),
            "resampled": (ResampledOrder(counts, seed=0), 1),
            "mixture": (MixtureOrder(halves, [num_shards // 2] * 2, [0.7, 0.3]), 1),
        }
        for name, (order, _) in orders.items():
            shards, samples = order.take(np.arange(512 * batch))
            numbers = shards * shard_samples + samples
            if (
                samples.min() < 0
                or samples.max() >= shard_samples
                or not 0 <= shards.min() <= shards.max() < num_shards
            ):
                refuse(f"{name}: a position has no sample")
            if name.startswith("exact") and len(np.unique(numbers)) != len(numbers):
                refuse(f"{name}: a sample comes twice")
        num_steps = max(int(4096 * 240 * scale) // (batch * ranks), 64)  # a turn of all windows, with making them
        title = f"order: {num_samples:,} samples in {num_shards:,} shards, {ranks} ranks, batches of {batch}"
        ways = {name: partial(run, order, ranks, every) for name, (order, every) in orders.items()}
        yield Case(title, "samples", num_steps * batch, ways)

    digest = hashlib.sha256(b"").hexdigest()
    write_index(
        folder, [ShardEntry(f"t-{n:06d}.tar", shard_samples, 10**8, digest, ("jpg",)) for n in range(num_shards)]
    )
    for n in range(num_shards if num_shards <= 100_000 else 0):  # the files of a larger folder are not looked for
        (folder / f"t-{n:06d}.tar").touch()

    def start() -> None:
        table = ShardTable(str(folder))
        table.digest()
        ExactOrder(table.counts, seed=0).take(np.arange(0, batch * 64, 64))

    yield Case(f"order: the start of an epoch of {num_shards:,} shards", "epochs", 1, {"exact": start})


def make_jpeg(side: int, number: int) -> bytes:
    """A photograph's worth of detail: coarse patches and fine noise; 2.5 kB of 64 pixels a side, 97 kB of 448."""
    rng = np.random.default_rng(number)
    patches = np.kron(rng.integers(0, 256, (side // 8, side // 8, 3)), np.ones((8, 8, 1), dtype=np.int64))
    return encode(Image.fromarray((patches + rng.integers(-20, 20, patches.shape)).clip(0, 255).astype(np.uint8)), 90)


def numbered_jpegs(side: int, num_bytes: float) -> Iterator[bytes]:
    """JPEG files of this side, no two alike (each has its number in a comment), up to so many bytes in all."""
    jpegs = [make_jpeg(side, number) for number in range(16)]
    for number in range(int(num_bytes) // len(jpegs[0]) + 1):
        yield jpegs[number % len(jpegs)][:-2] + b"\xff\xfe\x00\x0a%08d\xff\xd9" % number


def program(name: str) -> str:
    """The path of a program of this machine."""
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name}: no such program on this machine. Install it, or leave the part out.")
    return path


def bench_pack(folder: Path, scale: float) -> Iterator[Case]:
    """A folder of image files in ten classes, with one worker, digests and fsync."""
    source, dest = folder / "files", folder / "packed"

    def by_tar() -> None:
        dest.mkdir()
        subprocess.run([program("tar"), "cf", str(dest / "a.tar"), "-C", str(source), "."], check=True)
        subprocess.run([program("sync"), str(dest / "a.tar")], check=True)

    def by_webdataset() -> None:
        dest.mkdir()
        with webdataset.ShardWriter(str(dest / "a-%06d.tar"), maxcount=10_000, verbose=0) as writer:
            for path in sorted(source.rglob("*.jpg")):
                name, number = path.relative_to(source).as_posix(), int(path.parent.name[-1])
                metadata = {"cls": number, "class": path.parent.name, "path": name}
                key = name.removesuffix(".jpg")
                writer.write({"__key__": key, "jpg": path.read_bytes(), "cls": number, "json": metadata})

    by_wdskit = partial(pack, source, dest, workers=1)
    cases: list[tuple[int, float, dict[str, Way]]] = [
        (448, 200e6, {"tar cf, sync": by_tar, "wdskit pack": by_wdskit}),
        (72, 70e6, {"ShardWriter": by_webdataset, "wdskit pack": by_wdskit}),
    ]
    for side, num_bytes, ways in cases:
        digests = {}
        for number, data in enumerate(numbered_jpegs(side, num_bytes * scale)):
            path = source / f"class{number % 10}" / f"{number:08d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            digests[path.relative_to(source).as_posix()] = hashlib.sha256(data).hexdigest()
        for name, way in ways.items():
            way()
            found = digests_of(dest.glob("*.tar"))
            must_equal(name, {key: value for key, value in found.items() if key.endswith(".jpg")}, digests)
            shutil.rmtree(dest)
        size = sum(path.stat().st_size for path in source.rglob("*.jpg"))
        title = f"pack: {len(digests):,} files of {size // len(digests) / 1000:.1f} kB"
        yield Case(title, "MB", size / 1e6, ways, partial(remove_output, dest))
        shutil.rmtree(source)
        remove_output(dest)


def remove_output(dest: Path, name: str = "") -> None:  # noqa: ARG001
    """Remove what the run before left, on the disk too: no run pays for another one's writes."""
    shutil.rmtree(dest, ignore_errors=True)
    os.sync()


def bench_reshard(folder: Path, scale: float) -> Iterator[Case]:
    """Shards of 3,000 samples into others of 2,000; ours with digests, offsets, index and fsync."""
    num, size, dest = int(20_000 * scale), 5_000, folder / "copy"
    shards = pack_samples(folder / "source", num, size, max_samples=3_000)

    def by_webdataset() -> None:
        dest.mkdir()
        samples = webdataset.WebDataset([str(path) for path in shards], shardshuffle=False)
        with webdataset.ShardWriter(str(dest / "o-%06d.tar"), maxcount=2_000, maxsize=1e12, verbose=0) as out:
            for sample in samples:
                out.write({name: data for name, data in sample.items() if name == "__key__" or name[:2] != "__"})

    by_wdskit: Any = partial(reshard, str(folder / "source"), dest, max_samples=2_000)
    ways: dict[str, Way] = {
        "webdataset": by_webdataset,
        "merge": by_wdskit,
        "shuffle": partial(by_wdskit, shuffle=1),
        "drop cls": partial(by_wdskit, drop="cls"),
        "filter": partial(by_wdskit, filter="cls >= 0"),
    }
    expected = digests_of(shards)
    without_cls = {name: value for name, value in expected.items() if not name.endswith(".cls")}
    for name, way in ways.items():
        remove_output(dest)
        way()
        must_equal(name, digests_of(dest.glob("*.tar")), without_cls if name == "drop cls" else expected)
    yield Case(f"reshard: {num:,} samples of {size // 1000} kB", "samples", num, ways, partial(remove_output, dest))


def bench_verify(folder: Path, scale: float) -> Iterator[Case]:
    """One shard of images and a little JSON, on one core."""

    def by_hashlib(path: Path) -> str:
        whole = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 18):
                whole.update(part)
        return whole.hexdigest()

    def by_program(path: Path) -> str:
        done = subprocess.run([program("sha256sum"), str(path)], check=True, capture_output=True, text=True)
        return done.stdout.split()[0]

    for side in (64, 256, 448):
        rows: list[dict[str, Any]] = [
            {"__key__": f"n{n:08d}", "jpg": data, "json": {"label": 3, "caption": "a few words"}}
            for n, data in enumerate(numbered_jpegs(side, 200e6 * scale))
        ]
        pack(rows, folder / str(side), max_samples=len(rows))
        [path] = (folder / str(side)).glob("*.tar")
        digests = [scan_shard(str(path), name=path.name).entry.sha256, by_program(path), by_hashlib(path)]
        must_equal("index", dict.fromkeys(digests), {digests[1]: None})
        headers, images = ShardJob(str(path)), ShardJob(str(path), images="structure")
        if findings := [*check_shard(headers).findings, *check_shard(images).findings]:
            refuse(f"verify finds {findings[0]}")
        damaged = Path(shutil.copy(path, folder / "damaged.tar"))
        with damaged.open("r+b") as file:
            file.write(b"\xff")
        if not check_shard(ShardJob(str(damaged))).findings:
            refuse("verify does not see a damaged header")
        ways: dict[str, Way] = {
            "sha256sum": partial(by_program, path),
            "hashlib": partial(by_hashlib, path),
            "index": partial(scan_shard, str(path), name=path.name),
            "verify --images none": partial(check_shard, headers),
            "verify": partial(check_shard, images),
        }
        size = len(rows[0]["jpg"]) / 1000
        yield Case(f"verify: {len(rows):,} images of {size:.1f} kB", "MB", path.stat().st_size / 1e6, ways)


def bench_treat(folder: Path, scale: float) -> Iterator[Case]:
    """Photographs that are made smaller while they are packed. The start of processes, with torch, counts."""
    source, dest = folder / "photos", folder / "packed"
    for size in ("500x375@90", "1600x1200@90"):
        width, height, quality = map(int, size.replace("@", "x").split("x"))
        files = [encode(photo.resize((width, height)), quality) for photo in load_photos().values()]
        num = int(2_000 * scale)
        source.mkdir()
        for number in range(num):
            (source / f"{number:06d}.jpg").write_bytes(files[number % len(files)])
        options: dict[str, Any] = {"num_shards": min(16, num), "resize": 256, "format": "jpg", "quality": 90}
        ways = {
            f"{workers} x {threads}": partial(pack, source, dest, workers=workers, threads=threads, **options)
            for workers, threads in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
        }
        found: list[dict[str, str]] = []
        for name, way in ways.items():
            remove_output(dest)
            way()
            found.append(digests_of(dest.glob("*.tar")))
            must_equal(name, found[-1], found[0])
        samples = itertools.chain.from_iterable(map(read_shard, dest.glob("*.tar")))
        sides = {sample["__key__"]: min(simplejpeg.decode_jpeg_header(sample["jpg"])[:2]) for sample in samples}
        must_equal("the shorter side", sides, {f"{number:06d}": 256 for number in range(num)})
        yield Case(f"treat: {num:,} images, {size}", "images", num, ways, partial(remove_output, dest))
        shutil.rmtree(source)


PARTS: dict[str, Callable[[Path, float], Iterator[Case]]] = {
    "tar": bench_tar,
    "small": bench_small,
    "engine": bench_engine,
    "image": bench_image,
    "order": bench_order,
    "pack": bench_pack,
    "reshard": bench_reshard,
    "verify": bench_verify,
    "treat": bench_treat,
}


def main() -> None:
    """Print the tables of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all without")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} or more (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one round of so little that the figures say nothing")
    options = parser.parse_args()
    if options.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: {options.rounds}: fewer than {MIN_ROUNDS}")
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such part. Name some of {', '.join(PARTS)}.")
    warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files open
    torch.set_num_threads(1)
    for name in options.parts or PARTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for case in PARTS[name](Path(folder), QUICK if options.quick else 1.0):
                show(case, race(case, 1 if options.quick else options.rounds))


if __name__ == "__main__":
    main()
