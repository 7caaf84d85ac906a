"""A run: plan the shards, start or resume the run, fill the shards, and publish them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.index import ShardEntry
from wdskit.dataset.lock import hold, lock_folder, share_folder
from wdskit.errors import PackError, WdskitError
from wdskit.files import Disk, publish_bytes
from wdskit.packing.destination import (
    Destination,
    locked,
    look_at_destination,
    raised_as_pack_errors,
    refuse_other_options,
)
from wdskit.packing.division import Names, PlannedShard, names_of_all
from wdskit.packing.fill import Count, ShardJob, fill_shard
from wdskit.packing.journal import indexed_already, publish_run, remove_finished
from wdskit.packing.options import WriteOptions
from wdskit.packing.plan import Jobs, LazyJobs, Plan, Series, divide_plan, read_rows
from wdskit.packing.ray import fill_on_ray
from wdskit.packing.row import OnProgress
from wdskit.packing.sources import Source
from wdskit.packing.staging import RunDescription, Staging, differences, open_staging
from wdskit.packing.upload import Upload
from wdskit.shards.parallel import map_shards
from wdskit.shards.split import format_share
from wdskit.tar.writer import END_BYTES
from wdskit.text import plural

_BEGINS = "begins.lock"


@dataclass(frozen=True)
class Work:
    """The source, destination and options of a run.

    Attributes:
        stack: Holds the resources of the run; the caller closes it after the run.
        folder: The destination folder.
        found: The source.
        names: File names of the shards; with splits, the names for each split.
        options: The options of `pack` or `reshard`.
        more: Further values that can change a shard, by name.
        on_progress: Called with the progress of the run.
        disk: Performs the file operations; tests replace it.
        upload: Uploads the shards; None for a local folder.
        lists: Bytes of the files that describe all shards, by file name; None uses the lists of the source.
    """

    stack: contextlib.ExitStack
    folder: Path
    found: Source
    names: Sequence[Names]
    options: WriteOptions
    more: Mapping[str, Any]
    on_progress: OnProgress
    disk: Disk
    upload: Upload | None = None
    lists: Mapping[str, bytes] | None = None

    @functools.cached_property
    def room(self) -> Path:
        """The folder for a plan that is too large for memory.

        The first access creates and locks the destination folder, until the run ends. Errors before the first access
        therefore leave no folder. A dry run uses a temporary folder instead.
        """
        if self.options.dry_run:
            return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        return self.stack.enter_context(locked(self.folder, self.options.part_of, self.disk))

    def look(self, *, has_labels: bool) -> Destination:
        """Inspect the destination folder, which is locked except in a dry run.

        `has_labels` is True if samples of this run have a `cls`.
        """
        _ = self.room
        with raised_as_pack_errors(self.folder):
            target = look_at_destination(self.folder, self.options, self.found.classes, has_labels=has_labels)
            return dataclasses.replace(target, upload=self.upload)

    def to_dict(self) -> dict[str, Any]:
        """Return all values that can change a shard, by name."""
        patterns = [names.pattern for names in self.names]
        return {
            **self.options.to_dict(),
            **self.more,
            "pattern": patterns[0] if self.options.shares is None else patterns,
        }


def open_work(
    stack: contextlib.ExitStack,
    folder: Path,
    found: Source,
    options: WriteOptions,
    *,
    more: Mapping[str, Any] | None = None,
    progress: OnProgress | None,
    disk: Disk,
    upload: Upload | None = None,
    lists: Mapping[str, bytes] | None = None,
) -> Work:
    """Return the `Work` of a run, after checking its options against the folder. The arguments are those of `Work`.

    Raises:
        PackError: A run with different options packed the folder, or the names of the shards are invalid.
    """
    with raised_as_pack_errors(folder):
        names = names_of_all(folder, options.pattern, options.shares)
    on_progress = progress or (lambda _: None)
    work = Work(stack, folder, found, names, options, more or {}, on_progress, disk, upload, lists)
    refuse_other_options(folder, options, work.to_dict(), is_stream=found.is_stream)
    return work


# The plan.


def open_plan(work: Work) -> Plan:
    """Return an empty plan. The run closes the plan at its end."""
    part = work.options.part_of
    name = "plan" if part is None else f"plan-{part[0]}-of-{part[1]}"
    plan = Plan(
        lambda: work.room, name=name, is_held=work.found.is_held, shares=work.options.shares, sha256=work.found.sha256
    )
    return work.stack.enter_context(plan)


def read_plan(work: Work, *, skip_bad: bool, keep_first: bool = False) -> Plan:
    """Read all rows of the source into a plan. With `keep_first`, only the first row of each key is packed.

    Raises:
        RowError: A row cannot be packed, or two rows have the same key.
    """
    options = work.options
    plan = open_plan(work)
    with raised_as_pack_errors(work.folder):
        read_rows(
            work.found,
            plan,
            transforms=options.transforms,
            skip_bad=skip_bad,
            keep_first=keep_first,
            workers=options.workers,
            on_progress=work.on_progress,
        )
    return plan


def plan_jobs(work: Work, plan: Plan) -> tuple[Destination, RunDescription, Jobs]:
    """Plan all shards and check the destination, before any shard is written.

    Raises:
        PackError: The destination, its shards or its lists conflict with this run, or a split would be empty.
        RowError: A row is too large for a shard, or an existing shard has its key.
    """
    options = work.options
    by_count = options.transforms.changes_bytes
    division = divide_plan(plan, limits=options.limits, shuffle=options.shuffle, by_count=by_count)
    if options.shares is not None and not options.append:  # an addition may be too small for each split
        for name, spans in zip(division.splits, division.shards, strict=True):
            if not spans:
                share, samples = format_share(options.shares[name]), plural(plan.num_kept, "sample")
                msg = f"split: {name} (share {share}) of {samples} would be empty."
                raise PackError(f"{msg}\n  Choose a larger share, or leave it out.")
    with raised_as_pack_errors(work.folder):
        target = work.look(has_labels=plan.has_labels)
        run = RunDescription(work.to_dict(), len(plan), plan.digest, None)
        target = resolve_last_run(target, run)
        if target.append and not target.is_done:
            target.check_keys(plan, work.on_progress)
        firsts = map(target.first_number, work.names)
        lengths = map(len, division.shards)
        series = [Series(*each) for each in zip(work.names, firsts, lengths, division.splits, strict=True)]
        spans = [*itertools.chain(*division.shards)]
        jobs = Jobs(plan, division.order, spans, series, options.transforms, options.threads)
        if target.is_done and target.last_run is not None and len(target.last_run.entries) != len(jobs):
            raise indexed_already(
                target.folder, [f"it wrote {len(target.last_run.entries)} shards, and this run has {len(jobs)}."]
            )
        shards = jobs.shards()
        run = dataclasses.replace(run, shards=shards, first=tuple(each.first for each in jobs.series))
        target.check_free(shards)
        target.check_lists(lists_of(work, target))
    return target, run, jobs


def lists_of(work: Work, target: Destination) -> Mapping[str, bytes]:
    """Return the bytes of the files that describe all shards, by file name. An addition keeps the folder's classes."""
    if work.lists is None:
        return target.lists(work.found)
    return {} if target.append else work.lists


def resolve_last_run(target: Destination, run: RunDescription) -> Destination:
    """Return the destination. `is_done` is set if this run already made the folder's index.

    Raises:
        PackError: Another run packed the folder, and this run neither appends nor overwrites; or a shard of this run is
            missing.
        ShardError: A shard of this run was damaged or replaced.
    """
    last = target.last_run
    if last is None:
        return target
    changes = differences(last.run, dataclasses.replace(run, shards=None, first=last.run.first))
    if not changes:
        target.check_there(last)
        return dataclasses.replace(target, is_done=True)
    if not target.append:
        raise indexed_already(target.folder, changes)
    return target


# Filling.


def pack_planned(work: Work, target: Destination, run: RunDescription, jobs: Jobs) -> Sequence[ShardEntry]:
    """Fill the shards and publish them. A part of a run fills its own shards and does not publish.

    Returns:
        The index entries of the filled shards, in order.
    """
    options = work.options
    part = options.part_of
    numbers = range(len(jobs)) if part is None else range(part[0], len(jobs), part[1])
    lists = lists_of(work, target)
    with raised_as_pack_errors(work.folder):
        if target.is_done:
            assert target.last_run is not None
            if part is None:
                remove_finished(work.folder, target.last_run, work.disk)
            return [target.last_run.entries[number] for number in numbers]
        staging = begin(work, target, run)
    spans = [jobs.spans[number] for number in numbers]
    num_bytes = sum(span.num_bytes - END_BYTES for span in spans)
    total_bytes = None if options.transforms.changes_bytes else num_bytes
    count = Count(work.on_progress, (sum(span.stop - span.start for span in spans), total_bytes))

    def fill(chosen: Sequence[int]) -> Generator[ShardEntry, None, None]:
        return fill_jobs(LazyJobs(jobs, [numbers[at] for at in chosen], staging.path), staging, options, count)

    entries = fill_rest([jobs.name(number) for number in numbers], staging, count, fill)
    with raised_as_pack_errors(work.folder):
        if part is None:
            publish_all(target, staging, entries, lists)
        else:
            for name, data in lists.items():
                publish_bytes(staging.path / name, data, disk=work.disk)
    return entries


def publish_all(
    target: Destination, staging: Staging, entries: Sequence[ShardEntry], lists: Mapping[str, bytes]
) -> None:
    """Check the destination folder again, then publish the filled shards."""
    shards = [PlannedShard(entry.name, entry.num_samples, entry.num_bytes) for entry in entries]
    target.check_free(shards)
    target.check_lists(lists)
    publish_run(staging, entries, lists=lists, before=target.index, replaces=target.replaces)


def begin(work: Work, target: Destination, run: RunDescription) -> Staging:
    """Start or resume the run. Return its staging folder."""
    options, folder, disk = work.options, work.folder, work.disk
    if options.part is None:
        if not options.overwrite:
            remove_finished(folder, target.last_run, disk)
        return open_staging(folder, run, restart=options.restart, upload=work.upload, disk=disk)
    with lock_folder(work.room, _BEGINS, wait=True):
        is_alone = work.stack.enter_context(share_folder(folder))
        if is_alone():
            remove_finished(folder, target.last_run, disk)
        how: Any = {"restart": options.restart, "part": options.part_of, "is_alone": is_alone, "disk": disk}
        return open_staging(folder, run, **how)


def fill_rest(
    names: Sequence[str],
    staging: Staging,
    count: Count,
    fill: Callable[[Sequence[int]], Generator[ShardEntry, None, None]],
) -> list[ShardEntry]:
    """Fill the shards that are not filled yet, and log each filled shard.

    Args:
        names: File names of all shards.
        staging: Has the log of the filled shards.
        count: Called with the samples and bytes of filled shards.
        fill: Takes places in `names`, fills these shards, and yields their index entries in order.

    Returns:
        The index entries of all shards, in the order of `names`.
    """
    filled = staging.filled()
    entries = {at: filled[name] for at, name in enumerate(names) if name in filled}
    for entry in entries.values():
        count(entry.num_samples, entry.num_bytes - END_BYTES)
    todo = [at for at in range(len(names)) if at not in entries]
    with contextlib.closing(fill(todo)) as more:
        for at, entry in zip(todo, more, strict=True):
            with raised_as_pack_errors(staging.folder):
                staging.note(entry)
            entries[at] = entry
    return [entries[at] for at in range(len(names))]


def fill_jobs(
    jobs: Sequence[ShardJob], staging: Staging, options: WriteOptions, count: Count
) -> Generator[ShardEntry, None, None]:
    """Fill shards in this process, in several processes, or on a Ray cluster. The bytes are the same.

    Yields:
        The index entries of the shards, in order.

    Raises:
        WdskitError: A shard cannot be filled. The error is that of the first such shard.
    """
    if options.on is None and (options.workers == 1 or len(jobs) < 2):
        for job in jobs:
            yield fill_shard(job, disk=staging.disk, on_sample=count)
        return
    if options.on is None:
        fill = functools.partial(_fill_in_worker, held=staging.log, disk=staging.disk)
        filled: Generator[ShardEntry | WdskitError, None, None] = map_shards(fill, jobs, workers=options.workers)
    else:
        filled = fill_on_ray(jobs, options.on, staging)
    with contextlib.closing(filled):  # stops the workers before the error is raised
        for entry in filled:
            if isinstance(entry, WdskitError):
                raise entry
            count(entry.num_samples, entry.num_bytes - END_BYTES)
            yield entry


def _fill_in_worker(job: ShardJob, *, held: Path, disk: Disk) -> ShardEntry:
    """Call `fill_shard` in a worker process. The process holds the log of the run until the process ends."""
    hold(held)
    return fill_shard(job, disk=disk)
