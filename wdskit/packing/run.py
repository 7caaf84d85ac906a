"""A run: planned, begun or gone on with, its shards filled here or elsewhere, published."""

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
    """What is packed, and how.

    Attributes:
        stack: Closed when the run is over.
        folder: The folder that is packed into.
        found: The source.
        names: Of the shards; with splits those of each.
        options: As `pack` or `reshard` takes them.
        more: What else its shards depend on, by name.
        on_progress: Called with how far it is.
        disk: Performs the file operations; tests replace it.
        upload: Uploads the shards; None where the folder is where they stay.
        lists: Files of all shards together, by name; None for those that the source gives.
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
        """The folder for a plan that is too large for memory. The folder that is packed into is made and locked when
        this is first asked for, so that what is wrong before leaves no trace; it is locked until the run is over.
        """
        if self.options.dry_run:
            return Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        return self.stack.enter_context(locked(self.folder, self.options.part_of, self.disk))

    def look(self, *, has_labels: bool) -> Destination:
        """Look at the folder that is packed into; it is locked where something is going to be written. `has_labels`
        says whether samples of this run have a `cls`.
        """
        _ = self.room
        with raised_as_pack_errors(self.folder):
            target = look_at_destination(self.folder, self.options, self.found.classes, has_labels=has_labels)
            return dataclasses.replace(target, upload=self.upload)

    def to_dict(self) -> dict[str, Any]:
        """All that a shard could depend on, by name."""
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
    """What is packed and how, once it is known that no run with other options has packed the folder. As `Work`.

    Raises:
        PackError: One has, or the shards cannot have the names that they should have.
    """
    with raised_as_pack_errors(folder):
        names = names_of_all(folder, options.pattern, options.shares)
    on_progress = progress or (lambda _: None)
    work = Work(stack, folder, found, names, options, more or {}, on_progress, disk, upload, lists)
    refuse_other_options(folder, options, work.to_dict(), is_stream=found.is_stream)
    return work


# The plan.


def open_plan(work: Work) -> Plan:
    """An empty plan, which is closed when the run is over."""
    part = work.options.part_of
    name = "plan" if part is None else f"plan-{part[0]}-of-{part[1]}"
    plan = Plan(
        lambda: work.room, name=name, is_held=work.found.is_held, shares=work.options.shares, sha256=work.found.sha256
    )
    return work.stack.enter_context(plan)


def read_plan(work: Work, *, skip_bad: bool, keep_first: bool = False) -> Plan:
    """Read all rows of a source. `keep_first`: of rows with one key only the first is packed.

    Raises:
        RowError: A row is bad, or two rows have one key.
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
    """Decide everything, and refuse what is in the way, before anything is written."""
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
    """The files of all shards together, by name. A folder that is added to has the same classes already."""
    if work.lists is None:
        return target.lists(work.found)
    return {} if target.append else work.lists


def resolve_last_run(target: Destination, run: RunDescription) -> Destination:
    """The destination; `is_done` if the run that made its index is this one.

    Raises:
        PackError: The folder is packed already, by another run, and is neither added to nor replaced; or a shard of
            the same run is gone.
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
    """Fill the shards, or some of them, and where they are all there then, publish them."""
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
    """Publish filled shards, once more compared with what stands in the folder now."""
    shards = [PlannedShard(entry.name, entry.num_samples, entry.num_bytes) for entry in entries]
    target.check_free(shards)
    target.check_lists(lists)
    publish_run(staging, entries, lists=lists, before=target.index, replaces=target.replaces)


def begin(work: Work, target: Destination, run: RunDescription) -> Staging:
    """The staging folder of this run, begun or gone on with."""
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
    """Fill the shards that are not filled yet, and note each.

    Args:
        names: Of all shards.
        staging: Knows those that are filled.
        count: Called with what is filled.
        fill: Fills some, by their places in `names`; their lines of the index, in order.

    Returns:
        The lines of all.
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
    """Fill shards in this process, in several, or on a Ray cluster: the bytes do not depend on it.

    Yields:
        Their lines of the index, in order.

    Raises:
        WdskitError: What the first shard raised that could not be filled.
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
    with contextlib.closing(filled):  # after an error nothing is written any more when it is raised
        for entry in filled:
            if isinstance(entry, WdskitError):
                raise entry
            count(entry.num_samples, entry.num_bytes - END_BYTES)
            yield entry


def _fill_in_worker(job: ShardJob, *, held: Path, disk: Disk) -> ShardEntry:
    """`fill_shard` in a worker process, and there only: the log of its run is held until the process ends."""
    hold(held)
    return fill_shard(job, disk=disk)
