"""How large an image becomes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wdskit.codecs.fitting import RESIZE_MODES, Size, fit

SIDES = (1, 2, 3, 5, 8, 13, 255, 256, 257, 1000, 9999)
SIZES = (1, 2, 7, 256)


def all_fits(mode):
    for width in SIDES:
        for height in SIDES:
            for size in SIZES:
                for upscale in (False, True):
                    yield width, height, size, upscale, fit(width, height, size, mode, upscale=upscale)


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
    to = fit(width, height, size, mode, upscale=upscale)
    turned = fit(height, width, size, mode, upscale=upscale)
    assert turned == (to.top, to.left, to.part[::-1], to.size[::-1], to.canvas[::-1])
    assert min(to.size) >= 1
