"""`reshard`: from finished shards to others, by ranges of bytes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wdskit.dataset.index import Exports, ShardEntry
from wdskit.export.api import parse_exports
from wdskit.files import DISK, Disk
from wdskit.packing.destination import finish_what_was_stopped, folder_of
from wdskit.packing.plan import Limits, Names, make_limits, names_of
from wdskit.packing.planning import PlannedShard
from wdskit.packing.reshard_choice import Choice, check_seed, check_word, check_workers, make_choice
from wdskit.packing.reshard_fields import Changes, make_changes
from wdskit.packing.reshard_plan import Jobs, divide_samples, join_sources, shuffle_samples
from wdskit.packing.reshard_run import ReshardIntent, ReshardRun
from wdskit.packing.reshard_samples import Samples
from wdskit.packing.reshard_scan import Scanned
from wdskit.packing.reshard_sources import (
    Seen,
    check_dest,
    digest_sources,
    find_classes,
    list_sources,
    scan_all,
    scan_jobs,
)
from wdskit.packing.sources import Progress, Tell
from wdskit.shards.shares import parse_share


@dataclass(frozen=True)
class ReshardResult:
    """What `reshard` did.

    Attributes:
        folder: Where it wrote.
        entries: The new shards, in order; none after a dry run.
        shards: Names, samples and bytes of these shards, planned or written.
        num_source_shards: Shards that were read.
        num_source_samples: Samples in them: those that were written, and those of the next four.
        num_sampled_out: Samples outside the share of `sample`.
        num_filtered: Samples for which the filter does not hold.
        num_missing: Samples that were left out because they lack what the filter asks for.
        num_duplicates: Samples whose key an earlier one has.
        num_ignored: Members that belong to no sample; they are not written.
        num_copied: Samples whose bytes were copied as they are; the others have new headers.
        classes_lost: Why there is no `classes.json` where a source has one; empty otherwise.
        was_done: The folder held all of it already, so that nothing was to do.
        seconds: How long it took.
    """

    folder: Path
    entries: tuple[ShardEntry, ...]
    shards: tuple[PlannedShard, ...]
    num_source_shards: int
    num_source_samples: int
    num_sampled_out: int
    num_filtered: int
    num_missing: int
    num_duplicates: int
    num_ignored: int
    num_copied: int
    classes_lost: str
    was_done: bool
    seconds: float

    @property
    def num_samples(self) -> int:
        """Samples that were written, or planned in a dry run."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all new shards."""
        return sum(shard.num_bytes for shard in self.shards)


def reshard(
    source: str | Sequence[str],
    dest: str | os.PathLike[str],
    *,
    max_samples: int | None = None,
    max_bytes: int | None = None,
    num_shards: int | None = None,
    multiple_of: int | None = None,
    shuffle: int | None = None,
    filter: str | None = None,  # noqa: A002 (the option's name)
    missing: str = "error",
    sample: str | None = None,
    seed: int = 0,
    keep: str | Sequence[str] | None = None,
    drop: str | Sequence[str] | None = None,
    rename: str | Sequence[str] | Mapping[str, str] | None = None,
    keys: str = "given",
    duplicate_keys: str = "error",
    check: str = "headers",
    workers: int = 1,
    pattern: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    restart: bool = False,
    also: Sequence[str] = (),
    split_name: str = "",
    progress: Tell | None = None,
    disk: Disk = DISK,
) -> ReshardResult:
    """Write finished shards anew: merged, split, re-sized, shuffled, filtered: `wdskit reshard`.

    The new shards are those that `pack` would have written of the same samples: members sorted by field, our headers,
    an `.idx` beside each, the folder's index last. Nothing is decoded; samples that have this form already are copied
    as they are. The same sources and options give the same bytes, whatever the number of workers. A run that was
    stopped is gone on with by the same call, and refused where the sources, the options or the version are others
    since; no file that holds something else is overwritten.

    Args:
        source: Local shards as `dataset.patterns.list_shards` takes them. Those of an indexed folder are compared with
            its index; others are read from end to end by the strict reader.
        dest: The folder to write to; created where it is missing. Not one of the sources'.
        max_samples: Most samples in a shard; 10,000 where `num_shards` is not given.
        max_bytes: Most bytes of a shard's file; 1 GB where `num_shards` is not given.
        num_shards: So many shards, equal within one sample.
        multiple_of: A multiple of this number of shards, equal within one sample.
        shuffle: Seed of a permutation of all samples; None keeps their order.
        filter: What must hold for a sample to stay, as `json.width >= 256 and cls in (1, 2)`; see
            `shards.expressions.Expression`.
        missing: "error", or "skip": leave out samples that lack what the filter asks for.
        sample: A share such as "10%": samples whose key's draw is in it. A key is in or out for ever, wherever it
            stands; a smaller share of one seed is part of a larger one.
        seed: Of these draws.
        keep: Fields that stay, `jpg,cls` or a list; None for all.
        drop: Fields that go.
        rename: New names of fields, `jpeg=jpg`; they are kept and dropped by their old names.
        keys: "given", or "hashed": a hash of each key, for those that not every reader would give back; the key stands
            in `json` then.
        duplicate_keys: "error", or "first": of samples with one key, the first.
        check: "headers", or "sha256": the whole of each source shard is compared with the digest in its folder's index
            before anything is written.
        workers: Processes. With more than one, a script needs `if __name__ == "__main__":`, as for all that spawns.
        pattern: Names of the shards, `train-%06d.tar`; by default from the name of `dest`.
        dry_run: Plan everything and write nothing.
        overwrite: Replace what is packed in `dest`: its index goes first, then its shards, lists and selections.
        restart: Where a run was stopped that wrote something else, remove what it has written and begin anew.
        also: Files for other readers beside the new shards: some of `export.api.KINDS`.
        split_name: The split that timm and energon are told for all shards; by default what the shards are called.
        progress: Called now and then.
        disk: What writes.

    Raises:
        PackError: A bad option, no sample left, two samples of one key, or the folder cannot be written or is not free.
        ConfigError: `also` holds what is no kind, or `sample` is no share.
        RowError: A sample cannot be written as it has to be.
        SelectionError: The filter is none, or has no answer for a sample.
        ShardError: A source shard is not right, or changed meanwhile.
        FolderIndexError: A source does not match its folder's index, or another process is writing in `dest`.
        StorageError: A source cannot be read.
    """
    start = time.perf_counter()
    check_workers(workers)
    check_seed("shuffle", shuffle)
    check_word("check", check, ("headers", "sha256"))
    check_word("duplicate_keys", duplicate_keys, ("error", "first"))
    task = _Task(
        folder=folder_of(os.fsdecode(dest)),
        limits=make_limits(max_samples, max_bytes, num_shards=num_shards, multiple_of=multiple_of),
        choice=make_choice(filter=filter, missing=missing, sample=sample, seed=seed),
        changes=make_changes(keep=keep, drop=drop, rename=rename, keys=keys),
        shuffle=shuffle,
        first_of_key=duplicate_keys == "first",
        has_check=check == "sha256",
        also=parse_exports(also, split_name=split_name),
        intent=ReshardIntent(overwrite, restart, dry_run),
        told={
            "shuffle": shuffle,
            "filter": filter,
            "missing": missing,
            "sample": None if sample is None else str(parse_share(sample)),
            "seed": seed,
            "duplicate_keys": duplicate_keys,
        },
        workers=workers,
        tell=progress or _say_nothing,
        disk=disk,
    )
    names = names_of(task.folder, pattern)
    return task.run(source, names, start)


def _say_nothing(_: Progress) -> None:
    """Progress where nobody looks."""


@dataclass(frozen=True)
class _Task:
    """The options of `reshard`, checked."""

    folder: Path
    limits: Limits
    choice: Choice
    changes: Changes
    shuffle: int | None
    first_of_key: bool
    has_check: bool
    also: Exports
    intent: ReshardIntent
    told: Mapping[str, object]  # the other options that a shard could depend on
    workers: int
    tell: Tell
    disk: Disk

    def run(self, source: str | Sequence[str], names: Names, start: float) -> ReshardResult:
        found = list_sources(source)
        check_dest(self.folder, found, overwrite=self.intent.overwrite)
        finish_what_was_stopped(self.folder, None, self.intent, self.disk)
        inputs = digest_sources(found)
        classes, classes_lost = find_classes(found, self.changes)
        seen = Seen()
        jobs = scan_jobs(found, self.choice, self.changes, has_check=self.has_check)
        samples, num_duplicates = self._samples(seen.counted(scan_all(jobs, workers=self.workers, tell=self.tell)))
        seen.check(len(samples), num_duplicates, self.changes)
        num_copied = int(samples.copied.sum())
        if self.shuffle is not None:
            shuffle_samples(samples, self.shuffle)
        spans = divide_samples(samples, self.limits)
        planned = Jobs(samples, spans, names, self.changes, self.also)
        told = {
            **self.limits.described(),
            **self.changes.told(),
            **self.told,
            **_digests(classes),
            "pattern": names.pattern,
        }
        rest = self.also, self.workers, self.tell, self.disk
        run = ReshardRun(self.folder, self.intent, inputs, told, planned, classes, *rest)
        entries: Sequence[ShardEntry] = ()
        was_done = False
        if self.intent.dry_run:
            run.look()
        else:
            entries, was_done = run.write()
        return ReshardResult(
            folder=self.folder,
            entries=tuple(entries),
            shards=tuple(planned.shards),
            num_source_shards=len(jobs),
            num_source_samples=seen.num_samples,
            num_duplicates=num_duplicates,
            num_ignored=seen.num_ignored,
            num_copied=num_copied,
            classes_lost=classes_lost,
            was_done=was_done,
            seconds=time.perf_counter() - start,
            **vars(seen.gone),
        )

    def _samples(self, scans: Iterable[Scanned]) -> tuple[Samples, int]:
        return join_sources(scans, hashed=self.changes.hashed, first_of_key=self.first_of_key)


def _digests(lists: Mapping[str, bytes]) -> dict[str, str]:
    """Of files that are taken over, for the record of the run."""
    return {f"digest of {name}": hashlib.sha256(data).hexdigest()[:16] for name, data in lists.items()}
