"""Run `wdskit pack` and `wdskit reshard`, and show the result as text or as JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from wdskit.cli.console import format_bytes, format_count, plural, print_json, print_summary, show_packing
from wdskit.cli.options import find_function

if TYPE_CHECKING:
    import typer

    from wdskit.dataset.index import ShardEntry
    from wdskit.packing.pack import PackResult
    from wdskit.packing.plan import PlannedShard

_SHOWN_REJECTS = 5


def run_packing(function: Callable[..., PackResult], context: typer.Context) -> None:
    """Call `pack` or `reshard` with the options of the command, and print what was written or would be written.

    The names of the options are those of the keyword arguments, but for `json`, `map_name` and `plugin`.
    """
    options = {name: value for name, value in context.params.items() if value is not None}
    as_json = options.pop("json")
    options["map"] = find_function(options.pop("map_name", None), options.pop("plugin", None))
    start = time.perf_counter()
    with show_packing() as show:
        result = function(**options, progress=show)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({**to_json(result), "seconds": seconds})
    else:
        print_summary(_details(result, seconds, part=options.get("part")), _notes(result))


def _details(result: PackResult, seconds: float, *, part: str | None) -> Iterator[tuple[str, str]]:
    yield "folder", str(result.folder)
    written = _written(result)
    yield "would write" if result.dry_run else "shards", format_names(written)
    yield "samples", format_count(result.num_samples)
    yield "fields", ", ".join(result.fields)
    if result.classes:
        yield "classes", format_count(len(result.classes))
    yield "bytes", format_bytes(result.num_bytes)
    for split, shards in result.splits.items() if len(result.splits) > 1 else ():
        samples = plural(sum(shard.num_samples for shard in shards), "sample")
        yield split, f"{format_names(shards)}, {samples}"
    if result.rejected:
        yield "rejected", format_count(len(result.rejected)) + ("" if result.dry_run else ", listed in rejected.jsonl")
    if result.num_cleaned:
        yield "keys", f"{format_count(result.num_cleaned)} changed by --keys"
    if result.num_other:
        yield "not packed", plural(result.num_other, "other file")
    if not result.dry_run and not result.was_done:
        rate = f"{format_count(round(result.num_samples / seconds))} samples/s"
        yield "time", f"{seconds:.1f} s, {rate}, {format_bytes(result.num_bytes / seconds)}/s"
    if result.entries and part is None and not result.was_done:
        yield "next", f"wdskit view {shlex.quote(str(result.folder))}"


def _written(result: PackResult) -> Sequence[ShardEntry | PlannedShard]:
    return [shard for shards in result.splits.values() for shard in shards] if result.dry_run else result.entries


def _notes(result: PackResult) -> Iterator[str]:
    if result.was_done:
        yield f"Nothing to do: {result.folder} already holds all of it."
    for err in result.rejected[:_SHOWN_REJECTS]:
        yield f"rejected: {err.where}: {err.problem}"
    if len(result.rejected) > _SHOWN_REJECTS:
        yield f"rejected: {format_count(len(result.rejected) - _SHOWN_REJECTS)} more"
    for note in result.notes:
        yield f"Note: {note}"


def format_names(shards: Sequence[ShardEntry | PlannedShard]) -> str:
    """Return the number of shards and their first and last name: `2 (a-000000.tar to a-000001.tar)`.

    Return `1 (a-000000.tar)` for one shard, and `0` for no shard.
    """
    if not shards:
        return "0"
    first, last = shards[0].name, shards[-1].name
    return f"{format_count(len(shards))} ({first if first == last else f'{first} to {last}'})"


def to_json(result: PackResult) -> dict[str, object]:
    """Return the result as the object that `--json` prints, which also has `seconds`."""
    names = ("dry_run", "was_done", "num_samples", "num_bytes", "num_cleaned", "num_other")
    columns = ("name", "num_samples", "num_bytes", "sha256")  # a planned shard has no digest
    return {
        **{name: getattr(result, name) for name in names},
        "folder": str(result.folder),
        "shards": [{name: getattr(shard, name, None) for name in columns} for shard in _written(result)],
        "splits": {split: [shard.name for shard in shards] for split, shards in result.splits.items() if split},
        "classes": dict(result.classes),
        "num_rejected": len(result.rejected),
        "notes": list(result.notes),
    }
