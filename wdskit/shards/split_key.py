"""What a sample belongs to when a folder is split: its key, or a value of its JSON, as a draw from 0 to 2**64.

The draw is a keyed hash of the text alone, so a sample keeps its draw wherever it stands, and all samples of one
patient, in whatever folder, have the same one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import JSON_FIELDS, decode_field
from wdskit.dataset.samples import HeaderReader, read_span
from wdskit.dataset.selection import check_selection_name
from wdskit.errors import DecodeError, SelectionError
from wdskit.storage.urls import LocalFile
from wdskit.tar.walk import Span

_PURPOSE = b"wdskit split"
_DRAW_BYTES = 8
_SHOWN_CHARS = 60
_MAX_CHARS = 1000

SPLIT_SEED = 0
"""The seed that `wdskit split` has by default, so that `pack --split` gives a key the same split."""


@dataclass(frozen=True)
class SplitKey:
    """Which text of a sample decides where it goes.

    Attributes:
        field: The JSON field that holds it, None for the sample's key.
        path: Names that lead to the value inside the field.
        seed: Another seed gives other draws.
        may_miss: Whether a sample may have no such value.
    """

    field: str | None
    path: tuple[str, ...]
    seed: int
    may_miss: bool = False

    @property
    def text(self) -> str:
        """As `parse_by` reads it."""
        return "key" if self.field is None else f"{self.field}:{'.'.join(self.path)}"


class Drawn(NamedTuple):
    """The draws of a shard's samples: uint64 (num_samples,). `missing` is true where a sample has no value."""

    draws: NDArray[np.uint64]
    missing: NDArray[np.bool_]


def parse_by(by: str, *, seed: int, may_miss: bool) -> SplitKey:
    """`key`, or a JSON field and the way to a value in it: `json:patient.id`.

    Raises:
        SelectionError: It is neither, or the seed is out of range.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise SelectionError(f"seed: {seed!r} must be a whole number, 0 or more, and below 2**64.")
    if by == "key":
        if may_miss:
            raise SelectionError("missing: every sample has a key, so nothing can be missing. Leave it out.")
        return SplitKey(None, (), seed)
    field, colon, way = by.partition(":")
    path = tuple(way.split("."))
    if (
        not colon
        or len(by) > _MAX_CHARS
        or field.rpartition(".")[2] not in JSON_FIELDS
        or "" in path
        or not by.isprintable()
    ):
        raise SelectionError(f"by: {by!r} is neither `key` nor a value of a JSON field. Write key or json:patient.id.")
    return SplitKey(field, path, seed, may_miss)


def make_draw(seed: int) -> Callable[[str], bytes]:
    """What draws for a text: 8 bytes, which `draws_of` reads."""
    keyed = hashlib.blake2b(digest_size=_DRAW_BYTES, person=_PURPOSE, salt=seed.to_bytes(16, "little"))

    def draw(text: str) -> bytes:
        one = keyed.copy()
        one.update(text.encode("utf-8", "surrogatepass"))
        return one.digest()

    return draw


def draws_of(digests: Iterable[bytes]) -> NDArray[np.uint64]:
    """Draws as numbers, 0 to 2**64: uint64 (num_texts,)."""
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def draw_shard(path: str, split_key: SplitKey) -> Drawn:
    """The draws of a local shard's samples, in order. Read are the headers, and of the payloads the one JSON field.

    Raises:
        ShardError: The shard is invalid.
        SelectionError: A sample has no such value, or none that can be one; it names shard, key and field.
        StorageError: It cannot be read.
    """
    draw = make_draw(split_key.seed)
    digests: list[bytes] = []
    missing: list[bool] = []
    file = LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
    try:
        for sample in HeaderReader(file, shard=path):
            text = sample["__key__"] if split_key.field is None else _text_of(file, path, sample, split_key)
            missing.append(text is None)
            digests.append(draw(text or ""))
    finally:
        file.close()
    return Drawn(draws_of(digests), np.array(missing, dtype=np.bool_))


def _text_of(file: LocalFile, path: str, sample: dict[str, Any], split_key: SplitKey) -> str | None:
    """The text of the value that a sample belongs to; None where it has none and may miss it."""
    span: Span | None = sample.get(split_key.field or "")
    try:
        value = None if span is None else decode_field(split_key.field or "", read_span(file, span))
        text = canonical_text(_find(value, split_key.path))
    except DecodeError as err:
        raise _error(path, sample["__key__"], split_key, str(err)) from err
    except ValueError as err:
        raise _error(path, sample["__key__"], split_key, f"{split_key.text} {err}") from err
    if text is None and not split_key.may_miss:
        problem = f"it has no field {split_key.field}" if span is None else f"{split_key.text} is missing or empty"
        remedy = "To put the samples without it in one split, name that split with --missing."
        raise _error(path, sample["__key__"], split_key, f"{problem}.\n  {remedy}", stop="")
    return text


def _find(value: Any, path: tuple[str, ...]) -> Any:
    """What stands in a JSON value at the end of a path, None where there is nothing."""
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def canonical_text(value: Any) -> str | None:
    """The text of a JSON value as a group's name; None where it says nothing: null, NaN and the empty text.

    A number and its text are one group, 17 and 17.0 and "17": where a table was written twice, types differ, and a
    group that is torn is worse than two that share a split.

    Raises:
        ValueError: It is a list or an object.
    """
    match value:
        case None | "":
            return None
        case bool():
            return "true" if value else "false"
        case int() | str():
            return str(value)
        case float():
            if math.isnan(value):
                return None
            return str(int(value)) if value.is_integer() else repr(value)
    shown = json.dumps(value)
    shown = f"{shown[:_SHOWN_CHARS]}..." if len(shown) > _SHOWN_CHARS else shown
    kind, remedy = ("an object", "a value inside it") if isinstance(value, dict) else ("a list", "a single value")
    msg = f"is {kind}, {shown}. Name {remedy}"
    raise ValueError(msg)


def _error(path: str, key: str, split_key: SplitKey, problem: str, *, stop: str = ".") -> SelectionError:
    return SelectionError(
        f"{path}: sample {key!r}: {problem}{stop}",
        folder=str(Path(path).parent),
        shard=path,
        key=key,
        field=split_key.text,
    )


_SHARE = re.compile(r"\d{1,18}(\.\d{1,18})?%?|\d{1,18}/0{0,9}[1-9]\d{0,17}", re.ASCII)
_DRAW_BITS = 64
_MAX_SPLITS = 100
_EXAMPLE = "Write train=0.8,val=0.1,test=0.1."

Shares = Mapping[str, Fraction]
"""Each more than 0, together 1, in the order in which they are cut from the range of draws."""


def parse_shares(shares: str | Mapping[str, object]) -> Shares:
    """Names and shares, checked.

    Args:
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping. A share is a decimal, a fraction (`1/3`) or a percentage
            (`80%`); a float means the decimal that it is written as.

    Raises:
        SelectionError: One cannot be read, is 0 or less, a name comes twice or is none, or they do not add up to 1.
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
            msg += f"\n  What belongs to none of these has a name too: add unused={format_share(1 - total)}."
        raise SelectionError(msg)
    return found


def _split_text(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for part in text.split(","):
        name, equals, share = part.partition("=")
        if not equals:
            raise SelectionError(f"{part.strip()!r} is no name with its share. {_EXAMPLE}")
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
        raise SelectionError(f"{name}={value} is no share: it is more than 0 and at most 1. {_EXAMPLE}")
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
    return np.array([int(total * (1 << _DRAW_BITS)) for total in sums], dtype=np.uint64)


def choose_splits(draws: NDArray[np.uint64], shares: Shares) -> NDArray[np.int64]:
    """Which split, by its place among the shares, each draw belongs to."""
    return np.searchsorted(bounds_of(shares), draws, side="right")
