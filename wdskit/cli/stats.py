"""`wdskit stats`: count what a data set holds."""

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

            result = write_report(path, html, sample=sample, seed=seed, workers=workers, progress=show)
        else:
            from wdskit.shards.stats import stats

            result = stats(path, sample=sample, seed=seed, workers=workers, progress=show)
    if json:
        print_json(result)
        return
    print_tables(_tables(result))
    for line in _notes(result):
        print(escape(line))
    if html:
        print(f"Report: {escape(str(html))}, {format_bytes(html.stat().st_size)}.")


def _tables(result: ShardStats) -> Iterator[Table]:
    yield details_table(_details(result), result.path)
    if result.fields:
        yield numbers_table(["field", "samples", "size", "min", "mean", "p50", "p99", "max"], _fields(result))
    if result.classes:
        yield numbers_table(["class", "number", "samples", "share"], _classes(result.classes))
    for images in result.images:
        yield details_table(_image_details(images), f"images, field {images.field}")
    if result.json_keys:
        yield numbers_table(["JSON key", "samples", "types", "least", "most"], _keys(result))


def _details(result: ShardStats) -> Iterator[tuple[str, str]]:
    yield "samples", format_count(result.num_samples)
    if result.sample:
        yield "read", f"{format_count(result.num_read)} of them; all numbers below are for these"
    yield "size", f"{format_bytes(result.num_bytes)} in {plural(result.num_shards, 'shard')}"
    if result.num_shards > 1:
        least, most = result.shard_samples.min, result.shard_samples.max
        between = f", {result.shard_least} and {result.shard_most}" if least < most else ""
        yield "samples a shard", _range(result.shard_samples, format_count) + between
        yield "bytes a shard", _range(result.shard_bytes, format_bytes)
    yield "bytes a sample", _range(result.sample_sizes, format_bytes)
    if result.num_bad:
        yield "bad fields", format_count(result.num_bad)


def _range(numbers: NumberStats, show: Callable[[float], str]) -> str:
    if numbers.min == numbers.max:
        return f"{show(numbers.max)} each"
    return f"{show(numbers.min)} to {show(numbers.max)}, median {show(numbers.p50)}"


def _fields(result: ShardStats) -> Iterator[Sequence[str]]:
    for field in result.fields:
        sizes = field.sizes
        numbers = (sizes.total, sizes.min, sizes.mean, sizes.p50, sizes.p99, sizes.max)
        yield field.name, _part(field.num_samples, result.num_read), *map(format_bytes, numbers)


def _part(count: int, total: int) -> str:
    return format_count(count) if count == total else f"{format_count(count)} ({count / total:.1%})"


def _classes(classes: Sequence[ClassStats]) -> Iterator[Sequence[str]]:
    """Yield one table row per class: name, number, samples, share of the samples.

    In a long table, one row with the number of left-out classes replaces the classes in the middle.
    """
    from wdskit.shards.stats import choose_classes

    shown = choose_classes(classes, NUM_CLASSES_SHOWN)
    total = sum(each.num_samples for each in classes)
    for place, each in enumerate(shown):
        if len(shown) < len(classes) and place == len(shown) // 2:
            yield (f"... {format_count(len(classes) - len(shown))} between",)
        name = "-" if each.name is None else each.name
        yield name, str(each.number), format_count(each.num_samples), f"{each.num_samples / total:.2%}"


def _image_details(images: ImageStats) -> Iterator[tuple[str, str]]:
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


def _keys(result: ShardStats) -> Iterator[Sequence[str]]:
    several = len({key.field for key in result.json_keys}) > 1
    for key in result.json_keys[:NUM_KEYS_SHOWN]:
        name = f"{key.field}: {key.key}" if several else key.key or "(whole value)"
        types = ", ".join(key.types)
        if len(key.types) > 1:
            types = ", ".join(f"{kind} {count:,}" for kind, count in key.types.items())
        limits = ("" if value is None else f"{value:,.6g}" for value in (key.min, key.max))
        yield name, _part(key.num_samples, result.num_read), types, *limits
    if len(result.json_keys) > NUM_KEYS_SHOWN:
        yield (f"... {plural(len(result.json_keys) - NUM_KEYS_SHOWN, 'more key')}; --json lists them",)


def _notes(result: ShardStats) -> Iterator[str]:
    for bad in result.bad:
        yield f"Bad: {bad.shard}, {bad.key}.{bad.field}: {bad.problem}."
    if result.num_bad > len(result.bad):
        yield f"Bad: {format_count(result.num_bad - len(result.bad))} more."
    named = [each for each in result.classes or () if each.name is not None]
    empty = [str(each.name) for each in named if not each.num_samples]
    if empty and len(empty) < len(named) and not result.sample:
        yield f"Note: {plural(len(empty), 'class')} of classes.json without samples, first {empty[0]}."
    if result.num_more_fields or result.num_more_keys:
        yield "Note: over 1,000 different fields or JSON keys; the rest are counted together."
    if result.num_ignored:
        yield ignored_note(result.num_ignored)
