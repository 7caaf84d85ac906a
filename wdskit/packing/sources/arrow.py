"""Arrow tables: Parquet files, and data sets that Hugging Face's `datasets` saved (`save_to_disk`).

Both are read by pyarrow alone. The files of `datasets` are Arrow's stream format, uncompressed, so an image's bytes
stand in one piece at an offset of their file. `datasets` is not imported, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from wdskit.codecs.formats import field_of_bytes
from wdskit.dataset.classes import first_conflict
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.parquet_cells import bytes_of, check_group, open_parquet, read_group
from wdskit.packing.references import CellBytes, FieldBytes, PartBytes
from wdskit.packing.row import Row, row_error
from wdskit.packing.sources.arrow_columns import encode_cell, json_values, sort_columns
from wdskit.packing.sources.class_names import Labels, labels_of, whole_number
from wdskit.packing.sources.records import CLASS_FIELD, Records, image_path
from wdskit.storage.identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow as pa

    _Batch: TypeAlias = tuple[pa.RecordBatch, Iterable["_Image"] | None]

STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
SPLITS_NAME = "dataset_dict.json"
_START_BYTES = 32  # show an image's format
_HELD_BYTES = 64 << 20


class _Image(NamedTuple):
    """What a row has of its image: a path, and the first of its bytes with a reference to all; each may be None."""

    path: Any
    start: bytes | None = None
    data: FieldBytes = b""


def read_parquet(
    paths: Sequence[str], records: Records, labels: Labels | None = None, *, in_order: bool = True
) -> ArrowTables:
    """Parquet files of one schema; image paths in them are relative to each one's folder.

    Args:
        paths: As `ArrowTables` takes it, as `records` and `labels`. An image may be bytes, or a struct of `bytes` and
            `path`; where its column is not named, it is one of
            `IMAGE_COLUMNS`, or the only struct.
        in_order: The rows are packed as they come. Else the bytes of their images are read with them, once: each would
            cost a row group later.
    """
    return ArrowTables(paths, "Parquet", lambda path: _ParquetFile(path, in_order=in_order), records, labels)


def read_saved_dataset(folder: str, records: Records, labels: Labels | None = None) -> ArrowTables:
    """A saved data set, or one split of a saved `DatasetDict`: the folder with its `state.json`.

    Raises:
        PackError: It is no such folder, or has a column that cannot be packed.
    """
    info = os.path.join(folder, INFO_NAME)
    return ArrowTables(_data_files(folder), "an Arrow stream", lambda path: _StreamFile(path, info), records, labels)


class ArrowTables:
    """Tables of one schema, one after the other.

    Args:
        paths: Their files.
        what: What they are, for messages.
        open_file: Opens one.
        records: How a record becomes a row, its folder apart.
        labels: The classes, where they are known; None: those of the column, or the texts in the column of `cls`.

    Attributes:
        classes: Number of each class by name; empty where nobody knows names.

    Raises:
        PackError: pyarrow is not installed; the first file cannot be read, or has a column that cannot be packed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        what: str,
        open_file: Callable[[str], _ParquetFile | _StreamFile],
        records: Records,
        labels: Labels | None,
    ) -> None:
        self._paths = paths
        self._what = what
        self._open_file = open_file
        self._given = records
        with self._open(paths[0]) as file:
            self._schema = file.schema
            self._columns = columns = sort_columns(file.schema, file.features, paths[0], records)
        fields = {name: column for name, column in records.fields.items() if name not in columns.own}
        column = fields.get(CLASS_FIELD)
        if labels is not None and columns.class_column is not None:
            raise PackError(f"{paths[0]}: classes: its column {column!r} has names of classes already. Leave it out.")
        self.classes = {name: number for number, name in enumerate(columns.labels.get(columns.class_column or "", []))}
        if column is not None and columns.class_column is None:
            labels = labels_of(self._values(column), column) if labels is None else labels
            self.classes = dict(labels.numbers)
        self._records = dataclasses.replace(records, fields=fields, labels=labels or Labels())

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a row: `json` with all columns but bytes, the image, `cls` where a column is called so or has the names
        of classes, and the fields that are made of columns.

        Raises:
            PackError: A file cannot be read, or has other columns or classes than the first.
        """
        number = 0
        for path in self._paths:
            first = number
            records = dataclasses.replace(self._records, folder=os.path.dirname(path))
            with self._open_same(path) as file:
                for batch, images in file.batches(None, self._columns.image):
                    for row in self._batch_rows(batch, images, records, f"{path}, row", number - first, number, keys):
                        yield row
                        number += 1

    def _batch_rows(
        self,
        batch: pa.RecordBatch,
        images: Iterable[_Image] | None,
        records: Records,
        place: str,
        number_in_file: int,
        number: int,
        keys: str,
    ) -> Iterator[Row | RowError]:
        own = [(field, column, batch.column(column)) for field, column in self._columns.own.items()]
        of_images = itertools.repeat(None) if images is None else iter(images)
        # `json_values` is asked first, and alone says how many rows there are.
        for at, (values, image) in enumerate(zip(json_values(self._columns.to_json, batch), of_images, strict=False)):
            where = f"{place} {number_in_file + at}"
            try:
                if isinstance(values, str):
                    raise row_error(where, values)
                record = dict(zip(self._columns.to_json, values, strict=True))
                fields = self._label(record, where)
                for field, column, array in own:
                    if array[at].is_valid:
                        fields[field] = encode_cell(field, column, array[at], where)
                yield self._row(record, fields, image, records, number + at, where, keys)
            except RowError as err:
                yield err

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[_ParquetFile | _StreamFile]:
        """A file of this table; what pyarrow raises of it names it."""
        try:
            import pyarrow as pa
        except ImportError as err:
            raise PackError(f"{path}: this is read by pyarrow. Install it: pip install 'wdskit[tables]'.") from err
        try:
            file = self._open_file(path)
            yield file
            file.identity.check(path)
        except FileChanged as err:
            raise PackError(f"{path}: {err}.\n  Pack again when nobody writes it.") from err
        except (pa.ArrowException, OSError) as err:
            raise PackError(f"{path}: it cannot be read as {self._what}: {str(err).splitlines()[0]}.") from err

    @contextlib.contextmanager
    def _open_same(self, path: str) -> Iterator[_ParquetFile | _StreamFile]:
        """A file of the same columns and classes as the first."""
        with self._open(path) as file:
            if not file.schema.equals(self._schema):
                raise PackError(f"{path}: it has other columns or types than {self._paths[0]}.")
            labels = sort_columns(file.schema, file.features, path, self._given).labels
            for column, names in self._columns.labels.items():
                number = first_conflict(names, labels.get(column, ()))
                if number is not None:
                    msg = f"{path}: class {number} of its column {column!r} is {labels[column][number]!r}"
                    raise PackError(f"{msg}, and {names[number]!r} in {self._paths[0]}.\n  Pack them into two folders.")
            yield file

    def _values(self, column: str) -> Iterator[Any]:
        for path in self._paths:
            with self._open_same(path) as file:
                for batch, _ in file.batches(column, None):
                    try:
                        yield from batch.column(column).unique().to_pylist()
                    except ValueError as err:
                        raise PackError(f"{path}: its column {column!r} holds text that is no UTF-8.") from err

    def _row(
        self,
        record: dict[str, Any],
        fields: dict[str, FieldBytes],
        image: _Image | None,
        records: Records,
        number: int,
        where: str,
        keys: str,
    ) -> Row:
        if image is None:
            row = records.row(record, number, where, keys=keys, fields=fields)
        else:
            column = str(self._columns.image)
            if image.path:
                record[column] = image.path
            if image.start is not None:
                field = field_of_bytes(image.start)
                if field is None:
                    problem = f"its image begins with {image.start[:8]!r}, as none of a known format does"
                    raise row_error(where, problem, "Mend or remove it, or use --skip-bad.")
                fields[field] = image.data
            elif image.path:
                fields.update(records.image_file(image_path(image.path, column, where), where))
            row = records.row_of(record, fields, None, number, where, keys=keys, column=column)
        json_bytes = len(dict(row.fields)["json"])  # type: ignore[arg-type]
        if json_bytes > MAX_ROW_BYTES:
            raise row_error(where, f"its json has {json_bytes} bytes, over the {MAX_ROW_BYTES} of a sample's")
        return row

    def _label(self, record: dict[str, Any], where: str) -> dict[str, FieldBytes]:
        """The class: its number as a field, its name beside its number."""
        fields: dict[str, FieldBytes] = {}
        for name, classes in self._columns.labels.items():
            number = whole_number(record[name])
            if record[name] is not None and (number is None or not -1 <= number < len(classes)):
                raise row_error(where, f"its {name!r} is {record[name]!r}, and there are {len(classes)} classes")
            record[f"{name}_name"] = None if number is None or number < 0 else classes[number]
            if number is not None and name == self._columns.class_column:
                fields[CLASS_FIELD] = b"%d" % number
        return fields


class _ParquetFile:
    """A Parquet file, read in small pieces.

    Attributes:
        identity: The file's when it was opened.
        schema: Of its table.
        features: What `datasets` says of its columns; empty where it says nothing.
    """

    def __init__(self, path: str, *, in_order: bool) -> None:
        self._path = path
        self._in_order = in_order
        self.identity = FileIdentity.of(path)
        self._file = open_parquet(path)
        self.schema: pa.Schema = self._file.schema_arrow
        self.features = _parse_features((self.schema.metadata or {}).get(b"huggingface"), path)

    def batches(self, column: str | None, image: str | None) -> Iterator[_Batch]:
        """One column at least, or all, some rows at a time, with the images of the column `image`."""
        for group in range(self._file.num_row_groups):
            check_group(self._file, group, self._path)
            first = 0
            for batch in read_group(self._file, group, None if column is None else [column]):
                yield batch, None if image is None else self._images(batch.column(image), image, group, first)
                first += batch.num_rows

    def _images(self, cells: pa.Array, column: str, group: int, first: int) -> Iterator[_Image]:
        for row, cell in enumerate(cells.to_pylist(), start=first):
            path = cell.get("path") if isinstance(cell, dict) else None
            data = bytes_of(cell)
            if data is None:
                yield _Image(path)
            elif self._in_order:
                place = CellBytes(self._path, len(data), group, row, column, *self.identity)
                yield _Image(path, data[:_START_BYTES], place)
            else:
                yield _Image(path, data[:_START_BYTES], data)


class _StreamFile:
    """A data file of a saved data set in Arrow's stream format, mapped into memory. Attributes as `_ParquetFile`."""

    def __init__(self, path: str, info: str) -> None:
        import pyarrow as pa

        self._path = path
        with open(path, "rb") as file:
            self.identity = FileIdentity.of(file.fileno())
            if not self.identity.num_bytes:
                raise PackError(f"{path}: it cannot be read as an Arrow stream: it is empty.")
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last batch
        self._data = pa.py_buffer(self._mapped)
        with pa.ipc.open_stream(self._data) as stream:
            self.schema: pa.Schema = stream.schema
        self.features = _parse_features(_read_small(info), info)

    def batches(self, column: str | None, image: str | None) -> Iterator[_Batch]:
        """As those of `_ParquetFile`, checked: offsets stay inside of their buffers, text is UTF-8."""
        import pyarrow as pa

        read_bytes = 0
        for batch in pa.ipc.open_stream(self._data):
            try:
                batch.validate(full=True)
            except pa.ArrowException as err:
                raise PackError(f"{self._path}: it is damaged: {str(err).splitlines()[0]}.") from err
            wanted = batch if column is None else batch.select([column])
            yield wanted, None if image is None else self._images(batch.column(image))
            read_bytes += batch.nbytes
            # What was looked at would else count as this process's memory, up to all of the file.
            if read_bytes >= _HELD_BYTES and hasattr(mmap, "MADV_DONTNEED"):
                self._mapped.madvise(mmap.MADV_DONTNEED)
                read_bytes = 0

    def _images(self, column: pa.Array) -> Iterator[_Image]:
        """Images as references to where they stand in the file."""
        from pyarrow import types

        paths: list[Any] = [None] * len(column)
        values = column
        if types.is_struct(column.type):  # where the struct is null, so are its parts
            parts = dict(zip((part.name for part in column.type), column.flatten(), strict=True))
            paths, values = parts["path"].to_pylist(), parts["bytes"]
        if not (types.is_binary(values.type) or types.is_large_binary(values.type)):
            raise PackError(f"{self._path}: its images are {values.type}. Save them as plain bytes.")
        _, offsets, data = values.buffers()
        kind = np.int64 if types.is_large_binary(values.type) else np.int32
        ends = [] if offsets is None else np.frombuffer(offsets, kind)[values.offset :][: len(values) + 1].tolist()
        base = 0 if data is None else data.address - self._data.address
        for number, is_there in enumerate(values.is_valid().to_pylist()):
            if not is_there:
                yield _Image(paths[number])
                continue
            start, num_bytes = base + ends[number], ends[number + 1] - ends[number]
            if num_bytes and not 0 <= start <= self._data.size - num_bytes:
                raise PackError(
                    f"{self._path}: it is compressed. Save it again: save_to_disk of datasets does not compress."
                )
            first = bytes(self._mapped[start : start + min(num_bytes, _START_BYTES)]) if num_bytes else b""
            yield _Image(paths[number], first, PartBytes(self._path, num_bytes, max(0, start), *self.identity))


def _parse_features(text: bytes | None, path: str) -> dict[str, Any]:
    """The features in the JSON that `datasets` writes, below `features` or `info`.

    Raises:
        PackError: It is no such JSON.
    """
    try:
        found = json.loads(text or b"{}")
        features = found.get("features") or (found.get("info") or {}).get("features") or {}
    except (ValueError, RecursionError, AttributeError) as err:
        raise PackError(f"{path}: what it says of its features is no JSON of `datasets`: {err}.") from err
    return features if isinstance(features, dict) else {}


def _data_files(folder: str) -> list[str]:
    """The files that a data set's state names, all in its folder."""
    splits = os.path.join(folder, SPLITS_NAME)
    if os.path.exists(splits):
        names = _read_json(splits).get("splits")
        each = ", ".join(os.path.join(folder, str(name)) for name in names) if isinstance(names, list) else "none"
        raise PackError(f"{folder}: this data set has splits. Pack each by itself: {each}.")
    path = os.path.join(folder, STATE_NAME)
    state = _read_json(path)
    files = state.get("_data_files")
    names = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    if not names or state.get("_indices_data_files") or state.get("_indices_files"):
        raise PackError(f"{path}: it names no data files, or picks rows of them. Save it again: save_to_disk.")
    wrong = next((name for name in names if not isinstance(name, str) or name != os.path.basename(name)), None)
    if wrong is not None:
        raise PackError(f"{path}: the data file {wrong!r} is not in its folder.")
    return [os.path.join(folder, name) for name in names]


def _read_json(path: str) -> dict[str, Any]:
    try:
        found = json.loads(_read_small(path))
    except (ValueError, RecursionError) as err:
        raise PackError(f"{path}: it is no JSON: {err}.") from err
    if not isinstance(found, dict):
        raise PackError(f"{path}: it holds a {type(found).__name__}, where `datasets` writes an object.")
    return found


def _read_small(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_ROW_BYTES + 1)
    except OSError as err:
        msg = f"{path}: cannot be read: {err.strerror}."
        raise PackError(f"{msg}\n  A data set is what `save_to_disk` of Hugging Face's datasets wrote.") from err
    if len(data) > MAX_ROW_BYTES:
        raise PackError(f"{path}: it has more than {MAX_ROW_BYTES} bytes, which is no file of this kind.")
    return data
