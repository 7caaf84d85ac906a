"""Side-cars: files that stand beside an image, are called as it is up to its extension, and belong to its sample."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import check_field
from wdskit.errors import KeyRuleError, PackError
from wdskit.packing.rows import field_of


class Together(NamedTuple):
    """An image and the files beside it.

    Attributes:
        image: Its path.
        beside: Path of each side-car by field; two of one field are a fault, which is told where the sample is made.
    """

    image: str
    beside: tuple[tuple[str, str], ...]


class SideCars:
    """Which extensions are those of side-cars.

    Args:
        extensions: As `json`, `txt` or `seg.png`; in a file's name in any case.

    Raises:
        PackError: One is no name of a field, or stands twice.
    """

    def __init__(self, extensions: Sequence[str]) -> None:
        for extension in extensions:
            try:
                check_field(extension)
            except KeyRuleError as err:
                raise PackError(f"side_cars: {err}\n  Write extensions: json,txt,seg.png.") from err
        if len(set(extensions)) < len(extensions):
            raise PackError(f"side_cars: {','.join(extensions)} names one twice.")
        self._suffixes = sorted((f".{extension}" for extension in extensions), key=len, reverse=True)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._suffixes)

    def has(self, path: str) -> bool:
        """Whether a file is one by its name."""
        return self._suffix_of(path) != ""

    def _suffix_of(self, path: str) -> str:
        """The longest of the suffixes that a path ends with; empty for none."""
        lower = path.lower()
        return next((suffix for suffix in self._suffixes if lower.endswith(suffix)), "")

    def sort_out(self, paths: Sequence[str]) -> tuple[list[Together], int]:
        """The images among files whose names are alike, each with its side-cars; and how many files are left over."""
        images: list[str] = []
        beside: dict[str, list[tuple[str, str]]] = {}
        num_other = 0
        for path in paths:
            suffix = self._suffix_of(path)
            if suffix:
                beside.setdefault(path[: -len(suffix)], []).append((suffix[1:], path))
            elif is_image_field(field_of(path)):
                images.append(path)
            else:
                num_other += 1
        found = [Together(image, tuple(beside.get(os.path.splitext(image)[0], ()))) for image in images]
        stems = {os.path.splitext(image)[0] for image in images}
        num_alone = sum(len(cars) for stem, cars in beside.items() if stem not in stems)
        return found, num_other + num_alone
