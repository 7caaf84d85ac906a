"""Image formats: the field names that promise each, and the first bytes that show it. No file is opened."""

from __future__ import annotations

import functools

from wdskit.errors import DecodeError
from wdskit.files import Buffer

JPEG_START = b"\xff\xd8"
PNG_START = b"\x89PNG\r\n\x1a\n"
INDEX_SPEC = "index"
"""What `codecs.images.decode_index` gives; no image spec of webdataset's."""

_STARTS = {
    "JPEG": (JPEG_START,),
    "PNG": (PNG_START,),
    "WebP": (b"RIFF",),  # and WEBP after the length
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
"""Field names (the last component) of images. Only formats that Pillow decodes in this process: never EPS or WMF."""


@functools.lru_cache(maxsize=1024)  # asked for each field of each sample
def is_image_field(field: str) -> bool:
    """Whether a field holds an image by its name: the last component counts, in any case (`left.JPG` does)."""
    return field.rpartition(".")[2].lower() in IMAGE_FIELDS


@functools.lru_cache(maxsize=1024)  # asked for each image
def promised_format(field: str) -> str:
    """The format that the name of an image field promises: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM."""
    return _FORMATS[field.rpartition(".")[2].lower()]


def image_format(data: Buffer) -> str | None:
    """The format that the first 12 bytes of an image show, None for an unknown one."""
    start = bytes(data[:12])
    for name, starts in _STARTS.items():
        if start.startswith(starts):
            return None if name == "WebP" and start[8:] != b"WEBP" else name
    return None


def field_of_bytes(start: bytes) -> str | None:
    """Return the field name for an image's first 12 bytes, None for an unknown format."""
    found = image_format(start)
    return next((field for field, name in _FORMATS.items() if name == found), None)


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
        start = f"it starts with {bytes(data[:8])!r}" if len(data) else "the file is empty"
        what = f"a {found} file" if found else f"not an image of a known format; {start}"
        raise DecodeError(f"the name says {wanted}, but it is {what}", field=field)
