"""The place of wanted pixels in an image that was decoded at a smaller scale."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from images import pixels

from wdskit.codecs.images import STEPS
from wdskit.stages.images import geometry
from wdskit.stages.images.jpeg_crop import (
    Axis,
    DecodedImage,
    WantedPart,
    choose_scale,
    find_grid,
    select_part,
    select_scaled_part,
)

SHIFT = 1 / 16  # of a decoded pixel: the largest allowed shift of a result


def crop_axis(low, high, size):
    return Axis(low, high, size, 0, size)


def middle_axis(side, total, size):
    return Axis(0, side, total, geometry.middle(total, size), size)


def check_grid(axis, step):
    """Check that each result has its place in the whole image; return whether there is a grid."""
    grid = find_grid(axis, step)
    if grid is None:
        return False
    for number in (0, axis.size - 1):
        place = grid.start + (grid.first + number + 0.5) * grid.pitch
        wanted = axis.low + (axis.skip + number + 0.5) * (axis.high - axis.low) / axis.total
        assert abs(place * step - wanted) <= step * SHIFT + 1e-6
    assert 0 <= grid.first <= 64
    assert math.floor((grid.stop - grid.start) * (1 + 1e-12) / grid.pitch) >= grid.first + axis.size
    assert grid.stop <= math.ceil(axis.high / step) + 1
    return True


@pytest.mark.parametrize("step", STEPS)
def test_results_stand_in_their_places_for_every_crop_of_a_side(step):
    for size, low in product((1, 2, 3, 5), range(40)):
        for high in range(low + step * size, 80):
            found = check_grid(crop_axis(low, high, size), step)
            assert found or low % step, "a crop that starts at a pixel has a grid"


def test_nearly_every_crop_has_a_grid():
    """Otherwise large photographs would be decoded whole. Crops without a grid are hardly larger than the result."""
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(2000):
        top, left, height, width = geometry.draw_crop(rng, 1200, 1600, (0.08, 1), (3 / 4, 4 / 3))
        step, _ = choose_scale(WantedPart(crop_axis(top, top + height, 224), crop_axis(left, left + width, 224)))
        steps.append((min(height, width) >= 448, step > 1))
    assert not any(scaled and not covers for covers, scaled in steps)
    assert sum(scaled for _, scaled in steps) > 0.9 * sum(covers for covers, _ in steps)


@pytest.mark.parametrize("step", STEPS)
def test_results_stand_in_their_places_for_every_middle_of_a_side(step):
    for size, total in product(range(1, 12), range(1, 12)):
        if total >= size:
            assert all(check_grid(middle_axis(side, total, size), step) for side in range(step * total, 8 * total + 9))


@given(st.data())
def test_a_grid_is_right_or_none(data):
    step = data.draw(st.sampled_from(STEPS))
    total = data.draw(st.integers(1, 700))
    low = data.draw(st.integers(0, 5000))
    high = low + data.draw(st.integers(step * total, 20 * total + 100))
    skip = data.draw(st.integers(0, total - 1))
    check_grid(Axis(low, high, total, skip, data.draw(st.integers(1, total - skip))), step)


def test_the_largest_step_that_does_not_enlarge_is_chosen():
    for side, size in product(range(8, 140), range(4, 12)):
        wanted = WantedPart(crop_axis(0, side, size), crop_axis(0, 2 * side, size))
        step, grids = choose_scale(wanted)
        assert step == max([step for step in (1, *STEPS) if step * size <= side], default=1)
        assert (grids is None) == (step == 1)


def test_an_enlarged_side_and_a_padded_one_need_the_whole_image():
    large = crop_axis(0, 800, 100)
    assert choose_scale(WantedPart(large, large))[0] == 8
    assert choose_scale(WantedPart(large, crop_axis(0, 99, 100))) == (1, None)
    assert choose_scale(WantedPart(middle_axis(800, 100, 120), large)) == (1, None)


def test_crops_without_a_grid_at_one_scale_take_the_next():
    """An example is 800 pixels to 100 at 1/8, from a quarter of a pixel on, which no number of whole pixels gives."""
    odd = crop_axis(2, 802, 100)
    assert find_grid(odd, 8) is None
    assert find_grid(odd, 4) is None
    assert choose_scale(WantedPart(odd, odd))[0] == 2


# --- the pixels


def pixels_of(part):
    """Return the wanted pixels of a part as an array."""
    resized = torch.empty((1, 3, *part.size), dtype=torch.uint8, memory_format=torch.channels_last)
    part.resize_into(resized)
    (top, left), (rows, columns) = part.first, part.wanted
    return resized[0].permute(1, 2, 0).numpy()[top : top + rows, left : left + columns]


@pytest.mark.parametrize("step", STEPS)
def test_slopes_stay_in_their_places(step):
    """On a linear slope each value shows its place. Rounding to whole pixels gives errors of up to 4 levels here."""
    side = 248
    rows, columns = np.mgrid[0:side, 0:side]
    whole = np.stack([rows, columns, 255 - columns], axis=-1).astype(np.uint8)
    means = whole.reshape(side // step, step, side // step, step, 3).mean(axis=(1, 3))
    small = np.floor(means + 0.5).astype(np.uint8)
    rng = np.random.default_rng(step)
    worst = 0.0
    for _ in range(60):
        size = int(rng.integers(2, 30))
        top, left = (int(rng.integers(0, side - step * size + 1)) for _ in range(2))
        bottom, right = (int(rng.integers(start + step * size, side + 1)) for start in (top, left))
        wanted = WantedPart(crop_axis(top, bottom, size), crop_axis(left, right, size))
        grids = tuple(find_grid(axis, step) for axis in wanted)
        if None in grids:
            continue
        scaled = pixels_of(select_scaled_part(DecodedImage.of(small), wanted, grids))
        difference = scaled.astype(float) - pixels_of(select_part(DecodedImage.of(whole), wanted))
        inner = difference[1:-1, 1:-1] if size > 2 else difference[:0]
        worst = max(worst, np.abs(inner).max(initial=0))
    assert worst <= 2 + step * SHIFT


def test_borders_are_repeated_where_a_grid_reaches_beyond_them():
    small = pixels(20, 30, 3)
    wanted = WantedPart(crop_axis(1, 39, 6), crop_axis(1, 60, 8))
    grids = tuple(find_grid(axis, 2) for axis in wanted)
    assert any(grid.start < 0 for grid in grids)
    result = pixels_of(select_scaled_part(DecodedImage.of(small), wanted, grids))
    assert result.shape == (6, 8, 3)
    wide = np.pad(small, [(40, 40), (40, 40), (0, 0)], mode="edge")
    moved = tuple(grid._replace(start=grid.start + 40, stop=grid.stop + 40) for grid in grids)
    assert np.array_equal(result, pixels_of(select_scaled_part(DecodedImage.of(wide), wanted, moved)))


def test_take_is_crop_resize_and_center_crop():
    whole = pixels(50, 60, 3)
    for wanted in (
        WantedPart(crop_axis(3, 40, 9), crop_axis(5, 60, 12)),
        WantedPart(crop_axis(0, 50, 50), crop_axis(0, 60, 60)),
        WantedPart(crop_axis(0, 50, 80), crop_axis(0, 60, 20)),
        WantedPart(middle_axis(50, 32, 20), middle_axis(60, 38, 21)),
        WantedPart(middle_axis(50, 20, 24), middle_axis(60, 24, 24)),
        WantedPart(middle_axis(50, 50, 1), middle_axis(60, 60, 1)),
    ):
        rows, columns = wanted
        part = geometry.crop(whole, rows.low, columns.low, rows.high - rows.low, columns.high - columns.low)
        resized = geometry.resize(part, (rows.total, columns.total))
        result = pixels_of(select_part(DecodedImage.of(whole), wanted))
        assert np.array_equal(result, geometry.center_crop(resized, (rows.size, columns.size)))
