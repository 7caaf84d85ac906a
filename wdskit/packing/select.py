"""`select`: samples chosen as `reshard` chooses them, stored as a column of bool instead of copied."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BinaryIndex, ShardEntry
from wdskit.dataset.columns import SPLIT_COLUMN, Columns, NewColumn, add_columns, check_column_name
from wdskit.dataset.index import FolderIndex, read_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import ShardList
from wdskit.errors import FolderIndexError, PackError, RowError, SelectionError, StorageError, WdskitError
from wdskit.files import Disk
from wdskit.packing.choice import Choice, LeftOut
from wdskit.packing.options import SelectOptions, takes_options
from wdskit.packing.row import Progress
from wdskit.packing.sources.shards import check_indexed
from wdskit.packing.sources.tar_samples import TarSamples, list_tars
from wdskit.shards.parallel import map_shards
from wdskit.storage.urls import is_local

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class SelectResult:
    """What `select` chose.

    Attributes:
        folders: Folders that have the column now.
        name: Its name.
        num_source_shards: Shards that were read.
        num_source_samples: Samples in the shards: `num_samples` and the last three counts together.
        num_samples: Samples that were selected.
        num_sampled_out: Samples outside the share of `sample`.
        num_filtered: Samples for which the filter is false.
        num_missing: Samples that were left out because they lack what the filter asks for.
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
def select(source: str | Sequence[str], name: str, options: SelectOptions) -> SelectResult:
    """Choose samples and store the choice as a column of bool in their folders: `wdskit reshard --selection`.

    Planned sources use it with `split: NAME` or `where: NAME`. The shards do not change. Nothing is selected in shards
    that `source` does not name. `overwrite` replaces a column of this name that was made in another way.

    Args:
        source: Local shards of indexed folders.
        name: Name of the column.
        options: Keyword arguments, each with the name of an option below.

    Raises:
        SelectionError: The name or the filter is invalid, another column has the name, or the filter has no answer
            for a sample.
        FolderIndexError: A folder has no index, or one that does not match its shards.
        PackError, ShardError, StorageError: As `reshard`.
    """
    check_column_name(name)
    column = _source(options)
    found = list_tars(source)
    remote = next((url for url in found.urls if not is_local(url)), None)
    if remote is not None:
        msg = f"{remote}: a selection needs local shards. Make it where the shards are."
        raise PackError(msg)
    _check_sources(found)
    is_checked = options.check == "sha256"
    if is_checked:
        check_indexed(found)
    choose = functools.partial(_choose, choice=options.choice, check=is_checked)
    shards = [(url, entry) for url, entry in zip(found.urls, found.entries, strict=True) if entry is not None]
    num_samples, left_out, total_bytes = 0, LeftOut(), sum(entry.num_bytes for _, entry in shards)
    with contextlib.ExitStack() as stack:
        folders = _folders_of(found)
        indexes = {folder: _locked(stack, folder, name, column, overwrite=options.overwrite) for folder in folders}
        chosen: dict[str, Numbers] = {}
        num_bytes = 0
        with contextlib.closing(map_shards(choose, shards, workers=options.workers)) as results:
            for (url, entry), result in zip(shards, results, strict=True):
                if isinstance(result, WdskitError):
                    raise result
                chosen[url], others = result
                left_out += others
                num_samples += entry.num_samples
                num_bytes += entry.num_bytes
                if options.progress is not None:
                    options.progress(Progress("reading", num_samples, num_bytes, None, total_bytes))
        num_chosen = sum(map(len, chosen.values()))
        if not num_chosen:
            raise SelectionError(f"{name}: none of the {num_samples} samples is selected. Nothing was written.")
        for folder, index in indexes.items():
            _write(Path(folder), index, name, chosen, column, options.disk)
    return SelectResult(
        folders=tuple(map(Path, folders)),
        name=name,
        num_source_shards=len(shards),
        num_source_samples=num_samples,
        num_samples=num_chosen,
        **vars(left_out),
    )


def _choose(shard: tuple[str, ShardEntry], *, choice: Choice, check: bool) -> tuple[Numbers, LeftOut]:
    """Numbers of the samples of a shard that stay, int64 (n,), and how many do not.

    Raises:
        RowError: The shard is damaged.
        SelectionError, ShardError, FolderIndexError, StorageError: As `TarSamples` and `Choice.keeps`.
    """
    url, entry = shard
    numbers, left_out = [], LeftOut()
    for number, sample in enumerate(TarSamples(url, entry, check=check)):
        if isinstance(sample, RowError):
            raise sample
        if choice.keeps(sample, url, left_out):
            numbers.append(number)
    return np.array(numbers, np.int64), left_out


def _source(options: SelectOptions) -> dict[str, Any]:
    """Return what the column is computed from. Equal choices have equal sources."""
    source: dict[str, Any] = {"filter": options.filter}
    source |= {"missing": options.missing} if options.missing != "error" else {}
    return source | ({"sample": options.sample, "seed": options.seed} if options.sample else {})


def _folders_of(found: ShardList) -> list[str]:
    """The folders of the shards, each once however it is spelled."""
    parents = dict.fromkeys(os.path.dirname(url) or "." for url in found.urls)
    return list({os.path.realpath(parent): parent for parent in reversed(parents)}.values())[::-1]


def _check_sources(found: ShardList) -> None:
    for url, entry in zip(found.urls, found.entries, strict=True):
        if entry is None:
            folder = os.path.dirname(url) or "."
            msg = f"{url}: its folder has no index, which a selection needs.\n  Run `wdskit index {folder}`."
            raise FolderIndexError(msg, folder=folder)
    if len({os.path.realpath(url) for url in found.urls}) < len(found.urls):
        raise SelectionError("a shard is named twice, but its samples can be selected only once.")


def _locked(
    stack: contextlib.ExitStack, folder: str, name: str, source: dict[str, Any], *, overwrite: bool
) -> FolderIndex:
    """The folder's index, with its lock held until `stack` is closed."""
    stack.enter_context(lock_folder(Path(folder)))
    index = read_index(folder)
    index.check_files()
    known = Columns(BinaryIndex(Path(folder)))
    splits = known.column(SPLIT_COLUMN).values if SPLIT_COLUMN in known else None
    if name in (splits or ()):
        raise SelectionError(f"{folder}: it has a split {name!r} already. Choose another name.", folder=folder)
    made = dict(known.column(name).source) if name in known else source
    made.pop("shards", None)
    if not overwrite and made != source:
        other = ", ".join(f"{key} {value}" for key, value in known.column(name).source.items())
        msg = f"{folder}: another column has the name {name!r}: {other}."
        raise SelectionError(f"{msg}\n  Choose another, or replace it with --overwrite.", folder=folder)
    return index


def _write(
    folder: Path,
    index: FolderIndex,
    name: str,
    chosen: Mapping[str, Numbers],
    source: dict[str, Any],
    disk: Disk,
) -> None:
    here = os.path.realpath(folder)
    by_name = {
        os.path.basename(url): numbers
        for url, numbers in chosen.items()
        if os.path.realpath(os.path.dirname(url)) == here
    }
    if by_name.keys() != index.by_name.keys():  # so that the column is the same when it is made again
        source = {**source, "shards": sorted(by_name)}
    masks = [np.zeros(entry.num_samples, dtype=np.bool_) for entry in index.entries]
    for entry, mask in zip(index.entries, masks, strict=True):
        mask[by_name.get(entry.name, [])] = True
    try:
        add_columns(BinaryIndex(folder), {name: NewColumn(source, masks)}, disk=disk)
    except OSError as err:
        raise StorageError(f"{folder}: the selection cannot be written: {err.strerror}.", url=str(folder)) from err
