"""`pack`: from a source of rows to a folder of shards with its index."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wdskit.dataset.index import ShardEntry, write_index
from wdskit.errors import PackError, RowError
from wdskit.files import DISK, Disk, make_folders, remove_drafts
from wdskit.packing.destination import Destination, check_place, look_at_destination, open_destination
from wdskit.packing.kinds import SourceOptions, find_source
from wdskit.packing.options import PackOptions
from wdskit.packing.plan import Names, make_limits
from wdskit.packing.planning import Jobs, PackPlan, divide_rows, read_rows
from wdskit.packing.running import fill_all, fill_stream
from wdskit.packing.sources import Progress, Source, Tell
from wdskit.packing.spool import ROWS_IN_MEMORY, Spool
from wdskit.shards.also import check_names, publish_beside_folder
from wdskit.shards.locking import lock_folder, wait_for_workers
from wdskit.storage.urls import is_local, local_path


@dataclass(frozen=True)
class PackResult:
    """What `pack` wrote.

    Attributes:
        folder: Where.
        entries: The new shards, in order; none after a dry run.
        num_samples: Samples in them, or in the plan of a dry run.
        num_bytes: Bytes of their files.
        classes: Number of each class by name; empty where the source has none.
        rejected: Rows that were left out by `skip_bad`, in order.
        num_other: Files of an image folder that are no images.
        seconds: How long it took.
        plan: What was planned; None for rows that can be read once only.
    """

    folder: Path
    entries: tuple[ShardEntry, ...]
    num_samples: int
    num_bytes: int
    classes: Mapping[str, int]
    rejected: tuple[RowError, ...]
    num_other: int
    seconds: float
    plan: PackPlan | None = None


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    num_shards: int | None = None,
    multiple_of: int | None = None,
    shuffle: int | None = None,
    workers: int = 1,
    pattern: str | None = None,
    skip_bad: bool = False,
    keys: str = "given",
    append: bool = False,
    dry_run: bool = False,
    from_: str | None = None,
    side_cars: Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    image_column: str | None = None,
    key_column: str | None = None,
    also: Sequence[str] = (),
    split_name: str = "",
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
        max_samples: Most samples in a shard. Default: 10,000; with `num_shards`, any number.
        max_bytes: Most bytes of a shard's file. Default: 1 GB; with `num_shards`, any number.
        num_shards: So many shards, equal within one sample.
        multiple_of: A multiple of this number of shards, the least within the limits, equal within one sample: ranks
            times workers, so that each has as many shards and samples as the others.
        shuffle: Seed of a permutation of all rows; None keeps their order.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, as for all that spawns.
        pattern: Names of the shards, `train-%06d.tar`; by default from the name of `dest`.
        skip_bad: Leave bad rows out and list them in `rejected.jsonl`, instead of stopping at the first. All are read
            twice then, unless they come from a generator. Two rows of one key are an error nevertheless.
        keys: "given", or "hashed": a hash of the image's path, or of the key where a row has one, for names that not
            every reader would give back. Path and key stand in `json`.
        append: Add to a folder that is indexed already. Its shards are read, for their keys.
        dry_run: Only plan: `plan` of the result tells what would be written, and nothing is.
        from_: What kind of source it is (a name of `packing.kinds.KINDS`), where its path does not say so.
        side_cars: Of an image folder: extensions of the files beside an image that belong to its sample (`json`,
            `txt`, `seg.png`). What a `json` says and what is known of the image both stand in the sample's `json`.
        images: Of COCO annotations: the folder of their images; by default that of the file.
        image_column: Of a table; see `packing.records.Records`, and `packing.arrow_columns.sort_columns`.
        key_column: Of a table.
        also: Files for other readers beside the shards: some of `shards.also.KINDS`. With `append` those that are there
            are renewed, and no others can be asked for.
        split_name: The split that timm and energon are told for all shards; by default what the shards are called.
        progress: Called now and then while rows are read and checked, after each sample that is written, or with
            several workers after each shard.
        disk: What writes.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: Nothing to pack, a bad option, or the folder cannot be written or is not free.
        FolderIndexError: Another process is writing there, or the index that is to be added to is not right.
    """
    start = time.perf_counter()
    options = PackOptions(
        limits=make_limits(max_samples, max_bytes, num_shards=num_shards, multiple_of=multiple_of),
        pattern=pattern,
        shuffle=shuffle,
        skip_bad=skip_bad,
        keys=keys,
        append=append,
        workers=workers,
        dry_run=dry_run,
        also=also,
        split_name=split_name,
    )
    with _told_as_pack_errors(Path(dest)):
        folder = _folder(os.fsdecode(dest))
        names = _names(folder, pattern)
        check_place(folder, source, append=append)
    how = SourceOptions(from_, keys, image_column, key_column, side_cars, None if images is None else os.fspath(images))
    found = find_source(source, how)
    if found.is_stream:
        options.check_stream()
    tell = progress or _say_nothing
    with contextlib.ExitStack() as stack:
        place = _find_place(stack, folder, found, options, disk)
        spool = stack.enter_context(Spool(place.room, disk=disk, most=None if found.is_held else ROWS_IN_MEMORY))
        jobs = None if found.is_stream else _plan(found, place, spool, names, options, tell)
        plan = jobs.plan() if jobs else None
        if dry_run:
            return _result(folder, found, (), plan, start)
        if jobs is None:
            entries = fill_stream(found, place.open, names, options, tell=tell, disk=disk)
        else:
            entries = fill_all(jobs, workers=workers, tell=tell, disk=disk)
        spool.close()
        _complete(place.open(), found, entries, options, disk)
    return _result(folder, found, entries, plan, start)


class _Place(NamedTuple):
    """Where a run works: opened when it is needed.

    Attributes:
        folder: The folder that is packed into.
        open: What is known of it, once it is looked at.
        room: A folder for a plan that is too large for memory.
    """

    folder: Path
    open: Callable[[], Destination]
    room: Callable[[], Path]


def _find_place(stack: contextlib.ExitStack, folder: Path, found: Source, options: PackOptions, disk: Disk) -> _Place:
    """Where to work: the folder is made, and locked, when the plan is whole or goes to disk, so that what is wrong
    before leaves no trace.
    """
    if options.dry_run:
        look = functools.partial(look_at_destination, folder, append=options.append, classes=found.classes)
        return _Place(folder, look, lambda: Path(stack.enter_context(tempfile.TemporaryDirectory())))
    opened = functools.partial(_opened, folder, append=options.append, classes=found.classes, disk=disk)
    open_once = functools.cache(lambda: stack.enter_context(opened()))
    return _Place(folder, open_once, lambda: open_once().folder)


@contextlib.contextmanager
def _opened(folder: Path, *, append: bool, classes: Mapping[str, int], disk: Disk) -> Iterator[Destination]:
    """The folder, made and locked while the block runs."""
    with _told_as_pack_errors(folder):
        make_folders(folder, disk=disk)
    with lock_folder(folder), _tidied(folder, disk):
        with _told_as_pack_errors(folder):
            wait_for_workers(folder)
            target = open_destination(folder, append=append, classes=classes, disk=disk)
        yield target


def _complete(
    target: Destination, found: Source, entries: Sequence[ShardEntry], options: PackOptions, disk: Disk
) -> None:
    """Write what stands beside the shards, the index last."""
    also = target.beside(options.also, options.split_name)
    with _told_as_pack_errors(target.folder):
        lists = target.lists(found.classes, found.rejected)
        target.check_lists(lists)
        target.check_strays(entry.name for entry in entries)
        target.publish_lists(lists, disk=disk)
        together = (*target.entries, *entries)
        publish_beside_folder(target.folder, together, also=also, before=target.also, earlier=target.entries, disk=disk)
        write_index(target.folder, together, also=also, disk=disk)


def _result(
    folder: Path, found: Source, entries: Sequence[ShardEntry], plan: PackPlan | None, start: float
) -> PackResult:
    written = entries or (plan.shards if plan else ())
    return PackResult(
        folder=folder,
        entries=tuple(entries),
        num_samples=sum(shard.num_samples for shard in written),
        num_bytes=sum(shard.num_bytes for shard in written),
        classes=found.classes,
        rejected=tuple(found.rejected),
        num_other=found.num_other,
        seconds=time.perf_counter() - start,
        plan=plan,
    )


def _plan(found: Source, place: _Place, spool: Spool, names: Names, options: PackOptions, tell: Tell) -> Jobs:
    """Plan everything, and refuse what is in the way, before anything is written."""
    with _told_as_pack_errors(place.folder):
        kept = read_rows(found, spool, skip_bad=options.skip_bad, workers=options.workers, tell=tell)
        target = place.open()
        target.check_keys(spool, kept, tell)
        order, spans = divide_rows(spool, kept, limits=options.limits, shuffle=options.shuffle)
        also = target.beside(options.also, options.split_name)
        jobs = Jobs(target.folder, spool, order, spans, names, target.first_number(names), also)
        shards = jobs.plan().shards
        target.check_free(shards)
        check_names([*(entry.name for entry in target.entries), *(shard.name for shard in shards)], also)
        target.check_lists(target.lists(found.classes, found.rejected))
    return jobs


def _say_nothing(_: Progress) -> None:
    """Progress where nobody looks."""


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
