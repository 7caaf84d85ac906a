"""Pixels -> image files. The same pixels and options give the same bytes with the same versions of the encoders.

JPEG: baseline, 4:2:0, libjpeg's default tables for the quality. WebP: lossy, method 4, alpha without loss. PNG: level
6, filters by Pillow's default. No time, no program's name, nothing of the machine is written.
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
"""What is written, by Pillow's name of the format."""

MAX_SIDE: dict[ImageFormat, int] = {"jpg": 65_500, "webp": 16_383, "png": 2**31 - 1}
"""The longest side that each encoder takes."""

DEFAULT_QUALITY = 90
_WEBP_METHOD = 4
_PNG_LEVEL = 6
_MAX_SEGMENT = 65_533  # of a JPEG, without its length
_ICC_PREFIX = b"ICC_PROFILE\0"
_MAX_ICC_SEGMENTS = 255


def encode_image(pixels: Pixels, fmt: ImageFormat, *, quality: int, exif: bytes = b"", icc: bytes = b"") -> bytes:
    """One image file with its EXIF block and colour profile, if any; `quality`, 1 to 100, is of JPEG and WebP.

    JPEG takes grey and RGB, WebP RGB with or without alpha, PNG all that `Pixels` holds.

    Raises:
        DecodeError: The format does not hold an image of this size, or such a profile.
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
    """A JPEG with EXIF (APP1) and colour profile (APP2, ICC.1:2022 B.4) after its first segment, which is JFIF's."""
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
    """Parse a colour: a name, or `#rrggbb`.

    Raises:
        ValueError: The text is not a colour, or has transparency.
    """
    colour = ImageColor.getrgb(text)
    if len(colour) != 3:
        raise ValueError(f"{text!r} has transparency")
    return colour


def encoder_versions() -> dict[str, str]:
    """Return the library versions that the bytes of an encoded image depend on."""
    library = "zlib_ng" if features.version("zlib_ng") else "zlib"
    return {
        "simplejpeg": simplejpeg.__version__,
        "pillow": pillow_version,
        "libjpeg_turbo": features.version("libjpeg_turbo") or "",
        "webp": features.version("webp") or "",
        library: features.version(library) or "",
        "littlecms2": features.version("littlecms2") or "",
    }
