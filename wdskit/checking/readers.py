"""For which other readers shards are safe: the rules of six of them, found by running each on hand-written files.

webdataset 1.0.2 (which open_clip and timm read with), Hugging Face datasets 5.2, Megatron-Energon 7.4.1, wids 0.1.11,
NVIDIA DALI 2.4 without an index, with that of its own tool, and with ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wdskit.checking.findings import Finding, ReaderVerdict
from wdskit.checking.quirks import Quirk
from wdskit.checking.shard import ShardReport
from wdskit.dataset.index import INFO_NAMES, SIZES_NAME, read_other_counts
from wdskit.dataset.shard import offsets_path
from wdskit.errors import ConfigError
from wdskit.export.api import shard_export_names
from wdskit.limits import MAX_LISTED
from wdskit.storage.urls import read_bytes
from wdskit.text import shorten

READERS = ("hf", "dali", "energon", "wids", "open_clip", "timm")
ALL = "all"

_WHY: dict[Quirk, str] = {
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
_RULES: dict[str, tuple[Quirk, ...]] = {
    "hf": ("upper_case", "meta", "int", "text", "json", "json_types"),
    "dali": ("pax", "long_name", "size", "space", "upper_case", "no_extension", "dot_file", "meta"),
    "energon": ("upper_case",),
    "wids": ("pax", "long_name", "prefix", "size", "newline", "upper_case", "dot_file", "meta"),
    "open_clip": ("int", "text", "json"),
    "timm": ("int",),
}
_DALI_WITH_INDEX: tuple[Quirk, ...] = ("upper_case",)
"""What is left where `--export dali` has written an index. DALI and its own tool read headers in their own ways."""


@dataclass(frozen=True)
class ReaderInput:
    """What the verdicts are made of.

    Attributes:
        reports: The shards, looked at with quirks.
        findings: All that was found.
        has_index: Whether index.json is there.
    """

    reports: Sequence[ShardReport]
    findings: Sequence[Finding]
    has_index: bool


@dataclass(frozen=True)
class Incompatibility:
    """A rule of a reader that a shard breaks.

    Attributes:
        rule: Its name.
        file: The shard, or another file or folder.
        problem: What is wrong, with the member where there is one.
        offset: Byte of the first member at fault.
        key: Key of the first sample at fault.
        num: Members, samples or keys at fault in this file.
    """

    rule: str
    file: str
    problem: str
    offset: int | None = None
    key: str | None = None
    num: int = 1


def choose_readers(names: Sequence[str]) -> tuple[str, ...]:
    """The readers to judge for, each once; `all` stands for all.

    Raises:
        ConfigError: One is not known; it lists those that are.
    """
    for name in names:
        if name not in (*READERS, ALL):
            raise ConfigError(f"{name!r} is no reader whose rules are known. There are: {', '.join(READERS)}, {ALL}.")
    return READERS if ALL in names else tuple(dict.fromkeys(names))


def judge(readers: Sequence[str], judged: ReaderInput) -> tuple[tuple[ReaderVerdict, ...], tuple[Finding, ...]]:
    """Whether readers give these samples back as they are.

    Args:
        readers: Some of `READERS`.
        judged: What was seen.

    Returns:
        A verdict for each, and a finding for each rule and shard, which names all readers that have the rule.
    """
    found = {reader: list(_incompatibilities(reader, judged)) for reader in readers}
    who: dict[Incompatibility, list[str]] = {}
    for reader, rules_broken in found.items():
        for one in rules_broken:
            who.setdefault(one, []).append(reader)
    verdicts = tuple(ReaderVerdict(name, _reasons(ones), sum(one.num for one in ones)) for name, ones in found.items())
    return verdicts, tuple(_findings(who))


def _incompatibilities(reader: str, judged: ReaderInput) -> Iterator[Incompatibility]:
    """Rule by rule, the shards in their order."""
    damaged = {one.file for one in judged.findings if one.kind in ("structure", "unreadable", "digest", "bytes")}
    for file in sorted(damaged):
        yield Incompatibility("damage", file, "it is damaged, and others drop what is behind it without a word")
    dali = [reader] if reader == "dali" else []
    with_index = {
        one.path
        for one in judged.reports
        if any(Path(one.path).with_name(name).is_file() for name in shard_export_names(Path(one.path).name, dali))
    }
    for quirk in _RULES[reader]:
        for report in judged.reports:
            if report.path in with_index and quirk not in _DALI_WITH_INDEX:
                continue
            if report.quirks and quirk in report.quirks.counts:
                name, offset = report.quirks.first[quirk]
                num = report.quirks.counts[quirk]
                yield Incompatibility(quirk, report.path, f"{_WHY[quirk]}: {name!r}", offset, num=num)
    if reader in _OWN:
        yield from _OWN[reader](judged)


def _reasons(rules_broken: Sequence[Incompatibility]) -> tuple[str, ...]:
    """A line for each rule: how often, and the first."""
    first: dict[str, Incompatibility] = {}
    counts: dict[str, int] = {}
    for one in rules_broken:
        first.setdefault(one.rule, one)
        counts[one.rule] = counts.get(one.rule, 0) + one.num
    return tuple(
        f"{one.file}: {one.problem}{f' (and {counts[rule] - 1:,} more like it)' if counts[rule] > 1 else ''}"
        for rule, one in first.items()
    )


def _findings(who: dict[Incompatibility, list[str]]) -> Iterator[Finding]:
    """One each, of a rule and its readers up to `MAX_LISTED`; the last says how many more there are."""
    groups: dict[tuple[str, ...], list[Incompatibility]] = {}
    for one, readers in who.items():
        groups.setdefault((one.rule, *readers), []).append(one)
    for (rule, *readers), ones in groups.items():
        rest = sum(one.num for one in ones[MAX_LISTED:])
        for number, one in enumerate(ones[:MAX_LISTED], start=1):
            more = one.num - 1 + (rest if number == MAX_LISTED else 0)
            problem = f"{', '.join(readers)}: {one.problem}"
            yield Finding("reader", one.file, problem, one.offset, one.key, more, rule)


_MAX_CARD_BYTES = 256 << 20


# As `infer_module_for_data_files_list` and `data_files.py` of datasets 5.2 have it.
_HF_IGNORED = {
    *("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"),
    *("metadata.csv", "metadata.jsonl", "metadata.parquet"),
}
_HF_SPLITS = [
    re.compile(rf"(\A|[-._ 0-9])({words})[-._ 0-9]")
    for words in ("train|training", "validation|valid|dev|val", "test|testing|eval|evaluation")
]
_HF_KINDS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"), "image"),
    ".tar": "webdataset",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".xml": "xml",
}
_HF_FAVOURITES = ".csv .json .jsonl .arrow .parquet"
"""Of as many the last; the others by the alphabet."""


def for_hf(judged: ReaderInput) -> Iterator[Incompatibility]:
    """Files of other kinds may outnumber the shards of a folder. The columns come from the first five samples; what
    appears later is dropped without a word.
    """
    for folder in sorted({Path(one.path).parent for one in judged.reports}):
        kinds = _hf_kinds(folder)
        if kinds and kinds != {"webdataset"}:
            problem = f"load_dataset takes what stands here for {' and '.join(sorted(kinds))} files"
            yield Incompatibility("folder_files", str(folder), f"{problem}, unless it is given data_files='*.tar'")
    first = [(one.path, key, names) for one in judged.reports if one.quirks for key, names in one.quirks.first_samples]
    first = first[:5]
    known = set(first[0][2]) if first else set()
    for path, key, names in first:
        if set(names) != known:
            wanted = f"{_listed(names)}, not {_listed(first[0][2])}"
            yield Incompatibility(
                "first_fields", path, f"the first five samples differ in their fields: it has {wanted}", key=key
            )
            return
    seen: set[str] = set()
    for report in judged.reports:
        for names, one in report.field_sets.items():
            late = sorted(set(names) - known - seen)
            if late:
                problem = f"fields that the first five samples do not have are dropped: {_listed(late)}"
                yield Incompatibility("late_field", report.path, problem, key=one.keys[0], num=one.count)
                seen.update(late)


def _hf_kinds(folder: Path) -> set[str]:
    """What `datasets` takes the files of a folder for: of each split that their names tell, the kind to which most
    parts of names between dots belong. `a.tar.idx` counts as a tar too.
    """
    card = folder / "README.md"
    if card.is_file() and b"data_files" in read_bytes(str(card), limit=_MAX_CARD_BYTES):
        return set()  # the files are named there
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
    names = [name for name in names if name not in _HF_IGNORED]
    splits = [[name for name in names if pattern.search(name)] for pattern in _HF_SPLITS]
    kinds = set()
    for split in list(filter(None, splits)) or [names]:
        counts = Counter(f".{part.lower()}" for name in split for part in name.split(".")[1:])
        known = [(count, _HF_FAVOURITES.find(ext), ext) for ext, count in counts.items() if ext in _HF_KINDS]
        if known:
            kinds.add(_HF_KINDS[max(known)[2]])
    return kinds


def for_energon(judged: ReaderInput) -> Iterator[Incompatibility]:
    """Its index has each key once, and no shard without a sample."""
    for one in judged.findings:
        if one.kind == "repeated":
            yield Incompatibility("repeated_key", one.file, one.problem, one.offset, one.key, 1 + one.more)
    wrong = {one.file for one in judged.findings if one.kind == "offsets"}
    for report in judged.reports:
        if report.is_whole and not report.num_samples:
            yield Incompatibility("empty_shard", report.path, "it has no sample")
        elif not offsets_path(report.path).is_file():
            yield Incompatibility("no_idx", report.path, "it has no .idx")
        elif str(offsets_path(report.path)) in wrong:
            yield Incompatibility("wrong_idx", str(offsets_path(report.path)), "it is invalid")


def for_wids(judged: ReaderInput) -> Iterator[Incompatibility]:
    """It reads by index.json, and keeps shards by their file names."""
    if not judged.has_index and judged.reports:
        yield Incompatibility("no_index", str(Path(judged.reports[0].path).parent), "there is no index.json")
    for one in judged.findings:
        if one.kind in ("index", "samples", "missing", "unlisted"):
            yield Incompatibility("wrong_index", one.file, one.problem)
    seen: dict[str, str] = {}
    for report in judged.reports:
        name = Path(report.path).name
        if not name.isascii():
            yield Incompatibility("shard_name", report.path, "the shard's name is not ASCII")
        if name in seen:
            problem = f"it has the file name of {seen[name]}, under which one of them is cached"
            yield Incompatibility("shard_names", report.path, problem)
        seen.setdefault(name, report.path)


def _for_trainer(
    judged: ReaderInput, *, counts_file: str, images: Sequence[str], label: str
) -> Iterator[Incompatibility]:
    """It counts by a file beside the shards, and passes over samples without one image and one label."""
    for folder in sorted({Path(one.path).parent for one in judged.reports}):
        counts = read_other_counts(str(folder)).get(counts_file)
        here = [one for one in judged.reports if Path(one.path).parent == folder]
        wrong = [one.path for one in here if counts is not None and counts.get(Path(one.path).name) != one.num_samples]
        if counts is None and (folder / counts_file).is_file():
            yield Incompatibility("counts", str(folder / counts_file), "it does not read")
        elif wrong:
            problem = f"it has a wrong count of {Path(wrong[0]).name}"
            yield Incompatibility("counts", str(folder / counts_file), problem, num=len(wrong))
    for report in judged.reports:
        sets = report.field_sets.items()
        lacking = [one for names, one in sets if label not in names or not any(name in names for name in images)]
        if lacking:
            problem = f"samples without {label} or one of {', '.join(images)}"
            num = sum(one.count for one in lacking)
            yield Incompatibility("training_fields", report.path, problem, key=lacking[0].keys[0], num=num)


def _listed(names: Sequence[str]) -> str:
    return shorten(", ".join(names)) or "none"


_OWN: dict[str, Callable[[ReaderInput], Iterator[Incompatibility]]] = {
    "hf": for_hf,
    "energon": for_energon,
    "wids": for_wids,
    "open_clip": partial(_for_trainer, counts_file=SIZES_NAME, images=("jpg", "png", "jpeg", "webp"), label="txt"),
    "timm": partial(_for_trainer, counts_file=INFO_NAMES[0], images=("jpg", "png", "webp"), label="cls"),
}
