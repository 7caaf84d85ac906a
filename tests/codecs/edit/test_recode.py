"""Recode an image file: every kind of file, and the metadata that is kept."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from images import EXTRANEOUS, FILES, encoded, palette_image, photo, pixels
from PIL import Image, ImageCms

from wdskit.codecs.edit import recode as recode_module
from wdskit.codecs.edit.encode import MAX_SIDE, encode_image
from wdskit.codecs.edit.exif import orientation_of
from wdskit.codecs.edit.recode import Recoding
from wdskit.codecs.images import decode_image
from wdskit.errors import DecodeError, ImageTooLarge

FORMATS = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
TRANSPARENT = {
    "png alpha",
    "png grey alpha",
    "png palette, one transparent",
    "png colour key",
    "webp alpha",
}
GREY = {"jpeg grey", "png grey", "png grey alpha", "png one bit", "pgm", "pbm"}
REFUSED = {"gif animated": "decode: it is animated", "tiff float": "decode: pixels of Pillow's mode F"}
KINDS = {**FILES, "tiff float": encoded(np.linspace(-9, 300, 35, dtype=np.float32).reshape(5, 7), "TIFF")}
OWN = {"jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def opened(data):
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def oriented(value):
    made = Image.Exif()
    made[0x010F], made[0x0112] = "a camera", value
    return made


# Every kind of file.


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_file_becomes_each_format_with_its_pixels(kind, fmt):
    data = KINDS[kind]
    recode = Recoding(format=fmt, quality=100, background=(255, 255, 255))
    if kind in REFUSED:
        with pytest.raises(DecodeError, match=REFUSED[kind]):
            recode.apply(data)
        return
    made, name, _ = recode.apply(data)
    assert name == FORMATS[fmt]
    if kind.split()[0] in OWN and OWN[kind.split()[0]] == name:
        assert made == data
        return
    image = opened(made)
    assert image.format == name
    has_alpha = kind in TRANSPARENT and fmt != "jpg"
    grey = kind in GREY and fmt != "webp"
    assert image.mode == {(0, 0): "RGB", (0, 1): "RGBA", (1, 0): "L", (1, 1): "LA"}[grey, has_alpha]
    before = opened(data).convert("RGBA")
    if kind in TRANSPARENT and fmt == "jpg":
        before = Image.alpha_composite(Image.new("RGBA", before.size, "white"), before)
    worst = np.abs(np.asarray(before).astype(int) - np.asarray(image.convert("RGBA")))
    if fmt == "png":
        assert worst.max() == 0
    elif fmt == "webp" and has_alpha:
        assert worst[..., 3].max() == 0
    else:
        assert worst[..., 3].max() == 0
        assert worst.mean() < (45 if kind in NOISE else 12)


NOISE = {kind for kind in FILES if kind.split()[0] in {"png", "bmp", "tiff", "ppm", "pgm", "pbm"}} | {
    "webp alpha",
    "jpeg 4:2:2",
}


@pytest.mark.parametrize("kind", sorted(FILES))
def test_an_image_that_is_right_passes_through_byte_for_byte(kind):
    for recode in (
        Recoding(size=34, quality=10),
        Recoding(size=40, mode="crop"),
        Recoding(size=40, mode="longer", orient=True),
        Recoding(orient=True),
    ):
        assert recode.apply(FILES[kind])[0] is FILES[kind]


@pytest.mark.parametrize("kind", sorted(EXTRANEOUS))
def test_a_jpeg_with_bytes_that_do_not_belong_is_made_by_pillow(kind):
    """Simplejpeg refuses it, the readers do not."""
    made, *_ = Recoding(size=10).apply(EXTRANEOUS[kind])
    assert opened(made).size == (16, 10)


@pytest.mark.parametrize(("kind", "name"), [("bmp", "BMP"), ("tiff", "TIFF"), ("ppm", "PPM")])
def test_a_format_that_is_not_written_needs_a_name(kind, name):
    with pytest.raises(DecodeError, match=f"encode: a {name} cannot be written. Choose another format with --format"):
        Recoding(size=2).apply(FILES[kind])


@pytest.mark.parametrize("mode", ["shorter", "longer", "crop", "pad"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (90, 1), (37, 41), (9, 4000), (60, 60)])
def test_the_size_is_the_one_asked_for(mode, shape):
    for fmt in ("jpg", "png", "webp"):
        made, *_ = Recoding(size=13, mode=mode, format=fmt).apply(encoded(pixels(*shape, 3), "PNG"))
        height, width = opened(made).size[::-1]
        if mode == "pad":
            assert (height, width) == (13, 13)
        elif mode == "crop":
            assert (height, width) == tuple(min(13, side) for side in shape)
        else:
            side = (min if mode == "shorter" else max)(height, width)
            assert side == min(13, (min if mode == "shorter" else max)(shape))


# Metadata.


def file_with(fmt, image=None, **metadata):
    return encoded(photo(40, 60) if image is None else image, fmt, **metadata)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP"])
def test_without_orient_the_whole_exif_block_stays(source, target):
    data = file_with(source, exif=oriented(6))
    made, *_ = Recoding(size=20, format=target).apply(data)
    assert opened(made).size == (30, 20)
    assert dict(opened(made).getexif()) == {0x010F: "a camera", 0x0112: 6}


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("value", range(1, 9))
def test_orient_turns_the_pixels_and_removes_the_tag_alone(source, target, value):
    from PIL import ImageOps

    made, *_ = Recoding(size=20, format=target, orient=True, quality=100).apply(file_with(source, exif=oriented(value)))
    image = opened(made)
    assert dict(image.getexif()) == {0x010F: "a camera"}
    upright = ImageOps.exif_transpose(opened(file_with("PNG", exif=oriented(value))))
    expected = upright.resize(image.size, Image.Resampling.BICUBIC)
    assert image.size == ((30, 20) if value < 5 else (20, 30))
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean() < 12


def test_orient_alone_turns_an_image_in_its_size_and_format():
    made, name, _ = Recoding(orient=True).apply(file_with("PNG", exif=oriented(6)))
    assert name == "PNG"
    assert np.array_equal(np.asarray(opened(made)), np.rot90(photo(40, 60), -1))
    assert 0x0112 not in opened(made).getexif()


def test_a_pngs_orientation_behind_its_pixels_is_seen_too():
    data = file_with("PNG", exif=oriented(3))
    start = data.index(b"eXIf") - 4
    length = 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[start + length : -12] + data[start : start + length] + data[-12:]
    made, *_ = Recoding(orient=True).apply(moved)
    assert np.array_equal(np.asarray(opened(made)), photo(40, 60)[::-1, ::-1])


def test_a_tiff_comes_upright_whatever_is_asked():
    """Pillow rotates a TIFF while it decodes."""
    data = file_with("TIFF", exif=oriented(6))
    for orient in (False, True):
        made, *_ = Recoding(format="png", orient=orient).apply(data)
        assert np.array_equal(np.asarray(opened(made)), np.rot90(photo(40, 60), -1))
        assert 0x0112 not in opened(made).getexif()


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("profile", [SRGB, SRGB + bytes(200_000)], ids=["small", "of several segments"])
def test_the_colour_profile_of_rgb_stays(source, target, profile):
    made, *_ = Recoding(size=20, format=target).apply(file_with(source, icc_profile=profile))
    assert opened(made).info["icc_profile"] == profile


def test_an_exif_block_larger_than_a_segment_is_written_in_several():
    block = oriented(6).tobytes() + bytes(150_000)
    made, *_ = Recoding(format="jpg").apply(file_with("WEBP", exif=block))
    assert opened(made).info["exif"].replace(b"Exif\0\0", b"")[: len(block) - 6] == block[6:]
    assert orientation_of(opened(made).info["exif"][6:]) == 6


def test_grey_with_a_profile_becomes_srgb_where_it_has_to_become_rgb():
    grey = _grey_profile()
    data = encoded(photo(40, 60)[..., 0], "PNG", icc_profile=grey)
    kept, *_ = Recoding(size=20).apply(data)
    assert opened(kept).info["icc_profile"] == grey
    assert opened(kept).mode == "L"
    made, *_ = Recoding(size=20, format="webp").apply(data)
    assert "icc_profile" not in opened(made).info
    plain, *_ = Recoding(size=20, format="webp").apply(encoded(photo(40, 60)[..., 0], "PNG"))
    assert np.asarray(opened(made)).astype(int).mean() > 10 + np.asarray(opened(plain)).mean()  # the profile is linear


def _grey_profile():
    """Return a minimal grey profile (ICC.1:2022, 8.4). It is linear, so that a conversion is visible."""

    def tag(kind, body):
        return kind + bytes(4) + body + bytes(-(8 + len(body)) % 4)

    parts = [
        (b"desc", tag(b"desc", (5).to_bytes(4, "big") + b"grey\0" + bytes(79))),
        (b"wtpt", tag(b"XYZ ", b"".join(int(v * 65536).to_bytes(4, "big") for v in (0.9642, 1.0, 0.8249)))),
        (b"kTRC", tag(b"curv", bytes(4))),
        (b"cprt", tag(b"text", b"none\0")),
    ]
    at, table, bodies = 128 + 4 + 12 * len(parts), b"", b""
    for name, body in parts:
        table += name + (at + len(bodies)).to_bytes(4, "big") + len(body).to_bytes(4, "big")
        bodies += body
    head = bytearray(128)
    head[:4] = (at + len(bodies)).to_bytes(4, "big")
    head[8:12], head[12:16], head[16:20], head[20:24] = b"\x02\x40\0\0", b"mntr", b"GRAY", b"XYZ "
    head[36:40], head[68:80] = b"acsp", parts[1][1][8:20]
    return bytes(head) + len(parts).to_bytes(4, "big") + table + bodies


def test_a_profile_of_other_colours_is_an_error_where_it_would_be_used():
    data = encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG", icc_profile=LAB)
    with pytest.raises(DecodeError, match="its colour profile is for b'Lab ', but its pixels are CMYK"):
        Recoding(size=5).apply(data)


def test_a_damaged_profile_is_an_error_where_it_would_be_used():
    data = encoded(photo()[..., 0], "PNG", icc_profile=_grey_profile()[:128] + bytes(40))
    with pytest.raises(DecodeError, match="convert: its colour profile cannot be used"):
        Recoding(format="webp").apply(data)
    assert Recoding(size=5).apply(data)[1] == "PNG"


def test_nothing_of_the_machine_or_the_time_is_in_a_file():
    for fmt in FORMATS:
        assert Recoding(format=fmt, size=9).apply(FILES["bmp"]) == Recoding(format=fmt, size=9).apply(FILES["bmp"])
    made = opened(Recoding(format="png", size=3).apply(FILES["bmp"])[0])
    assert set(made.info) == set()


# Pixels of other kinds.


def test_cmyk_becomes_rgb_as_pillow_makes_it():
    data = encoded(Image.fromarray(photo(40, 60)).convert("CMYK"), "JPEG", quality=100)
    made, *_ = Recoding(format="png").apply(data)
    assert np.array_equal(np.asarray(opened(made)), np.asarray(opened(data).convert("RGB")))


def test_16_bits_of_grey_are_kept_in_png_and_their_upper_8_elsewhere():
    deep = photo(40, 60)[..., 0].astype(np.uint16) * 256 + 77
    for data in (encoded(deep, "PNG"), encoded(deep, "TIFF"), pgm_16(deep)):
        made = opened(Recoding(format="png", size=99, mode="pad").apply(data)[0])
        assert made.mode == "I;16"
        assert np.array_equal(np.asarray(made)[29:69, 19:79], deep)
        for fmt in ("jpg", "webp"):
            made = opened(Recoding(format=fmt, quality=100).apply(data)[0])
            assert np.abs(np.asarray(made.convert("L")).astype(int) - (deep >> 8)).max() <= 12


def pgm_16(deep):
    return b"P5 %d %d 65535\n" % deep.shape[::-1] + deep.astype(">u2").tobytes()


def png_16(channels):
    """Return a PNG with 16 bits per channel, which Pillow cannot write."""
    rows = b"".join(b"\0" + pixels(7, 2 * channels, seed=n).tobytes() for n in range(5))
    head = b"".join(n.to_bytes(4, "big") for n in (7, 5)) + bytes((16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0))
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big") for kind, body in chunks
    )


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_16_bits_of_colour_are_refused_in_png_and_their_upper_8_kept_elsewhere(channels):
    data = png_16(channels)
    assert Recoding(size=99).apply(data)[0] is data
    with pytest.raises(DecodeError, match=r"^convert: colour with more than 8 bits per channel cannot be kept"):
        Recoding(size=3).apply(data)
    made, *_ = Recoding(size=3, format="webp").apply(data)
    assert opened(made).size == (4, 3)
    ppm = b"P6 7 5 65535\n" + pixels(5, 42).tobytes()
    with pytest.raises(DecodeError, match="more than 8 bits per channel"):
        Recoding(format="png").apply(ppm)
    assert Recoding(format="jpg").apply(ppm)[1] == "JPEG"


def test_16_bits_of_grey_with_a_transparent_one_are_refused():
    deep = Image.fromarray(np.full((5, 7), 700, np.uint16))
    data = encoded(deep, "PNG", transparency=700)
    with pytest.raises(DecodeError, match="16-bit grey with a transparent value"):
        Recoding(size=3).apply(data)


def test_a_jpg_of_something_transparent_is_refused_or_composed_on_the_named_colour():
    for kind in sorted(TRANSPARENT):
        with pytest.raises(DecodeError, match=r"^convert: it is transparent.*--background$"):
            Recoding(format="jpg").apply(FILES[kind])
    half = np.full((8, 8, 4), (200, 100, 0, 128), np.uint8)
    made, *_ = Recoding(format="jpg", quality=100, background=(0, 0, 255)).apply(encoded(half, "PNG"))
    assert np.abs(np.asarray(opened(made)).astype(int) - (100, 50, 127)).max() <= 4
    grey, *_ = Recoding(format="jpg", quality=100, background=(255, 255, 255)).apply(encoded(half[..., 2:], "PNG"))
    assert opened(grey).mode == "L"
    assert np.abs(np.asarray(opened(grey)).astype(int) - 127).max() <= 2


def test_an_alpha_channel_that_hides_nothing_needs_no_background():
    opaque = np.dstack([photo(), np.full((21, 34), 255, np.uint8)])
    made, *_ = Recoding(format="jpg").apply(encoded(opaque, "PNG"))
    assert opened(made).mode == "RGB"


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG", "TIFF"])
def test_what_is_animated_is_refused_where_it_would_change(fmt):
    first = Image.fromarray(photo())
    data = encoded(first, fmt, save_all=True, append_images=[first.transpose(Image.Transpose.ROTATE_180)])
    assert Recoding(size=40).apply(data)[0] is data
    with pytest.raises(DecodeError, match=rf"^decode: it is animated \({fmt}\); only still images are supported"):
        Recoding(size=5, format="jpg").apply(data)


def test_a_palette_becomes_colours_when_it_is_resized():
    made, *_ = Recoding(size=2).apply(encoded(palette_image(transparency=1), "PNG", transparency=1))
    assert opened(made).mode == "RGBA"


# Bad and hostile files.


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "jpeg progressive", "png palette", "gif"])
def test_a_file_that_is_cut_is_an_error_of_its_stage(kind):
    for share in (0.3, 0.6, 0.9):
        data = FILES[kind][: int(len(FILES[kind]) * share)]
        with pytest.raises(DecodeError, match=r"^decode: "):
            Recoding(size=2, mode="pad", format="jpg", background=(0, 0, 0)).apply(data)


def test_more_pixels_than_allowed_are_refused_before_any_is_decoded(monkeypatch):
    monkeypatch.setattr(recode_module, "decode_original", lambda *_args, **_kinds: pytest.fail("it was decoded"))
    head = b"IHDR" + b"\x00\x01\x00\x00" * 2 + FILES["png"][24:29]
    bomb = FILES["png"][:12] + head + zlib.crc32(head).to_bytes(4, "big") + FILES["png"][33:]
    with pytest.raises(ImageTooLarge, match=r"^decode: .*65536 x 65536"):
        Recoding(size=2, max_pixels=10**6).apply(bomb)
    for mode in ("shorter", "pad"):
        with pytest.raises(ImageTooLarge, match=r"^resize: .*more than max_pixels 1000000"):
            Recoding(size=5000, mode=mode, upscale=True, max_pixels=10**6).apply(FILES["png"])


def test_a_side_that_the_format_does_not_hold_is_refused():
    wide = encoded(np.zeros((1, 20_000), np.uint8), "PNG")
    with pytest.raises(DecodeError, match=r"^encode: 20000 x 1 pixels; a webp has at most 16383 along a side"):
        Recoding(format="webp").apply(wide)
    assert opened(Recoding(format="jpg").apply(wide)[0]).size == (20_000, 1)
    for fmt in ("jpg", "webp"):
        longest = np.zeros((MAX_SIDE[fmt], 1, 3), np.uint8)
        assert opened(encode_image(longest, fmt, quality=50)).size == (1, MAX_SIDE[fmt])


def test_quality_is_that_of_the_file():
    sizes = {
        fmt: [len(Recoding(format=fmt, quality=q).apply(FILES["bmp"])[0]) for q in (5, 50, 100)] for fmt in FORMATS
    }
    assert sizes["jpg"] == sorted(set(sizes["jpg"]))
    assert sizes["webp"] == sorted(set(sizes["webp"]))
    assert len(set(sizes["png"])) == 1


def test_a_jpg_has_the_pixels_that_its_decoder_gives_back():
    """The inserted segments do not change the decoded pixels."""
    data = file_with("PNG", exif=oriented(6), icc_profile=SRGB)
    plain = file_with("PNG")
    a, b = (Recoding(format="jpg", quality=90).apply(each)[0] for each in (data, plain))
    assert np.array_equal(decode_image(a, "rgb8", max_pixels=9999), decode_image(b, "rgb8", max_pixels=9999))


@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_tiff_moves_as_the_png_of_its_pixels(orientation, size):
    """Pillow turns a TIFF when it decodes, and removes the orientation."""
    tags = Image.Exif()
    tags[274] = orientation
    stored = pixels(40, 60, 3)
    tiff, png = (encoded(stored, name, exif=tags) for name in ("TIFF", "PNG"))
    made, expected = (Recoding(size=size, format="png", orient=True).apply(data) for data in (tiff, png))
    assert made.geometry.move == expected.geometry.move
    assert made.geometry.upright == expected.geometry.upright
    assert made.geometry.orientation == orientation
    found, wanted = (np.asarray(opened(each.data).convert("RGB")).astype(int) for each in (made, expected))
    assert np.abs(found - wanted).max() <= (3 if size else 0)
    same = Recoding(size=100).apply(tiff)
    assert same.data == tiff
    assert same.geometry.is_same
    assert same.geometry.orientation == orientation
    assert same.geometry.move.before == (60, 40)
