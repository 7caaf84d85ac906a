"""Rows from Parquet files. Images in a column stay where they are until they are packed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wdskit.dataset.classes import first_conflict
from wdskit.errors import PackError, RowError
from wdskit.packing.arrow_columns import ArrowColumns, need_pyarrow, read_features, sort_columns
from wdskit.packing.arrow_rows import ArrowRows
from wdskit.packing.parquet_batches import Batches, check_group, open_parquet
from wdskit.packing.parquet_cells import Column, PageCells, Pages
from wdskit.packing.parquet_headers import UnknownPages
from wdskit.packing.records import Records
from wdskit.packing.references import CellBytes
from wdskit.packing.rows import Row
from wdskit.storage.identity import FileChanged, FileIdentity

if TYPE_CHECKING:
    import pyarrow.parquet as pq


class Parquet:
    """Parquet files of one schema, one after the other.

    Args:
        paths: The files. Image paths in them are relative to each one's folder.
        image_column: Column with the image: a path, bytes, or a struct of `bytes` and `path`; None: see
            `arrow_columns.sort_columns`.
        key_column: As `records.Records` takes it; where images are bytes, None stands for `key`, else the row's number.
        allow_no_image: As `records.Records` takes it.

    Attributes:
        classes: Number of each class by name, where a column's Hugging Face feature has names.

    Raises:
        PackError: The first file cannot be read, or has a column that cannot be packed.
    """

    def __init__(
        self, paths: Sequence[str], *, image_column: str | None, key_column: str | None, allow_no_image: bool = False
    ) -> None:
        self._paths = paths
        self._image_column = image_column
        self._key_column = key_column
        self._allow_no_image = allow_no_image
        need_pyarrow(paths[0])
        self._schema, self._columns = self._open(paths[0])
        self.classes = self._columns.classes

    def _open(self, path: str) -> tuple[Any, ArrowColumns]:
        with _read_errors(path), open_parquet(path) as file:
            schema = file.schema_arrow
        return schema, self._sorted(schema, path)

    def _sorted(self, schema: Any, path: str) -> ArrowColumns:
        told = (schema.metadata or {}).get(b"huggingface")
        return sort_columns(schema, read_features(told, path), path, self._image_column)

    def _check_labels(self, schema: Any, path: str) -> None:
        """Refuse a file whose labels mean other classes than those of the first."""
        labels = self._sorted(schema, path).labels
        for column, names in self._columns.labels.items():
            number = first_conflict(names, labels.get(column, ()))
            if number is not None:
                msg = f"{path}: class {number} of its column {column!r} is {labels[column][number]!r}"
                raise PackError(f"{msg}, and {names[number]!r} in {self._paths[0]}.\n  Pack them into two folders.")

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a row: `json` with all columns but bytes, the image, and `cls` where a column is called so or has the
        names of classes.

        Raises:
            PackError: A file cannot be read, or has other columns or classes than the first.
        """
        first_of_all = 0
        for path in self._paths:
            with _read_errors(path), _unchanged(path) as identity, open_parquet(path) as file:
                if not file.schema_arrow.equals(self._schema):
                    raise PackError(f"{path}: it has other columns or types than {self._paths[0]}.")
                self._check_labels(file.schema_arrow, path)
                yield from self._rows_in(file, path, identity, first_of_all, keys)
                first_of_all += file.metadata.num_rows

    def _rows_in(
        self, file: pq.ParquetFile, path: str, identity: FileIdentity, first_of_all: int, keys: str
    ) -> Iterator[Row | RowError]:
        records = Records(os.path.dirname(path), self._image_column, self._key_column, self._allow_no_image)
        batches, pages = Batches(file, path), Pages(most_bytes=0)
        column = Column(path, identity, str(self._columns.image))
        first = 0
        for group in range(file.num_row_groups):
            check_group(file, group, path)
            at = _Group(column, group, first)
            how = ArrowRows(self._columns, records, keys, at.refer, lambda row: f"{path}, row {row}")
            by_page = self._columns.image is not None and pages.are_known(column, group)
            for batch in batches.read(group, self._beside_images(file) if by_page else None):
                cells = PageCells(pages, column, group, first - at.first) if by_page else None
                yield from how.rows(batch, first, first_of_all + first, cells)
                first += batch.num_rows

    def _beside_images(self, file: pq.ParquetFile) -> list[str]:
        """The columns beside the bytes of images."""
        image = self._columns.image
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        return [path for path in paths if path not in (image, f"{image}.bytes")]


@dataclass(frozen=True)
class _Group:
    """A column of a row group whose rows begin at the table's row `first`."""

    column: Column
    group: int
    first: int

    def refer(self, _cells: Any, _number: int, row: int, num_bytes: int) -> CellBytes:
        """The reference to the image of a row of the table."""
        path, identity, name = self.column
        return CellBytes(path, num_bytes, self.group, row - self.first, name, *identity)


@contextlib.contextmanager
def _unchanged(path: str) -> Iterator[FileIdentity]:
    """The identity of a file that is opened several times, which is compared again at the end."""
    identity = FileIdentity.of(path)
    yield identity
    identity.check(path)


@contextlib.contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """What pyarrow raises of a file, as an error that names it."""
    import pyarrow as pa

    try:
        yield
    except FileChanged as err:
        raise PackError(f"{path}: {err}.\n  Pack again when nobody writes it.") from err
    except UnknownPages as err:
        raise PackError(f"{path}: it cannot be read as Parquet: a page of its images is damaged.") from err
    except (pa.ArrowException, OSError) as err:
        raise PackError(f"{path}: it cannot be read as Parquet: {str(err).splitlines()[0]}.") from err
