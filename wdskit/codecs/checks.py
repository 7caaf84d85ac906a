"""Read the headers of images, and check that the content of a field matches the field's name. `structure.check_pixels`
is the limit of pixels, `npy_header` reads arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from wdskit.codecs import structure
from wdskit.codecs.formats import check_magic, image_format
from wdskit.codecs.images import decode_image, open_pillow, pillow_errors
from wdskit.codecs.structure import HeaderTooShort, ImageHeader
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES, MAX_PIXELS

ImageCheck = Literal["none", "structure", "decode"]

IMAGE_CHECKS: tuple[ImageCheck, ...] = get_args(ImageCheck)
"""How much of an image `check_image_field` checks. Each level includes the levels before it."""

_STEPS = (2 << 10, 64 << 10, MAX_CHECKED_BYTES)  # bytes: most headers; headers after a camera's notes; all headers
_ANY_PIXELS = 1 << 62  # no limit, because no pixel is decoded
_HEADERS = {
    "JPEG": structure.jpeg_header,
    "PNG": structure.png_header,
    "WebP": structure.webp_header,
    "GIF": structure.gif_header,
}


def read_header(head: Callable[[int], bytes]) -> ImageHeader:
    """Return format, size and mode of an image file from its header. No pixel is decoded.

    Args:
        head: Takes a number n, and returns the first n bytes of the file, or the whole file if it is shorter. The first
            n is 2 KiB. If the header is longer, n grows up to `MAX_CHECKED_BYTES`. For BMP, TIFF and PPM, n grows until
            `head` returns the whole file, also up to `MAX_CHECKED_BYTES`.

    Raises:
        DecodeError: The format is unknown, the header is damaged or cut short, or the header promises 0 pixels.
    """
    for size in _STEPS:
        data = head(size)
        name = image_format(data)
        is_last = len(data) < size or size == _STEPS[-1]
        if name in _HEADERS:
            try:
                header = _HEADERS[name](data)
            except HeaderTooShort:
                if is_last:
                    raise
                continue
            structure.check_pixels(header.width, header.height, max_pixels=_ANY_PIXELS)
            return header
        if is_last or not name:  # Pillow needs the whole file: a TIFF's header may be at its end
            image = open_pillow(data, max_pixels=_ANY_PIXELS)
            return ImageHeader(image.format or "", *image.size, image.mode)
    raise AssertionError


def check_image(data: Buffer, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check that `data` is one whole image file. The depth of the check depends on the format.

    - JPEG: checks every segment up to the end mark. Bytes after the end mark are accepted.
    - PNG: checks the checksum of every chunk up to IEND.
    - WebP: checks the sizes of the file and of every chunk. Then Pillow opens and verifies the file.
    - GIF, BMP, TIFF, PPM: Pillow opens and verifies the file, but does not read the file to its end.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The format is unknown, or the file is damaged. For a damaged JPEG segment, or a damaged chunk of a
            PNG or WebP, the message names the offset.
    """
    name = image_format(data)
    view = memoryview(data).cast("B")
    if name == "JPEG":  # indexing `bytes` takes half the time of indexing a memoryview
        structure.check_jpeg(data if isinstance(data, bytes) else view, max_pixels)
    elif name == "PNG":
        structure.check_png(view, max_pixels)
    else:
        if name == "WebP":
            structure.check_webp(view)
        image = open_pillow(view, max_pixels=max_pixels)
        with pillow_errors(image.format or ""):
            image.verify()


def check_image_field(field: str, data: Buffer, level: ImageCheck, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check that the content of an image field is a file of the format that the field's name promises.

    Args:
        field: Name of the field; `is_image_field` must be true for it.
        data: The whole file.
        level: "none" checks nothing. "structure" checks the first bytes, and runs `check_image`. "decode" also decodes
            the pixels.
        max_pixels: Compared with width x height in the header before any pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The content does not match the name, or is damaged.
    """
    if level == "none":
        return
    check_magic(field, data)
    check_image(data, max_pixels=max_pixels)
    if level != "decode":
        return
    if image_format(data) == "TIFF":
        image = open_pillow(data, max_pixels=max_pixels)
        if image.mode in {"I", "F"}:  # sound, although `decode_image` has no 8-bit form of them
            with pillow_errors("TIFF"):
                image.load()
            return
    decode_image(data, "rgb8", max_pixels=max_pixels)
