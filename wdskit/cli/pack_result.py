"""Show the result of `wdskit pack`, as text or as JSON."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wdskit.cli.console import format_bytes, format_count, plural, print_summary

if TYPE_CHECKING:
    from wdskit.dataset.index import ShardEntry
    from wdskit.packing.api import PackResult
    from wdskit.packing.division import PlannedShard
    from wdskit.packing.reshard import ReshardResult

_SHOWN_REJECTS = 5
_PATTERN_SIGNS = re.compile(r"::|[{*?\[]")  # a folder with such a name cannot be part of a pattern
WAS_DONE = "Nothing to do: {} already holds all of it."


def print_result(result: PackResult, *, is_part: bool) -> None:
    """Print a table of what `pack` wrote or would write, then the first rejected rows, and notes.

    Args:
        result: The result.
        is_part: Whether the run packed one part of several. If True, no next command is shown, because one part
            cannot be loaded yet.
    """
    print_summary(_details(result, is_part=is_part), _notes(result))


def _details(result: PackResult, *, is_part: bool) -> Iterator[tuple[str, str]]:
    if result.source:
        yield "source", result.source
    yield "folder", str(result.folder)
    yield from _planned(result) if result.dry_run else _written(result)
    yield from _splits(result)
    listed = "" if result.dry_run else ", listed in {}.jsonl"
    if result.rejected:
        yield "rejected", format_count(len(result.rejected)) + listed.format("rejected")
    if result.num_cleaned:
        yield "cleaned", plural(result.num_cleaned, "key")
    if result.duplicates:
        yield "duplicates", format_count(len(result.duplicates)) + listed.format("duplicates")
    if result.num_other:
        no_images = "file that is not an image" if result.num_other == 1 else "files that are not images"
        yield "not packed", f"{format_count(result.num_other)} {no_images}"
    if not result.dry_run:  # the time of a plan does not show the time of packing
        yield "time", f"{result.seconds:.1f} s" if result.was_done else format_rates(result)
    if result.entries and not (result.dry_run or result.was_done or is_part):
        samples = Counter[str]()  # by pattern: each split has its own
        for entry in result.entries:
            samples[re.sub(r"[0-9]+[.]tar$", "*.tar", entry.name)] += entry.num_samples
        shards = f"{result.folder}/{samples.most_common(1)[0][0]}"
        look = f"look: wdskit view {shlex.quote(str(result.folder))}"
        is_plain = not _PATTERN_SIGNS.search(str(result.folder))
        yield "next", f"{look}; train: Pipeline().exact({json.dumps(shards)})" if is_plain else look


def _notes(result: PackResult) -> Iterator[str]:
    if result.was_done:
        yield WAS_DONE.format(result.folder)
    for err in result.rejected[:_SHOWN_REJECTS]:
        yield f"rejected: {err.where}: {err.problem}"
    if len(result.rejected) > _SHOWN_REJECTS:
        yield f"rejected: {format_count(len(result.rejected) - _SHOWN_REJECTS)} more"
    for note in result.notes:
        yield f"Note: {note}"


def format_rates(result: PackResult | ReshardResult) -> str:
    """Return the time and the rates of a run as text: `12.5 s, 812 samples/s, 95.1 MB/s`."""
    rate = f"{format_count(round(result.num_samples / result.seconds))} samples/s"
    return f"{result.seconds:.1f} s, {rate}, {format_bytes(result.num_bytes / result.seconds)}/s"


def to_json(result: PackResult) -> dict[str, object]:
    """Return the result as the object that `--json` prints."""
    plan = result.plan
    shards: Sequence[ShardEntry | PlannedShard] = plan.shards if plan and result.dry_run else result.entries
    return {
        "source": result.source,
        "folder": str(result.folder),
        "dry_run": result.dry_run,
        "was_done": result.was_done,
        "num_samples": result.num_samples,
        "num_bytes": sum(shard.num_bytes for shard in shards),
        "shards": [
            {
                "name": shard.name,
                "num_samples": shard.num_samples,
                "num_bytes": shard.num_bytes,
                "sha256": getattr(shard, "sha256", None),
            }
            for shard in shards
        ],
        "splits": {split: [shard.name for shard in planned] for split, planned in plan.splits.items()} if plan else {},
        "classes": dict(result.classes),
        "num_rejected": len(result.rejected),
        "num_cleaned": result.num_cleaned,
        "num_duplicates": len(result.duplicates),
        "num_other": result.num_other,
        "notes": list(result.notes),
        "seconds": result.seconds,
    }


def _written(result: PackResult) -> Iterator[tuple[str, str]]:
    """Yield the lines about written shards, as (name, value)."""
    yield "shards", format_names(result.entries)
    yield "samples", format_count(result.num_samples)
    fields = sorted({field for entry in result.entries for field in entry.fields})
    plan, total = result.plan, result.num_samples
    # A field that only some samples have shows the number of these samples: `cls, jpg (5 of 13), json`.
    counts = plan.num_fields if plan and plan.num_samples == total and {*plan.num_fields} == {*fields} else {}
    parts = {field: counts[field] for field in fields if counts.get(field, total) != total}
    texts = {field: f"{field} ({format_count(count)} of {format_count(total)})" for field, count in parts.items()}
    yield "fields", ", ".join(texts.get(field, field) for field in fields)
    if result.classes:
        yield "classes", format_count(len(result.classes))
    yield "bytes", format_bytes(result.num_bytes)


def _planned(result: PackResult) -> Iterator[tuple[str, str]]:
    """Yield the lines about the planned shards of a dry run, as (name, value). Nothing if the result has no plan."""
    plan = result.plan
    if plan is None:
        return
    yield "would write", format_names(plan.shards)
    for name, values, show in (
        ("samples", [shard.num_samples for shard in plan.shards], format_count),
        ("bytes", [shard.num_bytes for shard in plan.shards], format_bytes),
    ):
        if sum(values):
            yield name, f"{show(sum(values))}, {show(min(values))} to {show(max(values))} a shard"
    for number, (field, count) in enumerate(plan.num_fields.items()):
        yield "" if number else "fields", f"{field} in {format_count(count)}"
    yield "keys", f"{plan.first_key} to {plan.last_key}"
    if result.classes:
        yield "classes", format_count(len(result.classes))


def _splits(result: PackResult) -> Iterator[tuple[str, str]]:
    """Yield (name, shards and size as text) for each split that was written or would be written.

    The text of an empty split is "no sample". A split whose shards are all in other parts of the run is left out.
    """
    written = {entry.name: entry for entry in result.entries}
    for split, planned in result.plan.splits.items() if result.plan else ():
        shards = [written.get(shard.name, shard) for shard in planned if not written or shard.name in written]
        if planned and not shards:  # another part has the shards of the split
            continue
        samples = plural(sum(shard.num_samples for shard in shards), "sample")
        num_bytes = sum(shard.num_bytes for shard in shards)
        size = f", {format_bytes(num_bytes)}" if num_bytes else ""
        yield split, f"{format_names(shards)}, {samples}{size}" if shards else "no sample"


def format_names(shards: Sequence[ShardEntry | PlannedShard]) -> str:
    """Return the number of shards and their first and last name: `2 (a-000000.tar to a-000001.tar)`.

    Return `1 (a-000000.tar)` for one shard, and `0` for no shard.
    """
    if not shards:
        return "0"
    first, last = shards[0].name, shards[-1].name
    return f"{format_count(len(shards))} ({first if first == last else f'{first} to {last}'})"
