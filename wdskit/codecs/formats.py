"""Image formats: the field names that promise each, and the first bytes that show it. No file is opened."""

from __future__ import annotations

import functools
from typing import NamedTuple

from wdskit.errors import DecodeError
from wdskit.files import Buffer

JPEG_START = b"\xff\xd8"
PNG_START = b"\x89PNG\r\n\x1a\n"


class _Format(NamedTuple):
    starts: tuple[bytes, ...]
    fields: tuple[str, ...]


_FORMATS = {
    "JPEG": _Format((JPEG_START,), ("jpg", "jpeg", "jpe", "jfif")),
    "PNG": _Format((PNG_START,), ("png", "apng")),
    "WebP": _Format((b"RIFF",), ("webp",)),  # and WEBP behind the length
    "GIF": _Format((b"GIF87a", b"GIF89a"), ("gif",)),
    "BMP": _Format((b"BM",), ("bmp",)),
    "TIFF": _Format((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), ("tif", "tiff")),
    "PPM": _Format((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), ("ppm", "pgm", "pbm", "pnm")),
}
_FORMAT_OF = {field: name for name, one in _FORMATS.items() for field in one.fields}

IMAGE_FIELDS = frozenset(_FORMAT_OF)
"""Field names (the last component) of images. Only formats that Pillow decodes in this process: never EPS or WMF."""


@functools.lru_cache(maxsize=1024)  # asked for each field of each sample
def is_image_field(field: str) -> bool:
    """Whether a field holds an image by its name: the last component counts, in any case (`left.JPG` does)."""
    return field.rpartition(".")[2].lower() in IMAGE_FIELDS


@functools.lru_cache(maxsize=1024)  # asked for each image
def promised_format(field: str) -> str:
    """The format that the name of an image field promises: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM."""
    return _FORMAT_OF[field.rpartition(".")[2].lower()]


def image_format(data: Buffer) -> str | None:
    """The format that the first 12 bytes of an image show, None for an unknown one."""
    start = bytes(data[:12])
    for name, known in _FORMATS.items():
        if start.startswith(known.starts):
            return None if name == "WebP" and start[8:] != b"WEBP" else name
    return None


def field_of_bytes(start: bytes) -> str | None:
    """The field that an image's first 12 bytes name, None where they are those of no known format."""
    found = image_format(start)
    return _FORMATS[found].fields[0] if found else None


def check_magic(field: str, data: Buffer) -> None:
    """Compare the first bytes of an image with the format that its field's name promises.

    Args:
        field: For which `is_image_field` holds: `jpg`, `left.PNG`, ...
        data: The file, or its first 12 bytes or more.

    Raises:
        DecodeError: It names the format that was found.
    """
    wanted, found = promised_format(field), image_format(data)
    if found != wanted:
        what = f"a {found} file" if found else f"no image of a known format; it starts with {bytes(data[:8])!r}"
        raise DecodeError(f"the name promises {wanted}, and it is {what}", field=field)
