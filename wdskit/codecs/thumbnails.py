"""Small pictures of encoded images, for people."""

from __future__ import annotations

import io

from PIL import Image

from wdskit.codecs.images import JPEG_START, decode_image, open_pillow
from wdskit.errors import PROCESS_ERRORS, DecodeError
from wdskit.files import Buffer

_QUALITY = 82
_BEHIND = (128, 128, 128)  # what is transparent


def make_thumbnail(data: Buffer, *, side: int, max_pixels: int) -> tuple[bytes, tuple[int, int]]:
    """A JPEG of at most side x side pixels, and the width and height of the image itself.

    It shows what a training loop gets: EXIF orientation is not applied. Transparency is shown as grey.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The bytes are not one complete image.
    """
    if bytes(data[:2]) == JPEG_START:
        image: Image.Image = open_pillow(data, max_pixels=max_pixels)
        size = image.size
        image.draft("RGB", (2 * side, 2 * side))  # decoded no larger than needed
        try:
            image = image.convert("RGB")
        except PROCESS_ERRORS:
            raise
        except Exception as err:
            raise DecodeError(f"not one complete JPEG image: {str(err) or type(err).__name__}") from err
    else:
        image = decode_image(data, "pilrgba", max_pixels=max_pixels)  # type: ignore[assignment]  # by its spec
        size = image.size
        image.thumbnail((side, side))
        behind = Image.new("RGB", image.size, _BEHIND)
        behind.paste(image, mask=image.getchannel("A"))
        image = behind
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue(), size
