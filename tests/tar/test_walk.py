"""A walk over a tar's headers finds the members and errors that a read finds, without reading the payloads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import write_shard
from tar_corpus import CASES

from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.errors import ShardError
from wdskit.storage.urls import LocalFile
from wdskit.tar import walk
from wdskit.tar.reader import TarReader
from wdskit.tar.walk import Span, TarWalk


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


fields = st.dictionaries(st.sampled_from(["jpg", "cls", "json"]), st.binary(max_size=1500), min_size=1)


@given(st.dictionaries(st.sampled_from("abcdef"), fields), st.integers(0, 3000))
def test_samples_are_those_that_reading_gives(tmp_path_factory, samples, jump: int) -> None:
    path = write_shard(tmp_path_factory.mktemp("walk") / "s.tar", samples)
    file = LocalFile(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "JUMP_BYTES", jump)
        reader = HeaderReader(file, shard=str(path))
        walked = list(reader)
    spans = [{k: read_span(file, v) if isinstance(v, Span) else v for k, v in sample.items()} for sample in walked]
    whole = ShardReader(io.BytesIO(path.read_bytes()).read, shard=str(path))
    assert spans == list(whole)
    assert (reader.starts, reader.stop, reader.num_samples) == (whole.starts, whole.stop, whole.num_samples)
    file.close()


def test_without_its_look_at_the_file_size_a_cut_payload_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant jumps beyond the end of the file, finds no end marker, and reports this at the wrong byte."""
    monkeypatch.setattr(walk, "JUMP_BYTES", 0)
    case = next(case for case in CASES if case.error and "inside a member" in case.error)
    right = by_walking(case.data)[2]
    walked = TarWalk(lambda offset, size: case.data[offset : offset + size], 1 << 60, shard="x.tar")
    with pytest.raises(ShardError) as caught:
        list(walked)
    assert str(caught.value) != right
