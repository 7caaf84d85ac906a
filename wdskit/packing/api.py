"""`pack`: from a source of rows to a folder of shards with its index."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.index import ShardEntry, write_index
from wdskit.errors import PackError, RowError, WdskitError
from wdskit.files import DISK, Disk, make_folders, remove_drafts
from wdskit.order.keys import permutation
from wdskit.packing.destination import Destination, check_place, open_destination
from wdskit.packing.fill import OnSample, ShardJob, fill_shard
from wdskit.packing.kinds import SourceOptions, find_source
from wdskit.packing.plan import Limits, Names, fill_in_turn
from wdskit.packing.rows import Row
from wdskit.packing.sources import Progress, Source, Tell, good_rows
from wdskit.packing.workers import fill_in_worker, wait_for_workers
from wdskit.shards.locking import lock_folder
from wdskit.shards.parallel import map_shards
from wdskit.storage.urls import is_local, local_path
from wdskit.tar.writer import END_BYTES

MAX_SAMPLES = 10_000
MAX_BYTES = 1_000_000_000


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
    from_: str | None = None,
    side_cars: Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    image_column: str | None = None,
    key_column: str | None = None,
    progress: Tell | None = None,
    disk: Disk = DISK,
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, whatever the number of workers, the time, the locale or the order
    in which a disk lists its files. No final name ever holds unfinished bytes, and the index comes last. A run that was
    stopped is done again by the same call; no file that holds something else is overwritten.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, with .gz or without, or
            .parquet); COCO annotations (.json); a folder that `datasets` saved; tars or zips; of Parquet files, tars
            and zips a folder or a pattern too. `-` for paths on standard input. Or rows: dicts of `__key__` and fields,
            whose values are bytes, a `pathlib.Path`, or what the field's name stands for (`cls` an int, ...). Rows that
            can be read once only, as from a generator or standard input, are packed while they come.
        dest: The folder to write to; created where it is missing. Not in the source.
        max_samples: Most samples in a shard.
        max_bytes: Most bytes of a shard's file.
        shuffle: Seed of a permutation of all rows; None keeps their order.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, as for all that spawns.
        pattern: Names of the shards, `train-%06d.tar`; by default from the name of `dest`.
        skip_bad: Leave bad rows out and list them in `rejected.jsonl`, instead of stopping at the first. All are read
            twice then, unless they come from a generator. Two rows of one key are an error nevertheless.
        keys: "given", or "hashed": a hash of the image's path, or of the key where a row has one, for names that not
            every reader would give back. Path and key stand in `json`.
        append: Add to a folder that is indexed already. Its shards are read, for their keys.
        from_: What kind of source it is (a name of `packing.kinds.KINDS`), where its path does not say so.
        side_cars: Of an image folder: extensions of the files beside an image that belong to its sample (`json`,
            `txt`, `seg.png`). What a `json` says and what is known of the image both stand in the sample's `json`.
        images: Of COCO annotations: the folder of their images; by default that of the file.
        image_column: Of a table; see `packing.records.Records`, and `packing.arrow_columns.sort_columns`.
        key_column: Of a table.
        progress: Called now and then while rows are read and checked, after each sample that is written, or with
            several workers after each shard.
        disk: What writes.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: Nothing to pack, a bad option, or the folder cannot be written or is not free.
        FolderIndexError: Another process is writing there, or the index that is to be added to is not right.
    """
    start = time.perf_counter()
    _check_options(keys, workers, shuffle)
    limits = Limits(max_samples, max_bytes)
    with _told_as_pack_errors(Path(dest)):
        folder = _folder(os.fsdecode(dest))
        names = _names(folder, pattern)
        check_place(folder, source, append=append)
    images = None if images is None else os.fspath(images)
    found = find_source(source, SourceOptions(from_, keys, image_column, key_column, side_cars, images))
    if found.is_stream and (workers > 1 or shuffle is not None):
        what = "workers" if workers > 1 else "shuffle"
        raise PackError(
            f"{what}: rows that can be read once only are packed in one pass. Give a list, or leave it out."
        )
    tell = progress or _say_nothing
    rows = _first_read(found, good_rows(found, skip_bad=skip_bad, workers=workers, tell=tell), shuffle)
    with _told_as_pack_errors(folder):
        make_folders(folder, disk=disk)
    with lock_folder(folder), _tidied(folder, disk):
        with _told_as_pack_errors(folder):
            wait_for_workers(folder)
            target = open_destination(folder, append=append, classes=found.classes, disk=disk)
        entries = _fill(rows, found, target, names, limits, workers=workers, tell=tell, disk=disk)
        with _told_as_pack_errors(folder):
            lists = target.lists(found.classes, found.rejected)
            target.check_lists(lists)
            target.check_strays(entry.name for entry in entries)
            target.publish_lists(lists, disk=disk)
            write_index(folder, (*target.entries, *entries), disk=disk)
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


def _say_nothing(_: Progress) -> None:
    """Progress where nobody looks."""


def _check_options(keys: str, workers: int, shuffle: int | None) -> None:
    if keys not in ("given", "hashed"):
        raise PackError(f"keys: {keys!r} is neither 'given' nor 'hashed'.")
    if type(workers) is not int or workers < 1:
        raise PackError(f"workers: {workers!r} is no number of processes; 1 is this one.")
    if shuffle is not None and (type(shuffle) is not int or not 0 <= shuffle < 1 << 64):
        raise PackError(f"shuffle: the seed {shuffle!r} must be 0 or more, and below 2**64.")


def _folder(dest: str) -> Path:
    """The folder to write to."""
    if not dest or "\x00" in dest:
        raise PackError(f"{dest!r} is no folder to pack into. Write . for this one.")
    if not is_local(dest):
        raise PackError(f"{dest}: only a local folder can be packed into.")
    folder = Path(local_path(dest))
    if folder.exists() and not folder.is_dir():
        raise PackError(f"{dest}: this is a file, not a folder to pack into.")
    return folder


def _names(folder: Path, pattern: str | None) -> Names:
    """What the shards are called: by default as the folder, so that basenames differ between folders."""
    if pattern is not None:
        return Names(pattern)
    try:
        return Names(f"{os.path.basename(os.path.abspath(folder)) or 'shard'}-%06d.tar")
    except PackError as err:
        raise PackError(
            f"{folder}: shards cannot be called after this folder. Name them: --pattern train-%06d.tar."
        ) from err


def _first_read(found: Source, rows: Iterator[Row], shuffle: int | None) -> Iterable[Row]:
    """The rows, of which there is one at least: a list, unless they are a stream.

    Raises:
        PackError: There is none.
    """
    first = next(rows, None)
    if first is None:
        raise found.nothing()
    if found.is_stream:
        return itertools.chain([first], rows)
    in_order = [first, *rows]
    return in_order if shuffle is None else [in_order[at] for at in permutation(len(in_order), "pack-shuffle", shuffle)]


@contextlib.contextmanager
def _tidied(folder: Path, disk: Disk) -> Iterator[None]:
    """After a fault or Ctrl-C remove drafts, which workers that were stopped leave."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_drafts(folder, disk=disk)
        raise


@contextlib.contextmanager
def _told_as_pack_errors(folder: Path) -> Iterator[None]:
    """Faults of the disk as an error with the folder's name."""
    try:
        yield
    except OSError as err:
        raise PackError(f"{folder}: cannot be written: {err.strerror or err}.") from err


def _fill(
    rows: Iterable[Row],
    found: Source,
    target: Destination,
    names: Names,
    limits: Limits,
    *,
    workers: int,
    tell: Tell,
    disk: Disk,
) -> list[ShardEntry]:
    """Fill the shards, in this process or in several, and return their lines of the index in order."""
    rows = target.refuse_taken(rows, tell) if target.append else rows
    first = target.first_number(names)
    jobs: Iterable[ShardJob] = (
        ShardJob(target.folder / names[first + number], shard.rows, shard.num_bytes)
        for number, shard in enumerate(fill_in_turn(rows, limits))
    )
    total: tuple[int, int] | tuple[None, None] = (None, None)
    if not found.is_stream:
        jobs = list(jobs)
        total = sum(len(job.rows) for job in jobs), sum(job.num_bytes - END_BYTES for job in jobs)
        with _told_as_pack_errors(target.folder):
            target.check_free(jobs)
            target.check_lists(target.lists(found.classes, found.rejected))
    done = [0, 0]
    tell(Progress("packing", 0, 0, *total))

    def count(num_samples: int, num_bytes: int) -> None:
        done[0] += num_samples
        done[1] += num_bytes
        tell(Progress("packing", done[0], done[1], *total))

    if workers > 1:
        jobs = list(jobs)
        if len(jobs) > 1:
            return _fill_in_workers(jobs, workers=workers, count=count, disk=disk)
    return [fill_shard(job, disk=disk, on_sample=count) for job in jobs]


def _fill_in_workers(jobs: list[ShardJob], *, workers: int, count: OnSample, disk: Disk) -> list[ShardEntry]:
    entries = []
    for entry in map_shards(functools.partial(fill_in_worker, disk=disk), jobs, workers=workers):
        if isinstance(entry, WdskitError):
            raise entry
        entries.append(entry)
        count(entry.num_samples, entry.num_bytes - END_BYTES)
    return entries
