"""`wdskit ls`: the shards of a folder, the samples or members of a shard, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import typer

from wdskit.cli.console import escape, format_bytes, format_count, print_json
from wdskit.errors import WdskitError

if TYPE_CHECKING:
    from wdskit.shards.inspect import MemberRow, SampleRow, ShardRow

Row = TypeVar("Row")

NUM_ALIGNED = 200
"""Lines that are held back to make their columns equally wide."""


@dataclass(frozen=True)
class _View(Generic[Row]):
    """How one kind of row is shown: columns whose titles start with `>` are flushed right."""

    titles: tuple[str, ...]
    cells: Callable[[Row], tuple[str, ...]]
    document: Callable[[Row], dict[str, object]]


_SHARDS: _View[ShardRow] = _View(
    ("shard", ">samples", ">size", "fields"),
    lambda row: (
        escape(row.name),
        format_count(row.num_samples),
        format_bytes(row.num_bytes),
        escape(" ".join(row.fields)),
    ),
    lambda row: {
        "shard": row.name,
        "num_samples": row.num_samples,
        "num_bytes": row.num_bytes,
        "fields": list(row.fields),
    },
)
_SAMPLES: _View[SampleRow] = _View(
    (">number", ">offset", "key", "fields"),
    lambda row: (
        str(row.number),
        str(row.offset),
        escape(row.key),
        ", ".join(f"{escape(name)} {format_bytes(size)}" for name, size in row.fields),
    ),
    lambda row: {"number": row.number, "offset": row.offset, "key": row.key, "fields": dict(row.fields)},
)
_MEMBERS: _View[MemberRow] = _View(
    (">offset", ">size", "member"),
    lambda row: (str(row.offset), format_bytes(row.num_bytes), escape(row.name)),
    lambda row: {"offset": row.offset, "num_bytes": row.num_bytes, "member": row.name},
)


def ls_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A shard, a folder, or a pattern.", show_default=False)],
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after so many lines.", show_default=False)
    ] = None,
    members: Annotated[bool, typer.Option("--members", help="List a shard's raw tar members.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """List the shards of a folder, or the samples of a shard.

    A line a shard: name, samples, size, fields. A line a sample: number, byte offset, key, fields with their sizes.
    Sizes are decimal (1 kB = 1000 bytes), offsets exact. Characters that a terminal would act on are shown as escapes.
    PATH may be an http(s) URL.

    In Python: wdskit.ls
    """
    from wdskit.dataset.patterns import find_shards
    from wdskit.shards.inspect import list_members, list_right_shards, list_samples

    target = find_shards(path)
    if target.kind != "shard" and members:
        msg = f"{escape(path)} is a {target.kind}, but --members lists one shard."
        raise typer.BadParameter(msg)
    if target.kind != "shard":
        _show(_SHARDS, list_right_shards(target, limit=limit), json=json)
    elif members:
        _show(_MEMBERS, islice(list_members(target.urls[0]), limit), json=json)
    else:
        _show(_SAMPLES, islice(list_samples(target.urls[0]), limit), json=json)


def _show(view: _View[Row], rows: Iterator[Row], *, json: bool) -> None:
    """Print rows as they come."""
    if json:
        for row in rows:
            print_json(view.document(row))
    else:
        for line in _align(view.titles, map(view.cells, rows)):
            print(line)


def _align(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """The rows as lines under a line of titles; rows that came before an error are shown before it."""
    from rich.cells import cell_len

    to_right = [title.startswith(">") for title in titles]
    batch = [tuple(title.lstrip(">") for title in titles)]
    widths = [0] * len(titles)

    def flush() -> Iterator[str]:
        for row in batch:
            widths[:] = map(max, widths, map(cell_len, row))
        widths[-1] = 0
        for row in batch:
            gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
            cells = zip(row, gaps, to_right, strict=True)
            yield "  ".join(gap + cell if right else cell + gap for cell, gap, right in cells).rstrip()
        batch.clear()

    try:
        for row in rows:
            batch.append(row)
            if len(batch) > NUM_ALIGNED:
                yield from flush()
    except WdskitError:
        yield from flush()
        raise
    yield from flush()
