"""The split of a sample: a draw from its key, or from a value in its JSON, compared with the shares of the splits.

The draw is a hash of the seed and the text: an integer from 0 to 2**64 - 1. The shares divide this range among the
splits. So a sample keeps its split in another shard or folder, and all samples of one patient get the same split.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import JSON_FIELDS
from wdskit.dataset.classes import plain_value
from wdskit.dataset.columns import check_split_name
from wdskit.errors import SelectionError, check_whole

SPLIT_SEED = 0
"""Default seed of `wdskit split`. `pack --split` uses this seed, so both give a key the same split."""

_SHARE = re.compile(r"(\d{1,18}(\.\d{1,18})?|\.\d{1,18})%?|\d{1,18}/0{0,9}[1-9]\d{0,17}", re.ASCII)
_MAX_CHARS = 1000
_EXAMPLE = "Write train=0.8,val=0.1,test=0.1."

Shares = Mapping[str, Fraction]
"""Share of each split by its name. Each share is over 0, their sum is 1, and their order divides the range of draws."""


def split_source(
    shares: str | Mapping[str, object], *, by: str = "key", seed: int = SPLIT_SEED, missing: str | None = None
) -> dict[str, Any]:
    """Return the definition of a split, which is stored with its column. Options that mean the same give the same
    definition. `wdskit.split` describes the options.

    Raises:
        SelectionError: The shares, `by`, `seed` or `missing` are invalid.
    """
    parsed = parse_shares(shares)
    field, _, path = by.partition(":")
    is_json = field.rpartition(".")[2] in JSON_FIELDS and "" not in path.split(".")
    if by != "key" and not (is_json and len(by) <= _MAX_CHARS and by.isprintable()):
        raise SelectionError(f"by: {by!r} is neither `key` nor a value of a JSON field. Write key or json:patient.id.")
    if missing is not None and (by == "key" or missing not in parsed):
        msg = f"missing: {missing!r} must be a split of {format_shares(parsed)}"
        raise SelectionError(f"{msg}, and `by` a value of a JSON field.")
    source = {"split": format_shares(parsed), "by": by, "missing": missing, "seed": check_seed(seed)}
    return {name: value for name, value in source.items() if value not in (None, 0, "key")}


def check_seed(seed: int) -> int:
    """Return `seed` as an int. Raise SelectionError if it is not from 0 to 2**64 - 1."""
    return check_whole("seed", seed, SelectionError, most=2**64 - 1)


class SplitName:
    """Gives the name of the split to which a sample belongs. `source` is the definition from `split_source`."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        shares = parse_shares(source["split"])
        self._by = source.get("by", "key")
        self._field, _, self._path = self._by.partition(":")
        self._missing = source.get("missing")
        self._names, self._bounds = list(shares), bounds_of(shares).tolist()
        self._draw = make_draw(source.get("seed", SPLIT_SEED))

    def wants(self, name: str) -> bool:
        """Return whether `value` needs the field `name`."""
        return bool(self._path) and name == self._field

    def value(self, key: str, fields: Mapping[str, object]) -> str:
        """Return the split of the sample `key`. `fields` has its JSON value. ValueError: The value by which to split is
        missing or empty and the source does not name a split as `missing`, or it is a list or an object.
        """
        text: str | None = key
        if self._path:
            found = fields.get(self._field)
            for part in self._path.split("."):
                found = found.get(part) if isinstance(found, dict) else None
            text = canonical_text(found)
        if text is not None:
            draw = int.from_bytes(self._draw(text), "little")
            return self._names[bisect.bisect_right(self._bounds, draw)]
        if self._missing is None:
            raise ValueError(f"{self._by} is missing or empty. Name a split for such samples with --missing")
        return str(self._missing)


def canonical_text(value: Any) -> str | None:
    """Convert a JSON value to text: 17, 17.0, "17" and "17.0" to the same, as `plain_value` does, and true and "true".

    Return None for null, NaN and blank text. ValueError: The value is a list or an object.
    """
    # Two versions of a table may differ in types. A group in two splits is worse than two groups with the same split.
    value = plain_value(value)
    if isinstance(value, dict | list):
        raise ValueError("a list or an object cannot decide the split. Name a value inside it")  # noqa: TRY004
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def make_draw(seed: int) -> Callable[[str], bytes]:
    """Return a function that hashes a text with `seed` to a draw: 8 bytes, little-endian."""
    keyed = hashlib.blake2b(digest_size=8, person=b"wdskit split", salt=seed.to_bytes(16, "little"))

    def draw(text: str) -> bytes:
        one = keyed.copy()
        one.update(text.encode("utf-8", "surrogatepass"))
        return one.digest()

    return draw


def parse_shares(shares: str | Mapping[str, object]) -> Shares:
    """Parse the names and shares of splits. Return the share of each split, in the given order.

    Args:
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping. A share is a decimal, a fraction (`1/3`) or a percentage
            (`80%`); the float 0.1 means exactly 1/10.

    Raises:
        SelectionError: A share is not a number over 0 and at most 1, a name is invalid or comes twice, or the sum is
            not 1.
    """
    pairs: list[tuple[str, object]] = [] if isinstance(shares, str) else [*shares.items()]
    for part in shares.split(",") if isinstance(shares, str) else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise SelectionError(f"{part.strip()!r} is not NAME=SHARE. {_EXAMPLE}")
        pairs.append((name.strip(), value.strip()))
    found: dict[str, Fraction] = {}
    for name, given in pairs:
        check_split_name(name)
        if name in found:
            raise SelectionError(f"the shares name {name!r} twice. {_EXAMPLE}")
        text = format(Decimal(repr(float(given))), "f") if isinstance(given, float) else str(given)
        share = Fraction(text.rstrip("%")) / (100 if "%" in text else 1) if _SHARE.fullmatch(text) else Fraction(0)
        if not 0 < share <= 1:
            raise SelectionError(f"{name}={given} is not a share: a share is more than 0 and at most 1. {_EXAMPLE}")
        found[name] = share
    total = sum(found.values(), Fraction(0))
    if total != 1:
        msg = f"the shares {format_shares(found)} add up to {format_share(total)}, not to 1."
        raise SelectionError(msg + f"\n  Name the rest too: add unused={format_share(1 - total)}." * (total < 1))
    return found


def format_share(share: Fraction) -> str:
    """Return the shortest exact text of a share: a decimal if one exists, otherwise a fraction."""
    for digits in range(19):
        scaled = share * 10**digits
        if scaled.denominator == 1:
            number = f"{scaled.numerator:0{digits + 1}d}"
            return f"{number[:-digits]}.{number[-digits:]}" if digits else number
    return f"{share.numerator}/{share.denominator}"


def format_shares(shares: Shares) -> str:
    """Return the text from which `parse_shares` returns the same shares."""
    return ",".join(f"{name}={format_share(share)}" for name, share in shares.items())


def bounds_of(shares: Shares) -> NDArray[np.uint64]:
    """Return the smallest draw of each split after the first split: uint64 (num_splits - 1,), ascending."""
    sums = list(accumulate(shares.values()))[:-1]
    return np.array([int(total * (1 << 64)) for total in sums], dtype=np.uint64)


def choose_splits(draws: NDArray[np.uint64], shares: Shares) -> NDArray[np.int64]:
    """Return the split of each draw, as its position in `shares`: int64 (num_draws,)."""
    return np.searchsorted(bounds_of(shares), draws, side="right")
