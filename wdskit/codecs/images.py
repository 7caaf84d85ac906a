"""Decode images to arrays, tensors or PIL images, with the values that webdataset's `decode` gives.

simplejpeg decodes JPEG. Pillow decodes the other formats, and JPEG files that simplejpeg refuses. A file's format is
read from its first bytes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL.ImageFile import ImageFile

from wdskit.codecs import structure
from wdskit.codecs.formats import image_format
from wdskit.errors import PROCESS_ERRORS, DecodeError, ImageTooLarge
from wdskit.files import Buffer

if TYPE_CHECKING:
    import torch


class ImageSpec(NamedTuple):
    """The type of image that `decode_image` returns.

    Attributes:
        kind: "numpy" for an array, "torch" for a tensor, "pil" for a PIL image.
        is_float: True for float32 0..1, False for uint8 0..255.
        mode: "L", "RGB" or "RGBA".
    """

    kind: str
    is_float: bool
    mode: str


IMAGE_SPECS: dict[str, ImageSpec] = {
    "l8": ImageSpec("numpy", False, "L"),
    "rgb8": ImageSpec("numpy", False, "RGB"),
    "rgba8": ImageSpec("numpy", False, "RGBA"),
    "l": ImageSpec("numpy", True, "L"),
    "rgb": ImageSpec("numpy", True, "RGB"),
    "rgba": ImageSpec("numpy", True, "RGBA"),
    "torchl8": ImageSpec("torch", False, "L"),
    "torchrgb8": ImageSpec("torch", False, "RGB"),
    "torchrgba8": ImageSpec("torch", False, "RGBA"),
    "torchl": ImageSpec("torch", True, "L"),
    "torchrgb": ImageSpec("torch", True, "RGB"),
    "torch": ImageSpec("torch", True, "RGB"),
    "torchrgba": ImageSpec("torch", True, "RGBA"),
    "pill": ImageSpec("pil", False, "L"),
    "pil": ImageSpec("pil", False, "RGB"),
    "pilrgb": ImageSpec("pil", False, "RGB"),
    "pilrgba": ImageSpec("pil", False, "RGBA"),
}
"""webdataset's image specs: numpy is HWC, torch is CHW; mode "L" has no channel axis."""

# Programs store their workflow in PNG files: more than Pillow's 1 MB, but all texts together have Pillow's other limit.
PngImagePlugin.MAX_TEXT_CHUNK = max(PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)

# Called directly, because `Image.open` warns from 90 megapixels on.
_PLUGINS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}

_DEEP_MODES = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
_INDEX_MODES = _DEEP_MODES | {"1", "L", "P"}
_TIFF_BITS, _TIFF_KIND = 258, 262  # tags BitsPerSample and PhotometricInterpretation: 0 is white or black, or a palette
_THUMBNAIL_QUALITY = 82
_OPACITY = 150
_HASH_FACTOR = 0x9E3779B1  # 2**32 divided by the golden ratio; odd, so that only 0 becomes 0
_BACKGROUND = (128, 128, 128)  # shown through transparent pixels

_JPEG_DAMAGE = ("premature end", "bad huffman code", "instead of rst")
"""Parts of libjpeg's messages about cut or garbled pixel data. Pillow would paint the rest of the image grey."""


def decode_image(data: Buffer, spec: str, *, max_pixels: int) -> NDArray[Any] | torch.Tensor | Image.Image:
    """Decode one image file.

    The image is converted to the mode of the spec. Alpha is dropped, or added as 255. Transparent palette colours get
    alpha if the spec has alpha. One-bit pixels become 0 or 255. Of 16-bit numbers, the upper 8 bits are kept. EXIF
    orientation is not applied, except to a TIFF.

    Args:
        data: The whole encoded file. Only the first frame of an animation is decoded.
        spec: A name of `IMAGE_SPECS`; any other text raises KeyError.
        max_pixels: Compared with width x height in the file's header, before any pixel is decoded.

    Returns:
        An array (height, width[, channels]), a tensor ([channels, ]height, width), or a loaded PIL image with the
        file's `info`. Arrays and tensors are uint8 0..255 or float32 0..1, C-contiguous, writable, owned by the caller.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The bytes are not one complete image of a known format, or the pixels are 32-bit or floating-point
            numbers.
    """
    wanted = IMAGE_SPECS[spec]
    pixels = _decode_whole_jpeg(data, wanted.mode, max_pixels)
    if wanted.kind == "pil":
        if pixels is None:
            return _decode_pillow(data, wanted.mode, max_pixels)
        image = Image.fromarray(pixels)
        image.info = dict(open_pillow(data, max_pixels=max_pixels).info)  # EXIF, colour profile and so on
        return image
    if pixels is None:
        pixels = np.array(_decode_pillow(data, wanted.mode, max_pixels))  # a copy: Pillow's own array is read-only
    values: NDArray[Any] = np.divide(pixels, np.float32(255), dtype=np.float32) if wanted.is_float else pixels
    if wanted.kind == "numpy":
        return values
    import torch

    return torch.from_numpy(np.ascontiguousarray(values.transpose(2, 0, 1)) if values.ndim == 3 else values)


def decode_index(data: Buffer, *, max_pixels: int) -> NDArray[np.int32]:
    """Decode the numbers that a mask or depth map stores, one number per pixel.

    For a palette image the numbers are the palette's indexes. For a grey image they are the stored numbers of any bit
    depth: 0 and 1 for one bit. Colour, scaling and gamma are not applied.

    Args:
        data: The whole encoded file. Only the first frame of an animation is decoded.
        max_pixels: Compared with width x height in the file's header, before any pixel is decoded.

    Returns:
        Array (height, width), int32 for every format, C-contiguous, writable, owned by the caller.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The bytes are not one complete image of a known format. Or the image does not store one whole
            number per pixel, or Pillow changes the numbers: of a PBM, of a PPM whose maximum is not 255 or 65,535, and
            of a grey TIFF whose header does not say that 0 is black.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    name, mode, most = image.format or "", image.mode, largest_number(data, image)
    # Pillow scales a PPM with another maximum, and 1 is black in a PBM. In a TIFF of another kind, 0 may be white.
    is_changed = name == "PPM" and (most not in {255, 65535} or mode == "1")
    is_changed |= name == "TIFF" and mode != "P" and _tags(image).get(_TIFF_KIND) != 1
    if mode not in _INDEX_MODES or is_changed:
        way = "with your own function (`map_dict`)" if mode == "F" else "as `rgb8`"
        raise DecodeError(f"a {name} image of mode {mode} does not store one number per pixel. Decode it {way}")
    pixels: Any = _decode_whole_jpeg(data, "L", max_pixels) if name == "JPEG" else None
    if pixels is None:
        with pillow_errors(name):
            image.load()
            pixels = np.array(image)
    numbers: NDArray[np.int32] = pixels.astype(np.int32)
    if mode == "L" and most < 255:  # Pillow scales the numbers to 0..255
        numbers //= 255 // most
    return numbers


def largest_number(data: Buffer, image: ImageFile) -> int:
    """Return the largest number that one channel of an image file can store, such as 255 for 8 bits.

    In a palette image, the index is the channel. `image` is the file `data`, opened by `open_pillow`.
    """
    if image.format == "PNG":
        return (1 << structure.png_bits(data)) - 1
    if image.format == "TIFF":
        return (1 << int(max(_tags(image).get(_TIFF_BITS, (1,))))) - 1
    if image.format == "PPM" and image.tile:
        arguments = image.tile[0].args
        most = arguments[-1] if isinstance(arguments, tuple) else None
        return most if isinstance(most, int) else 65535 if arguments == "I;16B" else 255
    return 255


def _is_grey_16(image: ImageFile) -> bool:
    """Return True if Pillow decodes the image to 16-bit grey."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"})


def _tags(image: ImageFile) -> Any:
    return image.tag_v2  # type: ignore[attr-defined]  # of TIFF


def open_pillow(data: Buffer, *, max_pixels: int) -> ImageFile:
    """Open an image with the Pillow plugin for the format that its first bytes show. No pixel is decoded yet.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The format is unknown, the header is damaged, or a PNG has no end chunk.
    """
    name = image_format(data)
    if name is None:
        start = f"it starts with {bytes(data[:8])!r} ({len(data)} bytes in all)" if len(data) else "the file is empty"
        raise DecodeError(f"not an image of a known format; {start}")
    if name == "WebP":  # Pillow allocates the whole canvas when it opens a WebP file
        header = structure.webp_header(data)
        structure.check_pixels(header.width, header.height, max_pixels=max_pixels)
    if name == "PNG" and all(kind != b"IEND" for _, kind, _ in structure.png_chunks(data)):
        # Pillow stops at the last pixel and would not see a cut after it.
        raise DecodeError(f"not one complete PNG image: it stops at byte {len(data)}, before its end chunk")
    with pillow_errors(name):
        image = _PLUGINS[name](io.BytesIO(data))
    structure.check_pixels(*image.size, max_pixels=max_pixels)
    return image


@contextlib.contextmanager
def pillow_errors(name: str) -> Iterator[None]:
    """Replace Pillow's errors in the `with` block by DecodeError, or by ImageTooLarge for a decompression bomb.

    `PROCESS_ERRORS`, such as MemoryError, are not replaced. `name` is the image format, for the message.
    """
    try:
        yield
    except PROCESS_ERRORS:
        raise
    except Image.DecompressionBombError as err:
        raise ImageTooLarge(str(err)) from err
    except Exception as err:
        raise DecodeError(f"Pillow cannot read this {name} image: {str(err) or type(err).__name__}") from err


def _decode_whole_jpeg(data: Buffer, mode: str, max_pixels: int) -> NDArray[np.uint8] | None:
    """Decode a JPEG with simplejpeg to `mode`: "L", "RGB" or "RGBA".

    Returns:
        Array (height, width, channels), or (height, width) for mode "L". None if Pillow must decode the file: another
        format, a damaged header, or a file that simplejpeg refuses.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The header promises 0 pixels, or the pixel data is cut or garbled.
    """
    header = structure.colour_jpeg_header(data, max_pixels=max_pixels)
    if header is None:
        return None
    # libjpeg's grey of a colour image is its Y channel, up to 16 levels away from Pillow's grey of the clipped RGB.
    target = header.mode if header.mode == "CMYK" else "RGB" if mode == "L" else mode
    target = "GRAY" if mode == header.mode == "L" else target
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, target)
    except ValueError as err:
        if any(damage in str(err).lower() for damage in _JPEG_DAMAGE):
            raise DecodeError(f"not one complete JPEG image: {err}") from err
        return None  # extraneous bytes, unusual subsampling
    if target in {"GRAY", mode}:
        return pixels[..., 0] if target == "GRAY" else pixels
    if target == "CMYK":
        pixels = 255 - pixels  # as Pillow: in the files of Adobe's programs, 255 is no ink
    return np.array(Image.frombytes(target, pixels.shape[1::-1], pixels).convert(mode))


def _decode_pillow(data: Buffer, mode: str, max_pixels: int) -> Image.Image:
    """Decode an image with Pillow, and return the loaded image in the mode `mode`: "L", "RGB" or "RGBA".

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: The bytes are not one complete image of a known format, or the pixels are 32-bit or floating-point
            numbers.
    """
    image = open_pillow(data, max_pixels=max_pixels)
    if image.mode in {"I", "F"} and not _is_grey_16(image):  # Pillow would clip them at 0 and 255
        if image.mode == "I":
            raise DecodeError("its pixels are 32-bit numbers, which do not fit into 8 bits. Decode it as `index`")
        raise DecodeError("its pixels are floating-point numbers. Decode it with your own function (`map_dict`)")
    with pillow_errors(image.format or ""):
        image.load()
        if _is_grey_16(image):
            # Pillow would clip grey at 255. Of 16-bit RGB it keeps the upper byte; here that is done for grey.
            upper = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert(mode)
            upper.info = dict(image.info)
            return upper
        if mode != "RGBA" and isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]  # otherwise `convert` warns
        return image.convert(mode)


def make_thumbnail(data: Buffer, *, side: int, max_pixels: int) -> tuple[bytes, tuple[int, int]]:
    """Return a JPEG of at most side x side pixels, and the (width, height) of the original image.

    Smaller images are not enlarged. EXIF orientation is not applied, except to a TIFF. Transparent pixels are grey.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: `decode_image` cannot decode the file.
    """
    image: Any = decode_image(data, "pilrgba", max_pixels=max_pixels)
    size = image.size
    image.thumbnail((side, side))
    thumbnail = Image.new("RGB", image.size, _BACKGROUND)
    thumbnail.paste(image, mask=image.getchannel("A"))
    stream = io.BytesIO()
    thumbnail.save(stream, "JPEG", quality=_THUMBNAIL_QUALITY)
    return stream.getvalue(), size


def may_be_mask(data: Buffer, *, max_pixels: int) -> bool:
    """Return True if an image's header shows lossless storage of one number per pixel.

    Return False for other images, for damaged files, and for images of more than `max_pixels`.
    """
    if image_format(data) in {None, "JPEG", "WebP"}:
        return False
    with contextlib.suppress(DecodeError):
        return open_pillow(data, max_pixels=max_pixels).mode in _INDEX_MODES
    return False


def make_mask_overlay(data: Buffer, *, side: int, max_pixels: int) -> bytes:
    """Return a PNG of at most side x side pixels that shows each number of a mask as a colour, and 0 as transparent.

    Raises:
        ImageTooLarge: The header promises more than `max_pixels`.
        DecodeError: `decode_index` cannot decode the file.
    """
    numbers = decode_index(data, max_pixels=max_pixels)
    step = max(1, -(-max(numbers.shape) // side))
    hashes = numbers[::step, ::step].astype(np.uint32) * np.uint32(_HASH_FACTOR)  # close numbers get distant colours
    bytes_of = [(hashes >> shift).astype(np.uint8) for shift in (24, 16, 8)]
    opacity = np.where(hashes, np.uint8(_OPACITY), np.uint8(0))
    stream = io.BytesIO()
    Image.fromarray(np.stack([*bytes_of, opacity], axis=-1)).save(stream, "PNG")
    return stream.getvalue()
