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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import make_mask_overlay, make_thumbnail, may_be_mask
from wdskit.config.types import parse_settings
from wdskit.dataset.classes import CLASS_FIELD, read_classes
from wdskit.dataset.patterns import shown_path
from wdskit.engine.reader import SampleReader
from wdskit.errors import DecodeError, PipelineError, StorageError, WdskitError, check_whole
from wdskit.files import Buffer, publish_bytes
from wdskit.limits import MAX_SHOWN_PIXELS
from wdskit.pipeline.builder import Pipeline, open_pipeline
from wdskit.shards.info import class_name
from wdskit.shards.shares import check_seed
from wdskit.stages.sources import PlannedData, PlannedSource, Sequential
from wdskit.text import format_bytes, format_count, plural, printable, shorten

SIDE = 256
MAX_BOXES, MAX_IMAGES, MAX_BARS = 100, 4, 12
MAX_CHARS = 4000
"""Most characters of a field that are shown."""

_CHANNELS = (1, 3, 4)


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
    images that store numbers. Boxes are the `bbox` in JSON, and those in its list `annotations`, as in COCO. Of a
    pipeline, the first samples of the first epoch on one rank are shown, as its stages make them.

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
    num, seed = check_whole("num", num, PipelineError), check_seed(seed)
    if out is not None and Path(out).suffix != ".html":
        raise StorageError(f"{out}: the name of a page ends in .html.", url=str(out))
    config, folder = data, ""
    if isinstance(data, str | os.PathLike) and not str(data).endswith((".yaml", ".yml")):
        given = {"shards": str(data), "where": where, "classes": "any"}
        config, folder = Pipeline([parse_settings(Sequential, given, where="view")]), shown_path(str(data))
    elif seed or where is not None:
        raise PipelineError("`seed` and `where` belong to a folder. Change the source, as in pipeline.exact.where=...")
    name, stages, _ = open_pipeline(config, pipeline, overrides)
    source = stages[0].plan() if isinstance(stages[0], PlannedSource) else None
    known = {read_classes(place) or () for table in source.tables for place in table.folders} if source else set()
    classes = known.pop() if len(known) == 1 else ()
    samples = _draw(source, num, seed) if source and folder else _make(stages)
    cards = [_card(sample, classes) for sample in islice(samples, num)]
    page = _page(folder or name, (source.num_samples or 0) if source else 0, cards)
    target = Path(tempfile.mkdtemp(prefix="wdskit-")) / "view.html" if out is None else Path(out)
    try:
        publish_bytes(target, page.encode())
    except OSError as err:
        raise StorageError(f"{target}: the page cannot be written: {err.strerror}.", url=str(target)) from err
    return target


def _draw(source: PlannedData, num: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """Yield samples as they are stored, drawn at random; of a damaged sample, the problem."""
    total = source.num_samples or 0
    places = np.random.default_rng(seed).choice(total, min(num, total), replace=False)
    shards, numbers = source.order.take(np.sort(places))
    reader = SampleReader(source.tables, source.parts).request(shards, numbers)
    for shard, number in zip(shards.tolist(), numbers.tolist(), strict=True):
        try:
            _, key, _, fields = reader.read(shard, number)
            yield {"__key__": key, **fields}
        except WdskitError as err:
            yield {"problem": str(err)}


def _make(stages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield samples as the stages make them, in the order of one rank; of a batch, each of its samples."""
    is_batched = any(getattr(stage, "kind", "") == "batch" for stage in stages)
    names = next((stage.fields for stage in reversed(stages) if getattr(stage, "name", "") == "to_tuple"), ())
    with Pipeline(stages).loader(workers=0, threads=1, rank=0, world_size=1) as loader:
        for made in loader:
            slots = made
            if not isinstance(made, Mapping):
                items = made if isinstance(made, tuple | list) else [made]
                slots = {names[at] if at < len(names) else f"[{at}]": item for at, item in enumerate(items)}
            samples = _rows(slots) if is_batched else [slots]
            yield from (sample for sample in samples if sample.get("__valid__", True))


def _rows(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the samples of a batch. A value that has no row for each sample is in all samples."""
    num_rows = next(filter(None, map(_length, batch.values())), 0)
    for row in range(num_rows):
        yield {name: value[row] if _length(value) == num_rows else value for name, value in batch.items()}


def _length(value: Any) -> int:
    """Return the number of rows of a list, an array, a tensor or a `Ragged`; 0 for another value."""
    has_rows = hasattr(value, "__getitem__") and not isinstance(value, str | Mapping)
    return len(value) if has_rows and getattr(value, "ndim", True) else 0


def _card(sample: Mapping[str, Any], classes: Sequence[str]) -> Card:
    """Return the card of a sample. The first image has all masks over it and, if all values are as stored, the boxes in
    the sample's JSON: stages may have resized or flipped an image.
    """
    stored = {name: value for name, value in sample.items() if not name.startswith("__")}
    is_stored = all(isinstance(value, Buffer) for value in stored.values())
    images: list[bytes] = []
    masks: list[bytes] = []
    boxes: list[tuple[list[float], str]] = []
    label, size, side, texts, fields = "", "", 0, [], []
    for name, value in ((name, _readable(name, value)) for name, value in stored.items()):
        image = bytes(value) if isinstance(value, Buffer) and is_image_field(name) else _as_image(value)
        if image is not None:
            (masks if may_be_mask(image, max_pixels=MAX_SHOWN_PIXELS) else images).append(image)
        if is_json_field(name) and is_stored:
            boxes += _boxes(value)
        if name.partition(";")[0] == CLASS_FIELD and not getattr(value, "shape", ()):
            label = class_name(str(value), classes)
        elif isinstance(value, str):
            texts.append(("text", value))
        else:
            fields.append((name, _text(value)))
    images, masks = images or masks, masks if images else []
    pictures: list[str] = []
    try:
        for data in images[:MAX_IMAGES]:
            picture, width, height = _picture(data, masks[:MAX_IMAGES], boxes[:MAX_BOXES])
            size, side = size or f"{width} x {height}", side or max(width, height)
            pictures.append(picture)
            masks, boxes = [], []
    except DecodeError as err:
        texts.append(("problem", shorten(str(err))))
    lines = [("name", shorten(label)), ("key", shorten(str(sample.get("__key__", "")))), ("size", size), *texts]
    num_bytes = sum(map(len, stored.values())) if is_stored else 0
    return Card(_figure("".join(pictures), lines, fields), label, side, num_bytes)


def _readable(name: str, value: Any) -> Any:
    """Return stored bytes decoded, if their field has text, a number, JSON or an array; a tensor as an array; and
    every other value unchanged. Text describes a value that cannot be decoded or converted.
    """
    try:
        if isinstance(value, Buffer):
            return decode_field(name, value)
        return np.asarray(value) if hasattr(value, "shape") else value
    except DecodeError as err:
        return str(err)
    except (TypeError, RuntimeError):  # numpy has no such tensor: bfloat16, sparse, with `requires_grad`
        return f"{name}: {value.dtype} {tuple(value.shape)}"


def _figure(pictures: str, lines: Iterable[tuple[str, str]], fields: Sequence[tuple[str, str]]) -> str:
    """Return a card as HTML: pictures, lines as (CSS class, text), and the fields, which can be opened."""
    details = "".join(f"<div>{_escape(name)}</div><pre tabindex=0>{_escape(text)}</pre>" for name, text in fields)
    if details:
        names = _escape(", ".join(name for name, _ in fields)[:60])
        details = f"<details><summary>{names}</summary>{details}</details>"
    caption = "".join(f'<p class="{kind}"><bdi>{_escape(text)}</bdi></p>' for kind, text in lines if text)
    frame = f'<div class="frame">{pictures}</div>' if pictures else ""
    return f"<figure>{frame}<figcaption>{caption}{details}</figcaption></figure>\n"


def _as_image(value: Any) -> bytes | None:
    """Return an array as an image file: RGB as PPM, a mask as PGM. None if its shape or type is neither's.

    Channels may be first or last. A mask has whole numbers and no channels, or one channel of more than 8 bits.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub" or not value.size:
        return None
    if value.ndim == 3 and value.shape[0] in _CHANNELS and value.shape[2] not in _CHANNELS:
        value = value.transpose(1, 2, 0)
    is_mask = value.ndim == 2 or (value.ndim == 3 and value.shape[2] == 1 and value.itemsize > 1)
    if is_mask and value.dtype.kind != "f":
        kind, most, pixels = "P5", 65535, (value.astype(np.int64) & 0xFFFF).astype(">u2")
    elif value.ndim == 3 and value.shape[2] in _CHANNELS:
        # 0..1 of floats and 0..255 of whole numbers become 0..255, or else the whole range of the values does.
        numbers = np.nan_to_num(value[..., :3].astype(np.float64), posinf=0, neginf=0).clip(-1e30, 1e30)
        limits = min(numbers.min(), 0), max(numbers.max(), 1 if value.dtype.kind == "f" else 255)
        scaled = np.interp(numbers, limits, (0, 255)).round().astype(np.uint8)
        kind, most, pixels = "P6", 255, np.broadcast_to(scaled, (*value.shape[:2], 3))
    else:
        return None
    header = f"{kind} {value.shape[1]} {value.shape[0]} {most}\n"
    return header.encode() + bytes(pixels.tobytes())


def _picture(data: bytes, masks: Iterable[bytes], boxes: Iterable[tuple[list[float], str]]) -> tuple[str, int, int]:
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
    return f'<svg viewBox="0 0 {width} {height}" role="img"{tiny}>{"".join(parts)}</svg>', width, height


def _boxes(value: Any) -> Iterator[tuple[list[float], str]]:
    """Yield (x, y, width, height) in pixels and the label of each box in a JSON value.

    A box is `bbox` of the value, or of an item of its list `annotations`, as in COCO. Its label is `category`, or the
    name of `category_id` in `categories`.
    """
    about = value if isinstance(value, dict) else {}
    items, names = about.get("annotations"), about.get("categories")
    for item in (about, *items) if isinstance(items, list) else (about,):
        box = item.get("bbox") if isinstance(item, dict) else None
        if not isinstance(box, list) or len(box) != 4 or not all(type(each) in {int, float} for each in box):
            continue
        if all(abs(each) < 1e9 for each in box) and min(box[2:]) > 0:
            number = item.get("category_id", "")
            name = names.get(str(number), number) if isinstance(names, dict) else number
            yield box, shorten(str(item.get("category", name)))


def _text(value: Any) -> str:
    """Return a value as text: JSON indented, of an array its type, shape and numbers, of bytes their number."""
    if isinstance(value, Buffer):
        return format_bytes(len(value))
    if isinstance(value, np.ndarray):
        text = f"{value.dtype} {' x '.join(map(str, value.shape))}"
        return f"{text}\n{np.array2string(value, threshold=64)}" if value.ndim < 3 else text
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
