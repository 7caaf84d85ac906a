"""Edit PNG masks. Pixels move, and their numbers are never blended. Bit depth, palette and transparency stay."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.edit.exif import orientation_of
from wdskit.codecs.edit.geometry import Geometry, only_move
from wdskit.codecs.edit.resize import Size
from wdskit.codecs.formats import PNG_START, image_format
from wdskit.codecs.images import decode_index, open_pillow, pillow_errors
from wdskit.codecs.structure import png_chunks
from wdskit.errors import DecodeError

_KEPT = {b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"iCCP", b"cICP", b"sBIT", b"bKGD", b"pHYs"}
_KEPT |= {b"tEXt", b"zTXt", b"iTXt"}
_LEVEL = 6


def move_mask(data: bytes, geometries: list[Geometry], *, fill: int | None, max_pixels: int) -> bytes:
    """Edit a mask in the same way as its image: resize, cut, pad and turn.

    Args:
        data: The whole PNG file: grey, a palette, or colours with 8 bits per channel.
        geometries: How the images of the sample were edited.
        fill: The number that padding stores in added pixels. With None, adding a pixel is an error.
        max_pixels: Limit for width x height in the file's header.

    Returns:
        The new PNG file, or `data` if no pixel moves. Then only the format, the header and the size are checked.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: One of these is true:

            - The file is not a PNG, is damaged, stores colours with more than 8 bits, is animated, or has an EXIF
              orientation.
            - No image of the sample has the size of the mask, or images of this size were edited differently.
            - Padding adds pixels, and `fill` is None or a number that the file cannot store.
    """
    if image_format(data) != "PNG":
        raise DecodeError("a mask must be a PNG file")
    image = open_pillow(data, max_pixels=max_pixels)
    move = only_move(geometries, Size(*image.size))
    if Geometry(move).is_same:
        return data
    chunks = [(kind, data[at + 8 : end - 4]) for at, kind, end in png_chunks(data)]
    header = chunks[0][1]
    bits, colours = header[8], header[9]
    if any(kind == b"acTL" for kind, _ in chunks):
        raise DecodeError("it is animated; only still images are supported")
    if any(kind == b"eXIf" and orientation_of(block) > 1 for kind, block in chunks):
        raise DecodeError("the mask itself has an EXIF orientation. Remove it first")
    if colours not in {0, 3} and bits > 8:
        raise DecodeError("colours with more than 8 bits per channel cannot be kept in a mask")
    pixels: Any
    if colours in {0, 3}:
        pixels = decode_index(data, max_pixels=max_pixels).astype(np.uint16 if bits == 16 else np.uint8)
    else:
        with pillow_errors("PNG"):
            image.load()
            pixels = np.array(image)
    probe = move.nearest(np.zeros((move.before.height, move.before.width), np.uint8), 1)
    if probe.any():  # pixels are added
        if fill is None:
            raise DecodeError("padding adds pixels to the mask. Choose their number with --mask-fill, for example 255")
        if colours not in {0, 3}:
            raise DecodeError("the mask has colours, which cannot store the number of --mask-fill")
        if fill >= 1 << bits:
            raise DecodeError(f"the mask cannot store the number {fill} of --mask-fill: it has {bits} bits per channel")
    return _encode(move.nearest(pixels, fill or 0), bits, colours, [one for one in chunks if one[0] in _KEPT])


def _encode(pixels: NDArray[Any], bits: int, colours: int, chunks: list[tuple[bytes, bytes]]) -> bytes:
    """Return a PNG file (ISO 15948) whose pixels are the numbers in `pixels`.

    `bits` and `colours` are the bit depth and the colour type in the header (IHDR). `chunks` are further chunks, as
    (type, data), before the pixels.
    """
    height, width = pixels.shape[:2]
    if bits < 8:
        planes = (pixels[..., None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8)) & 1
        rows = np.packbits(planes.reshape(height, width * bits), axis=1)
    else:
        rows = np.ascontiguousarray(pixels.astype(">u2" if bits == 16 else "u1")).view(np.uint8).reshape(height, -1)
    unfiltered = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(unfiltered.tobytes(), _LEVEL)), (b"IEND", b"")]
    return PNG_START + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big") for kind, data in parts
    )
