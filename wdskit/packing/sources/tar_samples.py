"""Samples of tars, with a reference to the bytes of each field. The bytes are read when the sample is packed."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import ShardList, any_index, list_shards, split_parts, split_url
from wdskit.dataset.samples import HeaderReader, ShardReader, read_span
from wdskit.dataset.shard import check_digest
from wdskit.errors import FolderIndexError, MemberNameError, PackError, RowError, ShardError, UnsupportedMember
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.references import FieldBytes, ObjectBytes, PartBytes
from wdskit.packing.row import row_error
from wdskit.shards.index import DigestedFile
from wdskit.storage.file_identity import FileIdentity
from wdskit.storage.urls import LocalFile, is_local, local_path
from wdskit.tar.header import padded
from wdskit.tar.walk import Span
from wdskit.tar.window import LargeData, size_of


def refuse_query(url: str) -> None:
    """Check that the URL of a file in a store has no query.

    Raises:
        PackError: The URL has a query.
        StorageError: The text is not a valid URL.
    """
    from wdskit.storage.stores import locate  # needs obstore

    shown = locate(url).url
    if shown != url:
        msg = f"{shown}: the query of a URL may be a secret, which the plan on disk would hold."
        raise PackError(f"{msg}\n  Use a URL without one, or copy the file to a local disk first.")


def list_tars(source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> ShardList:
    """Return the tars, local or in stores, that `source` names, with their index entries.

    `source` is a path, URL, folder or pattern, or a list of sources. `::` joins several sources in one text.

    Raises:
        PackError: A URL has a query.
        FolderIndexError: A folder or pattern finds tars of an unfinished run. Or an index is invalid or does not match
            its tars.
        StorageError: No tar matches, a local tar is missing, a URL is invalid, or a store cannot be read.
    """
    patterns = [os.fspath(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    for pattern in patterns:
        for url in split_parts(pattern):
            if "://" in url and not is_local(url):
                refuse_query(url)
    return list_shards(patterns, any_index, lists_buckets=True)


class TarSample(NamedTuple):
    """A sample of a tar.

    Attributes:
        key: Key of the sample.
        fields: Reference to the bytes of each field, by field name, in the order of the members.
        read: Takes the name of a field, and returns the field's bytes. Call `read` before the next sample is taken.
            StorageError: The bytes cannot be read.
    """

    key: str
    fields: Mapping[str, FieldBytes]
    read: Callable[[str], bytes]


class TarSamples:
    """The samples of one tar, in order. Only the headers of a local tar are read; a tar of a store is read as a stream.

    Args:
        url: Path or URL of the tar.
        entry: Index entry of the tar; None for a tar without an index.
        check: True compares the sha256 of a local tar with its entry. False does so only if the file seems changed. The
            sha256 of a tar in a store is always compared, at the end of the tar.

    Attributes:
        place: Path of a local tar, or URL of another tar.
        num_samples: Number of samples yielded so far.
        num_ignored: Number of members that belong to no sample. It is 0 until the iteration ends.
    """

    def __init__(self, url: str, entry: ShardEntry | None, *, check: bool = False) -> None:
        self.place = _place_of(url)
        self.num_samples = 0
        self.num_ignored = 0
        self._url = url
        self._entry = entry
        self._check = check
        self._fields = frozenset(() if entry is None else entry.fields)
        self._changed: ShardError | FolderIndexError | None = None

    def __iter__(self) -> Iterator[TarSample | RowError]:
        """Yield the samples. A damaged tar yields the complete samples before the damage, then one `RowError`.

        Raises:
            RowError: A key is in two places, so that an earlier sample lacks fields; or a field is repeated or has a
                reserved name. The rest of the tar was not searched for repeated keys.
            ShardError: A member is a link, a device or another kind that no sample has; or a local tar has another
                sha256 than its index entry.
            FolderIndexError: The tar has another number of bytes or samples than its index entry, or fields that the
                entry lacks; or a tar in a store has another sha256.
            StorageError: The tar cannot be read.
        """
        samples = self._local() if is_local(self._url) else self._remote()
        try:
            for sample in samples:
                if self._fields and not sample.fields.keys() <= self._fields:
                    others = ", ".join(sorted(sample.fields.keys() - self._fields))
                    raise self._differs(f"{sample.key!r} has fields that are not in the index: {others}")
                self.num_samples += 1
                yield sample
        except UnsupportedMember:
            raise  # the tar is not damaged
        except MemberNameError as err:
            remedy = (
                "Write it again: each file once, and the files of each sample side by side, as `tar --sort=name` does."
            )
            raise row_error(f"{err.shard}, byte {err.offset}", err.problem, remedy) from err
        except ShardError as err:
            yield _damaged_rest(err, is_indexed=self._entry is not None)
            return
        if self._changed is not None:
            raise self._changed
        if self._entry is not None and self.num_samples != self._entry.num_samples:
            raise self._differs(f"it has {self.num_samples} samples, but the index says {self._entry.num_samples}")

    def _local(self) -> Iterator[TarSample]:
        path, entry = self.place, self._entry
        with contextlib.closing(LocalFile(path)) as file:
            if entry is not None:
                # Raised after the last sample, because the error of a damaged header is more precise.
                self._changed = self._compare(file, entry)
            identity = FileIdentity.of(file.fd)
            samples = HeaderReader(file, shard=path)
            try:
                for sample in samples:
                    key = sample.pop("__key__")
                    del sample["__url__"]
                    fields = {name: PartBytes(path, span.size, span.offset, *identity) for name, span in sample.items()}
                    yield TarSample(key, fields, functools.partial(_read_local, file, sample))
            finally:
                self.num_ignored = samples.num_ignored

    def _compare(self, file: LocalFile, entry: ShardEntry) -> ShardError | FolderIndexError | None:
        """Return the error if the file differs from its index entry; None if it does not differ.

        With `check`, the sha256 of the file is computed. StorageError: The file cannot be read.
        """
        if file.num_bytes != entry.num_bytes:
            return self._differs(f"it has {file.num_bytes} bytes, but the index says {entry.num_bytes}")
        try:
            if self._check:
                check_digest(file, entry.sha256)
        except ShardError as err:
            return err
        return None

    def _remote(self) -> Iterator[TarSample]:
        """Yield the samples of a tar in a store. The tar is read as one stream.

        ShardError: The tar is damaged, or has a member of a kind that no sample has. StorageError: The tar cannot be
        read. FolderIndexError: At the end of the tar, its sha256 differs from its index entry.
        """
        # One request for each header would take longer.
        from wdskit.storage.objects import ObjectStream  # needs obstore

        with contextlib.closing(ObjectStream(self._url)) as stream:
            modified = stream.file.modified
            version = stream.file.num_bytes, stream.file.etag or "", modified.isoformat() if modified else ""
            shard = DigestedFile(stream)

            def locate(_: str, __: object, ___: int, data: bytes | LargeData) -> tuple[ObjectBytes, bytes | LargeData]:
                size = size_of(data)
                return ObjectBytes(self._url, size, samples.offset - padded(size), *version), data

            samples = ShardReader(shard.read, shard=self._url, on_member=locate, hold_bytes=MAX_ROW_BYTES)
            try:
                for sample in samples:
                    found = {name: both for name, both in sample.items() if not name.startswith("__")}
                    yield TarSample(
                        sample["__key__"],
                        {name: reference for name, (reference, _) in found.items()},
                        functools.partial(_read_remote, found),
                    )
            finally:
                self.num_ignored = samples.num_ignored
        if self._entry is not None and shard.sha256.hexdigest() != self._entry.sha256:
            raise self._differs("its sha256 is not the one in the index: its bytes changed")

    def _differs(self, problem: str) -> FolderIndexError:
        folder = split_url(self._url)[0]
        msg = f"{self._url}: {problem}.\n  If the shard is right, run `wdskit index {folder or '.'}`."
        return FolderIndexError(msg, folder=folder)


def known_digests(found: ShardList) -> dict[str, str]:
    """Return the hex sha256 of each tar that has an index entry, by local path or URL."""
    known = zip(found.urls, found.entries, strict=True)
    return {_place_of(url): entry.sha256 for url, entry in known if entry is not None}


def _place_of(url: str) -> str:
    return local_path(url) if is_local(url) else url


def _read_local(file: LocalFile, spans: Mapping[str, Span], name: str) -> bytes:
    return read_span(file, spans[name])


def _read_remote(found: Mapping[str, tuple[ObjectBytes, bytes | LargeData]], name: str) -> bytes:
    """Return the bytes of the field `name` of a sample. `found` has the reference and the data of each field, by name.
    A large field is read from the store again. StorageError: The object cannot be read.
    """
    reference, data = found[name]
    return reference.read() if isinstance(data, LargeData) else data


def _damaged_rest(err: ShardError, *, is_indexed: bool) -> RowError:
    """Return the error for the part of a tar after the damage `err`. `is_indexed` is True if an index has the tar."""
    problem = f"{err.problem} ({err.samples_read} samples read), and everything after it is lost"
    if is_indexed:
        problem += "; fields before it are not verified, because the shard differs from its index"
    remedy = err.remedy
    if err.samples_read > 0:
        remedy += " `wdskit pack --skip-bad` packs the samples before the damage."
    return row_error(f"{err.shard}, byte {err.offset}", problem, remedy)
