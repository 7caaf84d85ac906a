"""For which other readers shards are safe: the rules of six of them, found by running each on hand-written files.

webdataset 1.0.2 (which open_clip and timm read with), Hugging Face datasets 5.2, Megatron-Energon 7.4.1, wids 0.1.11,
NVIDIA DALI 2.4 with and without its index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.offsets import offsets_path
from wdskit.errors import ConfigError, WdskitError
from wdskit.shards.facts import Fact
from wdskit.shards.findings import Finding, ReaderVerdict, shorten
from wdskit.shards.reports import ShardReport
from wdskit.storage.urls import read_bytes

READERS = ("hf", "dali", "energon", "wids", "open_clip", "timm")

MAX_COUNTS_BYTES = 256 << 20

_WHY: dict[Fact, str] = {
    "pax": "pax headers",
    "long_name": "GNU long names",
    "prefix": "names that are split over the header's prefix field",
    "size": "sizes with 12 digits or in base 256",
    "magic": "headers that are not ustar's",
    "between": "directories or global headers between the members",
    "space": "names with a space",
    "control": "names with characters that cannot be printed",
    "dotted_key": "folders with a dot in their name, where it cuts the key",
    "upper_case": "extensions in upper case, which only webdataset lowers",
    "no_sample": "members of no sample, which it takes for samples",
    "int": "integer fields (cls, ...) that are none",
    "text": "text fields that are not UTF-8",
    "json": "JSON that does not parse, or whose keys or types change",
}
_TAR: tuple[Fact, ...] = ("size", "between", "control")
_RULES: dict[str, tuple[Fact, ...]] = {
    "hf": (*_TAR, "dotted_key", "upper_case", "no_sample", "int", "text", "json"),
    "dali": (*_TAR, "pax", "long_name", "prefix", "magic", "space", "upper_case", "no_sample"),
    "energon": (*_TAR, "upper_case", "no_sample"),
    "wids": (*_TAR, "pax", "long_name", "prefix", "upper_case", "no_sample"),
    "open_clip": ("size", "control", "text"),
    "timm": ("size", "control", "int"),
}
_IMAGES = {"open_clip": ("jpg", "png", "jpeg", "webp"), "timm": ("jpg", "png", "webp")}
_LABELS = {"open_clip": "txt", "timm": "cls"}


@dataclass(frozen=True)
class Judged:
    """What the verdicts are made of.

    Attributes:
        reports: The shards, looked at with facts.
        findings: All that was found.
        has_index: Whether index.json is there.
    """

    reports: Sequence[ShardReport]
    findings: Sequence[Finding]
    has_index: bool


def check_readers(names: Sequence[str]) -> None:
    """Refuse a reader that is not known.

    Raises:
        ConfigError: It lists those that are.
    """
    for name in names:
        if name not in READERS:
            raise ConfigError(f"{name!r} is no reader whose rules are known. There are: {', '.join(READERS)}.")


def judge(reader: str, judged: Judged) -> ReaderVerdict:
    """Whether a reader gives these samples back as they are.

    Args:
        reader: One of `READERS`.
        judged: What was seen.
    """
    reasons = [*_damage(judged), *_facts(reader, judged), *_OWN.get(reader, _nothing)(judged)]
    if reader in _LABELS:
        reasons += _training_fields(reader, judged)
    return ReaderVerdict(reader, tuple(reasons))


def _damage(judged: Judged) -> Iterator[str]:
    """Others drop the rest of a damaged shard without a word."""
    damaged = {one.file for one in judged.findings if one.kind in ("structure", "unreadable", "digest", "bytes")}
    if damaged:
        yield f"{_some(len(damaged), 'damaged shard')}, first {min(damaged)}"


def _facts(reader: str, judged: Judged) -> Iterator[str]:
    for fact in _RULES[reader]:
        seen = [(one.facts, one.path) for one in judged.reports if one.facts and fact in one.facts.counts]
        if seen:
            num = sum(facts.counts[fact] for facts, _ in seen)
            facts, path = seen[0]
            yield f"{_WHY[fact]}: {num:,}, first {facts.first[fact]!r} in {path}"


def _hf(judged: Judged) -> Iterator[str]:
    """The columns come from the first five samples; what appears later is dropped without a word."""
    first = [names for one in judged.reports if one.facts for names in one.facts.first_fields][:5]
    if len(set(first)) > 1:
        yield f"the first five samples differ in their fields: {_listed(first[0])}; {_other(first)}"
        return
    known = set(first[0]) if first else set()
    later = sorted({name for one in judged.reports for names in one.field_sets for name in names} - known)
    if later:
        yield f"fields that the first five samples do not have are dropped: {shorten(', '.join(later))}"


def _other(field_sets: Sequence[tuple[str, ...]]) -> str:
    return _listed(next(names for names in field_sets if names != field_sets[0]))


def _energon(judged: Judged) -> Iterator[str]:
    repeated = sum(1 + one.more for one in judged.findings if one.kind == "repeated")
    if repeated:
        yield f"{_some(repeated, 'key')} repeated in the data set"
    empty = [one.path for one in judged.reports if one.is_whole and not one.num_samples]
    if empty:
        yield f"{_some(len(empty), 'shard')} without any sample, first {empty[0]}"
    bad = [one.path for one in judged.reports if not offsets_path(one.path).is_file()]
    wrong = sorted({one.file for one in judged.findings if one.kind == "offsets"})
    if bad or wrong:
        yield f"{_some(len(bad) or len(wrong), 'shard')} without a right .idx, first {(bad or wrong)[0]}"


def _wids(judged: Judged) -> Iterator[str]:
    if not judged.has_index:
        yield "there is no index.json. Run `wdskit index`"
    wrong = [one for one in judged.findings if one.kind in ("index", "samples", "missing", "unlisted")]
    if wrong:
        yield f"its index is not right: {wrong[0]}"
    long = [one.path for one in judged.reports if not one.path.isascii()]
    if long:
        yield f"shards whose names are not ASCII, first {long[0]}"
    names = [Path(one.path).name for one in judged.reports]
    if len(set(names)) < len(names):
        yield "two shards have one file name, under which they are cached"


def _open_clip(judged: Judged) -> Iterator[str]:
    yield from _counts(judged, "sizes.json", lambda document: document)


def _timm(judged: Judged) -> Iterator[str]:
    def lengths(document: Any) -> dict[str, Any]:
        splits = document["splits"].values()
        return {k: v for one in splits for k, v in zip(one["filenames"], one["shard_lengths"], strict=True)}

    yield from _counts(judged, "_info.json", lengths)


def _counts(judged: Judged, name: str, read: Callable[[Any], dict[str, Any]]) -> Iterator[str]:
    """Compare a file of counts, where there is one beside the shards."""
    for folder in sorted({Path(one.path).parent for one in judged.reports}):
        path = folder / name
        if not path.is_file():
            continue
        try:
            told = read(json.loads(read_bytes(str(path), limit=MAX_COUNTS_BYTES)))
            wrong = [
                one.path
                for one in judged.reports
                if Path(one.path).parent == folder and told.get(Path(one.path).name) != one.num_samples
            ]
        except (ValueError, RecursionError, LookupError, AttributeError, TypeError, WdskitError) as err:
            yield f"{path} does not read: {shorten(str(err))}"
            continue
        if wrong:
            yield f"{path} has the wrong count of {_some(len(wrong), 'shard')}, first {wrong[0]}"


def _training_fields(reader: str, judged: Judged) -> Iterator[str]:
    """Samples that these trainers pass over: they want one image and one label."""
    images, label = _IMAGES[reader], _LABELS[reader]
    num = 0
    first = ""
    for report in judged.reports:
        for names, one in report.field_sets.items():
            if label not in names or not any(name in names for name in images):
                num += one.count
                first = first or f"{one.keys[0]!r} in {report.path}"
    if num:
        yield f"{_some(num, 'sample')} without {label} or one of {', '.join(images)}, first {first}"


def _nothing(_: Judged) -> Iterator[str]:
    return iter(())


def _listed(names: Sequence[str]) -> str:
    return shorten(", ".join(names)) or "none"


def _some(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


_OWN: dict[str, Callable[[Judged], Iterator[str]]] = {
    "hf": _hf,
    "energon": _energon,
    "wids": _wids,
    "open_clip": _open_clip,
    "timm": _timm,
}
