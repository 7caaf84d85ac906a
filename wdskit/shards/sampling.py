"""`verify --sample 1%`: the images of an exact share of the samples, chosen by a seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import ConfigError
from wdskit.order.keys import permutation

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?) ?%")


def parse_share(text: str) -> Fraction:
    """`1%`, `0.5 %`, `100%` as an exact fraction.

    Raises:
        ConfigError: It is no percentage over 0 and up to 100.
    """
    match = _SHARE.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the samples is a percentage such as 1% or 0.5%, not {text!r}.")
    return share


def choose_samples(counts: Sequence[int], share: Fraction, seed: int) -> list[NDArray[np.int64]]:
    """Numbers of the chosen samples of each shard, rising: of all samples exactly the share, rounded up; of each shard
    its own share, within one.

    Args:
        counts: Samples of each shard.
        share: Over 0 and up to 1.
        seed: 0 <= seed < 2**64.
    """
    chosen = []
    total = 0
    for shard, count in enumerate(counts):
        quota = ceil(share * (total + count)) - ceil(share * total)
        chosen.append(np.sort(permutation(count, "verify", seed, shard)[:quota]))
        total += count
    return chosen
