"""Write samples of shards, or what the stages of a pipeline make of them, as one HTML page: `wdskit view`.

Shards may be hostile. All their content is escaped text, or an image that was decoded and encoded again. The page has
no script, and its policy allows only its own style sheet and images inside the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import TEXT_FIELDS, decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import make_mask_overlay, make_thumbnail, may_be_mask
from wdskit.config.types import parse_settings
from wdskit.dataset.classes import CLASS_FIELD, read_classes
from wdskit.engine.reader import SampleReader
from wdskit.errors import DecodeError, PipelineError, StorageError, WdskitError
from wdskit.files import Buffer, explain_unwritable, publish_bytes
from wdskit.limits import MAX_SHOWN_PIXELS
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.shards.listing import class_name
from wdskit.shards.sampling import check_seed
from wdskit.stages.registry import parse_stage
from wdskit.stages.sources import PlannedData, Sequential
from wdskit.storage.urls import shown_url
from wdskit.text import format_bytes, format_count, plural, printable, shorten

SIDE = 256
MAX_BOXES, MAX_IMAGES, MAX_CLASSES, NUM_BINS = 100, 4, 12, 24
MAX_CHARS = 4000
"""Most characters of a field that are shown."""
NUM_COUNTED, COUNTED_BYTES = 1000, 256 << 20
"""Limits of what is read of local shards for the charts."""

_LISTS, _BOXES = ("annotations", "objects"), ("bbox", "boxes")
_NAMES = ("category", "label", "class", "name", "category_name", "category_id")


@dataclass
class Card:
    """What the page shows of a sample.

    Attributes:
        name: Class; empty if unknown.
        pictures: SVG of each image.
        size: Width and height of the first image; (0, 0) without one.
        num_bytes: Bytes of all fields, or of all values that a pipeline made.
        texts: Contents of text fields.
        fields: (name, content) of all other fields.
        problem: Why the sample or an image cannot be shown; empty if it can.
    """

    key: str = ""
    name: str = ""
    pictures: list[str] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    texts: list[str] = field(default_factory=list)
    fields: list[tuple[str, str]] = field(default_factory=list)
    problem: str = ""


def view(
    data: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
    *,
    out: str | os.PathLike[str] | None = None,
    num: int = 48,
    seed: int | None = None,
    where: str | None = None,
    pipeline: str | None = None,
    overrides: Sequence[str] = (),
) -> Path:
    """Write one HTML page that shows samples, with charts of classes, sizes and bytes: `wdskit view`. The page needs
    no network and has no script.

    Of a folder, samples drawn at random are shown: image, masks and boxes, class, text and JSON. Masks are further
    images that store numbers, boxes are `bbox`, `boxes` or `annotations` in JSON, as in COCO. Of a pipeline, the first
    samples of the first epoch on one rank are shown, as its stages make them.

    Args:
        data: Shards with an index: a folder or a pattern, several joined by `::`. Or a pipeline: a YAML file, its
            content as a dict, or a `Pipeline`.
        out: The file to write; None makes a temporary file. Only an HTML file is replaced.
        num: Most samples to show.
        seed: Draws the samples of a folder (default 0); replaces the seed of a pipeline.
        where: Only samples for which this condition on columns is true.
        pipeline: Name of the pipeline, if the configuration has several.
        overrides: Settings of the configuration to change, each as `a.b.c=VALUE`.

    Returns:
        The path of the page.

    Raises:
        ConfigError, PipelineError: A setting is invalid, or a pipeline cannot run.
        StorageError: The shards cannot be found or read, or the page cannot be written.
        FolderIndexError, SelectionError: The index, a column or the condition is invalid, or no sample is selected.
        ShardError, SampleError: A sample of a pipeline is damaged. Of a folder, the page names it.
    """
    check_seed(seed or 0)
    target = Path(out) if out is not None else None
    if target is not None and (problem := explain_unwritable(target) or _in_the_way(target)):
        raise StorageError(f"{target}: the page cannot be written: {problem}.", url=str(target))
    is_config = not isinstance(data, str | os.PathLike) or str(data).endswith((".yaml", ".yml"))
    if is_config:
        title, total, cards = _open_pipeline(data, pipeline, overrides, where, seed)
        shown = counted = [*islice(cards, num)]
    elif pipeline is not None or overrides:
        raise PipelineError(f"{data}: `pipeline` and `overrides` belong to a configuration, a .yaml file.")
    else:
        title, total, shown, counted = _read_folder(str(data), num, seed or 0, where)
    page = _page(title, total, shown, counted).encode()
    try:
        if target is None:
            target = Path(tempfile.mkdtemp(prefix="wdskit-")) / "view.html"
        publish_bytes(target, page)
    except OSError as err:
        raise StorageError(f"{target}: the page cannot be written: {err.strerror}.", url=str(target)) from err
    return target


def _in_the_way(path: Path) -> str:
    """Return why the file at `path` is not replaced; "" if it is HTML or empty, or if there is no file."""
    try:
        with path.open("rb") as old:
            is_page = old.read(14).lower() in {b"", b"<!doctype html"}
    except OSError as err:
        return "" if isinstance(err, FileNotFoundError) else f"the file that is here cannot be read: {err.strerror}"
    return "" if is_page else "another file is here, and it is not a page"


def _read_folder(shards: str, num: int, seed: int, where: str | None) -> tuple[str, int, list[Card], list[Card]]:
    """Return the title, the number of selected samples, the cards to show and the cards to count."""
    source = parse_settings(Sequential, {"shards": shards, "where": where, "classes": "any"}, where="view")
    data = source.plan()
    total = data.num_samples or 0
    reader = SampleReader(data.tables, data.parts)
    most = 0 if reader.is_remote else min(NUM_COUNTED, int(COUNTED_BYTES / reader.most_mean_bytes()))
    drawn = np.random.default_rng(seed).permutation(total)[: max(num, most)]  # the first `num` are shown
    places = data.order.take(drawn.astype(np.int64))
    reader = reader.request(*places)
    classes = _classes_of(data)
    shown = {*drawn[:num].tolist()}
    cards = {}
    for row, shard, number in sorted(zip(drawn.tolist(), *(each.tolist() for each in places), strict=True)):
        try:
            path, key, _, fields = reader.read(shard, number)
            cards[row] = _card(key, fields, classes.get(path.rpartition("/")[0], ()), is_shown=row in shown)
        except WdskitError as err:
            cards[row] = Card(problem=str(err))
    return shown_url(shards), total, [card for row, card in cards.items() if row in shown], [*cards.values()]


def _classes_of(data: PlannedData) -> dict[str, tuple[str, ...]]:
    return {folder: read_classes(folder) or () for table in data.tables for folder in table.folders}


def _card(key: str, fields: Mapping[str, Buffer], classes: Sequence[str], *, is_shown: bool) -> Card:
    """Return the card of a sample of a shard. If not `is_shown`, only with what the charts count."""
    label = bytes(fields.get(CLASS_FIELD, b"")[:20]).decode(errors="replace")
    card = Card(key, class_name(label, classes), num_bytes=sum(map(len, fields.values())))
    images = {name: bytes(data) for name, data in fields.items() if is_image_field(name)}
    masks = [name for name, data in images.items() if may_be_mask(data, max_pixels=MAX_SHOWN_PIXELS)]
    others = [name for name in images if name not in masks]
    main, *others = others or [*images] or [""]
    try:
        if main:
            header = read_header(lambda size: images[main][:size])
            card.size = header.width, header.height
        if main and is_shown:
            overlays = [images[name] for name in masks if name != main]
            card.pictures.append(_picture(images[main], overlays[:MAX_IMAGES], _boxes_of(fields)))
            card.pictures += [_picture(images[name], (), ()) for name in others if name not in masks][: MAX_IMAGES - 1]
    except DecodeError as err:
        card.problem = f"{main}: {err}"
    for name, data in fields.items() if is_shown else ():
        try:
            value = decode_field(name, data)
        except DecodeError as err:
            value = str(err)
        if name.rpartition(".")[2].lower() in TEXT_FIELDS:
            card.texts.append(str(value))
        else:
            card.fields.append((name, f"{format_bytes(len(data))}\n{_text(value)}".strip()))
    return card


def _open_pipeline(
    config: Any, pipeline: str | None, overrides: Sequence[str], where: str | None, seed: int | None
) -> tuple[str, int, Iterator[Card]]:
    """Return the title, the number of samples of an epoch (0 if unknown), and the cards of a pipeline's samples."""
    opened = open_pipeline(config, pipeline, overrides, caller="view")
    source, *stages = opened.pipe.stages
    changes = {name: value for name, value in (("where", where), ("seed", seed)) if value is not None}
    if changes:
        if where is not None and getattr(source, "where", None):
            changes["where"] = f"({source.where}) and ({where})"
        settings = {name: value for name, value in source if value is not None}
        source = parse_stage(source.name, {**settings, **changes}, where="view")
    data = source.plan() if getattr(source, "is_planned", False) else None
    known = set(_classes_of(data).values()) if data else set()
    title = opened.name if isinstance(config, Mapping | Pipeline) else f"{Path(config).name}, pipeline {opened.name}"
    cards = _pipeline_cards([source, *stages], known.pop() if len(known) == 1 else ())
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
            for row in range(num_rows) if is_batched else ():
                own = {name: value[row] if _is_column(value, num_rows) else value for name, value in slots.items()}
                if own.get("__valid__", True):
                    yield _value_card(own, classes)
            if not is_batched:
                yield _value_card(slots, classes)


def _is_column(value: Any, num_rows: int) -> bool:
    return hasattr(value, "__getitem__") and not isinstance(value, str | Mapping) and len(value) == num_rows


def _value_card(values: Mapping[str, Any], classes: Sequence[str]) -> Card:
    """Return the card of the values that the stages of a pipeline made of a sample."""
    card = Card(str(values.get("__key__", "")))
    arrays = {name: _array(value) for name, value in values.items() if hasattr(value, "shape") and value.shape}
    for name, array in arrays.items():
        if array.ndim == 3 and array.dtype.kind in "iu" and array.itemsize > 1:  # the numbers of a mask
            arrays[name] = array[0] if array.shape[0] == 1 else array[..., 0] if array.shape[2] == 1 else array
    images = [image for array in arrays.values() if (image := _as_image(array)) is not None]
    masks = [array for array in arrays.values() if array.ndim == 2 and array.dtype.kind in "iub" and array.size]
    for pixels in (images or [_stretch(mask) for mask in masks])[:MAX_IMAGES]:
        same = [_netpbm(mask) for mask in masks if images and mask.shape == pixels.shape[:2]]
        card.size = card.size if card.pictures else pixels.shape[1::-1]
        card.pictures.append(_picture(_netpbm(pixels), same, ()))
    for name, value in values.items():
        if name in {"__key__", "__url__", "__valid__"}:
            continue
        card.num_bytes += getattr(arrays.get(name), "nbytes", 0)
        if name.partition(";")[0] == CLASS_FIELD and not getattr(value, "shape", ()):
            card.name = class_name(str(int(value)) if hasattr(value, "item") else str(value), classes)
        elif isinstance(value, str):
            card.texts.append(value)
        elif not name.startswith("__"):
            card.fields.append((name, _text(value)))
    return card


def _array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(value)
    except TypeError:  # a tensor of bfloat16
        return np.asarray(value.float())


def _as_image(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return an array as RGB, uint8 (height, width, 3); None if its shape is not an image's. Channels may be first."""
    if array.ndim == 3 and array.shape[0] in {1, 3, 4} and array.shape[2] not in {1, 3, 4}:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in {1, 3, 4} or not array.size or array.dtype.kind not in "fiub":
        return None
    return np.broadcast_to(_stretch(array[..., :3]), (*array.shape[:2], 3))


def _stretch(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values as uint8. Floats outside 0..1, and whole numbers outside 0..255, are stretched to 0..255."""
    if array.dtype == np.uint8:
        return array
    low, high = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)
    most = 1.0 if array.dtype.kind == "f" else 255.0
    low, high = (0.0, most) if low >= 0 and high <= most else (float(low), float(high))
    scaled = (array.astype(np.float64) - low) * (255 / ((high - low) or 1.0))
    pixels: np.ndarray[Any, Any] = np.nan_to_num(scaled, posinf=255).clip(0, 255).round().astype(np.uint8)
    return pixels


def _netpbm(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return pixels as an image file: uint8 (height, width[, 3]), or whole numbers (height, width) of a mask."""
    kind, most = ("P6", 255) if pixels.ndim == 3 else ("P5", 255)
    if pixels.dtype != np.uint8:
        pixels, most = (pixels.astype(np.int64) & 0xFFFF).astype(">u2"), 65535
    return f"{kind} {pixels.shape[1]} {pixels.shape[0]} {most}\n".encode() + pixels.tobytes()


def _picture(data: bytes, masks: Iterable[bytes], boxes: Iterable[tuple[list[float], str]]) -> str:
    """Return an SVG of an image with its masks and boxes. DecodeError: The image or a mask cannot be decoded."""
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
    return f'<svg viewBox="0 0 {width} {height}" role="img"{tiny}>{"".join(parts)}</svg>'


def _boxes_of(fields: Mapping[str, Buffer]) -> list[tuple[list[float], str]]:
    """Return (x, y, width, height) in pixels and the label of the first boxes in the JSON fields of a sample."""
    found: list[tuple[list[float], str]] = []
    for name in filter(is_json_field, fields):
        try:
            value = decode_field(name, fields[name])
        except DecodeError:
            continue  # shown with the field
        for box, label in _boxes(value) if isinstance(value, Mapping) else ():
            is_box = isinstance(box, list) and len(box) == 4 and all(type(each) in {int, float} for each in box)
            if is_box and all(abs(each) < 1e9 for each in box) and min(box[2:]) > 0:
                found.append((box, "" if label is None else shorten(str(label))))
    return found[:MAX_BOXES]


def _boxes(value: Mapping[str, Any]) -> Iterator[tuple[Any, object]]:
    """Yield each value that may be a box, and its label or None.

    These are `bbox` in the items of the lists `annotations` and `objects`, as in COCO. `bbox` and `boxes` at the top
    level are each one box or a list of boxes, whose labels are the list `labels` or `classes`.
    """
    names = value.get("categories")
    for item in (item for name in _LISTS if isinstance(value.get(name), list) for item in value[name]):
        if isinstance(item, Mapping):
            label = next((item[key] for key in _NAMES if isinstance(item.get(key), str | int)), None)
            known = names.get(str(label)) if isinstance(names, Mapping) else None
            yield item.get("bbox"), known if isinstance(known, str) else label
    labels: list[Any] = next((value[key] for key in ("labels", "classes") if isinstance(value.get(key), list)), [])
    for boxes in (value[name] for name in _BOXES if isinstance(value.get(name), list)):
        yield boxes, None
        for at, box in enumerate(boxes):
            yield box, labels[at] if len(labels) == len(boxes) else None


def _text(value: Any) -> str:
    """Return a value as text: JSON indented, of an array its type, shape and range, of bytes nothing."""
    if isinstance(value, bytes | bytearray | memoryview):
        return ""
    if hasattr(value, "shape"):
        array = _array(value)
        if not array.shape:
            return str(array)
        text = f"{str(value.dtype).removeprefix('torch.')} {' x '.join(map(str, array.shape))}"
        if array.size and array.dtype.kind in "fiub":
            text += f", {array.min():.6g} to {array.max():.6g}"
        return f"{text}\n{np.array2string(array, threshold=64)}" if array.ndim < 3 else text
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _escape(text: str, limit: int = MAX_CHARS) -> str:
    """Return text as HTML, cut after `limit` characters, with control characters as escapes."""
    shown = text if len(text) <= limit else f"{text[:limit]}\n... and more"
    return html.escape("\n".join(map(printable, shown.split("\n"))))


def _page(title: str, total: int, shown: Sequence[Card], counted: Sequence[Card]) -> str:
    """Return the page. `total` is the number of samples from which the cards come; 0 if it is unknown."""
    style = resources.files("wdskit").joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    names = Counter(card.name for card in counted if card.name)
    numbers = {
        "Width in pixels": ([card.size[0] for card in counted if card.size[0]], format_count),
        "Height in pixels": ([card.size[1] for card in counted if card.size[1]], format_count),
        "Bytes of a sample": ([card.num_bytes for card in counted if card.num_bytes], format_bytes),
    }
    charts = [_bars(names)] if names else []
    charts += [_histogram(title, *each) for title, each in numbers.items() if len(set(each[0])) > 1]
    equal = [f"{title.lower()}: {show(each[0])}" for title, (each, show) in numbers.items() if len(set(each)) == 1]
    of = f" of {format_count(total)}" if total else ""
    facts = [f"{plural(len(shown), 'sample')}{of} shown", f"{format_count(len(counted))} counted", *equal]
    pictures = "".join(each for card in shown for each in card.pictures)
    switches = "".join(
        f'<label><input type="checkbox" id="{name}" checked> {name}</label>'
        for name, kind in (("masks", "mask"), ("boxes", "box"))
        if f'class="{kind}"' in pictures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(title)} · wdskit view</title><style>{style}</style></head>
<body><header><h1><bdi>{_escape(title)}</bdi></h1><p>{" · ".join(facts)}</p></header>
<section class="charts">{"".join(charts)}</section>
<div class="switches">{switches}</div>
<main class="grid">
{"".join(map(_figure, shown))}</main></body></html>
"""


def _figure(card: Card) -> str:
    """Return the card of a sample as HTML."""
    size = "{} x {} · ".format(*card.size) if card.size[0] else ""
    fields = "".join(f"<div>{_escape(name)}</div><pre tabindex=0>{_escape(text)}</pre>" for name, text in card.fields)
    names = ", ".join(name for name, _ in card.fields)
    lines = [
        f'<p class="name"><bdi>{_escape(shorten(card.name))}</bdi></p>' if card.name else "",
        f'<p class="key"><bdi>{_escape(shorten(card.key))}</bdi></p>' if card.key else "",
        f'<p class="size">{size}{format_bytes(card.num_bytes)}</p>' if card.num_bytes else "",
        *(f'<p class="text"><bdi>{_escape(text, 1000)}</bdi></p>' for text in card.texts),
        f'<p class="problem">{_escape(shorten(card.problem))}</p>' if card.problem else "",
        f"<details><summary>{_escape(names, 60)}</summary>{fields}</details>" if fields else "",
    ]
    frame = f'<div class="frame">{"".join(card.pictures)}</div>' if card.pictures else ""
    return f"<figure>{frame}<figcaption>{''.join(lines)}</figcaption></figure>\n"


def _bars(counts: Counter[str]) -> str:
    """Return a chart of the most common classes."""
    most_common = counts.most_common(MAX_CLASSES)
    widths = [f"{100 * count / most_common[0][1]:.2f}" for _, count in most_common]
    rows = "".join(
        f'<bdi title="{_escape(shorten(name))}">{_escape(shorten(name))}</bdi><svg viewBox="0 0 100 1" '
        f'preserveAspectRatio="none"><rect class="bar" width="{width}" height="1"/></svg>'
        f"<span>{format_count(count)}</span>"
        for (name, count), width in zip(most_common, widths, strict=True)
    )
    more = f", the {MAX_CLASSES} most common" if len(counts) > MAX_CLASSES else ""
    return f'<div class="chart"><h2>Classes <span>{len(counts):,}{more}</span></h2><div class="rows">{rows}</div></div>'


def _histogram(title: str, values: Sequence[int], show: Callable[[float], str]) -> str:
    """Return a chart of numbers, of which two or more differ."""
    low, high = min(values), max(values)
    num_bins = min(NUM_BINS, high - low + 1)
    counts = np.histogram(values, bins=num_bins, range=(low, high + 1))[0].tolist()
    step, most = (high + 1 - low) / num_bins, max(counts)
    bars = "".join(
        f'<rect class="bar" x="{at + 0.04}" width="0.92" y="{100 - 100 * count / most:.2f}" '
        f'height="{100 * count / most:.2f}"><title>{show(math.floor(low + at * step))}: {count:,}</title></rect>'
        for at, count in enumerate(counts)
    )
    ends = "".join(f"<span>{text}</span>" for text in (show(low), f"median {show(int(np.median(values)))}", show(high)))
    svg = f'<svg viewBox="0 0 {num_bins} 100" preserveAspectRatio="none" role="img">{bars}</svg>'
    return f'<div class="chart"><h2>{title}</h2>{svg}<div class="ends">{ends}</div></div>'
