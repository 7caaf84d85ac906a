"""Fields against what their names promise."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wdskit.codecs.checks import check_image_field, check_json, check_magic
from wdskit.codecs.images import IMAGE_FIELDS
from wdskit.errors import DecodeError, ImageTooLarge

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
    """Every format under every field name that there is."""
    alike = [{"jpg", "jpeg", "jpe", "jfif"}, {"png", "apng"}, {"tif", "tiff"}, {"ppm", "pgm", "pbm", "pnm"}]
    for field, data in FILES.items():
        own = next((names for names in alike if field in names), {field})
        for name in IMAGE_FIELDS:
            if name in own:
                check(f"left.{name.upper()}", data)
                check(name, memoryview(data))
            else:
                with pytest.raises(DecodeError, match="the name promises"):
                    check(name, data)


def test_the_message_names_both_formats():
    with pytest.raises(DecodeError, match=r"^the name promises JPEG, and it is a PNG file$"):
        check_magic("jpg", FILES["png"])
    with pytest.raises(DecodeError, match=r"^the name promises PNG, and it is no image .* starts with b'<html>no'$"):
        check_magic("png", b"<html>not found")


@given(st.binary(max_size=40), st.sampled_from(sorted(IMAGE_FIELDS)))
def test_noise_is_a_decode_error_or_passes_by_its_first_bytes(noise, field):
    try:
        check_magic(field, noise)
    except DecodeError:
        with pytest.raises(DecodeError):
            check_structure(field, noise)


@pytest.mark.parametrize("field", sorted(FILES))
def test_a_limit_of_pixels_holds_before_any_is_decoded(field):
    check_pixels(field, FILES[field], max_pixels=63)
    with pytest.raises(ImageTooLarge):
        check_structure(field, FILES[field], max_pixels=62)


@given(place=st.integers(0, 10_000), byte=st.integers(1, 255), field=st.sampled_from(["png", "jpg"]))
def test_a_changed_byte_never_makes_another_error(place, byte, field):
    """A PNG's is always found; a JPEG's in its pixels is not, and needs a digest."""
    data = bytearray(FILES[field])
    data[place % len(data)] ^= byte
    try:
        check_structure(field, data)
    except DecodeError:
        return
    assert field == "jpg"


def test_json_is_checked_as_it_is_decoded():
    for data in (b"{}", b'{"a": NaN}', b"\xef\xbb\xbf[]", b"1" * 30):
        check_json("json", data)
    for data in (b"", b"{", b"\xff", b"[" * 200_000):
        with pytest.raises(DecodeError, match=r"^meta\.json: "):
            check_json("meta.json", data)
