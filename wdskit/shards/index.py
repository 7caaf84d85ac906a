"""Index a local folder, or a folder of a bucket, with shards that another program wrote: `wdskit index`."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from wdskit.dataset.columns import COLUMNS_NAME, Column, NewColumn, Part, list_columns, remove_columns, write_columns
from wdskit.dataset.index import INDEX_NAME, Index, ShardEntry, read_index, refuse_commit, write_index
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import files_of, split_url
from wdskit.dataset.remote import read_copy
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import IDX_SUFFIX, DigestedFile, digest_offsets, offsets_problem, write_offsets
from wdskit.errors import FolderIndexError, SelectionError, ShardError, StorageError
from wdskit.files import disk_in_use, remove_temp_files
from wdskit.limits import MAX_HELD_BYTES, MAX_IDX_BYTES, MAX_INDEX_BYTES
from wdskit.shards.lazy_shard import close_files, field_size, fields_of
from wdskit.shards.make_columns import ColumnBuilder, Source, parse_columns, parse_names, reader_of
from wdskit.shards.parallel import Progress, file_size, local_folder, read_shards
from wdskit.storage.urls import is_local, open_stream, read_bytes
from wdskit.text import plural

_HEAD_BYTES = 200  # of an `index.json`, which say that wdskit wrote it
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexReport:
    """Result of `index_folder`.

    Attributes:
        index: The written index.
        num_ignored: Number of members, in all shards, that belong to no sample.
        changed: Names of shards with the same size as in the previous index, but another digest.
        columns: Names of all columns that the folder has now.
    """

    index: Index
    num_ignored: int
    changed: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: shards and samples."""
        return f"IndexReport({plural(len(self.index), 'shard')}, {plural(self.index.num_samples, 'sample')})"


def index_folder(
    folder: str | Path,
    *,
    columns: str | Iterable[str] = (),
    drop_columns: str | Iterable[str] = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Read every `*.tar` of a folder from end to end and write the folder's index: `wdskit index`.

    The function writes `<shard>.idx` for each shard, then `index.json`, and replaces an existing index of wdskit.
    The written bytes depend only on the shards and on their order in an earlier index, not on `workers`. Files whose
    names start with a dot are skipped. The existing columns of the folder are computed again in the same pass.

    Args:
        folder: A local folder, or a folder of a bucket (`s3://bucket/train/`), where `index.json` is written last.
        columns: Columns to add: `width,height,cls,json.score,json.caption.length`, or a list of such names.
            `name=json.path` gives a column another name. Width and height are read from the image's header. `length` is
            the length of a text or list. A sample without the value has NaN, or "" for text.
        drop_columns: Names of columns to remove, as a text with commas or a list.
        workers: Number of processes that read; 1 means this process. Default: the number of CPUs that this process may
            use, fewer for little data.
        progress: Called after each shard with the bytes read so far and the bytes of all shards.

    Raises:
        ShardError: A shard is invalid. No index is written; `wdskit verify` lists all faults of all shards.
        FolderIndexError: Another program wrote the `index.json` or an `.idx` that is here; a run of `pack` was stopped
            here while it moved its shards into place; or another process is writing.
        SelectionError: A column is invalid, a column to remove does not exist, a new column has the name of another
            existing column, the list of columns is damaged, or a value cannot be in its column.
        StorageError: The folder does not exist, has no shard, or cannot be read or written.
        WdskitError: A worker process was killed, or a number is out of range.
    """
    new, drop = parse_columns(columns) if columns else {}, parse_names(drop_columns)
    is_here = is_local(str(folder))
    place = str(local_folder(folder)) if is_here else str(folder).rstrip("/")
    with lock_folder(Path(place)) if is_here else tempfile.TemporaryDirectory() as temp:
        into = Path(temp or place)
        if is_here:
            refuse_commit(into)
        files = files_of(place)
        found = sorted(name for name in files if name.endswith(".tar") and not name.startswith("."))
        if not found:
            raise StorageError(f"{place}: there are no shards (*.tar) in this folder.", url=place)
        known = _read_before(place, files)
        # States of loaders depend on the order of the shards, so the order of an earlier index is kept.
        urls = [files[name] for name in dict.fromkeys([*(name for name in known if name in files), *found])]
        _, columns_of = list_columns(into)
        if not is_here and INDEX_NAME in files:
            _, columns_of = read_copy(place, [COLUMNS_NAME], partial(list_columns, url=place))
        sources = _sources(columns_of, new, drop, place)
        scan = partial(scan_shard, columns=sources)
        scans = [*read_shards(scan, urls, [*map(file_size, urls)], workers=workers, progress=progress)]
        entries = [one.entry for one in scans]
        index = Index.of(place, entries)
        made = {name: NewColumn(source, [one.columns[name] for one in scans]) for name, source in sources.items()}
        disk = disk_in_use()
        try:
            remove_temp_files(into, disk=disk)
            for one in scans:
                write_offsets(into / one.entry.name, one.offsets, disk=disk)
            write_index(into, entries, disk=disk)
            kept = write_columns(into, index.digest, made, disk=disk) if made or columns_of else []
            remove_columns(into, keep=kept, disk=disk)
        except OSError as err:
            raise StorageError(f"{into}: the index cannot be written: {err.strerror}.", url=place) from err
        if not is_here:
            _upload(into, place)
    return IndexReport(
        index=index,
        num_ignored=sum(one.num_ignored for one in scans),
        changed=tuple(
            one.name
            for one in entries
            if (old := known.get(one.name)) and old.num_bytes == one.num_bytes and old.sha256 != one.sha256
        ),
        columns=tuple(sources),
    )


def _upload(folder: Path, url: str) -> None:
    """Upload the files of a local folder into a folder of a bucket, the index last. StorageError: A request fails."""
    from wdskit.storage.buckets import upload

    for path in sorted(folder.iterdir(), key=lambda path: (path.name == INDEX_NAME, path.name == COLUMNS_NAME)):
        upload(f"{url}/{quote(path.name)}", path)


def _read_before(folder: str, files: Mapping[str, str]) -> Mapping[str, ShardEntry]:
    """Return the entries of the index that will be replaced, by name; empty without an index, or if it is damaged.

    Raises:
        FolderIndexError: Another program wrote the `index.json`, or the `.idx` of a shard that is not in the index.
        StorageError: A file cannot be read.
    """
    known: Mapping[str, ShardEntry] = {}
    foreign = []
    if url := files.get(INDEX_NAME):
        if b'"wdskit_index_version"' not in read_bytes(url, limit=MAX_INDEX_BYTES)[:_HEAD_BYTES]:
            foreign.append(url)
        else:
            try:
                known = {entry.name: entry for entry in read_index(folder).entries}
            except FolderIndexError as err:
                problem = str(err).partition("\n")[0]
                _log.warning("%s The index is replaced, and the shards are in the order of their names.", problem)
    for name in files:
        if (idx := files.get(f"{name}{IDX_SUFFIX}")) and name.endswith(".tar") and name not in known:
            foreign += [idx] if offsets_problem(read_bytes(idx, limit=MAX_IDX_BYTES), 1 << 64) else []
    if foreign:
        msg = f"{foreign[0]}: this file is in the way: wdskit did not write it. Nothing was changed.\n  Move it away."
        raise FolderIndexError(msg, folder=folder)
    return known


def _sources(
    known: Mapping[str, Column], new: Mapping[str, Source], drop: Sequence[str], folder: str
) -> dict[str, Source]:
    """Return the source of each column to compute, by name: existing and new columns, without the columns in `drop`.

    SelectionError: A column to drop does not exist, or a new column has the name of another existing column.
    """
    if unknown := [name for name in drop if name not in known]:
        msg = f"{folder}: there is no column {unknown[0]!r} to remove. The columns are {', '.join(known) or 'none'}."
        raise SelectionError(msg, folder=folder)
    for name, source in new.items():
        if name in known and name not in drop and dict(known[name].source) != source:
            other = ", ".join(f"{key} {value}" for key, value in known[name].source.items())
            msg = f"{folder}: another column has the name {name!r}: {other}."
            raise SelectionError(f"{msg}\n  Choose another, as in other={source['path']}.", folder=folder)
    kept = {name: column.source for name, column in known.items() if name not in drop}
    return {**kept, **new}


class ScannedShard(NamedTuple):
    """What was found in a shard that was read from end to end.

    Attributes:
        entry: The shard's entry in the index.
        offsets: Byte offset of each sample, then the end of the last member.
        num_ignored: Number of members that belong to no sample.
        columns: The values of each column for all samples, by name of the column.
    """

    entry: ShardEntry
    offsets: array[int]
    num_ignored: int
    columns: dict[str, Part]


def scan_shard(url: str, *, columns: Mapping[str, Source] | None = None) -> ScannedShard:
    """Read a shard from end to end. Check every header, and compute the digest, the offsets and the columns.

    Args:
        url: Path or URL of the shard.
        columns: Sources of the columns to compute, by name; None for no columns.

    Raises:
        ShardError: The shard is invalid, or its name has unprintable characters.
        SelectionError: A source is invalid, or the value of a sample cannot be in a column.
        StorageError: The shard cannot be read.
    """
    name = split_url(url)[1]
    if not name.isprintable():
        problem = f"its file name {name!r} holds characters that cannot be printed"
        raise ShardError(shard=url, offset=0, problem=problem, remedy="Rename it.")
    shard = DigestedFile(open_stream(url, takes_pipe=False))
    fields: set[str] = set()
    with contextlib.closing(shard.file):
        builder = ColumnBuilder(columns or {}, url)
        spill = tempfile.TemporaryFile if columns else None
        reader = ShardReader(shard.read, shard=url, hold_bytes=MAX_HELD_BYTES, spill=spill)
        for sample in close_files(reader):
            fields.update(sample)
            for field, data in fields_of(sample) if columns else ():
                builder.add(field, field_size(data), reader_of(data))
            builder.end(sample["__key__"])
    offsets = array("Q", (*reader.starts, reader.stop))
    entry = ShardEntry(
        name=name,
        num_samples=reader.num_samples,
        num_bytes=shard.num_bytes,
        sha256=shard.sha256.hexdigest(),
        fields=tuple(sorted(fields - {"__key__", "__url__"})),
        idx_sha256=digest_offsets(offsets),
    )
    return ScannedShard(entry, offsets, reader.num_ignored, builder.parts())
