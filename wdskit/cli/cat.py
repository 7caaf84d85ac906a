"""`wdskit cat`: one field of one sample."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Annotated

import typer

_TO_FILE = "Send it to a file: wdskit cat ... > file"


def cat_command(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="A shard: a path, or a URL.")],
    name: Annotated[
        str, typer.Argument(metavar="KEY.FIELD", help="As in `wdskit info SHARD`: photos/cat/000003.json.")
    ],
) -> None:
    """Write one field of one sample to stdout, byte for byte.

    On a terminal, UTF-8 text up to 1 MiB is shown, with its control characters as escapes, and any other field is an
    error. Redirect other fields to a file.

    In Python: wdskit.cat

    Examples:
        wdskit cat data/train/train-000000.tar cat/000003.json
        wdskit cat data/train/train-000000.tar cat/000003.jpg > cat.jpg
    """
    from wdskit.cli.console import escape_lines, plural
    from wdskit.errors import DecodeError
    from wdskit.shards.info import cat_pieces

    pieces = cat_pieces(shard, name)
    if not sys.stdout.isatty():
        sys.stdout.buffer.writelines(pieces)
        return
    data, *more = [*islice(pieces, 2)] or [b""]
    if more:
        raise DecodeError(f"{name!r} has more than 1 MiB, too much for a terminal. {_TO_FILE}", field=name)
    try:
        print(escape_lines(data.decode()))
    except UnicodeDecodeError as err:
        raise DecodeError(f"{name!r} is not text but {plural(len(data), 'byte')}. {_TO_FILE}", field=name) from err
