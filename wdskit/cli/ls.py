"""`wdskit ls`: list the shards of a folder, or the samples or members of a shard, one per line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from wdskit.cli.console import escape, format_bytes, format_count, print_json
from wdskit.cli.options import PathArgument
from wdskit.errors import WdskitError

if TYPE_CHECKING:
    from wdskit.shards.listing import MemberRow, SampleRow, ShardRow

Row = tuple[dict[str, object], tuple[str, ...]]
"""One line, as a JSON object and as cells."""

NUM_ALIGNED = 200
"""Number of lines that are aligned together, before they are printed."""


def ls_command(
    path: PathArgument,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after this many lines.")] = None,
    members: Annotated[bool, typer.Option("--members", help="List a shard's raw tar members.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """List the shards of a folder, or the samples of a shard.

    One line per shard: name, samples, size, fields. One line per sample: number, byte offset, key, fields with sizes.
    Sizes are decimal (1 kB = 1000 bytes), offsets exact. Characters that a terminal would act on are shown as escapes.
    PATH may be a URL: s3://bucket/train/.

    In Python: wdskit.ls

    Examples:
        wdskit ls data/train
        wdskit ls data/train/train-000000.tar --limit 5
    """
    from wdskit.shards.listing import find_target, list_members, list_samples, list_valid_shards

    target = find_target(path)
    if target.kind != "shard" and members:
        raise typer.BadParameter(f"{escape(path)} is a {target.kind}, but --members lists one shard.")
    rows: Iterator[Row]
    if target.kind != "shard":
        titles, rows = "shard >samples >size fields", map(_show_shard, list_valid_shards(target, limit=limit))
    elif members:
        titles, rows = ">offset >size member", map(_show_member, islice(list_members(target.urls[0]), limit))
    else:
        titles, rows = ">number >offset key fields", map(_show_sample, islice(list_samples(target.urls[0]), limit))
    if json:
        for document, _ in rows:
            print_json(document)
        return
    for line in _align(titles, (cells for _, cells in rows)):
        print(line)


def _show_shard(row: ShardRow) -> Row:
    cells = row.name, format_count(row.num_samples), format_bytes(row.num_bytes), " ".join(row.fields)
    return {"shard" if name == "name" else name: value for name, value in vars(row).items()}, cells


def _show_sample(row: SampleRow) -> Row:
    fields = ", ".join(f"{name} {format_bytes(size)}" for name, size in row.fields)
    document = {"number": row.number, "offset": row.offset, "key": row.key, "fields": dict(row.fields)}
    return document, (str(row.number), str(row.offset), row.key, fields)


def _show_member(row: MemberRow) -> Row:
    document = {"offset": row.offset, "num_bytes": row.num_bytes, "member": row.name}
    return document, (str(row.offset), format_bytes(row.num_bytes), row.name)


def _align(header: str, rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Yield a line of titles, then each of `rows` as a line, in aligned columns.

    `header` has the titles, with spaces between them; `>` before a title aligns the column right. If `rows` raises a
    WdskitError, all earlier rows are yielded before the error is raised again.
    """
    from rich.cells import cell_len

    titles = header.split()
    batch = [[title.lstrip(">") for title in titles]]
    widths = [0] * len(titles)

    def flush() -> Iterator[str]:
        for row in batch:
            widths[:] = map(max, widths, map(cell_len, row))
        widths[-1] = 0
        for row in batch:
            padded = []
            for title, cell, width in zip(titles, row, widths, strict=True):
                gap = " " * (width - cell_len(cell))
                padded.append(gap + cell if title.startswith(">") else cell + gap)
            yield "  ".join(padded).rstrip()
        batch.clear()

    try:
        for row in rows:
            batch.append(list(map(escape, row)))
            if len(batch) > NUM_ALIGNED:
                yield from flush()
    except WdskitError:
        yield from flush()
        raise
    yield from flush()
