"""A subset of the samples of a list of shards, as a bitmap: 10^8 samples take 14 MB."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_BLOCK_BYTES = 64  # bytes of the bitmap between two stored counts
_BLOCK_BITS = 8 * _BLOCK_BYTES
_CHUNK = 1 << 14  # samples that `take` looks up at once, which bounds its memory

_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_NUM_ONES = _BYTES.sum(axis=1, dtype=np.uint8)
_NTH_ONE = np.argsort(1 - _BYTES, axis=1, kind="stable").astype(np.int64)
"""Position of the n-th 1 in each byte, (256, 8); positions after the last 1 are those of its zeros."""


class Subset:
    """The samples of a list of shards that a mask keeps. The kept samples of each shard are numbered from 0.

    Args:
        file_counts: Number of samples of each shard, int64 (num_shards,).
        mask: Whether each sample is kept, shard after shard: bool (sum of `file_counts`,).

    Attributes:
        counts: Number of kept samples of each shard, int64 (num_shards,).

    Raises:
        ValueError: `mask` does not have one value per sample.
    """

    def __init__(self, file_counts: Ints, mask: NDArray[np.bool_]) -> None:
        edges: Ints = np.concatenate([np.zeros(1, np.int64), np.cumsum(file_counts)])
        if mask.shape != (edges[-1],):
            msg = f"the mask has the shape {mask.shape}, but the shards have {edges[-1]} samples"
            raise ValueError(msg)
        self._firsts = edges[:-1]  # number of the first sample of each shard, over all shards
        self._bitmap = np.zeros((len(mask) // _BLOCK_BITS + 1, _BLOCK_BYTES), dtype=np.uint8)
        packed = np.packbits(mask, bitorder="little")
        self._bitmap.reshape(-1)[: len(packed)] = packed
        in_blocks = _NUM_ONES[self._bitmap].sum(axis=1, dtype=np.int64)
        self._before: Ints = np.cumsum(in_blocks) - in_blocks  # kept samples before each block
        blocks, rest = np.divmod(edges, _BLOCK_BITS)
        bits = np.unpackbits(self._bitmap[blocks], axis=1, bitorder="little")
        inside = (bits * (np.arange(_BLOCK_BITS) < rest[:, None])).sum(axis=1, dtype=np.int64)
        kept_before = self._before[blocks] + inside
        self.counts: Ints = np.diff(kept_before)
        self._kept_before: Ints = kept_before[:-1]  # kept samples before each shard

    def digest(self) -> bytes:
        """Return 32 bytes that identify which samples are kept: sha256 of the bitmap."""
        return hashlib.sha256(self._bitmap.data).digest()

    def contains(self, numbers: Ints) -> NDArray[np.bool_]:
        """Return whether each sample is kept, bool (n,). `numbers`, int64 (n,), are sample numbers over all shards."""
        octets = self._bitmap.reshape(-1)[numbers >> 3]
        kept: NDArray[np.bool_] = (octets >> (numbers & 7).astype(np.uint8) & 1).astype(np.bool_)
        return kept

    def take(self, shards: Ints, places: Ints) -> Ints:
        """Return the number of each kept sample among all samples of its shard, int64 (n,).

        Args:
            shards: Number of the shard of each sample, int64 (n,).
            places: Number of each sample among the kept samples of its shard, int64 (n,), 0 <= places[i] <
                counts[shards[i]].
        """
        numbers = np.empty_like(places)
        for first in range(0, len(places), _CHUNK):
            part = slice(first, first + _CHUNK)
            ranks = self._kept_before[shards[part]] + places[part]
            blocks = np.searchsorted(self._before, ranks, side="right") - 1
            ranks -= self._before[blocks]
            rows, octets = np.arange(len(blocks)), self._bitmap[blocks]
            ones = _NUM_ONES[octets]
            seen = np.cumsum(ones, axis=1, dtype=np.int16)
            at = (seen <= ranks[:, None]).sum(axis=1)
            nth = ranks - (seen[rows, at] - ones[rows, at])
            numbers[part] = blocks * _BLOCK_BITS + 8 * at + _NTH_ONE[octets[rows, at], nth] - self._firsts[shards[part]]
        return numbers
