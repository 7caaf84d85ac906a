"""What is packed: rows, each with a key and fields, wherever they come from."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wdskit.codecs.fields import encode_field
from wdskit.dataset.keys import check_field, check_member_name, hashed_key
from wdskit.errors import DecodeError, KeyRuleError, RowError
from wdskit.files import Buffer
from wdskit.limits import MAX_USTAR_SIZE_BYTES
from wdskit.packing.json_merge import field_with_metadata
from wdskit.packing.labels import CLASS_FIELD, ClassNames, label_number
from wdskit.packing.references import FieldBytes, FileBytes, PartBytes, SourceFiles, read_parts
from wdskit.packing.transforms import UNTOUCHED, Transforms
from wdskit.storage.identity import FileChanged

SAME_FIELD = {"jpeg": "jpg"}  # two spellings of one extension become one field, so that `jpg;png` finds them all
_SHOWN_CHARS = 1000
_UNCLEAN = re.compile(r"[^A-Za-z0-9_+-]")


class Progress(NamedTuple):
    """How far packing is.

    Attributes:
        stage: What is done now: rows are listed ("reading"), with `skip_bad` their files are checked, in an addition
            their keys are compared with those that are there, and shards are written ("packing").
        num_samples: Samples that this stage is done with.
        num_bytes: Bytes that they take in their shards.
        total_samples: Samples in all, None where that is unknown.
        total_bytes: Bytes that all take, None where that is unknown.
    """

    stage: Literal["reading", "checking", "comparing", "packing"]
    num_samples: int
    num_bytes: int
    total_samples: int | None
    total_bytes: int | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to be.

    Attributes:
        key: Its key.
        fields: Name and bytes of each field, sorted by name: the order of its members.
        where: The file, or the manifest and its line, for messages.
        is_cleaned: Its key is another one than was given; not kept in a plan.
    """

    key: str
    fields: tuple[tuple[str, FieldBytes], ...]
    where: str
    is_cleaned: bool = False

    def read(self, transforms: Transforms = UNTOUCHED) -> list[tuple[str, bytes]]:
        """Name and bytes of each field that is packed, images checked and transformed, sorted by name.

        Raises:
            RowError: A file cannot be read or changed, or an image is not whole or cannot be transformed.
        """
        return self.transform(self.read_fields(), transforms)

    def transform(self, fields: list[tuple[str, bytes]], transforms: Transforms) -> list[tuple[str, bytes]]:
        """As `read`, of fields that were read."""
        try:
            transformed = transforms.apply(fields)
            if transforms.changes_bytes:
                check_member_name(self.key, max((field for field, _ in transformed), key=len))
        except DecodeError as err:
            raise self._bad(err) from err
        except KeyRuleError as err:
            raise row_error(self.where, str(err), "Rename it, or use --keys hashed.") from err
        return transformed

    def check(self, field: str, data: Buffer, transforms: Transforms) -> None:
        """As `transform`, of one field that was read and passes through as it is."""
        try:
            transforms.check(field, data)
        except DecodeError as err:
            raise self._bad(err) from err

    def read_fields(self, files: SourceFiles | None = None) -> list[tuple[str, bytes]]:
        """Name and bytes of each field as they are. `files` keeps open what it reads from.

        Raises:
            RowError: A file cannot be read or changed.
        """
        parts = [source for _, source in self.fields if type(source) is PartBytes]
        if not parts or any(part.path != parts[0].path for part in parts):
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
        """The bytes of one of its fields, with the errors of `read_fields`."""
        if isinstance(source, bytes):
            return source
        try:
            if files is not None and isinstance(source, PartBytes):
                return files.read([source])[0]
            return source.read()
        except (OSError, ValueError) as err:
            raise self._unreadable(source, err) from err

    def read_into(self, source: FileBytes | PartBytes, memory: memoryview, files: SourceFiles) -> None:
        """As `read_field`, into memory of as many bytes."""
        try:
            if isinstance(source, PartBytes):
                files.read_into(source, memory)
            else:
                source.read_into(memory)
        except (OSError, ValueError) as err:
            raise self._unreadable(source, err) from err

    def _bad(self, err: DecodeError) -> RowError:
        source: FieldBytes = dict(self.fields).get(err.field, b"")
        return row_error(self.where, _describe(source, err), "Repair, rename or remove it, or use --skip-bad.")

    def _unreadable(self, source: FieldBytes, err: Exception) -> RowError:
        is_changed = isinstance(err, FileChanged)
        remedy = (
            "Pack again when no other program writes it." if is_changed else "Repair or remove it, or use --skip-bad."
        )
        return row_error(self.where, _describe(source, err), remedy)


def size_of(data: FieldBytes) -> int:
    """Bytes of a field."""
    return len(data) if isinstance(data, bytes) else data.num_bytes


def _describe(source: FieldBytes, err: Exception) -> str:
    """What went wrong with a field, the file named where there is one."""
    problem = (err.strerror or str(err)) if isinstance(err, OSError) else str(err)
    return problem if isinstance(source, bytes) else f"{source.path}: {problem}"


def row_error(where: str, problem: str, remedy: str = "") -> RowError:
    """The error of one row; its place stays one line, whatever a file is called."""
    where = where.replace("\n", "\\n")
    problem = problem.removeprefix(f"{where}: ").rstrip(".")
    if len(problem) > _SHOWN_CHARS:  # a cell of megabytes stands in it
        problem = f"{problem[: _SHOWN_CHARS // 2]} ... {problem[-_SHOWN_CHARS // 4 :]}"
    msg = f"{where}: {problem}."
    return RowError(f"{msg}\n  {remedy}" if remedy else msg, where=where, problem=problem)


def key_taken(row: Row, where: str) -> RowError:
    """The error of a row whose key another one has."""
    problem = f"its key {row.key!r} is also the key of {where}"
    return row_error(
        row.where,
        problem,
        "Keys must be unique. Rename one; or, for a table, choose a column with unique values: --key-column.",
    )


def field_of(path: str) -> str:
    """The field that a file's extension names, in lower case, `jpeg` as `jpg`; empty without one."""
    _, dot, extension = path.rpartition("/")[2].lstrip(".").rpartition(".")  # as splitext, for a third of its 2 us
    extension = extension.lower() if dot else ""
    return SAME_FIELD.get(extension, extension)


def file_bytes(path: str, where: str) -> FileBytes:
    """A file as it is now.

    Raises:
        RowError: It is no file.
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
    """A row whose members every reader gives back.

    Args:
        key: The key as given.
        fields: Bytes by field name.
        where: For messages.
        keys: "given" takes the key as it is, "clean" replaces what some readers do not take, "hashed" replaces it by a
            hash of `path`.
        path: What is hashed: the key, or the path that it came from.

    Raises:
        RowError: The key or a field would not survive a round trip, or there is no field.
    """
    given = key
    if keys != "given":
        key = hashed_key(path) if keys == "hashed" else clean_key(key)
    if not fields:
        raise row_error(where, "it has no field", "Give it at least one.")
    try:
        for field in fields:
            check_field(field)
        check_member_name(key, max(fields, key=len))  # the key once: it takes 20 times as long as a field
    except KeyRuleError as err:
        remedy = "Rename it, or use --keys clean, or --keys hashed, which keeps the path in its json."
        raise row_error(where, str(err), remedy) from err
    for field, data in fields.items():
        if (size := size_of(data)) > MAX_USTAR_SIZE_BYTES:
            problem = (
                f"its field {field!r} has {size} bytes, more than the {MAX_USTAR_SIZE_BYTES} that all readers accept"
            )
            raise row_error(where, problem, "Split it into several samples.")
    return Row(key, tuple(sorted(fields.items())), where, keys == "clean" and key != given)


def clean_key(key: str) -> str:
    """The key with `_` for each character that not all readers take: others than letters and digits of ASCII, `_`, `+`,
    `-` and the slashes of a relative path. Several `_` at the start of a name become one: webdataset ignores `__a`.
    """
    parts = [_UNCLEAN.sub("_", part) for part in key.split("/") if part not in {"", ".", ".."}]
    return "/".join(part if not part.startswith("__") else f"_{part.lstrip('_')}" for part in parts)


def python_rows(
    rows: Iterable[Mapping[str, Any]], *, keys: str, classes: ClassNames | None = None
) -> Iterator[Row | RowError]:
    """Rows from Python: `{"__key__": key, field: value, ...}`, as webdataset's writers take them.

    A value is bytes, a `pathlib.Path` whose file is packed, or what `codecs.fields.encode_field` takes for the field's
    name; a `cls` that is not a path is a label, one of `classes` where these are given. Fields whose names
    begin with two underscores are not packed. With cleaned or hashed keys, the one given stands in `json` under `key`.

    Yields:
        A row, or the error of one that cannot be packed.
    """
    for number, row in enumerate(rows):
        where = f"row {number}"
        try:
            yield _python_row(row, where, keys, classes)
        except RowError as err:
            yield err


def _python_row(row: Any, where: str, keys: str, classes: ClassNames | None) -> Row:
    key = row.get("__key__") if isinstance(row, Mapping) else None
    if not isinstance(key, str):
        raise row_error(where, f"it is {_kind(row)}", 'A row is a dict with the text "__key__" and its fields.')
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
    """The json of a row whose key is replaced, with the key that it had.

    Raises:
        RowError: It cannot be read, or has no room for the key.
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


def _kind(row: Any) -> str:
    return (
        f"a dict without a text `__key__`: {sorted(map(str, row))}"
        if isinstance(row, Mapping)
        else f"of type {type(row).__name__}"
    )
