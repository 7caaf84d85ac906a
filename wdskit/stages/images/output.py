"""The form of an image that leaves the stages from `decode` to `normalize` and `to_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.stages.images import geometry


@dataclass(frozen=True)
class OutputFormat:
    """The form of an image.

    Attributes:
        is_float: Whether the values are float32, 0..1 or normalized; otherwise uint8.
        is_tensor: Whether a sample has a tensor (3, height, width); otherwise an array (height, width, 3).
        normalize: Mean and standard deviation of `normalize`, for values 0..1; None without `normalize`.
    """

    is_float: bool
    is_tensor: bool = False
    normalize: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the image, float32 or uint8."""
        return np.dtype(np.float32 if self.is_float else np.uint8)

    @property
    def factors(self) -> bytes | None:
        """The argument with which the code in C writes values of this format. None: uint8. Empty bytes: value / 255.
        Otherwise value * scale + shift, with three scales and three shifts as bytes of float32.
        """
        if not self.is_float:
            return None
        if self.normalize is None:
            return b""
        mean, std = self.normalize
        numbers = np.concatenate(geometry.affine_numbers(tuple(mean), tuple(std), 255.0))
        return np.repeat(numbers, 6 // len(numbers)).tobytes()


def to_numbers(pixels: NDArray[np.uint8], output_format: OutputFormat) -> NDArray[Any]:
    """Return the values of one uint8 image, (height, width, 3), in a format: uint8, or the bits of float32 that the
    code in C writes with `output_format.factors`.
    """
    if not output_format.is_float:
        return pixels
    if output_format.normalize is None:
        unit: NDArray[np.float32] = np.divide(pixels, np.float32(255), dtype=np.float32)
        return unit
    values: Any = geometry.normalize(pixels, *output_format.normalize)
    numbers: NDArray[np.float32] = values
    return numbers


def as_value(image: NDArray[Any], output_format: OutputFormat) -> Any:
    """Return an image in the form that a sample has: an array (height, width, 3) or a tensor (3, height, width).

    Args:
        image: The values of `output_format`, or uint8 to convert to it, (height, width, 3). The result may be a view.
        output_format: The format of the result.
    """
    values = to_numbers(image, output_format) if image.dtype == np.uint8 else image
    if not output_format.is_tensor:
        return values
    import torch

    return torch.from_numpy(values).permute(2, 0, 1)
