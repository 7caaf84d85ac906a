"""Run damaged JPEGs and damaged shards through the code in C and through the code in Python, which must agree.

    python tools/dev/fuzz_native.py [--images N] [--shards N] [--seed S] [--sanitize]

If the native code returns pixels or samples, the code in Python must return the same. If it returns nothing, the code
in Python decides and there is nothing to compare. `--sanitize` builds the module with ASan and UBSan; a finding ends
the run. The program prints how many inputs were decoded natively, refused by both, or left to Python.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wdskit.codecs.images import decode_image
from wdskit.codecs.structure import colour_jpeg_header
from wdskit.dataset.shard import IndexedShard
from wdskit.engine.reader import ColumnarSamples, read_natively
from wdskit.errors import DecodeError, ShardError, StorageError
from wdskit.native import native
from wdskit.stages.images import geometry
from wdskit.stages.images.fused import Axis, JpegPlan
from wdskit.storage.urls import LocalFile
from wdskit.tar.writer import TarWriter

sys.path.append(str(Path(__file__).parents[1]))
from make_photos import load_photos

SOURCE = Path(__file__).resolve().parents[2] / "native"
FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
MAX_PIXELS = 1 << 22
OUT = (24, 20)
Chance = np.random.Generator


def jpegs() -> list[bytes]:
    """Return small files: all subsamplings, grey, progressive, restart marks, an Adobe marker, a long comment."""
    photos = list(load_photos().values())
    kinds: list[dict[str, Any]] = [{"subsampling": each} for each in (0, 1, 2)]
    kinds += [
        {"progressive": True},
        {"restart_marker_blocks": 3},
        {"quality": 30},
        {"optimize": True},
        {"comment": b"x" * 99},
    ]
    found = []
    for number, kind in enumerate(kinds):
        for mode, size in (("RGB", (61, 45)), ("L", (40, 64)), ("RGB", (96, 120)), ("CMYK", (33, 17))):
            stream = io.BytesIO()
            photo = photos[number % len(photos)].resize(size).convert(mode)
            photo.save(stream, "JPEG", **kind)
            found.append(stream.getvalue())
    return found


def damaged(data: bytes, chance: Chance) -> bytes:
    """Return `data` with up to three changes: bytes changed, cut, repeated or removed."""
    changed = bytearray(data)
    for _ in range(int(chance.integers(0, 4))):
        at, what = int(chance.integers(0, len(changed))), chance.integers(0, 7)
        if what < 3:
            changed[at] ^= 1 << int(chance.integers(0, 8))
        elif what == 3:
            changed[at] = int(chance.choice([0x00, 0xFF, 0xD9, 0xD0, 0xC2, 0x30]))
        elif what == 4 and chance.random() < 0.3:
            del changed[max(at, 1) :]
        elif what == 5:
            del changed[at : at + int(chance.integers(1, 9))]
        else:
            changed[at:at] = changed[at // 2 : at // 2 + int(chance.integers(1, 9))]
        if not changed:
            return b"\xff"
    return bytes(changed)


def random_axis(chance: Chance, side: int, size: int) -> Axis:
    """Return a random part of a side, of which all or only the middle is kept."""
    low = int(chance.integers(0, side))
    high = int(chance.integers(low + 1, side + 1))
    skip = int(chance.integers(0, 9)) * int(chance.integers(0, 2))
    return Axis(low, high, size + 2 * skip, skip, size)


def random_plan(size: tuple[int, int], seed: int, *, flip: bool) -> JpegPlan:
    """Return the plan of a random part of an image of `size`."""
    chance = np.random.default_rng([seed, *size])
    rows, columns = (random_axis(chance, side, out) for side, out in zip(size, OUT, strict=True))
    return JpegPlan(size, rows, columns, flip)


def make_in_python(whole: NDArray[np.uint8], plan: JpegPlan) -> NDArray[np.uint8]:
    """Return the result of a plan for a whole image."""
    rows, columns = plan.rows, plan.columns
    part = geometry.crop(whole, rows.low, columns.low, rows.high - rows.low, columns.high - columns.low)
    resized: Any = geometry.resize(part, (rows.total, columns.total))
    wanted = resized[rows.skip : rows.skip + rows.size, columns.skip : columns.skip + columns.size]
    pixels: NDArray[np.uint8] = wanted[:, ::-1] if plan.flip else wanted
    return pixels


def check_images(num: int, chance: Chance) -> Counter[str]:
    """Compare the pixels of damaged JPEGs; count the outcomes. Raises SystemExit at the first difference."""
    module, files, counts = native(), jpegs(), Counter[str]()
    board = memoryview(bytearray(24)).cast("q")
    for number in range(num):
        data = damaged(files[number % len(files)], chance)
        draws, flip = int(chance.integers(0, 1 << 62)), bool(chance.integers(0, 2))
        ours = np.zeros((1, *OUT, 3), np.uint8)
        verdict, plan = 1, None
        try:
            header = colour_jpeg_header(data, max_pixels=MAX_PIXELS)
            if header is not None:
                plan = random_plan((header.height, header.width), draws, flip=flip)
                plans = np.array([plan.numbers(number, 0)], np.int64)
                [verdict] = module.decode_jpegs([data], plans, ours, *OUT, None, board)
                assert board[1] == number
            whole: Any = decode_image(data, "rgb8", max_pixels=MAX_PIXELS)
        except DecodeError as err:
            if verdict == 0:
                raise SystemExit(f"image {number}: native gives pixels, Python fails: {err}\n{data.hex()}") from err
            counts["refused by both"] += 1
            continue
        counts["left to Python" if verdict else "native"] += 1
        if verdict or plan is None or min((axis.high - axis.low) / axis.total for axis in plan[1:3]) >= 2:
            continue  # there are no native pixels, or of a smaller scale
        theirs = make_in_python(whole, plan)
        if not np.array_equal(ours[0], theirs):
            raise SystemExit(
                f"image {number}: pixels differ by {np.abs(ours[0].astype(int) - theirs).max()} levels\n{data.hex()}"
            )
    return counts


def shards(chance: Chance) -> list[tuple[bytes, list[int], list[int]]]:
    """Return small shards with the offsets of their samples and headers; some samples have large fields."""
    found = []
    for number in range(18):
        stream = io.BytesIO()
        writer, offsets, headers = TarWriter(stream.write), list[int](), list[int]()
        for sample in range(5):
            offsets.append(writer.offset)
            for field in ("cls", "Bin", "a.b")[: 1 + number % 3]:
                size = int(chance.choice([0, 1, 511, 512, 513, 700]))
                if number >= 15 or (number >= 12 and field == "Bin"):
                    size += 40_000
                headers.append(writer.offset)
                writer.add(f"{'d/' * (number % 2)}k{sample:03d}.{field}", chance.bytes(size))
        offsets.append(writer.offset)
        writer.finish()
        found.append((stream.getvalue(), offsets, headers))
    return found


def as_rows(many: ColumnarSamples) -> list[tuple[Any, ...]]:
    """Return key and (name, data) of each field, in order, for each sample."""
    columns = [[(name, data) for data in raw] for name, raw in many.fields.items()]
    return list(zip(many.keys, *columns, strict=True))


def check_shards(num: int, chance: Chance) -> Counter[str]:
    """Compare the samples of damaged shards, and of intact shards with wrong offsets; count the outcomes.

    Raises:
        SystemExit: The samples differ.
    """
    counts, kinds = Counter[str](), shards(chance)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        for number in range(num):
            data, offsets, headers = kinds[number % len(kinds)]
            if chance.random() < 0.1:
                offsets = sorted(
                    {*offsets[:: int(chance.integers(1, 3))], int(chance.integers(0, len(data) // 512)) * 512}
                )
            changed = bytearray(data)
            for _ in range(int(chance.integers(0, 4))):
                block = int(chance.choice(headers)) if chance.random() < 0.5 else int(chance.integers(0, 24)) * 512
                at = block + int(chance.choice([0, 3, 5, 99, 124, 130, 148, 156, 257, 263, 345, 500]))
                if at < len(changed):
                    changed[at] = int(chance.choice([0, 32, 46, 47, 48, 53, 55, 75, 107, 128, 255]))
            if chance.random() < 0.05:
                del changed[int(chance.integers(0, len(changed))) :]
            path.write_bytes(changed)
            trusted = bool(chance.integers(0, 2))
            pair = [
                IndexedShard("a.tar", LocalFile(str(path)), np.array(offsets), is_trusted=trusted) for _ in range(2)
            ]
            wanted = np.sort(chance.integers(0, len(offsets) - 1, int(chance.integers(1, 6))))
            found = read_natively([pair[0]], np.zeros_like(wanted), wanted)
            if found is None:
                counts["left to Python"] += 1
            else:
                try:
                    alone = map(pair[1].read, wanted.tolist())
                    known = [(key, *((name, bytes(view)) for name, view in fields.items())) for key, fields in alone]
                except (ShardError, StorageError) as err:
                    raise SystemExit(f"shard {number}: native gives samples, Python fails: {err}") from err
                if as_rows(found) != known:
                    raise SystemExit(f"shard {number}: {as_rows(found)}, Python: {known}")
                counts["native"] += 1
            for each in pair:
                each.close()
    return counts


def run_sanitized(arguments: list[str]) -> int:
    """Build the module with sanitizers and run this program again with it. Returns the exit status."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory() as folder:
        include = sysconfig.get_path("include")
        sources = sorted(map(str, SOURCE.glob("*.c")))
        output = str(Path(folder, "_native.so"))
        subprocess.run(
            [
                compiler,
                *FLAGS,
                "-shared",
                "-fPIC",
                "-ffp-contract=off",
                f"-I{include}",
                *sources,
                "-ljpeg",
                "-o",
                output,
            ],
            check=True,
        )
        libraries = [
            subprocess.run(
                [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        environment = os.environ | {
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        }
        command = [sys.executable, __file__, *arguments, "--module", output]
        return subprocess.run(command, check=False, env=environment).returncode


def load_module(path: str) -> None:
    """Let `native` use the build of the extension at `path`."""
    spec = importlib.util.spec_from_file_location("wdskit._native", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["wdskit._native"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main() -> None:
    """Fuzz images and shards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=20_000, help="damaged JPEGs")
    parser.add_argument("--shards", type=int, default=20_000, help="damaged shards")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitize", action="store_true", help="build the module with ASan and UBSan")
    parser.add_argument("--module", help="file of another build of the extension")
    options = parser.parse_args()
    if options.module:
        load_module(options.module)
    if options.sanitize:
        sys.exit(run_sanitized([each for each in sys.argv[1:] if each != "--sanitize"]))
    if native() is None:
        sys.exit("wdskit._native is not built: python setup.py build_ext --inplace")
    torch.set_num_threads(1)
    print(f"{native().__file__}, seed {options.seed}")
    print(f"{options.images:,} images:", dict(check_images(options.images, np.random.default_rng([options.seed, 1]))))
    print(f"{options.shards:,} shards:", dict(check_shards(options.shards, np.random.default_rng([options.seed, 2]))))


if __name__ == "__main__":
    main()
