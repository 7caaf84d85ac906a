"""Encode pixels as image files. Equal pixels, options and encoder versions give equal bytes.

JPEG: baseline, 4:2:0, libjpeg's default tables for the quality. WebP: lossy, method 4, lossless alpha. PNG: level 6,
Pillow's default filters. No time and no name of a program or computer is written.
"""

from __future__ import annotations

import io
from typing import Any, Literal

import numpy as np
import simplejpeg
from PIL import Image, ImageColor, features
from PIL import __version__ as pillow_version

from wdskit.codecs.edit import exif as exif_blocks
from wdskit.codecs.edit.resize import Pixels
from wdskit.errors import DecodeError

ImageFormat = Literal["jpg", "webp", "png"]

FORMATS: dict[str, ImageFormat] = {"JPEG": "jpg", "WEBP": "webp", "PNG": "png"}
"""Maps Pillow's name of each format that can be written to its `ImageFormat`."""

MAX_SIDE: dict[ImageFormat, int] = {"jpg": 65_500, "webp": 16_383, "png": 2**31 - 1}
"""In pixels: the longest side that each encoder accepts."""

DEFAULT_QUALITY = 90
_WEBP_METHOD = 4
_PNG_LEVEL = 6
_MAX_SEGMENT = 65_533  # bytes in a JPEG segment, without its length field
_ICC_PREFIX = b"ICC_PROFILE\0"
_MAX_ICC_SEGMENTS = 255


def encode_image(pixels: Pixels, fmt: ImageFormat, *, quality: int, exif: bytes = b"", icc: bytes = b"") -> bytes:
    """Encode pixels as one image file.

    Args:
        pixels: jpg: grey or RGB. webp: RGB with or without alpha. png: grey or RGB, with or without alpha, or 16-bit
            grey.
        fmt: Format of the file.
        quality: 1 to 100; png ignores it.
        exif: EXIF block to store; empty stores no block.
        icc: Colour profile to store; empty stores no profile.

    Raises:
        DecodeError: A side is longer than `MAX_SIDE`, or the colour profile does not fit in a jpg.
    """
    height, width = pixels.shape[:2]
    if max(height, width) > MAX_SIDE[fmt]:
        raise DecodeError(f"{width} x {height} pixels; a {fmt} has at most {MAX_SIDE[fmt]} along a side")
    if fmt == "jpg":
        colours = "GRAY" if pixels.ndim == 2 else "RGB"
        shaped = np.ascontiguousarray(pixels[..., None] if pixels.ndim == 2 else pixels)
        subsampling = "Gray" if pixels.ndim == 2 else "420"
        file: bytes = simplejpeg.encode_jpeg(shaped, quality, colours, subsampling)
        return _with_segments(file, exif, icc)
    options: dict[str, Any] = {"exif": exif_blocks.PREFIX + exif} if exif else {}
    if icc:
        options["icc_profile"] = icc
    if fmt == "webp":
        options |= {"quality": quality, "method": _WEBP_METHOD}
    else:
        options["compress_level"] = _PNG_LEVEL
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "WEBP" if fmt == "webp" else "PNG", **options)
    return stream.getvalue()


def _with_segments(file: bytes, exif: bytes, icc: bytes) -> bytes:
    """Insert an EXIF block (APP1) and a colour profile (APP2, ICC.1:2022 B.4) into a JPEG, after its first segment.

    Empty `exif` or `icc` inserts nothing. Raises DecodeError if the colour profile does not fit in a JPEG.
    """
    room = _MAX_SEGMENT - len(exif_blocks.PREFIX)
    segments = [(0xE1, exif_blocks.PREFIX + exif[at : at + room]) for at in range(0, len(exif), room)]
    room = _MAX_SEGMENT - len(_ICC_PREFIX) - 2
    parts = [icc[at : at + room] for at in range(0, len(icc), room)]
    if len(parts) > _MAX_ICC_SEGMENTS:
        raise DecodeError(f"its colour profile has {len(icc)} bytes, more than fits in a jpg")
    segments += [(0xE2, _ICC_PREFIX + bytes((at, len(parts))) + part) for at, part in enumerate(parts, start=1)]
    if not segments:
        return file
    first = 4 + int.from_bytes(file[4:6], "big")
    written = (bytes((0xFF, code)) + (len(part) + 2).to_bytes(2, "big") + part for code, part in segments)
    return file[:first] + b"".join(written) + file[first:]


def parse_colour(text: str) -> tuple[int, int, int]:
    """Parse a colour name or `#rrggbb` to (red, green, blue), each 0 to 255.

    Raises:
        ValueError: The text is not a colour, or has transparency.
    """
    colour = ImageColor.getrgb(text)
    if len(colour) != 3:
        raise ValueError(f"{text!r} has transparency")
    return colour


def encoder_versions() -> dict[str, str]:
    """Return {library: version} of the libraries that decide the bytes of an encoded image.

    A version is "" if it is unknown.
    """
    library = "zlib_ng" if features.version("zlib_ng") else "zlib"
    return {
        "simplejpeg": simplejpeg.__version__,
        "pillow": pillow_version,
        "libjpeg_turbo": features.version("libjpeg_turbo") or "",
        "webp": features.version("webp") or "",
        library: features.version(library) or "",
        "littlecms2": features.version("littlecms2") or "",
    }
