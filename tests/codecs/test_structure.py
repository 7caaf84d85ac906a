"""The check that a file is one whole image, without decoding it."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wdskit.codecs import structure
from wdskit.codecs.checks import check_image
from wdskit.errors import DecodeError, ImageTooLarge


def encoded(fmt, mode="RGB", *, size=(9, 7), **options):
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], len(mode))
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, fmt, **options)
    return stream.getvalue()


def with_preview(jpeg):
    """Return a JPEG whose APP1 segment has a whole JPEG, as from a camera."""
    inner = b"Exif\0\0" + encoded("JPEG", size=(2, 2))
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(inner) + 2) + inner + jpeg[2:]


JPEGS = {
    "baseline": encoded("JPEG"),
    "grey": encoded("JPEG", "L"),
    "progressive": encoded("JPEG", progressive=True, size=(20, 20)),
    "restart marks": encoded("JPEG", restart_marker_blocks=1, size=(33, 33)),
    "preview inside": with_preview(encoded("JPEG")),
    "padded marker": encoded("JPEG").replace(b"\xff\xda", b"\xff\xff\xff\xda", 1),
    "marker without a segment": encoded("JPEG")[:-2] + b"\xff\x01\xff\xd9",
}
PNGS = {
    "rgb": encoded("PNG"),
    "grey": encoded("PNG", "L"),
    "alpha": encoded("PNG", "RGBA"),
    "one pixel": encoded("PNG", size=(1, 1)),
}
OTHERS = {fmt: encoded(fmt) for fmt in ("WEBP", "GIF", "BMP", "TIFF", "PPM")}
ALL = {**JPEGS, **PNGS, **OTHERS}


@pytest.mark.parametrize("name", sorted(ALL))
def test_whole_files_pass_also_with_bytes_after_their_end(name):
    check_image(ALL[name])
    check_image(ALL[name] + b"appended \xff\xd8 by a phone")
    check_image(bytearray(ALL[name]))
    check_image(memoryview(ALL[name]))


@pytest.mark.parametrize("name", [*sorted(JPEGS | PNGS), "WEBP"])
def test_no_prefix_of_a_jpeg_png_or_webp_passes(name):
    """The file is cut at every byte, the first and the last included."""
    data = ALL[name]
    for cut in range(len(data)):
        with pytest.raises(DecodeError):
            check_image(data[:cut])


@pytest.mark.parametrize("name", sorted(PNGS))
def test_any_changed_byte_of_a_png_is_found(name):
    for place in range(len(PNGS[name])):
        damaged = bytearray(PNGS[name])
        damaged[place] ^= 0x10
        with pytest.raises(DecodeError):
            check_image(bytes(damaged))


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_limit_is_exact(name):
    with Image.open(io.BytesIO(ALL[name])) as image:
        num_pixels = image.width * image.height
    check_image(ALL[name], max_pixels=num_pixels)
    with pytest.raises(ImageTooLarge, match=f"= {num_pixels} pixels, more than max_pixels {num_pixels - 1}"):
        check_image(ALL[name], max_pixels=num_pixels - 1)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


HEADER = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
START, DATA, END = b"\x89PNG\r\n\x1a\n", chunk(b"IDAT", zlib.compress(b"\0\0")), chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (START + DATA + END, r"PNG, byte 8: b'IDAT' of \d+ bytes in place of IHDR of 13 bytes"),
        (START + HEADER + DATA[:-1] + b"?" + END, r"PNG, byte 33: the checksum of chunk b'IDAT' does not match"),
        (START + HEADER + DATA, r"PNG, byte \d+: the file stops at byte \d+, before its end chunk"),
        (b"\xff\xd8\xff\xda\0\x04ab", r"JPEG, byte 2: pixel data before any frame header"),
        (b"\xff\xd8\xff\xd9", r"JPEG, byte 2: the end mark comes before any pixel data"),
        (b"\xff\xd8\xff\xe0\xff\xffab", r"JPEG, byte 2: the file stops at byte 8, inside segment E0"),
        (b"\xff\xd8\xff\xc0\0\x04abcdefgh", r"JPEG, byte 2: a frame header of 4 bytes"),
        (b"\xff\xd8\xff\xd8", r"JPEG, byte 2: another image starts"),
        (b"<html>not found</html>", r"not an image of a known format; it starts with b'<html>no' \(22 bytes in all\)"),
    ],
)
def test_errors_say_what_and_at_which_byte(data, message):
    with pytest.raises(DecodeError, match=message):
        check_image(data)


@given(st.data(), st.integers(0, 9))
def test_the_next_marker_is_the_one_that_a_regular_expression_finds(data, at):
    codes = st.sampled_from([0x00, 0xFF, 0xD0, 0xD9, 0x01, 0x7F])
    noise = bytes(data.draw(st.lists(codes, max_size=40)))
    pad = data.draw(st.sampled_from([0, 500, 512, 66_000]))
    whole = bytes(pad) + noise
    found = structure._MARKER.search(whole, at)
    assert structure._find_marker(memoryview(whole), at) == (found and found.start())


@given(
    st.binary(max_size=300), st.sampled_from([b"", b"\xff\xd8", START, START + HEADER, b"RIFF", b"GIF89a", b"II*\0"])
)
def test_noise_is_a_decode_error(noise, start):
    with pytest.raises(DecodeError):
        check_image(start + noise)
