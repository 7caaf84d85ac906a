"""The report of `wdskit stats --html`: one HTML file that needs no network, no server and no script.

Keys, class names, JSON and paths are whatever somebody wrote into the shards: jinja2 escapes every text, `finalize`
makes what does not show visible, and the page's policy lets it load nothing and run nothing, style attributes included:
how long a bar is, one of 101 classes of its style sheet says.
"""

from __future__ import annotations

import base64
import contextlib
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
from wdskit.dataset.samples import read_sample
from wdskit.errors import ConfigError, DecodeError, StorageError
from wdskit.files import publish_bytes, why_not
from wdskit.limits import MAX_PIXELS
from wdskit.statistics.result import ShardStats, choose_classes
from wdskit.storage.urls import open_ranges
from wdskit.text import format_bytes, format_count, install_extra, printable, shorten

CLASS_FIELD = "cls"
NUM_SHOWN = 48
SIDE = 192
MAX_BARS = 40


@dataclass(frozen=True)
class Shown:
    """One sample of the contact sheet.

    Attributes:
        key: Its key.
        shard: Name of its shard.
        label: Its class, empty without one.
        size: Width and height of the image.
        picture: A small JPEG in base64, empty where the image does not decode.
        sides: Width and height of that.
        problem: Why it does not.
    """

    key: str
    shard: str
    label: str
    size: str = ""
    picture: str = ""
    sides: tuple[int, int] = (0, 0)
    problem: str = ""


def check_report(path: str | os.PathLike[str]) -> None:
    """Refuse a report that could not be made, before anything is read.

    Raises:
        ConfigError: jinja2 is not installed.
        StorageError: There is no such folder, or nothing may be written there.
    """
    problem = why_not(Path(path))
    if problem:
        raise StorageError(f"{os.fspath(path)}: the report cannot be written: {problem}.", url=str(path))
    try:
        import jinja2  # noqa: F401 (only whether it is there)
    except ImportError as err:
        raise ConfigError(f"a report needs jinja2.\n  {install_extra('report')}") from err


def write_report(stats: ShardStats, places: Sequence[tuple[str, int]], path: str | os.PathLike[str]) -> None:
    """Write the report; what is there is replaced as a whole.

    Args:
        stats: The numbers.
        places: Shard and offset of the samples to show.
        path: The file.

    Raises:
        ShardError: A shard changed since it was counted.
        StorageError: It cannot be read any more, or the file cannot be written.
    """
    shown = sorted((_show(url, start) for url, start in places), key=lambda one: (one.label, one.key))
    page = render(stats, shown)
    try:
        publish_bytes(Path(path), page.encode())
    except OSError as err:
        raise StorageError(f"{os.fspath(path)}: the report cannot be written: {err.strerror}.", url=str(path)) from err


def _show(url: str, start: int) -> Shown:
    """Read one sample of the contact sheet."""
    with contextlib.closing(open_ranges(url)) as file:
        key, fields = read_sample(file, start)
    folder, shard = split_url(url)
    names = read_classes(folder) or ()
    label = bytes(fields.get(CLASS_FIELD, b"")[:20]).decode(errors="replace").strip()
    if label.isdecimal() and int(label) < len(names):
        label = shorten(names[int(label)])
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
        return Shown(key, shard, label, f"{width} x {height}", base64.b64encode(picture).decode(), sides)
    return Shown(key, shard, label, problem=problem)


def render(stats: ShardStats, shown: Sequence[Shown]) -> str:
    """The report's text."""
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
    environment.globals |= shows
    environment.filters |= shows | {
        "percent": lambda part: "< 0.1%" if 0 < part < 0.001 else f"{part:.1%}",
        "limit": lambda value: "" if value is None else f"{value:,.6g}",
        "name": lambda path: Path(path).name or path,
        "level": lambda part: max(1, round(100 * part)) if part > 0 else 0,  # what is there is seen
    }
    page = resources.files("wdskit.statistics").joinpath("report.html").read_text(encoding="utf-8")
    page = page.replace("/* parts */", "".join(f".p{part} {{ --part: {part}%; }}\n" for part in range(101)))
    sheet = page.partition("<style>")[2].partition("</style>")[0]
    classes = stats.classes or ()
    return environment.from_string(page).render(
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(sheet.encode()).digest()).decode(),
        stats=stats,
        shown=shown,
        classes=choose_classes(classes, MAX_BARS),
        class_most=max((one.num_samples for one in classes), default=0),
        class_total=sum(one.num_samples for one in classes),
        empty_classes=[one.name for one in classes if not one.num_samples],
        version=__version__,
    )
