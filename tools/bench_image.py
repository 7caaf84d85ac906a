"""What an image costs: the decode and crop of wdskit against the bare chain, its own stages apart, and Pillow's.

    python tools/bench_image.py [--rounds N] [--num N] [--threads N] [--size WIDTHxHEIGHT@QUALITY ...]

CPU milliseconds an image in one thread (wall time depends on the neighbours), medians of interleaved rounds, and the
median of the ratios to the bare chain of the same round. The photographs are those of make_photos.py, in turns;
samples, positions and slots of the batch exist before. The second table is of several threads in one process, with
images/s and their ratio to as many threads of the bare chain: what holds the interpreter's lock shows there.

    bare        simplejpeg at the scale that covers the crop, torch's antialiased resize of boxes known before; nothing
                else: no draw, no sample, no other field
    bare float  the same, normalized into a batch
    fused       the stages decode, random_resized_crop, random_flip as wdskit runs them; with normalize; into a batch;
                and so that of eight samples all are prepared before the first one's pixels are decoded
    apart       the same stages one after the other (`fuse: false`)
    Pillow      temp, crop, resize, to an array; flipped as often; normalized by torch
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bare
from bare import TARGET
from make_photos import load_photos

from wdskit.pipeline import geometry
from wdskit.pipeline.compose import compose
from wdskit.pipeline.each import Each
from wdskit.pipeline.field_specs import DecodeSpec
from wdskit.pipeline.run import Origin, Place
from wdskit.pipeline.specs import StreamSpec
from wdskit.pipeline.transforms import IMAGENET_MEAN, IMAGENET_STD, Normalize, RandomFlip, RandomResizedCrop

BATCH = 64
MIN_ROUNDS = 7
Work = Callable[[range], object]
CHUNK = 8
Pixels = np.ndarray[Any, Any]
MAX_LEVELS = 6.0
"""Of 255, in the mean: decoding at a smaller scale and the means of resizing differ by one to three."""


class Bench:
    """The files of one size, the boxes that each chain cuts out of them, and the chains."""

    def __init__(self, width: int, height: int, quality: int, num: int) -> None:
        self.files = [encode(photo.resize((width, height)), quality) for photo in load_photos().values()]
        self.num = num
        self.batches = {dtype: bare.new_batch(BATCH, dtype) for dtype in (torch.uint8, torch.float32)}
        self.fused, self.fused_float = each(fuse=True), each(fuse=True, floats=True)
        self.apart, self.apart_float = each(fuse=False), each(fuse=False, floats=True)
        draws = self.fused.steps[0].function.transforms["random_resized_crop"]  # type: ignore[attr-defined]
        self.boxes = [
            geometry.draw_crop(draws.rng_at(origin(n)), height, width, (0.08, 1.0), (3 / 4, 4 / 3)) for n in range(num)
        ]
        self.samples = [{"__key__": "a", "__url__": "a.tar", "jpg": self.file(n), "cls": b"7"} for n in range(num)]
        self.origins = [origin(n) for n in range(num)]
        rows = {dtype: batch.split(1) for dtype, batch in self.batches.items()}
        self.slots = {dtype: [each[n % BATCH] for n in range(num)] for dtype, each in rows.items()}

    def works(self) -> dict[str, Work]:
        """The chains by name."""
        return {
            "bare": one_by_one(self.bare),
            "fused": self.stages(self.fused),
            "fused, into a batch": self.into_batch(self.fused, torch.uint8),
            "fused, by eights": self.by_eights(self.fused, torch.uint8),
            "apart": self.stages(self.apart),
            "Pillow": one_by_one(self.pillow),
            "bare float": one_by_one(self.bare_float),
            "fused float": self.stages(self.fused_float),
            "fused float, into a batch": self.into_batch(self.fused_float, torch.float32),
            "fused float, by eights": self.by_eights(self.fused_float, torch.float32),
            "apart float": self.stages(self.apart_float),
            "Pillow float": one_by_one(self.pillow_float),
        }

    def check(self) -> None:
        """The stages give the same pixels in each way, and those of the bare chain and of Pillow but for rounding."""
        whole = [self.fused.apply(self.samples[n], self.origins[n])["jpg"] for n in range(self.num)]
        for name in ("fused, into a batch", "fused, by eights"):
            for batch in self.slots[torch.uint8]:
                batch.zero_()
            self.works()[name](range(min(self.num, BATCH)))
            for n, expected in enumerate(whole[:BATCH]):
                if not np.array_equal(self.slots[torch.uint8][n][0].permute(1, 2, 0).numpy(), expected):
                    raise SystemExit(f"{name}: image {n} has other pixels. No figure is printed.")
        for name, pixels in (("apart", self.apart_pixels), ("bare", self.bare_pixels), ("Pillow", self.pillow)):
            away = [levels_apart(whole[n], pixels(n)) for n in range(self.num)]
            if statistics.mean(away) > MAX_LEVELS:
                raise SystemExit(f"{name}: {statistics.mean(away):.1f} levels away in the mean. No figure is printed.")

    def apart_pixels(self, n: int) -> Pixels:
        """What the stages give one after the other."""
        pixels: Pixels = self.apart.apply(self.samples[n], self.origins[n])["jpg"]
        return pixels

    def bare_pixels(self, n: int) -> Pixels:
        """What the bare chain gives, (height, width, 3)."""
        return self.bare(n).permute(1, 2, 0).numpy()

    def file(self, n: int) -> bytes:
        """The n-th file, round and round."""
        return self.files[n % len(self.files)]

    def bare(self, n: int) -> torch.Tensor:
        """Decode and resize."""
        return bare.decode_and_crop(self.file(n), self.boxes[n])

    def bare_float(self, n: int) -> None:
        """And normalize into a batch."""
        bare.write(self.slots[torch.float32][n][0], self.bare(n))

    def pillow(self, n: int) -> np.ndarray[Any, Any]:
        """The common recipe with Pillow's own means."""
        top, left, height, width = self.boxes[n]
        image: Image.Image = Image.open(io.BytesIO(self.file(n)))
        full_width = image.width
        image.draft("RGB", (TARGET * image.width // width, TARGET * image.height // height))
        scale = image.width / full_width
        box = (left * scale, top * scale, (left + width) * scale, (top + height) * scale)
        image = image.convert("RGB").resize((TARGET, TARGET), Image.Resampling.BILINEAR, box=box)
        if n % 2:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(image)

    def pillow_float(self, n: int) -> None:
        """And normalize into a batch."""
        out = self.slots[torch.float32][n][0].permute(1, 2, 0)
        geometry.fill(out, torch.from_numpy(self.pillow(n)), IMAGENET_MEAN, IMAGENET_STD)

    def stages(self, stage: Each) -> Work:
        """Samples through the stages."""
        return one_by_one(lambda n: stage.apply(self.samples[n], self.origins[n]))

    def into_batch(self, stage: Each, dtype: torch.dtype) -> Work:
        """Samples through the one step, which writes into a batch."""
        step: Any = stage.steps[0].function
        slots = self.slots[dtype]
        return one_by_one(lambda n: step(self.samples[n], self.origins[n], slots[n]))

    def by_eights(self, stage: Each, dtype: torch.dtype) -> Work:
        """The same, all prepared before the first one's pixels are decoded."""
        step: Any = stage.steps[0].function
        slots = self.slots[dtype]

        def work(numbers: range) -> None:
            prepared = [step.prepare(self.samples[n], self.origins[n]) for n in numbers]
            for n, one in zip(numbers, prepared, strict=True):
                step.carry_out(one, slots[n])

        return work

    def run(self, work: Work, num_threads: int = 1) -> tuple[float, float]:
        """CPU and wall milliseconds an image."""
        chunks = [range(first, min(first + CHUNK, self.num)) for first in range(0, self.num, CHUNK)]

        def run_share(number: int) -> None:
            for numbers in chunks[number::num_threads]:
                work(numbers)

        threads = [threading.Thread(target=run_share, args=(number,)) for number in range(1, num_threads)]
        start, start_wall = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        run_share(0)
        for thread in threads:
            thread.join()
        took = (time.process_time() - start, time.perf_counter() - start_wall)
        return took[0] / self.num * 1000, took[1] / self.num * 1000


def levels_apart(first: Pixels, second: Pixels) -> float:
    """Mean difference of two images, of which one may be flipped."""
    pairs = (np.abs(first.astype(int) - other).mean() for other in (second, second[:, ::-1]))
    return float(min(pairs))


def one_by_one(work: Callable[[int], object]) -> Work:
    """Each by itself."""

    def run(numbers: range) -> None:
        for n in numbers:
            work(n)

    return run


def encode(photo: Image.Image, quality: int) -> bytes:
    """A photograph as JPEG."""
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def origin(n: int) -> Origin:
    """The n-th position."""
    return Origin("a.tar", "a", 0, n, 0)


def each(*, fuse: bool, floats: bool = False) -> Each:
    """The stages as a pipeline runs them."""
    specs = [
        StreamSpec(shards=__file__, seed=7),
        DecodeSpec(images="rgb8", fuse=fuse),
        RandomResizedCrop(size=TARGET),
        RandomFlip(),
        *([Normalize(preset="imagenet")] if floats else []),
    ]
    found = [stage for stage in compose(specs, place=Place(0, 1)).pipeline if isinstance(stage, Each)]
    return found[0]


def compare(bench: Bench, works: dict[str, Work], rounds: int, num_threads: int = 1) -> None:
    """Print a table of these chains, taken in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(-1, rounds):  # round -1 warms up
        for name in works if number % 2 else reversed(works):
            took = bench.run(works[name], num_threads)
            if number >= 0:
                times[name].append(took)
    for name, values in times.items():
        base = times["bare float" if "float" in name else "bare"]
        pairs = list(zip(values, base, strict=True))
        ratio = statistics.median(cpu / bare for (cpu, _), (bare, _) in pairs)
        line = f"  {name:<26} {statistics.median(cpu for cpu, _ in values):7.3f} {min(values)[0]:7.3f} {ratio:7.3f}"
        if num_threads > 1:
            rate = statistics.median(1000 / wall for _, wall in values)
            line += f" {rate:9.0f} {statistics.median(bare / wall for (_, wall), (_, bare) in pairs):7.3f}"
        print(line)


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description="CPU time of an image: decode, random resized crop, flip.")
    parser.add_argument("--rounds", type=int, default=11, help=f"passes of each chain, {MIN_ROUNDS} or more")
    parser.add_argument("--num", type=int, default=240, help="images in a pass")
    parser.add_argument("--threads", type=int, default=4, help="of the second table; 1 leaves it out")
    parser.add_argument("--size", nargs="+", default=["455x385@95", "1600x1200@90"], help="width x height @ quality")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds is {MIN_ROUNDS} or more")
    torch.set_num_threads(1)
    for size in args.size:
        width, height, quality = map(int, size.replace("@", "x").split("x"))
        bench = Bench(width, height, quality, args.num)
        bench.check()
        mean_bytes = statistics.mean(map(len, bench.files))
        print(f"{width}x{height} q{quality}, {mean_bytes / 1000:.0f} kB -> {TARGET}")
        print(f"  {'chain':<26} {'ms':>7} {'least':>7} {'x bare':>7}")
        works = bench.works()
        compare(bench, works, args.rounds)
        if args.threads > 1:
            print(
                f"  {f'{args.threads} threads':<26} {'ms':>7} {'least':>7} {'x bare':>7} {'images/s':>9} {'x bare':>7}"
            )
            some = {name: work for name, work in works.items() if name.startswith("bare") or ", " in name}
            compare(bench, some, args.rounds, args.threads)


if __name__ == "__main__":
    main()
