"""Shares of samples: a percentage of each shard, and named splits of the draws that texts give."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.selection import check_selection_name
from wdskit.errors import ConfigError, SelectionError
from wdskit.order.keys import permutation

SPLIT_SEED = 0
"""The seed that `wdskit split` has by default, so that `pack --split` gives a key the same split."""

_PERCENTAGE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?) ?%")
_SHARE = re.compile(r"(\d{1,18}(\.\d{1,18})?|\.\d{1,18})%?|\d{1,18}/0{0,9}[1-9]\d{0,17}", re.ASCII)
_MAX_SPLITS = 100
_EXAMPLE = "Write train=0.8,val=0.1,test=0.1."

Shares = Mapping[str, Fraction]
"""Each more than 0, together 1, in the order in which they are cut from the range of draws."""


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


def make_draw(seed: int) -> Callable[[str], bytes]:
    """What draws for a text: 8 bytes, which `draws_of` reads."""
    keyed = hashlib.blake2b(digest_size=8, person=b"wdskit split", salt=seed.to_bytes(16, "little"))

    def draw(text: str) -> bytes:
        one = keyed.copy()
        one.update(text.encode("utf-8", "surrogatepass"))
        return one.digest()

    return draw


def draws_of(digests: Iterable[bytes]) -> NDArray[np.uint64]:
    """Draws as numbers, 0 to 2**64: uint64 (num_texts,)."""
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def parse_shares(shares: str | Mapping[str, object]) -> Shares:
    """Names and shares, checked.

    Args:
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping. A share is a decimal, a fraction (`1/3`) or a percentage
            (`80%`); a float means the decimal that it is written as.

    Raises:
        SelectionError: One cannot be read, is 0 or less, a name is invalid or comes twice, or they do not add up to 1.
    """
    pairs = _split_text(shares) if isinstance(shares, str) else list(shares.items()) or _split_text("")
    if len(pairs) > _MAX_SPLITS:
        raise SelectionError(f"{len(pairs)} shares are more than the {_MAX_SPLITS} splits that a folder can have.")
    found: dict[str, Fraction] = {}
    for name, value in pairs:
        check_selection_name(name)
        if name in found:
            raise SelectionError(f"the shares name {name!r} twice. {_EXAMPLE}")
        found[name] = _parse_share(name, value)
    total = sum(found.values(), Fraction(0))
    if total != 1:
        msg = f"the shares {format_shares(found)} add up to {format_share(total)}, not to 1."
        if total < 1:
            msg += f"\n  Name the rest too: add unused={format_share(1 - total)}."
        raise SelectionError(msg)
    return found


def _split_text(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for part in text.split(","):
        name, equals, share = part.partition("=")
        if not equals:
            raise SelectionError(f"{part.strip()!r} is not NAME=SHARE. {_EXAMPLE}")
        pairs.append((name.strip(), share.strip()))
    return pairs


def _parse_share(name: str, value: object) -> Fraction:
    """One share. A float is taken as it is written: 0.1 is a tenth."""
    share = Fraction(0)
    if isinstance(value, int | Fraction) and not isinstance(value, bool):
        share = Fraction(value)
    else:
        text = format(Decimal(repr(float(value))), "f") if isinstance(value, float) else str(value)
        if _SHARE.fullmatch(text):
            share = Fraction(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share <= 1:
        raise SelectionError(f"{name}={value} is not a share: a share is more than 0 and at most 1. {_EXAMPLE}")
    return share


def format_share(share: Fraction) -> str:
    """The shortest exact text of a share: a decimal where there is one, else a fraction."""
    for digits in range(19):
        scaled = share * 10**digits
        if scaled.denominator == 1:
            number = f"{scaled.numerator:0{digits + 1}d}"
            return f"{number[:-digits]}.{number[-digits:]}" if digits else number
    return f"{share.numerator}/{share.denominator}"


def format_shares(shares: Shares) -> str:
    """The text that `parse_shares` reads back."""
    return ",".join(f"{name}={format_share(share)}" for name, share in shares.items())


def bounds_of(shares: Shares) -> NDArray[np.uint64]:
    """Where each split but the first begins in the range of draws, 0 to 2**64: uint64 (num_splits - 1,)."""
    sums = list(accumulate(shares.values()))[:-1]
    return np.array([int(total * (1 << 64)) for total in sums], dtype=np.uint64)


def choose_splits(draws: NDArray[np.uint64], shares: Shares) -> NDArray[np.int64]:
    """Which split, by its place among the shares, each draw belongs to."""
    return np.searchsorted(bounds_of(shares), draws, side="right")
