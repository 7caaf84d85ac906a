"""`pack`: from a source of rows to a folder of shards with its index."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wdskit.dataset.index import ShardEntry, write_index
from wdskit.errors import PackError, RowError, WdskitError
from wdskit.files import DISK, Disk, make_folders, publish_bytes
from wdskit.order.keys import permutation
from wdskit.packing.destination import CLASSES_NAME, REJECTED_NAME, Destination, classes_json, open_destination
from wdskit.packing.fill import ShardJob, check_rows, fill_shard
from wdskit.packing.folder import read_folder
from wdskit.packing.plan import Limits, Names, fill_in_turn, row_bytes
from wdskit.packing.rows import Row, python_rows, row_error
from wdskit.packing.tables import SUFFIXES, Manifest
from wdskit.shards.locking import lock_folder
from wdskit.shards.parallel import map_shards

MAX_SAMPLES = 10_000
MAX_BYTES = 1_000_000_000
_CHECK_ROWS = 256  # rows that a process checks at a time

Progress = Callable[[int, int, int | None, int | None], None]
"""Told now and then: samples and bytes so far, samples and bytes in all (None where that is unknown)."""


@dataclass(frozen=True)
class PackResult:
    """What `pack` wrote.

    Attributes:
        folder: Where.
        entries: The new shards, in order.
        num_samples: Samples in them.
        num_bytes: Bytes of their files.
        classes: Number of each class by name; empty where the source has none.
        rejected: Rows that were left out by `skip_bad`, in order.
        num_other: Files of an image folder that are no images.
        seconds: How long it took.
    """

    folder: Path
    entries: tuple[ShardEntry, ...]
    num_samples: int
    num_bytes: int
    classes: Mapping[str, int]
    rejected: tuple[RowError, ...]
    num_other: int
    seconds: float


@dataclass
class _Source:
    """Rows, and what is known of where they come from."""

    rows: Iterable[Row | RowError]
    is_stream: bool = False
    classes: dict[str, int] = field(default_factory=dict)
    num_other: int = 0
    rejected: list[RowError] = field(default_factory=list)


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    max_samples: int = MAX_SAMPLES,
    max_bytes: int = MAX_BYTES,
    shuffle: int | None = None,
    workers: int = 1,
    pattern: str | None = None,
    skip_bad: bool = False,
    keys: str = "given",
    append: bool = False,
    image_column: str | None = None,
    key_column: str | None = None,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, whatever the number of workers, the time, the locale or the order
    in which a disk lists its files. No final name ever holds unfinished bytes, and the index comes last.

    Args:
        source: A folder of images (a sub-folder is a class), a manifest (.jsonl, .csv), or rows: dicts of `__key__` and
            fields, whose values are bytes, a `pathlib.Path`, or what the field's name stands for (`cls` an int, ...).
        dest: The folder to write to; created where it is missing.
        max_samples: Most samples in a shard.
        max_bytes: Most bytes of a shard's file.
        shuffle: Seed of a permutation of all rows; None keeps their order.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, as for all that spawns.
        pattern: Names of the shards, `train-%06d.tar`; by default from the name of `dest`.
        skip_bad: Leave bad rows out and list them in `rejected.jsonl`, instead of stopping at the first.
        keys: "given", or "hashed": a hash of the image's path, for paths that not every reader would give back.
        append: Add to a folder that is indexed already.
        image_column: Of a manifest; see `packing.tables.Manifest`.
        key_column: Of a manifest.
        progress: Called after each sample, or with several workers after each shard.
        disk: What writes.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: Nothing to pack, a bad option, or the folder cannot be written or is not free.
        FolderIndexError: Another process is writing there, or the index that is to be added to is not right.
    """
    start = time.perf_counter()
    if keys not in ("given", "hashed"):
        raise PackError(f"keys: {keys!r} is neither 'given' nor 'hashed'.")
    if workers < 1:
        raise PackError(f"workers: {workers} is too small; 1 is this process.")
    folder = Path(dest)
    limits = Limits(max_samples, max_bytes)
    names = Names(pattern or f"{_stem(folder)}-%06d.tar")
    found = _find_rows(source, keys, image_column, key_column)
    if found.is_stream and (workers > 1 or shuffle is not None):
        what = "workers" if workers > 1 else "shuffle"
        raise PackError(
            f"{what}: rows that can be read once only are packed in one pass. Give a list, or leave it out."
        )
    rows: Iterable[Row] = _unique(_good(found, skip_bad=skip_bad, workers=workers))
    rows = rows if found.is_stream else _shuffled(list(rows), shuffle)
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        raise PackError(f"{_named(source)}: there is nothing to pack ({len(found.rejected)} rows were rejected).")
    if found.is_stream:
        rows = itertools.chain([first], iterator)
    try:
        make_folders(folder, disk=disk)
    except OSError as err:
        raise PackError(f"{folder}: cannot be created: {err.strerror}.") from err
    with lock_folder(folder):
        target = open_destination(folder, append=append, classes=found.classes, disk=disk)
        entries = _fill(rows, target, names, limits, workers=workers, progress=progress, disk=disk)
        target.check_strays(entries)
        try:
            _publish_lists(folder, found, append=append, disk=disk)
            write_index(folder, (*target.entries, *entries), disk=disk)
        except OSError as err:
            raise PackError(f"{folder}: cannot be written: {err.strerror or err}.") from err
    return PackResult(
        folder=folder,
        entries=tuple(entries),
        num_samples=sum(entry.num_samples for entry in entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        classes=found.classes,
        rejected=tuple(found.rejected),
        num_other=found.num_other,
        seconds=time.perf_counter() - start,
    )


def _stem(folder: Path) -> str:
    """What shards are called by default: the folder's name, so that basenames differ between folders."""
    return folder.resolve().name or "shard"


def _named(source: object) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the rows"


def _find_rows(source: Any, keys: str, image_column: str | None, key_column: str | None) -> _Source:
    """What kind of source this is, and its rows."""
    if not isinstance(source, (str, os.PathLike)):
        rows = python_rows(source, keys=keys)
        return _Source(rows, is_stream=not isinstance(source, Sequence))
    path = os.fspath(source)
    is_manifest = path.lower().endswith(SUFFIXES)
    if not is_manifest and (image_column or key_column):
        raise PackError(f"{path}: image and key columns belong to a manifest ({', '.join(SUFFIXES)}).")
    if os.path.isdir(path):
        folder = read_folder(path)
        return _Source(folder.rows(keys=keys), classes=folder.classes, num_other=folder.num_other)
    if not os.path.exists(path):
        raise PackError(f"{path}: there is no such folder or file.")
    if not is_manifest:
        raise PackError(f"{path}: this is neither a folder nor a manifest ({', '.join(SUFFIXES)}).")
    return _Source(Manifest(path, image_column, key_column).rows(keys=keys))


def _good(found: _Source, *, skip_bad: bool, workers: int) -> Iterator[Row]:
    """The rows that can be packed; bad ones are raised, or noted as rejected."""
    if not skip_bad:
        for row in found.rows:
            if isinstance(row, RowError):
                raise row
            yield row
        return
    if found.is_stream:
        checked: Iterable[Row | RowError] = (
            row if isinstance(row, RowError) else check_rows([row])[0] or row for row in found.rows
        )
    else:
        checked = _checked(list(found.rows), workers)
    for row in checked:
        if isinstance(row, RowError):
            found.rejected.append(row)
        else:
            yield row


def _checked(rows: list[Row | RowError], workers: int) -> Iterator[Row | RowError]:
    """The rows, bad ones replaced by their errors, read in several processes."""
    good = [row for row in rows if isinstance(row, Row)]
    chunks = [good[at : at + _CHECK_ROWS] for at in range(0, len(good), _CHECK_ROWS)]
    verdicts = itertools.chain.from_iterable(map(_raise_error, map_shards(check_rows, chunks, workers=workers)))
    return (row if isinstance(row, RowError) else next(verdicts) or row for row in rows)


def _raise_error(result: Any) -> Any:
    if isinstance(result, WdskitError):
        raise result
    return result


def _unique(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, each with a key of its own.

    Raises:
        RowError: Two rows have one key.
    """
    places: dict[str, str] = {}
    for row in rows:
        other = places.setdefault(row.key, row.where)
        if other is not row.where:
            raise row_error(
                row.where, f"its key {row.key!r} is that of {other} too", "Keys must be unique. Rename one."
            )
        yield row


def _shuffled(rows: list[Row], seed: int | None) -> list[Row]:
    if seed is None:
        return rows
    if not 0 <= seed < 1 << 64:
        raise PackError(f"shuffle: the seed {seed} must be 0 or more, and below 2**64.")
    return [rows[at] for at in permutation(len(rows), "pack-shuffle", seed)]


def _fill(
    rows: Iterable[Row],
    target: Destination,
    names: Names,
    limits: Limits,
    *,
    workers: int,
    progress: Progress | None,
    disk: Disk,
) -> list[ShardEntry]:
    """Fill the shards, in this process or in several, and return their lines of the index in order."""
    rows = target.refuse_taken(rows) if target.entries else rows
    total: tuple[int, int] | tuple[None, None] = (None, None)
    first = target.first_number(names)
    if isinstance(rows, list) or target.entries:
        rows = list(rows)
        total = len(rows), sum(map(row_bytes, rows))
    jobs: Iterable[ShardJob] = (
        ShardJob(target.folder / names[first + number], tuple(shard))
        for number, shard in enumerate(fill_in_turn(rows, limits))
    )
    done = [0, 0]

    def tell(num_samples: int, num_bytes: int) -> None:
        done[0] += num_samples
        done[1] += num_bytes
        if progress:
            progress(*done, *total)

    if workers == 1:
        return [fill_shard(job, disk=disk, on_sample=tell) for job in jobs]
    entries = []
    for entry in map(_raise_error, map_shards(functools.partial(fill_shard, disk=disk), list(jobs), workers=workers)):
        entries.append(entry)
        tell(entry.num_samples, entry.num_bytes)
    return entries


def _publish_lists(folder: Path, found: _Source, *, append: bool, disk: Disk) -> None:
    """Write `classes.json` and `rejected.jsonl`, where there is something to write."""
    if found.classes:
        publish_bytes(folder / CLASSES_NAME, classes_json(found.classes), disk=disk)
    path = folder / REJECTED_NAME
    before = path.read_bytes() if append and path.exists() else b""
    lines = [json.dumps({"where": err.where, "reason": err.problem}, ensure_ascii=False) for err in found.rejected]
    if lines:
        publish_bytes(path, before + "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"), disk=disk)
    elif not append:
        disk.remove(path)
