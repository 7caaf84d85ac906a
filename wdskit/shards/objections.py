"""What one reader alone objects to, besides what stands in headers and values: see `shards.readers`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.offsets import offsets_path
from wdskit.errors import WdskitError
from wdskit.shards.findings import Finding, shorten
from wdskit.shards.reports import ShardReport
from wdskit.storage.urls import read_bytes

MAX_COUNTS_BYTES = 256 << 20

IMAGES = {"open_clip": ("jpg", "png", "jpeg", "webp"), "timm": ("jpg", "png", "webp")}
LABELS = {"open_clip": "txt", "timm": "cls"}


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


@dataclass(frozen=True)
class Objection:
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


def for_hf(judged: Judged) -> Iterator[Objection]:
    """Files of other kinds may outnumber the shards of a folder. The columns come from the first five samples; what
    appears later is dropped without a word.
    """
    for folder in sorted({Path(one.path).parent for one in judged.reports}):
        kinds = _hf_kinds(folder)
        if kinds and kinds != {"webdataset"}:
            problem = f"load_dataset takes what stands here for {' and '.join(sorted(kinds))} files"
            yield Objection("folder_files", str(folder), f"{problem}, unless it is given data_files='*.tar'")
    first = [(one.path, key, names) for one in judged.reports if one.facts for key, names in one.facts.first_samples]
    first = first[:5]
    known = set(first[0][2]) if first else set()
    for path, key, names in first:
        if set(names) != known:
            wanted = f"{_listed(names)}, not {_listed(first[0][2])}"
            yield Objection(
                "first_fields", path, f"the first five samples differ in their fields: it has {wanted}", key=key
            )
            return
    seen: set[str] = set()
    for report in judged.reports:
        for names, one in report.field_sets.items():
            late = sorted(set(names) - known - seen)
            if late:
                problem = f"fields that the first five samples do not have are dropped: {_listed(late)}"
                yield Objection("late_field", report.path, problem, key=one.keys[0], num=one.count)
                seen.update(late)


def _hf_kinds(folder: Path) -> set[str]:
    """What `datasets` takes the files of a folder for: of each split that their names tell, the kind to which most
    parts of names between dots belong. `a.tar.idx` counts as a tar too.
    """
    card = folder / "README.md"
    if card.is_file() and b"data_files" in read_bytes(str(card), limit=MAX_COUNTS_BYTES):
        return set()  # the files are named there
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_file()]
    names = [name for name in names if name not in _HF_IGNORED]
    told = [[name for name in names if pattern.search(name)] for pattern in _HF_SPLITS]
    kinds = set()
    for split in [split for split in told if split] or [names]:
        counts = Counter(f".{part.lower()}" for name in split for part in name.split(".")[1:])
        known = [(count, _HF_FAVOURITES.find(ext), ext) for ext, count in counts.items() if ext in _HF_KINDS]
        if known:
            kinds.add(_HF_KINDS[max(known)[2]])
    return kinds


def for_energon(judged: Judged) -> Iterator[Objection]:
    """Its index has each key once, and no shard without a sample."""
    for one in judged.findings:
        if one.kind == "repeated":
            yield Objection("repeated_key", one.file, one.problem, one.offset, one.key, 1 + one.more)
    wrong = {one.file for one in judged.findings if one.kind == "offsets"}
    for report in judged.reports:
        if report.is_whole and not report.num_samples:
            yield Objection("empty_shard", report.path, "it has no sample")
        elif not offsets_path(report.path).is_file():
            yield Objection("no_idx", report.path, "it has no .idx")
        elif str(offsets_path(report.path)) in wrong:
            yield Objection("wrong_idx", str(offsets_path(report.path)), "it is not right")


def for_wids(judged: Judged) -> Iterator[Objection]:
    """It reads by index.json, and keeps shards by their file names."""
    if not judged.has_index and judged.reports:
        yield Objection("no_index", str(Path(judged.reports[0].path).parent), "there is no index.json")
    for one in judged.findings:
        if one.kind in ("index", "samples", "missing", "unlisted"):
            yield Objection("wrong_index", one.file, one.problem)
    seen: dict[str, str] = {}
    for report in judged.reports:
        name = Path(report.path).name
        if not name.isascii():
            yield Objection("shard_name", report.path, "the shard's name is not ASCII")
        if name in seen:
            problem = f"it has the file name of {seen[name]}, under which one of them is cached"
            yield Objection("shard_names", report.path, problem)
        seen.setdefault(name, report.path)


def for_open_clip(judged: Judged) -> Iterator[Objection]:
    """It counts by sizes.json, and passes over samples without an image and a text."""
    yield from _counts(judged, "sizes.json", lambda document: document)
    yield from _training_fields("open_clip", judged)


def for_timm(judged: Judged) -> Iterator[Objection]:
    """It counts by _info.json, and passes over samples without an image and a label."""

    def lengths(document: Any) -> dict[str, Any]:
        splits = document["splits"].values()
        return {k: v for one in splits for k, v in zip(one["filenames"], one["shard_lengths"], strict=True)}

    yield from _counts(judged, "_info.json", lengths)
    yield from _training_fields("timm", judged)


def _counts(judged: Judged, name: str, read: Callable[[Any], Mapping[str, Any]]) -> Iterator[Objection]:
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
            yield Objection("counts", str(path), f"it does not read: {shorten(str(err))}")
            continue
        if wrong:
            yield Objection("counts", str(path), f"it has a wrong count of {Path(wrong[0]).name}", num=len(wrong))


def _training_fields(reader: str, judged: Judged) -> Iterator[Objection]:
    """Samples that these trainers pass over: they want one image and one label."""
    images, label = IMAGES[reader], LABELS[reader]
    for report in judged.reports:
        lacking = [
            one
            for names, one in report.field_sets.items()
            if label not in names or not any(name in names for name in images)
        ]
        if lacking:
            problem = f"samples without {label} or one of {', '.join(images)}"
            num = sum(one.count for one in lacking)
            yield Objection("training_fields", report.path, problem, key=lacking[0].keys[0], num=num)


def _listed(names: Sequence[str]) -> str:
    return shorten(", ".join(names)) or "none"
