"""`pack`: from a source of rows to a folder of shards with its index."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.index import ShardEntry, read_index
from wdskit.dataset.lock import lock_folder, wait_for_workers
from wdskit.dataset.unfinished import run_folders
from wdskit.errors import FolderIndexError, PackError, RowError, ShardError, StorageError
from wdskit.files import DISK, Disk, describe_missing, read_own, remove_temp_files
from wdskit.packing.destination import (
    Destination,
    finish_what_was_stopped,
    folder_of,
    raised_as_pack_errors,
)
from wdskit.packing.journal import (
    find_last_run,
    finish_publishing,
    is_publishing,
    remove_finished,
    remove_locks,
)
from wdskit.packing.options import PackOptions, WriteOptions, takes_options
from wdskit.packing.plan import PackPlan
from wdskit.packing.ray import import_ray
from wdskit.packing.run import open_work, pack_planned, plan_jobs, publish_all, read_plan
from wdskit.packing.sources import Duplicate, Source, find_source
from wdskit.packing.staging import LIST_NAMES, Staging, check_runs, read_description, read_filled
from wdskit.packing.stream import pack_stream
from wdskit.packing.upload import Upload, open_upload
from wdskit.shards.export import export, outdated
from wdskit.text import format_bytes, plural

_SHOWN_SHARDS = 10


@dataclass(frozen=True)
class PackResult:
    """What `pack` wrote.

    Attributes:
        folder: Where the shards are: a path, or a URL as text.
        entries: The new shards, in order; none after a dry run.
        num_samples: Samples in them, or in the plan of a dry run.
        num_bytes: Bytes of their files.
        classes: Number of each class by name; empty where the source has none.
        rejected: Rows that were left out by `skip_bad`, in order.
        num_other: Files of an image folder that are not images.
        seconds: How long it took.
        plan: What was planned; None for rows that can be read once only.
        duplicates: Rows whose images an earlier row has, in order, if that was asked for.
        dry_run: Nothing was written.
        was_done: The folder already held all of it, so there was nothing to do.
        num_cleaned: Rows whose keys were changed, by `keys="clean"`.
        source: What was packed, and the kind of source that was detected: `photos: image folder`. Empty for rows from
            Python.
        notes: Sentences about images with an EXIF orientation or several frames, which decoding ignores: their number
            in the shards that this call filled, and the first; none with `validate` "none" or "magic". And whether
            exported files are outdated.
    """

    folder: Path | str
    entries: tuple[ShardEntry, ...]
    num_samples: int
    num_bytes: int
    classes: Mapping[str, int]
    rejected: tuple[RowError, ...]
    num_other: int
    seconds: float
    plan: PackPlan | None = None
    duplicates: tuple[Duplicate, ...] = ()
    dry_run: bool = False
    was_done: bool = False
    num_cleaned: int = 0
    source: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the folder, samples, shards, size and time."""
        shards = self.plan.shards if self.plan and self.dry_run else self.entries
        size = f"{plural(self.num_samples, 'sample')} in {plural(len(shards), 'shard')}"
        size += "" if self.dry_run else f", {format_bytes(self.num_bytes)}, {self.seconds:.1f} s"
        return f"PackResult({self.folder}: {'would write ' if self.dry_run else ''}{size})"


@takes_options(PackOptions)
def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], dest: str | os.PathLike[str], options: PackOptions
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes. The number of workers, the time, the locale and the order in which
    a disk lists its files change nothing. A file gets its final name only when it is complete, and the index is written
    last. After a stop, the same call continues the run. Only `overwrite` replaces files with other content.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, also with .gz, or .parquet);
            COCO annotations (.json); a folder that `datasets` saved; tars or zips. Several Parquet files, tars or zips
            can be a folder or a pattern. Tars may be in a store: `s3://bucket/old/*.tar`. `-` reads paths from standard
            input. Or rows: dicts of `__key__` and fields, whose values are bytes, a `pathlib.Path`, or the type that
            belongs to the field's name (`cls` an int, ...). Rows that can be read only once, from a generator or
            standard input, are packed as they arrive.
        dest: The folder to write to, created if it is missing. It cannot be inside the source. Or a folder of a bucket,
            `s3://bucket/train`: each shard is uploaded when it is filled, and removed here; the index is uploaded last.
        options: Keyword arguments, each with the name of an option below. docs/pack.md explains them.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: There is nothing to pack, an option is wrong, or the folder cannot be written or is not free.
        SelectionError: The shares of `split` are wrong.
        FolderIndexError: Another process is writing there, or the index to add to is invalid.
        StorageError: The bucket cannot be read or written.
    """
    upload = open_upload(os.fsdecode(dest), options)
    if upload is not None:
        with upload, upload.named():
            result = _pack(source, upload.folder, options, upload=upload)
        return dataclasses.replace(result, folder=upload.url)
    with raised_as_pack_errors(Path(dest)):
        folder = folder_of(os.fsdecode(dest))
    result = _pack(source, folder, options)
    return dataclasses.replace(result, notes=(*result.notes, *export_packed(folder, options)))


def export_packed(folder: Path, options: WriteOptions) -> tuple[str, ...]:
    """Export a folder that a run has published, as its options say.

    Returns:
        Notes: files that a user has changed and that were not replaced, and exports that are outdated.

    Raises:
        PackError: The files cannot be written.
    """
    if options.dry_run or options.part is not None:
        return ()
    notes = []
    if options.export:
        try:
            report = export(folder, options.export, split_name=options.split_name, disk=options.disk)
        except (FolderIndexError, ShardError, StorageError) as err:
            msg = f"{folder}: its shards are packed, but not exported: {err}\n  Then run `wdskit export`."
            raise PackError(msg) from err
        notes += [
            f"{name} was changed by hand and was not replaced. Check that it fits the new shards."
            for name in report.kept
        ]
    notes += filter(None, [outdated(folder)])
    return tuple(notes)


def _pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    folder: Path,
    options: PackOptions,
    *,
    upload: Upload | None = None,
) -> PackResult:
    start = time.perf_counter()
    finish_what_was_stopped(folder, source, options, options.disk)
    found = find_source(source, options)
    if found.is_stream:
        options.check_stream()
    if options.on is not None and not options.dry_run:
        import_ray()
    with contextlib.ExitStack() as stack:
        work = open_work(stack, folder, found, options, progress=options.progress, disk=options.disk, upload=upload)
        if found.is_stream:
            target, streamed = pack_stream(work, skip_bad=options.skip_bad)
            return _result(target, found, streamed, None, start)
        plan = read_plan(work, skip_bad=options.skip_bad)
        target, run, jobs = plan_jobs(work, plan)
        shown = jobs.describe()
        entries = None if options.dry_run else pack_planned(work, target, run, jobs)
    return _result(target, found, entries, shown, start)


def finish_pack(dest: str | os.PathLike[str], *, disk: Disk = DISK) -> PackResult:
    """Write the index of a folder whose shards were filled in parts: `wdskit pack-finish`.

    The index has the same bytes as that of a single run. The shards are not read: each part stored their digests. If
    any run stopped while it published its shards, this completes it.

    Args:
        dest: The folder.
        disk: Performs the file operations; tests replace it.

    Raises:
        PackError: No part was packed there, or shards are missing; the message names them and their parts.
        FolderIndexError: A part, or another process, is writing there.
    """
    start = time.perf_counter()
    with raised_as_pack_errors(Path(dest)):
        folder = folder_of(os.fsdecode(dest))
        if not folder.is_dir():
            raise PackError(f"{folder}: {describe_missing(str(folder), 'folder')}")
    with lock_folder(folder), raised_as_pack_errors(folder):
        entries, was_done = _publish_parts(folder, disk)
    return PackResult(
        folder=folder,
        entries=tuple(entries),
        num_samples=sum(entry.num_samples for entry in entries),
        num_bytes=sum(entry.num_bytes for entry in entries),
        classes={},
        rejected=(),
        num_other=0,
        seconds=time.perf_counter() - start,
        was_done=was_done,
        notes=tuple(filter(None, [outdated(folder)])),
    )


def _publish_parts(folder: Path, disk: Disk) -> tuple[Sequence[ShardEntry], bool]:
    """Publish a run whose shards were filled in parts. The folder's lock is held.

    Returns:
        The shards, and whether they had been published already.

    Raises:
        PackError: Nothing was begun here, or shards are missing; it names them and their parts.
    """
    check_runs(folder)
    if is_publishing(folder):
        finish_publishing(folder, disk)
        last = find_last_run(folder)
        return (last.entries if last is not None else ()), True
    last = find_last_run(folder)
    remove_finished(folder, last, disk)
    runs = [(path, run) for path in run_folders(folder) if (run := read_description(path)) is not None]
    if not runs:
        if last is not None:
            remove_locks(folder, disk)
            return last.entries, True
        raise PackError(f"{folder}: no part of a run was packed here.")
    [(path, run), *others] = runs
    if others or not run.parts or run.shards is None:
        msg = f"{folder}: the run that was stopped here is not divided into parts."
        raise PackError(f"{msg}\n  Run the same command again to continue it.")
    for log in path.glob("*.log"):
        wait_for_workers(log)
    filled = read_filled(path)
    missing = [number for number, shard in enumerate(run.shards) if shard.name not in filled]
    if missing:
        parts = ", ".join(f"{part}/{run.parts}" for part in sorted({number % run.parts for number in missing}))
        names = ", ".join(run.shards[number].name for number in missing[:_SHOWN_SHARDS])
        more = f" and {len(missing) - _SHOWN_SHARDS} more" if len(missing) > _SHOWN_SHARDS else ""
        msg = f"{folder}: {len(missing)} of {len(run.shards)} shards are missing: {names}{more}."
        raise PackError(f"{msg}\n  Run the same command again with --part {parts}.")
    entries = [filled[shard.name] for shard in run.shards]
    staging = Staging(folder, path, run, path / "shards.log", disk)
    remove_temp_files(path, disk=disk)
    append = run.options.get("append") is True
    target = Destination(folder, append=append, index=read_index(folder) if append else None)
    lists = {name: data for name in LIST_NAMES if (data := read_own(path / name)) is not None}
    publish_all(target, staging, entries, lists)
    return entries, False


def _result(
    target: Destination, found: Source, entries: Sequence[ShardEntry] | None, plan: PackPlan | None, start: float
) -> PackResult:
    """What was written; where `entries` is None, what would be."""
    written = (plan.shards if plan else ()) if entries is None else entries
    return PackResult(
        folder=target.folder,
        entries=tuple(entries or ()),
        num_samples=sum(shard.num_samples for shard in written),
        num_bytes=sum(shard.num_bytes for shard in written),
        classes=found.classes,
        rejected=tuple(found.rejected),
        num_other=found.num_other,
        seconds=time.perf_counter() - start,
        plan=plan,
        duplicates=tuple(found.duplicates),
        dry_run=entries is None,
        was_done=target.is_done,
        num_cleaned=found.num_cleaned,
        source=f"{found.name}: {found.kind}" if found.kind else "",
        notes=_notes_on(entries or ()),
    )


_UNUSED = {
    "orientation": ("an EXIF orientation", "Decoding ignores it; `--orient` turns the pixels while packing."),
    "frames": ("more than one frame", "Decoding uses the first frame only."),
}


def _notes_on(entries: Sequence[ShardEntry]) -> tuple[str, ...]:
    """A sentence for each part of images that decoding ignores."""
    notes = []
    for part, (has, effect) in _UNUSED.items():
        found = [(count, first) for entry in entries for name, count, first in entry.unused if name == part]
        if found:
            num = plural(sum(count for count, _ in found), "image")
            notes.append(f"{num} with {has}, first {found[0][1]}. {effect}")
    return tuple(notes)
