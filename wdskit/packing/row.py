"""Rows: the samples to pack, each with a key and fields, from any source."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wdskit.codecs.fields import encode_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import check_field, check_member_name, hashed_key
from wdskit.errors import DecodeError, KeyRuleError, RowError
from wdskit.files import Buffer
from wdskit.limits import MAX_USTAR_SIZE_BYTES
from wdskit.packing.json_merge import field_with_metadata
from wdskit.packing.labels import ClassNames, label_number
from wdskit.packing.references import FieldBytes, FileBytes, PartBytes, SourceFiles, read_parts
from wdskit.packing.transforms import UNTOUCHED, Transforms
from wdskit.storage.file_identity import FileChanged

SAME_FIELD = {"jpeg": "jpg"}  # two spellings of an extension become one field, so that `jpg;png` finds all images
_SHOWN_CHARS = 1000
_UNCLEAN = re.compile(r"[^A-Za-z0-9_+-]")


class Progress(NamedTuple):
    """The progress of packing.

    Attributes:
        stage: "reading": the rows are listed. "checking": their files are read, to find bad rows or duplicates.
            "comparing": the keys of existing shards are read, for an addition. "packing": the shards are written.
        num_samples: Samples that this stage has completed.
        num_bytes: Bytes of the completed samples in their shards.
        total_samples: All samples of the stage; None if the number is unknown.
        total_bytes: Bytes of all these samples in their shards; None if the number is unknown.
    """

    stage: Literal["reading", "checking", "comparing", "packing"]
    num_samples: int
    num_bytes: int
    total_samples: int | None
    total_bytes: int | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to pack.

    Attributes:
        key: Key of the sample.
        fields: (name, bytes or reference to the bytes) of each field, sorted by name. The tar members have this order.
        where: Place for messages: the file, or the manifest and its line.
        is_cleaned: True if `keys="clean"` changed the key. A plan does not store this flag.
    """

    key: str
    fields: tuple[tuple[str, FieldBytes], ...]
    where: str
    is_cleaned: bool = False

    def read(self, transforms: Transforms = UNTOUCHED) -> list[tuple[str, bytes]]:
        """Read, check and transform the fields. Return name and bytes of each packed field, sorted by name.

        Raises:
            RowError: A file cannot be read, is damaged or was changed; or `transform` raises the error.
            StorageError: An object in a store cannot be read, or was replaced.
        """
        return self.transform(self.read_fields(), transforms)

    def transform(self, fields: list[tuple[str, bytes]], transforms: Transforms) -> list[tuple[str, bytes]]:
        """Check and transform `fields`: (name, bytes), sorted by name. Return the packed fields, sorted by name.

        Raises:
            RowError: A field is damaged, does not fit its name, cannot be transformed, or gets an invalid name. Or an
                image gets another name, so that the row lacks a field of `transforms.require`.
        """
        try:
            transformed = transforms.apply(fields)
            lacks = transforms.lacks_image([name for name, _ in fields], [name for name, _ in transformed])
            if lacks is not None:
                has = ", ".join(name for name, _ in transformed)
                problem = (
                    f"it has no {lacks.replace(';', ' or ')}, because images are named after their format: it has {has}"
                )
                raise row_error(
                    self.where, problem, "Name the image after its format, set `format`, or use --skip-bad."
                )
            if transforms.changes_bytes:
                check_member_name(self.key, max((field for field, _ in transformed), key=len))
        except DecodeError as err:
            raise self._damaged(err) from err
        except KeyRuleError as err:
            raise row_error(self.where, str(err), "Rename it, or use --keys hashed.") from err
        return transformed

    def check(self, field: str, data: Buffer, transforms: Transforms) -> None:
        """Check one field that is packed unchanged; `data` are its bytes.
        RowError: The field is damaged or does not fit its name.
        """
        try:
            transforms.check(field, data)
        except DecodeError as err:
            raise self._damaged(err) from err

    def read_fields(self, files: SourceFiles | None = None) -> list[tuple[str, bytes]]:
        """Return name and bytes of each field, in the order of `fields`, without checks or transforms.

        If all `PartBytes` of the row belong to one file, `files` keeps this file open for later calls. Otherwise
        `files` is not used.

        Raises:
            RowError: A file cannot be read, is damaged or was changed.
            StorageError: An object in a store cannot be read, or was replaced.
        """
        parts = [source for _, source in self.fields if type(source) is PartBytes]
        if len({part.path for part in parts}) != 1:
            return [(field, self.read_field(source)) for field, source in self.fields]
        try:
            read = iter(read_parts(parts) if files is None else files.read(parts))
        except (OSError, ValueError) as err:
            raise self._unreadable(parts[0], err) from err
        return [
            (field, next(read) if type(source) is PartBytes else self.read_field(source))
            for field, source in self.fields
        ]

    def read_field(self, source: FieldBytes, files: SourceFiles | None = None) -> bytes:
        """Return the bytes of one field. `source` is the bytes or the reference of this field in `fields`.

        `files` keeps the file of a `PartBytes` open for later calls; None closes this file at the end of the call.
        RowError, StorageError: The file, or the object in a store, cannot be read, is damaged or was changed.
        """
        if isinstance(source, bytes):
            return source
        try:
            if files is not None and isinstance(source, PartBytes):
                return files.read([source])[0]
            return source.read()
        except (OSError, ValueError) as err:
            raise self._unreadable(source, err) from err

    def read_into(self, source: FileBytes | PartBytes, memory: memoryview, files: SourceFiles) -> None:
        """Read one field into `memory`, which has the size of the field. `source` is the field's reference in `fields`.
        `files` keeps the file of a `PartBytes` open for later calls.
        RowError: The file cannot be read or was changed.
        """
        try:
            if isinstance(source, PartBytes):
                files.read_into(source, memory)
            else:
                source.read_into(memory)
        except (OSError, ValueError) as err:
            raise self._unreadable(source, err) from err

    def _damaged(self, err: DecodeError) -> RowError:
        source: FieldBytes = dict(self.fields).get(err.field, b"")
        return row_error(self.where, describe_failure(source, err), "Repair, rename or remove it, or use --skip-bad.")

    def _unreadable(self, source: FieldBytes, err: Exception) -> RowError:
        is_changed = isinstance(err, FileChanged)
        remedy = (
            "Pack again when no other program writes it." if is_changed else "Repair or remove it, or use --skip-bad."
        )
        return row_error(self.where, describe_failure(source, err), remedy)


def size_of(data: FieldBytes) -> int:
    """Return the number of bytes of a field."""
    return len(data) if isinstance(data, bytes) else data.num_bytes


def describe_failure(source: FieldBytes, err: Exception) -> str:
    """Return the text of `err`, for an OSError only its reason. If `source` is a reference, its path or URL precedes
    the text.
    """
    problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
    return problem if isinstance(source, bytes) else f"{source.path}: {problem}"


def row_error(where: str, problem: str, remedy: str = "") -> RowError:
    """Return the error of the row at `where`. `problem` is the reason. `remedy` is a sentence that says what to do.

    A problem of over 1,000 characters is shortened.
    """
    where = where.replace("\n", "\\n")
    problem = problem.removeprefix(f"{where}: ").rstrip(".")
    if len(problem) > _SHOWN_CHARS:  # the text quotes a large cell
        problem = f"{problem[: _SHOWN_CHARS // 2]} ... {problem[-_SHOWN_CHARS // 4 :]}"
    msg = f"{where}: {problem}."
    return RowError(f"{msg}\n  {remedy}" if remedy else msg, where=where, problem=problem)


KEYS_REMEDY = "Keys must be unique. Rename one; or, for a table, choose a column with unique values: --key-column."


def key_taken(row: Row, where: str) -> RowError:
    """Return the error for a row whose key is also the key of the row at `where`."""
    problem = f"its key {row.key!r} is also the key of {where}"
    return row_error(row.where, problem, KEYS_REMEDY)


def field_of(path: str) -> str:
    """Return the field name of a file: its extension in lower case, `jpg` for `jpeg`, or "" without an extension.

    A dot at the start of the file's name does not begin an extension.
    """
    _, dot, extension = path.rpartition("/")[2].lstrip(".").rpartition(".")  # os.path.splitext takes 3 times as long
    extension = extension.lower() if dot else ""
    return SAME_FIELD.get(extension, extension)


def file_bytes(path: str, where: str) -> FileBytes:
    """Return a reference to a file, with its current size, modification time and inode. The file is not opened.

    `where` is the place of the row, for messages.

    Raises:
        RowError: The path does not exist, cannot be reached, or is not a regular file.
    """
    try:
        status = os.stat(path)
    except OSError as err:
        problem = f"{path}: {err.strerror or err}".removeprefix(f"{where}: ")
        raise row_error(where, problem, "Correct the path, or use --skip-bad.") from err
    if not stat.S_ISREG(status.st_mode):
        problem = "it is not a file" if path == where else f"{path} is not a file"
        raise row_error(where, problem, "Correct the path, or use --skip-bad.")
    return FileBytes(path, status.st_size, status.st_mtime_ns, status.st_ino)


def make_row(key: str, fields: Mapping[str, FieldBytes], where: str, *, keys: str, path: str) -> Row:
    """Return a row whose key and fields every reader reads back unchanged.

    Args:
        key: The key as given.
        fields: Bytes, or a reference to the bytes, by field name.
        where: Place for messages.
        keys: "given" keeps the key. "clean" uses `clean_key`. "hashed" replaces the key by a hash of `path`.
        path: The path that gave the key, or the key as given. `keys="hashed"` makes the key from it.

    Raises:
        RowError: The key or a field name is invalid, a field is too large, or the row has no field.
    """
    given = key
    if keys != "given":
        key = hashed_key(path) if keys == "hashed" else clean_key(key)
    if not fields:
        raise row_error(where, "it has no field", "Give it at least one.")
    try:
        for field in fields:
            check_field(field)
    except KeyRuleError as err:
        raise row_error(where, str(err), "Rename the field.") from err
    try:
        check_member_name(key, max(fields, key=len))  # the key is checked once: it takes 20 times as long as a field
    except KeyRuleError as err:
        clean = " --keys clean, or" if keys == "given" else ""
        way = "" if keys == "hashed" else f", or use{clean} --keys hashed, which keeps the path in its json"
        raise row_error(where, str(err), f"Rename it{way}.") from err
    for field, data in fields.items():
        if (size := size_of(data)) > MAX_USTAR_SIZE_BYTES:
            problem = (
                f"its field {field!r} has {size} bytes, more than the {MAX_USTAR_SIZE_BYTES} that all readers accept"
            )
            raise row_error(where, problem, "Split it into several samples.")
    return Row(key, tuple(sorted(fields.items())), where, keys == "clean" and key != given)


def clean_key(key: str) -> str:
    """Return the key with `_` in place of each character that some readers refuse.

    ASCII letters and digits, `_`, `+`, `-` and slashes between names are kept. Empty names, `.` and `..` are left out.
    Several `_` at the start of a name become one, because webdataset ignores the name `__a`. The result is empty if no
    name is left.
    """
    parts = [_UNCLEAN.sub("_", part) for part in key.split("/") if part not in {"", ".", ".."}]
    return "/".join(part if not part.startswith("__") else f"_{part.lstrip('_')}" for part in parts)


def python_rows(
    rows: Iterable[Mapping[str, Any]], *, keys: str, classes: ClassNames | None = None
) -> Iterator[Row | RowError]:
    """Convert rows from Python, `{"__key__": key, field: value, ...}`, the form that webdataset's writers take.

    Names of fields become lower case, and `jpeg` becomes `jpg`. Fields whose names begin with two underscores are not
    packed. A value is bytes, a `pathlib.Path` whose file is packed, or a value that `codecs.fields.encode_field`
    accepts for the field's name. The value of `cls` is a `pathlib.Path` or a label, also as text or bytes: a whole
    number or, with `classes`, the name or number of a class. None, NaN and blank text give no field `cls`. If `keys` is
    "clean" or "hashed", the given key is added to the field `json` as the member `key`.

    Yields:
        A row, or the error of a row that cannot be packed.
    """
    for number, row in enumerate(rows):
        where = f"row {number}"
        try:
            yield _python_row(row, where, keys, classes)
        except RowError as err:
            yield err


def _python_row(row: Any, where: str, keys: str, classes: ClassNames | None) -> Row:
    remedy = 'A row is a dict with the text "__key__" and its fields.'
    if not isinstance(row, Mapping):
        raise row_error(where, f"it is of type {type(row).__name__}", remedy)
    key = row.get("__key__")
    if not isinstance(key, str):
        raise row_error(where, f"it is a dict without a text `__key__`: {sorted(map(str, row))}", remedy)
    where = f"{where} ({key!r})"
    values: dict[str, Any] = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise row_error(where, f"its field {name!r} is not text", "Name it like an extension: jpg, json, cls.")
        if name.startswith("__"):
            continue
        field = SAME_FIELD.get(name.lower(), name.lower())
        if field in values:
            raise row_error(where, f"it has the field {field!r} twice", "Write fields in lower case.")
        values[field] = value
    if CLASS_FIELD in values and not isinstance(values[CLASS_FIELD], Path):
        label = values.pop(CLASS_FIELD)
        if isinstance(label, bytes | bytearray | memoryview):
            label = bytes(label).decode(errors="surrogateescape")
        try:
            number = label_number(label, classes)
        except ValueError as err:
            raise row_error(where, f"its field 'cls': {err}", "Correct it, or use --skip-bad.") from err
        if number is not None:
            values[CLASS_FIELD] = number
    fields = {field: _encode(field, value, where) for field, value in values.items()}
    if keys != "given" and fields:
        fields["json"] = json_with_key(fields.get("json", b"{}"), key, where)
    return make_row(key, fields, where, keys=keys, path=key)


def json_with_key(own: FieldBytes, key: str, where: str) -> bytes:
    """Return the JSON object `own` with the member `key` added. `where` is for messages.

    Raises:
        RowError: `own` cannot be read, is too large, is not a JSON object, or has a member `key` with another value.
    """
    try:
        return field_with_metadata(own, {"key": key})
    except (OSError, ValueError) as err:
        problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
        raise row_error(where, f"its json: {problem}", "Correct it, or use --skip-bad.") from err


def _encode(field: str, value: Any, where: str) -> FieldBytes:
    if isinstance(value, Path):
        return file_bytes(str(value), where)
    try:
        return encode_field(field, value)
    except (DecodeError, ValueError) as err:
        remedy = "Pass bytes, a pathlib.Path of a file, or a value that fits the field's name."
        raise row_error(where, str(err), remedy) from err
