"""What `wdskit pack` says when it is through."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wdskit.cli.console import escape, format_bytes, format_count, make_console, plural

if TYPE_CHECKING:
    from wdskit.dataset.index import ShardEntry
    from wdskit.packing.api import PackResult
    from wdskit.packing.plan import PlannedShard

_SHOWN_REJECTS = 5
WAS_DONE = "Nothing to do: {} holds all of it already."


def print_summary(result: PackResult) -> None:
    """The table that says what was written, or what would be."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    if result.source:
        table.add_row("source", escape(result.source))
    table.add_row("folder", escape(str(result.folder)))
    facts = _facts_of_plan(result) if result.dry_run else _facts_of(result)
    for name, value in itertools.chain(facts, _facts_of_splits(result)):
        table.add_row(name, escape(value))
    if result.rejected:
        listed = "" if result.dry_run else ", listed in rejected.jsonl"
        table.add_row("rejected", f"{format_count(len(result.rejected))}{listed}")
    if result.num_cleaned:
        table.add_row("cleaned", plural(result.num_cleaned, "key"))
    if result.duplicates:
        listed = "" if result.dry_run else ", listed in duplicates.jsonl"
        table.add_row("duplicates", f"{format_count(len(result.duplicates))}{listed}")
    if result.num_other:
        no_images = "file that is no image" if result.num_other == 1 else "files that are no images"
        table.add_row("not packed", f"{format_count(result.num_other)} {no_images}")
    if not result.dry_run:  # how long a plan took says nothing of the packing
        table.add_row("time", _time_of(result))
    console = make_console()
    with console.capture() as text:
        console.print(table)
    with contextlib.suppress(BrokenPipeError):  # nobody reads (`| head`), and the shards are packed nevertheless
        print(text.get(), end="")
        if result.was_done:
            print(WAS_DONE.format(escape(str(result.folder))))
        for err in result.rejected[:_SHOWN_REJECTS]:
            print(f"rejected: {escape(err.where)}: {escape(err.problem)}")
        if len(result.rejected) > _SHOWN_REJECTS:
            print(f"rejected: {format_count(len(result.rejected) - _SHOWN_REJECTS)} more")


def to_json(result: PackResult) -> dict[str, object]:
    """The same for scripts: `--json`."""
    shards: Sequence[ShardEntry | PlannedShard] = result.entries
    if result.dry_run and result.plan is not None:
        shards = result.plan.shards
    return {
        "source": result.source,
        "folder": str(result.folder),
        "dry_run": result.dry_run,
        "was_done": result.was_done,
        "num_samples": result.num_samples,
        "num_bytes": sum(shard.num_bytes for shard in shards),
        "shards": [_shard_to_json(shard) for shard in shards],
        "splits": _splits_to_json(result),
        "classes": dict(result.classes),
        "num_rejected": len(result.rejected),
        "num_cleaned": result.num_cleaned,
        "num_duplicates": len(result.duplicates),
        "num_other": result.num_other,
        "seconds": result.seconds,
    }


def _shard_to_json(shard: ShardEntry | PlannedShard) -> dict[str, object]:
    known = {"name": shard.name, "num_samples": shard.num_samples, "num_bytes": shard.num_bytes}
    return {**known, "sha256": getattr(shard, "sha256", None)}


def _splits_to_json(result: PackResult) -> dict[str, list[str]]:
    """The shards of each split."""
    plan = result.plan
    return {split: [shard.name for shard in shards] for split, shards in plan.splits.items()} if plan else {}


def _facts_of(result: PackResult) -> Iterator[tuple[str, str]]:
    """What was written."""
    yield "shards", _names(result.entries)
    yield "samples", format_count(result.num_samples)
    yield "fields", ", ".join(_fields_of(result))
    if result.classes:
        yield "classes", format_count(len(result.classes))
    yield "bytes", format_bytes(result.num_bytes)


def _fields_of(result: PackResult) -> Iterator[str]:
    """`cls, jpg (5 of 13), json`: how many samples have a field, where that is known and not all of them."""
    fields = sorted({field for entry in result.entries for field in entry.fields})
    plan, total = result.plan, result.num_samples
    counts = plan.num_fields if plan and plan.num_samples == total and {*plan.num_fields} == {*fields} else {}
    for field in fields:
        count = counts.get(field, total)
        yield field if count == total else f"{field} ({format_count(count)} of {format_count(total)})"


def _facts_of_plan(result: PackResult) -> Iterator[tuple[str, str]]:
    """What would be written."""
    plan = result.plan
    if plan is None:
        return
    yield "would write", _names(plan.shards)
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


def _facts_of_splits(result: PackResult) -> Iterator[tuple[str, str]]:
    """A line for each split, of what was written or would be."""
    written = {entry.name: entry for entry in result.entries}
    for split, planned in result.plan.splits.items() if result.plan else ():
        shards = [written.get(shard.name, shard) for shard in planned if not written or shard.name in written]
        if planned and not shards:  # in another part
            continue
        samples = plural(sum(shard.num_samples for shard in shards), "sample")
        num_bytes = sum(shard.num_bytes for shard in shards)
        size = f", {format_bytes(num_bytes)}" if num_bytes else ""
        yield split, f"{_names(shards)}, {samples}{size}" if shards else "no sample"


def _names(shards: Sequence[ShardEntry | PlannedShard]) -> str:
    """`2 (a-000000.tar to a-000001.tar)`; of a part that has none `0`."""
    if not shards:
        return "0"
    first, last = shards[0].name, shards[-1].name
    return f"{format_count(len(shards))} ({first if first == last else f'{first} to {last}'})"


def _time_of(result: PackResult) -> str:
    if result.was_done:
        return f"{result.seconds:.1f} s"
    rate = f"{result.seconds:.1f} s, {format_count(round(result.num_samples / result.seconds))} samples/s"
    return f"{rate}, {format_bytes(result.num_bytes / result.seconds)}/s"
