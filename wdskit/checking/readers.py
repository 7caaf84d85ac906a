"""For which other readers shards are safe: the rules of six of them, found by running each on hand-written files.

webdataset 1.0.2 (which open_clip and timm read with), Hugging Face datasets 5.2, Megatron-Energon 7.4.1, wids 0.1.11,
NVIDIA DALI 2.4 without an index, with that of its own tool, and with ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from wdskit.checking.findings import Finding, ReaderVerdict
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

RULES = {
    "pax": ("dali wids", "a pax header with a path or a size"),
    "long_name": ("dali wids", "a GNU long name"),
    "prefix": ("wids", "a name that is split over the header's prefix field"),
    "size": ("dali wids", "a size with 12 digits or in base 256"),
    "space": ("dali", "a name with a space, which breaks DALI's own index"),
    "newline": ("wids", "a name with a line break"),
    "upper_case": ("hf dali energon wids", "an extension in upper case, which only webdataset converts to lower case"),
    "no_extension": ("dali", "a member without an extension, which is taken for a sample"),
    "dot_file": ("dali wids", "a hidden file, which is taken for a sample"),
    "meta": ("hf dali wids", "a member called `__...__`, which is taken for a sample"),
    "int": ("hf open_clip timm", "an integer field (cls, ...) that does not hold an integer"),
    "text": ("hf open_clip", "a text field that is not UTF-8"),
    "json": ("hf open_clip", "JSON that does not parse"),
    "json_types": ("hf", "JSON whose names or types change"),
}
"""Of each quirk of a member the readers that cannot take it, and what it is."""

_DALI_WITH_INDEX = ("upper_case",)
"""What is left where `--export dali` has written an index. DALI and its own tool read headers in their own ways."""

_TRAINING = {
    "open_clip": (SIZES_NAME, ("jpg", "png", "jpeg", "webp"), "txt"),
    "timm": (INFO_NAMES[0], ("jpg", "png", "webp"), "cls"),
}
"""The file of counts of a trainer, the images of which a sample needs one, and the label that it needs."""


def choose_readers(names: Sequence[str]) -> tuple[str, ...]:
    """The readers to judge for, each once; `all` stands for all.

    Raises:
        ConfigError: One is not known; it lists those that are.
    """
    for name in names:
        if name not in (*READERS, ALL):
            raise ConfigError(f"{name!r} is not a known reader. Known are: {', '.join(READERS)}, {ALL}.")
    return READERS if ALL in names else tuple(dict.fromkeys(names))


def judge(
    readers: Sequence[str], reports: Sequence[ShardReport], findings: Sequence[Finding], *, is_indexed: bool
) -> tuple[tuple[ReaderVerdict, ...], tuple[Finding, ...]]:
    """Decide whether readers give these samples back as they are.

    Args:
        readers: Some of `READERS`.
        reports: The shards, looked at with quirks.
        findings: All that was found.
        is_indexed: Whether index.json is there.

    Returns:
        A verdict for each, and a finding for each rule and shard, which names all readers that have the rule; of a rule
        and its readers up to `MAX_LISTED`, the last of which says how many more there are.
    """
    verdicts = []
    who: dict[Finding, list[str]] = {}
    for reader in readers:
        broken = [*_check_members(reader, reports, findings), *_check_folder(reader, reports, findings, is_indexed)]
        verdicts.append(ReaderVerdict(reader, _reasons(broken), sum(1 + one.more for one in broken)))
        for one in broken:
            who.setdefault(one, []).append(reader)
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one, names in who.items():
        groups.setdefault((str(one.rule), *names), []).append(one)
    found = []
    for (_, *names), ones in groups.items():
        found += [replace(one, problem=f"{', '.join(names)}: {one.problem}") for one in ones[:MAX_LISTED]]
        found[-1] = replace(found[-1], more=found[-1].more + sum(1 + one.more for one in ones[MAX_LISTED:]))
    return tuple(verdicts), tuple(found)


def _broken(
    rule: str, file: str, problem: str, *, offset: int | None = None, key: str | None = None, num: int = 1
) -> Finding:
    """A rule of a reader that a file breaks, `num` times."""
    return Finding("reader", file, problem, offset, key, num - 1, rule)


def _reasons(broken: Sequence[Finding]) -> tuple[str, ...]:
    """A line for each rule: the first, and how many more."""
    first: dict[str | None, Finding] = {}
    more: Counter[str | None] = Counter()
    for one in broken:
        more[one.rule] += one.more + (one.rule in first)
        first.setdefault(one.rule, one)
    return tuple(str(replace(one, offset=None, key=None, more=more[rule])) for rule, one in first.items())


def _check_members(reader: str, reports: Sequence[ShardReport], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Damage, and quirks of members: rule by rule, the shards in their order."""
    damaged = {one.file for one in findings if one.kind in ("structure", "unreadable", "digest", "bytes")}
    for file in sorted(damaged):
        yield _broken("damage", file, "it is damaged, and other readers silently drop everything after the damage")
    for rule, (names, why) in RULES.items():
        if reader not in names.split():
            continue
        for report in reports:
            if reader == "dali" and rule not in _DALI_WITH_INDEX and _has_dali_index(report.path):
                continue
            if report.quirks and rule in report.quirks.counts:
                name, offset = report.quirks.first[rule]
                problem = f"{why}: {name!r}"
                yield _broken(rule, report.path, problem, offset=offset, num=report.quirks.counts[rule])


def _has_dali_index(shard: str) -> bool:
    return all(Path(shard).with_name(name).is_file() for name in shard_export_names(Path(shard).name, ["dali"]))


def _check_folder(
    reader: str,
    reports: Sequence[ShardReport],
    findings: Sequence[Finding],
    is_indexed: bool,  # noqa: FBT001
) -> Iterator[Finding]:
    """What a reader wants of the shards together, and of the files beside them."""
    if reader == "hf":
        yield from _check_hf(reports)
    elif reader == "energon":
        yield from _check_energon(reports, findings)
    elif reader == "wids":
        yield from _check_wids(reports, findings, is_indexed)
    elif reader in _TRAINING:
        yield from _check_trainer(reports, *_TRAINING[reader])


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


def _check_hf(reports: Sequence[ShardReport]) -> Iterator[Finding]:
    """Files of other kinds may outnumber the shards of a folder. The columns come from the first five samples; what
    appears later is dropped without a word.
    """
    for folder in sorted({Path(one.path).parent for one in reports}):
        kinds = _hf_kinds(folder)
        if kinds and kinds != {"webdataset"}:
            problem = f"load_dataset takes this folder for {' and '.join(sorted(kinds))} files"
            yield _broken("folder_files", str(folder), f"{problem}, unless it is given data_files='*.tar'")
    first = [(one.path, key, names) for one in reports if one.quirks for key, names in one.quirks.first_samples][:5]
    known = set(first[0][2]) if first else set()
    for path, key, names in first:
        if set(names) != known:
            problem = f"it has {_listed(names)}, not {_listed(first[0][2])}"
            problem = f"the first five samples differ in their fields: {problem}"
            yield _broken("first_fields", path, problem, key=key)
            return
    seen: set[str] = set()
    for report in reports:
        for names, one in report.field_sets.items():
            late = sorted(set(names) - known - seen)
            if late:
                problem = f"fields that the first five samples do not have are dropped: {_listed(late)}"
                yield _broken("late_field", report.path, problem, key=one.key, num=one.count)
                seen.update(late)


def _hf_kinds(folder: Path) -> set[str]:
    """What `datasets` takes the files of a folder for: of each split that their names show, the kind to which most
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


def _check_energon(reports: Sequence[ShardReport], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Its index has each key once, and no shard without a sample."""
    for one in findings:
        if one.kind == "repeated":
            yield replace(one, kind="reader", rule="repeated_key")
    wrong = {one.file for one in findings if one.kind == "offsets"}
    for report in reports:
        if report.is_whole and not report.num_samples:
            yield _broken("empty_shard", report.path, "it has no samples")
        elif not offsets_path(report.path).is_file():
            yield _broken("no_idx", report.path, "it has no .idx")
        elif str(offsets_path(report.path)) in wrong:
            yield _broken("wrong_idx", str(offsets_path(report.path)), "it is invalid")


def _check_wids(
    reports: Sequence[ShardReport],
    findings: Sequence[Finding],
    is_indexed: bool,  # noqa: FBT001
) -> Iterator[Finding]:
    """It reads by index.json, and keeps shards by their file names."""
    if not is_indexed and reports:
        yield _broken("no_index", str(Path(reports[0].path).parent), "there is no index.json")
    for one in findings:
        if one.kind in ("index", "samples", "missing", "unlisted"):
            yield _broken("wrong_index", one.file, one.problem)
    seen: dict[str, str] = {}
    for report in reports:
        name = Path(report.path).name
        if not name.isascii():
            yield _broken("shard_name", report.path, "the shard's name is not ASCII")
        if name in seen:
            problem = f"it has the same file name as {seen[name]}, and wids caches only one of them"
            yield _broken("shard_names", report.path, problem)
        seen.setdefault(name, report.path)


def _check_trainer(
    reports: Sequence[ShardReport], counts_file: str, images: Sequence[str], label: str
) -> Iterator[Finding]:
    """It counts by a file beside the shards, and passes over samples without one image and one label."""
    for folder in sorted({Path(one.path).parent for one in reports}):
        counts = read_other_counts(str(folder)).get(counts_file)
        here = [one for one in reports if Path(one.path).parent == folder]
        wrong = [one.path for one in here if counts is not None and counts.get(Path(one.path).name) != one.num_samples]
        if counts is None and (folder / counts_file).is_file():
            yield _broken("counts", str(folder / counts_file), "it cannot be read")
        elif wrong:
            problem = f"it has a wrong count for {Path(wrong[0]).name}"
            yield _broken("counts", str(folder / counts_file), problem, num=len(wrong))
    for report in reports:
        sets = report.field_sets.items()
        lacking = [one for names, one in sets if label not in names or not any(name in names for name in images)]
        if lacking:
            problem = f"samples without {label} or one of {', '.join(images)}"
            num = sum(one.count for one in lacking)
            yield _broken("training_fields", report.path, problem, key=lacking[0].key, num=num)


def _listed(names: Sequence[str]) -> str:
    return shorten(", ".join(names)) or "none"
