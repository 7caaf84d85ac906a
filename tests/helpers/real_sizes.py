"""Samples of real sizes, and checks of shards with tarfile and hashlib, which share no code with wdskit."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import simplejpeg
from folders import ALL
from formats import read_folder, shard_names, write_tar

Fields = Mapping[str, bytes]
Samples = dict[str, Fields]
"""Fields by key, in order."""

NUM_LARGE = 600
NUM_SMALL = 100_000 if ALL else 20_000


@cache
def _smallest_jpeg() -> bytes:
    return simplejpeg.encode_jpeg(np.zeros((8, 8, 3), dtype=np.uint8), quality=50)


def make_jpeg(num_bytes: int, chance: random.Random) -> bytes:
    """Return a whole JPEG of exactly `num_bytes` bytes (1,000 or more), filled up with random comments."""
    base = _smallest_jpeg()
    parts = [base[:2]]
    left = num_bytes - len(base)
    while left:
        size = min(left, 60_000)
        size = left - 100 if 0 < left - size < 100 else size  # a comment needs its four bytes
        parts += [b"\xff\xfe", struct.pack(">H", size - 2), chance.randbytes(size - 4)]
        left -= size
    return b"".join([*parts, base[2:]])


def make_samples(count: int, low: int, high: int, *, seed: int = 0) -> Samples:
    """Return `count` samples with an image of `low` to `high` bytes and a class; every third has JSON."""
    chance = random.Random(seed)
    samples: Samples = {}
    for number in range(count):
        fields = {"cls": b"%d" % (number % 7), "jpg": make_jpeg(chance.randint(low, high), chance)}
        if number % 3 == 0:
            fields["json"] = b'{"number":%d}' % number
        samples[f"s{seed}n{number:06d}"] = fields
    return samples


@cache
def large() -> Samples:
    """Return 600 samples, 64 MB."""
    samples = make_samples(NUM_LARGE, 78_000, 135_000)
    assert sum(len(fields["jpg"]) for fields in samples.values()) > 60_000_000
    return samples


@cache
def small() -> Samples:
    """Return 20,000 samples of 1 to 4 KB; 100,000 in `make long WHAT=sizes`."""
    return make_samples(NUM_SMALL, 1_000, 4_000)


def rows(samples: Samples) -> Iterator[dict[str, object]]:
    """Yield the samples as rows for `pack`."""
    for key, fields in samples.items():
        yield {"__key__": key, **fields}


def write_files(folder: Path, samples: Samples) -> Path:
    """Write one file per field, without the class, which `pack` takes from folders. Returns the folder."""
    folder.mkdir()
    for key, fields in samples.items():
        for name in ("jpg", "json"):
            if name in fields:
                (folder / f"{key}.{name}").write_bytes(fields[name])
    return folder


def write_tars(folder: Path, samples: Samples, *, each: int) -> Path:
    """Write shards of `each` samples with tarfile. Returns the folder."""
    items = [*samples.items()]
    for number, first in enumerate(range(0, len(items), each)):
        write_tar(folder / f"t-{number:03d}.tar", dict(items[first : first + each]))
    return folder


def check_folder(folder: Path, expected: Samples, *, in_order: bool = True) -> None:
    """Compare every payload, key and digest of a packed folder and, with `in_order`, the order of samples."""
    assert sorted(shard_names(folder)) == sorted(path.name for path in folder.glob("*.tar"))
    left = dict(expected)
    keys = iter(expected)
    for key, fields in read_folder(folder).items():
        assert key in left, f"{key} is not expected"
        if in_order:
            assert key == next(keys)
        wanted = left.pop(key)
        assert fields.keys() == wanted.keys()
        for name, data in fields.items():
            assert data == wanted[name], f"{key}.{name}: other bytes"
    assert not left, f"{len(left)} samples are missing, {next(iter(left))} among them"


def without_json(samples: Samples) -> Samples:
    """Return the samples without JSON, so that all have the same fields."""
    return {key: {name: data for name, data in fields.items() if name != "json"} for key, fields in samples.items()}
