"""JPEGs at a smaller scale: sizes from the header, the mean in each pixel, and None for unusual files."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import simplejpeg
from images import EXTRANEOUS, FILES, encoded, photo, pixels

from wdskit.codecs.images import STEPS, decode_image, decode_jpeg, jpeg_size
from wdskit.errors import DecodeError, ImageTooLarge

LIMIT = 10**6
SCALED = [name for name in FILES if name.startswith("jpeg") and name != "jpeg cmyk"]


def slopes(height, width):
    """Return an image of three linear slopes, which every scale keeps."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows, columns, 100 + (rows + columns) / 2], axis=-1).astype(np.uint8)


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_jpegs_in_three_colour_spaces_have_a_size_here(name):
    """Pillow converts CMYK, and it decodes other formats, at full size."""
    size = jpeg_size(FILES[name], max_pixels=LIMIT)
    assert size == (decode_image(FILES[name], "rgb8", max_pixels=LIMIT).shape[:2] if name in SCALED else None)


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_any_buffer_is_accepted(view):
    assert jpeg_size(view(FILES["jpeg"]), max_pixels=LIMIT) == (21, 34)
    assert decode_jpeg(view(FILES["jpeg"]), (21, 34), 2).shape == (11, 17, 3)


@pytest.mark.parametrize("name", SCALED)
def test_at_full_size_the_pixels_are_those_of_decode_image(name):
    size = jpeg_size(FILES[name], max_pixels=LIMIT)
    result = decode_jpeg(FILES[name], size, 1)
    assert np.array_equal(result, decode_image(FILES[name], "rgb8", max_pixels=LIMIT))
    assert result.flags.c_contiguous
    assert result.flags.writeable
    assert result.flags.owndata


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_each_pixel_is_the_mean_of_those_it_stands_for(step, subsampling):
    """This holds for all sizes: a side that is not a multiple of the step or of a block does not shift other pixels."""
    for height, width in product((8, 31, 33, 47, 64, 65), (9, 15, 16, 40, 71)):
        image = slopes(height, width)
        data = encoded(image, "JPEG", quality=100, subsampling=subsampling)
        result = decode_jpeg(data, (height, width), step)
        assert result.shape == (-(-height // step), -(-width // step), 3)
        rows, columns = height // step, width // step
        squares = image[: rows * step, : columns * step].reshape(rows, step, columns, step, 3).mean(axis=(1, 3))
        # Subsampled chroma is blurred: by up to five levels at the edge of a slope.
        assert np.abs(result[:rows, :columns] - squares).max() <= (2 if subsampling == 0 else 6)


@pytest.mark.parametrize("step", STEPS)
def test_every_small_size_is_decoded_at_the_named_scale_or_not_at_all(step):
    """Simplejpeg gets a minimum size, which below 8 pixels is the same for several scales."""
    for height, width in product(range(1, 20), range(1, 20)):
        result = decode_jpeg(encoded(slopes(height, width), "JPEG", quality=100, subsampling=0), (height, width), step)
        if max(height, width) < 8:
            assert result is None
        else:
            assert result.shape[:2] == (-(-height // step), -(-width // step))
            # the top left pixel is the mean of the first `step` rows and columns
            expected = slopes(height, width)[:step, :step].mean(axis=(0, 1))
            assert height < step or width < step or np.abs(result[0, 0] - expected).max() <= 2


@pytest.mark.parametrize("step", [1, *STEPS])
@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "jpeg grey"])
def test_no_prefix_decodes_at_any_scale(name, step):
    """A cut in the last rows, or in high frequencies that this scale does not use, is found too."""
    data = FILES[name]
    for cut in range(len(data)):
        try:
            size = jpeg_size(data[:cut], max_pixels=LIMIT)
        except DecodeError:
            continue
        assert size is None or decode_jpeg(data[:cut], size, step) is None


@pytest.mark.parametrize("step", [1, *STEPS])
def test_what_the_decoder_refuses_is_none(step):
    size = jpeg_size(FILES["jpeg"], max_pixels=LIMIT)
    for name in EXTRANEOUS:
        assert decode_jpeg(EXTRANEOUS[name], size, step) is None
    assert decode_jpeg(b"\xff\xd8 no more than a start", size, step) is None


def test_another_size_than_the_files_is_none():
    """A caller that confuses two files gets no image of another shape."""
    assert decode_jpeg(FILES["jpeg"], (210, 340), 2) is None


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", FILES["webp"][:40]])
def test_what_has_no_jpeg_header_has_no_size(data):
    assert jpeg_size(data, max_pixels=LIMIT) is None


def test_the_limit_is_compared_before_any_pixel(monkeypatch):
    def decode(*args, **options):
        pytest.fail("a pixel was decoded")

    monkeypatch.setattr(simplejpeg, "decode_jpeg", decode)
    data = encoded(photo(40, 50), "JPEG")
    assert jpeg_size(data, max_pixels=2000) == (40, 50)
    with pytest.raises(ImageTooLarge, match="50 x 40 = 2000 pixels, more than max_pixels 1999"):
        jpeg_size(data, max_pixels=1999)


def test_cmyk_obeys_the_limit_too():
    with pytest.raises(ImageTooLarge):
        jpeg_size(FILES["jpeg cmyk"], max_pixels=100)


@pytest.mark.parametrize("step", STEPS)
def test_noise_of_any_subsampling_has_the_right_shape(step):
    for subsampling in (0, 1, 2):
        data = encoded(pixels(37, 51, 3), "JPEG", subsampling=subsampling, progressive=subsampling == 1)
        assert decode_jpeg(data, (37, 51), step).shape == (-(-37 // step), -(-51 // step), 3)
