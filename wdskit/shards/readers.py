"""For which other readers shards are safe: the rules of six of them, found by running each on hand-written files.

webdataset 1.0.2 (which open_clip and timm read with), Hugging Face datasets 5.2, Megatron-Energon 7.4.1, wids 0.1.11,
NVIDIA DALI 2.4 without an index, with that of its own tool, and with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wdskit.errors import ConfigError
from wdskit.export.api import shard_export_names
from wdskit.shards.facts import Fact
from wdskit.shards.findings import MAX_LISTED, Finding, ReaderVerdict
from wdskit.shards.objections import (
    Judged,
    Objection,
    for_energon,
    for_hf,
    for_open_clip,
    for_timm,
    for_wids,
)

READERS = ("hf", "dali", "energon", "wids", "open_clip", "timm")
ALL = "all"

_WHY: dict[Fact, str] = {
    "pax": "a pax header with a path or a size",
    "long_name": "a GNU long name",
    "prefix": "a name that is split over the header's prefix field",
    "size": "a size with 12 digits or in base 256",
    "space": "a name with a space, which breaks DALI's own index",
    "newline": "a name with a line end",
    "upper_case": "an extension in upper case, which only webdataset lowers",
    "no_extension": "a member without an extension, which is taken for a sample",
    "dot_file": "a hidden file, which is taken for a sample",
    "meta": "a member called `__...__`, which is taken for a sample",
    "int": "an integer field (cls, ...) that is none",
    "text": "a text field that is not UTF-8",
    "json": "JSON that does not parse",
    "json_types": "JSON whose names or types change",
}
_RULES: dict[str, tuple[Fact, ...]] = {
    "hf": ("upper_case", "meta", "int", "text", "json", "json_types"),
    "dali": ("pax", "long_name", "size", "space", "upper_case", "no_extension", "dot_file", "meta"),
    "energon": ("upper_case",),
    "wids": ("pax", "long_name", "prefix", "size", "newline", "upper_case", "dot_file", "meta"),
    "open_clip": ("int", "text", "json"),
    "timm": ("int",),
}
_DALI_WITH_INDEX: tuple[Fact, ...] = ("upper_case",)
"""What is left where `--also dali` has written an index. DALI and its own tool read headers in their own ways."""

_OWN: dict[str, Callable[[Judged], Iterator[Objection]]] = {
    "hf": for_hf,
    "energon": for_energon,
    "wids": for_wids,
    "open_clip": for_open_clip,
    "timm": for_timm,
}


def choose_readers(names: Sequence[str]) -> tuple[str, ...]:
    """The readers to judge for, each once; `all` stands for all.

    Raises:
        ConfigError: One is not known; it lists those that are.
    """
    for name in names:
        if name not in (*READERS, ALL):
            raise ConfigError(f"{name!r} is no reader whose rules are known. There are: {', '.join(READERS)}, {ALL}.")
    return READERS if ALL in names else tuple(dict.fromkeys(names))


def judge(readers: Sequence[str], judged: Judged) -> tuple[tuple[ReaderVerdict, ...], tuple[Finding, ...]]:
    """Whether readers give these samples back as they are.

    Args:
        readers: Some of `READERS`.
        judged: What was seen.

    Returns:
        A verdict for each, and a finding for each rule and shard, which names all readers that have the rule.
    """
    found = {reader: list(_objections(reader, judged)) for reader in readers}
    who: dict[Objection, list[str]] = {}
    for reader, objections in found.items():
        for one in objections:
            who.setdefault(one, []).append(reader)
    verdicts = tuple(ReaderVerdict(name, _reasons(ones), sum(one.num for one in ones)) for name, ones in found.items())
    return verdicts, tuple(_findings(who))


def _objections(reader: str, judged: Judged) -> Iterator[Objection]:
    """Rule by rule, the shards in their order."""
    damaged = {one.file for one in judged.findings if one.kind in ("structure", "unreadable", "digest", "bytes")}
    for file in sorted(damaged):
        yield Objection("damage", file, "it is damaged, and others drop what is behind it without a word")
    with_index = {one.path for one in judged.reports if reader == "dali" and _has_dali_index(one.path)}
    for fact in _RULES[reader]:
        for report in judged.reports:
            if report.path in with_index and fact not in _DALI_WITH_INDEX:
                continue
            if report.facts and fact in report.facts.counts:
                name, offset = report.facts.first[fact]
                yield Objection(fact, report.path, f"{_WHY[fact]}: {name!r}", offset, None, report.facts.counts[fact])
    if reader in _OWN:
        yield from _OWN[reader](judged)


def _has_dali_index(path: str) -> bool:
    return any((Path(path).parent / name).is_file() for name in shard_export_names(Path(path).name, ["dali"]))


def _reasons(objections: Sequence[Objection]) -> tuple[str, ...]:
    """A line for each rule: how often, and the first."""
    first: dict[str, Objection] = {}
    counts: dict[str, int] = {}
    for one in objections:
        first.setdefault(one.rule, one)
        counts[one.rule] = counts.get(one.rule, 0) + one.num
    return tuple(f"{one.file}: {one.problem}{_more(counts[rule] - 1)}" for rule, one in first.items())


def _more(num: int) -> str:
    return f" (and {num:,} more like it)" if num else ""


def _findings(who: dict[Objection, list[str]]) -> Iterator[Finding]:
    """One each, of a rule and its readers up to `MAX_LISTED`; the last says how many more there are."""
    groups: dict[tuple[str, ...], list[Objection]] = {}
    for one, readers in who.items():
        groups.setdefault((one.rule, *readers), []).append(one)
    for (rule, *readers), ones in groups.items():
        rest = sum(one.num for one in ones[MAX_LISTED:])
        for number, one in enumerate(ones[:MAX_LISTED], start=1):
            more = one.num - 1 + (rest if number == MAX_LISTED else 0)
            problem = f"{', '.join(readers)}: {one.problem}"
            yield Finding("reader", one.file, problem, one.offset, one.key, more, rule)
