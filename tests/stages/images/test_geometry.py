"""The geometry of single images."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from image_kinds import KINDS, make
from images import pixels
from PIL import Image

from wdskit.errors import PipelineError
from wdskit.stages.images import geometry, transforms
from wdskit.stages.images.transforms import IMAGENET_MEAN, IMAGENET_STD


def assert_kind(result, kind):
    """Check that kind, dtype and axes are those of the input, and that the result is contiguous and writable."""
    source = make(kind, 4, 5)
    assert type(result) is np.ndarray
    assert result.dtype == source.dtype
    assert result.ndim == source.ndim
    assert result.flags.c_contiguous
    assert result.flags.writeable


# --- resize


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (7, 9), (16, 16), (40, 3), (37, 53), (36, 53)])
def test_resize_keeps_the_kind(kind, nearest, size):
    result = geometry.resize(make(kind, 37, 53), size, nearest=nearest)
    assert_kind(result, kind)
    assert geometry.image_size(result) == size


@pytest.mark.parametrize("kind", ["numpy", "numpy grey"])
@pytest.mark.parametrize("source", [(1, 1), (2, 3), (37, 53), (120, 90), (385, 455)])
@pytest.mark.parametrize("target", [(1, 1), (5, 4), (36, 54), (64, 64), (224, 224)])
def test_resize_is_within_one_level_of_pillow(kind, source, target):
    result = geometry.resize(make(kind, *source), target)
    expected = make("pil grey" if "grey" in kind else "pil", *source).resize(target[::-1], Image.Resampling.BILINEAR)
    assert np.abs(result.astype(int) - np.asarray(expected)).max() <= 1


@pytest.mark.parametrize("source", [(2, 3), (37, 53), (120, 90)])
@pytest.mark.parametrize("target", [(1, 1), (5, 4), (36, 54), (64, 64)])
def test_resize_of_integers_and_floats_agrees(source, target):
    of_integers = geometry.resize(make("numpy", *source), target)
    of_floats = geometry.resize(make("numpy float", *source), target) * 255
    assert np.abs(of_floats - of_integers).max() <= 1


@pytest.mark.parametrize("size", [(n, m) for n in range(1, 12) for m in range(1, 12)])
def test_nearest_takes_the_pixel_under_the_middle(size):
    """The result is that of Pillow's NEAREST, except for ties, which rounding errors decide in Pillow."""
    for kind in ("numpy", "numpy grey"):
        source = make(kind, 7, 10)
        result = geometry.resize(source, size, nearest=True)
        for row, column in product(range(size[0]), range(size[1])):
            expected = source[(2 * row + 1) * 7 // (2 * size[0]), (2 * column + 1) * 10 // (2 * size[1])]
            assert np.array_equal(result[row, column], expected)
    pil = np.asarray(make("pil", 7, 10).resize(size[::-1], Image.Resampling.NEAREST))
    ours = geometry.resize(make("numpy", 7, 10), size, nearest=True)
    ties = any((2 * i + 1) * n % (2 * m) == 0 for n, m in zip((7, 10), size, strict=True) for i in range(m))
    assert ties or np.array_equal(pil, ours)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float64])
def test_masks_of_any_dtype_keep_their_values(dtype):
    mask = (np.arange(35).reshape(5, 7) % 4).astype(dtype)
    result = geometry.resize(mask, (11, 3), nearest=True)
    assert result.dtype == mask.dtype
    assert set(result.ravel().tolist()) <= set(mask.ravel().tolist())


FUNCTIONS = [
    geometry.flip,
    geometry.to_tensor,
    lambda image: geometry.resize(image, (3, 3)),
    lambda image: geometry.normalize(image, IMAGENET_MEAN, IMAGENET_STD),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_read_only_and_reversed_arrays_are_accepted(function):
    """torch.from_numpy warns about such memory, or refuses it."""
    frozen = make("numpy", 6, 5)
    expected = np.asarray(function(frozen.copy()))
    frozen.flags.writeable = False
    assert np.array_equal(np.asarray(function(frozen)), expected)
    assert np.array_equal(np.asarray(function(frozen[::-1][::-1])), expected)
    assert np.array_equal(np.asarray(function(np.asfortranarray(frozen))), expected)
    column = frozen[:, :1].copy()
    assert np.array_equal(np.asarray(function(column[:, ::-1])), np.asarray(function(column)))


# --- crops and flips


def test_crops_and_flips_do_not_hold_the_whole_image():
    image = make("numpy", 50, 60)
    for result in (geometry.crop(image, 1, 2, 3, 4), geometry.center_crop(image, (3, 4)), geometry.flip(image)):
        before = np.array(result)
        owner = result if result.base is None else result.base
        size = owner.untyped_storage().nbytes() if isinstance(owner, torch.Tensor) else owner.nbytes
        assert size == before.nbytes
        image[:] = 255 - image
        assert np.array_equal(result, before)


def padded_center_crop(array, height, width):
    """Do the center_crop of torchvision, line by line."""
    full_height, full_width = array.shape[:2]
    if width > full_width or height > full_height:
        left = (width - full_width) // 2 if width > full_width else 0
        top = (height - full_height) // 2 if height > full_height else 0
        right = (width - full_width + 1) // 2 if width > full_width else 0
        bottom = (height - full_height + 1) // 2 if height > full_height else 0
        array = np.pad(array, [(top, bottom), (left, right)] + [(0, 0)] * (array.ndim - 2))
        full_height, full_width = array.shape[:2]
    top, left = round((full_height - height) / 2.0), round((full_width - width) / 2.0)
    return array[top : top + height, left : left + width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [(1, 1), (4, 5), (5, 4), (6, 7)])
def test_center_crop_is_torchvisions_for_every_size(kind, source):
    image = make(kind, *source)
    for size in product(range(1, 10), range(1, 10)):
        result = geometry.center_crop(image, size)
        assert_kind(result, kind)
        assert np.array_equal(result, padded_center_crop(image, *size))


def test_shorter_side_keeps_the_shape():
    assert geometry.shorter_side(385, 455, 256) == (256, 302)
    assert geometry.shorter_side(455, 385, 256) == (302, 256)
    for height, width, size in product(range(1, 30), range(1, 30), range(1, 30)):
        new_height, new_width = geometry.shorter_side(height, width, size)
        assert min(new_height, new_width) == size
        assert (height <= width) == (new_height <= new_width) or new_height == new_width
        short, long = sorted((height, width))
        assert max(new_height, new_width) == int(size * long / short)


def test_drawn_crops_lie_inside_and_keep_scale_and_ratio():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(3000):
        top, left, height, width = transforms.draw_crop(rng, 300, 400, (0.2, 0.9), (3 / 4, 4 / 3))
        assert 0 <= top <= 300 - height
        assert 0 <= left <= 400 - width
        assert 0.74 < width / height < 1.35
        areas.append(height * width / 300 / 400)
    assert 0.19 < min(areas) < 0.22
    assert max(areas) < 0.91
    assert abs(np.mean(areas) - 0.5) < 0.06


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (3, 7), (200, 20)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1), (3 / 4, 4 / 3)), ((1, 1), (1, 1)), ((2, 3), (0.1, 0.2))])
def test_a_crop_is_found_for_every_shape(size, scale, ratio):
    for seed in range(20):
        top, left, height, width = transforms.draw_crop(np.random.default_rng(seed), *size, scale, ratio)
        assert 1 <= height <= size[0] - top
        assert 1 <= width <= size[1] - left


def test_what_does_not_fit_becomes_the_middle():
    """The fallback is that of torchvision: the largest part of an allowed shape."""
    rng = np.random.default_rng(0)
    assert transforms.draw_crop(rng, 100, 1000, (5, 6), (1, 2)) == (0, 400, 100, 200)
    assert transforms.draw_crop(rng, 1000, 100, (5, 6), (0.5, 1)) == (400, 0, 200, 100)
    assert transforms.draw_crop(rng, 100, 150, (5, 6), (1, 2)) == (0, 0, 100, 150)


# --- numbers


@pytest.mark.parametrize("kind", KINDS)
def test_normalize_is_torchvisions_to_float32_rounding(kind):
    image = make(kind, 6, 5)
    mean, std = ((0.45,), (0.22,)) if "grey" in kind else (IMAGENET_MEAN, IMAGENET_STD)
    result = geometry.normalize(image, mean, std)
    unit = image.astype(np.float64) / (1 if "float" in kind else 255)
    per_channel = (mean[0], std[0]) if "grey" in kind else (np.array(mean), np.array(std))
    assert result.dtype == np.float32
    assert np.abs(result - (unit - per_channel[0]) / per_channel[1]).max() < 1e-5


def test_normalize_does_not_depend_on_threads():
    image, before, found = pixels(301, 307, 3), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(geometry.normalize(image, IMAGENET_MEAN, IMAGENET_STD).tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_one_mean_serves_all_channels_and_a_wrong_number_does_not():
    image = make("numpy", 6, 5)
    assert np.array_equal(geometry.normalize(image, [0.5], [0.2]), geometry.normalize(image, [0.5] * 3, [0.2] * 3))
    with pytest.raises(PipelineError, match="normalize: mean has 3 values and std 3, the image 1 channels"):
        geometry.normalize(make("numpy grey", 6, 5), IMAGENET_MEAN, IMAGENET_STD)
    with pytest.raises(PipelineError, match="the image 4 channels"):
        geometry.normalize(pixels(6, 5, 4), IMAGENET_MEAN, IMAGENET_STD)


@pytest.mark.parametrize("kind", KINDS)
def test_to_tensor_is_float_chw_from_0_to_1(kind):
    image = make(kind, 6, 5)
    result = geometry.to_tensor(image)
    assert result.dtype == torch.float32
    assert result.shape == ((1 if "grey" in kind else 3), 6, 5)
    expected = image.astype(np.float32) / np.float32(1 if "float" in kind else 255)
    assert np.array_equal(result.numpy().transpose(1, 2, 0).reshape(expected.shape), expected)
