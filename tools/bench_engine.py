"""Where an image's time goes on its way through the engine: order, read, header and draws, pixels, stages, batch.

    python tools/bench_engine.py [FOLDER] [--float] [--rounds N] [--epochs N]

FOLDER holds indexed shards of JPEGs; without it, photographs of 455x385 are made and packed. Each part runs by itself
over the same jobs, in one thread; CPU microseconds an image, medians of interleaved rounds. The files come from the
page cache. `held` is what a part keeps Python's lock for, as far as that can be told: all of it but the system calls of
a read and the decoder's and the resize's own time. Threads of one process share that lock, so it bounds them: with 100
us of it, four threads that take 1,300 us an image ask for a third of it.

The second table is the loader, workers x threads, beside the bare loop with as many threads (`bare.py`): CPU
milliseconds an image of the whole tree of processes, images/s, ratios within each round, and how often an image's
threads waited (voluntary context switches).
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import itertools
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import simplejpeg
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bare
from bench_image import encode
from make_photos import load_photos
from outputs import must_equal

from wdskit import Pipeline, pack
from wdskit.pipeline import framing, geometry, scaling
from wdskit.pipeline.fused import FusedStep, names_image
from wdskit.pipeline.jobs import Job
from wdskit.pipeline.making import Making, find
from wdskit.pipeline.planned import PlannedPipeline
from wdskit.pipeline.run import Origin

BATCH = 64
WARM = 8
COMBINATIONS = ((0, 1), (0, 4), (1, 4), (2, 2), (4, 1))


class Kept:
    """Memory that is handed out again and again, as a ring's is."""

    def __init__(self) -> None:
        self._known: dict[Any, torch.Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool = False) -> torch.Tensor:
        """The tensor of this shape."""
        key = (tuple(shape), dtype, channels_last)
        if key not in self._known:
            layout = torch.channels_last if channels_last else torch.contiguous_format
            self._known[key] = torch.empty(tuple(shape), dtype=dtype, memory_format=layout)
        return self._known[key]


class Parts:
    """The way of an image in parts, each by itself."""

    def __init__(self, built: PlannedPipeline, num_batches: int) -> None:
        self.built, self.memory = built, Kept()
        step = built.each.first
        assert isinstance(step, FusedStep)
        self.step = step
        size = built.plan.epoch_samples
        self.jobs = [Job(0, range(at * BATCH, (at + 1) * BATCH), size) for at in range(min(num_batches, size // BATCH))]
        self.num = len(self.jobs) * BATCH
        self.read_samples = [self._read(job) for job in self.jobs]
        assert step.out_shape is not None
        self.rows = self.memory.empty((BATCH, *step.out_shape), step.out_ending.dtype, channels_last=True).split(1)

    def _read(self, job: Job) -> list[tuple[dict[str, Any], Origin]]:
        read = []
        for place, shard, sample in zip(*(column.tolist() for column in find(self.built, job)), strict=True):
            path, key, part, fields = self.built.shards.read(shard, sample, names_image)
            read.append(({"__key__": key, "__url__": path, **fields}, Origin(path, key, 0, place, part)))
        return read

    def order(self) -> None:
        """Which samples stand at the positions."""
        for job in self.jobs:
            find(self.built, job)

    def read(self) -> None:
        """Reads, headers of members, keys."""
        for job in self.jobs:
            self._read(job)

    def draws(self) -> None:
        """The image's header, the crop's draws, other fields."""
        for samples in self.read_samples:
            for sample, origin in samples:
                self.step.prepare(sample, origin)

    def pixels(self) -> None:
        """Draws and pixels."""
        for samples in self.read_samples:
            for (sample, origin), row in zip(samples, self.rows, strict=True):
                self.step.carry_out(self.step.prepare(sample, origin), row)

    def no_pixels(self) -> None:
        """Draws, and all of the pixels' way but decoding and resizing."""
        not_decoded = np.empty(0, np.uint8)  # anything but None: the pixels stand in the thread's own memory
        with (
            mock.patch.object(framing, "decode_jpeg", return_value=not_decoded),
            mock.patch.object(scaling, "_resize", return_value=None),
        ):
            self.pixels()

    def whole(self) -> None:
        """The batches, in this thread."""
        for job in self.jobs:
            self._make(job)

    def _make(self, job: Job) -> None:
        making = Making(self.built, job, self.memory)
        for chunk in range(making.prepare()):
            making.run(chunk)
        making.finish()

    def measured(self, rounds: int) -> dict[str, float]:
        """CPU microseconds an image of each part, medians."""
        works: list[Callable[[], None]] = [self.order, self.read, self.draws, self.pixels, self.no_pixels, self.whole]
        times: dict[str, list[float]] = {work.__name__: [] for work in works}
        for number in range(-1, rounds):  # round -1 warms up
            for work in works:
                begun = time.thread_time()
                work()
                if number >= 0:
                    times[work.__name__].append((time.thread_time() - begun) / self.num * 1e6)
        return {name: statistics.median(values) for name, values in times.items()}


def show_parts(found: dict[str, float], console: Console) -> None:
    """The first table."""
    pixels, rest = found["pixels"] - found["draws"], found["no_pixels"] - found["draws"]
    read = found["read"] - found["order"]
    lines = [
        ("order", found["order"], found["order"]),
        ("read, members' headers, keys", read, None),
        ("image's header, draws, other fields", found["draws"], found["draws"]),
        ("decode, resize, write", pixels, rest),
        ("stages behind, batch", found["whole"] - read - found["order"] - found["draws"] - pixels, None),
        ("whole, one thread", found["whole"], None),
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("an image, CPU us")
    for name in ("us", "share", "held"):
        table.add_column(name, justify="right")
    for title, value, held in lines:
        held_text = "" if held is None else f"{held:.0f}"
        table.add_row(title, f"{value:.0f}", f"{value / found['whole']:.0%}", held_text)
    console.print(table)


class Loops:
    """Whole loaders and bare loops over the same shards."""

    def __init__(self, folder: str, *, floats: bool) -> None:
        self.folder, self.floats = folder, floats
        self.files = [
            data
            for batch in Pipeline().exact(folder, seed=1).to_tuple("jpg").batched(BATCH).loader(workers=0)
            for data in batch[0]
        ]
        draws = np.random.default_rng(0)
        sizes = [simplejpeg.decode_jpeg_header(data)[:2] for data in self.files]
        self.boxes = [geometry.draw_crop(draws, height, width, (0.08, 1.0), (3 / 4, 4 / 3)) for height, width in sizes]
        self.batch = bare.new_batch(BATCH, torch.float32 if floats else torch.uint8)

    def bare(self, threads: int, num: int) -> None:
        """The bare loop in some threads."""

        def share(first: int) -> None:
            for at in range(first, num, threads):
                pixels = bare.decode_and_crop(self.files[at % len(self.files)], self.boxes[at % len(self.files)])
                bare.write(self.batch[at % BATCH], pixels)

        running = [threading.Thread(target=share, args=(first,)) for first in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    def loader(self, workers: int, threads: int) -> Any:
        """Ours."""
        return pipeline(self.folder, floats=self.floats).loader(workers=workers, threads=threads)

    def compare(self, rounds: int, epochs: int, console: Console) -> None:
        """The second table, of interleaved rounds."""
        loaders = {combination: self.loader(*combination) for combination in COMBINATIONS}
        first: dict[str, str] = {}
        for (workers, threads), loader in loaders.items():
            found = {f"batch {step}": digest_of(batch) for step, batch in enumerate(loader)}
            first = first or found
            must_equal(f"{workers} x {threads}", found, first)
        num = (epochs * len(loaders[0, 1])) * BATCH
        values: dict[tuple[int, int], list[tuple[float, ...]]] = {each: [] for each in COMBINATIONS}
        for _ in range(rounds):
            bases: dict[int, tuple[float, float, float]] = {}
            for (workers, threads), loader in loaders.items():
                parallel = max(workers, 1) * threads
                if parallel not in bases:
                    bases[parallel] = cost(functools.partial(self.bare, parallel, num), num)
                batches = itertools.chain.from_iterable(itertools.repeat(loader, epochs + -(-WARM // len(loader))))
                for _ in itertools.islice(batches, WARM):  # those that were made while nobody measured
                    pass
                measured = itertools.islice(batches, num // BATCH)
                last: collections.deque[tuple[int, Any]] = collections.deque(maxlen=1)
                ours = cost(functools.partial(last.extend, enumerate(measured, 1)), num)
                must_equal(f"{workers} x {threads}", {"batches": last[0][0]}, {"batches": num // BATCH})
                base = bases[parallel]
                values[workers, threads].append((*ours, ours[0] / base[0], ours[1] / base[1]))
        table = Table(box=None, pad_edge=False)
        for name in ("workers x threads", "CPU ms", "x bare", "images/s", "x bare", "waits"):
            table.add_column(name, justify="left" if name.startswith("w") and "x" in name else "right")
        for (workers, threads), rows in values.items():
            cpu, rate, waits, cpu_ratio, rate_ratio = map(statistics.median, zip(*rows, strict=True))
            waited = f"{waits:.1f}" if workers == 0 else ""  # those of other processes are not known
            texts = (f"{cpu:.2f}", f"{cpu_ratio:.2f}", f"{rate:,.0f}", f"{rate_ratio:.2f}", waited)
            table.add_row(f"{workers} x {threads}", *texts)
        console.print(table)


def digest_of(batch: tuple[torch.Tensor, torch.Tensor]) -> str:
    """sha256 of pixels and labels."""
    images, labels = batch
    whole = hashlib.sha256(images.permute(0, 2, 3, 1).contiguous().numpy().tobytes())
    whole.update(labels.numpy().tobytes())
    return whole.hexdigest()


def cost(work: Callable[[], object], num: int) -> tuple[float, float, float]:
    """CPU milliseconds an image of this process and its children, images/s, voluntary switches of this process."""
    cpu, wall, waits = tree_cpu_s(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    work()
    took = time.perf_counter() - wall
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
    return (tree_cpu_s() - cpu) / num * 1e3, num / took, switches / num


def tree_cpu_s() -> float:
    """CPU seconds of this process and of its living children."""
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def pipeline(folder: str, *, floats: bool) -> Pipeline:
    """What is measured."""
    images = Pipeline().exact(folder, seed=1).decode("rgb8").random_resized_crop(bare.TARGET)
    return (images.normalize("imagenet") if floats else images).to_tuple("jpg", "cls").batched(BATCH)


def make_shards(folder: Path, num: int) -> None:
    """Photographs of 455x385 at quality 95, in turns, packed."""
    files = [encode(photo.resize((455, 385)), 95) for photo in load_photos().values()]
    rows = [{"__key__": f"n{n:06d}", "jpg": files[n % len(files)], "cls": n % len(files)} for n in range(num)]
    pack(rows, folder, max_samples=512)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of indexed shards of JPEGs with cls; made where it is not given")
    parser.add_argument("--float", action="store_true", dest="floats", help="normalized batches, not uint8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="of each loader in a round")
    parser.add_argument("--num", type=int, default=1536, help="photographs to make")
    options = parser.parse_args()
    if options.rounds < 1 or options.epochs < 1 or options.num < BATCH:
        parser.error(f"--rounds and --epochs are 1 or more, --num {BATCH} or more")
    torch.set_num_threads(1)
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or str(Path(name) / "photos")
        if not options.folder:
            make_shards(Path(folder), options.num)
        built = pipeline(folder, floats=options.floats).build(rank=0, world_size=1)
        assert isinstance(built, PlannedPipeline)
        show_parts(Parts(built, 8).measured(options.rounds), console)
        Loops(folder, floats=options.floats).compare(options.rounds, options.epochs, console)


if __name__ == "__main__":
    main()
