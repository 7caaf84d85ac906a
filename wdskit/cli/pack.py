"""`wdskit pack`: images and tables into shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, make_console

if TYPE_CHECKING:
    from wdskit.packing.api import PackResult, Progress

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SHOWN_REJECTS = 5


def parse_size(text: str) -> int:
    """`200MB`, `1.5 GiB` or a number of bytes, as bytes."""
    number = text.strip().lower()
    digits = number.rstrip("kmgib ")
    unit = number[len(digits) :].strip()
    try:
        num_bytes = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is no size. Write 200MB, 1.5GiB or a number of bytes.") from None
    if not 0 < num_bytes < 1e15:
        raise typer.BadParameter(f"{text!r} is no size for a shard.")
    return int(num_bytes)


def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder of images (sub-folder = class), or a .jsonl or .csv manifest.",
            show_default=False,
        ),
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Folder to write the shards to.", show_default=False)],
    max_samples: Annotated[int, typer.Option(metavar="N", min=1, help="Most samples in a shard.")] = 10_000,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of a shard's file: 200MB, 1GiB, ...")
    ] = "1GB",
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Shuffle all rows with this seed. Default: keep their order."),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Processes that pack.")] = 1,
    pattern: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Names of the shards. Default: DEST's name and -%06d.tar."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out and list them in DEST/rejected.jsonl.")
    ] = False,
    keys: Annotated[
        str, typer.Option(metavar="given|hashed", help="Keys: the images' paths, or a hash of them.")
    ] = "given",
    append: Annotated[bool, typer.Option("--append", help="Add to a folder that is indexed already.")] = False,
    image_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Manifest column with the image's path. Default: image, file_name or path."),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Manifest column with the key. Default: key, else the image's path."),
    ] = None,
) -> None:
    """Pack images and tables into shards.

    Writes shards (POSIX tar), an .idx beside each, classes.json, and last index.json and index.bin. The same input
    gives the same bytes. A file has its name only once it is whole and on disk; after a kill, the same command goes on.

    In Python: wdskit.pack
    """
    from wdskit.packing.api import pack

    size = parse_size(max_bytes)
    with _show_progress() as show:
        result = pack(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=size,
            shuffle=shuffle,
            workers=workers,
            pattern=pattern,
            skip_bad=skip_bad,
            keys=keys,
            append=append,
            image_column=image_column,
            key_column=key_column,
            progress=show,
        )
    _print_summary(result)


@contextlib.contextmanager
def _show_progress() -> Iterator[Progress]:
    """A bar with samples/s, MB/s and the time left on stderr while the block runs, where that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = make_console(stderr=True)
    columns = (
        TextColumn("packing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing", total=None, rates="")

        def show(num_samples: int, num_bytes: int, total_samples: int | None, _total_bytes: int | None) -> None:
            seconds = bar.tasks[0].elapsed or 0
            if seconds:
                rates = f"{format_count(round(num_samples / seconds))} samples/s {format_bytes(num_bytes / seconds)}/s"
                bar.update(task, completed=num_samples, total=total_samples, rates=rates)

        yield show if console.is_terminal else _say_nothing


def _say_nothing(*_: int | None) -> None:
    """Progress where nobody looks."""


def _print_summary(result: PackResult) -> None:
    """The table that says what was written."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    first, last = result.entries[0].name, result.entries[-1].name
    names = first if first == last else f"{first} to {last}"
    table.add_row("folder", escape(str(result.folder)))
    table.add_row("shards", f"{format_count(len(result.entries))} ({escape(names)})")
    table.add_row("samples", format_count(result.num_samples))
    table.add_row("fields", escape(", ".join(sorted({field for entry in result.entries for field in entry.fields}))))
    if result.classes:
        table.add_row("classes", format_count(len(result.classes)))
    table.add_row("bytes", format_bytes(result.num_bytes))
    if result.rejected:
        table.add_row("rejected", f"{format_count(len(result.rejected))}, listed in rejected.jsonl")
    if result.num_other:
        no_images = "file that is no image" if result.num_other == 1 else "files that are no images"
        table.add_row("not packed", f"{format_count(result.num_other)} {no_images}")
    rate = f"{format_count(round(result.num_samples / result.seconds))} samples/s"
    table.add_row("time", f"{result.seconds:.1f} s, {rate}, {format_bytes(result.num_bytes / result.seconds)}/s")
    make_console().print(table)
    for err in result.rejected[:_SHOWN_REJECTS]:
        print(f"rejected: {escape(err.where)}: {escape(err.problem)}")
