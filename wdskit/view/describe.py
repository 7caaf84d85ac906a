"""Describe samples for the page: fields, image, masks and boxes as plain JSON, all text made printable."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import INT_FIELDS, JSON_FIELDS, TEXT_FIELDS, decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import may_be_mask
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError
from wdskit.files import Buffer
from wdskit.limits import MAX_PIXELS
from wdskit.text import printable, shorten

if TYPE_CHECKING:
    from wdskit.view.samples import ViewedSample

MAX_BOXES = 300
MAX_CHARS = 200_000
"""Most characters of a text or JSON field that are shown."""

_PRETTY = json.JSONEncoder(indent=2, ensure_ascii=False)
_LISTS = ("annotations", "objects")
_NAMES = ("category", "label", "class", "name", "category_name", "category_id")


def summarize(sample: ViewedSample) -> dict[str, Any]:
    """Return what the grid of the page shows of a sample, as JSON.

    The keys are `row`, `key`, `class`, `image` (field, width and height in pixels of the main image; None without one,
    or if its header cannot be read), `masks` (names of fields), `boxes` (see `boxes_of`; empty without `image`), and
    `problem` (why there is no `image`, or "").
    """
    main, masks = find_images(sample)
    found: dict[str, Any] = {
        "row": sample.row,
        "key": printable(sample.key),
        "class": class_name(sample.fields, sample.classes),
    }
    found |= {"image": None, "masks": [*map(printable, masks)], "boxes": [], "problem": "" if main else "no image"}
    if main is not None:
        try:
            header = read_header(lambda size: bytes(sample.fields[main][:size]))
        except DecodeError as err:
            found["problem"] = printable(shorten(str(err)))
            return found
        found["image"] = {"field": printable(main), "width": header.width, "height": header.height}
        found["boxes"] = boxes_of(sample)
    return found


def describe(sample: ViewedSample) -> dict[str, Any]:
    """Return what the dialog of a sample shows, as JSON: the values of `summarize`, and `shard` and `fields`.

    Each of `fields` has `name`, `num_bytes` and `text`, the content as text. `text` is None for binary data.
    """
    fields = [
        {"name": printable(name), "num_bytes": len(data), "text": _text_of(name, data)}
        for name, data in sample.fields.items()
    ]
    return {**summarize(sample), "shard": printable(sample.shard), "fields": fields}


def find_images(sample: ViewedSample) -> tuple[str | None, list[str]]:
    """Return the name of the field with the main image (None without an image), and the names of the mask fields.

    A mask is an image that stores one number per pixel, without loss. If all images are masks, the first of them is the
    main image, and is not among the mask fields.
    """
    images = [name for name in sample.fields if is_image_field(name)]
    masks = [name for name in images if may_be_mask(sample.fields[name], max_pixels=MAX_PIXELS)]
    main = next((name for name in images if name not in masks), images[0] if images else None)
    return main, [name for name in masks if name != main]


def class_name(fields: Mapping[str, Buffer], classes: Sequence[str]) -> str:
    """Return the class of a sample as text: the name in `classes` that the number in the field `cls` selects.

    Without such a name, return the first 20 bytes of the field as text; without `cls`, return "".
    """
    label = bytes(fields.get(CLASS_FIELD, b"")[:20]).decode(errors="replace").strip()
    if label.isascii() and label.isdecimal() and int(label) < len(classes):
        label = classes[int(label)]
    return printable(shorten(label))


def boxes_of(sample: ViewedSample) -> list[dict[str, Any]]:
    """Return the first 300 boxes in the JSON fields of a sample.

    Each box has `x`, `y`, `width` and `height` in pixels of the image, and `label`, which may be "".
    """
    found: list[dict[str, Any]] = []
    for name, data in sample.fields.items():
        if is_json_field(name):
            try:
                value = decode_field(name, data)
            except DecodeError:
                continue  # `_text_of` shows the error
            for box, label in _boxes(value):
                numbers = dict(zip(("x", "y", "width", "height"), box, strict=True))
                found.append(numbers | {"label": "" if label is None else printable(shorten(str(label)))})
                if len(found) == MAX_BOXES:
                    return found
    return found


def _boxes(value: object) -> Iterator[tuple[list[float], object]]:
    """Yield (box, label) for each box in the JSON of a sample. The label is None if it is unknown.

    Boxes are `bbox` in the items of the lists `annotations` and `objects`, as in COCO. `bbox` and `boxes` at the top
    level are each one box or a list of boxes. The list `labels` or `classes` has the labels of such a list of boxes.
    """
    if not isinstance(value, Mapping):
        return
    categories = value.get("categories")
    for name in _LISTS:
        for item in value[name] if isinstance(value.get(name), list) else ():
            if isinstance(item, Mapping) and (box := _box(item.get("bbox"))):
                label = next((item[key] for key in _NAMES if isinstance(item.get(key), str | int)), None)
                known = categories.get(str(label)) if isinstance(categories, Mapping) else None
                yield box, known if isinstance(known, str) else label
    labels: list[Any] = next((value[key] for key in ("labels", "classes") if isinstance(value.get(key), list)), [])
    for name in ("bbox", "boxes"):
        boxes = value.get(name)
        if box := _box(boxes):
            yield box, None
        elif isinstance(boxes, list):
            for place, numbers in enumerate(boxes):
                if box := _box(numbers):
                    yield box, labels[place] if len(labels) == len(boxes) else None


def _box(value: object) -> list[float] | None:
    """Return `value` as four floats if it is a list of four finite numbers and the last two are positive; else None."""
    if not isinstance(value, list) or len(value) != 4:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    try:
        box = [float(number) for number in value]
    except OverflowError:
        return None
    return box if all(map(math.isfinite, box)) and min(box[2:]) > 0 else None


def _text_of(name: str, data: Any) -> str | None:
    """Return the content of a text, JSON or number field as text; None for other fields.

    JSON is indented. After the first `MAX_CHARS` characters, the text is cut and ends in "... and more". If the field
    cannot be decoded, return the message of the error.
    """
    if name.rpartition(".")[2].lower() not in JSON_FIELDS | TEXT_FIELDS | INT_FIELDS:
        return None
    try:
        value = decode_field(name, data)
    except DecodeError as err:
        return printable(str(err))
    parts = _PRETTY.iterencode(value) if is_json_field(name) else iter([str(value)])
    text = ""
    try:
        while len(text) <= MAX_CHARS:
            text += next(parts)
    except StopIteration:
        pass
    except RecursionError:  # nested too deeply for `json` to write
        text = bytes(data).decode(errors="replace")
    shown = "\n".join(map(printable, text[:MAX_CHARS].split("\n")))
    return f"{shown}\n... and more" if len(text) > MAX_CHARS else shown
