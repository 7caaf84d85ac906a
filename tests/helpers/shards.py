"""Small shards for tests, and functions that tests send to worker processes by reference, which needs a module."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wdskit import Pipeline
from wdskit.dataset.columns import Columns
from wdskit.dataset.index import read_index
from wdskit.shards.index import index_folder
from wdskit.tar.writer import TarWriter


def write_members(path: Path, members: dict[str, bytes]) -> Path:
    """Write a shard of `{name: bytes}`; return its path."""
    with path.open("wb") as file:
        writer = TarWriter(file.write)
        for name, data in members.items():
            writer.add(name, data)
        writer.finish()
    return path


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """Write a shard of `{key: {field: bytes}}`; return its path."""
    with path.open("wb") as file:
        writer = TarWriter(file.write)
        for key, fields in samples.items():
            for field, data in fields.items():
                writer.add(f"{key}.{field}", data)
        writer.finish()
    return path


def write_indexed(folder: Path, samples: dict[str, dict[str, bytes]]) -> str:
    """Write a folder of one shard and its index; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "s.tar", samples)
    index_folder(folder, workers=1)
    return str(folder)


def index_numbers(folder: Path, counts: list[int]) -> str:
    """Write shards with `write_numbers` and their index; return the folder."""
    write_numbers(folder, counts)
    index_folder(folder, workers=1)
    return str(folder)


def write_numbers(folder: Path, counts: list[int]) -> str:
    """Write shards of `counts` samples, numbered over all shards: key `n%06d`, field `cls`. Returns their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, count in enumerate(counts):
        samples = {f"n{number + at:06d}": {"cls": b"%d" % (number + at)} for at in range(count)}
        write_shard(folder / f"s-{shard:03d}.tar", samples)
        number += count
    return str(folder / "s-*.tar")


def key_of(sample):
    return sample["__key__"]


def number_of(sample):
    return int(sample["cls"])


def even(sample):
    return int(sample["cls"]) % 2 == 0


def nothing(sample):
    return False


def draw(sample, rng):
    return int(sample["cls"]), int(rng.integers(1 << 40))


def fail_on_7(sample):
    if int(sample["cls"]) == 7:
        raise ValueError("seven")
    return sample


def listed(pattern: str, **options: Any) -> Pipeline:
    """Return a pipeline of shards in their listed order, with both splitters."""
    return Pipeline().stream(pattern, shuffle_shards=False, **options).split_by_node().split_by_worker()


class Picture(NamedTuple):
    """One sample that `write_pictures` wrote."""

    url: str
    key: str
    field: str  # "jpg" for even numbers, "png" for odd ones
    pixels: NDArray[np.uint8]  # (12, 16, 3)
    number: int


def write_pictures(folder: Path, counts: list[int]) -> list[Picture]:
    """Write shards `p-*.tar` of `counts` samples: a lossless image, `cls` 0..4, `json` {"number": n} and `txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    for shard, count in enumerate(counts):
        url = folder / f"p-{shard:03d}.tar"
        samples = {}
        for number in range(len(pictures), len(pictures) + count):
            pixels = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
            field = "png" if number % 2 else "jpg"
            pictures.append(Picture(str(url), f"k{number:03d}", field, pixels, number))
            samples[f"k{number:03d}"] = {
                field: png_of(pixels),
                "cls": b"%d" % (number % 5),
                "json": b'{"number": %d}' % number,
                "txt": f"text {number}".encode(),
            }
        write_shard(url, samples)
    return pictures


def npy(array: Any) -> bytes:
    """Return an array as numpy writes it."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return the pixels as a lossless PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def selected(folder: str | Path, name: str) -> list[list[int]]:
    """Return the numbers of a split's samples in each shard of an indexed folder."""
    index = read_index(folder)
    edges = np.cumsum(index.counts)[:-1].astype(np.int64)
    return [np.flatnonzero(part).tolist() for part in np.split(Columns(index).of_split(name), edges)]
