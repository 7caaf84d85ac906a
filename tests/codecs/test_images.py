"""Decoding images: webdataset's values, limits before pixels, and an error for every damaged file."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from images import EXTRANEOUS, FILES, encoded, photo
from PIL import Image, ImageFile
from webdataset.autodecode import ImageHandler, imagespecs

from wdskit.codecs.checks import check_image, check_image_field
from wdskit.codecs.formats import IMAGE_FIELDS
from wdskit.codecs.images import IMAGE_SPECS, decode_image, decode_index, make_mask_overlay, make_thumbnail
from wdskit.codecs.recode import recode_image
from wdskit.errors import DecodeError, ImageTooLarge

LIMIT = 10**6


def test_specs_are_webdatasets():
    assert set(IMAGE_SPECS) == set(imagespecs)
    for name, (kind, number, mode) in imagespecs.items():
        assert IMAGE_SPECS[name] == (kind, number == "float", mode.upper())


@pytest.mark.parametrize("spec", sorted(IMAGE_SPECS))
@pytest.mark.parametrize("name", sorted(FILES))
def test_values_are_webdatasets(name, spec):
    """The kind, dtype, shape and every value are compared, for all specs and formats."""
    expected = ImageHandler(spec)("x.png", FILES[name])
    result = decode_image(FILES[name], spec, max_pixels=LIMIT)
    if isinstance(expected, Image.Image):
        assert (result.mode, result.size) == (expected.mode, expected.size)
        assert np.array_equal(np.asarray(result), np.asarray(expected))
    else:
        assert type(result) is type(expected)
        assert result.dtype == expected.dtype
        assert tuple(result.shape) == tuple(expected.shape)
        assert np.array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize("error", [SystemError, MemoryError, RecursionError, KeyboardInterrupt])
def test_what_befalls_the_process_is_no_damage_of_an_image(monkeypatch, error):
    def fail(*_, **__):
        raise error

    users = [
        lambda data: decode_image(data, "rgb8", max_pixels=LIMIT),
        lambda data: recode_image(data, size=4, fmt="png", quality=90, max_pixels=LIMIT),
        lambda data: check_image(data, max_pixels=LIMIT),
        lambda data: make_thumbnail(data, side=4, max_pixels=LIMIT),
    ]
    for name in ("load", "verify", "convert", "__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image if name == "convert" else ImageFile.ImageFile, name, fail)
            reached = 0
            for use in users:
                for kind in ("bmp", "jpeg"):
                    try:
                        use(FILES[kind])
                    except error:
                        reached += 1
            assert reached


DEEP = np.array([[0, 255, 256, 1000], [32768, 40000, 65279, 65535]], dtype=np.uint16)


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray(DEEP), "PNG"),
        encoded(Image.fromarray(DEEP), "TIFF"),
        b"P5\n4 2\n65535\n" + DEEP.astype(">u2").tobytes(),
    ],
    ids=["png", "tiff", "pgm"],
)
def test_16_bit_grey_is_scaled_not_clipped(data):
    """Pillow's convert, and so webdataset, makes everything above 255 white."""
    assert np.array_equal(decode_image(data, "l8", max_pixels=LIMIT), DEEP >> 8)
    rgb = decode_image(data, "rgb", max_pixels=LIMIT)
    assert np.array_equal(rgb[..., 1], (DEEP >> 8).astype(np.float32) / np.float32(255))
    assert np.array_equal(np.asarray(decode_image(data, "pill", max_pixels=LIMIT)), DEEP >> 8)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("spec", ["rgb8", "l8", "rgba8", "torchrgb", "pil"])
def test_pixels_without_an_8_bit_form_are_refused_not_clipped(dtype, spec):
    """Pillow's convert clips them, so that a picture of 0..1 is black."""
    data = encoded(
        Image.fromarray(np.linspace(0, 1 if dtype == np.float32 else 2**30, 600).reshape(20, 30).astype(dtype)), "TIFF"
    )
    way = "32-bit numbers.*Decode it as `index`" if dtype == np.int32 else "floating-point.*your own function"
    with pytest.raises(DecodeError, match=way):
        decode_image(data, spec, max_pixels=LIMIT)
    check_image_field("tiff", data, "decode")  # the file is sound
    with pytest.raises(DecodeError):
        check_image_field("tiff", data[:-200], "decode")
    if dtype == np.int32:
        assert decode_index(data, max_pixels=LIMIT).max() == 2**30
    else:
        with pytest.raises(DecodeError, match="Decode it with your own function"):
            decode_index(data, max_pixels=LIMIT)


def test_pil_images_keep_exif_and_profile():
    exif = Image.Exif()
    exif[0x0112] = 6
    for fmt in ("JPEG", "PNG", "WEBP"):
        data = encoded(photo(), fmt, exif=exif, icc_profile=b"profile")
        image = decode_image(data, "pil", max_pixels=LIMIT)
        assert image.getexif()[0x0112] == 6
        assert image.info["icc_profile"] == b"profile"
        assert image.size == (34, 21), "orientation is not applied"


@pytest.mark.parametrize("name", sorted(EXTRANEOUS))
def test_jpeg_with_extraneous_bytes_goes_through_pillow(name):
    """Simplejpeg refuses these files; Pillow and every viewer accept them."""
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(EXTRANEOUS[name])
    result = decode_image(EXTRANEOUS[name], "rgb8", max_pixels=LIMIT)
    assert np.array_equal(result, decode_image(FILES["jpeg"], "rgb8", max_pixels=LIMIT))


# --- limits


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claims(width, height):
    """Return files that are only a header, which promises width x height pixels."""
    jpeg = FILES["jpeg"]
    frame = jpeg.index(b"\xff\xc0")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    vp8x = (width - 1 & 0xFFFFFF).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    vp8l = (width - 1 & 0x3FFF | (height - 1) << 14).to_bytes(4, "little")
    return {
        "jpeg": jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :],
        "png": b"\x89PNG\r\n\x1a\n" + chunks,
        "webp vp8x": b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + vp8x,
        "webp vp8l": b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + vp8l + b"\0" * 5,
        "webp vp8": b"RIFF\x16\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height),
        "gif": b"GIF89a"
        + struct.pack("<HHBBB", width, height, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, width, height, 0)
        + b"\x02\x00;",
        "bmp": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6),
        "ppm": b"P6\n%d %d\n255\n" % (width, height),
    }


@pytest.mark.parametrize("name", sorted(claims(1, 1)))
def test_header_beyond_the_limit_is_refused_without_decoding(name):
    data = claims(12000, 11000)[name]
    with pytest.raises(ImageTooLarge, match="12000 x 11000 = 132000000 pixels, more than max_pixels 1000000"):
        decode_image(data, "rgb8", max_pixels=LIMIT)


@pytest.mark.parametrize("name", sorted(claims(1, 1)))
def test_the_limit_itself_is_allowed(name):
    """A limit of one pixel less refuses the image. With the limit itself, only the missing data is an error."""
    data = claims(100, 50)[name]
    with pytest.raises(ImageTooLarge):
        decode_image(data, "rgb8", max_pixels=4999)
    with pytest.raises(DecodeError) as caught:
        decode_image(data, "rgb8", max_pixels=5000)
    assert not isinstance(caught.value, ImageTooLarge)


# --- damage


@pytest.mark.parametrize("spec", ["rgb8", "l8", "pil"])
@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "jpeg grey", "jpeg cmyk", "png", "png palette"])
def test_no_prefix_of_a_jpeg_or_png_decodes(name, spec):
    """The file is cut at every byte, the last included."""
    data = FILES[name]
    for cut in range(len(data)):
        with pytest.raises(DecodeError) as caught:
            decode_image(data[:cut], spec, max_pixels=LIMIT)
        assert str(caught.value)


def test_a_scan_that_ends_early_is_an_error_even_with_an_end_mark():
    """Pillow would fill the rest with grey."""
    for name in ("jpeg 4:4:4", "jpeg cmyk"):
        cut = FILES[name][:-100] + b"\xff\xd9"
        for spec in ("rgb8", "l8", "rgba8", "torchrgb", "pil"):
            with pytest.raises(DecodeError, match=r"not one complete JPEG image"):
                decode_image(cut, spec, max_pixels=LIMIT)
        Image.open(io.BytesIO(cut)).load()


def test_jpegs_are_strict_even_where_pillow_was_told_to_be_lenient(monkeypatch):
    """LOAD_TRUNCATED_IMAGES is a common line in training scripts."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(DecodeError):
        decode_image(FILES["jpeg"][:-40], "rgb8", max_pixels=LIMIT)


@pytest.mark.parametrize("name", sorted(FILES))
@settings(max_examples=60)
@given(data=st.data())
def test_damage_is_a_decode_error_or_an_image(name, data):
    """For any changed bytes the result is a DecodeError, or an image within the limit."""
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        result = decode_image(bytes(damaged), "rgb8", max_pixels=5000)
    except DecodeError:
        return
    except UserWarning:
        pytest.fail("a warning of Pillow's surfaced")
    assert result.dtype == np.uint8
    assert result.shape[0] * result.shape[1] <= 5000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\xd7\xcd\xc6\x9a" + bytes(40),
        b"RIFF0000WAVE" + bytes(30),
    ],
    ids=["empty", "one byte", "eps", "wmf", "wav"],
)
def test_what_is_no_image_of_ours_is_refused(data):
    """EPS would start Ghostscript."""
    with pytest.raises(DecodeError, match=r"not an image of a known format|no WebP image"):
        decode_image(data, "rgb8", max_pixels=LIMIT)


# --- names


def test_image_fields_are_webdatasets_too():
    """Otherwise wdskit would decode fields that stay bytes in webdataset."""
    assert all(ImageHandler("rgb8")(f"x.{field}", FILES["png"]) is not None for field in IMAGE_FIELDS)


# Masks over images.


def test_an_overlay_has_a_colour_for_each_number_but_0() -> None:
    numbers = np.array([[0, 1, 2], [0, 1, 255]], dtype=np.uint8)
    overlay = np.asarray(Image.open(io.BytesIO(make_mask_overlay(encoded(numbers, "PNG"), side=64, max_pixels=100))))
    assert overlay.shape == (2, 3, 4)
    assert (overlay[..., 3] > 0).tolist() == (numbers > 0).tolist()
    colours = {tuple(pixel) for row in overlay.tolist() for pixel in row}
    assert len(colours) == 4
    assert (overlay[0, 1] == overlay[1, 1]).all()


@pytest.mark.parametrize("size", [(3000, 1600), (1200, 1000), (500, 300)])
def test_a_thumbnail_of_a_large_jpeg_shows_what_the_whole_image_shows(size):
    """It is decoded at a smaller scale; the size that is reported is the image's."""
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95)
    data, found = make_thumbnail(stream.getvalue(), side=128, max_pixels=10**7)
    shown = Image.open(io.BytesIO(data))
    assert found == size
    image.thumbnail((128, 128))
    assert shown.size == image.size
    assert np.abs(np.asarray(shown, dtype=int) - np.asarray(image, dtype=int)).mean() < 3


@pytest.mark.parametrize("kind", ["zTXt", "iTXt"])
def test_a_png_with_megabytes_of_text_is_decoded(kind):
    """Pillow's own limit for a text is 1 MB. The limit for all texts of a file stays, and the message names it."""

    def png(num_bytes: int) -> bytes:
        body = b"workflow\0" + (b"\0" if kind == "zTXt" else b"\1\0\0\0") + zlib.compress(bytes(num_bytes))
        chunk = struct.pack(">I", len(body)) + kind.encode() + body
        chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
        stream = io.BytesIO()
        Image.new("RGB", (3, 2)).save(stream, "PNG")
        return stream.getvalue()[:33] + chunk + stream.getvalue()[33:]

    assert decode_image(png(5 << 20), "rgb8", max_pixels=100).shape == (2, 3, 3)
    with pytest.raises(DecodeError, match=r"Pillow cannot read this PNG image: .*MAX_TEXT_CHUNK"):
        decode_image(png(65 << 20), "rgb8", max_pixels=100)
