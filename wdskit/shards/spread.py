"""What only shows over all shards: samples with other fields than the rest, and shards that do not feed all alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wdskit.errors import ConfigError
from wdskit.shards.findings import MAX_LISTED, Finding, shorten
from wdskit.shards.reports import Fields, ShardReport


def find_odd(folder: str, reports: Sequence[ShardReport]) -> tuple[Finding, ...]:
    """One finding for each set of fields but the commonest, the rarest last.

    Args:
        folder: What the last finding names, where there are more than are listed.
        reports: The shards.
    """
    counts: Counter[Fields] = Counter()
    places: dict[Fields, tuple[ShardReport, str]] = {}
    for report in reports:
        for names, one in report.field_sets.items():
            counts[names] += one.count
            places.setdefault(names, (report, one.keys[0]))
    ranked = counts.most_common()
    found = []
    for names, count in ranked[1 : MAX_LISTED + 1]:
        report, key = places[names]
        samples = f"{count:,} sample{'s' if count > 1 else ''}"
        problem = f"{_difference(names, ranked[0][0])} ({samples}; this is the first)"
        found.append(Finding("odd", report.path, problem, key=key))
    if len(ranked) > MAX_LISTED + 1:
        num = len(ranked) - MAX_LISTED - 1
        found.append(Finding("odd", folder, f"samples have {num:,} more sets of fields, each another"))
    return tuple(found)


def _difference(names: Fields, common: Fields) -> str:
    """What a set of fields lacks and has beside the commonest."""
    lacking = ", ".join(name for name in common if name not in names)
    extra = ", ".join(name for name in names if name not in common)
    parts = [f"it has no {lacking}" if lacking else "", f"it has {extra} besides" if extra else ""]
    return shorten(", ".join(part for part in parts if part)) + f", most have {shorten(', '.join(common))}"


def find_skew(folder: str, reports: Sequence[ShardReport], world_size: int, loader_workers: int) -> tuple[Finding, ...]:
    """Whether ranks x workers that take whole shards in turn get alike many samples.

    Args:
        folder: What the finding names.
        reports: The shards in order.
        world_size: Ranks, 1 or more.
        loader_workers: Workers of each rank, 1 or more.

    Raises:
        ConfigError: One is less.
    """
    if world_size < 1 or loader_workers < 1:
        raise ConfigError(f"there are 1 rank and 1 worker at least, not {world_size} x {loader_workers}.")
    num = world_size * loader_workers
    counts = [one.num_samples for one in reports]
    shards = f"{len(counts):,} shard{'' if len(counts) == 1 else 's'}"
    who = f"{world_size} ranks x {loader_workers} workers"
    if len(counts) < num:
        return (Finding("skew", folder, f"{shards} for {who}: {num - len(counts):,} of {num:,} workers get none"),)
    if len(counts) % num:
        less, more = len(counts) // num, len(counts) // num + 1
        return (Finding("skew", folder, f"{shards} for {who}: some workers get {less} shards, others {more}"),)
    if max(counts) - min(counts) <= 1:  # as even as whole numbers can be
        return ()
    shares = [sum(counts[worker::num]) for worker in range(num)]
    low, high = min(shares), max(shares)
    problem = f"{who}: {low:,} to {high:,} samples a worker, shards of {min(counts):,} to {max(counts):,} samples"
    return (Finding("skew", folder, problem),)
