"""Arrow tables: Parquet files, and data sets that Hugging Face's `datasets` saved (`save_to_disk`).

Both are read by pyarrow alone. The files of `datasets` are Arrow's stream format, uncompressed, so an image's bytes
stand in one piece at an offset of their file. `datasets` is not imported, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wdskit.dataset.classes import first_conflict
from wdskit.errors import PackError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.parquet_cells import bytes_of, check_group, open_parquet, read_group
from wdskit.packing.references import CellBytes, PartBytes
from wdskit.packing.sources.arrow_columns import ArrowColumns, need_pyarrow, read_features, sort_columns
from wdskit.packing.sources.arrow_rows import START_BYTES, ArrowTables, Image
from wdskit.packing.sources.class_names import Labels
from wdskit.packing.sources.records import Records
from wdskit.storage.identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow as pa

STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
SPLITS_NAME = "dataset_dict.json"
_HELD_BYTES = 64 << 20


class Parquet(ArrowTables):
    """Parquet files of one schema; image paths in them are relative to each one's folder.

    Args:
        paths: As `ArrowTables` takes it, as `records` and `labels`. An image may be bytes, or a struct of `bytes` and
            `path`; where its column is not named, see `arrow_columns.sort_columns`.
        in_order: The rows are packed as they come. Else the bytes of their images are read with them, once: each would
            cost a row group later.
    """

    def __init__(
        self, paths: Sequence[str], records: Records, labels: Labels | None = None, *, in_order: bool = True
    ) -> None:
        need_pyarrow(paths[0])
        self._in_order = in_order
        super().__init__(paths, records, labels)

    def _read_schema(self, path: str) -> pa.Schema:
        with _read_errors(path, "Parquet"), open_parquet(path) as file:
            return file.schema_arrow

    def _sort_columns(self, schema: pa.Schema, path: str, records: Records) -> ArrowColumns:
        said = (schema.metadata or {}).get(b"huggingface")
        return sort_columns(schema, read_features(said, path), path, records)

    def _check_schema(self, schema: pa.Schema, path: str) -> None:
        """Refuse also a file whose labels mean other classes than those of the first."""
        super()._check_schema(schema, path)
        labels = self._sort_columns(schema, path, self._given).labels
        for column, names in self._columns.labels.items():
            number = first_conflict(names, labels.get(column, ()))
            if number is not None:
                msg = f"{path}: class {number} of its column {column!r} is {labels[column][number]!r}"
                raise PackError(f"{msg}, and {names[number]!r} in {self._paths[0]}.\n  Pack them into two folders.")

    def _column(self, path: str, name: str) -> Iterator[pa.Array]:
        with _read_errors(path, "Parquet"), open_parquet(path) as file:
            for group in range(file.num_row_groups):
                check_group(file, group, path)
                yield from (batch.column(0) for batch in read_group(file, group, [name]))

    def _batches(self, path: str) -> Iterator[tuple[pa.RecordBatch, Iterable[Image] | None]]:
        image = self._columns.image
        with _read_errors(path, "Parquet"):
            identity = FileIdentity.of(path)  # of a file that is opened several times
            with open_parquet(path) as file:
                for group in range(file.num_row_groups):
                    check_group(file, group, path)
                    first = 0
                    for batch in read_group(file, group):
                        images = None
                        if image is not None:
                            images = self._images(batch.column(image), path, identity, group, first)
                        yield batch, images
                        first += batch.num_rows
            identity.check(path)

    def _images(self, column: pa.Array, path: str, identity: FileIdentity, group: int, first: int) -> Iterator[Image]:
        name = str(self._columns.image)
        for number, cell in enumerate(column.to_pylist(), start=first):
            data = bytes_of(cell)
            there = cell.get("path") if isinstance(cell, dict) else None
            if data is None:
                yield Image(there)
            elif self._in_order:
                yield Image(there, data[:START_BYTES], CellBytes(path, len(data), group, number, name, *identity))
            else:
                yield Image(there, data[:START_BYTES], data)


class SavedDataset(ArrowTables):
    """A saved data set, or one split of a saved `DatasetDict`.

    Args:
        folder: The folder with its `state.json`.
        records: As `ArrowTables` takes it, as `labels`.

    Raises:
        PackError: It is no such folder, or has a column that cannot be packed.
    """

    def __init__(self, folder: str, records: Records, labels: Labels | None = None) -> None:
        need_pyarrow(folder)
        self._info = os.path.join(folder, INFO_NAME)
        super().__init__(_data_files(folder), records, labels)

    def _read_schema(self, path: str) -> pa.Schema:
        with _mapped(path) as file:
            return file.schema

    def _sort_columns(self, schema: pa.Schema, path: str, records: Records) -> ArrowColumns:
        return sort_columns(schema, read_features(_read_small(self._info), self._info), path, records)

    def _column(self, path: str, name: str) -> Iterator[pa.Array]:
        with _mapped(path) as file:
            yield from (batch.column(name) for batch in file.batches())

    def _batches(self, path: str) -> Iterator[tuple[pa.RecordBatch, Iterable[Image] | None]]:
        image = self._columns.image
        with _mapped(path) as file:
            for batch in file.batches():
                yield batch, None if image is None else file.images(batch.column(image))


class _MappedFile:
    """A data file in Arrow's stream format, mapped into memory.

    Attributes:
        schema: Of its table.
    """

    def __init__(self, path: str, mapped: mmap.mmap, identity: FileIdentity) -> None:
        import pyarrow as pa

        self._path = path
        self._mapped = mapped
        self._identity = identity
        self._data = pa.py_buffer(mapped)
        with pa.ipc.open_stream(self._data) as stream:
            self.schema: pa.Schema = stream.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches, checked: offsets stay inside of their buffers, text is UTF-8."""
        import pyarrow as pa

        read_bytes = 0
        for batch in pa.ipc.open_stream(self._data):
            try:
                batch.validate(full=True)
            except pa.ArrowException as err:
                raise PackError(f"{self._path}: it is damaged: {str(err).splitlines()[0]}.") from err
            yield batch
            read_bytes += batch.nbytes
            # What was looked at would else count as this process's memory, up to all of the file.
            if read_bytes >= _HELD_BYTES and hasattr(mmap, "MADV_DONTNEED"):
                self._mapped.madvise(mmap.MADV_DONTNEED)
                read_bytes = 0

    def images(self, column: pa.Array) -> Iterator[Image]:
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
                yield Image(paths[number])
                continue
            start, num_bytes = base + ends[number], ends[number + 1] - ends[number]
            if num_bytes and not 0 <= start <= self._data.size - num_bytes:
                raise PackError(
                    f"{self._path}: it is compressed. Save it again: save_to_disk of datasets does not compress."
                )
            first = bytes(self._mapped[start : start + min(num_bytes, START_BYTES)]) if num_bytes else b""
            yield Image(paths[number], first, PartBytes(self._path, num_bytes, max(0, start), *self._identity))


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[_MappedFile]:
    with _read_errors(path, "an Arrow stream"):
        with open(path, "rb") as file:
            identity = FileIdentity.of(file.fileno())
            if not identity.num_bytes:
                raise PackError(f"{path}: it cannot be read as an Arrow stream: it is empty.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last batch
        yield _MappedFile(path, mapped, identity)
        identity.check(path)


@contextlib.contextmanager
def _read_errors(path: str, what: str) -> Iterator[None]:
    """What pyarrow raises of a file, as an error that names it."""
    import pyarrow as pa

    try:
        yield
    except FileChanged as err:
        raise PackError(f"{path}: {err}.\n  Pack again when nobody writes it.") from err
    except (pa.ArrowException, OSError) as err:
        raise PackError(f"{path}: it cannot be read as {what}: {str(err).splitlines()[0]}.") from err


def _data_files(folder: str) -> list[str]:
    """The files that a data set's state names, all in its folder."""
    splits = os.path.join(folder, SPLITS_NAME)
    if os.path.exists(splits):
        names = _read_json(splits).get("splits")
        told = ", ".join(os.path.join(folder, str(name)) for name in names) if isinstance(names, list) else "none"
        raise PackError(f"{folder}: this data set has splits. Pack each by itself: {told}.")
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
