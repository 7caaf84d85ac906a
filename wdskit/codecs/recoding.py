"""One image file into another: turned, resized, encoded anew; or left as it is where nothing has to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wdskit.codecs import exif
from wdskit.codecs.encoding import DEFAULT_QUALITY, FORMATS, ImageFormat, encode_image
from wdskit.codecs.fitting import Fit, ResizeMode, Size, fit
from wdskit.codecs.images import check_pixels
from wdskit.codecs.originals import Original, Pixels, decode_original, open_original, to_rgb
from wdskit.codecs.resizing import choose_step, fill_value, pad, resize_part, turn
from wdskit.errors import DecodeError

_ALPHA = (2, 4)  # channels


@dataclass(frozen=True)
class Recoding:
    """What is done to each image.

    Attributes:
        size: What it is resized to; None keeps its pixels.
        mode: How, see `fitting.fit`.
        upscale: Whether smaller images are made larger.
        format: What it is written as; None keeps the format of each.
        quality: 1 to 100, of JPEG and WebP, where an image is encoded.
        orient: Whether the EXIF orientation is applied to the pixels. Otherwise it is kept as it is.
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

    def apply(self, data: bytes) -> tuple[bytes, str]:
        """The image as wanted, and its format by Pillow's name.

        An image that has the wanted format, size and orientation is returned as it is. Of others the EXIF block and
        the colour profile are kept; XMP, IPTC, comments and texts are not.

        Raises:
            DecodeError: It cannot be made; the message begins with the stage: "decode", "convert", "resize", "encode".
        """
        with _stage("decode"):
            original = open_original(data, max_pixels=self.max_pixels)
        to = self._fit(original)
        turned = self.orient and original.orientation > 1
        is_right = self.format is None or FORMATS.get(original.format) == self.format
        if is_right and not turned and to.canvas == original.image.size and to.size == to.part:
            return data, original.format
        fmt = self._format(original)
        block = exif.without_orientation(original.exif) if self.orient else original.exif
        pixels, icc = self._pixels(original, fmt, to)
        pixels = turn(pixels, original.orientation) if turned else pixels
        with _stage("encode"):
            encoded = encode_image(pixels, fmt, quality=self.quality, exif=block, icc=icc)
        return encoded, next(name for name, known in FORMATS.items() if known == fmt)

    def _fit(self, original: Original) -> Fit:
        width, height = original.image.size
        if self.size is None:
            return Fit(0, 0, Size(width, height), Size(width, height), Size(width, height))
        to = fit(width, height, self.size, self.mode, upscale=self.upscale)
        with _stage("resize"):
            check_pixels(*to.canvas, max_pixels=self.max_pixels)
        return to

    def _format(self, original: Original) -> ImageFormat:
        """What an image that has to be encoded is written as."""
        if original.is_animated:
            raise DecodeError(f"decode: it is animated ({original.format}); one image is expected")
        fmt = self.format or FORMATS.get(original.format)
        if fmt is None:
            raise DecodeError(f"encode: a {original.format} is not written. Say what it becomes with --format")
        return fmt

    def _pixels(self, original: Original, fmt: ImageFormat, to: Fit) -> tuple[Pixels, bytes]:
        """The pixels as the format holds them, resized, and their colour profile."""
        if fmt == "png" and original.has_deep_colour:
            raise DecodeError("convert: more than 8 bits a channel of colour are not kept. Write jpg or webp: --format")
        with _stage("decode"):
            pixels, icc, step = decode_original(original, step=choose_step(to), max_pixels=self.max_pixels)
        with _stage("convert"):
            if pixels.dtype == np.uint16 and fmt != "png":
                pixels = (pixels >> 8).astype(np.uint8)
            if fmt == "jpg" and pixels.ndim == 3 and pixels.shape[2] in _ALPHA:
                pixels = self._without_alpha(pixels)
            if fmt == "webp" and (pixels.ndim == 2 or pixels.shape[2] == 2):
                pixels, icc = to_rgb(pixels, icc)
        pixels = resize_part(pixels, to, step)
        return pad(pixels, to.canvas, self.background), icc

    def _without_alpha(self, pixels: Pixels) -> Pixels:
        """Grey or RGB, composed on the background where any pixel is transparent."""
        alpha = pixels[..., -1:].astype(np.uint32)
        colours = pixels[..., :-1]
        if alpha.min() < 255:
            if self.background is None:
                raise DecodeError("it is transparent, which a jpg cannot be. Name a colour behind it: --background")
            behind = fill_value(pixels[..., 0] if colours.shape[2] == 1 else colours, self.background)
            colours = ((colours * alpha + behind * (255 - alpha) + 127) // 255).astype(np.uint8)
        return np.ascontiguousarray(colours[..., 0] if colours.shape[2] == 1 else colours)


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Errors begin with the stage that they come from."""
    try:
        yield
    except DecodeError as err:
        raise type(err)(f"{name}: {err}") from err
