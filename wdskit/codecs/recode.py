"""Change an image with Pillow: turn it upright, shrink it, write it in another format."""

from __future__ import annotations

import io
from typing import Any, Literal

from PIL import ExifTags, Image, ImageOps, features
from PIL import __version__ as pillow_version

from wdskit.codecs.images import decode_image, largest_number, open_pillow, pillow_errors
from wdskit.errors import DecodeError
from wdskit.files import Buffer

ImageFormat = Literal["jpg", "webp", "png"]

DEFAULT_QUALITY = 90
_FORMATS: dict[str, ImageFormat] = {"JPEG": "jpg", "MPO": "jpg", "WEBP": "webp", "PNG": "png"}


def recode_image(
    data: Buffer, *, size: int | None, fmt: ImageFormat | None, quality: int, max_pixels: int
) -> tuple[bytes, ImageFormat]:
    """Return an image as a new file, upright as its EXIF orientation says.

    The shorter side is shrunk to `size` pixels, never enlarged. A colour profile of grey or RGB is kept; EXIF is not.
    An image in one of the formats jpg, webp and png that needs no change is returned as it is.

    Args:
        data: The file.
        size: Length of the shorter side in pixels; None keeps the size.
        fmt: Format of the new file; None keeps the format, or takes png for formats that are not written.
        quality: 1 to 100, for jpg and webp.
        max_pixels: Compared with width x height in the header before any pixel is decoded.

    Returns:
        The bytes of the file, and its format.

    Raises:
        DecodeError: The file is damaged, has more than 8 bits per channel, or is transparent and would become jpg.
        ImageTooLarge: The header promises more than `max_pixels`.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    own = _FORMATS.get(image.format or "")
    target = fmt or own or "png"
    with pillow_errors(image.format or ""):
        turn, most = image.getexif().get(ExifTags.Base.Orientation, 1), largest_number(data, image)
    side = min(image.size) if size is None else min(size, *image.size)
    if target == own and turn not in range(2, 9) and side == min(image.size):
        return bytes(data), target
    if most > 255:
        raise DecodeError("it has more than 8 bits per channel, which would be lost. Use a `map`")
    if target == "jpg" and image.has_transparency_data:
        raise DecodeError("it is transparent, which a jpg cannot be. Use --format png or webp, or a `map`")
    is_grey = image.mode == "L" and target != "webp"  # a webp has colours
    spec = "pilrgba" if image.has_transparency_data else "pill" if is_grey else "pil"
    decoded: Any = decode_image(data, spec, max_pixels=max_pixels)  # refuses cut pixel data, which Pillow paints grey
    out = io.BytesIO()
    with pillow_errors(image.format or ""):
        upright = ImageOps.exif_transpose(decoded)
        sides = [max(1, round(each * side / min(upright.size))) for each in upright.size]
        profile = image.info.get("icc_profile") or b""
        fits = profile[16:20] == (b"GRAY" if is_grey else b"RGB ")
        upright = upright.resize(sides, Image.Resampling.BICUBIC)
        upright.save(out, "jpeg" if target == "jpg" else target, quality=quality, icc_profile=profile if fits else None)
    return out.getvalue(), target


def encoder_versions() -> list[str]:
    """Return the versions of the libraries that decide the bytes of a changed image."""
    return [pillow_version, *(features.version(name) or "" for name in ("libjpeg_turbo", "webp", "zlib"))]
