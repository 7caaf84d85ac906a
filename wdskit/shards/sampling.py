"""Choose a share of the samples of each shard: `--sample 10%`."""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from wdskit.errors import ConfigError
from wdskit.order.keys import permutation

_PERCENTAGE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?) ?%")


def parse_share(text: str) -> Fraction:
    """Parse `1%`, `0.5 %` or `100%` to an exact fraction.

    Raises:
        ConfigError: `text` is not the text of a percentage, is 0%, or is over 100%.
    """
    match = _PERCENTAGE.fullmatch(str(text).strip())  # a user of the Python API may pass a float
    share = Fraction(match[1]) / 100 if match else Fraction(0)
    if not 0 < share <= 1:
        raise ConfigError(f"a share of the samples is a percentage such as 1% or 0.5%, not {text!r}.")
    return share


def check_seed(seed: int) -> None:
    """Raise ConfigError if `seed` is not from 0 to 2**64 - 1."""
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed: {seed!r} must be a whole number, 0 or more, and below 2**64.")


def choose_samples(count: int, share: Fraction, *, seed: int, shard: int) -> NDArray[np.int64]:
    """Choose a random share of the samples of one shard. Return their numbers: int64, ascending.

    `count` is the number of samples in the shard, `shard` is the shard's number. The size of the result is rounded
    up for some shards and down for others, so that the total over shards of equal size is exact.

    Another `seed` gives another choice.
    """
    quota = ceil(share * (shard + 1) * count) - ceil(share * shard * count)
    return np.sort(permutation(count, "verify", seed, shard)[:quota])
