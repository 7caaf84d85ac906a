"""Show the result of `wdskit pack` and `wdskit reshard`, as text or as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wdskit.cli.console import format_bytes, format_count, plural, print_summary

if TYPE_CHECKING:
    from wdskit.dataset.index import ShardEntry
    from wdskit.packing.pack import PackResult
    from wdskit.packing.plan import PlannedShard

_SHOWN_REJECTS = 5
_PATTERN_SIGNS = re.compile(r"::|[{*?\[]")  # a folder with such a name cannot be part of a pattern


def print_result(result: PackResult, *, part: str | None) -> None:
    """Print a table of what was written or would be written, then the first rejected rows, and notes.

    `part` is the option `--part`: a part of a run is not a data set yet, and the next command completes it.
    """
    print_summary(_details(result, part=part), _notes(result, part=part))


def _details(result: PackResult, *, part: str | None) -> Iterator[tuple[str, str]]:
    if result.source:
        yield "source", result.source
    yield "folder", str(result.folder)
    written = _written(result)
    yield "would write" if result.dry_run else "shards", format_names(written)
    yield "samples", format_count(result.num_samples)
    yield "fields", ", ".join(result.fields)
    if result.classes:
        yield "classes", format_count(len(result.classes))
    is_known = result.num_bytes > 0 or not result.dry_run
    yield "bytes", format_bytes(result.num_bytes) if is_known else "not known before samples are changed"
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
        rate = f"{format_count(round(result.num_samples / result.seconds))} samples/s"
        yield "time", f"{result.seconds:.1f} s, {rate}, {format_bytes(result.num_bytes / result.seconds)}/s"
    if result.entries and part is None and not result.was_done:
        first = f"{result.folder}/{re.sub(r'[0-9]+[.]tar$', '*.tar', result.entries[0].name)}"
        look = f"look: wdskit view {shlex.quote(str(result.folder))}"
        is_plain = not _PATTERN_SIGNS.search(str(result.folder))
        yield "next", f"{look}; train: Pipeline().exact({json.dumps(first)})" if is_plain else look


def _written(result: PackResult) -> Sequence[ShardEntry | PlannedShard]:
    return [shard for shards in result.splits.values() for shard in shards] if result.dry_run else result.entries


def _notes(result: PackResult, *, part: str | None) -> Iterator[str]:
    if result.was_done:
        yield f"Nothing to do: {result.folder} already holds all of it."
    for err in result.rejected[:_SHOWN_REJECTS]:
        yield f"rejected: {err.where}: {err.problem}"
    if len(result.rejected) > _SHOWN_REJECTS:
        yield f"rejected: {format_count(len(result.rejected) - _SHOWN_REJECTS)} more"
    for note in result.notes:
        yield f"Note: {note}"
    if part is not None and not result.was_done:
        yield f"This is part {part}. When all parts are done, the same command without --part completes the folder."
    if result.dry_run:
        yield "Nothing was written (--dry-run)."


def format_names(shards: Sequence[ShardEntry | PlannedShard]) -> str:
    """Return the number of shards and their first and last name: `2 (a-000000.tar to a-000001.tar)`.

    Return `1 (a-000000.tar)` for one shard, and `0` for no shard.
    """
    if not shards:
        return "0"
    first, last = shards[0].name, shards[-1].name
    return f"{format_count(len(shards))} ({first if first == last else f'{first} to {last}'})"


def to_json(result: PackResult) -> dict[str, object]:
    """Return the result as the object that `--json` prints."""
    names = ("source", "dry_run", "was_done", "num_samples", "num_bytes", "num_cleaned", "num_other", "seconds")
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
