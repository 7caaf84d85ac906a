"""The writer: one subset of tar, the same bytes for the same members."""

from __future__ import annotations

import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tar_corpus import checksum_of

from wdskit.tar.header import HeaderError, build_header
from wdskit.tar.writer import END_BYTES, TarWriter, member_bytes

# A header as POSIX's table says, byte by byte, written down once.
GOLDEN_HEADER = (
    b"photos/cat/000003.jpg" + bytes(79)
    + b"0000644\x00" + b"0000000\x00" + b"0000000\x00" + b"00000003000\x00" + b"00000000000\x00"
    + b"012505\x00 " + b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\x00" + b"0000000\x00" + bytes(167)
)  # fmt: skip
GOLDEN_SHARD = "6ed09b723407546c4343266a5aea7e4921cd954d983d4706cf1dc6935bc058ed"


def shard_of(members) -> bytes:
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    for name, data in members:
        writer.add(name, data)
    writer.finish()
    assert writer.offset == len(buffer.getvalue())
    return buffer.getvalue()


def test_a_header_has_these_bytes():
    assert build_header(b"photos/cat/000003.jpg", 0o3000) == GOLDEN_HEADER
    assert int(GOLDEN_HEADER[148:154], 8) == checksum_of(GOLDEN_HEADER)


def test_a_shard_has_these_bytes():
    shard = shard_of([("a.jpg", bytes(range(256)) * 5), ("a.json", b"{}"), ("b.jpg", b""), ("ä.txt", "ö".encode())])
    assert hashlib.sha256(shard).hexdigest() == GOLDEN_SHARD


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1023, 1024, 1025, 1 << 20, (1 << 20) + 1])
def test_sizes_at_the_edges_of_blocks(size):
    shard = shard_of([("a.bin", b"x" * size)])
    assert len(shard) == member_bytes(size) + END_BYTES == 512 + -(-size // 512) * 512 + 1024
    assert shard[512 : 512 + size] == b"x" * size
    assert shard[512 + size :].count(0) == len(shard) - 512 - size


@given(
    name=st.text(min_size=1, max_size=100).map(str.encode).filter(lambda n: 0 not in n and len(n) <= 100),
    size=st.integers(0, 8**11 - 1),
)
def test_headers_have_right_checksums_and_eleven_digits(name, size):
    header = build_header(name, size)
    assert len(header) == 512
    assert int(header[148:154], 8) == checksum_of(header)
    assert header[124:136] == b"%011o\x00" % size
    assert header[:100].rstrip(b"\x00") == name


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        (b"", 0, "a name of 0 bytes"),
        (b"n" * 101, 0, "a name of 101 bytes"),
        (b"a\x00b", 0, "without NUL"),
        (b"a", -1, "a size of -1 bytes"),
        (b"a", 8**11, "a size of 8589934592 bytes"),
    ],
)
def test_what_not_every_reader_understands_is_refused(name, size, problem):
    with pytest.raises(HeaderError, match=problem):
        build_header(name, size)


def test_a_refused_member_leaves_the_shard_as_it_was():
    buffer = io.BytesIO()
    writer = TarWriter(buffer.write)
    writer.add("a.txt", b"x")
    with pytest.raises(HeaderError):
        writer.add("n" * 101, b"y")
    writer.finish()
    assert buffer.getvalue() == shard_of([("a.txt", b"x")])
