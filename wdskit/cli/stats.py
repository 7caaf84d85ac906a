"""`wdskit stats`: what a data set holds, counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import (
    details_table,
    escape,
    format_bytes,
    format_count,
    ignored_note,
    numbers_table,
    plural,
    print_json,
    print_tables,
    show_bytes,
)
from wdskit.cli.options import JsonOption, PathArgument, ReadersOption

if TYPE_CHECKING:
    from rich.table import Table

    from wdskit.shards.stats import ClassStats, ShardStats
    from wdskit.shards.tally import ImageStats, NumberStats

NUM_CLASSES_SHOWN = 12
NUM_KEYS_SHOWN = 40


def stats_command(
    path: PathArgument,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Read this share of the samples only: 10%.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed that chooses the share and the thumbnails.")] = 0,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a report with plots and thumbnails.")
    ] = None,
    workers: ReadersOption = None,
    json: JsonOption = False,
) -> None:
    """Count what shards hold: classes, sizes, resolutions, JSON keys.

    Reads tar headers, labels, JSON and the headers of images. A damaged shard is an error; images, labels and JSON that
    cannot be read are counted, and the first are listed.

    PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.stats, and wdskit.write_report for --html

    Examples:
        wdskit stats data/train
        wdskit stats data/train --sample 10% --html report.html
    """
    with show_bytes("counting") as show:
        if html:
            from wdskit.view.report import write_report

            found = write_report(path, html, sample=sample, seed=seed, workers=workers, progress=show)
        else:
            from wdskit.shards.stats import stats

            found = stats(path, sample=sample, seed=seed, workers=workers, progress=show)
    if json:
        print_json(found)
        return
    print_tables(_tables(found))
    for line in _notes(found):
        print(escape(line))
    if html:
        print(f"Report: {escape(str(html))}, {format_bytes(html.stat().st_size)}.")


def _tables(found: ShardStats) -> Iterator[Table]:
    yield details_table(_details(found), found.path)
    if found.fields:
        yield numbers_table(["field", "samples", "size", "min", "mean", "p50", "p99", "max"], _fields(found))
    if found.classes:
        yield numbers_table(["class", "number", "samples", "share"], _classes(found.classes))
    for images in found.images:
        yield details_table(_of_images(images), f"images, field {images.field}")
    if found.json_keys:
        yield numbers_table(["JSON key", "samples", "types", "least", "most"], _keys(found))


def _details(found: ShardStats) -> Iterator[tuple[str, str]]:
    yield "samples", format_count(found.num_samples)
    if found.sample:
        yield "read", f"{format_count(found.num_read)} of them; all numbers below are for these"
    yield "size", f"{format_bytes(found.num_bytes)} in {plural(found.num_shards, 'shard')}"
    if found.num_shards > 1:
        least, most = found.shard_samples.min, found.shard_samples.max
        between = f", {found.shard_least} and {found.shard_most}" if least < most else ""
        yield "samples a shard", _range(found.shard_samples, format_count) + between
        yield "bytes a shard", _range(found.shard_bytes, format_bytes)
    yield "bytes a sample", _range(found.sample_sizes, format_bytes)
    if found.num_bad:
        yield "bad fields", format_count(found.num_bad)


def _range(numbers: NumberStats, show: Callable[[float], str]) -> str:
    if numbers.min == numbers.max:
        return f"{show(numbers.max)} each"
    return f"{show(numbers.min)} to {show(numbers.max)}, median {show(numbers.p50)}"


def _fields(found: ShardStats) -> Iterator[Sequence[str]]:
    for field in found.fields:
        sizes = field.sizes
        numbers = (sizes.total, sizes.min, sizes.mean, sizes.p50, sizes.p99, sizes.max)
        yield field.name, _part(field.num_samples, found.num_read), *map(format_bytes, numbers)


def _part(count: int, of: int) -> str:
    return format_count(count) if count == of else f"{format_count(count)} ({count / of:.1%})"


def _classes(classes: Sequence[ClassStats]) -> Iterator[Sequence[str]]:
    """Yield all classes in their order, or of many the most common and the rarest."""
    from wdskit.shards.stats import choose_classes

    shown = choose_classes(classes, NUM_CLASSES_SHOWN)
    total = sum(one.num_samples for one in classes)
    for place, one in enumerate(shown):
        if len(shown) < len(classes) and place == len(shown) // 2:
            yield (f"... {format_count(len(classes) - len(shown))} between",)
        name = "-" if one.name is None else one.name
        yield name, str(one.number), format_count(one.num_samples), f"{one.num_samples / total:.2%}"


def _of_images(images: ImageStats) -> Iterator[tuple[str, str]]:
    yield "images", format_count(images.num_images)
    yield "formats", _counted(images.formats, images.num_images)
    yield "modes", _counted(images.modes, images.num_images)
    yield "width", _range(images.widths, format_count)
    yield "height", _range(images.heights, format_count)
    yield "width / height", _range(images.aspects, lambda value: f"{value / 1000:.2f}")
    if images.num_resolutions is None:
        yield "resolutions", "over 100,000 different sizes"
        return
    few = [f"{width}x{height} ({count:,})" for width, height, count in images.resolutions[:5] if count > 1]
    common = f", most common: {', '.join(few)}" if few else ""
    yield "resolutions", f"{format_count(images.num_resolutions)} different{common}"


def _counted(counts: dict[str, int], total: int) -> str:
    if len(counts) == 1:
        return f"{next(iter(counts))} all"
    return ", ".join(f"{name} {count:,} ({count / total:.1%})" for name, count in counts.items())


def _keys(found: ShardStats) -> Iterator[Sequence[str]]:
    several = len({one.field for one in found.json_keys}) > 1
    for one in found.json_keys[:NUM_KEYS_SHOWN]:
        name = f"{one.field}: {one.key}" if several else one.key or "(whole value)"
        types = ", ".join(one.types)
        if len(one.types) > 1:
            types = ", ".join(f"{kind} {count:,}" for kind, count in one.types.items())
        limits = ("" if value is None else f"{value:,.6g}" for value in (one.min, one.max))
        yield name, _part(one.num_samples, found.num_read), types, *limits
    if len(found.json_keys) > NUM_KEYS_SHOWN:
        yield (f"... {plural(len(found.json_keys) - NUM_KEYS_SHOWN, 'more key')}; --json lists them",)


def _notes(found: ShardStats) -> Iterator[str]:
    for bad in found.bad:
        yield f"Bad: {bad.shard}, {bad.key}.{bad.field}: {bad.problem}."
    if found.num_bad > len(found.bad):
        yield f"Bad: {format_count(found.num_bad - len(found.bad))} more."
    named = [one for one in found.classes or () if one.name is not None]
    empty = [str(one.name) for one in named if not one.num_samples]
    if empty and len(empty) < len(named) and not found.sample:
        yield f"Note: {plural(len(empty), 'class')} of classes.json without samples, first {empty[0]}."
    if found.num_more_fields or found.num_more_keys:
        yield "Note: over 1,000 different fields or JSON keys; the rest are counted together."
    if found.num_ignored:
        yield ignored_note(found.num_ignored)
