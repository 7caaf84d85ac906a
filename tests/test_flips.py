"""A name is part of the sample. Each byte of headers and extension headers is changed, the file's times are kept, and
the shard is read in each way that parses names. The result is the samples that were written, or an error.

Headers have a checksum. The data of extension headers (GNU long names, pax records) have no checksum: only the sha256
of the shard covers the names there; `verify` compares it with the index. Such a change may rename members, so that
their sample becomes two; no payload is lost or changed.

`make long WHAT=faults` changes every byte in each way and counts outcomes; otherwise a part is changed.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disks import ALL, HastyDisk, on

from wdskit import LocalShard, Pipeline, WdskitError, verify
from wdskit.shards.index import index_folder

Samples = dict[str, dict[str, bytes]]
Found = Iterator[tuple[str, dict[str, bytes]]]

MASKS = [*(1 << bit for bit in range(8)), 0xFF, 0x5E]
FIELDS = {"cls": b"1", "bin": b"\xff\xd8\xff", "seg.bin": b"mask"}


class Flips(NamedTuple):
    """A shard, its samples, and the offsets of bytes to change.

    Attributes:
        places: Bytes of headers, of extension headers with their data, and of the end marker.
        extensions: Of `places`, the data of extension headers.
        weak: Of `extensions`, the bytes of names.
    """

    data: bytes
    samples: Samples
    places: list[int]
    extensions: list[int]
    weak: set[int]


KINDS = {
    "plain": ("d", tarfile.USTAR_FORMAT),
    "prefix": ("p" * 60 + "/" + "q" * 45, tarfile.USTAR_FORMAT),
    "gnu": ("f" * 90, tarfile.GNU_FORMAT),
    "gnu deep": ("g" * 60 + "/" + "h" * 60, tarfile.GNU_FORMAT),
    "pax": ("f" * 90, tarfile.PAX_FORMAT),
    "pax deep": ("g" * 60 + "/" + "h" * 60, tarfile.PAX_FORMAT),
    "pax times": ("d", tarfile.PAX_FORMAT),
    "pax sizes": ("f" * 90, tarfile.PAX_FORMAT),
    "pax umlaut": ("dä", tarfile.PAX_FORMAT),
}
"""Folder of the keys, and format."""


def shard_of(kind: str) -> Flips:
    """Return a shard of Python's tarfile: two samples with three fields each, then a sample with one field."""
    folder, form = KINDS[kind]
    samples = {f"{folder}/n{number}w": dict(FIELDS) for number in (11, 25)}
    samples[f"{folder}/n47w"] = {"cls": b"4"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for key, fields in samples.items():
            for field, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size = len(data)
                if kind == "pax times":
                    info.mtime = 1.5  # type: ignore[assignment]
                if kind == "pax sizes":
                    info.pax_headers = {"mtime": "1.5", "size": str(len(data)), "comment": "c"}
                archive.addfile(info, io.BytesIO(data))
    written = stream.getvalue()
    with tarfile.open(fileobj=io.BytesIO(written), mode="r:") as archive:
        infos = archive.getmembers()
    places: list[int] = []
    extensions: list[int] = []
    weak: set[int] = set()
    for info in infos:
        places += range(info.offset, info.offset_data)
        if written[info.offset + 156] in b"Lx":
            first = info.offset + 512
            extensions += range(first, first + int(written[info.offset + 124 : info.offset + 135], 8))
            name = info.name.encode()
            at = written.find(name, first, info.offset_data)
            weak.update(range(at, at + len(name) + 1) if at >= 0 else ())  # with the NUL after a GNU name
    end = infos[-1].offset_data + 512
    return Flips(written[: end + 1024], samples, [*places, *range(end, end + 1024)], extensions, weak)


def plain(sample: Mapping[str, Any]) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in sample.items() if not name.startswith("__")}


def in_order(shard: Path) -> Found:
    for sample in Pipeline().stream(str(shard)).loader(workers=0):
        yield sample["__key__"], plain(sample)


def by_number(shard: Path) -> Found:
    with LocalShard(shard) as opened:
        for number in range(len(opened)):
            key, fields = opened.read(number)
            yield key, plain(fields)


def exact(shard: Path) -> Found:
    for sample in Pipeline().exact(str(shard)).loader(workers=0):
        yield sample["__key__"], plain(sample)


ODD = 1  # the finding that the last sample has one field


def verified(shard: Path) -> Found:
    result = verify(shard.parent, workers=1)
    if len(result.findings) > ODD:  # more findings than this note
        raise WdskitError(str(result.findings[0]))
    yield from in_order(shard)


class Way(NamedTuple):
    """One way to read a shard.

    Attributes:
        has_index: Whether its folder has an index.
        share: How many changes are tried for one of the cheapest ways.
    """

    read: Callable[[Path], Found]
    has_index: bool = False
    share: float = 1.0


WAYS = {
    "stream": Way(in_order, share=0.1),
    "by number": Way(by_number, has_index=True),
    "exact": Way(exact, has_index=True, share=0.1),
    "indexed verify": Way(verified, has_index=True, share=0.1),
}


def outcome(way: Way, shard: Path, expected: list[tuple[str, dict[str, bytes]]], *, is_weak: bool) -> str:
    """Read a shard and return "same", "error" for an error after unchanged samples, or "renamed".

    A byte of a long name may rename a member, or make it one of no sample.
    """
    found: list[tuple[str, dict[str, bytes]]] = []
    try:
        found.extend(way.read(shard))  # keeps the samples before an error
        result = "same" if found == expected else "renamed"
    except WdskitError:
        result = "error"
    if found != expected[: len(found)]:
        assert is_weak
        contents = [Counter(data for _, fields in samples for data in fields.values()) for samples in (expected, found)]
        assert not contents[1] - contents[0]  # nothing is invented
        assert result == "error" or sum((contents[0] - contents[1]).values()) <= 1  # a member without a key is skipped
    return result


def sweep(kind: str, name: str, folder: Path, changes: list[tuple[int, int]]) -> Counter[str]:
    """Make each change (offset, mask), read the shard and count the outcomes."""
    flips, way = shard_of(kind), WAYS[name]
    shard = folder / "s" / "s.tar"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(flips.data)
    if way.has_index:
        on(HastyDisk(), index_folder, shard.parent, workers=1)
    times = shard.stat()
    expected = list(way.read(shard))
    assert sorted(expected) == sorted(flips.samples.items())
    counts: Counter[str] = Counter()
    with shard.open("r+b", buffering=0) as file:
        for at, mask in changes:
            os.pwrite(file.fileno(), bytes([flips.data[at] ^ mask]), at)
            os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
            try:
                counts[outcome(way, shard, expected, is_weak=at in flips.weak)] += 1
            except AssertionError as err:
                raise AssertionError(f"{kind}, {name}: byte {at} ^ {mask:#x}") from err
            os.pwrite(file.fileno(), flips.data[at : at + 1], at)
    return counts


def changes_of(kind: str, way: Way) -> list[tuple[int, int]]:
    """Return the changes: every byte, with all masks in extension data, two elsewhere; for slow ways a part of them."""
    flips = shard_of(kind)
    every = list(itertools.product(flips.extensions, MASKS))
    others = [(at, MASKS[(at + turn) % len(MASKS)]) for at in flips.places for turn in (0, 3)]
    draws = random.Random(f"{kind} {way.share}")
    part = way.share if ALL else way.share / 250
    chosen = [draws.sample(some, min(len(some), int(len(some) * part) + 3)) for some in (every, others)]
    return [*chosen[0], *chosen[1]] if part < 1 else [*every, *others]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_name_gives_the_right_samples_or_an_error(kind: str, tmp_path: Path) -> None:
    for name, way in WAYS.items():
        counts = sweep(kind, name, tmp_path / name.replace(" ", "-"), changes_of(kind, way))
        assert counts["error"]
        assert not counts["renamed"] or "deep" in kind or kind in {"gnu", "pax", "pax sizes", "pax umlaut"}
