"""Headers of images: what they say is what decoding gives, and no bytes raise anything but DecodeError."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import EXTRANEOUS, FILES
from PIL import Image

from wdskit.codecs.headers import read_header
from wdskit.errors import DecodeError

FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF"}


def header_of(data: bytes):
    return read_header(lambda size: data[:size])


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_pillow_says(name):
    header = header_of(FILES[name])
    with Image.open(io.BytesIO(FILES[name])) as image:
        assert (header.width, header.height) == image.size
        assert header.mode == image.mode
    assert header.format == FORMATS.get(name.split()[0], "PPM")


def test_16_bits_of_a_png_are_told(tmp_path):
    stream = io.BytesIO()
    Image.new("I;16", (3, 2)).save(stream, "PNG")
    assert header_of(stream.getvalue())[1:] == (3, 2, "L;16")


@pytest.mark.parametrize("num_bytes", [0, 2000, 2047, 2048, 64_000, 65_536, 400_000])
def test_a_header_behind_a_cameras_notes_is_found_in_few_reads(num_bytes):
    """Also where a segment ends at the edge of a read."""
    data = FILES["jpeg"]
    notes = b"".join(
        b"\xff\xe1" + (len(part) + 2).to_bytes(2, "big") + part
        for part in (bytes(min(65_000, num_bytes - at)) for at in range(0, num_bytes, 65_000))
    )
    whole = data[:2] + notes + data[2:]
    asked = []

    def head(size):
        asked.append(size)
        return whole[:size]

    assert read_header(head) == header_of(data)
    assert len(asked) == 1 + (num_bytes >= 2000) + (num_bytes > 65_000)


@pytest.mark.parametrize("name", [name for name in FILES if "tiff" not in name])
def test_a_cut_header_is_an_error_and_a_cut_body_is_not(name):
    whole = header_of(FILES[name])
    seen = set()
    for stop in range(min(len(FILES[name]), 700)):
        try:
            header = header_of(FILES[name][:stop])
        except DecodeError:
            header = None
        seen.add(header)
    assert seen <= {None, whole}
    assert None in seen


@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_headers_raise_nothing_but_decode_errors(name, data):
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged), 60) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = header_of(bytes(damaged))
    except DecodeError:
        return
    assert header.width > 0
    assert header.height > 0


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"GIF89a", b"no image", FILES["gif"][:6] + bytes(30)])
def test_what_is_no_image_is_an_error(data):
    with pytest.raises(DecodeError):
        header_of(data)


def test_extraneous_bytes_before_the_frame_are_an_error_and_behind_it_are_not():
    data = FILES["jpeg"]
    assert header_of(EXTRANEOUS["before the end"]) == header_of(data)
    with pytest.raises(DecodeError, match="no marker"):
        header_of(data[:2] + b"\1" + data[2:])
    with pytest.raises(DecodeError, match="before any frame"):
        header_of(data[:2] + b"\xff\xd9" + data[2:])
