"""Splitting a folder of shards into selections, the same for a sample for ever: `wdskit split`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.binary import BinaryIndex
from wdskit.dataset.index import FolderIndex, ShardEntry, read_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.selection import list_selections, read_head, selection_path, write_selection
from wdskit.errors import FolderIndexError, SelectionError, StorageError, WdskitError
from wdskit.files import DISK, Disk, remove_drafts
from wdskit.shards.index import local_folder
from wdskit.shards.parallel import Progress, choose_workers, read_shards
from wdskit.shards.split_key import (
    Drawn,
    Shares,
    SplitKey,
    choose_splits,
    draw_shard,
    format_shares,
    parse_by,
    parse_shares,
)

_SAMPLE_BYTES = 1 << 10  # a process is worth its start for some 65,000 samples: 30 us each against half a second
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class SplitPart:
    """One split.

    Attributes:
        name: Its selection's name.
        wanted_ratio: Its share as it was asked for, rounded.
        num_samples: Samples in it.
        num_groups: Different values among them of the JSON field that it was split by; None where that was the key.
    """

    name: str
    wanted_ratio: float
    num_samples: int
    num_groups: int | None


@dataclass(frozen=True)
class SplitReport:
    """What `split` did.

    Attributes:
        folder: As it was named.
        parts: The splits, in the order of their shares.
        recipe: The command that makes them, the folder left out, as it stands in the selections.
        num_missing: Samples without the value that it was split by.
    """

    folder: str
    parts: tuple[SplitPart, ...]
    recipe: str
    num_missing: int

    @property
    def num_samples(self) -> int:
        """Samples in all splits, which are those of the folder."""
        return sum(part.num_samples for part in self.parts)


def split(
    folder: str | Path,
    shares: str | Mapping[str, object],
    *,
    by: str = "key",
    seed: int = 0,
    missing: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> SplitReport:
    """Assign each sample of an indexed folder to a split, and write each split as a selection: `wdskit split`.

    A sample's split depends on the seed, the shares, and its key or the value that `by` names, and on nothing else. So
    it keeps its split when shards are added, reordered or packed anew with other sizes; run the same split again then.

    Args:
        folder: A local folder with its index.
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping; they add up to 1.
        by: `key`, or a JSON field and the way to a value in it (`json:patient.id`): samples with the same value stay
            together.
        seed: 0 <= seed < 2**64; another seed gives another split.
        missing: The split that gets the samples without that value; without it, they are an error.
        overwrite: Whether splits that were made otherwise may be replaced. All of such a split go, before the first of
            the new one is written.
        workers: Processes that read; default as for `shards.index.index_folder`. The result does not depend on it.
        progress: Called after each shard.
        disk: What writes.

    Raises:
        SelectionError: The shares or `by` are wrong, samples lack the value, or another split is in the way.
        FolderIndexError: The folder has no index, or one that does not match its shards; or another process is writing.
        ShardError: A shard is invalid. Where several are, all are listed.
        StorageError: There is no such folder, or it cannot be read or written.
    """
    parsed = parse_shares(shares)
    split_key = parse_by(by, seed=seed, may_miss=missing is not None)
    if missing is not None and missing not in parsed:
        raise SelectionError(f"missing: there is no split {missing!r} among {format_shares(parsed)}.")
    recipe = _recipe(parsed, split_key, missing)
    path = local_folder(folder, command="split", done="split")
    with lock_folder(path):
        index = read_index(str(folder))
        index.check_files()
        BinaryIndex(path)  # which binds the selections to the shards: a damaged one is told before anything is read
        in_the_way = _find_others(path, parsed, recipe)
        if in_the_way and not overwrite:
            raise _refusal(path, in_the_way)
        drawn = _draw_all(path, index, split_key, workers, progress)
        parts = _assign(drawn, parsed, missing)
        try:
            _publish(path, parts, in_the_way, recipe, disk)
        except OSError as err:
            raise StorageError(f"{path}: the split cannot be written: {err.strerror}.", url=str(path)) from err
    told = _count(parsed, parts, drawn if split_key.field else None)
    return SplitReport(str(folder), told, recipe, sum(int(shard.missing.sum()) for shard in drawn))


def _recipe(shares: Shares, split_key: SplitKey, missing: str | None) -> str:
    """The command that makes this split, the same for the same split however it was asked for."""
    words = ["split", format_shares(shares)]
    words += ["--by", split_key.text] if split_key.field else []
    words += ["--missing", missing] if missing else []
    words += ["--seed", str(split_key.seed)] if split_key.seed else []
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """The word as a shell reads it."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\\''") + "'"


def _find_others(folder: Path, shares: Shares, recipe: str) -> dict[str, str]:
    """Selections that this split would contradict, with their recipes, "" where one cannot be read.

    Those are the ones of its names that were made otherwise, and what belongs to the same split as such a one: an old
    `val` beside a new `train` may hold the same samples.
    """
    found: dict[str, str] = {}
    for name in list_selections(folder):
        try:
            other = read_head(folder, name).recipe
        except SelectionError:
            other = ""
        if other != recipe and not shares.keys().isdisjoint({name, *_names_in(other)}):
            found[name] = other
    return found


def _names_in(recipe: str) -> list[str]:
    """The names of the splits that a recipe makes."""
    command, _, rest = recipe.partition(" ")
    shares = rest.partition(" ")[0] if command == "split" else ""
    return [part.partition("=")[0] for part in shares.split(",")]


def _refusal(folder: Path, in_the_way: dict[str, str]) -> SelectionError:
    lines = [f"{selection_path(folder, name)}: {recipe or 'damaged'}" for name, recipe in in_the_way.items()]
    msg = f"{folder}: another split is here already, and would be replaced.\n  " + "\n  ".join(lines)
    return SelectionError(f"{msg}\n  Choose other names, or replace it with --overwrite.", folder=str(folder))


def _draw_all(
    folder: Path, index: FolderIndex, split_key: SplitKey, workers: int | None, progress: Progress | None
) -> list[Drawn]:
    """The draws of all shards, or an error that lists those at fault."""
    entries = index.entries
    num_workers = choose_workers(len(entries), index.num_samples * _SAMPLE_BYTES) if workers is None else workers
    paths = [str(folder / entry.name) for entry in entries]
    found: list[Drawn] = []
    faults: list[WdskitError] = []
    draw = partial(draw_shard, split_key=split_key)
    sizes = [entry.num_bytes for entry in entries]
    results = read_shards(draw, paths, sizes, workers=num_workers, progress=progress)
    for entry, result in zip(entries, results, strict=True):
        if isinstance(result, WdskitError):
            faults.append(result)
        elif len(result.draws) != entry.num_samples:
            faults.append(_miscounted(folder, entry, len(result.draws)))
        else:
            found.append(result)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise _listed(folder, faults, len(entries)) from faults[0]
    return found


def _miscounted(folder: Path, entry: ShardEntry, num_samples: int) -> FolderIndexError:
    msg = f"{folder / entry.name}: it has {num_samples} samples, the folder's index says {entry.num_samples}."
    return FolderIndexError(f"{msg}\n  If the shard is right, run `wdskit index {folder}`.", folder=str(folder))


def _listed(folder: Path, faults: list[WdskitError], num_shards: int) -> SelectionError:
    lines = [str(fault) for fault in faults[:_SHOWN_FAULTS]]
    if len(faults) > _SHOWN_FAULTS:
        lines.append(f"... and {len(faults) - _SHOWN_FAULTS} more.")
    msg = f"{folder}: {len(faults)} of {num_shards} shards cannot be split, so nothing was written.\n"
    return SelectionError(msg + "\n".join(lines), folder=str(folder))


def _assign(drawn: list[Drawn], shares: Shares, missing: str | None) -> dict[str, list[NDArray[np.uint32]]]:
    """For each split the numbers of its samples, shard by shard."""
    names = list(shares)
    parts: dict[str, list[NDArray[np.uint32]]] = {name: [] for name in names}
    for draws, is_missing in drawn:
        chosen = choose_splits(draws, shares)
        if missing is not None:
            chosen[is_missing] = names.index(missing)
        for number, name in enumerate(names):
            parts[name].append(np.flatnonzero(chosen == number).astype(np.uint32))
    return parts


def _publish(
    folder: Path, parts: dict[str, list[NDArray[np.uint32]]], in_the_way: dict[str, str], recipe: str, disk: Disk
) -> None:
    """Write the selections. What is in the way is gone for good before the first: two splits are never mixed."""
    remove_drafts(folder, disk=disk)
    for name in in_the_way:
        disk.remove(selection_path(folder, name))
    if in_the_way:
        disk.fsync_folder(folder)
    for name, samples in parts.items():
        write_selection(folder, name, samples, recipe=recipe, disk=disk)


def _count(
    shares: Shares, parts: dict[str, list[NDArray[np.uint32]]], drawn: list[Drawn] | None
) -> tuple[SplitPart, ...]:
    """The splits in numbers; `drawn` where the groups are to be counted."""
    told = []
    for name, share in shares.items():
        num_groups = None
        if drawn is not None:
            pairs = zip(drawn, parts[name], strict=True)
            groups = [np.unique(shard.draws[samples[~shard.missing[samples]]]) for shard, samples in pairs]
            num_groups = len(np.unique(np.concatenate([np.zeros(0, np.uint64), *groups])))
        told.append(SplitPart(name, float(share), sum(map(len, parts[name])), num_groups))
    return tuple(told)
