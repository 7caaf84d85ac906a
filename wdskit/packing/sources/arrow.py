"""Readers of Arrow tables: Parquet files, and data sets that Hugging Face's `datasets` saved (`save_to_disk`).

pyarrow reads these files. This module does not import `datasets` and does not unpickle data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from wdskit.codecs.formats import field_of_bytes
from wdskit.dataset.classes import CLASS_FIELD, first_conflict
from wdskit.errors import PackError, RowError, StorageError
from wdskit.limits import MAX_ROW_BYTES, MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.labels import NO_CLASS, checked_classes, classes_of, read_label
from wdskit.packing.references import CellBytes, FieldBytes, PartBytes
from wdskit.packing.row import Row, row_error
from wdskit.packing.sources.arrow_columns import (
    START_BYTES,
    Image,
    assign_columns,
    class_labels,
    encode_cell,
    features_of,
    json_values,
    parse_json,
)
from wdskit.packing.sources.parquet import bytes_of, open_parquet, read_group
from wdskit.packing.sources.records import CORRECT_OR_SKIP, Records, field_taken, image_path
from wdskit.storage.file_identity import FileChanged, FileIdentity
from wdskit.storage.urls import read_bytes
from wdskit.text import install_extra

if TYPE_CHECKING:
    import pyarrow as pa

    _File: TypeAlias = "ParquetFile | StreamFile"

STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
SPLITS_NAME = "dataset_dict.json"
_HELD_BYTES = 64 << 20  # most bytes of a mapped file that count as memory of this process


def read_parquet(paths: Sequence[str], records: Records, *, in_order: bool = True) -> ArrowTables:
    """Return a reader of Parquet files with one schema. Paths of images are relative to the folder of the Parquet file.

    Args:
        paths: The files, at least one.
        records: Converts records to rows. An image is a path, bytes, or a struct of `bytes` and `path`. If `records`
            names no image column, the image is in one of `IMAGE_COLUMNS` or in the only column of such structs.
        in_order: False if the rows are packed in another order than that of the files. Then the images are read
            together with the rows.

    Raises:
        PackError: pyarrow is not installed; the first file cannot be read, lacks a column that `records` has in
            `image_column`, `fields` or `omit`, or has a column that cannot be packed; or the classes in the column of
            `cls` are invalid.
    """
    return ArrowTables(paths, "Parquet", lambda path: ParquetFile(path, in_order=in_order), records)


def read_saved_dataset(folder: str, records: Records) -> ArrowTables:
    """Return a reader of a data set that `datasets` saved. `records` converts its records to rows.

    `folder` has the file `state.json`. For a saved `DatasetDict`, `folder` is the folder of one split.

    Raises:
        PackError: pyarrow is not installed; `folder` is not a saved data set or cannot be read; the data set has
            splits; or a column cannot be packed or does not fit `records`.
    """
    info = os.path.join(folder, INFO_NAME)
    return ArrowTables(_data_files(folder), "an Arrow stream", lambda path: StreamFile(path, info), records)


class _Cells(NamedTuple):
    """The cells of a row of the table.

    Attributes:
        values: The values for the field `json`; or, if JSON cannot represent a value, the problem as a text.
        image: The image; None if the table has no encoded images.
        own: (field, column, cell) of each field that is made from a column of bytes or arrays.
    """

    values: tuple[Any, ...] | str
    image: Image | None
    own: list[tuple[str, str, pa.Scalar]]


class ArrowTables:
    """Reader of several tables with one schema, in order.

    Args:
        paths: Files of the tables.
        what: Kind of the files, for messages.
        open_file: Opens a file by its path.
        records: Converts records to rows. The folder of each file replaces `records.folder`. If `records.classes` is
            None, the classes are the class names that `datasets` stored for the column of `cls`. Without stored names,
            the column is read in advance, and the classes are the texts in the column.

    Attributes:
        classes: Number of each class by name; empty if the classes have no names.

    Raises:
        PackError: pyarrow is not installed; the first file cannot be read, lacks a column that `records` has in
            `image_column`, `fields` or `omit`, or has a column that cannot be packed; `records` has classes, and the
            column of `cls` already has class names; or the column of `cls` mixes numbers and names.
    """

    def __init__(self, paths: Sequence[str], what: str, open_file: Callable[[str], _File], records: Records) -> None:
        self._paths = paths
        self._what = what
        self._open_file = open_file
        with self._open(paths[0]) as file:
            self._schema = file.schema
            self._columns = columns = assign_columns(file.schema, file.features, paths[0], records)
        fields = {name: column for name, column in records.fields.items() if name not in columns.own}
        classes = records.classes
        implied = CLASS_FIELD if CLASS_FIELD in {*columns.to_json} - {*records.omit} else None
        column = fields.get(CLASS_FIELD, implied)
        if columns.class_column is not None:
            if classes is not None:
                msg = f"{paths[0]}: classes: its column {columns.class_column!r} already has class names."
                raise PackError(f"{msg} Leave it out.")
            own_names = columns.labels[columns.class_column]
            where = f"{paths[0]}, column {columns.class_column!r}"
            classes = checked_classes(own_names, where) if own_names else None
        elif column is not None and classes is None:
            try:
                classes = classes_of(self._values(column), column)
            except PackError as err:
                raise PackError(f"{paths[0]}: {err}") from err
        self.classes = {} if classes is None else classes.numbers
        omit = [name for name in records.omit if name not in columns.own.values()]
        self._records = dataclasses.replace(records, fields=fields, classes=classes, omit=omit)

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """Yield one row per row of the tables, or the `RowError` of a row that cannot be packed.

        The fields of a row are the image, the fields that are made from columns, `cls` and `json`. `json` has all
        columns except omitted columns and columns of bytes or arrays that become fields. The path of an image is in
        `json`, its bytes are not.

        `cls` is made from the column that `records.fields` names for `cls`. Without such a name, it is made from the
        first of these columns that exists and is not omitted: the column `cls`; the column `label`, if `datasets`
        stored classes for it; the only column that is not omitted and for which `datasets` stored classes. Without
        such a column, there is no `cls`. `keys` is the option `--keys`: "given", "clean" or "hashed".

        Raises:
            PackError: A file cannot be read or changes, or its columns or classes differ from those of the first file.
        """
        number = 0
        for path in self._paths:
            first = number
            records = dataclasses.replace(self._records, folder=os.path.dirname(path))
            with self._open_same(path) as file:
                for cells in self._cells(file):
                    try:
                        yield self._row(cells, records, number, f"{path}, row {number - first}", keys)
                    except RowError as err:
                        yield err
                    number += 1

    def _cells(self, file: _File) -> Iterator[_Cells]:
        columns = self._columns
        for batch, images in file.batches(None, columns.image):
            own = [(field, column, batch.column(column)) for field, column in columns.own.items()]
            of_images: Iterable[Image | None] = itertools.repeat(None) if images is None else images
            # `json_values` comes first, because `repeat` never ends.
            both = zip(json_values(columns.to_json, batch), of_images, strict=False)
            for at, (values, image) in enumerate(both):
                yield _Cells(values, image, [(field, column, array[at]) for field, column, array in own])

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[_File]:
        """Open a file for a `with` block, and check after the block that the file did not change.

        Raises:
            PackError: pyarrow is not installed, the file cannot be read, or it changes while it is open.
        """
        try:
            import pyarrow as pa
        except ImportError as err:
            raise PackError(f"{path}: reading it needs pyarrow. {install_extra('tables')}") from err
        try:
            file = self._open_file(path)
            yield file
            file.identity.check(path)
        except FileChanged as err:
            raise PackError(f"{path}: {err}.\n  Pack again when no other program writes it.") from err
        except (pa.ArrowException, OSError) as err:
            raise PackError(f"{path}: it cannot be read as {self._what}: {str(err).splitlines()[0]}.") from err

    @contextlib.contextmanager
    def _open_same(self, path: str) -> Iterator[_File]:
        """Open a file for a `with` block, and check that its columns and classes are those of the first file.

        PackError: The columns or classes differ, or the file cannot be read or changes while it is open.
        """
        with self._open(path) as file:
            if not file.schema.equals(self._schema):
                raise PackError(f"{path}: its columns or types differ from those of {self._paths[0]}.")
            labels = class_labels(file.schema, file.features)
            for column, names in self._columns.labels.items():
                number = first_conflict(names, labels.get(column, ()))
                if number is not None:
                    msg = f"{path}: class {number} of its column {column!r} is {labels[column][number]!r}"
                    raise PackError(f"{msg}, but {names[number]!r} in {self._paths[0]}.\n  Pack them into two folders.")
            yield file

    def _values(self, column: str) -> Iterator[tuple[Any, str]]:
        """Yield (value, place) for the values of a column. Of equal values in one file, only the first is yielded.

        Values that JSON cannot represent are left out. PackError: A file cannot be read.
        """
        converters = {column: self._columns.to_json[column]}
        for path in self._paths:
            with self._open_same(path) as file:
                seen: set[tuple[type, Any]] = set()
                rows = (row for batch, _ in file.batches(column, None) for row in json_values(converters, batch))
                for number, values in enumerate(rows):
                    if isinstance(values, str):  # the problem of the row
                        continue
                    kind = type(values[0]), values[0]
                    if kind not in seen:
                        seen.add(kind)
                        yield values[0], f"{path}, row {number}"

    def _row(self, cells: _Cells, records: Records, number: int, where: str, keys: str) -> Row:
        if isinstance(cells.values, str):
            raise row_error(where, cells.values)
        record = dict(zip(self._columns.to_json, cells.values, strict=True))
        fields = self._label(record, where)
        for field, column, cell in cells.own:
            if cell.is_valid:
                fields[field] = encode_cell(field, column, cell, where)
        image, image_column = cells.image, None
        if image is not None:
            image_column = str(self._columns.image)
            if image.path:
                record[image_column] = image.path
            if image.start is not None:
                image_field = field_of_bytes(image.start)
                if image_field is None:
                    problem = f"its image begins with {image.start[:8]!r}, which is not a known format"
                    raise row_error(where, problem, "Repair or remove it, or use --skip-bad.")
                own_image: dict[str, FieldBytes] = {image_field: image.data}
            elif image.path:
                own_image = records.image_file(image_path(image.path, image_column, where), where)
            else:
                own_image = {}
            for name in own_image:
                if name in self._columns.own:
                    raise field_taken(name, where)
            fields.update(own_image)
        row = records.row(record, number, where, keys=keys, fields=fields, image_column=image_column)
        json_bytes = len(dict(row.fields)["json"])
        if json_bytes > MAX_ROW_BYTES:
            raise row_error(
                where, f"its json has {json_bytes} bytes, more than the {MAX_ROW_BYTES} that a sample's can have"
            )
        return row

    def _label(self, record: dict[str, Any], where: str) -> dict[str, FieldBytes]:
        """Return the field `cls` with its bytes; an empty dict for a row without a label.

        For each column of class numbers, the class name is added to `record` as `{column}_name`.
        RowError: A value is not a label, or a class number is out of range.
        """
        fields: dict[str, FieldBytes] = {}
        for name, classes in self._columns.labels.items():
            if name not in record:
                continue
            try:
                number = read_label(record[name])
            except ValueError as err:
                raise row_error(where, f"its column {name!r}: {err}", CORRECT_OR_SKIP) from err
            if number is not None and (not isinstance(number, int) or not NO_CLASS <= number < len(classes)):
                raise row_error(where, f"its {name!r} is {record[name]!r}, but there are {len(classes)} classes")
            record[f"{name}_name"] = None if number is None or number < 0 else classes[number]
            if number is not None and name == self._columns.class_column:
                fields[CLASS_FIELD] = b"%d" % number
        return fields


class ParquetFile:
    """A Parquet file, read in small pieces.

    Args:
        path: The file.
        in_order: False if the rows are packed in another order than that of the file. Then the images are read together
            with the rows, because each later read would read a whole row group.

    Attributes:
        identity: Identity of the file when it was opened.
        schema: Schema of the table.
        features: Descriptions of the columns that `datasets` stored, by column; empty without descriptions.

    Raises:
        PackError: The descriptions are not JSON.
        OSError, pyarrow.ArrowException: The file cannot be read.
    """

    def __init__(self, path: str, *, in_order: bool) -> None:
        self._path = path
        self._in_order = in_order
        self.identity = FileIdentity.of(path)
        self._file = open_parquet(path)
        self.schema: pa.Schema = self._file.schema_arrow
        self.features = features_of(parse_json((self.schema.metadata or {}).get(b"huggingface", b"{}"), path))

    def batches(self, column: str | None, image: str | None) -> Iterator[tuple[pa.RecordBatch, Iterator[Image] | None]]:
        """Yield (batch, images) for a few rows at a time, in order. `images` yields one `Image` per row of the batch.

        Args:
            column: The only column of the batches; None for all columns.
            image: The column of the images. If it is None, `images` is None too.

        Raises:
            PackError: A row group is compressed like a decompression bomb.
            OSError, pyarrow.ArrowException: The file cannot be read.
        """
        for group in range(self._file.num_row_groups):
            about = self._file.metadata.row_group(group)
            for part in (about.column(number) for number in range(about.num_columns)):
                packed_bytes, num_bytes = part.total_compressed_size, part.total_uncompressed_size
                if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
                    msg = f"{self._path}: row group {group}, column {part.path_in_schema!r} claims to unpack"
                    msg = f"{msg} {packed_bytes} bytes to {num_bytes}, like a decompression bomb."
                    raise PackError(f"{msg}\n  If it is right, write the file again.")
            first = 0
            for batch in read_group(self._file, group, None if column is None else [column]):
                yield batch, None if image is None else self._images(batch.column(image), image, group, first)
                first += batch.num_rows

    def _images(self, cells: pa.Array, column: str, group: int, first: int) -> Iterator[Image]:
        for row, cell in enumerate(cells.to_pylist(), start=first):
            path = cell.get("path") if isinstance(cell, dict) else None
            data = bytes_of(cell)
            if data is None:
                yield Image(path)
            elif self._in_order:
                place = CellBytes(self._path, len(data), group, row, column, *self.identity)
                yield Image(path, data[:START_BYTES], place)
            else:
                yield Image(path, data[:START_BYTES], data)


class StreamFile:
    """A data file of a saved data set, in Arrow's stream format, with the attributes of `ParquetFile`.

    `info` is the path of the data set's `dataset_info.json`, which describes the columns (`features`).

    Raises:
        PackError: The file is empty, or `info` cannot be read.
        OSError, pyarrow.ArrowException: The file cannot be read.
    """

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
        self.features = features_of(_read_json(info))

    def batches(self, column: str | None, image: str | None) -> Iterator[tuple[pa.RecordBatch, Iterator[Image] | None]]:
        """Yield (batch, images) for a few rows at a time, in order. Each batch is checked first. `images` yields one
        `Image` per row of the batch.

        `column` is the only column of the batches; None for all columns. `image` is the column of the images. If
        `image` is None, `images` is None too.

        Raises:
            PackError: A batch is damaged or compressed, or the images are not plain bytes.
            pyarrow.ArrowException: The file cannot be read.
        """
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
            # Otherwise all pages that were read count as memory of this process, up to the size of the file.
            if read_bytes >= _HELD_BYTES:
                self._mapped.madvise(mmap.MADV_DONTNEED)
                read_bytes = 0

    def _images(self, column: pa.Array) -> Iterator[Image]:
        """Yield the image of each row, with a reference to its bytes in the file if the row has bytes.
        PackError: The file is compressed, or the images are not plain bytes.
        """
        from pyarrow import types

        paths: list[Any] = [None] * len(column)
        values = column
        if types.is_struct(column.type):  # the parts of a null struct are null
            parts = dict(zip((part.name for part in column.type), column.flatten(), strict=True))
            paths, values = parts["path"].to_pylist(), parts["bytes"]
        if not (types.is_binary(values.type) or types.is_large_binary(values.type)):
            raise PackError(f"{self._path}: its images are {values.type}. Save them as plain bytes.")
        _, offsets, data = values.buffers()
        kind = np.int64 if types.is_large_binary(values.type) else np.int32
        ends = [] if offsets is None else np.frombuffer(offsets, kind)[values.offset :][: len(values) + 1].tolist()
        base = 0 if data is None else data.address - self._data.address
        for number, is_valid in enumerate(values.is_valid().to_pylist()):
            if not is_valid:
                yield Image(paths[number])
                continue
            start, num_bytes = base + ends[number], ends[number + 1] - ends[number]
            if num_bytes and not 0 <= start <= self._data.size - num_bytes:
                msg = f"{self._path}: it is compressed. Save it again"
                raise PackError(f"{msg}: save_to_disk of `datasets` does not compress.")
            first = bytes(self._mapped[start : start + min(num_bytes, START_BYTES)]) if num_bytes else b""
            yield Image(paths[number], first, PartBytes(self._path, num_bytes, max(0, start), *self.identity))


def _data_files(folder: str) -> list[str]:
    """Return the paths of the data files that the `state.json` of a data set lists.

    Raises:
        PackError: `state.json` cannot be read, selects rows, lists no files, or lists a file outside `folder`; or the
            data set has splits.
    """
    splits = os.path.join(folder, SPLITS_NAME)
    if os.path.exists(splits):
        each = ", ".join(os.path.join(folder, str(name)) for name in _read_json(splits).get("splits") or ())
        raise PackError(f"{folder}: this data set has splits. Pack each separately: {each}.")
    path = os.path.join(folder, STATE_NAME)
    state = _read_json(path)
    try:
        names = [os.fsdecode(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        names = []
    if not names or state.get("_indices_data_files") or state.get("_indices_files"):
        raise PackError(f"{path}: it names no data files, or selects rows of them. Save it again with save_to_disk.")
    wrong = next((name for name in names if name != os.path.basename(name)), None)
    if wrong is not None:
        raise PackError(f"{path}: the data file {wrong!r} is not in its folder.")
    return [os.path.join(folder, name) for name in names]


def _read_json(path: str) -> dict[str, Any]:
    try:
        return parse_json(read_bytes(os.path.join(".", path), limit=MAX_ROW_BYTES), path)
    except StorageError as err:
        msg = str(err).splitlines()[0]
        raise PackError(f"{msg}\n  Pass a folder that `save_to_disk` of Hugging Face's `datasets` wrote.") from err
