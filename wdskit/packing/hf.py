"""Rows from a data set that Hugging Face's `datasets` saved to a folder (`save_to_disk`).

It is read by pyarrow alone: the files are Arrow's stream format, uncompressed, so an image's bytes stand in one piece
at an offset of their file. `datasets` is not imported, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.errors import PackError, RowError
from wdskit.limits import MAX_ROW_BYTES
from wdskit.packing.arrow_cells import Cells
from wdskit.packing.arrow_columns import need_pyarrow, read_features, sort_columns
from wdskit.packing.arrow_rows import ArrowRows
from wdskit.packing.arrow_stream import record_batches
from wdskit.packing.records import Records
from wdskit.packing.references import PartBytes
from wdskit.packing.rows import Row
from wdskit.storage.identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow as pa

STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
SPLITS_NAME = "dataset_dict.json"
_HELD_BYTES = 64 << 20


class SavedDataset:
    """A saved data set, or one split of a saved `DatasetDict`.

    Args:
            folder: The folder with its `state.json`.
            image_column: Column with the image; None: see `arrow_columns.sort_columns`.
            key_column: Column with the key; None: `key` where there is one, else the row's number.
        allow_no_image: As `records.Records` takes it.

    Attributes:
        classes: Number of each class by name, where it has a ClassLabel.

    Raises:
            PackError: It is no such folder, or has a column that cannot be packed.
    """

    def __init__(
        self, folder: str, *, image_column: str | None, key_column: str | None, allow_no_image: bool = False
    ) -> None:
        need_pyarrow(folder)
        self._records = Records(folder, image_column, key_column, allow_no_image)
        self._paths = _data_files(folder)
        features = read_features(_read_small(os.path.join(folder, INFO_NAME)), os.path.join(folder, INFO_NAME))
        with _opened(self._paths[0]) as file:
            self._schema = file.schema
        self._columns = sort_columns(self._schema, features, self._paths[0], image_column)
        self.classes = self._columns.classes

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a row: the image, `json` with the other columns and the names of classes, and `cls`.

        Raises:
            PackError: A file cannot be read, or has other columns than the first.
        """
        first_of_all = 0
        for path in self._paths:
            first = 0
            with _opened(path) as file:
                if not file.schema.equals(self._schema):
                    raise PackError(f"{path}: it has other columns or types than {self._paths[0]}.")
                how = ArrowRows(self._columns, self._records, keys, file.refer, file.place)
                for batch in record_batches(file.data, path):
                    yield from how.rows(batch, first, first_of_all + first)
                    first += batch.num_rows
                    file.forget(batch.nbytes)
            first_of_all += first


@dataclass
class _File:
    """A data file, mapped.

    Attributes:
        path: Its path.
        mapped: All of it.
        data: The same, for pyarrow.
        schema: Of its table.
        identity: What tells it from a file that has its path later.
    """

    path: str
    mapped: mmap.mmap
    data: pa.Buffer
    schema: pa.Schema
    identity: FileIdentity
    _read_bytes: int = 0

    def forget(self, num_bytes: int) -> None:
        """So many bytes more were read. What was looked at would else count as this process's memory, up to all."""
        self._read_bytes += num_bytes
        if self._read_bytes >= _HELD_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)
            self._read_bytes = 0

    def place(self, row: int) -> str:
        """What messages call a row."""
        return f"{self.path}, row {row}"

    def refer(self, cells: Cells, number: int, _row: int, num_bytes: int) -> PartBytes:
        """The reference to an image: its place in the file."""
        offset = cells.address(number) - self.data.address
        assert 0 <= offset <= self.data.size - num_bytes  # nothing was unpacked: see `record_batches`
        return PartBytes(self.path, num_bytes, offset, *self.identity)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[_File]:
    import pyarrow as pa

    try:
        with open(path, "rb") as file:
            identity = FileIdentity.of(file.fileno())
            if not identity.num_bytes:
                raise PackError(f"{path}: it cannot be read as an Arrow stream: it is empty.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped with the last batch
        data = pa.py_buffer(mapped)
        with pa.ipc.open_stream(data) as stream:
            schema = stream.schema
        yield _File(path, mapped, data, schema, identity)
        identity.check(path)
    except FileChanged as err:
        raise PackError(f"{path}: {err}.\n  Pack again when nobody writes it.") from err
    except (pa.ArrowException, OSError) as err:
        raise PackError(f"{path}: it cannot be read as an Arrow stream: {str(err).splitlines()[0]}.") from err


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
