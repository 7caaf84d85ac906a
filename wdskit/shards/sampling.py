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
    """Parse `1%`, `0.5 %` or `100%` to an exact fraction.

    Raises:
        ConfigError: The text is not a percentage, or not over 0 and at most 100.
    """
    match = _PERCENTAGE.fullmatch(text.strip())
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the samples is a percentage such as 1% or 0.5%, not {text!r}.")
    return share


def choose_samples(
    count: int, share: Fraction, *, seed: int, shard: int, purpose: Literal["verify", "stats"]
) -> NDArray[np.int64]:
    """Choose the share of a shard of `count` samples. Return the rising numbers of the chosen samples, int64.

    The share is exact within one sample, and exact in total for shards of equal size. The choice depends on seed,
    number of the shard and purpose.
    """
    quota = ceil(share * (shard + 1) * count) - ceil(share * shard * count)
    return np.sort(permutation(count, purpose, seed, shard)[:quota])
