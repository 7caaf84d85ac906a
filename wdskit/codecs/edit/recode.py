"""Rotate, resize and encode one image file; a file that needs no change is returned unchanged.

Unlike `decode_image`, which is for training loops, this module loses no alpha, frame, profile or EXIF block silently.
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
from wdskit.codecs.edit.geometry import Geometry, resize_move, turn_move
from wdskit.codecs.edit.resize import Pixels, ResizeMode, ResizePlan, Size
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

_ORIENTATION = 274  # TIFF tag
_PLAIN = {"1": "L", "L": "L", "LA": "LA", "La": "LA", "P": "RGB", "PA": "RGBA", "RGB": "RGB", "RGBA": "RGBA"}
_PLAIN |= {"RGBX": "RGB", "RGBa": "RGBA", "YCbCr": "RGB"}
_SPACES = {"L": b"GRAY", "LA": b"GRAY", "RGB": b"RGB ", "RGBA": b"RGB ", "CMYK": b"CMYK"}


class Original(NamedTuple):
    """An image file whose header was read.

    Attributes:
        data: The whole file.
        image: The file opened by Pillow, not loaded.
        format: Pillow's name: JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM.
        exif: The EXIF block; empty if the file has no EXIF block. Always empty for a TIFF, whose EXIF is its own tags.
        orientation: EXIF orientation to apply after decoding, 1 to 8; 1 for a TIFF.
        tiff_orientation: Orientation of a TIFF, 1 to 8; 1 for other formats. Pillow applies it when it decodes, and
            `image.size` is the size after this.
        icc: The colour profile; empty if the file has no profile.
    """

    data: bytes
    image: ImageFile
    format: str
    exif: bytes
    orientation: int
    tiff_orientation: int
    icc: bytes


def open_original(data: bytes, *, max_pixels: int) -> Original:
    """Read the header of an image file; no pixel is decoded.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The format is unknown, the header is damaged, or a PNG has no end chunk.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    if image.format == "PNG":  # Pillow reads only the chunks before the pixels
        block = next((data[at + 8 : end - 4] for at, kind, end in png_chunks(data) if kind == b"eXIf"), b"")
    else:
        block = image.info.get("exif", b"")
    turned = 1
    if image.format == "TIFF":
        block, turned = b"", image.tag_v2.get(_ORIENTATION, 1)  # type: ignore[attr-defined]  # decoding removes the tag
    block = block.removeprefix(exif.PREFIX)
    icc = image.info.get("icc_profile") or b""
    turned = turned if turned in range(1, 9) else 1
    return Original(data, image, image.format or "", block, exif.orientation_of(block), turned, icc)


def decode_original(original: Original, *, step: int, max_pixels: int) -> tuple[Pixels, bytes, int]:
    """Decode an image to grey or RGB, with or without alpha.

    - CMYK with a colour profile becomes sRGB; without a profile, Pillow's plain formula makes RGB.
    - A palette becomes RGB, one bit becomes 8-bit grey.
    - 16-bit grey stays uint16. All other pixels are uint8.
    - A grey or RGB JPEG is decoded at 1/step of its size if `decode_jpeg` can. All other files get step 1.

    Args:
        original: The image, from `open_original`.
        step: 1, 2, 4 or 8.
        max_pixels: Limit for width x height of a JPEG.

    Returns:
        The pixels, owned by the caller; their colour profile, empty if they have no profile; and the used step.

    Raises:
        ImageTooLarge: The header of a JPEG promises more than `max_pixels`.
        DecodeError: The file is damaged, or its pixels cannot be converted.
    """
    mode = original.image.mode
    if original.format == "JPEG" and mode in {"L", "RGB"}:
        size = jpeg_size(original.data, max_pixels=max_pixels)
        pixels: Any = decode_jpeg(original.data, size, step) if size else None
        if pixels is None:  # decode_image raises if the file is damaged
            step, pixels = 1, decode_image(original.data, "rgb8", max_pixels=max_pixels)
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
    """Convert grey to RGB, or grey and alpha to RGB and alpha.

    Args:
        pixels: Grey (height, width), or grey and alpha (height, width, 2).
        icc: The colour profile of the pixels; empty if they have no profile.

    Returns:
        The pixels, and their new colour profile. The profile is empty if `icc` was empty or the pixels are now sRGB. An
        RGB profile is returned unchanged.

    Raises:
        DecodeError: The colour profile is damaged, or is neither for grey nor for RGB.
    """
    if pixels.ndim == 2:
        return _to_rgb(Image.fromarray(pixels), icc)
    colours, icc = _to_rgb(Image.fromarray(np.ascontiguousarray(pixels[..., 0])), icc)
    return np.concatenate([colours, pixels[..., 1:]], axis=2), icc


def _to_rgb(image: Image.Image, icc: bytes) -> tuple[Pixels, bytes]:
    """Convert a grey or CMYK image to RGB. Return the pixels and their new colour profile.

    - If `icc` is empty, Pillow's plain formula converts the pixels, and the new profile is empty.
    - If `icc` is for the colours of the image, the pixels become sRGB, and the new profile is empty.
    - If the image is grey and `icc` is for RGB, the new profile is `icc`.

    Raises DecodeError if `icc` is damaged or is for other colours.
    """
    if not icc:
        return np.array(image.convert("RGB")), b""
    space = icc[16:20]  # ICC.1:2022, 7.2
    if space == _SPACES["RGB"] and image.mode == "L":
        return np.array(image.convert("RGB")), icc  # some programs save grey with an RGB profile
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


class RecodedImage(NamedTuple):
    """An image file after an edit, Pillow's name of its format, and how the edit moved the points of the image."""

    data: bytes
    format: str
    geometry: Geometry


@dataclass(frozen=True)
class Recoding:
    """The changes to make to each image.

    Attributes:
        size: Length of a side in pixels; None does not resize.
        mode: "shorter" makes the shorter side `size`, "longer" the longer side. "crop" makes the shorter side `size`
            and cuts the longer side to `size`. "pad" makes the longer side `size` and pads the shorter side to `size`.
        upscale: Whether smaller images are made larger.
        format: Format of the written file; None keeps the format of each file.
        quality: 1 to 100, for JPEG and WebP files that are encoded again.
        orient: Whether to apply the EXIF orientation to the pixels. If False, it stays in the EXIF block.
        background: Colour for padding, and behind transparent pixels in jpg. With None, padding is black or
            transparent, and a transparent image raises DecodeError for jpg.
        max_pixels: Limit for width x height, before and after the change.
    """

    size: int | None = None
    mode: ResizeMode = "shorter"
    upscale: bool = False
    format: ImageFormat | None = None
    quality: int = DEFAULT_QUALITY
    orient: bool = False
    background: tuple[int, int, int] | None = None
    max_pixels: int = 1 << 62

    def apply(self, data: bytes) -> RecodedImage:
        """Edit one image file.

        A file that already has the format, size and orientation is returned unchanged. Other files keep the EXIF block
        and the colour profile, but lose XMP, IPTC, comments and texts. The tags of a TIFF are lost, and so is the
        colour profile if the pixels are converted to sRGB.

        Raises:
            ImageTooLarge: The image, before or after the change, has more than `max_pixels`.
            DecodeError: The image cannot be edited. The message begins with "decode", "convert", "resize" or "encode".
        """
        with _stage("decode"):
            original = open_original(data, max_pixels=self.max_pixels)
        plan = resize.plan_resize(*original.image.size, self.size, self.mode, upscale=self.upscale)
        with _stage("resize"):
            check_pixels(*plan.canvas, max_pixels=self.max_pixels)
        is_turned = self.orient and original.orientation > 1
        is_right = self.format is None or FORMATS.get(original.format) == self.format
        if is_right and not is_turned and plan.canvas == original.image.size and plan.size == plan.part:
            stored = turn_move(Size(*original.image.size), original.tiff_orientation).after
            orientation = max(original.orientation, original.tiff_orientation)
            return RecodedImage(data, original.format, Geometry(turn_move(stored, 1), orientation=orientation))
        if getattr(original.image, "n_frames", 1) > 1:
            raise DecodeError(f"decode: it is animated ({original.format}); only still images are supported")
        fmt = self.format or FORMATS.get(original.format)
        if fmt is None:
            raise DecodeError(f"encode: a {original.format} cannot be written. Choose another format with --format")
        pixels, icc = self._pixels(original, fmt, plan)
        if is_turned:
            pixels = resize.turn(pixels, original.orientation)
        block = exif.without_orientation(original.exif) if self.orient else original.exif
        with _stage("encode"):
            encoded = encode_image(pixels, fmt, quality=self.quality, exif=block, icc=icc)
        name = next(name for name, known in FORMATS.items() if known == fmt)
        return RecodedImage(encoded, name, _geometry(original, plan, is_turned=is_turned))

    def _pixels(self, original: Original, fmt: ImageFormat, plan: ResizePlan) -> tuple[Pixels, bytes]:
        """Return the pixels that `fmt` can store, resized by the plan, and their colour profile. For errors, see
        `apply`.
        """
        # Pillow returns more than 8 bits per channel only for grey.
        if fmt == "png" and original.image.mode in _PLAIN and largest_number(original.data, original.image) > 255:
            raise DecodeError(
                "convert: colour with more than 8 bits per channel cannot be kept. Convert to jpg or webp: --format"
            )
        with _stage("decode"):
            pixels, icc, step = decode_original(original, step=resize.choose_step(plan), max_pixels=self.max_pixels)
        with _stage("convert"):
            if pixels.dtype == np.uint16 and fmt != "png":
                pixels = (pixels >> 8).astype(np.uint8)
            if fmt == "jpg" and pixels.ndim == 3 and pixels.shape[2] in {2, 4}:
                pixels = self._without_alpha(pixels)
            if fmt == "webp" and (pixels.ndim == 2 or pixels.shape[2] == 2):
                pixels, icc = to_rgb(pixels, icc)
        pixels = resize.resize_part(pixels, plan, step)
        return resize.pad(pixels, plan.canvas, self.background), icc

    def _without_alpha(self, pixels: Pixels) -> Pixels:
        """Return the grey or RGB pixels without the alpha channel, which is the last one.

        Transparent pixels are blended with the background. Raises DecodeError if the background is None and a pixel is
        transparent, even partly.
        """
        alpha = pixels[..., -1:].astype(np.uint32)
        colours = pixels[..., :-1]
        if alpha.min() < 255:
            if self.background is None:
                raise DecodeError("it is transparent, which a jpg cannot be. Choose a background colour: --background")
            background = resize.fill_value(pixels[..., 0] if colours.shape[2] == 1 else colours, self.background)
            colours = ((colours * alpha + background * (255 - alpha) + 127) // 255).astype(np.uint8)
        return np.ascontiguousarray(colours[..., 0] if colours.shape[2] == 1 else colours)


def _geometry(original: Original, plan: ResizePlan, *, is_turned: bool) -> Geometry:
    size, orientation = Size(*original.image.size), original.orientation
    is_cut = plan.part != size
    if original.format == "TIFF":  # Pillow has turned it before the resize
        turn = turn_move(turn_move(size, original.tiff_orientation).after, original.tiff_orientation)
        return Geometry(turn.then(resize_move(size, plan)), is_cut, original.tiff_orientation, is_turned=True)
    move = resize_move(size, plan)
    if is_turned:
        move = move.then(turn_move(move.after, orientation))
    return Geometry(move, is_cut, orientation, is_turned)


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Put `name` and a colon before the message of a DecodeError that the `with` block raises."""
    try:
        yield
    except DecodeError as err:
        raise type(err)(f"{name}: {err}") from err
