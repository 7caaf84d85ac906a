"""Rows from tars and zips. The members of an archive with the same key are the fields of one row."""

from __future__ import annotations

import logging
import re
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter

from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME, common_classes
from wdskit.dataset.index import join_url
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.labels import NO_CLASS, label_number
from wdskit.packing.references import ZIP_HEADER_BYTES, FieldBytes, ZipBytes
from wdskit.packing.row import SAME_FIELD, Row, json_with_key, make_row, row_error
from wdskit.packing.sources.records import CORRECT_OR_SKIP, Records, check_json_fields, json_fields
from wdskit.packing.sources.tar_samples import TarSamples, known_digests, list_tars
from wdskit.storage.file_identity import FileIdentity
from wdskit.tar.names import split_name

DROP_LABELS = "leave the labels out: `wdskit reshard --drop cls`."
"""End of the message about sources that number their classes differently."""
_NUMBER = re.compile(r"\d+")
# Encryption, strong encryption, or a masked directory (PKWARE's APPNOTE.TXT 6.3.10, section 4.4.4)
_ENCRYPTED = 0x2041
_IS_UTF8 = 0x800
_UNIX = 3
_log = logging.getLogger(__name__)


class _Archives:
    """Base of the readers of tars and zips: makes rows of their members.

    Args:
        records: Names the fields to make from the samples' JSON. Its classes are for the `cls` made from JSON, or else
            for the samples' own `cls`.

    Raises:
        PackError: A field cannot be made from JSON.
    """

    def __init__(self, records: Records) -> None:
        check_json_fields(records, takes_label=True)
        self._records = records
        self._takes_label = CLASS_FIELD not in records.fields  # otherwise a member `cls` is an error of its row
        self._has_label = False
        self.classes = {} if records.classes is None else records.classes.numbers
        self.num_other = 0

    def _row(
        self,
        key: str,
        members: Iterable[tuple[str, FieldBytes]],
        archive: str,
        keys: str,
        own: FieldBytes | None,
        label: FieldBytes | None,
    ) -> Row | RowError:
        """Return the row of the members with one key, or a `RowError` if the row cannot be packed.

        Args:
            key: The key of the members. A leading `./`, which tars of folders have, is removed.
            members: Name of each field, and its reference.
            archive: The archive, for messages.
            keys: The option `--keys`: "given", "clean" or "hashed".
            own: The sample's field `json`; None if the sample has no `json` or the row does not need the field.
            label: The sample's field `cls`; None if the sample has no `cls`.
        """
        where = f"{archive}: {key}"
        key = key.removeprefix("./")
        try:
            fields: dict[str, FieldBytes] = {}
            for name, data in members:
                field = SAME_FIELD.get(name, name)
                if field in fields:
                    raise row_error(where, f"it has the field {field!r} twice", "Rename one of its members.")
                fields[field] = data
            if label is not None and self._takes_label:
                self._has_label = True
                self._check_label(fields, label, where)
            if self._records.fields:
                try:
                    fields.update(json_fields(self._records, own, fields.keys()))
                except (ValueError, OSError) as err:
                    raise row_error(where, str(err), "Correct --field, or use --skip-bad.") from err
            if keys != "given":
                fields["json"] = json_with_key(b"{}" if own is None else own, key, where)
            return make_row(key, fields, where, keys=keys, path=key)
        except RowError as err:
            return err

    def _check_label(self, fields: dict[str, FieldBytes], label: FieldBytes, where: str) -> None:
        """Check the label of a sample. Replace `cls` in `fields` if `label` is not plain digits, and remove `cls` if
        `label` is blank. Plain digits stay a reference, which is copied with the rest of the sample.

        RowError: The label cannot be read, is not a number or one of the classes. `where` is for the message.
        """
        try:
            data = label if isinstance(label, bytes) else label.read()
            number = label_number(data.decode(errors="surrogateescape"), self._records.classes)
            if number is not None and self.classes and not NO_CLASS <= number < len(self.classes):
                raise ValueError(f"{number} is not a number of one of the {len(self.classes)} classes")  # noqa: TRY301
        except (OSError, ValueError) as err:
            problem = f"its field {CLASS_FIELD!r}: {err}"
            if isinstance(err, ValueError) and self.classes and self._records.classes is None:
                num = len(self.classes)
                problem = f"its field {CLASS_FIELD!r}: {bytes(data[:40])!r} is not a number of one of the {num} classes"
            raise row_error(where, problem, CORRECT_OR_SKIP) from err
        if number is None:
            del fields[CLASS_FIELD]
        elif data != b"%d" % number:
            fields[CLASS_FIELD] = b"%d" % number

    def _check_classes_used(self) -> None:
        """Raise PackError if the option `classes` had no effect. Call this method after the last row."""
        if self._records.classes is not None and self._takes_label and not self._has_label:
            raise _no_labels()


class Tars(_Archives):
    """Reader of the tars that a path or pattern names.

    Args:
        shards: Path, URL, pattern or folder of tars; several are joined by `::`.
        records: Names the fields to make from the samples' JSON, and the classes of `cls`.

    Attributes:
        num_other: Members of the tars read so far that belong to no sample.
        sha256: SHA-256 digest, in hex, of each tar that is in an index, by path or URL.
        classes: Number of each class by name: the classes of `records`. Without them, and if `cls` is not made from
            JSON, the classes in the `classes.json` of the folders; empty without such a file, if a folder with labels
            has no such file, or if two classes have the same name.

    Raises:
        PackError: A URL has a query, or a field cannot be made from JSON. Or `records` has classes for the samples' own
            `cls`, but a folder has a `classes.json`.
        StorageError: No tar matches, a local tar is missing, a URL is invalid, or a store or a `classes.json` cannot be
            read.
        FolderIndexError: The tars belong to an unfinished run, an index is invalid or does not match its tars, or a
            `classes.json` is invalid or contradicts another.
    """

    def __init__(self, shards: str, records: Records) -> None:
        super().__init__(records)
        found = list_tars(shards)
        self._shards = [*zip(found.urls, found.entries, strict=True)]
        self.sha256 = known_digests(found)
        if not self._takes_label:
            return
        common = common_classes(found.folders, found.folders.__getitem__, way_out=DROP_LABELS)
        names = common.names or ()
        if records.classes is not None:
            if common.names is not None:
                msg = f"classes: {join_url(common.folder, CLASSES_NAME)} already names the classes. Leave it out."
                raise PackError(
                    f"{msg}\n  To number them anew by their names in json: wdskit reshard --drop cls --field cls=class."
                )
            if all(found.entries) and not any(entry and CLASS_FIELD in entry.fields for entry in found.entries):
                raise _no_labels()
        elif common.problem:
            _log.warning("%s, so no %s is written.", common.problem, CLASSES_NAME)
        elif len({*names}) == len(names):
            self.classes = {name: number for number, name in enumerate(names)}

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per sample, in the order of the tars, or the `RowError` of a row that cannot be packed.

        The members of a sample are its fields. A damaged tar yields the complete samples before the damage, then one
        `RowError` for the rest. `keys` is the option `--keys`: "given", "clean" or "hashed".

        Raises:
            RowError: The members of a tar are not grouped by samples, so that an earlier row may lack fields.
            PackError: `records` has classes, and no sample has a `cls`.
            ShardError: A member is a link, a device or another kind that no sample has; or a tar was replaced after it
                was indexed.
            StorageError: A tar cannot be read.
            FolderIndexError: A tar differs from the index of its folder.
        """
        for url, entry in self._shards:
            samples = TarSamples(url, entry)
            try:
                for sample in samples:
                    if isinstance(sample, RowError):
                        yield sample
                        continue
                    uses_json = "json" in sample.fields and (keys != "given" or self._records.fields)
                    own = sample.read("json") if uses_json else None
                    label = sample.read(CLASS_FIELD) if CLASS_FIELD in sample.fields else None
                    yield self._row(sample.key, sample.fields.items(), samples.place, keys, own, label)
            finally:
                self.num_other += samples.num_ignored
        self._check_classes_used()


class Zips(_Archives):
    """Reader of zips on a local disk. The data of members is not read, except labels, and JSON that the rows need.

    Args:
        paths: The zips.
        records: Names the fields to make from the samples' JSON, and the classes of `cls`.

    Attributes:
        classes: Number of each class by name: the classes of `records`; empty without classes.
        num_other: Members of the zips read so far that belong to no sample.

    Raises:
        PackError: A field cannot be made from JSON.
    """

    def __init__(self, paths: Sequence[str], records: Records) -> None:
        super().__init__(records)
        self._paths = paths

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per sample, or the `RowError` of a row that cannot be packed.

        The members of a sample are its fields. The rows of each zip are sorted by the bytes of their keys. `keys` is
        the option `--keys`: "given", "clean" or "hashed".

        Raises:
            PackError: A zip cannot be read, is damaged, or has a member that is encrypted, a link, or compressed by a
                method other than deflate. Or `records` has classes, and no sample has a `cls`.
        """
        for path in self._paths:
            try:
                identity = FileIdentity.of(path)
                members = read_directory(path)
            except OSError as err:
                raise PackError(f"{path}: cannot be read: {err.strerror}.") from err
            found = [(*split, member) for name, member in members if (split := split_name(name)) is not None]
            self.num_other += len(members) - len(found)
            found.sort(key=lambda each: (each[0].encode(), each[1], each[2].header_offset))
            for key, group in groupby(found, key=itemgetter(0)):
                try:
                    fields = [_zip_field(path, key, field, member, identity) for _, field, member in group]
                except RowError as err:
                    yield err
                else:
                    own, label = (dict(fields).get(name) for name in ("json", CLASS_FIELD))
                    yield self._row(key, fields, path, keys, own, label)
        self._check_classes_used()


def _no_labels() -> PackError:
    return PackError("classes: nothing becomes `cls`. Name the value in the samples' JSON: --field cls=NAME.")


def read_directory(path: str) -> list[tuple[str, zipfile.ZipInfo]]:
    """Return name and directory entry of each file in a zip, in the order of the zip's directory.

    Raises:
        PackError: The file is not a valid zip; or members overlap, are encrypted, are links, have names that are not
            UTF-8, or are compressed by a method other than deflate.
        OSError: The file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as file:
            found, directory = file.infolist(), file.start_dir
        named = [(_zip_name(path, member), member) for member in found]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, struct.error, IndexError) as err:
        raise _damaged(path, f"it cannot be read as a zip: {str(err).rstrip('.')}") from err
    for name, member in named:
        if member.flag_bits & _ENCRYPTED:
            raise _damaged(path, f"{name!r} is encrypted")
        if member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            problem = f"{name!r} is compressed by method {member.compress_type}, and only deflate (8) is read"
            raise _damaged(path, problem)
        if member.create_system == _UNIX and stat.S_ISLNK(member.external_attr >> 16):  # a Unix mode
            raise _damaged(path, f"{name!r} is a symbolic link")
        if _min_end(member) > directory or member.header_offset < 0:
            raise _damaged(path, f"{name!r} extends past byte {directory}, where the directory begins")
    # If members share bytes, a zip of some kilobytes can unpack to terabytes (D. Fifield, 2019).
    spans = sorted((member.header_offset, _min_end(member)) for member in found)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise _damaged(path, "its members overlap, as in a decompression bomb")
    return [(name, member) for name, member in named if not name.endswith("/")]


def _min_end(member: zipfile.ZipInfo) -> int:
    """Return the smallest offset in the zip at which a member can end. The true end may be larger."""
    return member.header_offset + ZIP_HEADER_BYTES + len(member.orig_filename) + member.compress_size


def _zip_name(path: str, member: zipfile.ZipInfo) -> str:
    """Return the name of a member, read as UTF-8. PackError: The name is not UTF-8, is empty, or has a NUL."""
    name = member.orig_filename
    if not member.flag_bits & _IS_UTF8:  # zipfile has read it as cp437
        try:
            name = name.encode("cp437").decode()
        except UnicodeError as err:
            raise _damaged(path, f"the name {name!r} of a member is not UTF-8") from err
    if not name or "\x00" in name:
        raise _damaged(path, f"a member is called {name!r}")
    return name


def _zip_field(
    path: str, key: str, field: str, member: zipfile.ZipInfo, identity: FileIdentity
) -> tuple[str, FieldBytes]:
    """Return `field` and a reference to the member's bytes.

    `path` and `identity` belong to the zip. `key` and `field` are the member's name before and after the first dot of
    its last part.

    Raises:
        RowError: The sizes of the member contradict each other or show a decompression bomb. Or the first part of
            `field` is a number: in `v1.5.jpg`, the first dot seems to belong to the key.
    """
    where = f"{path}: {key}"
    num_bytes, packed_bytes = member.file_size, member.compress_size
    is_deflated = member.compress_type == zipfile.ZIP_DEFLATED
    if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
        problem = f"its {field!r} claims to unpack {packed_bytes} bytes to {num_bytes}, like a decompression bomb"
        raise row_error(where, problem, "If it is right, unpack it yourself.")
    if _NUMBER.fullmatch(field.partition(".")[0]):
        problem = f"the dot in {key}.{field} ends its key, so names that differ only after it would be one sample"
        raise row_error(where, problem, "Unpack it, and pack the folder with --keys hashed.")
    if not is_deflated and packed_bytes != num_bytes:
        problem = f"its {field!r} is stored as {packed_bytes} bytes and claims to have {num_bytes}"
        raise row_error(where, problem, "The zip is damaged. Make it again.")
    return field, ZipBytes(path, num_bytes, member.header_offset, packed_bytes, is_deflated, member.CRC, *identity)


def _damaged(path: str, problem: str) -> PackError:
    return PackError(f"{path}: {problem}.\n  It is damaged or not a zip of plain files. Make it again, or unpack it.")
