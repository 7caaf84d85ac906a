"""Update the fields that describe a changed image: COCO annotations, sizes and digests.

If the pixels of an image move, other annotations than COCO's raise DecodeError, as far as this module recognizes them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.edit.geometry import Geometry, Move, only_move
from wdskit.codecs.edit.resize import Size
from wdskit.codecs.fields import is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.errors import DecodeError
from wdskit.packing.json_merge import to_json, unique_members

_COCO = {"image", "annotations", "categories"}
"""The members of the `json` that `pack` writes for COCO annotations."""

_PLACE_NAMES = frozenset(
    {"bbox", "bboxes", "box", "boxes", "bndbox", "rect", "rects", "rectangle", "rectangles", "roi", "rois", "xyxy"}
    | {"xywh", "segmentation", "segmentations", "segments", "polygon", "polygons", "polyline", "polylines", "contour"}
    | {"contours", "rle", "mask", "masks", "keypoint", "keypoints", "kpts", "kps", "points", "landmark", "landmarks"}
    | {"vertex", "vertices", "poly", "polys"}
)
_CORNER_NAMES = frozenset(
    {"x", "y", "x0", "y0", "x1", "y1", "x2", "y2", "cx", "cy", "xmin", "ymin", "xmax", "ymax", "xcenter", "ycenter"}
    | {"minx", "miny", "maxx", "maxy", "startx", "starty", "endx", "endy", "left", "top", "right", "bottom"}
)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_XML_PLACES = re.compile(rb"<(bndbox|xmin|polygon|polyline|points?|box|width|rect)\b", re.IGNORECASE)
_YOLO_LINE = re.compile(rb"\s*\d+(\s+-?\d*\.?\d+([eE]-?\d+)?){4,}\s*")
_REFUSED = "which --resize and --orient move. Only COCO annotations can be updated. Pack without these options"


class ImageChange(NamedTuple):
    """One image before and after its transform.

    Attributes:
        before: The bytes of the old image file.
        after: The bytes of the new image file; equal to `before` if the image did not change.
        geometry: How the transform moved the points of the image.
    """

    before: bytes
    after: bytes
    geometry: Geometry


def names_places(name: str) -> bool:
    """Return True if the name of a field or column contains a word for places in an image, such as `face_keypoints`."""
    return not _PLACE_NAMES.isdisjoint(word.lower() for word in _WORD.findall(name))


def update_field(field: str, data: bytes, changes: list[ImageChange]) -> bytes:
    """Update a field so that it describes the transformed images of the sample. The field is not an image.

    Args:
        field: Name of the field.
        data: Bytes of the field.
        changes: All images of the sample, except masks. At least one image has changed.

    Returns:
        The updated bytes. They are equal to `data` if the field describes no property that changed.

    Raises:
        DecodeError: The field describes places in an image in a form that cannot be updated, several images fit its
            sizes or digests, or its JSON is invalid or nested too deeply.
    """
    has_moved = not all(change.geometry.is_same for change in changes)
    if has_moved and names_places(field):
        raise DecodeError(f"{field}: its name says that it holds places in the image, {_REFUSED}", field=field)
    try:
        if is_json_field(field):
            return _update_json(data, changes, has_moved=has_moved)
        if has_moved:
            _refuse_text(field, data)
    except RecursionError as err:
        raise DecodeError(f"{field}: it is nested too deeply", field=field) from err
    except (ValueError, DecodeError) as err:
        raise DecodeError(f"{field}: {err}", field=field) from err
    return data


def _update_json(data: bytes, changes: list[ImageChange], *, has_moved: bool) -> bytes:
    value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique_members)
    is_coco = isinstance(value, dict) and value.keys() >= _COCO
    if has_moved and not is_coco:
        _refuse_places(value, "")
    if not isinstance(value, dict):
        return data
    new = dict(value)
    if has_moved and is_coco:
        new |= _update_coco(value, [change.geometry for change in changes])
    new |= _update_measures(value, changes)
    return data if new == value else to_json(new)


def _update_measures(value: dict[str, Any], changes: list[ImageChange]) -> dict[str, Any]:
    """Return the new values of the members `width`, `height`, `bytes` and `sha256` of a JSON object, by name.

    The result has only members whose old value describes an image before its transform. The old size may be the size of
    the stored pixels, or of the pixels turned upright by the EXIF orientation. `width` and `height` must fit the same
    image; one of them may be missing. Each value keeps its type: a text stays a text.

    Raises DecodeError if an old value matches several images, and their new values differ.
    """
    numbers = {name: _whole_number(value.get(name)) for name in ("width", "height", "bytes")}
    known = {name: number for name, number in numbers.items() if number is not None}
    sizes, lengths, digests = [], [], []
    for change in changes:
        for move in {change.geometry.move, change.geometry.upright}:
            before = {"width": move.before.width, "height": move.before.height}
            if all(known.get(name, size) == size for name, size in before.items()):
                sizes.append({"width": move.after.width, "height": move.after.height})
        if known.get("bytes") == len(change.before):
            lengths.append({"bytes": len(change.after)})
        if isinstance(value.get("sha256"), str) and value["sha256"].lower() == _sha256(change.before):
            digests.append({"sha256": _sha256(change.after)})
    new = _single_values([name for name in ("width", "height") if name in known], sizes)
    new |= _single_values(["bytes"], lengths) | _single_values(["sha256"], digests)
    return {name: type(value[name])(each) for name, each in new.items()}


def _whole_number(value: Any) -> int | None:
    """Return an int, a float without a fraction, or a text of fewer than 20 digits, as an int. Return None for a bool
    and all other values.
    """
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0 else None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _single_values(names: list[str], matches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a dict with the value of each name in `names`. All dicts in `matches` must have this value.

    The dict is empty if `matches` is empty. Raises DecodeError if two dicts in `matches` have different values for a
    name.
    """
    values = {tuple(each[name] for name in names) for each in matches}
    if len(values) > 1:
        raise DecodeError(f"several images fit its {' and '.join(names)}, and nothing shows which of them it describes")
    return dict(zip(names, values.pop(), strict=True)) if values else {}


# COCO.


def _update_coco(value: dict[str, Any], geometries: list[Geometry]) -> dict[str, Any]:
    """Return the members `image` and `annotations` of a COCO object, updated for the transformed image.

    The result is a dict of these two members. It is empty if `image` has no size and no annotation has a place.
    `geometries` has one item for each image of the sample.

    Raises:
        DecodeError: The members do not have the form of COCO, or another member names a place in the image. Or the
            annotations have places, and an image was cut. Or no image of the sample had the size in `image`, or several
            images had this size and moved differently.
    """
    image, annotations = value["image"], value["annotations"]
    if not isinstance(image, dict) or not (
        isinstance(annotations, list) and all(isinstance(each, dict) for each in annotations)
    ):
        raise DecodeError("`image` is not an object, or `annotations` is not a list of objects, as in COCO")
    _refuse_places({name: each for name, each in value.items() if name not in _COCO}, "")
    _refuse_places({name: each for name, each in image.items() if name not in {"width", "height"}}, "image")
    size = None
    if "width" in image or "height" in image:
        if not all(type(image.get(name)) is int for name in ("width", "height")):
            raise DecodeError("image: `width` and `height` are not both whole numbers")
        size = Size(image["width"], image["height"])
    parts = ("bbox", "segmentation", "keypoints", "area")
    places = [any(each.get(part) not in (None, []) for part in parts) for each in annotations]
    if size is None and not any(places):
        return {}
    move = only_move(geometries, size)
    if any(places) and any(geometry.is_cut for geometry in geometries):
        raise DecodeError("its annotations cannot be cut as --resize-mode crop cuts the image. Use shorter or longer")
    new_image = image if size is None else image | {"width": move.after.width, "height": move.after.height}
    return {
        "image": new_image,
        "annotations": [_update_annotation(each, move, f"annotations[{at}]") for at, each in enumerate(annotations)],
    }


_MOVED = {"bbox", "segmentation", "keypoints", "area", "num_keypoints"}


def _update_annotation(annotation: dict[str, Any], move: Move, where: str) -> dict[str, Any]:
    _refuse_places({name: value for name, value in annotation.items() if name not in _MOVED}, where)
    new = dict(annotation)
    num_pixels = None
    if (bbox := annotation.get("bbox")) not in (None, []):
        new["bbox"] = _move_box(_numbers(bbox, 4, f"{where}.bbox"), move)
    if (shape := annotation.get("segmentation")) not in (None, []):
        if isinstance(shape, dict):
            new["segmentation"], num_pixels = _move_run_lengths(shape, move, f"{where}.segmentation")
        elif isinstance(shape, list):
            at = f"{where}.segmentation"
            new["segmentation"] = [_move_points(_numbers(each, 0, at, step=2), move, 2) for each in shape]
        else:
            raise DecodeError(f"{where}.segmentation is neither polygons nor run lengths")
    if (keypoints := annotation.get("keypoints")) not in (None, []):
        new["keypoints"] = _move_points(_numbers(keypoints, 0, f"{where}.keypoints", step=3), move, 3)
    if (area := annotation.get("area")) is not None:
        if isinstance(area, bool) or not isinstance(area, int | float):
            raise DecodeError(f"{where}.area is not a number")
        new["area"] = area * move.area_ratio if num_pixels is None else num_pixels
    return new


def _numbers(values: Any, count: int, where: str, *, step: int = 1) -> list[float]:
    """Return `values` if it is a list of numbers with a valid length. Otherwise raise DecodeError.

    The length must be a multiple of `step`, and equal to `count` if `count` is not 0. `where` is the path of `values`,
    for the message.
    """
    if (
        not isinstance(values, list)
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in values)
        or len(values) % step
        or (count and len(values) != count)
    ):
        raise DecodeError(f"{where} is not {f'{count} numbers' if count else f'numbers in groups of {step}'}")
    return values


def _move_box(bbox: list[float], move: Move) -> list[float]:
    x, y, width, height = bbox
    (x0, y0), (x1, y1) = move(x, y), move(x + width, y + height)
    return [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)]


def _move_points(values: list[float], move: Move, step: int) -> list[float]:
    """Return the points in `values` after `move`, as one list of numbers. A point with visibility 0 is not moved.

    Each point has `step` numbers: 2 (x, y) or 3 (x, y, visibility).
    """
    new: list[float] = []
    for at in range(0, len(values), step):
        x, y, *rest = values[at : at + step]
        new += [x, y, *rest] if rest == [0] else [*move(x, y), *rest]
    return new


def _move_run_lengths(shape: dict[str, Any], move: Move, where: str) -> tuple[dict[str, Any], int]:
    """Return a run-length mask of COCO after `move`, and the number of its pixels with the value 1.

    `shape` is the mask: an object with `size` and `counts`. `where` is its path, for messages.
    Raises DecodeError if the mask is invalid, or does not have the size of the image before `move`.
    """
    if set(shape) != {"size", "counts"}:
        raise DecodeError(f"{where} has other members than size and counts")
    width, height = move.before
    if shape["size"] != [height, width]:
        raise DecodeError(f"{where} has the size {shape['size']!r}, but the image has [{height}, {width}]")
    counts = shape["counts"]
    is_text = isinstance(counts, str)
    lengths = _decode_counts(counts, where) if is_text else counts
    if (
        not isinstance(lengths, list)
        or any(type(each) is not int or each < 0 for each in lengths)
        or sum(lengths) != width * height
    ):
        raise DecodeError(f"{where}.counts are not the run lengths of {width} x {height} pixels")
    flat = np.repeat(np.arange(len(lengths), dtype=np.int64) % 2, lengths).astype(np.uint8)
    mask = move.nearest(flat.reshape(width, height).T, 0)
    new = _run_lengths(mask.T.reshape(-1))
    counts = _encode_counts(new) if is_text else new
    return shape | {"size": [move.after.height, move.after.width], "counts": counts}, int(mask.sum())


def _run_lengths(flat: NDArray[np.uint8]) -> list[int]:
    """Return the lengths of the runs of 0 and 1 in an array (n,), n > 0. The first run is of 0; its length may be 0."""
    ends = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    lengths = [stop - start for start, stop in itertools.pairwise(ends)]
    return [0, *lengths] if flat[0] else lengths


def _decode_counts(text: str, where: str) -> list[int]:
    """Return the run lengths in `text`, the compressed `counts` of a COCO mask (maskApi.c of pycocotools).

    `where` is the path of the mask, for messages. Raises DecodeError if `text` is invalid.
    """
    lengths: list[int] = []
    value = shift = 0
    for char in text:
        code = ord(char) - 48
        if not 0 <= code < 64:
            raise DecodeError(f"{where}.counts holds {char!r}, which is not part of a run length")
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            if code & 16:
                value -= 1 << shift
            lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
            value = shift = 0
    if shift:
        raise DecodeError(f"{where}.counts stops inside a run length")
    return lengths


def _encode_counts(lengths: list[int]) -> str:
    """Return the compressed `counts` of a COCO mask with these run lengths: the inverse of `_decode_counts`."""
    chars: list[str] = []
    for at, length in enumerate(lengths):
        value = length - lengths[at - 2] if at > 2 else length
        while True:
            code, value = value & 31, value >> 5
            is_last = value == (-1 if code & 16 else 0)
            chars.append(chr((code if is_last else code | 32) + 48))
            if is_last:
                break
    return "".join(chars)


# Descriptions of an unknown form.


def _refuse_places(value: Any, where: str) -> None:
    """Raise `DecodeError` if a JSON value has a member for a place in an image. `where` is the path of the value."""
    for path, name in _find_places(value, where):
        raise DecodeError(f"{path!r} says {name!r}, a place in the image, {_REFUSED}")


def _find_places(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield path and name of the members of a JSON value that are places in an image. `where` is the value's path.

    A place is a list, an object or a text whose name has a word for places. The list or object is not empty. The text
    has digits, and is neither a number nor the name of an image file. If an object has several numbers with names of
    coordinates (`x1`, `left`), the first of these numbers is a place.
    """
    if isinstance(value, list):
        for at, each in enumerate(value):
            if isinstance(each, dict | list):
                yield from _find_places(each, f"{where}[{at}]")
    elif isinstance(value, dict):
        corners = [name for name in value if name.lower().replace("_", "") in _CORNER_NAMES and _is_number(value[name])]
        if len(corners) > 1:
            yield f"{where}.{corners[0]}".lstrip("."), corners[0]
        for name, each in value.items():
            path = f"{where}.{name}".lstrip(".")
            is_text = isinstance(each, str) and (is_image_field(each) or not any(map(str.isdigit, each)))
            if names_places(name) and each not in (None, [], {}) and not is_text and not _is_number(each):
                yield path, name
            yield from _find_places(each, path)


def _is_number(value: Any) -> bool:
    """Return True if the value is a number, a bool, or the text of a number."""
    return isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)


def _refuse_text(field: str, data: bytes) -> None:
    """Raise `DecodeError` if an `xml` field has places in an image, or all lines of a `txt` field are YOLO labels."""
    extension = field.rpartition(".")[2]
    if extension == "xml" and _XML_PLACES.search(data):
        raise DecodeError(f"it is XML with places in the image, {_REFUSED}")
    if extension == "txt" and data.strip() and all(map(_YOLO_LINE.fullmatch, data.strip().splitlines())):
        raise DecodeError(f"it has the lines of YOLO's labels, places in the image, {_REFUSED}")
