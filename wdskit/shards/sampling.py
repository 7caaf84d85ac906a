"""A share of the samples of each shard: `--sample 10%`."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import ConfigError
from wdskit.order.keys import permutation

_PERCENTAGE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?) ?%")


def parse_share(text: str) -> Fraction:
    """`1%`, `0.5 %`, `100%` as an exact fraction.

    Raises:
        ConfigError: It is no percentage over 0 and up to 100.
    """
    match = _PERCENTAGE.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the samples is a percentage such as 1% or 0.5%, not {text!r}.")
    return share


def choose_samples(
    count: int, share: Fraction, *, seed: int, shard: int, purpose: Literal["verify", "stats"]
) -> NDArray[np.int64]:
    """Numbers of the chosen samples of one shard of `count`, rising: its share within one; of all shards of one size,
    exact. Another seed, place among the shards or purpose chooses others.
    """
    quota = ceil(share * (shard + 1) * count) - ceil(share * shard * count)
    return np.sort(permutation(count, purpose, seed, shard)[:quota])
