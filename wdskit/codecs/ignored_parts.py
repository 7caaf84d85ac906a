"""Find the parts of an image file that decoding ignores: its EXIF orientation, and the frames after the first."""

from __future__ import annotations

from typing import Literal

from wdskit.codecs.edit import exif
from wdskit.codecs.formats import image_format
from wdskit.codecs.structure import png_chunks, webp_chunks
from wdskit.files import Buffer

Unused = Literal["orientation", "frames"]

_APP1 = 0xE1
_PLAIN_SEGMENTS = range(0xE0, 0xF0)
_COMMENT = 0xFE


def find_unused(data: Buffer) -> tuple[Unused, ...]:
    """Return which parts of an image file decoding ignores.

    Args:
        data: A whole file that `check_image` accepts.

    Returns:
        "orientation" if the EXIF orientation is not 1, and "frames" if the file has at least two frames. For a TIFF,
        "orientation" is never returned: Pillow applies the orientation of a TIFF.
    """
    view = memoryview(data).cast("B")
    block, num_frames = b"", 1
    match image_format(data):
        case "JPEG":
            block = _jpeg_exif(view)
        case "PNG":
            chunks = {kind: view[at + 8 : end - 4] for at, kind, end in png_chunks(view)}
            block = bytes(chunks.get(b"eXIf", b""))
            num_frames = int.from_bytes(chunks.get(b"acTL", b"")[:4], "big")
        case "WebP":
            found = [(kind, view[at + 8 : at + 8 + length]) for at, kind, length in webp_chunks(view)]
            block = next((bytes(part) for kind, part in found if kind == b"EXIF"), b"").removeprefix(exif.PREFIX)
            num_frames = sum(kind == b"ANMF" for kind, _ in found)
        case "GIF":
            num_frames = _count_gif_frames(view)
        case "TIFF":
            num_frames = _count_tiff_pages(view)
    has: dict[Unused, bool] = {"orientation": exif.orientation_of(block) > 1, "frames": num_frames > 1}
    return tuple(part for part in has if has[part])


def _jpeg_exif(view: memoryview) -> bytes:
    """Return the EXIF block of a JPEG without its prefix; b"" if no segment before the image's tables has one."""
    at = 2
    while at + 4 <= len(view) and view[at] == 0xFF and (view[at + 1] in _PLAIN_SEGMENTS or view[at + 1] == _COMMENT):
        end = at + 2 + (view[at + 2] << 8 | view[at + 3])
        if view[at + 1] == _APP1 and view[at + 4 : at + 10] == exif.PREFIX:
            return bytes(view[at + 10 : end])
        at = end
    return b""


def _count_gif_frames(view: memoryview) -> int:
    """Return the number of frames of a GIF: 0, 1, or 2 for two or more. Format: GIF89a, sections 17 to 25."""
    at, num_frames = 13 + _colour_table_bytes(view, 10), 0
    while num_frames < 2 and at < len(view) and view[at] in {0x21, 0x2C}:
        if view[at] == 0x2C:
            num_frames += 1
            at += 11 + _colour_table_bytes(view, at + 9)
        else:
            at += 2
        while at < len(view) and view[at]:
            at += 1 + view[at]
        at += 1
    return num_frames


def _colour_table_bytes(view: memoryview, at: int) -> int:
    flags = view[at] if at < len(view) else 0
    return 6 << (flags & 7) if flags & 0x80 else 0


def _count_tiff_pages(view: memoryview) -> int:
    """Return 2 if a TIFF (TIFF 6.0, 2) or BigTIFF has a second directory, else 1."""
    order: Literal["little", "big"] = "little" if bytes(view[:2]) == b"II" else "big"
    is_big = int.from_bytes(view[2:4], order) == 43
    offset_bytes, count_bytes, entry_bytes = (8, 8, 20) if is_big else (4, 2, 12)
    first = int.from_bytes(view[offset_bytes : 2 * offset_bytes], order)
    num_entries = int.from_bytes(view[first : first + count_bytes], order)
    following = first + count_bytes + entry_bytes * num_entries
    return 2 if any(view[following : following + offset_bytes]) else 1
