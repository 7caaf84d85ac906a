"""`select`: samples chosen as `reshard` chooses them, stored as a selection beside the index instead of copied."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import ShardEntry
from wdskit.dataset.index import FolderIndex, read_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import ShardList
from wdskit.dataset.selection import check_selection_name, read_head, selection_path, write_selection
from wdskit.errors import FolderIndexError, PackError, RowError, SelectionError, StorageError, WdskitError
from wdskit.files import Disk
from wdskit.limits import MAX_RECIPE_BYTES
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
        folders: Folders that have the selection now.
        name: Its name.
        recipe: The command that makes it, without the source, as the selection stores it.
        num_source_shards: Shards that were read.
        num_source_samples: Samples in the shards: `num_samples` and the last three counts together.
        num_samples: Samples that were selected.
        num_sampled_out: Samples outside the share of `sample`.
        num_filtered: Samples for which the filter is false.
        num_missing: Samples that were left out because they lack what the filter asks for.
    """

    folders: tuple[Path, ...]
    name: str
    recipe: str
    num_source_shards: int
    num_source_samples: int
    num_samples: int
    num_sampled_out: int
    num_filtered: int
    num_missing: int


@takes_options(SelectOptions)
def select(source: str | Sequence[str], name: str, options: SelectOptions) -> SelectResult:
    """Choose samples and store the choice as a selection in their folders: `wdskit reshard --selection`.

    Planned sources use it with `split: NAME`. The shards do not change. Nothing is selected in shards that `source`
    does not name. `overwrite` replaces a selection of this name that was made in another way.

    Args:
        source: Local shards of indexed folders.
        name: Name of the selection.
        options: Keyword arguments, each with the name of an option below.

    Raises:
        SelectionError: The name or the filter is invalid, another selection has the name, or the filter has no answer
            for a sample.
        FolderIndexError: A folder has no index, or one that does not match its shards.
        PackError, ShardError, StorageError: As `reshard`.
    """
    check_selection_name(name)
    recipe = _recipe(name, options)
    found = list_tars(source)
    remote = next((url for url in found.urls if not is_local(url)), None)
    if remote is not None:
        msg = f"{remote}: a selection needs local shards. Make it where the shards are, and upload it."
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
        indexes = {folder: _locked(stack, folder, name, recipe, overwrite=options.overwrite) for folder in folders}
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
            _write(Path(folder), index, name, chosen, recipe, options.disk)
    return SelectResult(
        folders=tuple(map(Path, folders)),
        name=name,
        recipe=recipe,
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


def _recipe(name: str, options: SelectOptions) -> str:
    """Return the command that makes this selection. Equal choices have equal commands."""
    words = ["reshard", "--selection", name]
    words += ["--filter", options.filter] if options.filter else []
    words += ["--missing", options.missing] if options.missing != "error" else []
    words += ["--sample", options.sample, "--seed", str(options.seed)] if options.sample else []
    recipe = shlex.join(words)
    if not recipe.isprintable() or len(recipe.encode()) > MAX_RECIPE_BYTES:
        raise SelectionError(f"{name}: the filter must be one line of text, because the selection stores it.")
    return recipe


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


def _locked(stack: contextlib.ExitStack, folder: str, name: str, recipe: str, *, overwrite: bool) -> FolderIndex:
    """The folder's index, with its lock held until `stack` is closed."""
    stack.enter_context(lock_folder(Path(folder)))
    path = selection_path(Path(folder), name)
    if path.exists() and not overwrite:
        try:
            other = read_head(Path(folder), name).recipe
        except SelectionError:
            other = "damaged"
        if other != recipe:
            msg = (
                f"{path}: another selection has this name: {other}.\n  Choose another, or replace it with --overwrite."
            )
            raise SelectionError(msg, folder=folder)
    index = read_index(folder)
    index.check_files()
    return index


def _write(folder: Path, index: FolderIndex, name: str, chosen: Mapping[str, Numbers], recipe: str, disk: Disk) -> None:
    here = os.path.realpath(folder)
    by_name = {
        os.path.basename(url): numbers
        for url, numbers in chosen.items()
        if os.path.realpath(os.path.dirname(url)) == here
    }
    none = np.zeros(0, dtype=np.int64)
    numbers = [by_name.get(entry.name, none) for entry in index.entries]
    try:
        write_selection(folder, name, numbers, recipe=recipe, disk=disk)
    except OSError as err:
        raise StorageError(f"{folder}: the selection cannot be written: {err.strerror}.", url=str(folder)) from err
