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
from wdskit.packing.options import PackOptions, WriteOptions, given_options
from wdskit.packing.plan import PackPlan
from wdskit.packing.ray import import_ray
from wdskit.packing.row import OnProgress
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


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    max_samples: int | None = None,
    max_bytes: int | str | None = None,
    num_shards: int | None = None,
    shuffle: int | None = None,
    split: str | Mapping[str, object] | None = None,
    pattern: str | None = None,
    workers: int = 1,
    threads: int = 1,
    on: str | None = None,
    part: str | None = None,
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
    mask_fields: str | Sequence[str] = (),
    mask_fill: int | None = None,
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
    omit: str | Sequence[str] = (),
    require: str | Sequence[str] = (),
    missing: str | None = None,
    duplicates: str = "keep",
    progress: OnProgress | None = None,
    disk: Disk = DISK,
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
        staging: If `dest` is a URL: folder for the few shards that wait for their upload. Default: below
            `$XDG_CACHE_HOME/wdskit`.
        options: All options as one object, in place of the other arguments. Only `progress` and `disk` may be added.
        max_samples: Most samples in a shard. Default: 10,000; no limit with `num_shards`.
        max_bytes: Most bytes of a shard's file, a number or `200MB`. Default: 1 GB; no limit with `num_shards`.
        num_shards: Exactly this many shards. Their sizes differ by one sample at most.
        shuffle: Seed of a permutation of all rows; None keeps their order.
        split: `train=0.9,val=0.1`, or a mapping. Each sample goes into `train-%06d.tar` or `val-%06d.tar` by its key
            alone, as with `wdskit.split`. Each split is shuffled, numbered and divided separately; `num_shards` counts
            the shards of each split.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, because they are spawned.
        on: `ray` fills the shards on the Ray cluster that this process is connected to or `RAY_ADDRESS` names, or else
            on a new one on this machine; `ray://head:10001` names a cluster. All nodes must have this version of
            wdskit, and see `dest` and the source under the same paths. If a worker dies, its shard is filled again.
        pattern: Names of the shards, `train-%06d.tar`. Default: from the name of `dest`.
        skip_bad: Leave bad rows out and list them in `rejected.jsonl`, instead of stopping at the first. Then all rows
            are read twice, unless they come from a generator. Two rows with the same key are still an error.
        keys: "given" keeps the keys. The other two make keys that every reader returns unchanged: "clean" writes `_`
            for each character other than ASCII letters, digits, `_`, `+`, `-` and `/`, and one `_` for several at the
            start of a name, because readers ignore members whose names begin with `__`; "hashed" takes a hash of the
            image's path, or of the key if the row has one. `json` keeps path and key.
        append: Add shards to a folder that has an index. The headers of its shards are read for their keys.
        dry_run: Write nothing; `plan` of the result describes the shards.
        overwrite: Replace the data set in the folder. The old index is removed first, then its shards, lists and
            selections.
        restart: Remove the files of a run that was stopped in this folder, and start again.
        part: `3/8` fills the fourth of eight parts of the shards and writes no index. Parts may run at the same time,
            on several machines that share the folder. `finish_pack` then writes the index.
        from_: Kind of the source, if its path does not show it: "folder", "table", "list" (one path per line),
            "parquet", "hf", "coco", "tar" or "zip".
        fields: Fields to make, `{"txt": "caption", "cls": "label"}` or `["txt=caption"]`: from columns of a table or of
            COCO annotations, or from values in the JSON of tars and zips (txt, cls, json and npy fields). Texts for
            `cls` become class numbers by `classes`, or in sorted order. `json` keeps all columns except bytes and
            arrays of Parquet and `datasets`.
        files: For a folder: extensions of the files that become samples in place of images: `wav`, `flac`.
        sidecars: For a folder: extensions of files beside an image that belong to its sample (`json`, `txt`,
            `seg.png`). The content of a `json` file and the metadata of the image go into one `json` field.
        images: For COCO annotations: the folder of the images. Default: the folder of the annotations.
        classes: All classes by number, for a folder or the column of `cls`, so that a val set without some class gets
            the numbers of train: a packed folder, a `classes.json`, a text file with one name per line, a list of
            names, or numbers by name. Any other class is an error. Default: the sub-folders, or the texts in the
            column, sorted.
        image_column: For a table: the column with the image. Default: `image`, `file_name`, `path` or `filepath`; in
            Parquet also the only struct.
        key_column: For a table: the column with the key. Default: `key`, else the image's path without extension, else
            the row's number.
        allow_no_image: Accept rows of a table, Parquet file or saved data set without an image; otherwise each is an
            error. Rows from Python, tars and zips need no image.
        omit: Columns that `json` leaves out. `fields` can still use them. An omitted column `cls` gives no label.
            For a folder: the names among `path`, `class` and `cls` that `json` leaves out.
        export: Files for other readers, which `wdskit.export` writes at the end: "open_clip", "timm", "energon",
            "dali".
        split_name: Name of the split for timm and energon. Default: from the names of the shards.
        validate: How each image is checked before it is packed: "none", "magic" (its first bytes), "structure" (its
            parts and checksums) or "decode" (all pixels). JSON is parsed too, except with "none". Default: "structure".
        resize: Pixels of a side; larger images are made smaller. With `resize`, `format`, `orient` or `derive`, only
            the number of samples limits a shard, because sizes are not known before.
        resize_mode: The "shorter" or the "longer" side, or a square: "crop" or "pad". Default: "shorter".
        upscale: Make smaller images larger too.
        format: "jpg", "webp" or "png": the new format of images.
        quality: 1 to 100, for images that are encoded again. Default: 90.
        orient: Rotate pixels as EXIF says, and remove the tag.
        background: Colour behind transparent images that become jpg, and around padded images.
        image_fields: The images of a row that these options change. Default: its only image that is not a mask.
        mask_fields: PNG masks that `resize` and `orient` move with the image: `seg.png`. Numbers are never blended, and
            bits and palette stay.
        mask_fill: The number of mask pixels that `resize_mode="pad"` adds; without it, padding a mask is an error.
        derive: Metadata of the packed image for `json`: "width", "height", "bytes", "sha256".
        require: Fields that each row must have, under their packed names: `jpg;png,json`.
        missing: What to do with a row that lacks one: "error", "warn" or "skip". Default: "error".
        duplicates: What to do with rows whose images have the same bytes as those of an earlier row: "keep", "report"
            (in `duplicates.jsonl`) or "drop" (and report).
        max_pixels: Most pixels of an image. Default: 100 million.
        threads: Samples of a shard that one process reads and transforms at the same time. The result is the same.
        progress: Called from time to time while rows are read and checked, then after each sample that is written, or
            with several workers after each shard.
        disk: Performs the file operations; tests replace it.

    Raises:
        RowError: A row cannot be packed; `where` names its file and line.
        PackError: There is nothing to pack, an option is wrong, or the folder cannot be written or is not free.
        SelectionError: The shares of `split` are wrong.
        FolderIndexError: Another process is writing there, or the index to add to is invalid.
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
    result = _pack(source, folder, options, progress=progress, disk=disk)
    return dataclasses.replace(result, notes=(*result.notes, *export_packed(folder, options, disk)))


def export_packed(folder: Path, options: WriteOptions, disk: Disk) -> tuple[str, ...]:
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
            report = export(folder, options.export, split_name=options.split_name, disk=disk)
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
