"""Digests of batches, to compare them to the bit."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from wdskit import Ragged


def digest_of(value: Any) -> bytes:
    """Return a digest of a batch's types, shapes and bytes."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            part = part.contiguous().numpy()
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Ragged):
            add(part.values)
            add(part.offsets)
        elif isinstance(part, dict):
            for name, inner in sorted(part.items()):
                add(name)
                add(inner)
        elif isinstance(part, (list, tuple)):
            digest.update(b"%d" % len(part))
            for inner in part:
                add(inner)
        else:
            digest.update(repr(part).encode())

    add(value)
    return digest.digest()
