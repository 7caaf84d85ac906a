"""Checks of fields against their names; sizes in headers are those of decoded images."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import FILES as IMAGES
from PIL import Image

from wdskit.codecs.checks import check_image_field, read_header
from wdskit.codecs.formats import IMAGE_FIELDS, check_magic
from wdskit.errors import DecodeError

FORMATS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff", "PPM": "pgm"}


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


check_structure = partial(check_image_field, level="structure")
check_pixels = partial(check_image_field, level="decode")
FILES = {field: encoded(kind) for kind, field in FORMATS.items()}


@pytest.mark.parametrize("check", [check_magic, check_structure, check_pixels])
def test_a_file_passes_under_the_names_of_its_format_and_no_other(check):
    """Every format is tried under every field name."""
    alike = [{"jpg", "jpeg", "jpe", "jfif"}, {"png", "apng"}, {"tif", "tiff"}, {"ppm", "pgm", "pbm", "pnm"}]
    for field, data in FILES.items():
        own = next((names for names in alike if field in names), {field})
        for name in IMAGE_FIELDS:
            if name in own:
                check(f"left.{name.upper()}", data)
                check(name, memoryview(data))
            else:
                with pytest.raises(DecodeError, match="the name says"):
                    check(name, data)


# Headers.

HEADER_FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF"}


def header_of(data: bytes):
    return read_header(lambda size: data[:size])


@pytest.mark.parametrize("name", IMAGES)
def test_the_header_says_what_pillow_says(name):
    header = header_of(IMAGES[name])
    with Image.open(io.BytesIO(IMAGES[name])) as image:
        assert (header.width, header.height) == image.size
        assert header.mode == image.mode
    assert header.format == HEADER_FORMATS.get(name.split()[0], "PPM")


@pytest.mark.parametrize("num_bytes", [0, 2000, 2047, 2048, 64_000, 65_536, 400_000])
def test_a_header_behind_a_cameras_notes_is_found_in_few_reads(num_bytes):
    """This includes a segment that ends at the edge of a read."""
    data = IMAGES["jpeg"]
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


@pytest.mark.parametrize("name", [name for name in IMAGES if "tiff" not in name])
def test_a_cut_header_is_an_error_and_a_cut_body_is_not(name):
    whole = header_of(IMAGES[name])
    seen = set()
    for stop in range(min(len(IMAGES[name]), 700)):
        try:
            header = header_of(IMAGES[name][:stop])
        except DecodeError:
            header = None
        seen.add(header)
    assert seen <= {None, whole}
    assert None in seen


@given(st.sampled_from(sorted(IMAGES)), st.data())
def test_damaged_headers_raise_nothing_but_decode_errors(name, data):
    damaged = bytearray(IMAGES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged), 60) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = header_of(bytes(damaged))
    except DecodeError:
        return
    assert header.width > 0
    assert header.height > 0
