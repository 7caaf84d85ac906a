"""An image file as it came: what its header says, and its pixels without any loss.

`decode_image` gives a training loop what it asked for; here nothing is dropped silently. Pixels are arrays
(height, width) of grey or (height, width, channels) of grey and alpha, RGB, or RGB and alpha, uint8; and uint16 for 16
bits of grey.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ImageCms
from PIL.ImageFile import ImageFile

from wdskit.codecs import exif
from wdskit.codecs.images import PNG_START, PillowImage, decode_image, open_pillow, pillow_error
from wdskit.codecs.jpeg import decode_jpeg, jpeg_size
from wdskit.errors import PROCESS_ERRORS, DecodeError

Pixels = NDArray[Any]

_GREY_16 = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})
_PLAIN = {"1": "L", "L": "L", "LA": "LA", "La": "LA", "P": "RGB", "PA": "RGBA", "RGB": "RGB", "RGBA": "RGBA"}
_PLAIN |= {"RGBX": "RGB", "RGBa": "RGBA", "YCbCr": "RGB"}
_SPACES = {"L": b"GRAY", "LA": b"GRAY", "RGB": b"RGB ", "RGBA": b"RGB ", "CMYK": b"CMYK"}
_BITS_PER_SAMPLE = 258  # the tag of TIFF


class Original(NamedTuple):
    """An image file whose header was read.

    Attributes:
        data: The file.
        image: Pillow's view of it, not loaded.
        format: Pillow's name: JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM.
        exif: Its EXIF block, empty without one. Those of a TIFF are its own tags, and not taken for one.
        orientation: 1 to 8. Always 1 for a TIFF, which Pillow turns while it decodes.
        icc: Its colour profile, empty without one.
    """

    data: bytes
    image: ImageFile
    format: str
    exif: bytes
    orientation: int
    icc: bytes

    @property
    def is_animated(self) -> bool:
        """Whether it holds several images."""
        return getattr(self.image, "n_frames", 1) > 1

    @property
    def has_deep_colour(self) -> bool:
        """Whether it has more than 8 bits a channel that Pillow does not give: it does so for grey alone."""
        if self.image.mode not in _PLAIN:
            return False
        if self.format == "PNG":
            return self.data[24] > 8
        if self.format == "TIFF":
            tags: Any = self.image.tag_v2  # type: ignore[attr-defined]
            return bool(max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8)
        arguments = self.image.tile[0].args if self.format == "PPM" and self.image.tile else None
        return isinstance(arguments, tuple) and isinstance(arguments[-1], int) and arguments[-1] > 255


def open_original(data: bytes, *, max_pixels: int) -> Original:
    """Read the header of an image file; no pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The format is unknown, or the header damaged.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    block = image.info.get("exif", b"") if image.format != "PNG" else _png_chunk(data, b"eXIf")
    block = b"" if image.format == "TIFF" else block.removeprefix(exif.PREFIX)
    icc = image.info.get("icc_profile") or b""
    return Original(data, image, image.format or "", block, exif.orientation_of(block), icc)


def _png_chunk(data: bytes, wanted: bytes) -> bytes:
    """What a chunk of a PNG holds, wherever it stands: Pillow sees those before the pixels only."""
    at = len(PNG_START)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == wanted:
            return data[at + 8 : at + 8 + length]
        at += 12 + length
    return b""


def decode_original(original: Original, *, step: int, max_pixels: int) -> tuple[Pixels, bytes, int]:
    """Decode to grey, RGB, or one of them with alpha.

    CMYK becomes RGB: sRGB by its colour profile, else by Pillow's plain formula. A palette becomes RGB, one bit grey.

    Args:
        original: The file.
        step: Of a JPEG, decode it at 1/step of its size where that can be done, as `jpeg.decode_jpeg` does.
        max_pixels: For a decoder that looks at the header again.

    Returns:
        The pixels, owned by the caller; the colour profile that they have, empty for none; and the step that was taken.

    Raises:
        DecodeError: The file is damaged, or its pixels have no such form.
    """
    mode = original.image.mode
    if original.format == "JPEG" and mode in {"L", "RGB"}:
        size = jpeg_size(original.data, max_pixels=max_pixels)
        pixels: Any = decode_jpeg(original.data, size, step) if size else None
        if pixels is None:
            step, pixels = 1, decode_image(original.data, "rgb8", max_pixels=max_pixels)  # tells damage
        return (np.ascontiguousarray(pixels[..., 0]) if mode == "L" else pixels), original.icc, step
    image = original.image
    try:
        image.load()
    except PROCESS_ERRORS:
        raise
    except Exception as err:
        raise pillow_error(original.format, err) from err
    if image.mode in _GREY_16 or (image.mode == "I" and original.format in {"PNG", "PPM"}):
        if "transparency" in image.info:
            raise DecodeError("16 bits of grey with a transparent one are not supported")
        return np.array(image).astype(np.uint16), original.icc, 1
    if image.mode == "CMYK":
        return (*_to_rgb(image, original.icc), 1)
    if image.mode not in _PLAIN:
        raise DecodeError(f"pixels of Pillow's mode {image.mode} have no form in 8 bits")
    target = _PLAIN[image.mode]
    if image.has_transparency_data:
        target = "LA" if target in {"L", "LA"} else "RGBA"
    return np.array(image.convert(target)), original.icc, 1


def to_rgb(pixels: Pixels, icc: bytes) -> tuple[Pixels, bytes]:
    """RGB of grey, with alpha where there is one, and the colour profile that it has then.

    Raises:
        DecodeError: The colour profile is damaged.
    """
    from PIL import Image

    if pixels.ndim == 2:
        return _to_rgb(Image.fromarray(pixels), icc)
    colours, icc = _to_rgb(Image.fromarray(np.ascontiguousarray(pixels[..., 0])), icc)
    return np.concatenate([colours, pixels[..., 1:]], axis=2), icc


def _to_rgb(image: PillowImage, icc: bytes) -> tuple[Pixels, bytes]:
    """RGB of grey or CMYK: sRGB, which needs no profile, where the file has a profile of its colours."""
    if not icc:
        return np.array(image.convert("RGB")), b""
    space = icc[16:20]  # ICC.1:2022, 7.2
    if space == _SPACES["RGB"] and image.mode == "L":
        return np.array(image.convert("RGB")), icc  # grey that was saved with a profile of RGB
    if space != _SPACES[image.mode]:
        raise DecodeError(f"its colour profile is of {space!r}, its pixels are {image.mode}")
    try:
        converted = ImageCms.profileToProfile(
            image, ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError) as err:
        raise DecodeError(f"its colour profile cannot be used: {err}") from err
    assert converted is not None
    return np.array(converted), b""
