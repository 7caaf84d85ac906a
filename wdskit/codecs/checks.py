"""Is a field what its name promises? Images by their first bytes, structure or pixels, JSON by parsing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from wdskit.codecs.fields import JSON_FIELDS, decode_field
from wdskit.codecs.images import IMAGE_FIELDS, JPEG_START, PNG_START, decode_image, is_image_field
from wdskit.codecs.structure import check_image
from wdskit.errors import DecodeError
from wdskit.files import Buffer
from wdskit.limits import MAX_PIXELS

Check = Callable[[Buffer], None]
ImageLevel = Literal["none", "magic", "structure", "decode"]
ImageCheck = Literal["none", "structure", "decode"]

IMAGE_CHECKS: tuple[ImageCheck, ...] = ("none", "structure", "decode")
"""The levels that `verify` and `repair` offer."""

IMAGE_LEVELS: tuple[ImageLevel, ...] = ("none", "magic", "structure", "decode")
"""How much of an image is looked at; each level includes those before it."""

_GIF = (b"GIF87a", b"GIF89a")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NETPBM = (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6")
_STARTS: dict[str, tuple[tuple[bytes, ...], tuple[str, ...]]] = {
    "JPEG": ((JPEG_START,), ("jpg", "jpeg", "jpe", "jfif")),
    "PNG": ((PNG_START,), ("png", "apng")),
    "WebP": ((b"RIFF",), ("webp",)),
    "GIF": (_GIF, ("gif",)),
    "BMP": ((b"BM",), ("bmp",)),
    "TIFF": (_TIFF, ("tif", "tiff")),
    "PPM": (_NETPBM, ("ppm", "pgm", "pbm", "pnm")),
}
_FORMAT_OF = {field: name for name, (_, fields) in _STARTS.items() for field in fields}
assert _FORMAT_OF.keys() == IMAGE_FIELDS


def check_magic(field: str, data: Buffer) -> None:
    """Compare the first bytes of an image with the format that its field's name promises.

    Args:
        field: For which `is_image_field` holds: `jpg`, `left.PNG`, ...
        data: The file, or its first 12 bytes or more.

    Raises:
        DecodeError: It names the format that was found.
    """
    wanted = promised_format(field)
    if bytes(data[:12]).startswith(_STARTS[wanted][0]) and wanted != "WebP":
        return
    start, found = bytes(data[:12]), image_format(data)
    if found != wanted:
        what = f"a {found} file" if found else f"no image of a known format; it starts with {start[:8]!r}"
        raise DecodeError(f"the name promises {wanted}, and it is {what}", field=field)


@functools.lru_cache(maxsize=1024)  # asked for each image
def promised_format(field: str) -> str:
    """The format that the name of an image field promises: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM."""
    return _FORMAT_OF[field.rpartition(".")[2].lower()]


def image_format(data: Buffer) -> str | None:
    """The format that the first bytes of an image have, None for an unknown one."""
    start = bytes(data[:12])
    found = next((name for name, (starts, _) in _STARTS.items() if start.startswith(starts)), None)
    return None if found == "WebP" and start[8:] != b"WEBP" else found


def check_image_field(field: str, data: Buffer, level: ImageLevel, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check that an image field is what its name promises.

    Args:
        field: For which `is_image_field` holds.
        data: The whole file.
        level: "none" nothing; "magic" its first bytes; "structure" also that it is whole, as `structure.check_image`
            does; "decode" also that its pixels can be decoded.
        max_pixels: Compared with the header before any pixel is decoded.

    Raises:
        DecodeError: It is not.
    """
    if level == "none":
        return
    check_magic(field, data)
    if level == "magic":
        return
    check_image(data, max_pixels=max_pixels)
    if level == "decode":
        decode_image(data, "rgb8", max_pixels=max_pixels)


def is_json_field(field: str) -> bool:
    """Whether a field holds JSON by its name; the last component counts."""
    return field.rpartition(".")[2].lower() in JSON_FIELDS


def check_json(field: str, data: Buffer) -> None:
    """Parse a JSON field as `decode` does.

    Raises:
        DecodeError: It is none.
    """
    decode_field(field, data)


def field_check(name: str, images: ImageCheck, max_pixels: int) -> Check | None:
    """What looks at the bytes of a field; None where nothing does."""
    if is_json_field(name):
        return functools.partial(check_json, name)
    if images != "none" and is_image_field(name):
        return functools.partial(check_image_field, name, level=images, max_pixels=max_pixels)
    return None
