"""Counts of samples that other programs keep beside shards: open_clip's `sizes.json` and timm's `_info.json`.

And open_clip's way to say how often each of several data sets is drawn. Nothing here opens a shard.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wdskit.dataset.index import join_url
from wdskit.errors import FolderIndexError, PipelineError, StorageError
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.urls import read_bytes

SIZES_NAME = "sizes.json"
INFO_NAMES = ("_info.json", "info.json")

_MAX_COUNT = 1 << 63
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


@dataclass(frozen=True)
class TimmSplit:
    """One split of a timm data set.

    Attributes:
        name: `train`, `validation`, ...
        counts: Samples of each shard by its path below the folder, in the order of the file.
        alt_label: The JSON field that holds the label, "" where that is `cls`.
    """

    name: str
    counts: dict[str, int]
    alt_label: str

    @property
    def num_samples(self) -> int:
        """Samples of all shards."""
        return sum(self.counts.values())


def read_sizes(folder: str) -> dict[str, int]:
    """The counts of open_clip's `sizes.json`: samples of each shard by its file name.

    Args:
        folder: Path or http(s) URL of the folder that holds it.

    Raises:
        StorageError: There is none, or it cannot be read.
        FolderIndexError: It is not what open_clip reads.
    """
    url = join_url(folder, SIZES_NAME)
    document = _read(url, folder)
    counts: dict[str, int] = {}
    for name, count in document.items():
        if "/" in name or _path_problem(name):
            raise _error(url, folder, f"{_SHORT.repr(name)} is not the name of a file in this folder")
        if isinstance(count, str) and count.isascii() and count.isdecimal() and len(count) < 19:
            count = int(count)  # open_clip's own readers call int()
        counts[name] = _count(url, folder, f"the count of {_SHORT.repr(name)}", count)
    return counts


def read_timm_info(folder: str) -> dict[str, TimmSplit]:
    """The splits of timm's `_info.json` (or `info.json`) by name.

    Args:
        folder: Path or http(s) URL of the folder that holds it.

    Raises:
        StorageError: There is none, or it cannot be read.
        FolderIndexError: It is not what timm reads, or its numbers contradict each other.
    """
    url = join_url(folder, INFO_NAMES[0])
    try:
        document = _read(url, folder)
    except StorageError as first:
        url = join_url(folder, INFO_NAMES[1])
        try:
            document = _read(url, folder)
        except StorageError:
            raise first from None  # the usual name is the one to tell
    splits = document.get("splits")
    if not isinstance(splits, dict):
        raise _error(url, folder, f"`splits` is {_SHORT.repr(splits)}, not an object")
    return {name: _parse_split(url, folder, name, split) for name, split in splits.items()}


def parse_factors(factors: str, num_parts: int) -> tuple[float, ...]:
    """The numbers of open_clip's `--train-data-upsampling-factors`, `1::2`, one for each `::`-part of the shards.

    Raises:
        PipelineError: They do not fit the parts, or are no numbers, 0 or more, not all 0.
    """
    found = tuple(map(_parse_factor, factors.split("::")))
    if len(found) != num_parts:
        msg = f"{_SHORT.repr(factors)}: {len(found)} factors for {num_parts} parts of shards."
        raise PipelineError(f"{msg} Write one for each, as 1::2.")
    if not any(found):
        raise PipelineError(f"{_SHORT.repr(factors)}: with all factors 0 nothing is drawn. Write 1::2.")
    return found


def counts_told(folder: str) -> dict[str, dict[str, int] | None]:
    """What other programs' files in a folder say: by the name of the file, samples of each shard by its name; None
    where the file is not what its program reads.
    """
    told: dict[str, dict[str, int] | None] = {}
    for name, read in ((SIZES_NAME, read_sizes), (INFO_NAMES[0], _read_timm_counts)):
        with contextlib.suppress(StorageError):  # it is not there
            try:
                told[name] = read(folder)
            except FolderIndexError:
                told[name] = None
    return told


def _read_timm_counts(folder: str) -> dict[str, int]:
    return {name: count for split in read_timm_info(folder).values() for name, count in split.counts.items()}


def _parse_factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < math.inf:
        msg = f"{_SHORT.repr(text)} is no upsampling factor: a number, 0 or more. Write one for each part, as 1::2."
        raise PipelineError(msg)
    return factor


def _parse_split(url: str, folder: str, name: str, split: Any) -> TimmSplit:
    where = f"split {_SHORT.repr(name)}"
    if not isinstance(split, dict):
        raise _error(url, folder, f"{where}: {_SHORT.repr(split)} is no split")
    filenames: Any = split.get("filenames")
    lengths: Any = split.get("shard_lengths")
    if not _is_list_of(filenames, str) or not _is_list_of(lengths, int):
        raise _error(
            url, folder, f"{where}: `filenames` and `shard_lengths` are not a list of names and one of numbers"
        )
    if len(filenames) != len(lengths):
        raise _error(url, folder, f"{where}: {len(filenames)} `filenames`, {len(lengths)} `shard_lengths`")
    counts: dict[str, int] = {}
    for path, length in zip(filenames, lengths, strict=True):
        problem = _path_problem(path) or ("stands there twice" if path in counts else None)
        if problem:
            raise _error(url, folder, f"{where}: {_SHORT.repr(path)} {problem}")
        counts[path] = _count(url, folder, f"{where}: the length of {_SHORT.repr(path)}", length)
    told = split.get("num_samples")
    if type(told) is not int or told != sum(counts.values()):
        total = sum(counts.values())
        raise _error(url, folder, f"{where}: `num_samples` is {_SHORT.repr(told)}, its shards have {total} in all")
    alt_label = split.get("alt_label", "")
    if split.get("name", name) != name or not isinstance(alt_label, str):
        raise _error(url, folder, f"{where}: its `name` is another, or its `alt_label` is no text")
    return TimmSplit(name, counts, alt_label)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)  # a bool is no number


def _path_problem(path: str) -> str | None:
    """Why this is no path below a folder."""
    if not path.isprintable() or any(part in ("", ".", "..") for part in path.split("/")):
        return "is not the path of a file below this folder"
    return None


def _count(url: str, folder: str, what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise _error(url, folder, f"{what} is {_SHORT.repr(value)}, not a whole number, 0 or more")
    return value


def _read(url: str, folder: str) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        document = json.loads(read_bytes(url, limit=MAX_INDEX_BYTES), object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as err:
        raise _error(url, folder, f"it is no JSON: {err}") from err
    if not isinstance(document, dict):
        raise _error(url, folder, f"it holds {_SHORT.repr(document)}, not an object")
    return document


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object; the last of two with one name would win without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        msg = f"{_SHORT.repr(name)} stands there twice"
        raise ValueError(msg)
    return found


def _error(url: str, folder: str, problem: str) -> FolderIndexError:
    msg = f"{url}: {problem}.\n  Make it again with the program that wrote it, or run `wdskit index` on the shards."
    return FolderIndexError(msg, folder=folder)
