"""Headers parsed together give the results of headers parsed one by one, or are not plain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.tar import columns as plain_module
from wdskit.tar.columns import Headers, have_equal_starts, key_sizes, parse_headers
from wdskit.tar.header import build_header
from wdskit.tar.names import split_name
from wdskit.tar.reader import plain_member

NAMES = [
    b"a.cls", b"a.b.c", b"x/y.z/k.jpg", b"x/y.z/k", b"no_extension", b".hidden", b"x/.hidden", b"k.", b"x/k.", b"k.A",
    b"__meta__/x.json", b"__k.cls", b"/.a", b"a/b", b"a" * 96 + b".cls", b"a/" * 48 + b".cls", b"k.x\xc3\xa4", b"k.-",
]  # fmt: skip


def together(blocks: list[bytes]) -> Headers:
    return parse_headers(np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(-1, 512))


def signed(block: bytearray) -> bytes:
    """Return the block with its right checksum."""
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def check(blocks: list[bytes]) -> int:
    """Check that each header is parsed as it is alone, or is not plain; return the number of plain headers."""
    headers = together(blocks)
    keys = key_sizes(headers)
    for at, block in enumerate(blocks):
        alone = plain_member(block)
        if not headers.plain[at]:
            continue
        name = headers.names[at, : headers.name_sizes[at]].tobytes().decode()
        assert (name, headers.sizes[at]) == alone
        if keys[at]:
            assert split_name(name) == (name[: keys[at]], name[keys[at] + 1 :].lower())
    return int(headers.plain.sum())


def test_what_a_writer_writes_is_plain() -> None:
    blocks = [build_header(name, size) for name in NAMES for size in (0, 1, 511, 512, 8**11 - 1)]
    assert check(blocks) == 5 * sum(name.isascii() and name[-1:].isalnum() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_splits_is_split_alike_alone_and_among_others(name: bytes) -> None:
    """In a column of names, each name is as wide as the longest one."""
    for company in ([], [b"a"], [b"b" * 100], [b"c/" * 49 + b".x"]):
        blocks = [build_header(each, 7) for each in (name, *company)]
        headers = together(blocks)
        split = split_name(name.decode())
        size = int(key_sizes(headers)[0])
        assert size in (0, len(split[0]) if split else 0)
        if split and name.isascii() and not name.startswith(b"__"):
            assert size == len(split[0])


def test_any_byte_changed_is_not_plain_or_read_alike() -> None:
    """The checksum is unchanged, or is made right again."""
    block = build_header(b"a/b.cls", 1234)
    changed = [bytearray(block) for _ in range(512 * 9)]
    for at in range(512):
        for number, byte in enumerate([0, 1, 0x20, 0x2E, 0x2F, 0x30, 0x37, 0x80, 0xFF]):
            changed[at * 9 + number][at] = byte
    same = [bytes(each) for each in changed].count(block)
    assert check([bytes(each) for each in changed]) == same
    signed_ones = [signed(each) for each in changed]
    assert same < check(signed_ones) < len(signed_ones)


@given(st.lists(st.binary(min_size=512, max_size=512), min_size=1, max_size=4))
def test_noise_is_not_plain(blocks: list[bytes]) -> None:
    assert check(blocks) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 511), st.integers(0, 255), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_any_headers_together_are_read_as_alone(changes: list[tuple[bytes, int, int, bool]]) -> None:
    blocks = []
    for name, at, byte, is_signed in changes:
        block = bytearray(build_header(name, at))
        block[at] = byte
        blocks.append(signed(block) if is_signed else bytes(block))
    check(blocks)


@given(st.lists(st.tuples(st.text("ab.", min_size=1, max_size=5), st.text("ab.", min_size=1, max_size=5)), min_size=1))
def test_names_start_alike_where_their_bytes_are_the_same(pairs: list[tuple[str, str]]) -> None:
    def table(texts: list[str]) -> np.ndarray:
        width = max(map(len, texts))
        return np.array([list(text.encode().ljust(width, b"\0")) for text in texts], dtype=np.uint8)

    sizes = np.array([min(map(len, pair)) for pair in pairs])
    names, others = zip(*pairs, strict=True)
    expected = [a[:size] == b[:size] for (a, b), size in zip(pairs, sizes, strict=True)]
    assert have_equal_starts(table(list(names)), table(list(others)), sizes).tolist() == expected


# Broken parsers, which the sweep above must catch.


@pytest.mark.parametrize("places", [range(11), range(11, 17), range(17, 21), range(21, 29), range(29, 30)])
def test_a_parser_that_checks_less_is_caught(places: range, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = plain_module._RANGE.copy()
    ranges[list(places)] = 255
    monkeypatch.setattr(plain_module, "_RANGE", ranges)
    with pytest.raises(AssertionError):
        test_any_byte_changed_is_not_plain_or_read_alike()


def test_a_parser_without_checksums_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_module, "_checksums_hold", lambda blocks, checksums, digits: True)
    with pytest.raises(AssertionError):
        test_any_byte_changed_is_not_plain_or_read_alike()
