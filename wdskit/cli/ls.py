"""`wdskit ls`: the shards of a folder, the samples or members of a shard, one a line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, print_json
from wdskit.cli.options import PathArgument
from wdskit.errors import WdskitError

if TYPE_CHECKING:
    from wdskit.shards.inspect import MemberRow, SampleRow, ShardRow

NUM_ALIGNED = 200
"""Lines that are held back to make their columns equally wide."""


def _shard_cells(row: ShardRow) -> tuple[str, ...]:
    return escape(row.name), format_count(row.num_samples), format_bytes(row.num_bytes), escape(" ".join(row.fields))


def _shard_document(row: ShardRow) -> dict[str, object]:
    known = dataclasses.asdict(row)
    return {"shard": known.pop("name"), **known}


def _sample_cells(row: SampleRow) -> tuple[str, ...]:
    fields = ", ".join(f"{escape(name)} {format_bytes(size)}" for name, size in row.fields)
    return str(row.number), str(row.offset), escape(row.key), fields


def _sample_document(row: SampleRow) -> dict[str, object]:
    return {"number": row.number, "offset": row.offset, "key": row.key, "fields": dict(row.fields)}


def _member_cells(row: MemberRow) -> tuple[str, ...]:
    return str(row.offset), format_bytes(row.num_bytes), escape(row.name)


def _member_document(row: MemberRow) -> dict[str, object]:
    return {"offset": row.offset, "num_bytes": row.num_bytes, "member": row.name}


def ls_command(
    path: PathArgument,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after so many lines.")] = None,
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
    lines: Iterator[object]
    if target.kind != "shard":
        shards = list_right_shards(target, limit=limit)
        lines = (
            map(_shard_document, shards) if json else _align("shard >samples >size fields", map(_shard_cells, shards))
        )
    elif members:
        rows = islice(list_members(target.urls[0]), limit)
        lines = map(_member_document, rows) if json else _align(">offset >size member", map(_member_cells, rows))
    else:
        samples = islice(list_samples(target.urls[0]), limit)
        titles = ">number >offset key fields"
        lines = map(_sample_document, samples) if json else _align(titles, map(_sample_cells, samples))
    for line in lines:
        if json:
            print_json(line)
        else:
            print(line)


def _align(header: str, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """The rows as lines under a line of titles, those flushed right that start with `>`; rows that came before an error
    are shown before it.
    """
    from rich.cells import cell_len

    titles = header.split()
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
