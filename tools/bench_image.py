"""What an image costs: the decode and crop of wdskit against the bare chain, its own stages apart, and Pillow's.

    python tools/bench_image.py [--rounds N] [--num N] [--size WIDTHxHEIGHT@QUALITY ...]

CPU milliseconds an image in one thread (wall time depends on the neighbours), medians of interleaved rounds, and the
median of the ratios to the bare chain of the same round. The photographs are those of make_photos.py, in turns.

    bare        simplejpeg at the scale that covers the crop, torch's antialiased resize of boxes known before; nothing
                else: no draw, no sample, no other field
    bare float  the same, normalized into a batch
    fused       the stages decode, random_resized_crop, random_flip as wdskit runs them; with normalize; into a batch
    apart       the same stages one after the other (`fuse: false`)
    Pillow      draft, crop, resize, to an array; flipped as often; normalized by torch
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
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
from wdskit.pipeline.transform_specs import NormalizeSpec, RandomFlipSpec, RandomResizedCropSpec
from wdskit.pipeline.transforms import IMAGENET_MEAN, IMAGENET_STD

BATCH = 64
MIN_ROUNDS = 7
Work = Callable[[int], object]


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

    def works(self) -> dict[str, Work]:
        """The chains by name."""
        return {
            "bare": self.bare,
            "fused": self.stages(self.fused),
            "fused, into a batch": self.into_batch(self.fused, torch.uint8),
            "apart": self.stages(self.apart),
            "Pillow": self.pillow,
            "bare float": self.bare_float,
            "fused float": self.stages(self.fused_float),
            "fused float, into a batch": self.into_batch(self.fused_float, torch.float32),
            "apart float": self.stages(self.apart_float),
            "Pillow float": self.pillow_float,
        }

    def file(self, n: int) -> bytes:
        """The n-th file, round and round."""
        return self.files[n % len(self.files)]

    def sample(self, n: int) -> dict[str, Any]:
        """It, with a label."""
        return {"__key__": "a", "__url__": "a.tar", "jpg": self.file(n), "cls": b"7"}

    def bare(self, n: int) -> torch.Tensor:
        """Decode and resize."""
        return bare.decode_and_crop(self.file(n), self.boxes[n])

    def bare_float(self, n: int) -> None:
        """And normalize into a batch."""
        bare.write(self.batches[torch.float32][n % BATCH], self.bare(n))

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
        out = self.batches[torch.float32][n % BATCH].permute(1, 2, 0)
        geometry.fill(out, torch.from_numpy(self.pillow(n)), IMAGENET_MEAN, IMAGENET_STD)

    def stages(self, stage: Each) -> Work:
        """Samples through the stages."""
        return lambda n: stage.apply(self.sample(n), origin(n))

    def into_batch(self, stage: Each, dtype: torch.dtype) -> Work:
        """Samples through the one step, which writes into a batch."""
        step: Any = stage.steps[0].function
        return lambda n: step(self.sample(n), origin(n), self.batches[dtype][n % BATCH])

    def run(self, work: Work) -> float:
        """CPU milliseconds an image."""
        start = time.process_time()
        for n in range(self.num):
            work(n)
        return (time.process_time() - start) / self.num * 1000


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
        RandomResizedCropSpec(size=TARGET),
        RandomFlipSpec(),
        *([NormalizeSpec(preset="imagenet")] if floats else []),
    ]
    found = [stage for stage in compose(specs, place=Place(0, 1)).pipeline if isinstance(stage, Each)]
    return found[0]


def compare(bench: Bench, rounds: int) -> None:
    """Print a table of all chains, taken in turns."""
    works = bench.works()
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-1, rounds):  # round -1 warms up
        for name in works if number % 2 else reversed(works):
            took = bench.run(works[name])
            if number >= 0:
                times[name].append(took)
    for name, values in times.items():
        base = times["bare float" if "float" in name else "bare"]
        ratio = statistics.median(value / bare for value, bare in zip(values, base, strict=True))
        print(f"  {name:<26} {statistics.median(values):7.3f} {min(values):7.3f} {ratio:7.2f}")


def main() -> None:
    """Print a table for each size."""
    parser = argparse.ArgumentParser(description="CPU time of an image: decode, random resized crop, flip.")
    parser.add_argument("--rounds", type=int, default=11, help=f"passes of each chain, {MIN_ROUNDS} or more")
    parser.add_argument("--num", type=int, default=240, help="images in a pass")
    parser.add_argument("--size", nargs="+", default=["455x385@95", "1600x1200@90"], help="width x height @ quality")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds is {MIN_ROUNDS} or more")
    torch.set_num_threads(1)
    for size in args.size:
        width, height, quality = map(int, size.replace("@", "x").split("x"))
        bench = Bench(width, height, quality, args.num)
        mean_bytes = statistics.mean(map(len, bench.files))
        print(f"{width}x{height} q{quality}, {mean_bytes / 1000:.0f} kB -> {TARGET}")
        print(f"  {'chain':<26} {'ms':>7} {'least':>7} {'x bare':>7}")
        compare(bench, args.rounds)


if __name__ == "__main__":
    main()
