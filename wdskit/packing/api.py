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

from wdskit.dataset.index import Exports, ShardEntry, read_index
from wdskit.dataset.lock import lock_folder, wait_for_workers
from wdskit.dataset.unfinished import run_folders
from wdskit.errors import PackError, RowError
from wdskit.files import DISK, Disk, describe_missing, remove_temp_files
from wdskit.packing.destination import (
    Destination,
    finish_what_was_stopped,
    folder_of,
    raised_as_pack_errors,
)
from wdskit.packing.duplicates import Duplicate
from wdskit.packing.journal import (
    LIST_NAMES,
    find_last_run,
    finish_publishing,
    is_publishing,
    remove_finished,
    remove_locks,
)
from wdskit.packing.options import PackOptions, given_options
from wdskit.packing.plan import PackPlan
from wdskit.packing.ray import import_ray
from wdskit.packing.row import OnProgress
from wdskit.packing.run import open_work, pack_planned, plan_jobs, publish_all, read_plan
from wdskit.packing.sources import Source, find_source
from wdskit.packing.staging import Staging, read_description, read_filled
from wdskit.packing.store import ROWS_IN_MEMORY, Spool
from wdskit.packing.stream import pack_stream
from wdskit.packing.upload import Upload, open_upload

_SHOWN_SHARDS = 10


@dataclass(frozen=True)
class PackResult:
    """What `pack` wrote.

    Attributes:
        folder: Where: a path, or as text a URL.
        entries: The new shards, in order; none after a dry run.
        num_samples: Samples in them, or in the plan of a dry run.
        num_bytes: Bytes of their files.
        classes: Number of each class by name; empty where the source has none.
        rejected: Rows that were left out by `skip_bad`, in order.
        num_other: Files of an image folder that are no images.
        seconds: How long it took.
        plan: What was planned; None for rows that can be read once only.
        duplicates: Rows whose images an earlier one has, in order, where that was asked for.
        dry_run: Nothing was written.
        was_done: The folder held all of it already, so that nothing was to do.
        num_cleaned: Rows whose keys were changed, by `keys="clean"`.
        source: What was packed, and what kind of source that was found to be: `photos: image folder`. Empty for rows
            from Python.
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


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    max_samples: int | None = None,
    max_bytes: int | str | None = None,
    num_shards: int | None = None,
    multiple_of: int | None = None,
    shuffle: int | None = None,
    split: str | Mapping[str, object] | None = None,
    pattern: str | None = None,
    workers: int = 1,
    threads: int = 1,
    on: str | None = None,
    part: str | None = None,
    only: int | None = None,
    append: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    staging: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    export: str | Sequence[str] = (),
    split_name: str = "",
    fields: Mapping[str, str] | Sequence[str] = (),
    classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = None,
    validate: str | None = None,
    resize: int | None = None,
    resize_mode: str | None = None,
    upscale: bool = False,
    format: str | None = None,  # noqa: A002 (as the command line has it)
    quality: int | None = None,
    orient: bool = False,
    background: str | None = None,
    image_fields: str | Sequence[str] = (),
    derive: str | Sequence[str] = (),
    max_pixels: int | None = None,
    keys: str = "given",
    skip_bad: bool = False,
    from_: str | None = None,
    sidecars: str | Sequence[str] = (),
    files: str | Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    image_column: str | None = None,
    key_column: str | None = None,
    allow_no_image: bool = False,
    require: str | Sequence[str] = (),
    missing: str | None = None,
    duplicates: str = "keep",
    progress: OnProgress | None = None,
    disk: Disk = DISK,
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, whatever the number of workers, the time, the locale or the order
    in which a disk lists its files. No final name ever holds unfinished bytes, and the index comes last. A run that was
    stopped is done again by the same call; no file that holds something else is overwritten.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, with .gz or without, or
            .parquet); COCO annotations (.json); a folder that `datasets` saved; tars or zips; of Parquet files, tars
            and zips a folder or a pattern too. Tars may be in a store: `s3://bucket/old/*.tar`. `-` for paths on
            standard input. Or rows: dicts of `__key__` and fields, whose values are bytes, a `pathlib.Path`, or what
            the field's name stands for (`cls` an int, ...). Rows that can be read once only, as from a generator or
            standard input, are packed while they come.
        dest: The folder to write to; created where it is missing. Not in the source. Or one of a bucket,
            `s3://bucket/train`: each shard is uploaded when it is filled, and removed here; the index is uploaded last.
        staging: With a URL, where shards stand until then: a few of them. By default below `$XDG_CACHE_HOME/wdskit`.
        options: All that follows but `progress` and `disk`, as one object; it stands alone.
        max_samples: Most samples in a shard. Default: 10,000; with `num_shards`, any number.
        max_bytes: Most bytes of a shard's file, a number or `200MB`. Default: 1 GB; with `num_shards`, any number.
        num_shards: So many shards, equal within one sample.
        multiple_of: A multiple of this number of shards, the least within the limits, equal within one sample: ranks
            times workers, so that each has as many shards and samples as the others.
        shuffle: Seed of a permutation of all rows; None keeps their order.
        split: `train=0.9,val=0.1`, or a mapping, as for `split`: each sample goes by its key alone, as it would there,
            into `train-%06d.tar` or `val-%06d.tar`. Each split is shuffled, numbered and divided on its own;
            `num_shards` and `multiple_of` count the shards of each.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, as for all that spawns.
        on: `ray` fills the shards on the Ray cluster that this process, or `RAY_ADDRESS`, is connected to, or one that
            is started on this machine; `ray://head:10001` on that one. All nodes must have this version of wdskit, and
            see `dest` and the source under the same paths. A shard whose worker dies is filled again.
        pattern: Names of the shards, `train-%06d.tar`; by default from the name of `dest`.
        skip_bad: Leave bad rows out and list them in `rejected.jsonl`, instead of stopping at the first. All are read
            twice then, unless they come from a generator. Two rows of one key are an error nevertheless.
        keys: "given"; or, for names that not every reader would give back, "clean": `_` in the place of white space,
            dots and all that is no ASCII; or "hashed": a hash of the image's path, or of the key where a row has one.
            Path and key stand in `json`.
        append: Add to a folder that is indexed already. The headers of its shards are read, for their keys.
        dry_run: Only plan: `plan` of the result says what would be written, and nothing is.
        overwrite: Replace what is packed there: its index goes first, then its shards, lists and selections.
        restart: Where a run was stopped that packed something else, remove what it has written and begin anew.
        part: `3/8` fills the fourth of eight parts of the shards and writes no index; parts may run at the same time,
            on several machines that share the folder. `finish_pack` then completes it.
        only: Fill the shard of this number again, which is lost or damaged. It must become what the index says.
        from_: What kind of source it is (a name of `packing.sources.KINDS`), where its path does not say so.
        fields: Of a table or COCO annotations: which columns become fields; of tars and zips: which names in a sample's
            JSON (txt, cls, json and npy fields); `{"txt": "caption", "cls": "label"}` or
            `["txt=caption"]`; see `packing.sources.records.parse_fields`. Texts of `cls` become class numbers, those of
            `classes` or the sorted texts'. `json` keeps all columns but bytes and arrays of Parquet and `datasets`.
        files: Of a folder: extensions of the files that are samples instead of images: `wav`, `flac`.
        sidecars: Of a folder: extensions of the files beside an image that belong to its sample (`json`,
            `txt`, `seg.png`). What a `json` says and what is known of the image both stand in the sample's `json`.
        images: Of COCO annotations: the folder of their images; by default that of the file.
        classes: Of a folder, or of the column of `cls`: the classes that there may be, by number, so that a val set
            which lacks one gets the numbers of train: a packed folder, a `classes.json`, a text file with a name a
            line; or names, or numbers by name. What is none of them is an error. By default the sub-folders, or the
            texts in the column, sorted.
        image_column: Of a table; see `packing.sources.records.Records`, and
            `packing.sources.arrow.read_parquet`.
        key_column: Of a table.
        allow_no_image: Of a table, also of Parquet or saved by `datasets`: rows without an image are samples too.
            Otherwise each is an error. Rows from Python, tars and zips name their fields themselves, and need no image.
        export: Files for other readers beside the shards: some of `export.api.KINDS`. With `append` those that are
            there are renewed, and no others can be asked for.
        split_name: The split of all shards for timm and energon; by default what the shards are called.
        validate: How images are checked before they are packed; this and what follows, to `duplicates`, is explained by
            `packing.transforms.Transforms`. By default bytes pass untouched, and images are looked at but not decoded.
        resize: Pixels of a side that larger images get. With this, `format`, `orient` and `derive` shards go by count:
            their bytes are not known before.
        resize_mode: "shorter", "longer", "crop" or "pad".
        upscale: Make smaller images larger too.
        format: "jpg", "webp" or "png": what images become.
        quality: 1 to 100, of images that are encoded.
        orient: Turn pixels as EXIF says, and remove the tag.
        background: Colour behind transparent images that become jpg, and around padded ones.
        image_fields: Which images of a row all this is about; by default its only one.
        derive: Metadata of the packed image for `json`: "width", "height", "bytes", "sha256".
        require: Fields that each row must have, as they are packed: `jpg;png,json`.
        missing: "error", "warn" or "skip" a row that lacks one.
        duplicates: "keep", "report" or "drop" rows whose images are byte for byte those of an earlier one.
        max_pixels: Most pixels of an image.
        threads: Samples of a shard that a process reads and transforms at a time. They change no byte.
        progress: Called now and then while rows are read and checked, after each sample that is written, or with
            several workers after each shard.
        disk: What writes.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: Nothing to pack, a bad option, or the folder cannot be written or is not free.
        SelectionError: The shares of `split` are wrong.
        FolderIndexError: Another process is writing there, or the index that is to be added to is not right.
        StorageError: The bucket cannot be read or written.
    """
    keywords = dict(locals())
    options = given_options(PackOptions, options, keywords)
    upload = open_upload(os.fsdecode(dest), options, disk)
    if upload is not None:
        with upload, upload.named():
            result = _pack(source, upload.folder, options, progress=progress, disk=disk, upload=upload)
        return dataclasses.replace(result, folder=upload.url)
    with raised_as_pack_errors(Path(dest)):
        folder = folder_of(os.fsdecode(dest))
    return _pack(source, folder, options, progress=progress, disk=disk)


def _pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    folder: Path,
    options: PackOptions,
    *,
    progress: OnProgress | None,
    disk: Disk,
    upload: Upload | None = None,
) -> PackResult:
    start = time.perf_counter()
    finish_what_was_stopped(folder, source, options, disk)
    found = find_source(source, options.source)
    if found.is_stream:
        options.check_stream()
    if options.on is not None and not options.dry_run:
        import_ray()
    with contextlib.ExitStack() as stack:
        work = open_work(stack, folder, found, options, progress=progress, disk=disk, upload=upload)
        if found.is_stream:
            target, streamed = pack_stream(work, skip_bad=options.skip_bad)
            return _result(target, found, streamed, None, start)
        most = None if found.is_held else ROWS_IN_MEMORY
        on_key = None if work.splitter is None else work.splitter.add
        spool = stack.enter_context(Spool(lambda: work.room, name=work.plan_name, disk=disk, most=most, on_key=on_key))
        plan = read_plan(work, spool, skip_bad=options.skip_bad)
        target, run, jobs = plan_jobs(work, plan)
        shown = jobs.plan()  # reads the plan, which is gone behind this block
        entries = None if options.dry_run else pack_planned(work, plan, target, run, jobs)
    return _result(target, found, entries, shown, start)


def finish_pack(dest: str | os.PathLike[str], *, disk: Disk = DISK) -> PackResult:
    """Write the index of a folder whose shards were filled in parts: `wdskit pack-finish`.

    It is the index, byte for byte, that one run would have written. The shards are not read: their digests stand in
    what each part has noted. A run of any kind that was stopped while it published its shards is ended too.

    Args:
        dest: The folder.
        disk: What writes.

    Raises:
        PackError: Nothing was begun there, or shards are missing; it names them and their parts.
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
    )


def _publish_parts(folder: Path, disk: Disk) -> tuple[Sequence[ShardEntry], bool]:
    """Publish a run whose shards were filled in parts. The folder's lock is held.

    Returns:
        The shards, and whether they had been published already.

    Raises:
        PackError: Nothing was begun here, or shards are missing; it names them and their parts.
    """
    if is_publishing(folder):
        finish_publishing(folder, disk)
        last = find_last_run(folder)
        return (last.entries if last is not None else ()), True
    remove_finished(folder, disk)
    runs = [(path, run) for path in run_folders(folder) if (run := read_description(path)) is not None]
    if not runs:
        last = find_last_run(folder)
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
    append = run.options["append"]
    target = Destination(folder, append=append, index=read_index(folder) if append else None)
    lists = {name: (path / name).read_bytes() for name in LIST_NAMES if (path / name).exists()}
    publish_all(target, staging, entries, lists, Exports(tuple(run.options["export"]), run.options["split_name"]))
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
    )
