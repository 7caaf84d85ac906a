"""The fused step beside Pillow itself: decoded, cropped and resized by it, every kind of file within one level."""

from __future__ import annotations

import io
from itertools import product

import numpy as np
import pytest
import torch
from fusing import at, each_of
from images import EXTRANEOUS, FILES, encoded, palette_image, photo, pixels
from PIL import Image

from wdskit.errors import DecodeError, SampleError
from wdskit.stages.images.geometry import draw_crop
from wdskit.stages.transforms import RandomFlip, RandomResizedCrop, Resize

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def rgb_of(data):
    """What Pillow makes of a file, in RGB; of 16 bits the upper 8, where it would clip."""
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")


def compare(data, size, count=2, decoded=None):
    """The largest difference in levels over some positions, mirrored and not; nothing is decoded at a smaller scale."""
    step = each_of(RandomResizedCrop(size=size), RandomFlip(p=0.5)).steps[0].function
    image = decoded or rgb_of(data)
    worst = 0
    for number in range(count):
        rng, flip = (step.transforms[name].rng_at(at(number)) for name in ("random_resized_crop", "random_flip"))
        top, left, height, width = draw_crop(rng, image.height, image.width, SCALE, RATIO)
        part = image.crop((left, top, left + width, top + height)).resize(size[::-1], Image.Resampling.BILINEAR)
        if flip.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        batch = torch.empty((2, 3, *size), dtype=torch.uint8, memory_format=torch.channels_last)
        step({"jpg": data}, at(number), batch[1:2])
        result = batch[1].permute(1, 2, 0).numpy()
        worst = max(worst, int(np.abs(result.astype(int) - np.asarray(part)).max()))
    return worst


def kinds():
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = (np.arange(40 * 30, dtype=np.uint16) * 54).reshape(40, 30)
    large = photo(40, 56)
    return {
        "orientation, which is not applied": encoded(large, "JPEG", exif=exif),
        "grey": encoded(large[..., 0], "JPEG"),
        "CMYK": encoded(Image.fromarray(large).convert("CMYK"), "JPEG"),
        "progressive": encoded(large, "JPEG", progressive=True),
        **{f"subsampling {name}": encoded(large, "JPEG", subsampling=name) for name in ("4:4:4", "4:2:2", "4:2:0")},
        "PNG": encoded(pixels(40, 56, 3), "PNG"),
        "PNG palette": encoded(palette_image().resize((56, 40)), "PNG"),
        "PNG alpha": encoded(pixels(40, 56, 4), "PNG"),
        "PNG grey, alpha": encoded(Image.fromarray(pixels(40, 56, 2), "LA"), "PNG"),
        "PNG 16 bits": encoded(Image.fromarray(deep), "PNG"),
        "WebP": encoded(large, "WEBP"),
        "WebP alpha": encoded(pixels(40, 56, 4), "WEBP", lossless=True, exact=True),
        "GIF": encoded(palette_image().resize((56, 40)), "GIF"),
        **{f"JPEG with bytes {name}": data for name, data in EXTRANEOUS.items()},
    }


KINDS = kinds()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_file_is_within_one_level_of_pillow(name):
    for size in ((48, 48), (33, 61)):
        assert compare(KINDS[name], size, count=6) <= 1


def test_four_one_one_is_within_one_level_of_its_own_pixels():
    """Pillow does not write it; simplejpeg does. Both decode it to the same pixels."""
    import simplejpeg

    for subsampling in ("411", "440", "420", "422", "444"):
        data = simplejpeg.encode_jpeg(photo(40, 56), 90, "RGB", subsampling)
        assert compare(data, (48, 48), count=6) <= 1


def test_every_small_size_is_within_one_level_of_pillow():
    """1x1 to 17x17, all enlarged: an image of one pixel has a crop, too."""
    for height, width in product(range(1, 18), range(1, 18)):
        data = encoded(photo(height, width), "JPEG", quality=95)
        assert compare(data, (19, 23), count=1) <= 1


def test_many_sizes_and_crops_are_within_one_level_of_pillow():
    whole = encoded(pixels(97, 120, 3), "PNG")
    image = rgb_of(whole)
    for number, side in enumerate(range(1, 130, 3)):
        assert compare(whole, (side, 1 + (side * 7 + number) % 130), decoded=image) <= 1


def test_a_truncated_file_is_bad_whatever_is_wanted_of_it():
    """Where Pillow would raise, or paint the rest grey: also a crop that ends above the cut."""
    step = each_of(RandomResizedCrop(size=16)).steps[0].function
    assert step({"jpg": KINDS["PNG"]}, at())["jpg"].shape == (16, 16, 3)
    each = each_of(RandomResizedCrop(size=16))
    for name in ("grey", "CMYK", "progressive", "PNG", "WebP", "subsampling 4:2:0"):
        data = KINDS[name]
        for cut in (len(data) // 2, len(data) - 30):
            with pytest.raises(SampleError) as caught:
                each.apply({"jpg": data[:cut]}, at())
            assert caught.value.stage == "decode"
            assert isinstance(caught.value.__cause__, DecodeError)


def test_an_image_that_needs_no_resize_is_its_pixels():
    """Nothing of a thread's memory goes out: the next image does not change this one."""
    each = each_of(Resize(size=[21, 34]))
    first = each.apply({"jpg": FILES["jpeg"]}, at())["jpg"]
    kept = first.copy()
    each.apply({"jpg": encoded(pixels(21, 34, 3), "JPEG")}, at(1))
    assert np.array_equal(first, kept)
    assert np.array_equal(first, np.asarray(rgb_of(FILES["jpeg"])))
