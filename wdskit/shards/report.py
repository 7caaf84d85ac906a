"""The report of `wdskit stats --html`: one HTML file that needs no network, no server and no script.

Keys, class names, JSON and paths are whatever somebody wrote into the shards: jinja2 escapes every text, `finalize`
makes what does not show visible, and the page's policy lets it load nothing and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from wdskit.codecs.images import is_image_field
from wdskit.codecs.thumbnails import make_thumbnail
from wdskit.dataset.classes import read_classes
from wdskit.dataset.samples import read_sample
from wdskit.errors import ConfigError, DecodeError, StorageError
from wdskit.files import publish_bytes, why_not
from wdskit.limits import MAX_PIXELS
from wdskit.shards.report_plots import WIDTH, class_bars, histogram, ranked_classes, resolutions
from wdskit.shards.statistics_tally import CLASS_FIELD
from wdskit.shards.statistics_types import ImageStats, NumberStats, ShardStats
from wdskit.storage.urls import LocalFile, local_path
from wdskit.text import format_bytes, format_count, printable, shorten

NUM_SHOWN = 48
SIDE = 192
MAX_BARS = 40
NUM_KEYS = 200
_NUM_ENDS = 6
_NUM_BAD = 5
_TAIL = 18


@dataclass(frozen=True)
class Shown:
    """One sample of the contact sheet.

    Attributes:
        key: Its key.
        shard: Name of its shard.
        label: Its class, empty without one.
        size: Width and height of the image.
        picture: A small JPEG in base64, empty where it does not decode.
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

    @property
    def tail(self) -> str:
        """The end of the key, which tells neighbours apart."""
        return self.key if len(self.key) <= _TAIL else f"...{self.key[-_TAIL:]}"


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
        raise ConfigError("a report needs jinja2.\n  Install it: pip install 'wdskit[report]'.") from err


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
    file = LocalFile(url)
    try:
        key, fields = read_sample(file, start)
    finally:
        file.close()
    shard = Path(local_path(url))
    label = _label(bytes(fields.get(CLASS_FIELD, b"")[:20]), shard.parent)
    key = shorten(key)
    problem = "no image"
    for name, data in fields.items():
        if is_image_field(name):
            try:
                picture, size = make_thumbnail(data, side=SIDE, max_pixels=MAX_PIXELS)
            except DecodeError as err:
                problem = shorten(str(err))
                continue
            sides = _fit(size)
            encoded = base64.b64encode(picture).decode()
            return Shown(key, shard.name, label, f"{size[0]} x {size[1]}", encoded, sides)
    return Shown(key, shard.name, label, problem=problem)


def _fit(size: tuple[int, int]) -> tuple[int, int]:
    scale = min(1.0, SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _label(data: bytes, folder: Path) -> str:
    """The class of a sample by its name, or its number."""
    names = read_classes(folder) or ()
    text = data.decode(errors="replace").strip()
    return shorten(names[int(text)]) if text.isdecimal() and int(text) < len(names) else text


def render(stats: ShardStats, shown: Sequence[Shown]) -> str:
    """The report's text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = (resources.files("wdskit.shards") / "report.html").read_text(encoding="utf-8")
    style = source.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=finalize)
    return environment.from_string(source).render(
        style_hash=f"sha256-{digest}",
        width=WIDTH,
        percent=_percent,
        title=Path(stats.path).name or stats.path,
        lead=_lead(stats),
        stats=stats,
        facts=tuple(_facts(stats)),
        notes=tuple(_notes(stats)),
        shown=shown,
        fields=tuple(_fields(stats)),
        keys=tuple(_keys(stats)),
        pictures=tuple(_pictures(one) for one in stats.images),
        sample_plot=_plot(stats.sample_sizes, "bytes a sample", format_bytes),
        shard_plot=_plot(stats.shard_samples, "samples a shard", format_count),
        footer=_footer(stats),
        **_classes(stats),
    )


def _percent(share: float) -> str:
    return "100%" if share == 1 else "0" if share == 0 else "< 0.1%" if share < 0.001 else f"{share:.1%}"


def _plot(numbers: NumberStats, what: str, show: Any) -> Any:
    return histogram(numbers, what, show) if numbers.min < numbers.max else None


def _lead(stats: ShardStats) -> str:
    read = f", {format_count(stats.num_read)} of them read" if stats.sample else ""
    return f"{stats.path}: {format_count(stats.num_samples)} samples{read}"


def _facts(stats: ShardStats) -> Iterator[tuple[str, str, str]]:
    """Name, value and a line below it."""
    yield "samples", format_count(stats.num_samples), f"{format_count(stats.num_read)} read" if stats.sample else ""
    yield "size", format_bytes(stats.num_bytes), f"{format_bytes(stats.sample_sizes.mean)} a sample"
    shards = stats.shard_samples
    yield "shards", format_count(stats.num_shards), _each(shards.min, shards.max)
    if stats.classes:
        counts = [one.num_samples for one in stats.classes]
        yield "classes", format_count(len(counts)), _each(min(counts), max(counts))
    for images in stats.images:
        formats = ", ".join(images.formats)
        yield f"images, {images.field}", format_count(images.num_images), formats
    if stats.duplicates is not None:
        yield "duplicates", format_count(stats.duplicates.num_samples), "images of the same bytes"
    if stats.num_bad:
        yield "bad fields", format_count(stats.num_bad), "listed below"


def _each(least: float, most: float) -> str:
    """`5 to 9 samples each`."""
    return f"{'' if least == most else f'{least:,} to '}{most:,} sample{'' if most == 1 else 's'} each"


def _notes(stats: ShardStats) -> Iterator[str]:
    for bad in stats.bad[:_NUM_BAD]:
        yield f"{bad.key}.{bad.field} in {Path(bad.shard).name}: {bad.problem}"
    if stats.num_bad > _NUM_BAD:
        yield f"{format_count(stats.num_bad - _NUM_BAD)} more bad fields"
    for places in stats.duplicates.first if stats.duplicates else ():
        yield "the same bytes: " + ", ".join(f"{key} in {Path(shard).name}" for shard, key in places)
    empty = [one.name for one in stats.classes or () if not one.num_samples]
    if empty:
        yield f"{format_count(len(empty))} classes of classes.json without a sample, first {empty[0]}"


def _classes(stats: ShardStats) -> dict[str, Any]:
    """Few classes as bars with their names; many as one falling line, and its ends by name."""
    classes = stats.classes or ()
    if len(classes) <= MAX_BARS:
        return {"classes": class_bars(classes), "class_plot": None, "class_ends": ()}
    ranked = sorted(class_bars(classes), key=lambda one: -one.count)
    ends = (*ranked[:_NUM_ENDS], *ranked[-_NUM_ENDS:])
    return {"classes": (), "class_plot": ranked_classes(classes), "class_ends": ends}


def _fields(stats: ShardStats) -> Iterator[dict[str, Any]]:
    for field in stats.fields:
        sizes = field.sizes
        numbers = (sizes.total, sizes.min, sizes.mean, sizes.p50, sizes.p99, sizes.max)
        share = field.num_samples / stats.num_read
        yield {"name": field.name, "share": share, "sizes": tuple(map(format_bytes, numbers))}


def _keys(stats: ShardStats) -> Iterator[dict[str, Any]]:
    several = len({one.field for one in stats.json_keys}) > 1
    for one in stats.json_keys[:NUM_KEYS]:
        types = ", ".join(one.types) if len(one.types) == 1 else ", ".join(f"{k} {n:,}" for k, n in one.types.items())
        name = one.key or "(whole value)"
        least, most = ("" if value is None else f"{value:,.6g}" for value in (one.min, one.max))
        yield {
            "name": f"{one.field}: {name}" if several else name,
            "share": one.num_samples / stats.num_read,
            "types": types,
            "least": least,
            "most": most,
        }


def _pictures(images: ImageStats) -> dict[str, Any]:
    def ratio(value: float) -> str:
        return f"{value / 1000:.2f}"

    return {
        "stats": images,
        "resolutions": resolutions(images),
        "facts": tuple(_of_images(images)),
        "aspects": _plot(images.aspects, "width / height", ratio),
    }


def _of_images(images: ImageStats) -> Iterator[tuple[str, str]]:
    yield "format", _counted(images.formats, images.num_images)
    yield "mode", _counted(images.modes, images.num_images)
    for name, numbers in (("width", images.widths), ("height", images.heights)):
        yield name, f"{numbers.min:,} to {numbers.max:,}, median {numbers.p50:,}"
    aspects = images.aspects
    yield "width / height", f"{aspects.min / 1000:.2f} to {aspects.max / 1000:.2f}, median {aspects.p50 / 1000:.2f}"
    yield "pixels", f"{_pixels(images.pixels.min)} to {_pixels(images.pixels.max)}, median {_pixels(images.pixels.p50)}"
    if images.num_resolutions is not None:
        yield "resolutions", f"{images.num_resolutions:,} different"
    common = [f"{width:,} x {height:,} ({count:,})" for width, height, count in images.resolutions[:4] if count > 1]
    if common:
        yield "commonest", ", ".join(common)


def _counted(counts: dict[str, int], total: int) -> str:
    return ", ".join(f"{name} {_percent(count / total)}" for name, count in counts.items())


def _pixels(count: float) -> str:
    return f"{count / 1e6:,.2f} MP" if count >= 1e5 else f"{count:,.0f}"


def _footer(stats: ShardStats) -> str:
    from wdskit import __version__

    read = f"From {stats.sample} of the samples of each shard, chosen by seed {stats.seed}. " if stats.sample else ""
    exact = "Counts, sums, least and most are exact; p50 and p99 too"
    if not stats.sample_sizes.is_exact:
        exact += ", but for fields with over 100,000 different sizes, where they are within 0.05 %"
    return f"{read}{exact}. Images are counted by their headers. EXIF orientation is not applied. wdskit {__version__}."
