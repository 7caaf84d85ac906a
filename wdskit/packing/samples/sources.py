"""The shards that are written anew: found, looked at, and counted."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from wdskit.dataset.braces import split_parts
from wdskit.dataset.classes import CLASSES_NAME, MAX_CLASSES_BYTES, classes_json, common_classes, read_classes
from wdskit.dataset.index import join_url
from wdskit.dataset.patterns import ShardList, list_shards, split_url
from wdskit.dataset.unfinished import refuse_part
from wdskit.errors import PackError, StorageError, WdskitError
from wdskit.packing.labels import CLASS_FIELD
from wdskit.packing.row import OnProgress, Progress
from wdskit.packing.samples.batch import Gone
from wdskit.packing.samples.changes import Changes
from wdskit.packing.samples.choice import Choice
from wdskit.packing.samples.read import identity_of, open_path
from wdskit.packing.samples.scan import ScanJob, Scanned, scan_source
from wdskit.packing.sources.archives import LEAVE_OUT, refuse_query
from wdskit.packing.store import blocks_of
from wdskit.packing.transforms import Transforms
from wdskit.shards.export import split_of
from wdskit.shards.parallel import file_sizes, map_shards
from wdskit.storage.urls import is_local, read_bytes


def list_sources(source: str | Sequence[str]) -> ShardList:
    """The shards that are read.

    Raises:
        PackError: A URL has a query.
        FolderIndexError: They are what a run has come to that is not finished, unless each is named.
        StorageError, FolderIndexError: As `list_shards`.
    """
    for pattern in [source] if isinstance(source, str) else source:
        for url in split_parts(pattern):
            if "://" in url and not is_local(url):
                refuse_query(url)
    found = list_shards(source, has_remote=True)
    refuse_part(source, found)
    return found


def scan_jobs(
    found: ShardList, choice: Choice, changes: Changes | None, *, has_check: bool, has_draws: bool = False
) -> list[ScanJob]:
    """What is to be looked at, and how.

    Raises:
        PackError: Digests are to be compared, and one is not known.
    """
    if has_check:
        unknown = next((url for url, entry in zip(found.urls, found.entries, strict=True) if entry is None), None)
        if unknown is not None:
            msg = f"{unknown}: its folder has no index, so its sha256 is unknown."
            raise PackError(f"{msg}\n  Run `wdskit index {os.path.dirname(unknown) or '.'}`, or leave --check out.")
    return [
        ScanJob(url, entry, choice, changes, has_check, has_draws)
        for url, entry in zip(found.urls, found.entries, strict=True)
    ]


def scan_all(jobs: Sequence[ScanJob], *, workers: int, on_progress: OnProgress) -> Iterator[Scanned]:
    """Look at the sources, in this process or in several; what is seen comes in their order."""
    sizes = [size or 0 for size in file_sizes((job.path for job in jobs), (job.entry for job in jobs))]
    total, num_samples, num_bytes = sum(sizes), 0, 0
    for size, scan in zip(sizes, map_shards(scan_source, jobs, workers=workers), strict=True):
        if isinstance(scan, WdskitError):
            raise scan
        num_samples += scan.num_samples
        num_bytes += size
        on_progress(Progress("reading", num_samples, num_bytes, None, total))
        yield scan


class Seen:
    """Counts what the sources have."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.num_ignored = self.num_cleaned = 0
        self.gone = Gone()
        self._fields: set[str] = set()

    def counted(self, scans: Iterator[Scanned]) -> Iterator[Scanned]:
        """The same, counted."""
        for scan in scans:
            self.num_samples += scan.num_samples
            self.num_ignored += scan.num_ignored
            self.num_cleaned += scan.num_cleaned
            self.gone += scan.gone
            self._fields |= scan.fields
            yield scan

    def check(self, num_kept: int, num_duplicates: int, changes: Changes, transforms: Transforms) -> None:
        """Refuse to write nothing, to lose a sample, and to be asked for fields that no sample has.

        Raises:
            PackError: It is so.
        """
        unknown = sorted(changes.named - self._fields)
        if unknown:
            msg = f"{unknown[0]}: no sample has this field. The fields are {', '.join(sorted(self._fields))}."
            raise PackError(f"{msg} Correct --keep, --drop or --rename.")
        made = set() if changes.made is None else set(changes.made.fields)
        transforms.check_used({*filter(None, map(changes.new_name, self._fields)), *made})
        accounted = num_kept + num_duplicates + self.gone.total
        if accounted != self.num_samples:
            raise PackError(
                f"{self.num_samples} samples were read, but {accounted} are accounted for. Nothing was written."
            )
        if not num_kept:
            raise PackError(f"none of the {self.num_samples} samples is left to write. Correct --filter or --sample.")


def check_dest(folder: Path, found: ShardList, *, overwrite: bool) -> None:
    """Refuse to write among the sources, and to replace what they are links to."""
    here = os.path.realpath(folder)
    urls = [url for url in found.urls if is_local(url)]
    for parent in dict.fromkeys(os.path.dirname(url) or "." for url in urls):
        if os.path.realpath(parent) == here:
            raise PackError(f"{folder}: the source's shards are in this folder. Write to another folder.")
    if overwrite and any(os.path.dirname(os.path.realpath(url)) == here for url in urls):
        raise PackError(f"{folder}: the source's shards are links to files in this folder. Write to another folder.")


def merged_splits(found: ShardList) -> str:
    """What is to be said where one name stands for shards of several splits, by their names; empty otherwise."""
    named: dict[int, dict[str, str]] = {}
    for url, part in zip(found.urls, found.parts, strict=True):
        named.setdefault(part, {}).setdefault(split_of(split_url(url)[1]), url)
    splits = next((splits for splits in named.values() if len(splits) > 1), None)
    if splits is None:
        return ""
    folder, name = split_url(next(iter(splits.values())))
    pattern = join_url(folder, re.sub(r"\d+(?=\D*$)", "*", name))
    msg = f"shards of {' and '.join(sorted(splits))} become one data set"
    return f"{msg}; name a pattern such as {pattern} to keep them apart."


def digest_sources(found: ShardList) -> tuple[int, tuple[str, ...]]:
    """The sources, to know them again: each by name and size, and by what its folder's index says of its bytes; where
    there is none, by the time when it was written.

    Returns:
        Shards that each digest is over, and hex digests.
    """
    each, blocks = blocks_of(len(found.urls))
    digests = (hashlib.sha256("".join(_source_lines(found, *block)).encode(errors="surrogatepass")) for block in blocks)
    return each, tuple(digest.hexdigest()[:16] for digest in digests)


def _source_lines(found: ShardList, start: int, stop: int) -> Iterator[str]:
    for url, entry in zip(found.urls[start:stop], found.entries[start:stop], strict=True):
        name = split_url(url)[1]
        if entry is None and not is_local(url):
            with contextlib.closing(open_path(url)) as file:
                yield f"{name!r} {identity_of(file)}\n"
        elif entry is None:
            try:
                status = os.stat(url)
            except OSError as err:
                raise StorageError(f"{url}: cannot be opened: {err.strerror}.", url=url) from err
            yield f"{name!r} {status.st_size} {status.st_mtime_ns}\n"
        else:
            yield f"{name!r} {entry.num_bytes} {entry.sha256}\n"


def find_classes(found: ShardList, changes: Changes) -> tuple[dict[str, bytes], str]:
    """The `classes.json` to write, where there is one, and why there is none although a source has one.

    Raises:
        FolderIndexError: Two folders number their classes differently, so that one number would mean two things.
    """
    folders = found.folders
    other = changes.made.fields.get(CLASS_FIELD) if changes.made is not None else None
    if changes.made is not None and changes.made.classes is not None:
        return {CLASSES_NAME: classes_json(changes.made.classes.numbers)}, ""
    other = other or next((old for old, new in changes.rename.items() if new == CLASS_FIELD != old), None)
    if other is not None:
        named = next((folder for folder in folders if read_classes(folder) is not None), None)
        if named is None:
            return {}, ""
        problem = f"cls is made of {other!r}, and {join_url(named, CLASSES_NAME)} names the classes of another field"
        return {}, f"{problem}, so none was written. With --field cls={other} --classes FILE there is one."
    name = changes.new_name(CLASS_FIELD)
    if name is None:
        return {}, ""
    classes = common_classes(folders, folders.__getitem__, way_out=LEAVE_OUT)
    if classes.names is None or name != "cls":
        return {}, ""
    if classes.problem:
        return {}, f"{classes.problem}, so none was written."
    return {CLASSES_NAME: read_bytes(join_url(classes.folder, CLASSES_NAME), limit=MAX_CLASSES_BYTES)}, ""
