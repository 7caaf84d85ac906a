"""`reshard`: pack the samples of finished shards again."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit.dataset.classes import CLASSES_NAME, parse_classes
from wdskit.dataset.columns import Column, list_columns
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import ShardList
from wdskit.errors import PackError, RowError, SelectionError
from wdskit.packing.api import export_packed, fill_and_publish, plan_jobs, read_plan
from wdskit.packing.division import PlannedShard
from wdskit.packing.options import ReshardOptions, takes_options
from wdskit.packing.publish import open_destination
from wdskit.packing.row import KEYS_REMEDY
from wdskit.packing.sources import Source, count_cleaned
from wdskit.packing.sources.shards import ShardSamples, check_dest, find_classes, merged_splits
from wdskit.packing.sources.tar_samples import known_digests, list_tars
from wdskit.storage.urls import is_local
from wdskit.text import format_bytes, plural


@dataclass(frozen=True)
class ReshardResult:
    """The result of `reshard`.

    Attributes:
        folder: Folder of the new shards: a path, or a URL as text.
        entries: Index entries of the new shards (with `part`, of this part), in order; empty after a dry run.
        shards: Name, samples and bytes of the shards of `entries`, or of all planned shards after a dry run. The bytes
            are 0 if a dry run cannot know them, because options change the samples.
        num_source_shards: Shards that were read.
        num_source_samples: Samples in the source shards. Without `part`: `num_samples` plus the next four counts.
        num_sampled_out: Samples outside the share of `sample`.
        num_filtered: Samples for which the filter is false.
        num_missing: Samples that were left out because they lack a value that the filter uses.
        num_duplicates: Samples with the key of an earlier sample.
        num_ignored: Members that belong to no sample; they are not written.
        num_cleaned: Samples whose keys were changed by `keys="clean"`.
        merged: A note if shards of several splits (`train`, `val`) become one data set; else empty.
        classes_lost: Why the new folder has no `classes.json` although a source has one; else empty.
        was_done: True if an earlier run filled all of these shards. This call then wrote nothing, or only published
            them because the earlier run was stopped before that.
        seconds: Duration of the call in seconds.
        notes: Sentences about exported files that are outdated or that a user changed, and about columns of the sources
            that the new folder does not have.
    """

    folder: Path | str
    entries: tuple[ShardEntry, ...]
    shards: tuple[PlannedShard, ...]
    num_source_shards: int
    num_source_samples: int
    num_sampled_out: int
    num_filtered: int
    num_missing: int
    num_duplicates: int
    num_ignored: int
    num_cleaned: int
    merged: str
    classes_lost: str
    was_done: bool
    seconds: float
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the folder, samples, shards, size and time."""
        size = f"{self.num_samples:,} of {self.num_source_samples:,} samples in {plural(len(self.shards), 'shard')}"
        return f"ReshardResult({self.folder}: {size}, {format_bytes(self.num_bytes)}, {self.seconds:.1f} s)"

    @property
    def num_samples(self) -> int:
        """Samples that were written, or planned in a dry run."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all new shards; 0 if a dry run cannot know them."""
        return sum(shard.num_bytes for shard in self.shards)


@takes_options(ReshardOptions)
def reshard(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dest: str | os.PathLike[str],
    options: ReshardOptions,
) -> ReshardResult:
    """Write new shards from finished shards: merge, split, resize, shuffle or filter them. CLI: `wdskit reshard`.

    The new shards have the bytes that `pack` writes for the same samples: the same headers, and members sorted by
    field. Each shard gets an `.idx` file, and the folder's index is written last. Fields are copied without decoding,
    unless an option needs their values. The same sources and options give the same bytes for any number of workers.
    After a stop, the same call continues the run; a call with other sources, other options or another version needs
    `restart`. Existing files with other content are replaced only with `overwrite`.

    Args:
        source: Shards, local or remote: a folder, glob or brace pattern, several joined by `::`, or a list. Shards of
            an indexed folder are compared with its index. Remote shards are read twice.
        dest: The folder to write to, created if it is missing, or a folder of a bucket, `s3://bucket/train`. It cannot
            be a source's folder.
        options: Keyword arguments, one for each field of `ReshardOptions` to set.

    Raises:
        PackError: An option is invalid, no sample is left, the folder cannot be written, or an existing file has
            a name that this run needs.
        RowError: Two samples have the same key, or a sample cannot be packed with these options.
        ConfigError: `export` names an unknown kind, `split_name` has characters that cannot be printed, or `sample` is
            not a share.
        SelectionError: The filter, `split` or `columns` is invalid, or the filter or a column cannot be evaluated for a
            sample.
        ShardError: A source shard is invalid, or changed during the run.
        FolderIndexError: A source does not match its folder's index, or another process is writing in `dest`.
        StorageError: A source cannot be read, a bucket cannot be written, or the folder cannot be locked.
        WdskitError: A worker process was killed.
    """
    start = time.perf_counter()
    changes = options.changes
    with _advise_filter(), open_destination(os.fsdecode(dest), options) as target:
        shards = list_tars(source)
        check_dest(target.folder, shards, overwrite=options.overwrite)
        target.prepare(None)
        lists, classes_lost = find_classes(shards, changes)
        names = parse_classes(lists[CLASSES_NAME], CLASSES_NAME) if lists else ()
        samples = ShardSamples(shards, options.choice, changes, check=options.check == "sha256")
        found = Source(
            os.fspath(source) if isinstance(source, str | os.PathLike) else "the shards",
            samples.rows(keys=changes.keys),
            kind="shards",
            classes={name: number for number, name in enumerate(names)},
            reader=samples,
            sha256=known_digests(shards),
            lists=lists,
        )
        if changes.keys == "clean":
            found.rows = count_cleaned(found, found.rows)
        target.refuse_other_options(found)
        plan = read_plan(target, found, skip_bad=False, keep_first=options.duplicate_keys == "first")
        accounted = len(plan) + samples.left_out.total
        if accounted != samples.num_samples:
            msg = f"{samples.num_samples} samples were read, but {accounted} are accounted for. Nothing was written."
            raise PackError(msg)
        jobs = plan_jobs(target, found, plan)
        planned = jobs.shards
        entries = () if options.dry_run else fill_and_publish(target, found, jobs)
        num_duplicates = len(plan) - plan.num_kept
    if not options.dry_run:  # the plan does not know the bytes of shards with changed images
        planned = tuple(PlannedShard(entry.name, entry.num_samples, entry.num_bytes) for entry in entries)
    return ReshardResult(
        folder=target.shown,
        entries=tuple(entries),
        shards=planned,
        num_source_shards=len(shards.urls),
        num_source_samples=samples.num_samples,
        num_duplicates=num_duplicates,
        num_ignored=samples.num_other,
        num_cleaned=found.num_cleaned,
        merged=merged_splits(shards),
        classes_lost=classes_lost,
        was_done=target.is_done,
        seconds=time.perf_counter() - start,
        notes=(*export_packed(target), *_note_lost_columns(shards, target.columns)),
        **vars(samples.left_out),
    )


def _note_lost_columns(shards: ShardList, kept: Container[str]) -> Iterator[str]:
    """Yield one note about the lost columns: the columns of the local source folders that are not in `kept`.

    `kept` has the columns of the new folder. Yield nothing if no column is lost.
    """
    found: dict[str, Column] = {}
    for folder in dict.fromkeys(os.path.dirname(url) or "." for url in shards.urls if is_local(url)):
        with contextlib.suppress(SelectionError):
            found = {**list_columns(Path(folder)), **found}
    lost = {name: column.source for name, column in found.items() if name not in kept}
    if lost:
        yield f"the columns {', '.join(lost)} of the sources are not in DEST. {'; '.join(_remake_columns(lost))}."


def _remake_columns(sources: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a text for each command that makes lost columns again in the new folder DEST: the command and its columns.
    For a column that cannot be made from DEST, yield a text that says so.

    `sources` maps the name of each lost column to its `Column.source`, which says how its values are computed.
    """
    paths = {name: str(source["path"]) for name, source in sources.items() if "path" in source}
    if paths:
        columns = ",".join(name if name == path else f"{name}={path}" for name, path in paths.items())
        yield f"`wdskit index DEST --columns {shlex.quote(columns)}` makes {', '.join(paths)}"
    for name, source in sources.items():
        if "shards" in source:
            yield f"{name} selects samples of some shards of the source, and cannot be made from DEST"
        elif name not in paths:
            command = f"split DEST {source['split']}" if "split" in source else f"reshard DEST --selection {name}"
            given = {option: source.get(option) for option in ("by", "filter", "missing", "sample", "seed")}
            options = "".join(f" --{option} {shlex.quote(str(value))}" for option, value in given.items() if value)
            yield f"`wdskit {command}{options}` makes {name}"


@contextlib.contextmanager
def _advise_filter() -> Iterator[None]:
    """If a RowError of the `with` block advises --skip-bad or --key-column, raise it with an option of `reshard`
    instead, because `reshard` lacks these two options. Other errors stay unchanged.
    """
    try:
        yield
    except RowError as err:
        problem, _, remedy = str(err).rpartition("\n  ")
        key = err.where.rpartition(".tar: ")[2]
        if remedy.endswith("or use --skip-bad."):
            condition = f"key not in [{json.dumps(key, ensure_ascii=False)}]"
            msg = f"{problem}\n  Repair it, or leave it out: --filter {shlex.quote(condition)}"
            raise RowError(msg, where=err.where, problem=err.problem) from err.__cause__
        if remedy == KEYS_REMEDY:
            way = "To keep the first sample of each key: --duplicate-keys first"
            msg = f"{problem}\n  Keys must be unique. {way}. To keep all, pack one source again with other keys."
            raise RowError(msg, where=err.where, problem=err.problem) from err.__cause__
        raise
