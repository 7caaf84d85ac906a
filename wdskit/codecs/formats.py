"""Image formats: the field names that promise each format, and the first bytes of its files. No file is opened."""

from __future__ import annotations

import functools

from wdskit.errors import DecodeError
from wdskit.files import Buffer

JPEG_START = b"\xff\xd8"
PNG_START = b"\x89PNG\r\n\x1a\n"
INDEX_SPEC = "index"
"""The image spec that selects `codecs.images.decode_index`. webdataset does not have this spec."""

_STARTS = {
    "JPEG": (JPEG_START,),
    "PNG": (PNG_START,),
    "WebP": (b"RIFF",),  # followed by 4 bytes of length and WEBP
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "PPM": (b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"),
}
_FORMATS = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "JPEG"),
    **dict.fromkeys(("png", "apng"), "PNG"),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
    "webp": "WebP",
    "gif": "GIF",
    "bmp": "BMP",
}

IMAGE_FIELDS = frozenset(_FORMATS)
"""Last components of the names of image fields. Only formats that Pillow decodes in this process: never EPS or WMF."""


@functools.lru_cache(maxsize=1024)  # asked for each field of each sample
def is_image_field(field: str) -> bool:
    """Return True if the last component of a field's name is an image extension in upper or lower case: `left.JPG`."""
    return field.rpartition(".")[2].lower() in IMAGE_FIELDS


@functools.lru_cache(maxsize=1024)  # asked for each image
def promised_format(field: str) -> str:
    """Return the format that the name of an image field promises: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM.

    Raises:
        KeyError: `field` is not the name of an image field.
    """
    return _FORMATS[field.rpartition(".")[2].lower()]


def image_format(data: Buffer) -> str | None:
    """Return JPEG, PNG, WebP, GIF, BMP, TIFF or PPM, from the first 12 bytes of a file; None for all other bytes."""
    start = bytes(data[:12])
    for name, starts in _STARTS.items():
        if start.startswith(starts):
            return None if name == "WebP" and start[8:] != b"WEBP" else name
    return None


def field_of_bytes(start: bytes) -> str | None:
    """Return a field name, such as `jpg`, for an image that begins with `start` (12 bytes); None if unknown."""
    found = image_format(start)
    return next((field for field, name in _FORMATS.items() if name == found), None)


def check_magic(field: str, data: Buffer) -> None:
    """Check that the first bytes of an image match the format that the field's name promises.

    Args:
        field: Name of the image field: `jpg`, `left.PNG`, ...
        data: At least the first 12 bytes of the file.

    Raises:
        DecodeError: The file is not in the promised format. The message names the promised and the found format.
    """
    wanted, found = promised_format(field), image_format(data)
    if found != wanted:
        start = f"it starts with {bytes(data[:8])!r}" if len(data) else "the file is empty"
        what = f"not an image of a known format; {start}"
        if found:
            what = f"a {found} file. `pack --format` writes images anew"
        raise DecodeError(f"the name says {wanted}, but it is {what}", field=field)
