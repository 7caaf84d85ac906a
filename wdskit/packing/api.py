"""`pack` and `finish_pack`: write the rows of a source to a folder of shards with an index."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from wdskit.dataset.index import ShardEntry
from wdskit.errors import FolderIndexError, PackError, RowError, ShardError, StorageError
from wdskit.files import DISK, Disk, describe_missing
from wdskit.packing.division import PlannedShard, RowRange
from wdskit.packing.fill import ProgressCounter, fill_jobs
from wdskit.packing.options import PackOptions, takes_options
from wdskit.packing.plan import PackPlan, Plan, ShardJobs, divide_plan, read_rows
from wdskit.packing.publish import Destination, open_destination, raised_as_pack_errors
from wdskit.packing.ray import fill_on_ray
from wdskit.packing.sources import Duplicate, Source, find_source
from wdskit.packing.stream import pack_stream
from wdskit.pipeline.ray_connection import import_ray
from wdskit.shards.export import describe_outdated, export
from wdskit.shards.split import format_share
from wdskit.tar.writer import END_BYTES
from wdskit.text import format_bytes, plural

_log = logging.getLogger(__name__)

_ODD = 1e-6  # probability below which a result is not called chance
_SAME_DRAW = (
    "Each run draws the split of a key in the same way, so the samples of one split cannot be split again: "
    "`wdskit split FOLDER ... --seed 1` draws anew."
)


@dataclass(frozen=True)
class PackResult:
    """The result of `pack` or `finish_pack`.

    Attributes:
        folder: The folder that the shards were written to: a path, or a URL as text.
        entries: Index entries of the shards of this run (with `part`, of this part), in order; empty after a dry run.
        num_samples: Samples in these shards, or in the plan of a dry run.
        num_bytes: Bytes of these shards; 0 if a dry run cannot know the bytes, because options change the samples.
        classes: Class number by class name; empty if the source has no classes.
        rejected: Errors of the rows that were left out because of `skip_bad` or `missing="skip"`. The errors of each
            kind are in the order of the source.
        num_other: Files of a source folder, or members of archives, that belong to no row.
        seconds: Duration of the call in seconds.
        plan: The planned shards; None for rows that can be read only once, and after `finish_pack`.
        duplicates: Rows with the images of an earlier row, in order; empty with `duplicates="keep"`.
        dry_run: True if nothing was written because of `dry_run`.
        was_done: True if an earlier run filled all of these shards. This call then wrote nothing, or only published
            them because the earlier run was stopped before that.
        num_cleaned: Rows whose keys `keys="clean"` changed.
        source: Name and kind of the source: `photos: image folder`. Empty for rows from Python.
        notes: Sentences for the user: about files of `wdskit export` that are outdated or that a user changed, and the
            number of images with an EXIF orientation or with several frames. Images are counted only in shards that
            this call wrote, and not with `validate` "none" or "magic".
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
        """Return one line: the folder, samples and shards, and except after a dry run the size and the time."""
        shards = self.plan.shards if self.plan and self.dry_run else self.entries
        size = f"{plural(self.num_samples, 'sample')} in {plural(len(shards), 'shard')}"
        size += "" if self.dry_run else f", {format_bytes(self.num_bytes)}, {self.seconds:.1f} s"
        return f"PackResult({self.folder}: {'would write ' if self.dry_run else ''}{size})"


@takes_options(PackOptions)
def pack(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], dest: str | os.PathLike[str], options: PackOptions
) -> PackResult:
    """Write a folder of shards with its index: `wdskit pack`.

    The same source and options give the same bytes, for any number of workers, at any time, in any locale and for any
    order in which a disk lists its files. A file gets its final name when it is complete, and the index is written
    last. After a stop, the same call continues the run. Existing files with other content are replaced only with
    `overwrite`.

    Args:
        source: A folder of images (a sub-folder is a class); a table (.jsonl, .csv, .tsv, also with .gz, or .parquet);
            COCO annotations (.json); a folder that `datasets` saved; tars or zips. A folder or a pattern names several
            Parquet files, tars or zips. Tars may be in a store: `s3://bucket/old/*.tar`. `-` reads paths from standard
            input. Or an iterable of rows: each row is a dict with `__key__` and fields. The value of a field is bytes,
            a `pathlib.Path`, or the type that belongs to the field's name (`cls` an int, ...). Rows that can be read
            only once, from a generator or standard input, are packed as they arrive.
        dest: The folder to write to, created if it is missing. It cannot be inside the source. Or a folder of a bucket,
            `s3://bucket/train`: each filled shard is uploaded, then its local file is removed; the index comes last.
        options: Keyword arguments: fields of `PackOptions`. docs/pack.md explains them.

    Raises:
        RowError: A row cannot be packed, or has the key of another row or of an existing sample. `where` of the error
            names the file and line of the row.
        PackError: The source has no valid row, an option is invalid, the folder cannot be written, or an existing file
            has a name that this run needs.
        ConfigError: `export` names an unknown kind, or `split_name` has characters that cannot be printed.
        SelectionError: `split` or `columns` is invalid, or a sample has no valid value for a column.
        ShardError: An existing shard is damaged or was replaced.
        FolderIndexError: Another process is writing in the folder, or the folder's index does not match its shards.
        StorageError: A bucket cannot be read or written, or the folder cannot be locked.
        WdskitError: A worker process was killed.
    """
    start = time.perf_counter()
    with open_destination(os.fsdecode(dest), options) as target:
        target.prepare(source)
        found = find_source(source, options)
        if found.is_stream:
            options.check_stream()
        target.refuse_other_options(found)
        shown = entries = None
        if found.is_stream:
            entries = pack_stream(target, found, skip_bad=options.skip_bad)
        else:
            plan = read_plan(target, found, skip_bad=options.skip_bad)
            jobs = plan_jobs(target, found, plan)
            shown = jobs.describe()
            if not options.dry_run:
                entries = fill_and_publish(target, found, jobs)
    written = (shown.shards if shown else ()) if entries is None else entries
    return PackResult(
        folder=target.shown,
        entries=tuple(entries or ()),
        num_samples=sum(shard.num_samples for shard in written),
        num_bytes=sum(shard.num_bytes for shard in written),
        classes=found.classes,
        rejected=tuple(found.rejected),
        num_other=found.num_other,
        seconds=time.perf_counter() - start,
        plan=shown,
        duplicates=tuple(found.duplicates),
        dry_run=entries is None,
        was_done=target.is_done,
        num_cleaned=found.num_cleaned,
        source=f"{found.name}: {found.kind}" if found.kind else "",
        notes=tuple(export_packed(target)),
    )


def export_packed(dest: Destination) -> tuple[str, ...]:
    """Write the files for other readers (`wdskit export`), if `dest.options.export` names some.

    Call this function after the run has published its shards and released the folder's lock. If the run is a dry run or
    a part, or writes to a bucket, nothing is exported and the result is empty.

    Returns:
        Sentences about exported files that are outdated, or that were not replaced because a user has changed them.

    Raises:
        PackError: The export files cannot be written.
        ConfigError: `split_name` has characters that cannot be printed.
    """
    folder, options = dest.folder, dest.options
    if options.dry_run or options.part is not None or dest.upload is not None:
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
    notes += filter(None, [describe_outdated(folder)])
    return tuple(notes)


def finish_pack(dest: str | os.PathLike[str], *, disk: Disk = DISK) -> PackResult:
    """Publish the shards that several parts of a run filled, and write their index: `wdskit pack-finish`.

    The index has the same bytes as the index of a run without parts. The function also completes a run that was stopped
    while it published its shards. If the shards of the folder's last run are published already, nothing is written, and
    the result has these shards. In the result, `classes`, `rejected`, `duplicates` and `source` are empty.

    Args:
        dest: The local folder with the shards of all parts.
        disk: Performs the file operations; tests replace it.

    Raises:
        PackError: `dest` is not an existing local folder, nothing was packed in the folder, its stopped run is not
            divided into parts, or a file cannot be written or has a name that the run needs. Or shards are missing; the
            message names the missing shards and their parts.
        FolderIndexError: A part of the run, or another process, is writing in the folder.
        SelectionError: The values of a column in two parts do not fit together.
        StorageError: The folder cannot be locked.
    """
    start = time.perf_counter()
    target = Destination(os.fsdecode(dest), PackOptions(disk=disk))
    folder = target.folder
    if not folder.is_dir():
        raise PackError(f"{folder}: {describe_missing(str(folder), 'folder')}")
    entries, was_done = target.publish_parts()
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
        notes=tuple(filter(None, [describe_outdated(folder)])),
    )


# The steps of a run whose rows can be read more than once: `reshard` uses them too.


def read_plan(dest: Destination, source: Source, *, skip_bad: bool, keep_first: bool = False) -> Plan:
    """Read all rows of `source` into a new plan. The plan is removed when `dest.resources` is closed.

    `skip_bad` leaves out rows that cannot be packed. `keep_first` leaves out rows with the key of an earlier row. For a
    plan that is too large for memory, the folder of `dest` is created and locked.

    Raises:
        RowError: Without `skip_bad`, a row cannot be packed. Without `keep_first`, two rows have the same key.
        PackError: No row is left; an option names a field that no row has; an option is for images and no row has an
            image; the plan cannot be written; or `on` is set and Ray is not installed.
        FolderIndexError: Another process is writing in the folder.
        WdskitError: A process that reads files was killed, an object in a store cannot be read, or the folder cannot be
            locked.
    """
    options, part = dest.options, dest.options.part_of
    if options.on is not None and not options.dry_run:
        import_ray(PackError)  # an error here costs less than one after the rows are read
    name = "plan" if part is None else f"plan-{part[0]}-of-{part[1]}"
    plan = Plan(
        lambda: dest.work_folder, name=name, is_held=source.is_held, shares=options.shares, sha256=source.sha256
    )
    dest.resources.enter_context(contextlib.closing(plan))
    with raised_as_pack_errors(dest.folder):
        read_rows(
            source,
            plan,
            transforms=options.transforms,
            skip_bad=skip_bad,
            keep_first=keep_first,
            workers=options.workers,
            on_progress=dest.on_progress,
        )
    return plan


def _warn_of_shares(shares: Mapping[str, Fraction], divided: Mapping[str, Sequence[RowRange]]) -> None:
    """Log a warning for the first split whose number of samples is far from its share of all samples.

    `shares` has the share of each split, and `divided` the rows of each shard of a split, both by the split's name.
    "Far" means more than five standard deviations of a random draw, plus one sample.
    """
    counts = {split: sum(span.stop - span.start for span in spans) for split, spans in divided.items()}
    total = sum(counts.values())
    for split, count in counts.items():
        share = float(shares[split])
        if abs(count - share * total) > 5 * math.sqrt(share * (1 - share) * total) + 1:
            what = f"split: {split} has {count:,} of {plural(total, 'sample')} ({count / total:.0%})"
            _log.warning("%s, and its share is %s. %s", what, format_share(shares[split]), _SAME_DRAW)
            return


def plan_jobs(dest: Destination, source: Source, plan: Plan) -> ShardJobs:
    """Divide the rows of the plan into shards, lock and check the destination, and return the shards to fill.

    Raises:
        PackError: The existing shards, lists, classes or columns of the folder conflict with this run; the rows cannot
            be divided into the requested number of shards; or a split would be empty.
        RowError: A row is too large for a shard, or an existing sample has the key of a row.
        SelectionError: The columns of the folder are damaged, or were made for other shards.
        ShardError: An existing shard is damaged or was replaced.
        FolderIndexError: Another process is writing in the folder, or the folder's index does not match its shards.
        StorageError: A bucket cannot be read, or the folder cannot be locked.
    """
    options = dest.options
    order, divided = divide_plan(plan, limits=options.limits, shuffle=options.shuffle)
    if options.shares is not None and not options.append:  # an addition may be too small for each split
        for split, spans in divided.items():
            if not spans:
                share, samples = format_share(options.shares[split]), plural(plan.num_kept, "sample")
                msg = f"split: {split} (share {share}) of {samples} would be empty."
                is_odd = (1 - float(options.shares[split])) ** plan.num_kept < _ODD
                raise PackError(f"{msg}\n  Choose a larger share, or leave it out.{f' {_SAME_DRAW}' * is_odd}")
        _warn_of_shares(options.shares, divided)
    dest.resolve_previous_run(source, num_rows=len(plan), rows=plan.digest, has_labels=plan.has_labels)
    dest.check_keys(plan)
    is_changed = options.transforms.changes_bytes
    by_split = {
        split: tuple(
            PlannedShard(names[number], span.stop - span.start, 0 if is_changed else span.num_bytes)
            for number, span in enumerate(spans, start=dest.first_number(names))
        )
        for names, (split, spans) in zip(dest.names, divided.items(), strict=True)
    }
    shards = (*itertools.chain(*by_split.values()),)
    splits = {} if options.shares is None else by_split
    spans = [*itertools.chain(*divided.values())]
    jobs = ShardJobs(plan, order, spans, shards, splits, options.transforms, options.threads, dest.path, dest.columns)
    if dest.is_done and [*dest.filled()] != [shard.name for shard in shards]:
        raise dest.indexed_already([f"it wrote {len(dest.filled())} shards, and this run has {len(shards)}."])
    dest.check_folder([shard.name for shard in shards], dest.lists(source))
    return jobs


def fill_and_publish(dest: Destination, source: Source, jobs: ShardJobs) -> list[ShardEntry]:
    """Fill the shards that are not filled yet, and publish them. A part of a run fills only its own shards.

    Returns:
        The index entries of all shards of this run or part, in order, including shards that were filled before.

    Raises:
        WdskitError: A shard cannot be filled or published, or a worker process was killed. If several shards cannot be
            filled, the error of the first of these shards is raised.
    """
    options, lists = dest.options, dest.lists(source)
    part = options.part_of or (0, 1)
    dest.start(jobs.shards)
    numbers = range(part[0], len(jobs), part[1])
    own = [jobs.shards[number] for number in numbers]
    num_bytes = None if options.transforms.changes_bytes else sum(shard.num_bytes - END_BYTES for shard in own)
    count = ProgressCounter(dest.on_progress, (sum(shard.num_samples for shard in own), num_bytes))
    filled = dest.filled()
    entries = {number: filled[name] for number in numbers if (name := jobs.shards[number].name) in filled}
    for entry in entries.values():
        count.add(entry)
    todo = [number for number in numbers if number not in entries]
    new = jobs.subset(todo, dest.path)
    if options.on is None:
        filling = fill_jobs(new, workers=options.workers, log=dest.log, disk=options.disk, count=count)
    else:
        filling = fill_on_ray(new, options.on, log=dest.log, disk=options.disk, count=count)
    with contextlib.closing(filling):  # stops the workers before an error is raised
        for number, entry in zip(todo, filling, strict=True):
            dest.add(entry)
            entries[number] = entry
    in_order = [entries[number] for number in numbers]
    dest.publish(in_order, lists)
    return in_order
