"""Small image files for tests."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image


def image_bytes(kind: str = "JPEG", *, number: int = 0, size: tuple[int, int] = (12, 8)) -> bytes:
    """A whole image file of one colour, another for each number."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256 % 256, 99)).save(buffer, kind)
    return buffer.getvalue()


def make_folder(folder: Path, classes: dict[str, int], *, kind: str = "JPEG", suffix: str = ".jpg") -> Path:
    """An image folder: so many images in each class."""
    number = 0
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for at in range(count):
            (folder / name / f"{at:04d}{suffix}").write_bytes(image_bytes(kind, number=number))
            number += 1
    return folder
