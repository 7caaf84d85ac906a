"""The size in the header of a JPEG."""

from __future__ import annotations

import pytest
import simplejpeg
from images import FILES, encoded, photo

from wdskit.codecs.images import decode_image, jpeg_size
from wdskit.errors import ImageTooLarge

LIMIT = 10**6
SCALED = [name for name in FILES if name.startswith("jpeg") and name != "jpeg cmyk"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_only_jpegs_in_three_colour_spaces_have_a_size_here(name):
    """Pillow converts CMYK, and it decodes other formats, at full size."""
    size = jpeg_size(FILES[name], max_pixels=LIMIT)
    assert size == (decode_image(FILES[name], "rgb8", max_pixels=LIMIT).shape[:2] if name in SCALED else None)


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
