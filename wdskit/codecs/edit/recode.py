"""Turn, resize and encode one image file again; a file that needs no change is returned unchanged.

Unlike `decode_image`, which is for training loops, nothing is dropped silently here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageCms
from PIL.ImageFile import ImageFile

from wdskit.codecs.edit import exif, resize
from wdskit.codecs.edit.encode import DEFAULT_QUALITY, FORMATS, ImageFormat, encode_image
from wdskit.codecs.edit.geometry import Geometry, fitted, turned
from wdskit.codecs.edit.resize import Fit, Pixels, ResizeMode, Size
from wdskit.codecs.images import (
    decode_image,
    decode_jpeg,
    is_grey_16,
    jpeg_size,
    largest_number,
    open_pillow,
    pillow_errors,
)
from wdskit.codecs.structure import check_pixels, png_chunks
from wdskit.errors import DecodeError

_ORIENTATION = 274  # a tag of TIFF
_PLAIN = {"1": "L", "L": "L", "LA": "LA", "La": "LA", "P": "RGB", "PA": "RGBA", "RGB": "RGB", "RGBA": "RGBA"}
_PLAIN |= {"RGBX": "RGB", "RGBa": "RGBA", "YCbCr": "RGB"}
_SPACES = {"L": b"GRAY", "LA": b"GRAY", "RGB": b"RGB ", "RGBA": b"RGB ", "CMYK": b"CMYK"}


class Original(NamedTuple):
    """An image file whose header was read.

    Attributes:
        image: Pillow's view of `data`, not loaded.
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


def open_original(data: bytes, *, max_pixels: int) -> Original:
    """Read the header of an image file; no pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The format is unknown, or the header damaged.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    if image.format == "PNG":  # Pillow sees chunks before the pixels only
        block = next((data[at + 8 : end - 4] for at, kind, end in png_chunks(data) if kind == b"eXIf"), b"")
    else:
        block = image.info.get("exif", b"")
    block = b"" if image.format == "TIFF" else block.removeprefix(exif.PREFIX)
    icc = image.info.get("icc_profile") or b""
    return Original(data, image, image.format or "", block, exif.orientation_of(block), icc)


def decode_original(original: Original, *, step: int, max_pixels: int) -> tuple[Pixels, bytes, int]:
    """Decode to grey, RGB, or one of them with alpha.

    CMYK becomes RGB: sRGB by its colour profile, else by Pillow's plain formula. A palette becomes RGB, one bit grey. A
    JPEG is decoded at 1/step of its size where that can be done, as `decode_jpeg` does.

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
            step, pixels = (
                1,
                decode_image(original.data, "rgb8", max_pixels=max_pixels),
            )  # raises if it is damaged
        return (np.ascontiguousarray(pixels[..., 0]) if mode == "L" else pixels), original.icc, step
    image = original.image
    with pillow_errors(original.format):
        image.load()
    if is_grey_16(image):
        if "transparency" in image.info:
            raise DecodeError("16-bit grey with a transparent value is not supported")
        return np.array(image).astype(np.uint16), original.icc, 1
    if image.mode == "CMYK":
        return (*_to_rgb(image, original.icc), 1)
    if image.mode not in _PLAIN:
        raise DecodeError(f"pixels of Pillow's mode {image.mode} cannot be converted to 8 bits")
    target = _PLAIN[image.mode]
    if image.has_transparency_data:
        target = "LA" if target in {"L", "LA"} else "RGBA"
    return np.array(image.convert(target)), original.icc, 1


def to_rgb(pixels: Pixels, icc: bytes) -> tuple[Pixels, bytes]:
    """RGB of grey, with alpha where there is one, and the colour profile that it has then.

    Raises:
        DecodeError: The colour profile is damaged.
    """
    if pixels.ndim == 2:
        return _to_rgb(Image.fromarray(pixels), icc)
    colours, icc = _to_rgb(Image.fromarray(np.ascontiguousarray(pixels[..., 0])), icc)
    return np.concatenate([colours, pixels[..., 1:]], axis=2), icc


def _to_rgb(image: Image.Image, icc: bytes) -> tuple[Pixels, bytes]:
    """RGB of grey or CMYK: sRGB, which needs no profile, where the file has a profile of its colours."""
    if not icc:
        return np.array(image.convert("RGB")), b""
    space = icc[16:20]  # ICC.1:2022, 7.2
    if space == _SPACES["RGB"] and image.mode == "L":
        return np.array(image.convert("RGB")), icc  # grey that was saved with a profile of RGB
    if space != _SPACES[image.mode]:
        raise DecodeError(f"its colour profile is for {space!r}, but its pixels are {image.mode}")
    try:
        converted = ImageCms.profileToProfile(
            image, ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError) as err:
        raise DecodeError(f"its colour profile cannot be used: {err}") from err
    assert converted is not None
    return np.array(converted), b""


class Recoded(NamedTuple):
    """An image as wanted, its format by Pillow's name, and what happened to the places in it."""

    data: bytes
    format: str
    geometry: Geometry


@dataclass(frozen=True)
class Recoding:
    """The changes to make to each image.

    Attributes:
        size: What it is resized to; None keeps its pixels.
        mode: How, see `resize.fit`.
        upscale: Whether smaller images are made larger.
        format: What it is written as; None keeps the format of each.
        quality: 1 to 100, of JPEG and WebP, where an image is encoded.
        orient: Whether the EXIF orientation is applied to the pixels. Otherwise the EXIF block keeps it.
        background: Colour behind transparent images where the format has no alpha, and around padded ones; None refuses
            the first, and is black for the second.
        max_pixels: Most pixels of an image, before and after.
    """

    size: int | None = None
    mode: ResizeMode = "shorter"
    upscale: bool = False
    format: ImageFormat | None = None
    quality: int = DEFAULT_QUALITY
    orient: bool = False
    background: tuple[int, int, int] | None = None
    max_pixels: int = 1 << 62

    def apply(self, data: bytes) -> Recoded:
        """The image as wanted.

        An image that has the wanted format, size and orientation is returned unchanged. Other images keep the EXIF
        block and the colour profile, but not XMP, IPTC, comments and texts.

        Raises:
            DecodeError: It cannot be made; the message begins with the stage: "decode", "convert", "resize", "encode".
        """
        with _stage("decode"):
            original = open_original(data, max_pixels=self.max_pixels)
        to = resize.fit(*original.image.size, self.size, self.mode, upscale=self.upscale)
        with _stage("resize"):
            check_pixels(*to.canvas, max_pixels=self.max_pixels)
        is_turned = self.orient and original.orientation > 1
        is_right = self.format is None or FORMATS.get(original.format) == self.format
        if is_right and not is_turned and to.canvas == original.image.size and to.size == to.part:
            return Recoded(data, original.format, _geometry(original, to, is_turned=False))
        if getattr(original.image, "n_frames", 1) > 1:
            raise DecodeError(f"decode: it is animated ({original.format}); only still images are supported")
        fmt = self.format or FORMATS.get(original.format)
        if fmt is None:
            raise DecodeError(f"encode: a {original.format} cannot be written. Choose another format with --format")
        pixels, icc = self._pixels(original, fmt, to)
        if is_turned:
            pixels = resize.turn(pixels, original.orientation)
        block = exif.without_orientation(original.exif) if self.orient else original.exif
        with _stage("encode"):
            encoded = encode_image(pixels, fmt, quality=self.quality, exif=block, icc=icc)
        name = next(name for name, known in FORMATS.items() if known == fmt)
        return Recoded(encoded, name, _geometry(original, to, is_turned=is_turned))

    def _pixels(self, original: Original, fmt: ImageFormat, to: Fit) -> tuple[Pixels, bytes]:
        """The pixels as the format holds them, resized, and their colour profile."""
        # Of grey alone Pillow gives more than 8 bits.
        if fmt == "png" and original.image.mode in _PLAIN and largest_number(original.data, original.image) > 255:
            raise DecodeError(
                "convert: colour with more than 8 bits per channel cannot be kept. Convert to jpg or webp: --format"
            )
        with _stage("decode"):
            pixels, icc, step = decode_original(original, step=resize.choose_step(to), max_pixels=self.max_pixels)
        with _stage("convert"):
            if pixels.dtype == np.uint16 and fmt != "png":
                pixels = (pixels >> 8).astype(np.uint8)
            if fmt == "jpg" and pixels.ndim == 3 and pixels.shape[2] in {2, 4}:
                pixels = self._without_alpha(pixels)
            if fmt == "webp" and (pixels.ndim == 2 or pixels.shape[2] == 2):
                pixels, icc = to_rgb(pixels, icc)
        pixels = resize.resize_part(pixels, to, step)
        return resize.pad(pixels, to.canvas, self.background), icc

    def _without_alpha(self, pixels: Pixels) -> Pixels:
        """Grey or RGB, composed on the background where any pixel is transparent."""
        alpha = pixels[..., -1:].astype(np.uint32)
        colours = pixels[..., :-1]
        if alpha.min() < 255:
            if self.background is None:
                raise DecodeError("it is transparent, which a jpg cannot be. Choose a background colour: --background")
            behind = resize.fill_value(pixels[..., 0] if colours.shape[2] == 1 else colours, self.background)
            colours = ((colours * alpha + behind * (255 - alpha) + 127) // 255).astype(np.uint8)
        return np.ascontiguousarray(colours[..., 0] if colours.shape[2] == 1 else colours)


def _geometry(original: Original, to: Fit, *, is_turned: bool) -> Geometry:
    size, orientation = Size(*original.image.size), original.orientation
    is_cut = to.part != size
    if original.format == "TIFF":  # Pillow turns it while it decodes, before it is fitted, and says the turned size
        orientation = original.image.tag_v2.get(_ORIENTATION, 1)  # type: ignore[attr-defined]
        orientation = orientation if orientation in range(1, 9) else 1
        back = turned(size, orientation).after
        return Geometry(turned(back, orientation).then(fitted(size, to)), is_cut, orientation, is_turned=True)
    move = fitted(size, to)
    if is_turned:
        move = move.then(turned(move.after, orientation))
    return Geometry(move, is_cut, orientation, is_turned)


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Errors begin with the stage that they come from."""
    try:
        yield
    except DecodeError as err:
        raise type(err)(f"{name}: {err}") from err
