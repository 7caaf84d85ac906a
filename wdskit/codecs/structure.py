"""Is this one whole image file? Answered from its structure, without decoding pixels: cheap enough for every file."""

from __future__ import annotations

import re
import zlib

import numpy as np

from wdskit.codecs.images import JPEG_START, PNG_START, check_pixels, open_pillow
from wdskit.errors import PROCESS_ERRORS, DecodeError
from wdskit.files import Buffer
from wdskit.limits import MAX_PIXELS

# The next marker of a JPEG: FF and a code. FF 00 is a data byte FF, D0-D7 are restart marks inside the data, FF FF is
# padding.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_IS_MARKER = np.array([_MARKER.match(bytes((0xFF, code))) is not None for code in range(256)])
_CODES = frozenset(np.flatnonzero(_IS_MARKER).tolist())
_NEAR_BYTES = 4096
_FAR_BYTES = 64 << 10
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_PLAIN_SEGMENTS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
"""Tables, comments and what programs add: nothing is looked at but their length."""
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Start of frame of all codings; the three left out are Huffman tables, a reserved code and arithmetic conditioning."""


def check_image(data: Buffer, *, max_pixels: int = MAX_PIXELS) -> None:
    """Check that `data` is one whole image file.

    JPEG: every segment to the end mark (bytes after it are accepted: phones append previews). PNG: every chunk's
    checksum to IEND. WebP: the sizes of the file and of every chunk. Other formats, and WebP too: what Pillow finds
    when it opens and verifies them, which does not reach to the end of a GIF, BMP, TIFF or PPM.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: What is wrong, and at which byte.
    """
    if isinstance(data, bytes) and data.startswith(JPEG_START):  # whose bytes are had in half the time of a view's
        _walk_jpeg(data, max_pixels)
        return
    view = memoryview(data).cast("B")
    if view[:2] == JPEG_START:
        _walk_jpeg(view, max_pixels)
    elif view[:8] == PNG_START:
        _walk_png(view, max_pixels)
    else:
        if bytes(view[:4]) == b"RIFF":
            _walk_webp(view)
        image = open_pillow(view, max_pixels=max_pixels)
        try:
            image.verify()
        except PROCESS_ERRORS:
            raise
        except Exception as err:
            raise DecodeError(f"not one complete {image.format} image: {str(err) or type(err).__name__}") from err


def _walk_jpeg(view: bytes | memoryview, max_pixels: int) -> None:
    """Go from marker to marker; segments are stepped over, so that a preview's end mark inside one does not count."""
    at, has_frame, has_scan, size = 2, False, False, len(view)
    while True:
        while at + 4 <= size and view[at + 1] in _PLAIN_SEGMENTS and view[at] == 0xFF:  # most, in a quarter of the time
            end = at + 2 + (view[at + 2] << 8 | view[at + 3])
            if not at + 4 <= end <= size:
                break
            at = end
        found = _find_marker(view, at)
        if found is None:
            raise DecodeError(f"JPEG, byte {len(view)}: the file stops before its end mark")
        at, code = found, view[found + 1]
        if code == _EOI:
            break
        if code == _SOI:
            raise DecodeError(f"JPEG, byte {at}: another image starts before this one's end mark")
        if code == _TEM:  # stands alone
            at += 2
            continue
        end = at + 2 + (view[at + 2] << 8 | view[at + 3]) if at + 4 <= len(view) else at + 4
        if end > len(view):
            raise DecodeError(f"JPEG, byte {at}: the file stops at byte {len(view)}, inside segment {code:02X}")
        if end < at + 4:
            raise DecodeError(f"JPEG, byte {at}: segment {code:02X} states a length of {end - at - 2}")
        if code in _FRAMES:
            _check_frame(view, at, end, max_pixels)
            has_frame = True
        if code == _SOS:
            if not has_frame:
                raise DecodeError(f"JPEG, byte {at}: pixel data before any frame header")
            has_scan = True
        at = end
    if not has_scan:
        raise DecodeError(f"JPEG, byte {at}: the end mark comes before any pixel data")


def _find_marker(view: bytes | memoryview, at: int) -> int | None:
    """Where the next marker from `at` on is. Most are there, or near; through pixels numpy is quicker than `re`."""
    if at + 1 < len(view) and view[at] == 0xFF and view[at + 1] in _CODES:
        return at
    found = _MARKER.search(view, at, at + _NEAR_BYTES + 1)
    if found is not None:
        return found.start()
    for start in range(at + _NEAR_BYTES, len(view) - 1, _FAR_BYTES):
        part = np.frombuffer(view, np.uint8, min(_FAR_BYTES + 1, len(view) - start), start)
        found_any = part[:-1] == 0xFF
        found_any &= part[1:] != 0
        first = int(found_any.argmax())  # two to four times as fast as looking where all are
        if not found_any[first]:
            continue
        if _IS_MARKER[part[first + 1]]:
            return start + first
        places = np.flatnonzero(found_any)
        places = places[_IS_MARKER[part[places + 1]]]
        if len(places):
            return start + int(places[0])
    return None


def _check_frame(view: bytes | memoryview, at: int, end: int, max_pixels: int) -> None:
    """The frame header: marker, length, precision, height, width."""
    if end < at + 9:
        raise DecodeError(f"JPEG, byte {at}: a frame header of {end - at - 2} bytes")
    height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
    if not 0 < width * height <= max_pixels:
        check_pixels(width, height, max_pixels=max_pixels)


def _walk_png(view: memoryview, max_pixels: int) -> None:
    """Go from chunk to chunk: length, type, data, checksum of type and data."""
    at, has_data = 8, False
    while True:
        length, kind = int.from_bytes(view[at : at + 4], "big"), bytes(view[at + 4 : at + 8])
        end = at + 12 + length
        if end > len(view):
            raise DecodeError(f"PNG, byte {at}: the file stops at byte {len(view)}, before its end chunk")
        if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            raise DecodeError(f"PNG, byte {at}: the checksum of chunk {kind!r} does not match its {length} bytes")
        if (kind == b"IHDR" and length == 13) != (at == 8):
            belongs = "IHDR of 13 bytes" if at == 8 else "no IHDR"
            raise DecodeError(f"PNG, byte {at}: {kind!r} of {length} bytes where {belongs} belongs")
        if at == 8:
            width, height = int.from_bytes(view[16:20], "big"), int.from_bytes(view[20:24], "big")
            check_pixels(width, height, max_pixels=max_pixels)
        has_data |= kind == b"IDAT"
        if kind == b"IEND":
            break
        at = end
    if not has_data:
        raise DecodeError(f"PNG, byte {at}: the end chunk comes before any pixel data")


def _walk_webp(view: memoryview) -> None:
    """Go from chunk to chunk: type, length, data, a byte of padding where the length is odd."""
    end = 8 + int.from_bytes(view[4:8], "little")
    if bytes(view[8:12]) != b"WEBP":
        raise DecodeError(f"a RIFF file that is no WebP image; it starts with {bytes(view[:16])!r}")
    if end > len(view):
        raise DecodeError(f"WebP, byte 4: it promises {end} bytes, the file stops at byte {len(view)}")
    at, kinds = 12, set()
    while at + 8 <= end:
        length = int.from_bytes(view[at + 4 : at + 8], "little")
        kind = bytes(view[at : at + 4])
        kinds.add(kind)
        if at + 8 + length > end:
            raise DecodeError(f"WebP, byte {at}: chunk {kind!r} of {length} bytes ends behind the file, at {end}")
        at += 8 + length + length % 2
    if not kinds & {b"VP8 ", b"VP8L", b"ANMF"}:
        raise DecodeError(f"WebP, byte {end}: the file ends before any pixel data")
