"""The files beside the shards: are the index and the offsets those that belong to them?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BINARY_NAME, BinaryIndex
from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES
from wdskit.dataset.index import INDEX_NAME, FolderIndex, ShardEntry, read_index
from wdskit.dataset.offsets import SUFFIX, offsets_path, read_offsets
from wdskit.errors import FolderIndexError, WdskitError
from wdskit.shards.findings import Finding, shorten
from wdskit.storage.urls import read_bytes


def look_at_index(folder: Path) -> tuple[FolderIndex | None, tuple[Finding, ...]]:
    """The index of a folder, None where there is none that reads, and what is wrong with its two forms."""
    path, twin = folder / INDEX_NAME, folder / BINARY_NAME
    if not path.is_file():
        if twin.exists():
            return None, (Finding("index", str(path), f"it is missing beside {BINARY_NAME}"),)
        return None, ()
    found = _look_at_classes(folder)
    index = None
    try:
        index = read_index(folder)
    except FolderIndexError as err:
        found += (Finding("index", str(path), _plain(err, path)),)
    if not twin.is_file():
        return index, (*found, Finding("index", str(twin), "it is missing beside index.json"))
    try:
        problem = _compare(BinaryIndex(folder), index) if index else ""
    except FolderIndexError as err:
        problem = _plain(err, twin)
    return index, (*found, Finding("index", str(twin), problem)) if problem else found


def _compare(twin: BinaryIndex, index: FolderIndex) -> str:
    """In what the twin differs, though its digests hold."""
    entries = index.entries
    if len(twin) != len(entries):
        return f"it lists {len(twin)} shards, index.json {len(entries)}"
    same = (
        np.array_equal(twin.counts, [one.num_samples for one in entries])
        and np.array_equal(twin.sizes, [one.num_bytes for one in entries])
        and twin.digests.tobytes() == b"".join(bytes.fromhex(one.sha256) for one in entries)
        and all(twin.name(number) == one.name for number, one in enumerate(entries))
        and all(twin.idx_sha256(number) == one.idx_sha256 for number, one in enumerate(entries))
    )
    return "" if same else "it says something else of a shard than index.json"


def _look_at_classes(folder: Path) -> tuple[Finding, ...]:
    path = folder / CLASSES_NAME
    if not path.is_file():
        return ()
    try:
        json.loads(read_bytes(str(path), limit=MAX_CLASSES_BYTES))
    except (ValueError, RecursionError, WdskitError) as err:
        return (Finding("index", str(path), f"it is no JSON: {shorten(str(err))}"),)
    return ()


def _plain(err: WdskitError, path: Path) -> str:
    """The error's first line without the file that the finding names anyway."""
    return shorten(str(err).removeprefix(f"{path}: ").partition("\n")[0].rstrip("."))


def compare_offsets(
    path: str,
    num_bytes: int,
    starts: Sequence[int] | NDArray[np.uint64],
    *,
    is_whole: bool,
    entry: ShardEntry | None = None,
) -> tuple[Finding, ...]:
    """What is not right with a shard's .idx.

    Args:
        path: The shard.
        num_bytes: Its size, where no index says which it should have.
        starts: Where its samples start; if `is_whole`, and where the last one ends.
        is_whole: Whether these are all; else the offsets behind them are not compared.
        entry: What the index says of the shard; then their number is compared with that.
    """
    if entry is not None:
        num_bytes = entry.num_bytes
    file = f"{path}{SUFFIX}"
    try:
        if offsets_path(path).exists() and not offsets_path(path).is_file():
            return (Finding("offsets", file, "this is no file"),)
        told = read_offsets(path, num_bytes=num_bytes)
    except FolderIndexError as err:
        problem = str(err).removeprefix(f"{file}: ").partition("\n")[0].rstrip(".")
        return (Finding("offsets", file, problem),)
    found = np.asarray(starts).astype(np.int64)
    if is_whole and len(told) != len(found):
        problem = f"it has the offsets of {len(told) - 1} samples, the shard has {len(found) - 1}"
        return (Finding("offsets", file, problem),)
    if not is_whole and entry is not None and entry.num_samples != len(told) - 1:
        problem = f"it has the offsets of {len(told) - 1} samples, the index says {entry.num_samples}"
        return (Finding("offsets", file, problem),)
    num = min(len(told), len(found) - (not is_whole))
    wrong = np.flatnonzero(told[:num] != found[:num])
    if not len(wrong):
        return _compare_digest(path, num_bytes, entry.idx_sha256 if entry else None)
    at = int(wrong[0])
    what = "the last sample ends" if at == len(found) - 1 else f"sample {at} starts"
    return (Finding("offsets", file, f"it says {told[at]} where {what} at byte {found[at]}"),)


def _compare_digest(path: str, num_bytes: int, sha256: str | None) -> tuple[Finding, ...]:
    """Offsets that are right, but not those that the index has the digest of: planned sources refuse them."""
    try:
        read_offsets(path, num_bytes=num_bytes, sha256=sha256)
    except FolderIndexError:
        return (Finding("offsets", f"{path}{SUFFIX}", "it is not the file that the index has the sha256 of"),)
    return ()
