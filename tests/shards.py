"""Small shards for tests, and the stages that tests send to worker processes (by reference, so they stand in a
module).
"""

from __future__ import annotations

from pathlib import Path

from wdskit.tar.writer import TarWriter


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A shard of `{key: {field: bytes}}`."""
    with path.open("wb") as file:
        writer = TarWriter(file.write)
        for key, fields in samples.items():
            for field, data in fields.items():
                writer.add(f"{key}.{field}", data)
        writer.finish()
    return path


def write_numbers(folder: Path, counts: list[int]) -> str:
    """Shards of so many samples, numbered through: key `n%06d`, field `cls` the number. Returns their pattern."""
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
