"""The writer: one subset of tar, the same bytes for the same members."""

from __future__ import annotations

import array
import io
import tarfile

import pytest
from folders import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from wdskit.tar.header import HeaderError
from wdskit.tar.reader import TarReader
from wdskit.tar.writer import END_BYTES, TarWriter, member_bytes

# The content of `golden/tar/written.tar`, written once and checked with GNU tar and xxd.
GOLDEN_SHARD = GOLDEN / "tar" / "written.tar"
GOLDEN_MEMBERS = [
    ("a.jpg", bytes(range(256)) * 5),
    ("a.json", b"{}"),
    ("b.jpg", b""),
    ("d/e/f.seg.png", b"p" * 512),
    ("n" * 96 + ".txt", b"a name of 100 bytes"),
    ("ä.txt", "ö".encode()),
]


def shard_of(members) -> bytes:
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name, data in members:
        writer.add(name, data)
    writer.finish()
    assert writer.offset == len(buffer.getvalue())
    return buffer.getvalue()


def test_a_shard_has_these_bytes():
    assert shard_of(GOLDEN_MEMBERS) == GOLDEN_SHARD.read_bytes()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
def test_any_buffer_gives_the_same_bytes(kind):
    assert shard_of([(name, kind(data)) for name, data in GOLDEN_MEMBERS]) == GOLDEN_SHARD.read_bytes()


@pytest.mark.parametrize("code", "bBhHiIqQfd")
def test_a_view_of_larger_items_is_written_by_its_bytes(code):
    """`len` of such a view counts items, so that the next header would be at a wrong place."""
    view = memoryview(array.array(code, [1, 2, 3] * 100))
    assert shard_of([("a.bin", view), ("b", b"x")]) == shard_of([("a.bin", view.tobytes()), ("b", b"x")])
    table = view.cast("B").cast("B", (10, view.nbytes // 10))
    assert shard_of([("a.bin", table), ("b", b"x")]) == shard_of([("a.bin", view.tobytes()), ("b", b"x")])


def test_a_view_with_gaps_is_refused_and_leaves_the_shard_as_it_was():
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    writer.add("a.txt", b"x")
    with pytest.raises(TypeError, match="contiguous"):
        writer.add("b.txt", memoryview(b"abcdef")[::2])
    writer.finish()
    assert buffer.getvalue() == shard_of([("a.txt", b"x")])


REFUSED = [
    ("", 0, "a name of 0 bytes"),
    ("n" * 101, 0, "a name of 101 bytes"),
    ("ä" * 51, 0, "a name of 102 bytes"),
    ("a\x00b", 0, "without NUL"),
    ("d/", 0, "ends in a slash"),
    ("d/e/", 0, "ends in a slash"),
    ("a", -1, "a size of -1 bytes"),
    ("a", 8**11, "a size of 8589934592 bytes does not fit 11 octal digits"),
    ("a", 1 << 60, "does not fit 11 octal digits"),
]


class Large(bytes):
    """An object with a large length and no data."""

    size = 0

    def __len__(self):
        return self.size


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [case for case in REFUSED if case[1] >= 0] + [("\ud800", 0, "cannot be written as UTF")],
)
def test_a_refused_member_leaves_the_shard_as_it_was(name, size, problem):
    """More than 8 GiB are refused before a byte of them is read."""
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    writer.add("a.txt", b"x")
    data = Large()
    data.size = size
    with pytest.raises(HeaderError, match=problem):
        writer.add(name, data)
    writer.add("b.txt", b"y")
    writer.finish()
    assert buffer.getvalue() == shard_of([("a.txt", b"x"), ("b.txt", b"y")])


MEMBERS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=100).filter(
            lambda name: "\x00" not in name and name[-1] != "/" and len(name.encode("utf-8", "replace")) <= 100
        ),
        st.one_of(st.binary(max_size=1100), st.integers(0, 3000).map(bytes)),
    ),
    max_size=6,
)


@given(MEMBERS)
@settings(max_examples=200)
def test_any_names_and_data_come_back(members):
    """They are read by wdskit and by tarfile; a name is any text of 1 to 100 bytes that is not a directory's."""
    members = [(name.encode("utf-8", "replace").decode(), data) for name, data in members]
    shard = shard_of(members)
    assert len(shard) == sum(member_bytes(len(data)) for _, data in members) + END_BYTES
    assert [(name, data) for name, _, data in TarReader(io.BytesIO(shard).read, shard="x")] == members
    with tarfile.open(fileobj=io.BytesIO(shard), mode="r:") as archive:
        assert [(info.name, archive.extractfile(info).read()) for info in archive] == members
