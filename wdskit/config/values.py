"""Types of settings, with validators whose messages a user understands."""

from __future__ import annotations

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, Strict, WithJsonSchema

from wdskit.config.messages import describe, forbidden_character, show, wrong_kind
from wdskit.config.spec import refuse
from wdskit.text import as_int

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%")


def _check_text(text: str) -> str:
    if not text.strip():
        raise refuse("the text is empty.")
    if rule := forbidden_character(text):
        raise refuse(rule)
    return text


def _check_field_name(name: str) -> str:
    if ";" in name:
        raise refuse(f"{show(name)} names several fields; one is needed here.")
    return _check_alternatives(name)


def _check_alternatives(names: str) -> str:
    _check_text(names)
    if re.search(r"\s", names) or not all(names.split(";")):
        raise refuse(f"{show(names)} is not a field name. Write `jpg`, or alternatives as `jpg;png`.")
    return names


def _check_items(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return value
    is_item = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    example = show(value).strip("`") if is_item else "a, b"
    raise refuse(wrong_kind(value, f"a list is needed, as in [{example}]"))


def _split_names(value: object) -> object:
    return value.split() if isinstance(value, str) else _check_items(value)


def _check_shards(value: object) -> object:
    items = [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(items, (list, tuple)):
        raise refuse(wrong_kind(value, "a path, a pattern or a list of them is needed"))
    if not items:
        raise refuse("the list is empty; name at least one shard.")
    texts = tuple(_shard_text(item) for item in items)
    return texts if items is value else texts[0]


def _shard_text(item: object) -> str:
    text = os.fspath(item) if isinstance(item, os.PathLike) else item
    if not isinstance(text, str):
        raise refuse(wrong_kind(item, "shards are paths, patterns or URLs"))
    return _check_text(text)


def _check_size(value: object) -> object:
    sides = value if isinstance(value, (list, tuple)) else [value]
    if len(sides) != 2 and isinstance(value, (list, tuple)):
        raise refuse(f"{show(value)} has {len(sides)} items; a size is one number or [height, width].")
    sides = [as_int(side) for side in sides]
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, int):
            raise refuse(wrong_kind(side, "a whole number of pixels is needed, or [height, width]"))
        if not 1 <= side <= 65_535:
            raise refuse(f"{show(side)} is not a size in pixels; it must be 1 to 65535.")
    return tuple(sides) if isinstance(value, (list, tuple)) else sides[0]


def _check_range(value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise refuse(f"{describe(value)}; two numbers are needed, as in [0.5, 1.0].")
    for item in value:
        if not isinstance(item, (int, float)) or isinstance(item, bool) or not abs(item) < math.inf:
            raise refuse(wrong_kind(item, "two numbers are needed, as in [0.5, 1.0]"))
    low, high = value
    if not 0 < low <= high:
        raise refuse(f"{show(value)} is not a range; it must be [low, high] with 0 < low <= high.")
    return float(low), float(high)


def _check_share(value: object) -> tuple[float, float]:
    low, high = _check_range(value)
    if high > 1:
        raise refuse(f"{show(value)} is above 1; it is a share of the image's area.")
    return low, high


def _check_budget(value: object) -> int | str:
    value = as_int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)) and float(match[1]) <= 100:
        return value if float(match[1]) else 0
    raise refuse(wrong_kind(value, "a number of samples is needed, or a share such as `0.1%`"))


def _check_device(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value):
        return value
    raise refuse(wrong_kind(value, "`cuda` or `cuda:1` is needed"))


def _check_cluster(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(_CLUSTER, value):
        return value
    need = "`ray` is needed, or the address of a cluster, as in ray://head:10001"
    if isinstance(value, str) and "@" in value:  # it may be a password
        raise refuse(f"an address with a user or password is refused; {need}.")
    raise refuse(wrong_kind(value, need))


def _check_channels(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) not in {1, 3}:
        raise refuse(f"{show(values)} has {len(values)} items; it needs 1 (grey) or 3 (red, green, blue).")
    if any(not 0 <= value <= 1 for value in values):
        raise refuse(f"{show(values)} is not within 0..1, as the pixels are. Divide numbers for 0..255 by 255.")
    return values


_NAMES_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_CLUSTER = r"ray(://[^\s/:@]+:[0-9]{1,5})?"
_SIDE_SCHEMA = {"type": "integer", "minimum": 1, "maximum": 65_535}
_RANGE_SCHEMA = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}

Items = BeforeValidator(_check_items)
ImageSpec = Literal[
    "l8", "rgb8", "rgba8", "l", "rgb", "rgba", "torchl8", "torchrgb8", "torchrgba8", "torchl", "torchrgb", "torch",
    "torchrgba", "pill", "pil", "pilrgb", "pilrgba", "index",
]  # fmt: skip
WHOLE = BeforeValidator(as_int)
"""Accepts integers of numpy and torch. It must be last in an annotation, so that the schema keeps the bounds."""
Natural = Annotated[int, Strict(), Field(ge=0, lt=2**63), WHOLE]
Count = Annotated[int, Strict(), Field(ge=1, lt=2**63), WHOLE]
Budget = Annotated[
    int | str,
    PlainValidator(_check_budget),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+%$"}]}),
]
Device = Annotated[
    str, PlainValidator(_check_device), WithJsonSchema({"type": "string", "pattern": r"^cuda(:[0-9]+)?$"})
]
Cluster = Annotated[str, PlainValidator(_check_cluster), WithJsonSchema({"type": "string", "pattern": f"^{_CLUSTER}$"})]
Bool = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Text = Annotated[str, Strict(), AfterValidator(_check_text)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Timeout = Annotated[float, Strict(), Field(ge=0, lt=math.inf)]
FieldName = Annotated[str, Strict(), AfterValidator(_check_field_name)]
Alternatives = Annotated[str, Strict(), AfterValidator(_check_alternatives)]
FieldNames = Annotated[
    tuple[FieldName, ...], Field(min_length=1), BeforeValidator(_split_names), WithJsonSchema(_NAMES_SCHEMA)
]
FieldChoices = Annotated[
    tuple[Alternatives, ...], Field(min_length=1), BeforeValidator(_split_names), WithJsonSchema(_NAMES_SCHEMA)
]
Shards = Annotated[str | tuple[str, ...], PlainValidator(_check_shards), WithJsonSchema(_NAMES_SCHEMA)]
Classes = Literal["same", "any"]
CLASSES: Any = Field(
    "same", description="Whether the `classes.json` of all folders must name the same classes, or may differ."
)
Weights = Annotated[tuple[Positive, ...], Field(min_length=1), Items]
Size = Annotated[
    int | tuple[int, int],
    PlainValidator(_check_size),
    WithJsonSchema({"anyOf": [_SIDE_SCHEMA, {"type": "array", "items": _SIDE_SCHEMA, "minItems": 2, "maxItems": 2}]}),
]
Range = Annotated[tuple[float, float], PlainValidator(_check_range), WithJsonSchema(_RANGE_SCHEMA)]
ShareRange = Annotated[tuple[float, float], PlainValidator(_check_share), WithJsonSchema(_RANGE_SCHEMA)]
Channels = Annotated[tuple[Number, ...], Items, AfterValidator(_check_channels)]
PositiveChannels = Annotated[tuple[Positive, ...], Items, AfterValidator(_check_channels)]
