"""What a sample belongs to when a folder is split: its key, or a value of its JSON, as a draw from 0 to 2**64.

The draw is a keyed hash of the text alone, so a sample keeps its draw wherever it stands, and all samples of one
patient, in whatever folder, have the same one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import JSON_FIELDS, decode_field
from wdskit.dataset.grouping import HeaderReader, read_span
from wdskit.errors import DecodeError, SelectionError
from wdskit.storage.urls import LocalFile
from wdskit.tar.walk import Span

_PURPOSE = b"wdskit split"
_DRAW_BYTES = 8
_SHOWN_CHARS = 60
_MAX_CHARS = 1000


@dataclass(frozen=True)
class Belonging:
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


def parse_by(by: str, *, seed: int, may_miss: bool) -> Belonging:
    """`key`, or a JSON field and the way to a value in it: `json:patient.id`.

    Raises:
        SelectionError: It is neither, or the seed is out of range.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise SelectionError(f"seed: {seed!r} must be a whole number, 0 or more, and below 2**64.")
    if by == "key":
        if may_miss:
            raise SelectionError("missing: every sample has a key, so nothing can be missing. Leave it out.")
        return Belonging(None, (), seed)
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
    return Belonging(field, path, seed, may_miss)


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


def draw_shard(path: str, belonging: Belonging) -> Drawn:
    """The draws of a local shard's samples, in order. Read are the headers, and of the payloads the one JSON field.

    Raises:
        ShardError: The shard is not right.
        SelectionError: A sample has no such value, or none that can be one; it names shard, key and field.
        StorageError: It cannot be read.
    """
    draw = make_draw(belonging.seed)
    digests: list[bytes] = []
    missing: list[bool] = []
    file = LocalFile(f"./{path}" if path.lower().startswith("file:") else path)
    try:
        for sample in HeaderReader(file, shard=path):
            text = sample["__key__"] if belonging.field is None else _text_of(file, path, sample, belonging)
            missing.append(text is None)
            digests.append(draw(text or ""))
    finally:
        file.close()
    return Drawn(draws_of(digests), np.array(missing, dtype=np.bool_))


def _text_of(file: LocalFile, path: str, sample: dict[str, Any], belonging: Belonging) -> str | None:
    """The text of the value that a sample belongs to; None where it has none and may miss it."""
    span: Span | None = sample.get(belonging.field or "")
    try:
        value = None if span is None else decode_field(belonging.field or "", read_span(file, span))
        text = canonical_text(_find(value, belonging.path))
    except DecodeError as err:
        raise _error(path, sample["__key__"], belonging, str(err)) from err
    except ValueError as err:
        raise _error(path, sample["__key__"], belonging, f"{belonging.text} {err}") from err
    if text is None and not belonging.may_miss:
        problem = f"it has no field {belonging.field}" if span is None else f"{belonging.text} is missing or empty"
        remedy = "To put the samples without it in one split, name that split with --missing."
        raise _error(path, sample["__key__"], belonging, f"{problem}.\n  {remedy}", stop="")
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


def _error(path: str, key: str, belonging: Belonging, problem: str, *, stop: str = ".") -> SelectionError:
    return SelectionError(
        f"{path}: sample {key!r}: {problem}{stop}",
        folder=str(Path(path).parent),
        shard=path,
        key=key,
        field=belonging.text,
    )
