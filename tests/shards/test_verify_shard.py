"""`verify` finds every flipped bit, in shards and index files.

A sweep tries damages and returns the damages that were not found. For each check there is a mutant without it, which
the sweep must catch. `make long WHAT=faults` tries all damages; otherwise a part of them is tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from disks import HastyDisk, on
from folders import ALL
from images import image_bytes

from wdskit import pack, verify
from wdskit.dataset.index import read_index
from wdskit.shards import verify_shard as checking
from wdskit.shards.verify_shard import Finding

NUM_FLIPS = 4000 if ALL else 200


class Damage(NamedTuple):
    """The content of a file after a damage, and a description of the damage."""

    path: Path
    data: bytes
    what: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four shards of `pack` with five samples, each with an image, JSON, a class and a binary field."""
    rows = [
        {
            "__key__": f"k{n:02d}",
            "png": image_bytes("PNG", number=n),
            "json": {"n": n},
            "cls": n % 3,
            "bin": random.Random(n).randbytes(700),
        }
        for n in range(20)
    ]
    path = tmp_path_factory.mktemp("verify") / "data"
    on(HastyDisk(), pack, rows, path, max_samples=5)
    return path


def damaged_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix in {".tar", ".idx", ".json", ".bin"}]


def flips(folder: Path, num: int, *, seed: int = 0, suffix: str = "") -> Iterable[Damage]:
    """Yield flips of one random bit, uniform over bytes; half of the flips are in small files, which would otherwise be
    rare.
    """
    rng = random.Random(seed)
    files = [path for path in damaged_files(folder) if path.name.endswith(suffix)]
    small = [path for path in files if path.suffix != ".tar"] or files
    for number in range(num):
        path = rng.choices(*_weighted(small if number % 2 else files))[0]
        data = bytearray(path.read_bytes())
        at, bit = rng.randrange(len(data)), rng.randrange(8)
        data[at] ^= 1 << bit
        yield Damage(path, bytes(data), f"{path.name}: bit {bit} of byte {at}")


def _weighted(files: list[Path]) -> tuple[list[Path], list[int]]:
    return files, [path.stat().st_size for path in files]


def tells(finding: Finding, path: Path) -> bool:
    """Return whether a finding names a file; a finding that a shard differs from the index may mean the index."""
    return path.name == "index.json" or Path(finding.file).name == path.name


def undetected(damages: Iterable[Damage]) -> Iterator[str]:
    """Yield the damages whose file no finding names. The files are restored. A damage of index.json that changes no
    value of a shard, or only loses the digest of an `.idx`, is left out.
    """
    for path, data, what in damages:
        before, entries = path.read_bytes(), read_index(path.parent).entries
        assert data != before
        path.write_bytes(data)
        try:
            result = verify(path.parent, workers=1)
            now = () if result.findings else read_index(path.parent).entries
        finally:
            path.write_bytes(before)
        if path.name == "index.json" and now == entries:
            continue
        if not any(tells(finding, path) for finding in result.findings):
            yield what


def test_what_was_packed_is_clean(folder):
    assert len(damaged_files(folder)) == 4 + 4 + 1
    result = verify(folder, images="decode")
    assert result.findings == ()
    assert (result.num_shards, result.num_samples, result.num_images) == (4, 20, 20)


def test_every_flipped_bit_is_found(folder):
    assert [*undetected(flips(folder, NUM_FLIPS))] == []


def test_all_damaged_shards_are_listed(folder):
    """Each shard is damaged in another way, and an index too."""
    before = {path: path.read_bytes() for path in damaged_files(folder)}
    shards = [path for path in before if path.suffix == ".tar"]
    try:
        for number, path in enumerate(shards):
            data = bytearray(before[path])
            data[number * 600] ^= 1
            path.write_bytes(data)
        idx = shards[0].with_name(shards[0].name + ".idx")
        idx.write_bytes(before[idx][:-8])
        for workers in (1, 2):
            result = verify(folder, workers=workers)
            assert {Path(finding.file).name for finding in result.findings} >= {path.name for path in (*shards, idx)}
    finally:
        for path, data in before.items():
            path.write_bytes(data)


# Mutants: verifications without one of the checks.


def no_digest(monkeypatch):
    monkeypatch.setattr(checking._ShardCheck, "_compare_entry", lambda self, shard: None)


def no_offsets(monkeypatch):
    monkeypatch.setattr(checking, "compare_offsets", lambda *args, **options: "")


@pytest.mark.parametrize(("mutant", "suffix"), [(no_digest, ".tar"), (no_digest, ".json"), (no_offsets, ".idx")])
def test_the_sweep_catches_a_verification_with(folder, monkeypatch, mutant: Callable, suffix: str):
    mutant(monkeypatch)
    assert next(undetected(flips(folder, 40, suffix=suffix)), None)
