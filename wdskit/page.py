"""Write samples of shards, or what the stages of a pipeline make of them, as one HTML page: `wdskit view`.

Shards may be hostile. All their content is escaped text, or an image that was decoded and encoded again. The page has
no script, and its policy allows only its own style sheet and images inside the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import make_mask_overlay, make_thumbnail, may_be_mask
from wdskit.config.types import parse_settings
from wdskit.dataset.classes import CLASS_FIELD, read_classes
from wdskit.engine.reader import SampleReader
from wdskit.errors import DecodeError, PipelineError, StorageError, WdskitError
from wdskit.files import publish_bytes
from wdskit.limits import MAX_SHOWN_PIXELS
from wdskit.order.base import Ints
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.shards.listing import class_name
from wdskit.shards.shares import check_seed
from wdskit.stages.sources import PlannedData, PlannedSource, Sequential
from wdskit.storage.urls import shown_url
from wdskit.text import format_bytes, format_count, plural, printable, shorten

SIDE = 256
MAX_BOXES, MAX_IMAGES, MAX_BARS = 100, 4, 12
MAX_CHARS = 4000
"""Most characters of a field that are shown."""

_NAMES = ("category", "label", "class", "name", "category_name", "category_id")


class Card(NamedTuple):
    """A sample on the page: its HTML, and what the charts count; 0 or empty if unknown or not shown.

    Attributes:
        html: The card.
        name: Name or number of the class.
        side: The longer side of the first image, in pixels.
        num_bytes: Bytes of all fields. 0 for what a pipeline made.
    """

    html: str
    name: str = ""
    side: int = 0
    num_bytes: int = 0


def view(
    data: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    out: str | os.PathLike[str] | None = None,
    num: int = 48,
    seed: int = 0,
    where: str | None = None,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Write one HTML page that shows samples, and charts of their classes, sizes and bytes: `wdskit view`. The page
    needs no network and has no script.

    Of a folder, samples drawn at random are shown: image, masks and boxes, class, text and JSON. Masks are further
    images that store numbers, boxes are `bbox`, `boxes` or `annotations` in JSON, as in COCO. Of a pipeline, the first
    samples of the first epoch on one rank are shown, as its stages make them.

    Args:
        data: Shards with an index: a folder or a pattern, several joined by `::`. Or a pipeline: a YAML file, its
            content as a dict, or a `Pipeline`.
        out: The file to write, whose name ends in .html; None makes a temporary file. It may exist.
        num: Most samples to show.
        seed: Draws other samples of a folder.
        where: Only samples of a folder for which this condition on columns is true.
        pipeline: Name of the pipeline, if the configuration has several.
        overrides: Settings of the configuration to change, each as `a.b.c=VALUE`.

    Returns:
        The path of the page.

    Raises:
        ConfigError, PipelineError: A setting is invalid, a pipeline cannot run, or an argument is of the other kind.
        StorageError: The shards cannot be found or read, or the page cannot be written.
        FolderIndexError, SelectionError: The index, a column or the condition is invalid, or no sample is selected.
        ShardError, SampleError: A sample of a pipeline is damaged. Of a folder, the page names it.
    """
    check_seed(seed)
    target = Path(tempfile.mkdtemp(prefix="wdskit-")) / "view.html" if out is None else Path(out)
    if target.suffix != ".html":
        raise StorageError(f"{target}: the name of a page ends in .html.", url=str(target))
    is_folder = isinstance(data, str | os.PathLike) and not str(data).endswith((".yaml", ".yml"))
    if is_folder and (pipeline is not None or overrides):
        raise PipelineError(f"{data}: `pipeline` and `overrides` belong to a configuration, a .yaml file.")
    if not is_folder and (seed or where is not None):
        raise PipelineError("`seed` and `where` belong to a folder. Change the source, as in pipeline.exact.where=...")
    title, total, cards = (
        _read_folder(str(data), num, seed, where) if is_folder else _open_pipeline(data, pipeline, overrides)
    )
    shown = [*islice(cards, num)]
    try:
        publish_bytes(target, _page(title, total, shown).encode())
    except OSError as err:
        raise StorageError(f"{target}: the page cannot be written: {err.strerror}.", url=str(target)) from err
    return target


def _read_folder(shards: str, num: int, seed: int, where: str | None) -> tuple[str, int, Iterator[Card]]:
    """Return the title, the number of selected samples, and the cards of samples drawn at random."""
    source = parse_settings(Sequential, {"shards": shards, "where": where, "classes": "any"}, where="view")
    data = source.plan()
    total = data.num_samples or 0
    places = data.order.take(np.sort(np.random.default_rng(seed).permutation(total)[:num]).astype(np.int64))
    return shown_url(shards), total, _folder_cards(data, *places)


def _folder_cards(data: PlannedData, shards: Ints, numbers: Ints) -> Iterator[Card]:
    reader = SampleReader(data.tables, data.parts).request(shards, numbers)
    classes = _classes_of(data)
    for shard, number in zip(shards.tolist(), numbers.tolist(), strict=True):
        try:
            path, key, _, fields = reader.read(shard, number)
        except WdskitError as err:
            yield Card(_figure("", [("problem", shorten(str(err)))]))
            continue
        values: dict[str, Any] = {"__key__": key}
        for name, data_of in fields.items():
            try:
                values[name] = decode_field(name, data_of)
            except DecodeError as err:
                values[name] = str(err)
        boxes = [box for name in filter(is_json_field, fields) for box in _boxes(values[name])]
        card = _card(values, classes.get(path.rpartition("/")[0], ()), boxes[:MAX_BOXES])
        yield card._replace(num_bytes=sum(map(len, fields.values())))


def _classes_of(data: PlannedData) -> dict[str, tuple[str, ...]]:
    return {folder: read_classes(folder) or () for table in data.tables for folder in table.folders}


def _open_pipeline(config: Any, pipeline: str | None, overrides: Sequence[str]) -> tuple[str, int, Iterator[Card]]:
    """Return the title, the number of samples of an epoch (0 if unknown), and the cards of a pipeline's samples."""
    name, stages, _ = open_pipeline(config, pipeline, overrides)
    data = stages[0].plan() if isinstance(stages[0], PlannedSource) else None
    known = set(_classes_of(data).values()) if data else set()
    title = name if isinstance(config, Mapping | Pipeline) else f"{Path(config).name}, pipeline {name}"
    cards = _pipeline_cards(stages, known.pop() if len(known) == 1 else ())
    return title, (data.num_samples or 0) if data else 0, cards


def _pipeline_cards(stages: Sequence[Any], classes: Sequence[str]) -> Iterator[Card]:
    is_batched = any(getattr(stage, "kind", "") == "batch" for stage in stages)
    names = next((stage.fields for stage in reversed(stages) if getattr(stage, "name", "") == "to_tuple"), ())
    with Pipeline(stages).loader(workers=0, threads=1, rank=0, world_size=1) as loader:
        for made in loader:
            if isinstance(made, Mapping):
                slots = dict(made)
            else:
                items = made if isinstance(made, tuple | list) else [made]
                slots = {names[at] if at < len(names) else f"[{at}]": item for at, item in enumerate(items)}
            num_rows = next((len(value) for value in slots.values() if hasattr(value, "__len__")), 0)
            for row in range(num_rows) if is_batched else [None]:
                own = {
                    name: value if row is None or not _is_column(value, num_rows) else value[row]
                    for name, value in slots.items()
                }
                if own.get("__valid__", True):
                    yield _card(own, classes)


def _is_column(value: Any, num_rows: int) -> bool:
    return hasattr(value, "__getitem__") and not isinstance(value, str | Mapping) and len(value) == num_rows


def _card(values: Mapping[str, Any], classes: Sequence[str], boxes: Sequence[tuple[list[float], str]] = ()) -> Card:
    """Return the card of a sample. Images are the bytes of files, or arrays. The first image has all masks and the
    boxes over it.
    """
    images: list[bytes] = []
    masks: list[bytes] = []
    label, size, side, texts, fields = "", "", 0, [], []
    for name, value in values.items():
        pixels = _pixels(value) if hasattr(value, "shape") else None
        if pixels is not None:
            (masks if pixels.ndim == 2 else images).append(_netpbm(pixels))
        elif isinstance(value, bytes | memoryview) and is_image_field(name):
            (masks if may_be_mask(value, max_pixels=MAX_SHOWN_PIXELS) else images).append(bytes(value))
        if name.partition(";")[0] == CLASS_FIELD and not getattr(value, "shape", ()):
            label = class_name(str(int(value)) if hasattr(value, "item") else str(value), classes)
        elif isinstance(value, str) and not name.startswith("__"):
            texts.append(("text", value[:MAX_CHARS]))
        elif not name.startswith("__"):
            fields.append((name, _text(value)))
    pictures: list[str] = []
    try:
        for data in (images or masks)[:MAX_IMAGES]:
            over = ((), ()) if pictures else (masks[:MAX_IMAGES] if images else (), boxes)
            picture, (width, height) = _picture(data, *over)
            size, side = size or f"{width} x {height}", side or max(width, height)
            pictures.append(picture)
    except DecodeError as err:
        texts.append(("problem", shorten(str(err))))
    lines = [("name", shorten(label)), ("key", shorten(str(values.get("__key__", "")))), ("size", size), *texts]
    return Card(_figure("".join(pictures), lines, fields), label, side)


def _figure(pictures: str, lines: Iterable[tuple[str, str]], fields: Sequence[tuple[str, str]] = ()) -> str:
    """Return a card as HTML: pictures, lines as (CSS class, text), and the fields, which can be opened."""
    details = "".join(f"<div>{_escape(name)}</div><pre tabindex=0>{_escape(text)}</pre>" for name, text in fields)
    if details:
        names = _escape(", ".join(name for name, _ in fields)[:60])
        details = f"<details><summary>{names}</summary>{details}</details>"
    caption = "".join(f'<p class="{kind}"><bdi>{_escape(text)}</bdi></p>' for kind, text in lines if text)
    frame = f'<div class="frame">{pictures}</div>' if pictures else ""
    return f"<figure>{frame}<figcaption>{caption}{details}</figcaption></figure>\n"


def _pixels(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array or tensor as an image, uint8 (height, width, 3), or as a mask, whole numbers (height, width).
    Return None if its shape or type is neither's. Channels may be first.
    """
    array = _array(value)
    if array.ndim == 3 and array.shape[0] in {1, 3, 4} and array.shape[2] not in {1, 3, 4}:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1 and array.dtype.kind in "iu" and array.itemsize > 1:
        array = array[..., 0]
    if array.ndim == 2 and array.size and array.dtype.kind in "iub":
        return array
    if array.ndim != 3 or array.shape[2] not in {1, 3, 4} or not array.size or array.dtype.kind not in "fiub":
        return None
    return np.broadcast_to(_stretch(array[..., :3]), (*array.shape[:2], 3))


def _array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except TypeError:  # a tensor of bfloat16
        return np.asarray(value.float())


def _stretch(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values as uint8. Values outside 0..1 (floats) or 0..255 (whole numbers) are stretched to 0..255."""
    if array.dtype == np.uint8:
        return array
    low, high, most = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None), 255.0
    if array.dtype.kind == "f":
        most = 1.0
    if low >= 0 and high <= most:
        low, high = 0.0, most
    scaled = np.interp(array, (low, high), (0, 255)) if low < high else np.zeros(array.shape)
    return np.asarray(np.nan_to_num(scaled).round().astype(np.uint8))


def _netpbm(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return pixels as an image file: uint8 (height, width[, 3]), or whole numbers (height, width) of a mask."""
    kind, most = ("P6", 255) if pixels.ndim == 3 else ("P5", 255)
    if pixels.dtype != np.uint8:
        pixels, most = (pixels.astype(np.int64) & 0xFFFF).astype(">u2"), 65535
    return f"{kind} {pixels.shape[1]} {pixels.shape[0]} {most}\n".encode() + pixels.tobytes()


def _picture(
    data: bytes, masks: Iterable[bytes], boxes: Iterable[tuple[list[float], str]]
) -> tuple[str, tuple[int, int]]:
    """Return an SVG of an image with its masks and boxes, and the image's width and height. DecodeError: The image or a
    mask cannot be decoded.
    """
    thumbnail, (width, height) = make_thumbnail(data, side=SIDE, max_pixels=MAX_SHOWN_PIXELS)
    layers = [("image", "jpeg", thumbnail)]
    layers += [("mask", "png", make_mask_overlay(mask, side=SIDE, max_pixels=MAX_SHOWN_PIXELS)) for mask in masks]
    place = f'width="{width}" height="{height}" preserveAspectRatio="none"'
    parts = [
        f'<image class="{name}" {place} href="data:image/{kind};base64,{base64.b64encode(layer).decode()}"/>'
        for name, kind, layer in layers
    ]
    font = max(width, height) / 18
    for (x, y, wide, high), label in boxes:
        rect = f'<rect x="{x:.6g}" y="{y:.6g}" width="{wide:.6g}" height="{high:.6g}"/>'
        text = f'<text x="{x:.6g}" y="{max(y, font) - font / 5:.6g}" font-size="{font:.6g}">{_escape(label)}</text>'
        parts.append(f'<g class="box">{rect}{text}</g>')
    tiny = ' class="tiny"' if max(width, height) < SIDE / 2 else ""
    return f'<svg viewBox="0 0 {width} {height}" role="img"{tiny}>{"".join(parts)}</svg>', (width, height)


def _boxes(value: Any) -> Iterator[tuple[list[float], str]]:
    """Yield (x, y, width, height) in pixels and the label of each box in a JSON value.

    A box is `bbox` of the value, or of an item of its list `annotations`, as in COCO. `boxes` is a list of boxes, whose
    labels are the list `labels`.
    """
    value = value if isinstance(value, Mapping) else {}
    names, items, boxes, labels = (value.get(name) for name in ("categories", "annotations", "boxes", "labels"))
    names = names if isinstance(names, Mapping) else {}
    boxes = boxes if isinstance(boxes, list) else []
    labels = labels[: len(boxes)] if isinstance(labels, list) else []
    found: list[tuple[Any, object]] = [*zip_longest(boxes, labels, fillvalue="")]
    for item in (value, *items) if isinstance(items, list) else (value,):
        if isinstance(item, Mapping):
            label = next((item[key] for key in _NAMES if isinstance(item.get(key), str | int)), "")
            found.append((item.get("bbox"), names.get(str(label), label)))
    for box, label in found:
        is_box = isinstance(box, list) and len(box) == 4 and all(type(each) in {int, float} for each in box)
        if is_box and all(abs(each) < 1e9 for each in box) and min(box[2:]) > 0:
            yield box, shorten(str(label))


def _text(value: Any) -> str:
    """Return a value as text: JSON indented, of an array its type, shape and numbers, of bytes their number."""
    if isinstance(value, bytes | bytearray | memoryview):
        return format_bytes(len(value))
    if hasattr(value, "shape"):
        text = f"{str(value.dtype).removeprefix('torch.')} {' x '.join(map(str, value.shape))}"
        return f"{text}\n{np.array2string(_array(value), threshold=64)}" if len(value.shape) < 3 else text
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _escape(text: str) -> str:
    """Return text as HTML, cut after `MAX_CHARS` characters, with control characters as escapes."""
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n... and more"
    return html.escape("\n".join(map(printable, shown.split("\n"))))


def _page(title: str, total: int, shown: Sequence[Card]) -> str:
    """Return the page. `total` is the number of samples from which the cards come; 0 if it is unknown."""
    style = resources.files("wdskit").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    facts = f"{plural(len(shown), 'sample')}{f' of {format_count(total)}' if total else ''} shown"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)} · wdskit view</title><style>{style}</style></head>
<body><header><h1><bdi>{_escape(title)}</bdi></h1><p>{facts}</p></header>
<section class="charts">{_charts(shown)}</section>
<div class="switches"><label><input type="checkbox" id="masks" checked> masks</label>
<label><input type="checkbox" id="boxes" checked> boxes</label></div>
<main class="grid">
{"".join(card.html for card in shown)}</main></body></html>
"""


def _charts(cards: Sequence[Card]) -> str:
    """Return charts of the classes, sizes and bytes of the shown samples as HTML; no chart without values."""
    names = Counter(card.name for card in cards if card.name).most_common(MAX_BARS)
    sides, sizes = [card.side for card in cards if card.side], [card.num_bytes for card in cards if card.num_bytes]
    charts = [("Classes", names), ("Longer side in pixels", _histogram(sides, format_count))]
    charts.append(("Bytes of a sample", _histogram(sizes, format_bytes)))
    return "".join(_chart(title, bars) for title, bars in charts if bars)


def _histogram(values: Sequence[int], show: Callable[[int], str]) -> list[tuple[str, int]]:
    """Return (lower edge, number of values) of each of at most `MAX_BARS` ranges; empty without values."""
    if not values:
        return []
    low, high = min(values), max(values) + 1
    counts, edges = np.histogram(values, bins=min(MAX_BARS, high - low), range=(low, high))
    return [(show(int(edge)), count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=False)]


def _chart(title: str, bars: Sequence[tuple[str, int]]) -> str:
    most = max(count for _, count in bars)
    rows = "".join(
        f'<bdi>{_escape(shorten(label))}</bdi><svg viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bar" width="{100 * count / most:.2f}" height="1"/></svg><span>{format_count(count)}</span>'
        for label, count in bars
    )
    return f'<div class="chart"><h2>{title}</h2><div class="rows">{rows}</div></div>'
