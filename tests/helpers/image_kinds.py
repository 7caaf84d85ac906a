"""Images of the kinds that a transform takes, and of others."""

from __future__ import annotations

import numpy as np
import torch
from images import pixels
from PIL import Image

KINDS = ["numpy", "numpy grey", "numpy float"]
OTHERS = ["torch", "torch grey", "pil", "pil grey"]


def make(kind, height, width):
    """Return an image of a kind. All grey kinds have the same pixels, and so have all colour kinds."""
    grey = "grey" in kind
    array = pixels(height, width, 3)
    array = array[..., 0].copy() if grey else array
    if kind.startswith("pil"):
        return Image.fromarray(array)
    if "float" in kind:
        array = array.astype(np.float32) / np.float32(255)
    if kind.startswith("numpy"):
        return array
    return torch.from_numpy(array if grey else array.transpose(2, 0, 1).copy())
