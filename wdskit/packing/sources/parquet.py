"""Rows from Parquet files, read by pyarrow in small batches. Images are bytes, structs of bytes and path, or paths.
`records.Records.row` makes a sample of each row, as for tables of text.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from wdskit.codecs.fields import NPY_FIELDS
from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_UNPACK_RATIO, MAX_UNPACKED_BYTES
from wdskit.packing.row import Field, Reading, Row
from wdskit.packing.sources.records import Records, Source, to_array
from wdskit.text import install_extra

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_READ_BYTES = 1 << 20
_MAX_ROWS = 1024  # of a batch
_FEW_ROWS = 8  # of a batch whose dictionary may repeat a value of megabytes in each row
_BATCH_BYTES = 4 << 20


class Parquet(Source):
    """Parquet files with one schema: a file, a folder or a pattern. The files are sorted by the bytes of their names.
    Paths in a file are relative to its folder.

    The image is in the column `how.image`, or the first of `IMAGE_COLUMNS` that is not empty in a row: bytes, a struct
    of `bytes` and `path`, or a path. A column whose bytes or arrays become a field is not in `json`; the path of an
    image is. Dates, times and decimals are text in `json`.

    Raises:
        PackError: pyarrow is not installed, there is no file, the first file cannot be read, or two of its columns have
            one name.
    """

    reads = frozenset({"image", "key", "fields"})

    def __init__(self, path: str, how: Reading) -> None:
        super().__init__(path, how)
        pattern = os.path.join(glob.escape(path), "*.parquet") if os.path.isdir(path) else path
        self._files = files = [path] if os.path.isfile(path) else sorted(glob.glob(pattern), key=os.fsencode)
        if not files:
            raise PackError(f"{path}: there is no Parquet file with this name.")
        with _open(files[0]) as file:
            self._schema: pa.Schema = file.schema_arrow
        types = {column.name: column.type for column in self._schema}
        if len(types) < len(self._schema):
            raise PackError(f"{files[0]}: two columns have the same name; it has {', '.join(self._schema.names)}.")
        other = next((name for name, kind in types.items() if "extension<" in str(kind)), None)
        if other is not None:
            raise PackError(f"{files[0]}: its column {other!r} is {types[other]}. Write nested lists of numbers.")
        self._binary = binary = {name for name, kind in types.items() if _is_binary(kind)}
        arrays = {column for name, column in how.fields.items() if name.rpartition(".")[2] in NPY_FIELDS}
        self._made = made = {*how.fields.values()} & (binary | arrays)
        self._images = tuple(name for name in Records("", how).images if name == how.image or name not in made)
        self._structs = [name for name in binary if "struct" in str(types[name])]
        self._dtypes = {name: _dtype(types[name]) for name in arrays & types.keys()}

    def rows(self) -> Iterator[Row | RowError]:
        """Yield one row per row of the files.

        Raises:
            PackError: A file cannot be read, or its columns differ from those of the first file.
        """
        number = 0
        for path in self._files:
            records = Records(os.path.dirname(path), self.how)
            records.images = self._images
            first, name = number, os.path.basename(path)
            with _open(path) as file:
                if not file.schema_arrow.equals(self._schema):
                    raise PackError(f"{path}: its columns or types differ from those of {self._files[0]}.")
                for batch in _batches(file, path):
                    for record in batch.to_pylist():
                        where = f"{path}, row {number - first}"
                        yield self.row(where, self._fields, record, records, number, name=name)
                        number += 1

    def _fields(self, record: dict[str, Any], records: Records, number: int) -> tuple[str, dict[str, Field]]:
        shown = {name: value for name, value in record.items() if name not in self._made}
        for name in self._structs:
            if record[name] is not None:
                record[name] = record[name]["path"] if record[name]["bytes"] is None else record[name]["bytes"]
        if (image := records.image_column(record)) and image in self._binary:
            stored = shown.pop(image, None)
            if isinstance(stored, dict) and stored["path"]:
                shown[image] = stored["path"]
        for name, dtype in self._dtypes.items():
            if isinstance(record[name], list):
                record[name] = to_array(record[name], dtype)
        return records.row(record, number, shown=shown)


@contextlib.contextmanager
def _open(path: str) -> Iterator[pq.ParquetFile]:
    """Open a file for a `with` block. PackError: pyarrow is not installed, or the file cannot be read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as err:
        raise PackError(f"{path}: reading it needs pyarrow. {install_extra('tables')}") from err
    try:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            yield file
    except (pa.ArrowException, OSError, OverflowError, ValueError) as err:
        raise PackError(f"{path}: it cannot be read as Parquet: {str(err).splitlines()[0]}.") from err


def _batches(file: pq.ParquetFile, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches of at most 1,024 rows and about 4 MB, also of large row groups."""
    import pyarrow as pa

    for group in range(file.num_row_groups):
        about = file.metadata.row_group(group)
        parts = [about.column(number) for number in range(about.num_columns)]
        for part in parts:
            packed_bytes, num_bytes = part.total_compressed_size, part.total_uncompressed_size
            if num_bytes > max(MAX_UNPACKED_BYTES, MAX_UNPACK_RATIO * packed_bytes):
                msg = f"{path}: row group {group}, column {part.path_in_schema!r} claims to unpack {packed_bytes} bytes"
                raise PackError(f"{msg} to {num_bytes}, like a decompression bomb.")
        row_bytes = sum(part.total_uncompressed_size for part in parts) // max(1, about.num_rows)
        # A value is at most as long as its column, and a dictionary can repeat the value in each row.
        longest = max((part.total_uncompressed_size for part in parts if part.physical_type == "BYTE_ARRAY"), default=0)
        few = max(_FEW_ROWS, _BATCH_BYTES // max(1, longest))
        num_rows = max(1, min(_MAX_ROWS, few, _BATCH_BYTES // max(1, row_bytes)))
        for batch in file.iter_batches(num_rows, row_groups=[group], use_threads=False):
            yield batch
            if batch.nbytes >= _BATCH_BYTES // 2:  # otherwise the pool keeps the memory of freed pages
                pa.default_memory_pool().release_unused()


def _is_binary(kind: pa.DataType) -> bool:
    """Return True for the type of bytes, also in a dictionary, and of structs of `bytes` and `path`."""
    from pyarrow import types

    if types.is_struct(kind):
        return {part.name for part in kind} == {"bytes", "path"}
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return "binary" in str(kind).partition("[")[0] and not types.is_nested(kind)


def _dtype(kind: pa.DataType) -> Any:
    """Return the dtype of the numbers in lists, also in nested lists."""
    from pyarrow import array, types

    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return array([], kind).to_numpy(zero_copy_only=False).dtype if types.is_primitive(kind) else None
