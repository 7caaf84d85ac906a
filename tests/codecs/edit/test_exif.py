"""EXIF blocks: read the orientation, and remove it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wdskit.codecs.edit.exif import orientation_of, without_orientation

MAKE, ORIENTATION, ARTIST, GPS, EXPOSURE = 0x010F, 0x0112, 0x013B, 0x8825, 0x829A


def block(tags, order="<"):
    """Return a block as Pillow writes it, without the prefix of a JPEG."""
    exif = Image.Exif()
    exif.endian = order
    exif._info = None
    for tag, value in tags.items():
        exif[tag] = value
    return exif.tobytes()[6:]


def tags_of(data):
    exif = Image.Exif()
    exif.load(b"Exif\0\0" + data)
    return dict(exif)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("value", range(10))
def test_the_orientation_is_read_in_both_byte_orders(order, value):
    data = struct.pack(
        f"{order}2sHIHHHIHHI", b"II" if order == "<" else b"MM", 42, 8, 1, ORIENTATION, 3, 1, value, 0, 0
    )
    assert orientation_of(data) == (value if 1 <= value <= 8 else 1)
    assert orientation_of(without_orientation(data)) == 1
    assert tags_of(without_orientation(data)) == {}


@pytest.mark.parametrize("others", [{}, {MAKE: "a camera"}, {ARTIST: "nobody"}, {MAKE: "a camera", ARTIST: "nobody"}])
def test_only_the_orientation_goes(others):
    """Texts come after the directory, which has their offsets in the block: the offsets must not change."""
    before = block({**others, ORIENTATION: 6})
    assert orientation_of(before) == 6
    after = without_orientation(before)
    assert len(after) == len(before)
    assert tags_of(after) == others
    assert without_orientation(after) == after


def test_an_orientation_as_a_long_or_twice_is_removed_too():
    entry = struct.pack("<HHII", ORIENTATION, 4, 1, 3)
    data = b"II*\0" + struct.pack("<IH", 8, 2) + entry + struct.pack("<HHIHH", ORIENTATION, 3, 1, 8, 0) + bytes(4)
    assert orientation_of(data) == 3
    assert orientation_of(without_orientation(data)) == 1
    assert tags_of(without_orientation(data)) == {}


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda noise: b"II*\0\x08\0\0\0" + noise))
def test_noise_has_an_orientation_of_1_to_8_and_loses_nothing_but_it(noise):
    assert 1 <= orientation_of(noise) <= 8
    cleaned = without_orientation(noise)
    assert len(cleaned) == len(noise)
    assert orientation_of(cleaned) == 1


@given(st.binary(max_size=40))
def test_a_block_that_is_cut_anywhere_is_read_without_an_error(extra):
    whole = block({MAKE: "a camera", ORIENTATION: 6}) + extra
    for cut in range(len(whole)):
        assert orientation_of(whole[:cut]) in {1, 6}
