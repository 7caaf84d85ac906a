"""What only shows over all shards: samples with other fields than the rest, and shards that do not feed all alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from wdskit.codecs.formats import is_image_field
from wdskit.errors import ConfigError
from wdskit.shards.findings import MAX_LISTED, Finding, shorten
from wdskit.shards.reports import Fields, ShardReport

Spellings = Mapping[str, set[str]]
"""The fields of each kind: of images all extensions."""


def find_odd(folder: str, reports: Sequence[ShardReport]) -> tuple[Finding, ...]:
    """One finding for each set of fields but the commonest, the rarest last. One image is as good as another: samples
    with `jpg` and samples with `png` have the same fields.

    Args:
        folder: What the last finding names, where there are more than are listed.
        reports: The shards.
    """
    counts: Counter[Fields] = Counter()
    places: dict[Fields, tuple[ShardReport, str]] = {}
    spellings: dict[Fields, dict[str, set[str]]] = {}
    for report in reports:
        for names, one in report.field_sets.items():
            kinds = tuple(sorted(map(_kind_of, names)))
            counts[kinds] += one.count
            places.setdefault(kinds, (report, one.keys[0]))
            known = spellings.setdefault(kinds, {})
            for name in names:
                known.setdefault(_kind_of(name), set()).add(name)
    ranked = counts.most_common()
    found = []
    for kinds, count in ranked[1 : MAX_LISTED + 1]:
        report, key = places[kinds]
        samples = f"{count:,} sample{'s' if count > 1 else ''}"
        problem = f"{_difference(spellings[kinds], kinds, spellings[ranked[0][0]], ranked[0][0])} ({samples}; this is"
        found.append(Finding("odd", report.path, f"{problem} the first)", key=key))
    if len(ranked) > MAX_LISTED + 1:
        num = len(ranked) - MAX_LISTED - 1
        found.append(Finding("odd", folder, f"samples have {num:,} more sets of fields, each another"))
    return tuple(found)


def _kind_of(name: str) -> str:
    """A field's name, with one extension for all images."""
    return f"{name.rpartition('.')[0]}.<image>" if is_image_field(name) else name


def _difference(names: Spellings, kinds: Fields, common: Spellings, common_kinds: Fields) -> str:
    """What samples of these fields lack and have beside the commonest."""
    less, more = Counter(common_kinds) - Counter(kinds), Counter(kinds) - Counter(common_kinds)
    lacking, extra = _listed(less, common), _listed(more, names)
    parts = [f"it has no {lacking}" if lacking else "", f"it has {extra} besides" if extra else ""]
    told = ", ".join(part for part in parts if part)
    return f"{shorten(told)}, most have {shorten(_listed(common_kinds, common))}"


def _listed(kinds: Iterable[str], spellings: Spellings) -> str:
    """`cls, jpg or png`."""
    return ", ".join(sorted(" or ".join(sorted(spellings[kind])) for kind in kinds))


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
