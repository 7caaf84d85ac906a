"""Checks and changes of a sample while it is packed: `--validate`, `--resize` and `--format`, and functions of the user
(`map`). `codecs.recode.recode_image` shrinks and encodes images. A sample that fails is a `DecodeError` or
`KeyRuleError`, which `fill` makes a `RowError`: it ends the run, or with `--skip-bad` the sample is left out and listed
in `rejected.jsonl`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from wdskit.codecs.checks import ImageCheck, check_image, check_image_field
from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field, promised_format
from wdskit.codecs.recode import DEFAULT_QUALITY, ImageFormat, encoder_versions, recode_image
from wdskit.config.types import WHOLE
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_member_name
from wdskit.errors import PROCESS_ERRORS, DecodeError, PackError
from wdskit.limits import MAX_PIXELS

MapFunction = Callable[[str, dict[str, bytes]], Mapping[str, bytes]]
"""Takes the key and the fields of a sample, and returns the fields to pack. The function's attribute `version`
identifies its results; another version fills shards again.
"""

_NUMERAL = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


@dataclass(frozen=True)
class Change:
    """Checks and changes the fields of a sample.

    Attributes:
        validate: How images are checked: "none", "structure" or "decode".
        resize: Largest length of the shorter side of images in pixels: larger images are shrunk; None keeps sizes.
        format: Format of images; None keeps theirs.
        quality: 1 to 100, of new jpg and webp; None for 90.
        keep_json: Whether JSON with numbers is packed beside a changed image: none of them describes its pixels.
        map: A function of the user; None for no function. It runs after the change of the image.
        checks: Names of the fields that are checked if nothing is changed; None for all.
    """

    validate: ImageCheck = "structure"
    resize: Annotated[int, Field(strict=True, ge=1, le=1 << 16), WHOLE] | None = None
    format: ImageFormat | None = None
    quality: Annotated[int, Field(strict=True, ge=1, le=100), WHOLE] | None = None
    keep_json: bool = False
    map: MapFunction | None = None
    checks: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.map is not None and not str(getattr(self.map, "version", "")):
            msg = "map: the function has no `version`. Set one, such as `shrink.version = '1'`, and change it whenever"
            raise PackError(f"{msg} the results change: shards of another version are filled again.")

    @property
    def changes_bytes(self) -> bool:
        """Whether samples may change, so that their sizes are not known before they are packed."""
        return self.changes_images or self.map is not None

    @property
    def changes_images(self) -> bool:
        """Whether images may change."""
        return self.resize is not None or self.format is not None

    def to_json(self) -> list[Any]:
        """Return everything that decides the bytes of a changed sample, as JSON."""
        image = [self.resize, self.format, self.quality, self.keep_json, encoder_versions()]
        owner: Any = self.map if hasattr(self.map, "__qualname__") else type(self.map)
        function = [owner.__module__, owner.__qualname__, str(getattr(self.map, "version", ""))]
        return [self.validate, image if self.changes_images else None, function if self.map else None]

    def check(self, name: str, data: bytes | memoryview) -> None:
        """Check one field as a loader decodes it. DecodeError: It cannot be decoded, or does not fit its name."""
        if is_image_field(name):
            check_image_field(name, data, self.validate, max_pixels=MAX_PIXELS)
        else:
            decode_field(name, data)

    def apply(self, key: str, fields: dict[str, bytes]) -> dict[str, bytes]:
        """Return the changed fields, sorted by name.

        Raises:
            DecodeError: A field cannot be changed or does not fit its name, or the sample has a second image or JSON
                with a number beside a changed image.
            KeyRuleError: The name of a new field is not valid.
        """
        if self.changes_images:
            fields = self._change_image(fields)
        if self.map is not None:
            try:
                made: Any = self.map(key, fields)
            except PROCESS_ERRORS:
                raise
            except Exception as err:
                raise DecodeError(f"map: {type(err).__name__}: {err}") from err
            pairs = [*made.items()] if isinstance(made, Mapping) else []
            if not pairs or not all(isinstance(name, str) and isinstance(data, bytes) for name, data in pairs):
                raise DecodeError(f"map: it returned {type(made).__name__}, not a dict of one or more fields as bytes")
            fields = dict(pairs)
        for name, data in fields.items():
            check_member_name(key, name)
            self.check(name, data)
        return dict(sorted(fields.items()))

    def _change_image(self, fields: dict[str, bytes]) -> dict[str, bytes]:
        images = [name for name in fields if is_image_field(name)]
        if not images:
            return fields
        if len(images) > 1:
            raise DecodeError(f"it has {len(images)} images ({', '.join(images)}). Change them with a `map`")
        for name in fields if not self.keep_json else ():
            if name not in {images[0], CLASS_FIELD} and may_describe_pixels(name, fields):
                msg = f"its {name} has numbers, or data that wdskit does not read"
                way = "They may describe pixels of the image that changes. If none does: --keep-json. Else use a map"
                raise DecodeError(f"{msg}. {way}", field=name)
        [image] = images
        data = fields.pop(image)
        check_image(data, max_pixels=MAX_PIXELS)
        quality = self.quality or DEFAULT_QUALITY
        data, fmt = recode_image(data, size=self.resize, fmt=self.format, quality=quality, max_pixels=MAX_PIXELS)
        is_named = promised_format(image) == promised_format(fmt)
        name = image if is_named else f"{image.rpartition('.')[0]}.{fmt}".lstrip(".")
        if name in fields:
            raise DecodeError(f"{image}: it would become {name!r}, which the sample already has", field=image)
        return {**fields, name: data}


def may_describe_pixels(name: str, fields: Mapping[str, bytes]) -> bool:
    """Return whether a field has a number, or bytes that are neither JSON nor text.

    The class number `cls` in JSON is no number of the image. A text has numbers only if it has nothing else.
    """
    value = decode_field(name, fields[name])
    if isinstance(value, dict) and f"{value.get(CLASS_FIELD)}".encode() == fields.get(CLASS_FIELD):
        value = {key: item for key, item in value.items() if key not in {CLASS_FIELD, "class"}}
    if is_json_field(name):
        return has_number(value)
    return not isinstance(value, str) or (bool(value.split()) and all(map(has_number, value.split())))


def has_number(value: object) -> bool:
    """Return whether a JSON value has a number, or text that is a number. true and false are no numbers."""
    if isinstance(value, dict | list):
        return any(map(has_number, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return _NUMERAL.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)
