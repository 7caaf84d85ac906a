"""Fields out of shards: one to print, or all as files of a folder, and of no other."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from wdskit.dataset.keys import split_name
from wdskit.dataset.patterns import find_shards, split_url
from wdskit.errors import KeyRuleError, StorageError
from wdskit.files import Disk, make_folders, publish, temp_path
from wdskit.shards.index import refuse_filled
from wdskit.shards.payloads import Payloads, fields_of
from wdskit.storage.urls import is_local, local_path, shown_url
from wdskit.text import shorten

MAX_REFUSED_LISTED = 1000
_MAX_PART_BYTES = (
    255 - len(temp_path(Path("x")).name) + 1
)  # of a file name on common disks, its temporary file's included
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of a line, and bytes that are no text. Joiners and new letters,
which `str.isprintable` refuses, belong to names."""
_CANNOT_BE_MADE = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}


class UnflushedDisk(Disk):
    """Does not wait for the device, a hundred times as long for small files: they can be extracted again."""

    def fsync(self, fd: int) -> None:
        """Nothing."""

    def fsync_folder(self, folder: Path) -> None:
        """Nothing."""


UNFLUSHED = UnflushedDisk()


@dataclass
class Extracted:
    """What `extract` did.

    Attributes:
        num_samples: Samples with at least one written field.
        num_bytes: Size of the files.
        num_refused: Members that were not written, because their names are not safe as file names.
        refused: The first of them, each with the reason.
        missing_keys: Wanted keys that no sample has; empty if `limit` was reached first.
        missing_fields: Wanted fields that no sample has, likewise.
    """

    folder: Path
    num_samples: int = 0
    num_files: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    refused: list[tuple[str, str]] = field(default_factory=list)
    missing_keys: tuple[str, ...] = ()
    missing_fields: tuple[str, ...] = ()


def cat(url: str, name: str) -> bytes:
    """Read one field of one sample: `wdskit cat`.

    Args:
        url: Path or URL of a shard.
        name: Key and field as in the shard: `photos/cat/000003.json`.

    Raises:
        KeyRuleError: The name has no key and field, or the shard has no such sample or field.
        ShardError: The shard is invalid before the end of the sample.
        StorageError: It cannot be read.
    """
    return b"".join(cat_pieces(url, name))


def cat_pieces(url: str, name: str) -> Iterator[bytes]:
    """`cat` in pieces. The first comes when the sample is known to be whole."""
    split = split_name(name)
    if split is None:
        raise KeyRuleError(f"{name!r} is not KEY.FIELD. Write both, such as photos/cat/000003.json.", name=name)
    if Path(local_path(url)).is_dir() if is_local(url) else not split_url(url)[1]:
        msg = f"{url}: this is a folder. Name one of its shards; `wdskit ls {url}` lists them."
        raise StorageError(msg, url=url)
    key, wanted = split
    shown = shown_url(url)
    with Payloads(url) as shard:
        for sample in shard:
            if sample["__key__"] == key:
                if wanted in sample:
                    yield from shard.pieces(sample[wanted])
                    return
                there = shorten(", ".join(name for name, _ in fields_of(sample)))
                raise KeyRuleError(f"{shown}: sample {key!r} has no field {wanted!r}. It has: {there}.", name=name)
    raise KeyRuleError(f"{shown}: none of its {shard.reader.num_samples} samples has the key {key!r}.", name=name)


def extract(
    path: str,
    to: str | Path,
    *,
    fields: Collection[str] = (),
    keys: Collection[str] = (),
    limit: int | None = None,
    disk: Disk = UNFLUSHED,
) -> Extracted:
    """Write fields as files called KEY.FIELD: `wdskit extract`.

    Nothing is written outside of the folder, whatever the names in the shard are. A member is listed and not written
    if its name is not a plain relative path without control characters, or conflicts with the file of another member.

    Args:
        path: A shard, folder, glob or brace pattern, local or remote; several joined by `::`.
        to: A folder that is empty or does not exist.
        fields: Names of the fields to write. Default: all.
        keys: Keys of the samples to write. Default: all.
        limit: Stop after this many of these samples.
        disk: Performs the file operations; tests replace it.

    Raises:
        ShardError: A shard is invalid; the whole samples before the damage are written.
        StorageError: A shard cannot be read, `to` is not empty, or it cannot be written.
    """
    urls = find_shards(path).urls
    folder = Path(to)
    done = Extracted(folder)
    missing_keys, missing_fields = set(keys), set(fields)
    try:
        make_folders(folder, disk=disk)
        refuse_filled(folder)
        for shard, sample in islice(_choose(urls, folder, set(keys)), limit):
            num_before = done.num_files
            for name, data in fields_of(sample):
                if not fields or name in fields:
                    _write(done, f"{sample['__key__']}.{name}", shard.pieces(data), disk)
                    missing_fields.discard(name)
            missing_keys.discard(sample["__key__"])
            done.num_samples += done.num_files > num_before
    except OSError as err:
        raise StorageError(f"{folder}: cannot be written: {err.strerror}.", url=str(folder)) from err
    if limit is None or done.num_samples < limit:
        done.missing_keys = tuple(sorted(missing_keys))
        done.missing_fields = tuple(sorted(missing_fields))
    return done


def _choose(urls: Iterable[str], folder: Path, keys: Collection[str]) -> Iterator[tuple[Payloads, dict[str, Any]]]:
    """The samples with these keys, all where there are none, and what reads their fields."""
    for url in urls:
        with Payloads(url, spill_folder=folder) as shard:
            for sample in shard:
                if not keys or sample["__key__"] in keys:
                    yield shard, sample


def _write(done: Extracted, name: str, pieces: Iterable[bytes], disk: Disk) -> None:
    """Write one file, unless its name is refused or cannot be made."""
    path = done.folder / name
    problem = path_problem(name)
    try:
        if not problem and path.exists():
            problem = "there is already a file with this name"
        if not problem:
            _make_folders(path.parent, disk)
            with publish(path, disk=disk) as temp:
                for piece in pieces:
                    temp.write(piece)
            done.num_files += 1
            done.num_bytes += temp.num_bytes
    except OSError as err:
        if err.errno not in _CANNOT_BE_MADE:
            raise
        problem = f"another file is in the way, or the disk does not accept the name: {err.strerror}"
    if problem:
        done.num_refused += 1
        if len(done.refused) < MAX_REFUSED_LISTED:
            done.refused.append((shorten(name), problem))


def _make_folders(path: Path, disk: Disk) -> None:
    """As `make_folders`, one after the other: a name may have more folders than Python calls one in another."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        make_folders(folder, disk=disk)


def path_problem(name: str) -> str | None:
    """Why a member's name is no safe path below a folder; None where it is one."""
    parts = name.split("/")
    if name.startswith("/"):
        return "it is an absolute path"
    if not {"", ".", ".."}.isdisjoint(parts):
        return "it is not a plain relative path"
    if _UNSAFE.search(name):
        return "it holds control characters"
    if "\\" in name:
        return "it holds a backslash, which is a separator on other systems"
    if any(part.startswith((".", "~", "-")) for part in parts):
        return "a part of it starts with a dot, ~ or -, which programs interpret in other ways"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"a part of it is longer than {_MAX_PART_BYTES} bytes"
    return None
