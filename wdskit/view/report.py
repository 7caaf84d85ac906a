"""The report of `wdskit stats --html`: one HTML file that needs no network, no server and no script.

Keys, class names, JSON and paths come from the shards, so they may be hostile. jinja2 escapes every text, `finalize`
replaces characters that cannot be seen, and the page's policy refuses scripts, network requests and style attributes.
Because style attributes are refused, the style sheet has 101 classes for the lengths of bars.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from wdskit.codecs.formats import is_image_field
from wdskit.codecs.images import make_thumbnail
from wdskit.dataset.classes import read_classes
from wdskit.dataset.patterns import split_url
from wdskit.errors import ConfigError, DecodeError, StorageError
from wdskit.files import explain_unwritable, publish_bytes
from wdskit.limits import MAX_PIXELS
from wdskit.shards.lazy_shard import LazyShard, field_size, fields_of
from wdskit.shards.parallel import Progress
from wdskit.shards.stats import ShardStats, choose_classes, collect
from wdskit.text import format_bytes, format_count, install_extra, printable, shorten
from wdskit.view.charts import bar_levels, make_histogram
from wdskit.view.describe import class_name

NUM_SHOWN = 48
SIDE = 192
MAX_BARS = 40


@dataclass(frozen=True)
class Thumbnail:
    """A sample in the report: a small image, and texts about the sample.

    Attributes:
        key: Key of the sample.
        shard: Name of the sample's shard.
        label: Class of the sample; empty without a class.
        size: Width and height of the image, as text; empty without `picture`.
        picture: A small JPEG in base64; empty if the sample has no image that can be decoded.
        sides: Width and height of the small JPEG in pixels; (0, 0) without `picture`.
        problem: Why there is no `picture`; empty otherwise.
    """

    key: str
    shard: str
    label: str
    size: str = ""
    picture: str = ""
    sides: tuple[int, int] = (0, 0)
    problem: str = ""


def write_report(
    path: str | Path,
    file: str | os.PathLike[str],
    *,
    sample: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ShardStats:
    """Write a report about shards with bar charts and up to 48 images: `wdskit stats --html`. Return the statistics.

    Args:
        path: A shard, a folder, or a pattern; several joined by `::`.
        file: The HTML file to write. An existing HTML or empty file is replaced as a whole; any other file is an error.
        sample: Share of the samples of each shard to read, such as `10%`; None reads all samples.
        seed: Chooses the samples of the share and the images.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        progress: Called after each shard with the bytes read so far and the bytes of all shards (None if unknown).

    Raises:
        ConfigError: jinja2 is not installed, `sample` is not a share, or `seed` is not from 0 to 2**64 - 1.
        StorageError: No shard was found, a shard cannot be read, or the report cannot be written, for example because
            `file` exists and is neither empty nor HTML.
        ShardError: Shards are invalid, or have changed since they were counted.
        FolderIndexError: The folder's index does not match its files, or its `classes.json` is invalid.
        WdskitError: A worker process was killed.
    """
    shown = os.fspath(file)
    problem = explain_unwritable(Path(file))
    if not problem and Path(file).is_file():
        try:
            with Path(file).open("rb") as old:
                if (start := old.read(14)) and start.lower() != b"<!doctype html":
                    problem = "another file is here, and it is not a report"
        except OSError as err:
            problem = f"the file that is here cannot be read: {err.strerror}"
    if problem:
        raise StorageError(f"{shown}: the report cannot be written: {problem}.", url=shown)
    try:
        import jinja2  # noqa: F401 (before anything is read)
    except ImportError as err:
        raise ConfigError(f"a report needs jinja2.\n  {install_extra('report')}") from err
    stats, places = collect(path, sample=sample, seed=seed, num_shown=NUM_SHOWN, workers=workers, progress=progress)
    thumbnails = sorted((_make_thumbnail(*place) for place in places), key=lambda each: (each.label, each.key))
    page = render(stats, thumbnails)
    try:
        publish_bytes(Path(file), page.encode())
    except OSError as err:
        raise StorageError(f"{shown}: the report cannot be written: {err.strerror}.", url=shown) from err
    return stats


def _make_thumbnail(url: str, start: int) -> Thumbnail:
    """Return the thumbnail of the sample that starts at byte offset `start` of the shard `url`.

    The first image that can be decoded is shown. If no image can be decoded, `problem` of the thumbnail says why.
    Raises ShardError or StorageError if the sample cannot be read, and FolderIndexError if `classes.json` is invalid.
    """
    with LazyShard(url, start=start) as opened:
        sample = next(iter(opened))
        key = sample["__key__"]
        fields = {name: opened.part(data, 0, field_size(data)) for name, data in fields_of(sample)}
    folder, shard = split_url(url)
    label = class_name(fields, read_classes(folder) or ())
    key = shorten(key)
    problem = "no image"
    for data in (data for name, data in fields.items() if is_image_field(name)):
        try:
            picture, (width, height) = make_thumbnail(data, side=SIDE, max_pixels=MAX_PIXELS)
        except DecodeError as err:
            problem = shorten(str(err))
            continue
        scale = min(1.0, SIDE / max(width, height))
        sides = max(1, round(width * scale)), max(1, round(height * scale))
        return Thumbnail(key, shard, label, f"{width} x {height}", base64.b64encode(picture).decode(), sides)
    return Thumbnail(key, shard, label, problem=problem)


def render(stats: ShardStats, shown: Sequence[Thumbnail]) -> str:
    """Return the report as one HTML page, with the statistics and the thumbnails `shown`, in this order."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from wdskit import __version__

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=finalize)
    shows: dict[str, Callable[[float], str]] = {
        "bytes": format_bytes,
        "count": format_count,
        "ratio": lambda thousandths: f"{thousandths / 1000:.2f}",
        "pixels": lambda num: f"{num / 1e6:,.2f} MP" if num >= 1e5 else f"{num:,.0f}",
    }
    environment.globals |= {**shows, "make_histogram": make_histogram}
    environment.filters |= shows | {
        "percent": lambda part: "< 0.1%" if 0 < part < 0.001 else f"{part:.1%}",
        "limit": lambda value: "" if value is None else f"{value:,.6g}",
        "name": lambda path: Path(path).name or path,
        "level": lambda part: max(1, round(100 * part)) if part > 0 else 0,
    }
    page = resources.files("wdskit.view").joinpath("report.html").read_text(encoding="utf-8")
    page = page.replace("/* parts */", "".join(f".p{part} {{ --part: {part}%; }}\n" for part in range(101)))
    sheet = page.partition("<style>")[2].partition("</style>")[0]
    classes = stats.classes or ()
    chosen = choose_classes(classes, MAX_BARS)
    return environment.from_string(page).render(
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode(),
        stats=stats,
        shown=shown,
        classes=[*zip(chosen, bar_levels(each.num_samples for each in chosen), strict=True)],
        class_total=sum(each.num_samples for each in classes),
        empty_classes=[each.name for each in classes if not each.num_samples],
        version=__version__,
    )
