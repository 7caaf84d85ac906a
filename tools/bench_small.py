"""Where a small sample's time goes: order, reads, headers, values; beside webdataset, in one interleaved run.

Figures are CPU microseconds a sample of this process, medians over rounds. Files come from the page cache.

    python tools/bench_small.py --bytes 3000
    python tools/bench_small.py --bytes 2048 --json --rounds 15
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

sys.path.insert(0, str(Path(__file__).resolve().parent))
from outputs import must_equal

from wdskit import Pipeline
from wdskit.dataset.columns import parse_samples
from wdskit.dataset.shard import LocalShard
from wdskit.limits import BLOCK_BYTES
from wdskit.pipeline.planned import PlannedPipeline
from wdskit.shards.index import index_folder
from wdskit.tar.writer import TarWriter

BATCH = 256


def write_shards(folder: Path, *, shards: int, samples: int, num_bytes: int, with_json: bool) -> None:
    """Indexed shards of `samples` each: `bin` of about `num_bytes`, and a `json` of some 150 bytes."""
    draws = random.Random(1)
    for shard in range(shards):
        with (folder / f"s-{shard:04d}.tar").open("wb") as file:
            writer = TarWriter(file.write)
            for number in range(shard * samples, (shard + 1) * samples):
                spread = num_bytes // 8
                writer.add(f"n{number:08d}.bin", draws.randbytes(num_bytes + draws.randint(-spread, spread)))
                if with_json:
                    told = {"id": number, "label": number % 1000, "caption": f"photo {number}", "tags": ["a", "b"]}
                    writer.add(f"n{number:08d}.json", json.dumps({**told, "score": number / 7}).encode())
            writer.finish()
    index_folder(folder, workers=1)


def pipeline(folder: Path, *, decode: bool) -> PlannedPipeline:
    """The planned pipeline that is measured."""
    pipe = Pipeline().exact(str(folder), seed=1)
    built = (pipe.decode() if decode else pipe).batched(BATCH).build(rank=0, world_size=1)
    assert isinstance(built, PlannedPipeline)
    return built


def by_webdataset(folder: Path, *, decode: bool) -> Iterator[Any]:
    """Its plain pipeline of a fifth of the same shards, without a shuffle."""
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    urls = urls[: max(1, len(urls) // 5)]
    decoding = [webdataset.decode()] if decode else []
    batched = webdataset.batched(BATCH, collation_fn=None)
    return iter(
        webdataset.DataPipeline(webdataset.SimpleShardList(urls), webdataset.tarfile_to_samples(), *decoding, batched)
    )


def cpu_us(run: Callable[[], int]) -> float:
    """CPU microseconds a sample of what returns how many it made."""
    gc.collect()
    begun = time.process_time()
    num_samples = run()
    return (time.process_time() - begun) / num_samples * 1e6


class Parts:
    """The way of a sample in parts, each by itself on the same batches.

    Attributes:
        whole: All of it, as the pipeline runs it.
    """

    def __init__(self, folder: Path, *, decode: bool, num_batches: int) -> None:
        self.built = pipeline(folder, decode=decode)
        self.num_samples = num_batches * BATCH
        self.jobs = [np.arange(start, start + BATCH) for start in range(0, self.num_samples, BATCH)]
        self.found: list[Any] = [(job, *self.built.plan.order.take(job)) for job in self.jobs]
        table = self.built.shards.tables[0]
        files = [LocalShard(table.path(shard)) for shard in range(len(table))]
        self.reads = [self._reads(files, shards.tolist(), samples.tolist()) for _, shards, samples in self.found]
        self.files = files  # which close when nobody holds them
        self.raw = [
            ([os.pread(*read) for read in reads], [size - BLOCK_BYTES for _, size, _ in reads]) for reads in self.reads
        ]

    @staticmethod
    def _reads(files: list[LocalShard], shards: list[int], samples: list[int]) -> list[tuple[int, int, int]]:
        """Arguments of `os.pread`, with the header behind each sample."""
        reads = []
        for shard, sample in zip(shards, samples, strict=True):
            start, stop = files[shard].offsets[sample], files[shard].offsets[sample + 1]
            reads.append((files[shard].file.fd, stop - start + BLOCK_BYTES, start))
        return reads

    def order(self) -> int:
        """Which samples stand at the positions."""
        for job in self.jobs:
            self.built.plan.order.take(job)
        return self.num_samples

    def pread(self) -> int:
        """Nothing but the system calls, and the memory that they fill."""
        for reads in self.reads:
            _ = [os.pread(*read) for read in reads]
        return self.num_samples

    def parse(self) -> int:
        """Headers and keys."""
        for data, sizes in self.raw:
            parse_samples(data, [0] * len(data), sizes)
        return self.num_samples

    def read_many(self) -> int:
        """Reading and parsing, as the pipeline does it."""
        for _, shards, samples in self.found:
            self.built.shards.read_many(shards, samples, viewed=str.isspace)
        return self.num_samples

    def make(self) -> int:
        """Reading, parsing, decoding, the batch."""
        assert self.built.columns is not None
        for places, shards, samples in self.found:
            read = self.built.columns.read(shards, samples)
            assert read is not None
            assert self.built.columns.make(places, shards, read) is not None
        return self.num_samples

    def whole(self) -> int:
        """All of it."""
        return BATCH * sum(1 for _ in itertools.islice(self.built, len(self.jobs)))


def check(folder: Path, *, decode: bool, num_samples: int) -> None:
    """What webdataset reads is what an epoch gives, and nothing comes twice."""
    names = ["bin", "json"] if decode else ["bin"]

    def rows(batches: Iterable[Any]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for batch in batches:
            for key, *values in zip(batch["__key__"], *(batch[name] for name in names), strict=True):
                if key in found:
                    raise SystemExit(f"{key} comes twice. No figure is printed.")
                found[key] = [bytes(values[0]), *values[1:]]
        return found

    theirs = rows(
        {name: [sample[name] for sample in batch] for name in ("__key__", *names)}
        for batch in by_webdataset(folder, decode=decode)
    )
    ours = rows(pipeline(folder, decode=decode))
    both = ours.keys() & theirs.keys()
    must_equal("wdskit", {key: ours[key] for key in both}, {key: theirs[key] for key in both})
    must_equal(
        "wdskit", {"samples": len(ours), "some in both": bool(both)}, {"samples": num_samples, "some in both": True}
    )


def compare(folder: Path, *, decode: bool, rounds: int, num_batches: int) -> dict[str, float]:
    """Medians of all parts and of webdataset; every round measures each once."""
    check(folder, decode=decode, num_samples=num_batches * BATCH)
    parts = Parts(folder, decode=decode, num_batches=num_batches)

    def other() -> int:
        return sum(map(len, by_webdataset(folder, decode=decode)))

    measured = {
        "order": parts.order,
        "pread": parts.pread,
        "parse": parts.parse,
        "read_many": parts.read_many,
        "make": parts.make,
        "whole": parts.whole,
        "webdataset": other,
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for number in range(-1, rounds):  # round -1 warms up
        for name, run in measured.items():
            took = cpu_us(run)
            if number >= 0:
                times[name].append(took)
    return {name: statistics.median(column) for name, column in times.items()}


def main() -> None:
    """Write shards, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=3000, help="of a sample's `bin`")
    parser.add_argument("--json", action="store_true", help="add a `json` to each sample, and decode it")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2000, help="of a shard")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    num_batches = options.shards * options.samples // BATCH
    if num_batches < 1 or options.rounds < 1:
        parser.error(f"--shards and --samples make {BATCH} samples or more, --rounds is 1 or more")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(
            folder, shards=options.shards, samples=options.samples, num_bytes=options.bytes, with_json=options.json
        )
        found = compare(folder, decode=options.json, rounds=options.rounds, num_batches=num_batches)
    what = f"{options.bytes:,} bytes" + (" and json, decoded" if options.json else "")
    print(f"CPU microseconds a sample of {what}, batches of {BATCH}, one process; samples a second")
    for name, value in found.items():
        print(f"{name:>12} {value:8.2f} {1e6 / value:12,.0f}")
    print(f"{'ratio':>12} {found['webdataset'] / found['whole']:8.1f}   times webdataset")


if __name__ == "__main__":
    main()
