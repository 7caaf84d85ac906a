"""Sizes of resized images, and their pixels compared with Pillow's."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import encoded, photo, pixels
from PIL import Image, ImageOps

from wdskit.codecs.edit import resize
from wdskit.codecs.edit.recode import decode_original, open_original
from wdskit.codecs.edit.resize import RESIZE_MODES, ResizePlan, Size, choose_step, pad, plan_resize, resize_part, turn

SIZES = [(1, 1), (1, 50), (50, 1), (2, 3), (33, 47), (64, 64), (101, 7), (3, 300), (97, 130)]
LEVELS = 2
"""Largest difference between torch's and Pillow's bicubic, on smooth images. For noise one pass differs by 1, but two
passes clip the values between them, in another order."""


def smooth(height, width, channels=3, *, scale=1):
    """Return an image of waves without edges."""
    rows, columns = np.mgrid[0:height, 0:width] / scale
    waves = [127 + 120 * np.sin(rows / (9 + n)) * np.cos(columns / (7 + 2 * n)) for n in range(channels)]
    array = np.stack(waves, axis=-1).astype(np.uint8)
    return array[..., 0] if channels == 1 else array


def whole(array, size, mode="shorter", *, upscale=False):
    return plan_resize(array.shape[1], array.shape[0], size, mode, upscale=upscale)


def by_pillow(array, to, resampling=Image.Resampling.BICUBIC):
    box = (to.left, to.top, to.left + to.part.width, to.top + to.part.height)
    return np.asarray(Image.fromarray(array).crop(box).resize(to.size, resampling))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_pixels_are_those_of_pillows_bicubic(mode, channels):
    """The sizes are smaller and larger, one pixel wide or high, odd, and of extreme shapes."""
    for height, width in SIZES:
        array = smooth(height, width, channels)
        for size in (1, 2, 17, 40):
            to = whole(array, size, mode, upscale=True)
            if max(to.size) > 2000:
                continue
            made = resize_part(array, to, 1)
            assert made.dtype == np.uint8
            assert made.shape == (to.size.height, to.size.width, *array.shape[2:])
            assert np.abs(made.astype(int) - by_pillow(array, to)).max() <= LEVELS


def test_pixels_are_near_those_of_lanczos():
    """An encoder at q95 changes more (41 dB)."""
    array = smooth(300, 400)
    to = whole(array, 128)
    error = resize_part(array, to, 1).astype(float) - by_pillow(array, to, Image.Resampling.LANCZOS)
    assert 10 * np.log10(255**2 / np.mean(error**2)) > 50


def test_16_bits_of_grey_keep_their_range():
    array = (smooth(40, 60, 1).astype(np.uint16)) * 257 + 3
    made = resize_part(array, whole(array, 20), 1)
    assert made.dtype == np.uint16
    assert np.abs(made.astype(int) - by_pillow(array, whole(array, 20))).max() == 0
    assert len(np.unique(made >> 8)) < len(np.unique(made))


def test_what_is_transparent_does_not_colour_its_neighbours():
    array = np.zeros((40, 40, 4), np.uint8)
    array[:, :20] = (0, 200, 0, 255)
    array[:, 20:] = (255, 0, 0, 0)
    made = resize_part(array, whole(array, 9), 1)
    assert made[made[..., 3] > 0][:, 0].max() == 0


@pytest.mark.parametrize("step", [1, 2, 4, 8])
@pytest.mark.parametrize("mode", ["shorter", "crop"])
def test_a_jpeg_at_a_smaller_scale_gives_the_same_image(step, mode):
    """Sides are not a multiple of the scale, so that the last pixels reach beyond the image."""
    for height, width in ((400, 600), (397, 611)):
        array = smooth(height, width, scale=2 * step)
        data = encoded(array, "JPEG", quality=98, subsampling=0)
        size = min(height, width) // (2 * step + 1)
        to = whole(array, size, mode)
        assert choose_step(to) == step
        decoded, _, taken = decode_original(open_original(data, max_pixels=10**6), step=step, max_pixels=10**6)
        assert taken == step
        made, reference = resize_part(decoded, to, step), by_pillow(array, to)
        error = made.astype(float) - reference
        assert 10 * np.log10(255**2 / np.mean(error**2)) > (42 if mode == "shorter" else 32)


def test_a_smaller_scale_is_taken_only_where_twice_the_size_is_left():
    steps = {
        reduction: choose_step(ResizePlan(0, 0, Size(reduction * 10, 10 * reduction), Size(10, 10), Size(10, 10)))
        for reduction in range(1, 40)
    }
    assert all(reduction >= 2 * step or step == 1 for reduction, step in steps.items())
    assert [min(reduction for reduction in steps if steps[reduction] == step) for step in (1, 2, 4, 8)] == [1, 4, 8, 16]


@pytest.mark.parametrize("array", [pixels(5, 7), pixels(5, 7, 2), pixels(5, 7, 3), pixels(5, 7, 4)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_pillow_turns_it(array, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.open(io.BytesIO(encoded(array, "PNG", exif=exif)))
    assert np.array_equal(turn(array, orientation), np.asarray(ImageOps.exif_transpose(image)))


@pytest.mark.parametrize(
    ("array", "colour", "expected"),
    [
        (pixels(2, 3), None, 0),
        (pixels(2, 3), (255, 0, 0), 76),
        (pixels(2, 3, 2), None, (0, 0)),
        (pixels(2, 3, 2), (255, 0, 0), (76, 255)),
        (pixels(2, 3, 3), None, (0, 0, 0)),
        (pixels(2, 3, 3), (1, 2, 3), (1, 2, 3)),
        (pixels(2, 3, 4), None, (0, 0, 0, 0)),
        (pixels(2, 3, 4), (1, 2, 3), (1, 2, 3, 255)),
        (pixels(2, 3).astype(np.uint16), (255, 255, 255), 65535),
    ],
)
def test_padding_stands_on_both_sides_in_its_colour(array, colour, expected):
    made = pad(array, Size(6, 5), colour)
    assert np.array_equal(made[1:3, 1:4], array)
    made[1:3, 1:4] = expected
    assert (made == np.array(expected, made.dtype)).all()
    assert pad(array, Size(3, 2), colour) is array


def test_a_mutant_without_antialiasing_is_told_apart(monkeypatch):
    def nearest(part, size, scales):
        return np.asarray(Image.fromarray(part).resize(size, Image.Resampling.NEAREST))

    monkeypatch.setattr(resize, "_by_torch", nearest)
    array = photo(97, 130)
    assert np.abs(resize_part(array, whole(array, 17), 1).astype(int) - by_pillow(array, whole(array, 17))).max() > 20


# Sizes.

FIT_SIDES = (1, 2, 3, 5, 8, 13, 255, 256, 257, 1000, 9999)
FIT_SIZES = (1, 2, 7, 256)


def all_fits(mode):
    for width in FIT_SIDES:
        for height in FIT_SIDES:
            for size in FIT_SIZES:
                for upscale in (False, True):
                    yield width, height, size, upscale, plan_resize(width, height, size, mode, upscale=upscale)


@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_without_upscale_no_pixel_is_enlarged_and_what_is_small_keeps_its_pixels(mode):
    for width, height, size, upscale, to in all_fits(mode):
        if not upscale:
            assert to.size.width <= to.part.width
            assert to.size.height <= to.part.height
            if max(width, height) <= size:
                assert to.size == to.part == (width, height)


@pytest.mark.parametrize("mode", RESIZE_MODES)
def test_the_part_lies_in_the_middle_of_the_image(mode):
    for width, height, _, _, to in all_fits(mode):
        for start, part, whole in ((to.left, to.part.width, width), (to.top, to.part.height, height)):
            assert 0 <= start <= whole - part
            assert abs(2 * start + part - whole) <= 1
        assert to.size.width <= to.canvas.width
        assert to.size.height <= to.canvas.height


@pytest.mark.parametrize(("mode", "chosen"), [("shorter", min), ("longer", max)])
def test_the_named_side_becomes_the_size_and_the_other_follows(mode, chosen):
    for width, height, size, upscale, to in all_fits(mode):
        assert to.part == (width, height)
        assert to.canvas == to.size
        side = chosen(width, height)
        if not upscale and side <= size:
            assert to.size == (width, height)
            continue
        assert chosen(to.size) == size
        for now, was in zip(to.size, (width, height), strict=True):
            assert abs(now - Fraction(was * size, side)) <= Fraction(1, 2) or now == 1


def test_a_crop_is_a_square_where_the_image_is_large_enough():
    for width, height, size, upscale, to in all_fits("crop"):
        side = size if upscale else min(size, width, height)
        assert to.canvas == to.size
        if upscale or min(width, height) > size:
            assert to.size == (side, side)
            assert to.part == (min(width, height),) * 2
        else:
            assert to.size == to.part == (min(width, size), min(height, size))


def test_padding_always_makes_a_square_of_the_size_or_of_what_is_larger():
    for width, height, size, upscale, to in all_fits("pad"):
        assert to.canvas == Size(size, size)
        assert to.part == (width, height)
        assert (max(to.size) == size) == (upscale or max(width, height) >= size)


@given(
    st.integers(1, 70_000),
    st.integers(1, 70_000),
    st.integers(1, 5000),
    st.sampled_from(RESIZE_MODES),
    st.booleans(),
)
def test_a_mirrored_or_turned_image_fits_alike(width, height, size, mode, upscale):
    to = plan_resize(width, height, size, mode, upscale=upscale)
    turned = plan_resize(height, width, size, mode, upscale=upscale)
    assert turned == (to.top, to.left, to.part[::-1], to.size[::-1], to.canvas[::-1])
    assert min(to.size) >= 1
