"""`pack` and `reshard`: rows -> plan -> jobs -> shards -> commit. `fill_folder` does it for the rows of any source.

A killed run that is started again, also with other options or rows, keeps each filled shard whose job still has the
same digest (`fill.read_filled`), and fills the others. But if a local run was killed during its commit, the commit is
completed first (`Folder.roll_forward`). `Plan.reject` and `leave_out_bad` are `--skip-bad`. `name_shards` names and
numbers the shards, also those of `--append`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict, Unpack

from wdskit.config.types import Cluster, Count, Natural
from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME, classes_json
from wdskit.dataset.index import ShardEntry
from wdskit.errors import PackError, RowError
from wdskit.files import Disk, describe_os_error, disk_in_use, read_own
from wdskit.limits import MAX_SHARD_BYTES
from wdskit.packing.change_sample import Change, MapFunction
from wdskit.packing.fill import Filled, Filler, ShardJob
from wdskit.packing.folder import REJECTED_NAME, Folder, look_at, open_folder
from wdskit.packing.labels import ClassesOption, ClassNames, find_class_names
from wdskit.packing.plan import MAX_BYTES, MAX_SAMPLES, NO_LIMIT, Limits, Plan, PlannedShard
from wdskit.packing.ray import fill_on_ray
from wdskit.packing.row import SAME_FIELD, OnProgress, Reading
from wdskit.packing.sources import find_source
from wdskit.packing.sources.records import Source, parse_pairs
from wdskit.packing.sources.tars import Shards
from wdskit.shards.make_columns import parse_columns, parse_names
from wdskit.shards.parallel import choose_workers, map_shards
from wdskit.shards.shares import parse_shares
from wdskit.storage.urls import is_local, local_path
from wdskit.tar.writer import END_BYTES
from wdskit.text import as_int, hide_secrets, parse_bytes

_CHECK_ROWS = 256  # rows per task of a process that checks rows
_SHOWN = 3
_MIN_BYTES = END_BYTES + 1024  # of a shard: one sample with one small field
_UNSAFE = r"%/\{}[]*?:"  # in names of shards: patterns have these characters


@dataclass(frozen=True)
class PackResult:
    """The result of `pack` or `reshard`.

    Attributes:
        folder: The folder that the shards were written to: a path, or a URL as text.
        entries: Index entries of the shards of this run (with `part`, of this part), in order; empty after a dry run,
            unless `was_done`.
        splits: The planned shards of each split, in order; without splits, of the split "". Empty if `was_done`.
        num_samples: Samples in the shards of this run, or in the plan of a dry run.
        num_bytes: Bytes of these shards; in a dry run, before samples are changed.
        classes: Class number by class name; empty if the source has no classes.
        fields: Names of all fields in these shards, sorted; in a dry run, of the source's rows.
        rejected: Errors of the rows that were left out because of `skip_bad`, in the order of the source.
        num_other: Files of a source folder, or members of tars, that belong to no row.
        num_cleaned: Rows whose keys were changed.
        notes: Sentences for the user.
        dry_run: True if nothing was written because of `dry_run`.
        was_done: True if an earlier run wrote all of these shards, and this call wrote nothing.
    """

    folder: Path | str
    entries: tuple[ShardEntry, ...] = field(repr=False)
    splits: Mapping[str, Sequence[PlannedShard]] = field(repr=False)
    num_samples: int
    num_bytes: int
    classes: Mapping[str, int] = field(repr=False)
    fields: tuple[str, ...]
    rejected: tuple[RowError, ...] = field(repr=False)
    num_other: int
    num_cleaned: int
    notes: tuple[str, ...]
    dry_run: bool
    was_done: bool


Size = Annotated[
    int | str,
    BeforeValidator(lambda size: parse_bytes(size) if isinstance(size, str) else as_int(size)),
    Field(ge=_MIN_BYTES, lt=MAX_SHARD_BYTES),
]
Part = Annotated[str, Field(pattern="^[0-9]{1,9}/[1-9][0-9]{0,8}$")]


@with_config(ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class RunOptions(TypedDict, total=False):
    """The options of a run, which `pack` and `reshard` share and `pack` documents: how rows are divided into shards,
    and who fills them.
    """

    max_samples: Count | None
    max_bytes: Size | None
    num_shards: Count | None
    shuffle: Natural | None
    split: str | Mapping[str, object] | None
    columns: str | Sequence[str]
    append: bool
    part: Part | None
    on: Cluster | None
    workers: Count | None
    dry_run: bool
    progress: OnProgress | None


def check_options(kind: Any, options: Mapping[str, Any]) -> Any:
    """Return options as an object of the class `kind`. PackError: An option has another type, or is unknown."""
    try:
        return TypeAdapter(kind).validate_python(options)
    except ValidationError as err:
        first = err.errors()[0]
        words = first["msg"].removeprefix("Value error, ")
        raise PackError(f"{first['loc'][0]}: {words}, not {hide_secrets(repr(first['input']))}.") from err


def find_limits(run: RunOptions, change: Change) -> Limits:
    """Return the limits of a shard. The sizes of changed samples are known too late for a limit of bytes.

    PackError: There is a number of shards and a limit.
    """
    num_shards, max_samples, size = run.get("num_shards"), run.get("max_samples"), run.get("max_bytes")
    if num_shards is None:
        max_bytes = NO_LIMIT if change.changes_bytes else int(size or MAX_BYTES)
        return Limits(max_samples or MAX_SAMPLES, max_bytes, None)
    if max_samples is not None or size is not None:
        raise PackError("num_shards: it takes the place of max_samples and max_bytes. Give one of them.")
    return Limits(NO_LIMIT, NO_LIMIT, num_shards)


def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    dest: str | os.PathLike[str],
    *,
    image: str | None = None,
    key: str | None = None,
    fields: Mapping[str, str] | Sequence[str] = (),
    classes: ClassesOption | None = None,
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
    **run: Unpack[RunOptions],
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, for any number of workers, at any time, in any locale and for any
    order in which a disk lists its files. The data set changes in one step, when the index is written. After a stop,
    the same call continues: shards whose rows and options did not change are kept, all others are filled. A run that
    was stopped while it moved its shards into place is completed first, whatever the new call asks.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, also with .gz, a .json array,
            or .parquet); COCO annotations (.json); tars, local or in a store: `s3://bucket/old/*.tar`. Or an iterable
            of rows: each row is a dict with `__key__` and fields. The value of a field is bytes, a `pathlib.Path`, or
            the type that belongs to the field's name (`cls` an int or a name, `npy` an array, ...).
        dest: The folder to write to, created if it is missing. Or a folder of a bucket, `s3://bucket/train`: each
            filled shard is uploaded, then its local file is removed; the index comes last.
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
        map: A function of (key, fields) that returns the fields to pack, all as bytes. Its attribute `version`
            identifies its results; another version fills shards again.
        **run: The keyword arguments below, which `reshard` has, too.

    Keyword Args:
        max_samples: Most samples in a shard. Default: 10,000.
        max_bytes: Most bytes of a shard's file: `200MB`. Default: 1 GB. It has no effect on changed samples, whose
            sizes are not known beforehand.
        num_shards: Number of shards of equal size, in place of limits.
        shuffle: Seed of a random order. Default: the order of the source.
        split: Splits by key, each with its own shards: `train=0.9,val=0.1`.
        columns: Columns to write beside the index: `width,height,cls,json.score`.
        append: Add shards to those in `dest`. The new rows take the classes and columns of the folder.
        part: `I/N`: fill only each N-th shard, from shard I on; then the same call without `part` completes the folder.
        on: `ray` or `ray://HOST:PORT`: fill the shards on a Ray cluster whose nodes see source and `dest`.
        workers: Number of processes. Default: all cores, fewer for little data.
        dry_run: Plan, but write nothing.
        progress: Called from time to time with the stage ("reading", "checking" or "packing"), the number of samples
            that it has completed, and the number of all its samples, None if unknown.

    Raises:
        RowError: A row cannot be packed, a tar of the source is damaged, or a row has the key of another row or of an
            existing sample. `where` of the error names the file and line of the row.
        PackError: The source has no valid row, an option is invalid, the folder cannot be written, or it has another
            data set.
        SelectionError: `split` or `columns` is invalid, or a sample has no valid value for a column.
        ShardError: An existing shard is damaged.
        FolderIndexError: Another process is writing in the folder, or a file of it is damaged or foreign.
        StorageError: A bucket cannot be read or written, or the folder cannot be locked.
        WdskitError: A worker process was killed.
    """
    named = {SAME_FIELD.get(name, name): column for name, column in parse_pairs(fields, "field").items()}
    columns = {"image": image, "key": key, "fields": named, "keys": keys, "images": images and os.fspath(images)}
    how = check_options(Reading, {**columns, "sidecars": parse_names(sidecars), "files": parse_names(files)})
    own = {"validate": validate, "resize": resize, "format": format, "quality": quality, "keep_json": keep_json}
    change = check_options(Change, {**own, "map": map})
    return fill_folder(find_source(source, how), dest, change, run, classes=classes, skip_bad=skip_bad)


def reshard(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    *,
    where: str | None = None,
    keep: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    rename: str | Sequence[str] | Mapping[str, str] = (),
    map: MapFunction | None = None,  # noqa: A002 (the name of the option)
    **run: Unpack[RunOptions],
) -> PackResult:
    """Write new shards from finished shards: merge, split, select or shuffle them: `wdskit reshard`.

    The bytes of the fields are copied, not decoded; `wdskit verify` finds changed bytes in the sources. The new shards
    have the bytes that `pack` writes for the same samples, and the `classes.json` of the sources. Sources with an index
    are compared with it: size and number of samples; of a store also the sha256. A key that some reader would refuse is
    cleaned, and kept in `json`.

    Args:
        source: Shards, local or in a store: a folder, glob or brace pattern, several joined by `::`, or a list.
        dest: The folder to write to, or a folder of a bucket.
        where: Keep the samples for which this condition on the columns of the sources is true: `width >= 256`.
        keep: Keep only these fields: `jpg,cls`.
        drop: Leave out these fields: `txt`.
        rename: New names of fields: `jpeg=jpg,class=cls`, or a mapping.
        map: As for `pack`.
        **run: As for `pack`: `max_samples`, `max_bytes`, `num_shards`, `shuffle`, `split`, `columns`, `append`, `part`,
            `on`, `workers`, `dry_run` and `progress`.

    Raises:
        PackError: An option is invalid, no sample is left, the folder cannot be written, or it has another data set.
        RowError: Two samples have one key, a source shard is damaged, or a renamed field does not fit its name.
        SelectionError: `where`, `split` or `columns` is invalid, or a folder lacks a column.
        FolderIndexError: A source does not match its index, two sources number their classes differently, or another
            process is writing in `dest`.
        StorageError: A source cannot be read, or a bucket cannot be written.
        WdskitError: A worker process was killed.
    """
    paths = [os.fspath(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    renames = parse_pairs(rename, "rename")
    shards = Shards(paths, where=where, keep=parse_names(keep), drop=parse_names(drop), rename=renames)
    change = Change(map=map, checks=None if map else frozenset(renames.values()))
    return fill_folder(shards, dest, change, run)


def fill_folder(
    source: Source,
    dest: str | os.PathLike[str],
    change: Change,
    run: RunOptions,
    *,
    classes: ClassesOption | None = None,
    skip_bad: bool = False,
) -> PackResult:
    """Pack the rows of a source into a folder. Arguments and errors are those of `pack`."""
    dest = os.fsdecode(dest)
    if not dest.strip() or "\0" in dest:
        raise PackError(f"DEST is {dest!r}, which is no path. Write . for the current folder.")
    dest = local_path(dest) if is_local(dest) else dest
    run = check_options(RunOptions, run)
    on_progress, append = run.get("progress") or (lambda *_: None), run.get("append")
    is_part = run.get("part") is not None
    part, num_parts = map(int, (run.get("part") or "0/1").split("/"))
    if part >= num_parts:
        raise PackError(f"part: {part}/{num_parts} is none of the parts 0/{num_parts} to {num_parts - 1}/{num_parts}.")
    limits = find_limits(run, change)
    columns: Mapping[str, Mapping[str, Any]] = parse_columns(run.get("columns", ()))
    split, shuffle = run.get("split"), run.get("shuffle")
    shares = {} if split is None else parse_shares(split)
    disk = disk_in_use()
    splits: Mapping[str, Sequence[PlannedShard]] = {}
    try:
        with (
            open_destination(dest, run, disk) as folder,
            contextlib.closing(Plan(folder.work, shares, skips_bad=skip_bad, disk=disk)) as plan,
        ):
            own = ClassNames(folder.classes, folder.shown) if append and folder.classes else None
            given = ClassNames(source.classes, source.path) if source.classes else None
            given = given if classes is None else find_class_names(classes)
            allowed = given if given or source.copies else own
            plan.read(source.rows(), allowed, reads_labels=not source.copies, on_progress=on_progress)
            has_both = CLASS_FIELD in plan.fields and (own or any(CLASS_FIELD in one.fields for one in folder.entries))
            if append and has_both and plan.class_numbers != (own.numbers if own else {}):
                raise PackError(f"{folder.shown}: its classes are not those of the new rows: a label would mean two.")
            if append and folder.entries:
                asked, columns = columns, folder.column_sources()
                if asked and asked != columns:
                    raise PackError(f"{folder.shown}: columns: new shards get those of the folder: {[*columns]}.")
            filler = Filler(folder.work, change, plan.class_numbers, plan.dtypes, columns, disk)
            if skip_bad:
                leave_out_bad(plan, filler, run.get("workers"), on_progress)
            rejected = [plan.rejected[number] for number in sorted(plan.rejected)]
            if not len(plan.kept):
                first = "".join(f"\n  {err.where}: {err.problem}" for err in rejected[:_SHOWN])
                raise PackError(f"{source.path or 'the rows'}: there is nothing to pack: no row is valid.{first}")
            options = filler.digest_options()
            order = json.dumps([*limits, shuffle, split], default=str)
            digest = plan.digest(plan.kept, options + order.encode())
            entries = folder.done(digest)
            was_done = bool(entries)
            if not was_done:
                if folder.entries and not append:
                    way = "Pack into a new folder, or add to this one with --append."
                    raise PackError(f"{folder.shown}: another data set is here. {way}")
                plan.check_keys(folder.keys)
                names = name_shards(folder, dest, [*shares] or [""])
                splits = plan.divide(limits, names, shuffle=shuffle, options=options, least=int(not folder.entries))
            todo = [shard for shards in splits.values() for shard in shards]
            folder.check_names(todo)
            if todo and not run.get("dry_run"):
                filled = [*fill_all(plan, filler, folder, todo[part::num_parts], run, on_progress)]
                entries = tuple(each.entry for each in filled)
                if not is_part:
                    folder.commit(filled, find_lists(plan, folder, rejected), columns, digest)
            elif was_done and not is_part and not run.get("dry_run"):
                folder.clean()
    except OSError as err:
        where = " -> ".join(str(name) for name in (err.filename, err.filename2) if name)
        raise PackError(f"{where or dest}: {describe_os_error(err)}") from err
    written: Sequence[ShardEntry | PlannedShard] = todo if run.get("dry_run") and not was_done else entries
    return PackResult(
        folder=dest if not is_local(dest) else Path(dest),
        entries=entries,
        splits=splits,
        num_samples=sum(shard.num_samples for shard in written),
        num_bytes=sum(shard.num_bytes for shard in written),
        classes=plan.class_numbers,
        fields=tuple(sorted({name for one in entries for name in one.fields} or plan.fields)),
        rejected=tuple(rejected),
        num_other=source.num_other,
        num_cleaned=plan.num_cleaned,
        notes=tuple(source.notes),
        dry_run=run.get("dry_run", False),
        was_done=was_done,
    )


def open_destination(dest: str, run: RunOptions, disk: Disk) -> contextlib.AbstractContextManager[Folder]:
    """Open the folder of a run: local, of a bucket, or only looked at for a dry run."""
    is_part = run.get("part") is not None
    if is_local(dest):
        return look_at(Path(dest)) if run.get("dry_run") else open_folder(Path(dest), is_part=is_part, disk=disk)
    if run.get("append") or is_part:
        raise PackError(f"{dest}: append and part are for local folders. Pack into a new folder of the bucket.")
    from wdskit.packing.upload import open_bucket  # loads obstore

    return open_bucket(dest, disk=disk)


def name_shards(folder: Folder, dest: str, splits: Sequence[str]) -> Callable[[str, int], str]:
    """Return a function of a split and the number of a new shard in it. It returns the name of the shard: the numbers
    follow those of the shards in the folder. Without splits, the split is "", and shards are named after `dest`.
    """
    given = Path(dest).resolve().name  # an index holds only names that can be printed
    name = "".join("_" if each in _UNSAFE or not each.isprintable() else each for each in given).lstrip(".") or "shard"
    first_of = {split: folder.first_number(split or name) for split in splits}
    return lambda split, number: f"{split or name}-{first_of[split] + number:06d}.tar"


def find_lists(plan: Plan, folder: Folder, rejected: Sequence[RowError]) -> dict[str, bytes]:
    """Return the bytes of `classes.json` and `rejected.jsonl` by name, without files that would be empty."""
    lists = {}
    if plan.class_numbers and folder.classes is None:
        lists[CLASSES_NAME] = classes_json(plan.class_numbers)
    if rejected:
        lines = [json.dumps({"where": err.where, "reason": err.problem}, ensure_ascii=False) for err in rejected]
        earlier = (read_own(folder.path / REJECTED_NAME) or b"") if folder.entries else b""
        lists[REJECTED_NAME] = earlier + "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
    return lists


def leave_out_bad(plan: Plan, filler: Filler, workers: int | None, on_progress: OnProgress) -> None:
    """Read each row as it would be packed, and leave out those that cannot be."""
    kept = plan.kept
    starts = range(0, len(kept), _CHECK_ROWS)
    batches = (plan.rows(kept[start : start + _CHECK_ROWS]) for start in starts)
    workers = workers or choose_workers(len(starts), plan.num_bytes)
    with contextlib.closing(map_shards(filler.find_bad, batches, workers=workers, user=filler.change.map)) as found:
        for start, errors in zip(starts, found, strict=True):
            for at, err in errors.items():
                plan.reject(int(kept[start + at]), err)
            on_progress("checking", min(start + _CHECK_ROWS, len(kept)), len(kept))


def fill_all(
    plan: Plan, filler: Filler, folder: Folder, shards: Sequence[PlannedShard], run: RunOptions, on_progress: OnProgress
) -> Iterator[Filled]:
    """Fill the shards that are not filled yet, here, in worker processes or on a cluster. Yield all of them, in order.

    Raises:
        WdskitError: A shard cannot be filled, or a worker process was killed. If several shards cannot be filled, the
            error of the first of them is raised.
    """
    known = [folder.known(shard.name, shard.digest) for shard in shards]
    num_new, done, total = known.count(None), 0, sum(shard.num_samples for shard in shards)
    todo = (shard for shard, filled in zip(shards, known, strict=True) if filled is None)
    new = (ShardJob(shard.name, plan.rows(shard.numbers), shard.digest) for shard in todo)
    if (on := run.get("on")) is not None:
        filling = fill_on_ray(new, filler, on)
    else:
        workers = run.get("workers") or choose_workers(num_new, plan.num_bytes * num_new // max(1, len(known)))
        filling = map_shards(filler.fill, new, workers=workers, user=filler.change.map)
    with contextlib.closing(filling):
        for filled in known:
            on_progress("packing", done, total)
            made = folder.keep(filled or next(filling))
            done += made.entry.num_samples
            yield made
    on_progress("packing", done, total)
