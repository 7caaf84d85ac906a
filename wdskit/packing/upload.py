"""Pack into a folder of a bucket: upload each shard after it is filled, and the index last.

A run works in a local folder, which has the staging folder and copies of the bucket's index and `.wdskit.last-run`.
Before the upload of a shard, the run logs the names of the files. If the run is killed, the next run knows from the log
which objects are its own. After the upload, the run logs the ETags and removes the local files. A run never deletes or
replaces an object of another writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from wdskit.dataset.index import INDEX_NAME, ShardEntry, join_url
from wdskit.dataset.patterns import split_url
from wdskit.dataset.remote import user_cache
from wdskit.dataset.shard import offsets_path
from wdskit.errors import FolderIndexError, PackError, RowError
from wdskit.files import Disk, describe_os_error, make_folders, publish_bytes
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.packing.options import WriteOptions
from wdskit.storage.urls import is_local, open_stream, read_bytes

if TYPE_CHECKING:
    from wdskit.storage.buckets import ObjectInfo

LAST_RUN_NAME = ".wdskit.last-run"
MAX_PENDING = 2
"""Number of shards that are uploaded while the next shard is filled. A larger number only takes more local disk."""

PACKED_REMEDY = "Write to another folder, add to it with --append, or replace it with --overwrite."
"""The remedy in messages about a local folder that is packed already."""


class SentFile(NamedTuple):
    """A file in the log of a run: uploaded, or about to be uploaded.

    Attributes:
        num_bytes: Size of the file.
        sha256: Digest of the file, in hex.
        etags: The ETags from the store; empty if the log has no ETag of the file.
    """

    num_bytes: int
    sha256: str
    etags: frozenset[str] = frozenset()


class UploadedShard(NamedTuple):
    """A shard in the bucket, with the ETag of each of its files, by file name; None if the store has no ETags."""

    entry: ShardEntry
    etags: Mapping[str, str | None]


class _PendingShard(NamedTuple):
    """A shard whose upload has started, with its local files and the futures of their ETags, by file name."""

    entry: ShardEntry
    files: Mapping[str, Path]
    etags: Mapping[str, Future[str | None]]


class Upload:
    """The destination folder in a bucket. Call `cancel` when done.

    Attributes:
        url: URL of the folder, without a slash at the end.
        folder: The local folder in which the run works.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self._pending: deque[_PendingShard] = deque()
        self._compared: set[ObjectInfo] = set()  # objects with the digest of a sent file

    def cancel(self) -> None:
        """Cancel the uploads that still run."""
        for shard in self._pending:
            for future in shard.etags.values():
                future.cancel()
        self._pending.clear()

    @contextlib.contextmanager
    def show_url(self) -> Iterator[None]:
        """In the messages of PackErrors and FolderIndexErrors of the `with` block, replace the local path by the URL.

        Errors of the local disk and RowErrors stay unchanged.
        """
        try:
            yield
        except (PackError, FolderIndexError) as err:
            text = str(err).replace(str(self.folder), self.url).replace(PACKED_REMEDY, "Write to another folder.")
            if isinstance(err.__cause__, OSError) or isinstance(err, RowError) or text == str(err):
                raise
            if isinstance(err, FolderIndexError):
                raise FolderIndexError(text, folder=self.url) from err
            raise PackError(text) from err

    def object_url(self, name: str) -> str:
        """Return the URL of a file of the folder. `name` is its path in the folder, not percent-encoded."""
        return join_url(self.url, quote(name))

    def objects(self) -> dict[str, ObjectInfo]:
        """Return the objects that are in the folder now, by name. StorageError: The bucket cannot be read."""
        from wdskit.storage.buckets import list_objects

        return {unquote(each.url.rpartition("/")[2]): each for each in list_objects(self.url)}

    def copy_index(self, disk: Disk) -> None:
        """Download `index.json` and `.wdskit.last-run`. If an object is missing, remove its local copy instead.

        Raises:
            StorageError: The bucket cannot be read.
            OSError: The local folder cannot be written.
        """
        objects = self.objects()
        for name in (INDEX_NAME, LAST_RUN_NAME):
            path = self.folder / name
            if name in objects:
                publish_bytes(path, read_bytes(self.object_url(name), limit=MAX_INDEX_BYTES), disk=disk)
            else:
                disk.remove(path)

    def find_uploaded(self, shards: Iterable[UploadedShard], sent: Mapping[str, SentFile]) -> dict[str, ShardEntry]:
        """Return the entries of those `shards` whose objects still exist and are unchanged, by name.

        `sent` maps each object's name to the logged file. StorageError: The bucket cannot be read.
        """
        objects = self.objects()
        return {
            shard.entry.name: shard.entry
            for shard in shards
            if all(name in objects and self._is_sent(objects[name], sent.get(name)) for name in shard.etags)
        }

    def find_others(self, sent: Mapping[str, SentFile]) -> set[str]:
        """Return the names of the objects in the folder that are not files of `sent`, as other writers' objects are.

        `sent` maps the names of objects to the logged files of all unfinished runs. An object that this run is
        uploading is left out.

        Raises:
            StorageError: The store cannot be reached or refuses.
        """
        pending = {name for shard in self._pending for name in shard.files}
        objects = self.objects()
        return {name for name in objects.keys() - pending if not self._is_sent(objects[name], sent.get(name))}

    def find_lost(self, entries: Iterable[ShardEntry], etags: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of the shards that are missing in the bucket, lack their `.idx`, or were replaced.

        `etags` maps the name of a shard to its ETags after the upload. A shard that `etags` lacks is compared by size
        only.
        StorageError: The bucket cannot be read.
        """
        objects = self.objects()

        def is_unchanged(entry: ShardEntry) -> bool:
            if offsets_path(entry.name).name not in objects:
                return False
            info, known = objects.get(entry.name), etags.get(entry.name)
            if info is None or known is None:
                return info is not None and info.num_bytes == entry.num_bytes
            return self._is_sent(info, SentFile(entry.num_bytes, entry.sha256, frozenset(known)))

        return [entry.name for entry in entries if not is_unchanged(entry)]

    def start(self, entry: ShardEntry, files: Mapping[str, Path]) -> None:
        """Start to upload the files of a filled shard. `files` has the local path of each file, by name.

        StorageError: The URL cannot be written. Errors of the uploads are raised by `finished`.
        """
        from wdskit.storage.buckets import start_upload

        etags = {name: start_upload(self.object_url(name), path) for name, path in files.items()}
        self._pending.append(_PendingShard(entry, files, etags))

    def finished(self, max_pending: int, disk: Disk) -> Iterator[UploadedShard]:
        """Wait until at most `max_pending` shards are uploading. Yield each uploaded shard, in the order of `start`.

        The local files of a shard are removed when the caller takes the next shard or reaches the end.

        Raises:
            StorageError: The store cannot be reached or refuses, or the object differs from the file.
        """
        from wdskit.storage.requests import result

        while len(self._pending) > max_pending:
            shard = self._pending[0]
            etags = {name: result(future, self.object_url(name)) for name, future in shard.etags.items()}
            self._pending.popleft()
            yield UploadedShard(shard.entry, etags)
            for path in shard.files.values():
                disk.remove(path)

    def put(self, files: Mapping[str, Path]) -> None:
        """Upload files one after the other, in order. Existing objects are replaced. `files` has local paths by name.

        Raises:
            StorageError: The store cannot be reached or refuses. Or after the upload, the object differs from the file.
        """
        from wdskit.storage.buckets import start_upload
        from wdskit.storage.requests import result

        for name, path in files.items():
            result(start_upload(self.object_url(name), path), self.object_url(name))

    def remove(self, sent: Mapping[str, SentFile]) -> None:
        """Delete the objects that a stopped run uploaded. `sent` has the files of the run, by name.

        Raises:
            PackError: Another writer replaced an object of the run. No object is deleted.
            StorageError: The store cannot be reached or refuses.
        """
        from wdskit.storage.buckets import delete_object

        objects = self.objects()
        names = sorted(sent.keys() & objects.keys())
        others = [name for name in names if not self._is_sent(objects[name], sent.get(name))]
        if others:
            more = f" It has replaced {len(others) - 1} more." if len(others) > 1 else ""
            msg = f"{self.object_url(others[0])}: another writer put this object here, so restart does not delete it."
            remedy = "Move or delete such objects yourself, or pack into another folder."
            raise PackError(f"{msg}{more} Nothing was deleted.\n  {remedy}")
        for name in names:
            delete_object(self.object_url(name))

    def _is_sent(self, info: ObjectInfo, sent: SentFile | None) -> bool:
        """Return True if an object is the logged file `sent`: the sizes are equal, and the ETag or the sha256 is too.

        The object is read only if `sent` does not have its ETag. Return False if `sent` is None. StorageError: The
        object cannot be read.
        """
        if sent is None or info.num_bytes != sent.num_bytes:
            return False
        if info.etag is not None and (info.etag in sent.etags or info in self._compared):
            return True
        if digest_of(info.url) != sent.sha256:
            return False
        self._compared.add(info)
        return True


def digest_of(url: str) -> str:
    """Return the hex sha256 of a file or an object in a store. StorageError: The file or object cannot be read."""
    digest = hashlib.sha256()
    with contextlib.closing(open_stream(url)) as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


_REFUSED = {
    "append": "it would read all shards there for their keys. Pack into another folder, and join the two with `::`",
    "overwrite": "readers would find a folder without an index during the upload. Pack into another folder",
    "part": "parts need a folder that all machines see. Pack the parts into such a folder, and copy it",
    "export": "other programs read these files from a disk. Pack into a local folder, or copy the folder and export it",
    "on": "the nodes of a cluster need a folder that all of them see. Pack into such a folder, and copy it",
}


def open_upload(dest: str, options: WriteOptions) -> Upload | None:
    """Download the index of the folder `dest`, if it has one, and return an upload to `dest`. Return None if `dest` is
    local.

    Raises:
        PackError: An option is only for local folders or only for URLs, the URL does not name a folder of a bucket, or
            the local folder for the upload cannot be written.
        StorageError: The bucket cannot be read.
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
        if getattr(options, option) not in (None, False, ()):
            raise PackError(f"{option} is for local folders: {reason}.")
    staging = Path(options.staging) if options.staging is not None else user_cache() / "uploads"
    upload = Upload(url, staging / hashlib.sha256(url.encode()).hexdigest()[:16] / os.path.basename(url))
    try:
        make_folders(upload.folder, disk=options.disk)
        upload.copy_index(options.disk)
    except OSError as err:
        msg = f"{upload.folder}: shards are filled here before their upload, and it cannot be written: "
        way = "Choose another folder with --staging"
        raise PackError(f"{msg}{describe_os_error(err)}\n  {way}.") from err
    return upload
