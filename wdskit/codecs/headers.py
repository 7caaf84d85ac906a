"""What the header of an encoded image says: format, size and mode, from a file's first bytes, without decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wdskit.codecs.images import JPEG_START, PNG_START, open_pillow
from wdskit.errors import DecodeError
from wdskit.limits import MAX_CHECKED_BYTES

Head = Callable[[int], bytes]
"""The first n bytes of a file, or all of a shorter one."""

_STEPS = (2 << 10, 64 << 10, MAX_CHECKED_BYTES)  # most headers; those behind a camera's notes; any
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a segment
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_ANY_PIXELS = 1 << 62  # nothing is decoded, so that no promise is too large


class ImageHeader(NamedTuple):
    """What the header promises.

    Attributes:
        format: `JPEG`, `PNG`, `WebP`, `GIF`, `BMP`, `TIFF` or `PPM`, by the first bytes.
        width: Pixels, 1 or more. EXIF orientation is not applied.
        height: Pixels, 1 or more.
        mode: Pillow's name: `L`, `RGB`, `RGBA`, `P`, `CMYK`, ...; `;16` behind it for a PNG of 16 bits.
    """

    format: str
    width: int
    height: int
    mode: str


class _TooShort(Exception):
    """More bytes are needed."""


def read_header(head: Head) -> ImageHeader:
    """Read the header of an image file.

    Args:
        head: Called with more bytes until the header is whole; mostly once, with 2 KiB.

    Raises:
        DecodeError: The format is unknown, or the header damaged or cut short.
    """
    for size in _STEPS:
        data = head(size)
        try:
            found = _parse(data, is_all=len(data) < size)
        except _TooShort:
            if len(data) < size:
                break
            continue
        if found.width < 1 or found.height < 1:
            raise DecodeError(f"the image's header promises {found.width} x {found.height} pixels")
        return found
    raise DecodeError(f"the image's header is not whole in {len(data)} bytes")


def _parse(data: bytes, *, is_all: bool) -> ImageHeader:
    if data.startswith(JPEG_START):
        return _parse_jpeg(data)
    if data.startswith(PNG_START):
        return _parse_png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _parse_webp(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        _need(data, 10)
        return ImageHeader("GIF", int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"), "P")
    if not is_all and data.startswith((b"BM", b"II", b"MM", b"P")):
        raise _TooShort  # Pillow wants the whole file: a TIFF's header may stand at its end
    image = open_pillow(data, max_pixels=_ANY_PIXELS)
    return ImageHeader(image.format or "", *image.size, image.mode)


def _need(data: bytes, size: int) -> None:
    if len(data) < size:
        raise _TooShort


def _parse_jpeg(data: bytes) -> ImageHeader:
    """Go from segment to segment to the frame: length, bits, height, width, number of colours (ITU T.81, B.2.2)."""
    at = 2
    while True:
        _need(data, at + 4)
        if data[at] != 0xFF:
            raise DecodeError(f"JPEG, byte {at}: no marker where one belongs")
        code = data[at + 1]
        if code == 0xFF:  # padding
            at += 1
        elif code in _ALONE:
            at += 2
        elif code in _FRAMES:
            _need(data, at + 10)
            height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            return ImageHeader("JPEG", width, height, _JPEG_MODES.get(data[at + 9], f"{data[at + 9]} colours"))
        elif code in (0xD8, 0xD9, 0xDA):
            raise DecodeError(f"JPEG, byte {at}: marker {code:02X} before any frame header")
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _parse_png(data: bytes) -> ImageHeader:
    _need(data, 26)
    if data[12:16] != b"IHDR":
        raise DecodeError(f"PNG, byte 12: {data[12:16]!r} where IHDR belongs")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    bits, kind = data[24], data[25]
    mode = _PNG_MODES.get(kind, f"colour type {kind}")
    return ImageHeader("PNG", width, height, "1" if (bits, kind) == (1, 0) else f"{mode};16" if bits == 16 else mode)


def _parse_webp(data: bytes) -> ImageHeader:
    """developers.google.com/speed/webp/docs/riff_container."""
    _need(data, 30)
    kind = data[12:16]
    if kind == b"VP8X":
        sides = 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        return ImageHeader("WebP", *sides, "RGBA" if data[20] & 0x10 else "RGB")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        sides = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        return ImageHeader("WebP", *sides, "RGBA" if bits >> 28 & 1 else "RGB")
    if kind == b"VP8 ":
        bits = int.from_bytes(data[26:30], "little")
        return ImageHeader("WebP", bits & 0x3FFF, bits >> 16 & 0x3FFF, "RGB")
    raise DecodeError(f"WebP, byte 12: the unknown chunk {kind!r}")
