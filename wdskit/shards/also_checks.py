"""Do the files for other readers match their shards? What `verify` says of those that the folder's index lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wdskit.dataset.braces import expand_braces
from wdskit.dataset.counts import INFO_NAMES, SIZES_NAME, counts_told
from wdskit.dataset.index import FolderIndex, ShardEntry
from wdskit.errors import FolderIndexError, StorageError
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.shards.also import KINDS, shard_names
from wdskit.shards.also_dali import dali_index
from wdskit.shards.also_energon import DATASET_NAME, INFO_NAME, SPLIT_NAME, info_json
from wdskit.shards.also_parquet import parquet_problem, stats_file
from wdskit.shards.also_record import ShardRecord
from wdskit.shards.also_webshart import webshart_problem
from wdskit.storage.urls import read_bytes

MAX_BESIDE_BYTES = MAX_INDEX_BYTES


class Problem(NamedTuple):
    """What `verify` makes a finding of."""

    kind: Literal["beside", "index"]
    file: str
    problem: str


def check_beside_shard(path: str, record: ShardRecord, entry: ShardEntry, kinds: Sequence[str]) -> Iterator[Problem]:
    """What is not right with the files of one shard.

    Args:
        path: The shard, which is whole.
        record: Its members.
        entry: What was read of it, not what the index says.
        kinds: What is kept beside it.
    """
    problems: dict[str, Callable[[bytes], str]] = {
        ".idx": lambda data: _dali_problem(data, record, path),
        ".json": lambda data: webshart_problem(data, record, entry),
        ".parquet": lambda data: parquet_problem(data, record, path),
        "_stats.json": lambda data: _same(data, stats_file(entry.num_samples), "counts"),
    }
    stem = entry.name.removesuffix(".tar")
    for name, kind in shard_names(entry.name, kinds).items():
        file = str(Path(path).with_name(name))
        problem = _problem(file, problems[name[len(stem) :]])
        if problem:
            yield Problem("beside", file, f"{kind}: {problem}")


def check_beside_folder(index: FolderIndex) -> Iterator[Problem]:
    """What is not right with the files of all shards of a folder together, by its index."""
    folder = Path(index.folder)
    for kind in index.also.kinds:
        if kind not in KINDS:
            problem = f"it says that files for {kind!r} are kept here, which this version does not know"
            yield Problem("index", str(folder / "index.json"), problem)
    told = counts_told(index.folder)
    for kind, name in (("open_clip", SIZES_NAME), ("timm", INFO_NAMES[0])):
        if kind in index.also.kinds:
            problem = _count_problem(told[name], index) if name in told else "it is missing"
            if problem:
                yield Problem("beside", str(folder / name), f"{kind}: {problem}")
    if "energon" in index.also.kinds:
        checks: dict[str, Callable[[bytes], str]] = {
            INFO_NAME: lambda data: _info_problem(data, index.entries),
            SPLIT_NAME: lambda data: _split_problem(data, index.entries),
            DATASET_NAME: lambda data: "" if data.strip() else "it is empty",
        }
        for name, check in checks.items():
            problem = _problem(str(folder / name), check)
            if problem:
                yield Problem("beside", str(folder / name), f"energon: {problem}")


def _problem(file: str, check: Callable[[bytes], str]) -> str:
    """What is wrong with a file, "" where nothing is."""
    if not Path(file).is_file():
        return "it is missing" if not Path(file).exists() else "this is no file"
    try:
        return check(read_bytes(file, limit=MAX_BESIDE_BYTES))
    except StorageError as err:
        return f"it cannot be read: {err}"


def _same(data: bytes, wanted: bytes, what: str) -> str:
    return "" if data == wanted else f"its {what} are not the shard's"


def _dali_problem(data: bytes, record: ShardRecord, path: str) -> str:
    try:
        return _same(data, dali_index(record, path), "offsets, sizes or names")
    except FolderIndexError as err:
        return str(err).partition("\n")[0]


def _count_problem(told: dict[str, int] | None, index: FolderIndex) -> str:
    """What is wrong with the counts of a file, None where it does not read."""
    if told is None:
        return "it is not what its program reads"
    wanted = {entry.name: entry.num_samples for entry in index.entries}
    wrong = next((name for name in {**wanted, **told} if told.get(name) != wanted.get(name)), None)
    if wrong is None:
        return ""
    if wrong not in told or wrong not in wanted:
        return f"{wrong} {'stands in it, not in the index' if wrong in told else 'is missing in it'}"
    return f"it says that {wrong} has {told[wrong]} samples, not {wanted[wrong]}"


def _info_problem(data: bytes, entries: Sequence[ShardEntry]) -> str:
    try:
        told = json.loads(data)["shard_counts"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return "it does not read"
    wanted = json.loads(info_json(entries))["shard_counts"]
    return "" if told == wanted else "its counts are not those of the index"


def _split_problem(data: bytes, entries: Sequence[ShardEntry]) -> str:
    """A user may give shards to other parts; but all that are named must be there, and all that are there be named."""
    import yaml

    try:
        document: Any = yaml.safe_load(data)
        parts = document["split_parts"].values()
        named = {
            name for names in (*parts, document.get("exclude", [])) for one in names for name in expand_braces(one)
        }
    except (yaml.YAMLError, StorageError, LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return "it does not read"
    wanted = {entry.name for entry in entries if entry.num_samples}
    if not wanted ^ {name for name in named if "/" not in name}:
        return ""
    strange = sorted(name for name in named - wanted if "/" not in name)
    missing = sorted(wanted - named)
    return f"it names {strange[0]}, which has no sample here" if strange else f"{missing[0]} is in none of its parts"
