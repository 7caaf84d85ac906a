"""A walk over a tar's headers finds the members and errors that a read finds, without reading the payloads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from shards import write_shard
from tar_corpus import CASES

from wdskit.errors import ShardError
from wdskit.tar import walk
from wdskit.tar.reader import TarReader
from wdskit.tar.walk import TarWalk


def by_reading(data: bytes):
    """Return members, end, and the error or None, from the reader."""
    reader = TarReader(io.BytesIO(data).read, shard="x.tar")
    found = []
    try:
        found = [(name, start, part) for name, start, part in _until_error(reader, found)]
    except ShardError as err:
        return found, reader.stop, str(err)
    return found, reader.stop, None


def by_walking(data: bytes, *, most: int = 1 << 30):
    """Return members, end, and the error or None, from the walk, whose reads return a limited number of bytes."""

    def read_at(offset: int, size: int) -> bytes:
        return data[offset : offset + min(size, most)]

    found: list[tuple[str, int, bytes]] = []
    walked = TarWalk(read_at, len(data), shard="x.tar")
    try:
        for name, start, span in walked:
            found.append((name, start, data[span.offset : span.offset + span.size]))
    except ShardError as err:
        return found, walked.stop, str(err)
    return found, walked.stop, None


def _until_error(reader, found):
    for member in reader:
        found.append(member)
        yield member


@pytest.fixture(params=[0, 512, 1 << 40], ids=["jumps always", "jumps over a block", "never jumps"])
def _jumps(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "JUMP_BYTES", request.param)
    monkeypatch.setattr(walk, "PEEK_BYTES", 1 + request.param % 1024)


@pytest.mark.usefixtures("_jumps")
@pytest.mark.parametrize("most", [1 << 30, 700])
def test_the_whole_corpus_is_told_as_the_reader_tells_it(most: int) -> None:
    """Members, their places, the end and the text of errors are compared."""
    for case in CASES:
        if len(case.data) < 1 << 20 or most > 1 << 20:
            assert by_walking(case.data, most=most) == by_reading(case.data), case.name


def test_large_payloads_are_not_read(tmp_path: Path) -> None:
    """Of 20 images of 200 kB, a few kB each are read; of small images, each byte at most once, in large reads."""
    for size, share, num_reads in ((200_000, 0.1, 100), (2000, 1.0, 3)):
        samples = {f"k{at}": {"jpg": bytes(size), "cls": b"1", "json": b"{}"} for at in range(20)}
        data = write_shard(tmp_path / "s.tar", samples).read_bytes()
        reads: list[int] = []

        def read_at(offset: int, wanted: int, data: bytes = data, reads: list[int] = reads) -> bytes:
            part = data[offset : offset + wanted]
            reads.append(len(part))
            return part

        assert len(list(TarWalk(read_at, len(data), shard="x.tar"))) == 60
        assert sum(reads) <= share * len(data)
        assert len(reads) <= num_reads
