"""Small image files for tests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def image_bytes(kind: str = "JPEG", *, number: int = 0, size: tuple[int, int] = (12, 8)) -> bytes:
    """Return a whole image file of one colour; each number gives another colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256 % 256, 99)).save(buffer, kind)
    return buffer.getvalue()


def make_folder(folder: Path, classes: dict[str, int], *, kind: str = "JPEG", suffix: str = ".jpg") -> Path:
    """Write an image folder; `classes` maps each class to its number of images."""
    number = 0
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for at in range(count):
            (folder / name / f"{at:04d}{suffix}").write_bytes(image_bytes(kind, number=number))
            number += 1
    return folder


def pixels(*shape, seed=0):
    """Return an array of noise."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def photo(height=21, width=34):
    """Return a smooth image, which JPEG can compress."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 5 % 256, columns * 3 % 256, (rows + columns) * 2 % 256], axis=-1).astype(np.uint8)


def encoded(image, fmt, **options):
    """Return an array or PIL image as the bytes of a file."""
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, fmt, **options)
    return stream.getvalue()


def palette_image(*, transparency=None):
    """Return a palette image: three rows of the same four colours."""
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) % 4).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


FILES = {
    "jpeg": encoded(photo(), "JPEG", quality=90),
    "jpeg 4:4:4": encoded(photo(), "JPEG", quality=95, subsampling=0),
    "jpeg 4:2:2": encoded(pixels(17, 33, 3), "JPEG", subsampling=1),
    "jpeg progressive": encoded(photo(), "JPEG", progressive=True),
    "jpeg grey": encoded(photo()[..., 0], "JPEG"),
    "jpeg cmyk": encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG"),
    "jpeg rgb": encoded(photo(), "JPEG", keep_rgb=True),
    "jpeg one pixel": encoded(photo(1, 1), "JPEG"),
    "png": encoded(pixels(5, 7, 3), "PNG"),
    "png grey": encoded(pixels(5, 7), "PNG"),
    "png alpha": encoded(pixels(5, 7, 4), "PNG"),
    "png grey alpha": encoded(Image.fromarray(pixels(5, 7, 2), "LA"), "PNG"),
    "png one bit": encoded(Image.fromarray(pixels(5, 7) > 100), "PNG"),
    "png palette": encoded(palette_image(), "PNG"),
    "png palette, one transparent": encoded(palette_image(transparency=1), "PNG", transparency=1),
    "png colour key": encoded(photo(), "PNG", transparency=(0, 0, 0)),
    "webp": encoded(photo(), "WEBP"),
    "webp lossless": encoded(photo(), "WEBP", lossless=True),
    "webp alpha": encoded(pixels(5, 7, 4), "WEBP", lossless=True, exact=True),
    "gif": encoded(palette_image(), "GIF"),
    "gif animated": encoded(
        palette_image(), "GIF", save_all=True, append_images=[palette_image().transpose(Image.Transpose.ROTATE_180)]
    ),
    "bmp": encoded(pixels(5, 7, 3), "BMP"),
    "tiff": encoded(pixels(5, 7, 3), "TIFF"),
    "tiff lzw": encoded(pixels(5, 7, 3), "TIFF", compression="tiff_lzw"),
    "ppm": encoded(pixels(5, 7, 3), "PPM"),
    "pgm": encoded(pixels(5, 7), "PPM"),
    "pbm": encoded(Image.fromarray(pixels(5, 7) > 100), "PPM"),
}
"""One whole file of each kind that is decoded."""

_SCAN = FILES["jpeg"].index(b"\xff\xda")
EXTRANEOUS = {
    "before the scan": FILES["jpeg"][:_SCAN] + b"\1\2\3" + FILES["jpeg"][_SCAN:],
    "before the end": FILES["jpeg"][:-2] + 60 * b"\1\2\3" + FILES["jpeg"][-2:],
}
"""JPEGs that simplejpeg refuses, one of them when it reads the header, and that Pillow accepts."""
