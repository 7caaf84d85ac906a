"""`pack`: rows -> plan -> jobs -> shards -> commit. `fill_folder` is all of it, also for `reshard`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict

from typing_extensions import Unpack

from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME, classes_json
from wdskit.dataset.index import ShardEntry
from wdskit.errors import PackError, RowError, WdskitError
from wdskit.files import DISK, Disk, describe_os_error, read_own
from wdskit.limits import MAX_SHARD_BYTES
from wdskit.packing.change import Change, MapFunction
from wdskit.packing.fill import Entry, Filler, ShardJob, fill_in_worker
from wdskit.packing.folder import REJECTED_NAME, Filled, Folder, open_folder
from wdskit.packing.labels import ClassNames, find_class_names
from wdskit.packing.plan import MAX_BYTES, MAX_SAMPLES, NO_LIMIT, Limits, Plan, PlannedShard
from wdskit.packing.ray import check_address, fill_on_ray
from wdskit.packing.row import OnProgress, Progress
from wdskit.packing.sources import find_source
from wdskit.packing.sources.base import Reading, Source
from wdskit.packing.sources.records import parse_fields
from wdskit.packing.upload import open_bucket
from wdskit.shards.make_columns import parse_columns, parse_names
from wdskit.shards.parallel import choose_workers, map_shards
from wdskit.shards.shares import parse_shares
from wdskit.storage.urls import is_local, local_path
from wdskit.tar.writer import END_BYTES
from wdskit.text import as_int, format_bytes, parse_bytes, plural

_CHECK_ROWS = 256  # rows per task of a process that checks rows
_SHOWN = 3
_UNSAFE = re.compile(r"[%/\\{}\[\]*?:\x00-\x1f\x7f]")  # in names of shards: patterns have these characters


@dataclass(frozen=True)
class PackResult:
    """The result of `pack` or `reshard`.

    Attributes:
        folder: The folder that the shards were written to: a path, or a URL as text.
        entries: Index entries of the shards of this run (with `part`, of this part), in order; empty after a dry run.
        splits: The planned shards of each split, in order; without splits, of the split "". Empty if `was_done`.
        num_samples: Samples in the shards of this run, or in the plan of a dry run.
        num_bytes: Bytes of these shards; 0 if a dry run cannot know the bytes, because options change the samples.
        classes: Class number by class name; empty if the source has no classes.
        fields: Names of all fields of the source's rows, sorted.
        rejected: Errors of the rows that were left out because of `skip_bad`, in the order of the source.
        num_other: Files of a source folder, or members of tars, that belong to no row.
        num_cleaned: Rows whose keys were changed.
        source: Name and kind of the source: `photos: image folder`. Empty for rows from Python.
        notes: Sentences for the user.
        dry_run: True if nothing was written because of `dry_run`.
        was_done: True if an earlier run wrote all of these shards, and this call wrote nothing.
        seconds: Duration of the call in seconds.
    """

    folder: Path | str
    entries: tuple[ShardEntry, ...]
    splits: Mapping[str, Sequence[PlannedShard]]
    num_samples: int
    num_bytes: int
    classes: Mapping[str, int]
    fields: tuple[str, ...]
    rejected: tuple[RowError, ...]
    num_other: int
    num_cleaned: int
    source: str
    notes: tuple[str, ...]
    dry_run: bool
    was_done: bool
    seconds: float

    def __repr__(self) -> str:
        """Return one line: the folder, samples and shards, and except after a dry run the size and the time."""
        num_shards = sum(map(len, self.splits.values())) if self.dry_run else len(self.entries)
        size = f"{plural(self.num_samples, 'sample')} in {plural(num_shards, 'shard')}"
        size += "" if self.dry_run else f", {format_bytes(self.num_bytes)}, {self.seconds:.1f} s"
        return f"PackResult({self.folder}: {'would write ' if self.dry_run else ''}{size})"


class RunKeywords(TypedDict, total=False):
    """The keyword arguments that `pack` and `reshard` share. `RunOptions` has their defaults and says what they do."""

    max_samples: int | None
    max_bytes: int | str | None
    num_shards: int | None
    shuffle: int | None
    split: str | Mapping[str, object] | None
    columns: str | Sequence[str]
    append: bool
    part: str | None
    on: str | None
    workers: int | None
    dry_run: bool
    progress: OnProgress | None
    disk: Disk


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run: how rows are divided into shards, and who fills them.

    Attributes:
        classes: As for `find_class_names`; None numbers the class names of all rows in sorted order.
        skip_bad: Leave out bad rows and list them in `rejected.jsonl`.
        max_samples: Most samples in a shard.
        max_bytes: Most bytes of a shard's file, as a number or as text: `200MB`.
        num_shards: Number of shards of equal size; turns off the default limits.
        shuffle: Seed of the order; None keeps the order of the source.
        split: Shares of splits: `train=0.9,val=0.1`, or a mapping.
        columns: Columns to write beside the index: `width,cls,json.score`.
        append: Add shards to those in the folder.
        part: `I/N`: fill only each N-th shard, from shard I on.
        on: `ray` or `ray://HOST:PORT`: fill the shards on a Ray cluster.
        workers: Number of processes; None for all cores, fewer for little data.
        dry_run: Plan, but write nothing.
        progress: Called from time to time.
        disk: Performs the file operations.

    Raises:
        PackError: An option is out of range.
        SelectionError: `split` or `columns` is invalid.
    """

    classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = None
    skip_bad: bool = False
    max_samples: int | None = None
    max_bytes: int | str | None = None
    num_shards: int | None = None
    shuffle: int | None = None
    split: str | Mapping[str, object] | None = None
    columns: str | Sequence[str] = ()
    append: bool = False
    part: str | None = None
    on: str | None = None
    workers: int | None = None
    dry_run: bool = False
    progress: OnProgress | None = None
    disk: Disk = DISK

    def __post_init__(self) -> None:
        for name in ("max_samples", "num_shards", "shuffle", "workers"):
            number = as_int(getattr(self, name))
            least = int(name != "shuffle")
            if number is not None and (type(number) is not int or not least <= number < 1 << 64):
                raise PackError(f"{name}: {number!r} is not a whole number of {least} or more.")
            object.__setattr__(self, name, number)
        if self.on is not None:
            check_address(self.on)
        _ = self.num_bytes, self.shares, self.column_sources, self.part_of

    @cached_property
    def num_bytes(self) -> int | None:
        """The option `max_bytes` as a number."""
        if self.max_bytes is None:
            return None
        try:
            number = parse_bytes(self.max_bytes) if isinstance(self.max_bytes, str) else as_int(self.max_bytes)
            if type(number) is int and END_BYTES + 1024 <= number < MAX_SHARD_BYTES:
                return number
        except ValueError:
            pass
        raise PackError(f"max_bytes: {self.max_bytes!r} is not a size from 2 KB to 1 TB. Write 200MB or 1GiB.")

    @cached_property
    def shares(self) -> Mapping[str, Fraction]:
        """The share of each split, by name; empty without splits."""
        return {} if self.split is None else parse_shares(self.split)

    @cached_property
    def column_sources(self) -> Mapping[str, Mapping[str, Any]]:
        """How each column of the option `columns` is computed, by its name."""
        return parse_columns(self.columns)

    @cached_property
    def part_of(self) -> tuple[int, int]:
        """Number of the part, from 0, and the number of parts; (0, 1) for a whole run."""
        match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", "0/1" if self.part is None else str(self.part))
        if match is None or not int(match[1]) < int(match[2]):
            raise PackError(f"part: {self.part!r} is not I/N with I from 0 to N - 1. Write 0/8.")
        return int(match[1]), int(match[2])

    def limits(self, change: Change) -> Limits:
        """Return the limits of a shard. The sizes of changed samples are known too late for a limit of bytes."""
        samples, size = (MAX_SAMPLES, MAX_BYTES) if self.num_shards is None else (NO_LIMIT, NO_LIMIT)
        size = NO_LIMIT if change.changes_bytes else self.num_bytes or size
        return Limits(self.max_samples or samples, size, self.num_shards)


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    image: str | None = None,
    key: str | None = None,
    fields: Mapping[str, str] | Sequence[str] = (),
    classes: str | os.PathLike[str] | Sequence[str] | Mapping[str, int] | None = None,
    keys: str = "clean",
    sidecars: str | Sequence[str] = (),
    files: str | Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    skip_bad: bool = False,
    validate: str = "structure",
    resize: int | None = None,
    keep_json: bool = False,
    format: str | None = None,  # noqa: A002 (the name of the option)
    quality: int | None = None,
    map: MapFunction | None = None,  # noqa: A002 (the name of the option)
    **run: Unpack[RunKeywords],
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, for any number of workers, at any time, in any locale and for any
    order in which a disk lists its files. All files appear at once, when the index is written last. After a stop, the
    same call continues: shards whose rows and options did not change are kept, all others are filled. A run that was
    stopped while it moved its shards into place is completed first, whatever the new call asks.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, also with .gz, a .json array,
            or .parquet); COCO annotations (.json); tars, local or in a store: `s3://bucket/old/*.tar`. Or an iterable
            of rows: each row is a dict with `__key__` and fields. The value of a field is bytes, a `pathlib.Path`, or
            the type that belongs to the field's name (`cls` an int or a name, `npy` an array, ...).
        dest: The folder to write to, created if it is missing. It cannot be inside the source. Or a folder of a bucket,
            `s3://bucket/train`: each filled shard is uploaded, then its local file is removed; the index comes last.
        image: Column with the image. Default: image, file_name, path or filepath.
        key: Column with the key. Default: key, else the image's path.
        fields: Further fields and their columns: `txt=caption`, `cls=label`; a list, or a mapping.
        classes: Class names in order: a packed folder, a `classes.json`, a text file with one name per line, a list, or
            a mapping of names to numbers. Default: the names of all rows in sorted order.
        keys: "clean" replaces odd characters of keys by `_`, "given" refuses them, "hashed" makes each key a hash of
            the source's name and the key, for sources that number their samples.
        sidecars: Extensions of files with the name of the main file: `json,txt,seg.png`.
        files: Extensions of files that become samples in place of images: `wav,flac`.
        images: Folder of the images that COCO annotations name. Default: the folder of the annotations.
        skip_bad: Leave out bad rows and list them in `rejected.jsonl`. All files are read twice.
        validate: How images are checked: "structure", "decode" (all pixels), or "none".
        resize: Shrink images whose shorter side is longer than this number of pixels.
        keep_json: With `resize` or `format`: pack JSON that has numbers, because none describes the image's pixels.
        format: Write images as "jpg", "webp" or "png".
        quality: Of new jpg and webp, 1 to 100. Default: 90.
        map: A function of (key, fields) that returns the fields to pack, all as bytes. Its attribute `version` says
            which results it gives.
        **run: The keyword arguments below, which `reshard` has, too.

    Keyword Args:
        max_samples: Most samples in a shard. Default: 10,000.
        max_bytes: Most bytes of a shard's file: `200MB`. Default: 1 GB. It has no effect on changed samples, whose
            sizes are not known beforehand.
        num_shards: Number of shards of equal size. Turns off the default limits.
        shuffle: Seed of a random order. Default: the order of the source.
        split: Splits by key, each with its own shards: `train=0.9,val=0.1`.
        columns: Columns to write beside the index: `width,height,cls,json.score`.
        append: Add shards to those in `dest`. The new rows take the classes and columns of the folder.
        part: `I/N`: fill only each N-th shard, from shard I on; then the same call without `part` completes the folder.
        on: `ray` or `ray://HOST:PORT`: fill the shards on a Ray cluster whose nodes see source and `dest`.
        workers: Number of processes. Default: all cores, fewer for little data.
        dry_run: Plan, but write nothing.
        progress: Called from time to time with a `Progress`.
        disk: Performs the file operations; tests replace it.

    Raises:
        RowError: A row cannot be packed, or has the key of another row or of an existing sample. `where` of the error
            names the file and line of the row.
        PackError: The source has no valid row, an option is invalid, the folder cannot be written, or it has another
            data set.
        SelectionError: `split` or `columns` is invalid, or a sample has no valid value for a column.
        ShardError: A tar of the source has a sample in two places, or an existing shard is damaged.
        FolderIndexError: Another process is writing in the folder, or a file of it is damaged or foreign.
        StorageError: A bucket cannot be read or written, or the folder cannot be locked.
        WdskitError: A worker process was killed.
    """
    if keys not in {"clean", "given", "hashed"}:
        raise PackError(f"keys: {keys!r} is not one of clean, given, hashed.")
    how = Reading(
        image=image,
        key=key,
        fields=parse_fields(fields),
        keys=keys,
        sidecars=tuple(parse_names(sidecars)),
        files=tuple(parse_names(files)),
        images=None if images is None else os.fspath(images),
    )
    options = RunOptions(classes=classes, skip_bad=skip_bad, **run)
    change = Change(validate, resize, format, quality, keep_json, map)  # type: ignore[arg-type]
    return fill_folder(find_source(source, how), dest, change, options)


def fill_folder(source: Source, dest: str | os.PathLike[str], change: Change, options: RunOptions) -> PackResult:
    """Pack the rows of a source into a folder. The errors are those of `pack`."""
    start = time.perf_counter()
    dest = os.fsdecode(dest)
    on_progress = options.progress or (lambda _: None)
    if not dest.strip():
        raise PackError("DEST is an empty path. Write . for the current folder.")
    dest = local_path(dest) if is_local(dest) else dest
    part, num_parts = options.part_of
    inside = [os.path.realpath(dest), *map(str, Path(os.path.realpath(dest)).parents)][: None if source.is_tree else 1]
    if source.path and is_local(dest) and os.path.realpath(source.path) in inside:
        raise PackError(f"{dest}: this folder is in the source, {source.path}. Write to another folder.")
    try:
        with open_destination(dest, options) as folder, contextlib.ExitStack() as stack:
            plan = Plan(folder.work, shares=options.shares, disk=options.disk)
            stack.callback(plan.close)
            classes = find_classes(options, folder, source)
            plan.read(
                source.rows(),
                skip_bad=options.skip_bad,
                reads_labels=not source.copies,
                classes=classes,
                on_progress=on_progress,
            )
            has_names = bool(plan.class_numbers) or (source.copies and source.classes is not None)
            is_added = options.append and folder.has_labels and CLASS_FIELD in plan.fields
            if is_added and has_names != (folder.classes is not None):
                raise PackError(f"{folder.shown}: labels have names here or in the new rows, but not in both.")
            columns = find_columns(options, folder)
            filler = Filler(folder.work, change, plan.class_numbers, plan.dtypes, columns, options.disk)
            if options.skip_bad:
                leave_out_bad(plan, filler, options, on_progress)
            if not len(plan.kept):
                first = "".join(f"\n  {err.where}: {err.problem}" for err in plan.rejected[:_SHOWN])
                raise PackError(f"{source.path or 'the rows'}: there is nothing to pack: no row is valid.{first}")
            seed = filler.digest_options()
            limits = options.limits(change)
            made = plan.digest_all(seed + json.dumps([*limits, options.shuffle, options.split], default=str).encode())
            splits: Mapping[str, Sequence[PlannedShard]] = {}
            entries = folder.done(made)
            if was_done := bool(entries):
                if options.part is None and not options.dry_run:
                    folder.clean()
            else:
                folder.check(append=options.append)
                plan.check_keys(folder.key_hashes(on_progress), folder.find_key)
                name = _UNSAFE.sub("_", Path(dest).resolve().name).lstrip(".") or "shard"
                names = lambda split, number: folder.shard_name(split or name, number)  # noqa: E731
                splits = plan.divide(limits, names, shuffle=options.shuffle)
                if change.changes_bytes:
                    splits = {name: [shard._replace(num_bytes=0) for shard in found] for name, found in splits.items()}
            todo = [(shard, plan.digest(shard.numbers, seed)) for found in splits.values() for shard in found]
            if todo:
                folder.check_names((shard.name, digest) for shard, digest in todo)
            if todo and not options.dry_run:
                filled = [*fill_all(plan, filler, folder, todo[part::num_parts], options, on_progress)]
                entries = tuple(each.index_entry for each in filled)
                if options.part is None:
                    folder.commit(filled, find_lists(plan, folder, classes), columns, made)
    except OSError as err:
        raise PackError(f"{err.filename2 or dest}: cannot be written: {describe_os_error(err)}") from err
    written: Sequence[ShardEntry | PlannedShard] = [shard for shard, _ in todo] if options.dry_run else entries
    return PackResult(
        folder=dest if not is_local(dest) else Path(dest),
        entries=entries,
        splits=splits,
        num_samples=sum(shard.num_samples for shard in written),
        num_bytes=0 if options.dry_run and change.changes_bytes else sum(shard.num_bytes for shard in written),
        classes=plan.class_numbers,
        fields=tuple(sorted(plan.fields)),
        rejected=tuple(plan.rejected),
        num_other=source.num_other,
        num_cleaned=plan.num_cleaned,
        source=f"{source.path}: {source.kind}" if source.path else "",
        notes=tuple(source.notes),
        dry_run=options.dry_run,
        was_done=was_done,
        seconds=time.perf_counter() - start,
    )


@contextlib.contextmanager
def open_destination(dest: str, options: RunOptions) -> Iterator[Folder]:
    """Open the folder of a run: local, of a bucket, or only looked at for a dry run."""
    with contextlib.ExitStack() as stack:
        if not is_local(dest):
            if options.append or options.part is not None:
                raise PackError(f"{dest}: append and part are for local folders. Pack into a new folder of the bucket.")
            yield stack.enter_context(open_bucket(dest, disk=options.disk))
        elif options.dry_run:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="wdskit-"))
            yield Folder(Path(dest), Path(work), DISK)
        else:
            yield stack.enter_context(open_folder(Path(dest), is_part=options.part is not None, disk=options.disk))


def find_classes(options: RunOptions, folder: Folder, source: Source) -> ClassNames | None:
    """Return the allowed classes: of the option, of the source, or of the folder that is added to; None for any.

    Raises:
        PackError: The folder has other classes than the option or the source, or has labels without names.
    """
    given = ClassNames(source.classes, source.path) if source.classes else None
    given = given if options.classes is None else find_class_names(options.classes)
    if not options.append:
        return given
    own = None if folder.classes is None else ClassNames(folder.classes, str(folder.path / CLASSES_NAME))
    is_other = own is not None and given is not None and given.numbers != own.numbers
    if is_other or (own is None and given is not None and folder.has_labels):
        raise PackError(f"{folder.shown}: its classes are not those of {given.where}, so a label would mean two.")  # type: ignore[union-attr]
    return own or given


def find_columns(options: RunOptions, folder: Folder) -> Mapping[str, Mapping[str, Any]]:
    """Return how each column of the folder is computed, by its name: as those that it has, or as the option says.

    Raises:
        PackError: The option has columns that the folder lacks.
    """
    if not options.append or not folder.entries:
        return options.column_sources
    known = folder.column_sources()
    new = [name for name, source in options.column_sources.items() if known.get(name) != source]
    if new:
        way = f"Run `wdskit index {folder.shown} --columns {','.join(new)}` first."
        raise PackError(
            f"{folder.shown}: columns: it has no column {new[0]!r}, so new shards cannot have one.\n  {way}"
        )
    return known


def find_lists(plan: Plan, folder: Folder, classes: ClassNames | None) -> dict[str, bytes]:
    """Return the bytes of `classes.json` and `rejected.jsonl` by name, without files that would be empty."""
    lists = {}
    numbers = classes.numbers if classes is not None and CLASS_FIELD in plan.fields else plan.class_numbers
    if numbers and not (folder.entries and folder.classes is not None):
        lists[CLASSES_NAME] = classes_json(numbers)
    if plan.rejected:
        lines = [json.dumps({"where": err.where, "reason": err.problem}, ensure_ascii=False) for err in plan.rejected]
        earlier = (read_own(folder.path / REJECTED_NAME) or b"") if folder.entries else b""
        lists[REJECTED_NAME] = earlier + "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    return lists


def leave_out_bad(plan: Plan, filler: Filler, options: RunOptions, on_progress: OnProgress) -> None:
    """Read each row as it would be packed, and leave out those that cannot be."""
    kept = plan.kept
    batches = (plan.rows(kept[start : start + _CHECK_ROWS]) for start in range(0, len(kept), _CHECK_ROWS))
    workers = options.workers or choose_workers(-(-len(kept) // _CHECK_ROWS), plan.num_bytes)
    numbers = iter(kept.tolist())
    done = 0
    with contextlib.closing(map_shards(filler.find_bad, batches, workers=workers, user=filler.change.map)) as found:
        for errors in found:
            if isinstance(errors, WdskitError):
                raise errors
            for err, number in zip(errors, numbers, strict=False):
                if err is not None:
                    plan.leave_out(number, err)
            done += len(errors)
            on_progress(Progress("checking", done, 0, len(kept), None))


def fill_all(
    plan: Plan,
    filler: Filler,
    folder: Folder,
    shards: Sequence[tuple[PlannedShard, str]],
    options: RunOptions,
    on_progress: OnProgress,
) -> Iterator[Filled]:
    """Fill the shards that are not filled yet, here, in worker processes or on a cluster. Yield all of them, in order.

    Raises:
        WdskitError: A shard cannot be filled, or a worker process was killed. If several shards cannot be filled, the
            error of the first of them is raised.
    """
    known = [folder.known(shard.name, digest) for shard, digest in shards]
    num_new, done, done_bytes = known.count(None), 0, 0
    total = sum(shard.num_samples for shard, _ in shards)
    total_bytes = None if filler.change.changes_bytes else sum(shard.num_bytes for shard, _ in shards)
    jobs = (ShardJob(shard.name, plan.rows(shard.numbers), digest) for shard, digest in shards)
    new = (job for job, entry in zip(jobs, known, strict=True) if entry is None)
    workers = options.workers or choose_workers(num_new, plan.num_bytes * num_new // max(1, len(known)))

    def show(num_samples: int, num_bytes: int) -> None:
        on_progress(Progress("packing", done + num_samples, done_bytes + num_bytes, total, total_bytes))

    filling: Any
    if options.on is not None:
        filling = fill_on_ray(new, filler, options.on)
    elif workers == 1 or num_new < 2:
        filling = (filler.fill(job, show) for job in new)
    else:
        filling = map_shards(partial(fill_in_worker, filler=filler), new, workers=workers, user=filler.change.map)
    with contextlib.closing(filling):
        for (shard, digest), entry in zip(shards, known, strict=True):
            show(0, 0)
            made: Entry | WdskitError = entry or next(filling)
            if isinstance(made, WdskitError):
                raise made
            done, done_bytes = done + made.num_samples, done_bytes + made.num_bytes
            yield folder.keep(Filled(shard.name, digest, made))
    show(0, 0)
