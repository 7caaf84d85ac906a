"""`wdskit diff`: do two sets of shards hold the same samples?"""

from __future__ import annotations

from typing import Annotated

import typer

from wdskit.cli.console import escape, exit_2_on_error, format_count, plural, print_json, show_bytes
from wdskit.cli.options import JsonOption


def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A shard, a folder, or a pattern.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Number of lines to print of each kind.")] = 100,
    json: JsonOption = False,
) -> None:
    """Compare the samples of A and B by key, in any order and any shards.

    One line per key: only in A, only in B, or the fields that differ (`json` in its bytes, `-txt` only A has, `+cls`
    only B has). If several shards of A have the same key, only the key's first sample is compared; likewise in B.

    Exit code: 0 the same samples, 1 differences or a key in several shards of A or of B, 2 it could not run.

    In Python: wdskit.diff

    Examples:
        wdskit diff data/train data/copy
    """
    from wdskit.shards.diff import diff

    with exit_2_on_error(), show_bytes("comparing") as show:
        result = diff(a, b, limit=limit, progress=show)
    if json:
        print_json({**vars(result), "is_same": result.is_same})
        raise typer.Exit(0 if result.is_same else 1)
    for pair in result.differences:
        key = escape(pair.key)
        if pair.in_b is None:
            print(f"only in A: {key} ({escape(pair.in_a or '')})")
        elif pair.in_a is None:
            print(f"only in B: {key} ({escape(pair.in_b)})")
        else:
            print(f"differs: {key}: {escape(', '.join(pair.fields))} ({escape(pair.in_a)}, {escape(pair.in_b)})")
    for side, num in zip("AB", result.num_repeated, strict=True):
        if num:
            print(f"{plural(num, 'sample')} of {side} with a repeated key: not compared.")
    print(
        f"A has {plural(result.num_samples[0], 'sample')}, B {format_count(result.num_samples[1])}: "
        f"{format_count(result.num_equal)} equal, {format_count(result.num_only_a)} only in A, "
        f"{format_count(result.num_only_b)} only in B, {format_count(result.num_differ)} differ."
    )
    raise typer.Exit(0 if result.is_same else 1)
