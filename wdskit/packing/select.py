"""`select`: choose samples with options of `reshard`, and mark them in a column of bool. No sample is copied."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.columns import SPLIT_COLUMN, Columns, NewColumn, add_columns, check_column_name
from wdskit.dataset.index import Index, ShardEntry, read_index, refuse_commit
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import FolderShards, ShardList, check_found
from wdskit.errors import FolderIndexError, PackError, RowError, SelectionError, StorageError, WdskitError
from wdskit.files import Disk
from wdskit.packing.options import SelectOptions, takes_options
from wdskit.packing.row import Progress
from wdskit.packing.sample_filter import Choice, LeftOutCounts
from wdskit.packing.sources.shards import check_indexed
from wdskit.packing.sources.tar_samples import TarSamples, list_tars
from wdskit.shards.parallel import map_shards
from wdskit.storage.urls import is_local

SampleNumbers = NDArray[np.int64]
"""Numbers of samples in one shard, (n,), rising."""


@dataclass(frozen=True)
class SelectResult:
    """The result of `select`.

    Attributes:
        folders: Folders in which the column was stored.
        name: Name of the column.
        num_source_shards: Shards that were read.
        num_source_samples: Samples in these shards: `num_samples` plus the last three counts.
        num_samples: Samples that were selected.
        num_sampled_out: Samples outside the share of `sample`.
        num_filtered: Samples for which the filter is false.
        num_missing: Samples that were left out because they lack a value that the filter uses.
    """

    folders: tuple[Path, ...]
    name: str
    num_source_shards: int
    num_source_samples: int
    num_samples: int
    num_sampled_out: int
    num_filtered: int
    num_missing: int


@takes_options(SelectOptions)
def select(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], name: str, options: SelectOptions
) -> SelectResult:
    """Choose samples and mark them in a column of bool in the shards' folders: `wdskit reshard --selection`.

    The column is False for all other samples, also in shards that `source` does not name. A planned source of a
    pipeline (`exact`, `resampled`, `sequential`) reads the chosen samples with `split: NAME` or `where: NAME`. The
    shards do not change. `overwrite` replaces a column `name` that was made with other options or for more shards.

    Args:
        source: Local shards of indexed folders: a folder, glob or brace pattern, several joined by `::`, or a list.
        name: Name of the column.
        options: Keyword arguments, one for each field of `SelectOptions` to set.

    Raises:
        SelectionError: The name or the filter is invalid, another column or a split has the name, a shard is named
            twice, the filter cannot be evaluated for a sample, or no sample is chosen.
        ConfigError: `sample` is not a share.
        FolderIndexError: A folder has no index, an unfinished run or another process that writes in it; or the index
            does not match the shards.
        PackError: An option is invalid, or a shard is remote.
        RowError, ShardError: A shard is damaged, or changed after it was indexed.
        StorageError: A shard cannot be read, the column cannot be written, or a folder cannot be locked.
        WdskitError: A worker process was killed.
    """
    check_column_name(name)
    column = _column_source(options)
    found = list_tars(source)
    remote = next((url for url in found.urls if not is_local(url)), None)
    if remote is not None:
        msg = f"{remote}: a selection needs local shards. Make it where the shards are."
        raise PackError(msg)
    shards = _indexed_shards(found)
    is_checked = options.check == "sha256"
    if is_checked:
        check_indexed(found)
    choose = functools.partial(_choose_samples, choice=options.choice, check=is_checked)
    num_samples, left_out, total_bytes = 0, LeftOutCounts(), sum(entry.num_bytes for _, entry in shards)
    parents = dict.fromkeys(os.path.dirname(url) for url, _ in shards)
    real_paths = {parent: os.path.realpath(parent) for parent in parents}
    folders: dict[str, str] = {}  # the first spelling of each folder, by its real path
    for parent, real_path in real_paths.items():
        folders.setdefault(real_path, parent or ".")
    with contextlib.ExitStack() as stack:
        names: dict[str, set[str]] = {real_path: set() for real_path in folders}
        for url, _ in shards:
            names[real_paths[os.path.dirname(url)]].add(os.path.basename(url))
        indexes = {
            real_path: _lock_index(stack, folder, name, column, names[real_path], overwrite=options.overwrite)
            for real_path, folder in folders.items()
        }
        chosen: dict[str, dict[str, SampleNumbers]] = {real_path: {} for real_path in folders}
        num_chosen = num_bytes = 0
        with contextlib.closing(map_shards(choose, shards, workers=options.workers)) as results:
            for (url, entry), result in zip(shards, results, strict=True):
                if isinstance(result, WdskitError):
                    raise result
                numbers, others = result
                chosen[real_paths[os.path.dirname(url)]][entry.name] = numbers
                num_chosen += len(numbers)
                left_out += others
                num_samples += entry.num_samples
                num_bytes += entry.num_bytes
                if options.progress is not None:
                    options.progress(Progress("reading", num_samples, num_bytes, None, total_bytes))
        if not num_chosen:
            raise SelectionError(f"{name}: none of the {num_samples} samples is selected. Nothing was written.")
        for real_path, folder in folders.items():
            _write(Path(folder), indexes[real_path], name, chosen[real_path], column, options.disk)
    return SelectResult(
        folders=tuple(map(Path, folders.values())),
        name=name,
        num_source_shards=len(shards),
        num_source_samples=num_samples,
        num_samples=num_chosen,
        **vars(left_out),
    )


def _choose_samples(
    shard: tuple[str, ShardEntry], *, choice: Choice, check: bool
) -> tuple[SampleNumbers, LeftOutCounts]:
    """Return the numbers of the chosen samples of a shard, int64 (n,), and the counts of the other samples.

    `shard` is the path of the shard and its index entry. With `check`, the bytes of the shard are first compared with
    the sha256 of the entry.

    Raises:
        RowError: The shard is damaged.
        SelectionError: The filter cannot be evaluated for a sample.
        ShardError: The shard was replaced after it was indexed, or has a member of a kind that no sample has.
        FolderIndexError: The shard differs from its index entry.
        StorageError: The shard cannot be read.
    """
    url, entry = shard
    numbers, left_out = [], LeftOutCounts()
    for number, sample in enumerate(TarSamples(url, entry, check=check)):
        if isinstance(sample, RowError):
            raise sample
        if choice.keeps(sample, url, left_out):
            numbers.append(number)
    return np.array(numbers, np.int64), left_out


def _column_source(options: SelectOptions) -> dict[str, Any]:
    """Return the options that define the column, by name. The column stores them."""
    source: dict[str, Any] = {"filter": options.filter}
    source |= {"missing": options.missing} if options.missing != "error" else {}
    return source | ({"sample": options.sample, "seed": options.seed} if options.sample else {})


def _indexed_shards(found: ShardList) -> list[tuple[str, ShardEntry]]:
    """Return path and index entry of each shard.

    Raises:
        FolderIndexError: The folder of a shard has no index.
        SelectionError: A shard is named twice.
    """
    shards = []
    for url, entry in zip(found.urls, found.entries, strict=True):
        if entry is None:
            folder = os.path.dirname(url) or "."
            msg = f"{url}: its folder has no index, which a selection needs.\n  Run `wdskit index {folder}`."
            raise FolderIndexError(msg, folder=folder)
        shards.append((url, entry))
    if len({os.path.realpath(url) for url in found.urls}) < len(found.urls):
        raise SelectionError("a shard is named twice, but its samples can be selected only once.")
    return shards


def _lock_index(
    stack: contextlib.ExitStack,
    folder: str,
    name: str,
    source: dict[str, Any],
    shards: AbstractSet[str],
    *,
    overwrite: bool,
) -> Index:
    """Lock a folder until `stack` is closed, and return the folder's index.

    `name` is the new column. `source` are the options that define it, from `_column_source`. `shards` are the names of
    the folder's shards of which samples are selected.

    Raises:
        SelectionError: The folder has a split `name`. Or `overwrite` is False, and the folder has a column `name` that
            was made with other options, or that also selects samples of shards that are not in `shards`.
        FolderIndexError: A run in the folder is unfinished, another process is writing in the folder, or the
            index does not match the shards.
        StorageError: The folder cannot be locked.
    """
    stack.enter_context(lock_folder(Path(folder)))
    refuse_commit(Path(folder))
    index = read_index(folder)
    check_found([FolderShards(index.folder, index, index.names)], with_sizes=True)
    known = Columns(index)
    splits = known.column(SPLIT_COLUMN).values if SPLIT_COLUMN in known else None
    if name in (splits or ()):
        raise SelectionError(f"{folder}: it has a split {name!r} already. Choose another name.", folder=folder)
    made = dict(known.column(name).source) if name in known else source
    others = sorted({*made.pop("shards", index.by_name)} & index.by_name.keys() - shards) if name in known else []
    if not overwrite and others:
        msg = f"{folder}: {name!r} selects samples of other shards too, such as {others[0]}."
        raise SelectionError(f"{msg}\n  Name all its shards, or replace it with --overwrite.", folder=folder)
    if not overwrite and made != source:
        other = ", ".join(f"{key} {value}" for key, value in known.column(name).source.items())
        msg = f"{folder}: another column has the name {name!r}: {other}."
        raise SelectionError(f"{msg}\n  Choose another, or replace it with --overwrite.", folder=folder)
    return index


def _write(
    folder: Path,
    index: Index,
    name: str,
    chosen: Mapping[str, SampleNumbers],
    source: dict[str, Any],
    disk: Disk,
) -> None:
    """Write the column `name` of one folder. StorageError: The column cannot be written.

    `chosen` has the numbers of the chosen samples of each shard that the user named, by file name. The column is False
    for all other samples. `source` are the options that define the column.
    """
    if chosen.keys() != index.by_name.keys():  # so that `wdskit index` computes the same column
        source = {**source, "shards": sorted(chosen)}
    masks = [np.zeros(entry.num_samples, dtype=np.bool_) for entry in index.entries]
    for entry, mask in zip(index.entries, masks, strict=True):
        mask[chosen.get(entry.name, [])] = True
    try:
        add_columns(index, {name: NewColumn(source, masks)}, disk=disk)
    except OSError as err:
        raise StorageError(f"{folder}: the selection cannot be written: {err.strerror}.", url=str(folder)) from err
