"""Packing into a folder of a bucket: what is filled on this machine goes there shard by shard, the index last.

A run of this kind is one like all others, in a folder of this machine that stands for the one of the bucket. There are
copies of its index and of what the last run says of itself, and the staging folder. A shard is uploaded once it is
filled, compared with what the store says of it, noted with its ETag, and removed here. Before, its names are noted, so
that after a kill the run knows what is its own. Nothing is deleted or replaced that another has written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from typing_extensions import Self

from wdskit.dataset.index import INDEX_NAME, ShardEntry, join_url
from wdskit.dataset.patterns import split_url
from wdskit.dataset.remote import user_cache
from wdskit.errors import FolderIndexError, PackError, RowError
from wdskit.export.energon import INFO_NAME
from wdskit.files import Disk, make_folders, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.packing.options import WriteOptions
from wdskit.storage.urls import is_local, read_bytes

if TYPE_CHECKING:
    from wdskit.storage.buckets import ObjectInfo

LAST_RUN_NAME = ".wdskit.last-run"
MAX_PENDING = 2
"""Shards that are uploaded while the next is filled: more of them only take space here."""

ETags = dict[str, str | None]
"""ETag of each file of a shard, by its name."""
INFO_FOLDER = INFO_NAME.rpartition("/")[0]
"""Of Megatron-Energon's files."""
WAYS = "Write to another folder, add to it with --append, or replace it with --overwrite."
"""What to do about a local folder that is packed."""


class Uploaded(NamedTuple):
    """A shard that is in the bucket, with the ETags of its files."""

    entry: ShardEntry
    etags: ETags


class _Pending(NamedTuple):
    """A shard on its way, with all its files."""

    entry: ShardEntry
    files: Mapping[str, Path]
    etags: Mapping[str, Future[str | None]]


class Upload:
    """A folder of a bucket that is packed into; a context, behind which nothing is on its way any more.

    Attributes:
        url: The folder, without a slash at its end.
        folder: The folder of this machine that stands for it.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._pending: deque[_Pending] = deque()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is on its way."""
        for one in self._pending:
            for future in one.etags.values():
                future.cancel()
        self._pending.clear()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Raise what is wrong with the folder in the bucket by its URL; faults of this machine's disk as they are."""
        try:
            yield
        except (PackError, FolderIndexError) as err:
            text = str(err).replace(str(self.folder), self.url).replace(WAYS, "Write to another folder.")
            if isinstance(err.__cause__, OSError) or isinstance(err, RowError) or text == str(err):
                raise
            if isinstance(err, FolderIndexError):
                raise FolderIndexError(text, folder=self.url) from err
            raise PackError(text) from err

    def object_url(self, name: str) -> str:
        """URL of a file of the folder, by its path in it."""
        return join_url(self.url, quote(name))

    def objects(self) -> dict[str, ObjectInfo]:
        """What is in the folder now, and in that of Megatron-Energon's files, by path in it."""
        from wdskit.storage.buckets import list_objects

        folders = {"": self.url, f"{INFO_FOLDER}/": self.object_url(INFO_FOLDER)}
        return {
            f"{at}{unquote(one.url.rpartition('/')[2])}": one for at, of in folders.items() for one in list_objects(of)
        }

    def copy_index(self, disk: Disk) -> None:
        """Fetch the index, and what the last run says of itself, as they are now."""
        there = self.objects()
        for name in (INDEX_NAME, LAST_RUN_NAME):
            path = self.folder / name
            if name in there:
                publish_bytes(path, read_bytes(self.object_url(name), limit=MAX_INDEX_BYTES), disk=disk)
            else:
                disk.remove(path)

    def find_there(self, shards: Iterable[Uploaded]) -> dict[str, ShardEntry]:
        """Those of some shards whose files are in the bucket as they were uploaded, by name."""
        there = self.objects()
        return {
            one.entry.name: one.entry
            for one in shards
            if all(name in there and there[name].etag in (None, etag) for name, etag in one.etags.items())
            and there[one.entry.name].num_bytes == one.entry.num_bytes
        }

    def lost(self, entries: Iterable[ShardEntry]) -> list[str]:
        """Those of some shards that are not in the bucket with their sizes."""
        there = self.objects()
        return [one.name for one in entries if one.name not in there or there[one.name].num_bytes != one.num_bytes]

    def start(self, entry: ShardEntry, files: Mapping[str, Path]) -> None:
        """Begin to upload the files of a filled shard, by name."""
        from wdskit.storage.buckets import start_upload

        etags = {name: start_upload(self.object_url(name), path) for name, path in files.items()}
        self._pending.append(_Pending(entry, files, etags))

    def finished(self, most: int, disk: Disk) -> Iterator[Uploaded]:
        """Wait until at most so many shards are on their way, and give those that are there; their files go behind it.

        Raises:
            StorageError: The store cannot be reached, refuses, or has something else than was sent.
        """
        from wdskit.storage.requests import result

        while len(self._pending) > most:
            one = self._pending[0]
            etags = {name: result(future, self.object_url(name)) for name, future in one.etags.items()}
            self._pending.popleft()
            yield Uploaded(one.entry, etags)
            for path in one.files.values():
                disk.remove(path)

    def put(self, files: Mapping[str, Path]) -> None:
        """Upload files, each once the one before is there. Raises as `finished`."""
        from wdskit.storage.buckets import start_upload
        from wdskit.storage.requests import result

        for name, path in files.items():
            result(start_upload(self.object_url(name), path), self.object_url(name))

    def remove(self, names: Iterable[str]) -> None:
        """Delete files that a run of this machine has uploaded and nobody wants any more."""
        from wdskit.storage.buckets import delete_object

        for name in names:
            delete_object(self.object_url(name))


_REFUSED = {
    "append": "it would read all shards there for their keys. Pack into another folder, and join the two with `::`",
    "overwrite": "readers would find a folder without an index during the upload. Pack into another folder",
    "part": "parts need a folder that all machines see. Pack the parts into such a folder, and copy it",
    "only": "it rewrites a shard in place. Copy the shard's folder here first",
    "on": "the nodes of a cluster need a folder that all of them see. Pack into such a folder, and copy it",
}


def open_upload(dest: str, options: WriteOptions, disk: Disk) -> Upload | None:
    """What uploads to `dest`, None where that is local. Its folder's index is fetched, if there is one.

    Raises:
        PackError: An option does not go with a URL, or the other way round.
        StorageError: It is no folder of a bucket, or that cannot be read.
    """
    if is_local(dest):
        if options.staging is not None:
            raise PackError("staging: a local folder needs no staging. Leave it out.")
        return None
    from wdskit.storage.buckets import check_bucket

    url = dest.rstrip("/")
    check_bucket(url)
    folder, name = split_url(f"{url}/")
    if ":/" not in os.path.dirname(folder) or name:
        raise PackError(f"{dest}: the URL does not name a folder of a bucket. Write s3://BUCKET/FOLDER.")
    for option, reason in _REFUSED.items():
        if (value := getattr(options, option)) is not None and value is not False:
            raise PackError(f"{option} is for local folders: {reason}.")
    staging = Path(options.staging) if options.staging is not None else user_cache() / "uploads"
    upload = Upload(url, staging / hashlib.sha256(url.encode()).hexdigest()[:16] / os.path.basename(url))
    make_folders(upload.folder, disk=disk)
    upload.copy_index(disk)
    return upload
