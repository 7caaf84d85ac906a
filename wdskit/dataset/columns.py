"""Columns: values of all samples of a folder, such as width or class, in one array each, bound to its index by digest.

A column is the file `NAME.DIGEST.npy`. DIGEST is the first 16 hex digits of its sha256, so a file in use is never
replaced. The file has one value per sample, shard after shard in the order of the index: bool, the smallest integer
type that fits, or float64 (NaN for a missing value). For text, the value is the number of the text in the list of
distinct texts ("" for a missing text).

`columns.json` lists the columns: name, source (what the values are computed from), dtype, sha256 of the file, and for
text the distinct texts, sorted. It also has its own digest and the digest of the index whose samples it describes
(`Index.digest`). It is written after the files of the columns and before a new index, so it also lists the columns of
the index before, in `before`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.index import Index, read_index
from wdskit.errors import FolderIndexError, SelectionError
from wdskit.files import DISK, Disk, publish, publish_bytes, read_own
from wdskit.limits import MAX_INDEX_BYTES
from wdskit.storage.urls import is_local

_log = logging.getLogger(__name__)

COLUMNS_NAME = "columns.json"
SPLIT_COLUMN = "split"
"""Name of the text column that `wdskit split` writes and `split: train` reads."""

MAX_VALUES = 65_536
"""Most distinct texts of a column."""

MAX_VALUE_CHARS = 1000
MAX_COLUMNS = 1000

Array = NDArray[Any]
Ints = NDArray[np.int64]

_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SPLIT_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,39}")
_FILE = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{16}}\.npy")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DTYPES = ("|b1", "|u1", "<u2", "<u4", "|i1", "<i2", "<i4", "<i8", "<f8")
_MAX_EXACT = 1 << 53  # integers up to this are exact as float64
_CHUNK = 1 << 20
_HEAD_BYTES = 128  # size of the header of an npy file


class Texts(NamedTuple):
    """The texts of n samples. `values` are the distinct texts, sorted. `codes`, unsigned integers (n,), are the
    position of each sample's text in `values`.
    """

    codes: Array
    values: tuple[str, ...]


Part = Array | Texts
"""The values of consecutive samples, as `pack_values` returns them: an array, or `Texts`."""


class NewColumn(NamedTuple):
    """A column to write. `source`, a JSON object, says what the values are computed from. `parts` has the values of
    each shard, in the order of the index.
    """

    source: Mapping[str, Any]
    parts: Sequence[Part]


def check_column_name(name: str) -> None:
    """Raise SelectionError if `name` is not valid for a column. A valid name has 1 to 100 characters of a-z, A-Z, 0-9,
    _, - and the dot, and does not start with - or a dot.
    """
    if not _NAME.fullmatch(name):
        msg = f"{name!r} is not a valid name for a column. Use a-z, A-Z, 0-9, _, - and ., at most 100 characters."
        raise SelectionError(f"{msg}\n  To name a column differently from its JSON path, write name=json.path.")


def check_split_name(name: str) -> None:
    """Raise SelectionError if `name` is not valid for a split. A valid name has 1 to 40 characters of a-z, 0-9, _ and
    -, and does not start with -.
    """
    if not _SPLIT_NAME.fullmatch(name):
        raise SelectionError(f"{name!r} is not a valid name for a split. Use a-z, 0-9, _ and -, at most 40 characters.")


def is_column_file(name: str) -> bool:
    """Return True if a file name is `columns.json` or has the form of a column's file, `NAME.DIGEST.npy`."""
    return name == COLUMNS_NAME or _FILE.fullmatch(name) is not None


def pack_values(values: Sequence[object]) -> Part:
    """Return the values of n samples: `Texts` if a value is text, otherwise an array (n,).

    The array is bool if all values are bool, int64 if all are bool or int, and otherwise float64. None is a missing
    value: it becomes "" among texts, and NaN in a float64 array. If `values` is empty, the array is float64 too.

    Raises:
        ValueError: Text and numbers are mixed; an integer does not fit in int64, or is beyond 2**53 in a float64 array;
            a text has over 1000 characters; there are over 65,536 distinct texts; or a value is of another type.
    """
    kinds = set(map(type, values))
    if other := kinds - {bool, int, float, str, type(None)}:
        kind = next(iter(other))
        value = next(value for value in values if type(value) is kind)
        raise ValueError(f"{str(value)[:60]!r} is neither a number nor text")
    if str in kinds:
        if kinds - {str, type(None)}:
            number = next(value for value in values if not isinstance(value, str | None))
            text = next(value for value in values if isinstance(value, str))
            raise ValueError(f"some values are text ({text[:60]!r}) and some are numbers ({number!r})")
        texts = [str(value or "") for value in values]
        distinct = tuple(sorted(set(texts)))
        _check_values(distinct)
        numbers = {text: number for number, text in enumerate(distinct)}
        return Texts(np.fromiter((numbers[text] for text in texts), dtype=np.uint32, count=len(texts)), distinct)
    if kinds == {bool}:
        return np.array(values, dtype=np.bool_)
    if values and kinds <= {bool, int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError as err:
            raise ValueError("an integer does not fit int64") from err
    if any(isinstance(value, int) and abs(value) > _MAX_EXACT for value in values):
        raise ValueError("integers beyond 2**53 cannot be stored together with missing values or fractions")
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _check_values(values: tuple[str, ...]) -> None:
    if len(values) > MAX_VALUES:
        msg = f"it has more than {MAX_VALUES} different texts"
        raise ValueError(f"{msg}; a column of text is for classes and sources. Its length can be a column: NAME.length")
    if values and max(map(len, values)) > MAX_VALUE_CHARS:
        raise ValueError(f"a text has more than {MAX_VALUE_CHARS} characters. Its length can be a column: NAME.length")


def join_parts(parts: Sequence[Part]) -> Part:
    """Join the parts of a column, one part per shard, in order. Return `Texts` if a part is `Texts`. Otherwise return
    one array: bool, the smallest integer type that holds all values, or float64. Among texts, a missing value is "".
    Without samples, the array is bool.

    Raises:
        ValueError: Text and numbers are mixed, an integer beyond 2**53 is together with missing values or fractions,
            or there are more than 65,536 distinct texts.
    """
    filled = [part for part in parts if isinstance(part, Texts) or len(part)]
    arrays = [part for part in filled if not isinstance(part, Texts)]
    if text := next((part for part in filled if isinstance(part, Texts)), None):
        if numbers := [part for part in arrays if not _has_no_value(part)]:
            found = f"text ({text.values[-1][:60]!r}) and some numbers ({numbers[0][0].item()!r})"
            raise ValueError(f"some values are {found}")
        texts = [part if isinstance(part, Texts) else Texts(np.zeros(len(part), np.uint8), ("",)) for part in filled]
        values = tuple(sorted({value for part in texts for value in part.values}))
        _check_values(values)
        places = {value: place for place, value in enumerate(values)}
        dtype = np.min_scalar_type(len(values) - 1)
        codes = [np.array([places[value] for value in part.values], dtype)[part.codes] for part in texts]
        return Texts(np.concatenate(codes), values)
    arrays = arrays or [np.zeros(0, np.bool_)]
    if all(part.dtype.kind == "b" for part in arrays):
        return np.concatenate(arrays)
    if all(part.dtype.kind in "biu" for part in arrays):
        least, most = min(int(part.min()) for part in arrays), max(int(part.max()) for part in arrays)
        types = ("i1", "i2", "i4", "i8") if least < 0 else ("u1", "u2", "u4", "i8")
        dtype = next(np.dtype(name) for name in types if np.iinfo(name).min <= least and most <= np.iinfo(name).max)
        return np.concatenate(arrays, dtype=dtype, casting="unsafe")
    if any(part.dtype.kind == "i" and (abs(part) > _MAX_EXACT).any() for part in arrays):
        raise ValueError("integers beyond 2**53 cannot be stored together with missing values or fractions")
    return np.concatenate(arrays, dtype=np.float64)


def _has_no_value(part: Array) -> bool:
    return part.dtype.kind == "f" and bool(np.isnan(part).all())


def write_columns(
    folder: Path, index: bytes, columns: Mapping[str, NewColumn | Column], *, before: Index | None = None, disk: Disk
) -> list[str]:
    """Write the files of columns into a folder, then `columns.json`. Other files of columns stay in the folder. The
    numbers of values are not checked.

    Args:
        folder: The folder of the index, or a staging folder.
        index: `Index.digest` of the index whose samples the columns describe.
        columns: Maps each name to a new column, or to a column whose file is in the folder already.
        before: The index of the data, if `index` will take its place: its columns are listed, too.
        disk: Performs the file operations; tests replace it.

    Returns:
        Names of the columns' files in the order of `columns`, then `columns.json`.

    Raises:
        SelectionError: There are more than `MAX_COLUMNS` columns, or a name is invalid. Or the values of a column have
            no common type: text and numbers are mixed, an integer is too large for float64, or there are too many
            distinct texts.
        OSError: An operation of `disk` fails.
    """
    if len(columns) > MAX_COLUMNS:
        raise SelectionError(f"{len(columns):,} columns are more than the {MAX_COLUMNS:,} that a folder can have.")
    stored = [
        new if isinstance(new, Column) else _write_column(folder, name, new, disk=disk) for name, new in columns.items()
    ]
    document = {"version": _VERSION, **_list(index, stored)}
    if before is not None:
        document["before"] = _list(before.digest, [*list_columns(before.local)[1].values()])
    document["sha256"] = _digest_of(document)
    publish_bytes(folder / COLUMNS_NAME, json.dumps(document, indent=1).encode() + b"\n", disk=disk)
    return [*(one.file_name for one in stored), COLUMNS_NAME]


def _list(index: bytes, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the columns of an index as plain JSON."""
    listed = []
    for one in columns:
        item = {"name": one.name, "source": dict(one.source), "dtype": one.dtype, "sha256": one.sha256}
        listed.append(item if one.values is None else {**item, "values": one.values})
    return {"index": index.hex(), "num_samples": columns[-1].num_samples if columns else 0, "columns": listed}


def _write_column(folder: Path, name: str, new: NewColumn, *, disk: Disk) -> Column:
    """Write the file of a new column. `write_columns` lists the errors."""
    check_column_name(name)
    try:
        joined = join_parts(new.parts)
    except ValueError as err:
        raise SelectionError(f"column {name}: {err}.") from err
    data, values = (joined.codes, joined.values) if isinstance(joined, Texts) else (joined, None)
    if len(data) and _has_no_value(data):
        _log.warning("columns: no sample has a value for %s.", name)
    head = _npy_head(data.dtype, len(data))
    digest = hashlib.sha256(head)
    digest.update(data.data)
    column = Column(name, new.source, data.dtype.str, len(data), digest.hexdigest(), values, folder, "")
    with publish(folder / column.file_name, disk=disk) as temp:
        temp.write(head)
        temp.write(data.view(np.uint8).data if len(data) else b"")
    return column


def _digest_of(document: Mapping[str, Any]) -> str:
    """Return the digest of `document`, the content of `columns.json` without its digest, as hex sha256."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def add_columns(index: Index, new: Mapping[str, NewColumn], *, disk: Disk = DISK) -> None:
    """Add columns to the local folder of `index`. The caller must hold the lock of this folder. A new column replaces
    an existing column of the same name, and the file of the replaced column is removed.

    Raises:
        SelectionError: The list of columns is damaged or was made for other shards. Or as for `write_columns`.
        FolderIndexError: The list of columns is a link, or is not a plain file of at most 1 GiB.
        OSError: An operation of `disk` fails.
    """
    known = Columns(index)
    kept = {name: known.column(name) for name in known if name not in new}
    names = write_columns(index.local, index.digest, {**kept, **new}, disk=disk)
    remove_columns(index.local, keep=names, disk=disk)


def remove_columns(folder: Path, *, disk: Disk = DISK, keep: Sequence[str] = ()) -> None:
    """Remove all column files of a folder, and `columns.json`. Files whose names are in `keep` stay. Do nothing if the
    folder has no such file. Raises OSError if a file cannot be removed.
    """
    for path in [*sorted(folder.glob("*.npy")), folder / COLUMNS_NAME]:
        if path.name not in keep and is_column_file(path.name) and path.exists():
            disk.remove(path)


def _npy_head(dtype: np.dtype[Any], num_samples: int) -> bytes:
    """Return the header, 128 bytes, of an npy file of version 1.0 with one dimension of `num_samples` values."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({num_samples},), }}".encode()
    return b"\x93NUMPY\x01\x00" + (_HEAD_BYTES - 10).to_bytes(2, "little") + text.ljust(_HEAD_BYTES - 11) + b"\n"


class TextColumn:
    """The texts of samples. A number is stored for each sample; 10^8 samples of a few classes take 100 MB.

    `column == "train"` is a bool array (num_samples,), `column[3]` is the text of sample 3, and `column[array]` is a
    `TextColumn` of the samples that a numpy index selects.

    Attributes:
        codes: For each sample the position of its text in `values`, unsigned (num_samples,).
        values: The distinct texts, sorted.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, codes: Array, values: tuple[str, ...]) -> None:
        self.codes = codes
        self.values = values

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.codes)

    def __getitem__(self, at: Any) -> Any:
        """Return the text of sample `at`, or a `TextColumn` of several samples if `at` is a slice or a numpy index."""
        codes = self.codes[at]
        return self.values[codes] if np.ndim(codes) == 0 else TextColumn(codes, self.values)

    def __eq__(self, other: object) -> Any:
        """Return for each sample whether its text equals `other`, one text: bool (num_samples,)."""
        return self.isin([other])

    def __ne__(self, other: object) -> Any:
        """Return for each sample whether its text differs from `other`, one text: bool (num_samples,)."""
        return ~self.isin([other])

    def isin(self, texts: Sequence[object]) -> NDArray[np.bool_]:
        """Return for each sample whether its text is one of `texts`, bool (num_samples,)."""
        return np.array([value in texts for value in self.values], dtype=np.bool_)[self.codes]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:  # noqa: FBT001 (numpy's protocol)
        """Return the text of each sample as an array (num_samples,) of numpy's text type, or of `dtype`. The array is
        always new: `copy` is ignored.
        """
        return np.array(self.values, dtype=dtype)[self.codes]

    def __repr__(self) -> str:
        """Return a text with the number of samples and the first five distinct texts."""
        return f"TextColumn({len(self):,} samples, values {', '.join(map(repr, self.values[:5]))}, ...)"


@dataclass(frozen=True)
class Column:
    """One column of a folder. A pickle does not contain the values: unpickling maps the file again.

    Attributes:
        name: Name of the column.
        source: What the values are computed from, a JSON object.
        dtype: Type of the stored numbers, as numpy writes it: `<u2`.
        num_samples: Number of samples of the folder.
        sha256: Hex digest of the column's file.
        values: The distinct texts, sorted; None for a column of numbers.
        folder: Local folder of the file. A remote file is copied into this folder when it is needed.
        url: URL of the remote folder; empty for a local folder.
    """

    name: str
    source: Mapping[str, Any]
    dtype: str
    num_samples: int
    sha256: str
    values: tuple[str, ...] | None
    folder: Path
    url: str

    def __post_init__(self) -> None:
        """Raise ValueError if the list of columns has an entry that is not a column."""
        is_right = _NAME.fullmatch(self.name) and self.dtype in _DTYPES and _DIGEST.fullmatch(self.sha256)
        texts = self.values or ()
        if not is_right or type(self.num_samples) is not int or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self.name!r} is not a column")

    @property
    def file_name(self) -> str:
        """Name of the column's file."""
        return f"{self.name}.{self.sha256[:16]}.npy"

    @property
    def place(self) -> str:
        """Path or URL of the folder."""
        return self.url or str(self.folder)

    @functools.cached_property
    def data(self) -> Array:
        """The stored numbers, (num_samples,) of the type `dtype`, read-only, mapped from the file. In a column of text,
        each number is the position of the sample's text in `values`.

        Raises:
            SelectionError: The file is missing, unreadable or damaged. Only its header and size are checked.
            StorageError: A remote file cannot be copied.
        """
        if self.url:
            from wdskit.dataset.remote import fetch_copy

            fetch_copy(self.folder, self.url, self.file_name, self.sha256)
        path, head = self.folder / self.file_name, _npy_head(np.dtype(self.dtype), self.num_samples)
        if path.exists() and not path.is_file():  # opening a named pipe would wait forever
            raise self.discard(f"its file {path.name} is not a file")
        try:
            with path.open("rb") as opened:
                num_bytes = len(head) + self.num_samples * np.dtype(self.dtype).itemsize
                if opened.read(len(head)) != head or opened.seek(0, 2) != num_bytes:
                    raise self.discard("its file is damaged")
                return np.memmap(opened, dtype=self.dtype, mode="r", offset=len(head)).view(np.ndarray)
        except OSError as err:
            raise self.discard(f"its file {path.name} cannot be read: {err.strerror}") from err

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle, without the mapped values."""
        return {name: value for name, value in vars(self).items() if name != "data"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state from a pickle. On another machine, make a local copy of the list of a remote folder."""
        self.__dict__.update(state)
        if self.url and not self.folder.exists():
            from wdskit.dataset.remote import read_copy

            self.__dict__["folder"] = read_copy(self.url, [], lambda copy: copy)

    def check(self) -> None:
        """Read the whole file, and raise an error if it is damaged.

        Raises:
            SelectionError: The file is missing, its digest is not `sha256`, or a number of a text column has no text.
            StorageError: A remote file cannot be copied.
        """
        for _ in self.chunks(_CHUNK):
            pass

    def chunks(self, size: int) -> Iterator[Array]:
        """Yield the stored numbers in order, in arrays of `size` numbers; the last array may be shorter.

        Raises:
            SelectionError: The file is missing or damaged, or a number has no text. The digest is compared after the
                last array, so do not use a value before the iteration has ended.
            StorageError: A remote file cannot be copied.
        """
        data = self.data
        digest = hashlib.sha256(_npy_head(data.dtype, self.num_samples))
        for first in range(0, len(data), size):
            part = data[first : first + size]
            digest.update(part.data)
            if self.values is not None and int(part.max()) >= len(self.values):
                raise self.discard("its numbers are not those of its values")
            yield part
        if digest.hexdigest() != self.sha256:
            raise self.discard("its file is damaged")

    def unfit(self, problem: str) -> SelectionError:
        """Return the SelectionError for a column that cannot be used. `problem` says why, and what the user can do."""
        return SelectionError(f"{self.place}: column {self.name}: {problem}.", folder=self.place)

    def discard(self, problem: str) -> SelectionError:
        """Remove the copy of a remote column, because only the copy may be damaged. Return the SelectionError for the
        damaged column. `problem` describes the damage.
        """
        remedy = f"Run `wdskit index {self.place}`, which makes all columns again"
        if self.url:
            with contextlib.suppress(OSError):
                (self.folder / self.file_name).unlink()
            problem += f". Its copy {self.file_name} is removed"
            remedy = f"Run this again. If it fails again: {remedy}"
        return self.unfit(f"{problem}.\n  {remedy}")


class Columns:
    """The columns of a folder: `columns["cls"]` is an array with one value per sample, in the order of the index.

    Numbers are read-only arrays, mapped from the file. Text is a `TextColumn`. `name in columns`, `len(columns)` and
    iteration work as for a dict. A folder without a list of columns has no columns, which is not an error.

    Args:
        index: The index of the folder, or of the local copy of a remote folder.

    Attributes:
        place: Path or URL of the folder.

    Raises:
        SelectionError: The list of columns is damaged, or was made for other shards.
        FolderIndexError: The list of columns is a link, or is not a plain file of at most 1 GiB.
    """

    def __init__(self, index: Index) -> None:
        self.place = index.place
        url, wanted = index.folder if index.is_remote else "", index.digest.hex()
        digest, self._columns = list_columns(index.local, url, wanted)
        num_samples = int(index.counts.sum())
        is_other = digest != wanted or any(one.num_samples != num_samples for one in self._columns.values())
        if self._columns and is_other:
            msg = f"{index.place}/{COLUMNS_NAME}: its columns were made for other shards than those in the index now."
            remedy = f"Run `wdskit index {index.place}`, which makes them again."
            raise SelectionError(f"{msg}\n  {remedy}", folder=index.place)

    def column(self, name: str) -> Column:
        """Return the stored column `name`. SelectionError: It does not exist; the message lists the others."""
        if name not in self._columns:
            msg = f"{self.place}: there is no column {name!r}. The columns are {', '.join(self._columns) or 'none'}."
            way = f"Correct the name, or make it: `wdskit index {self.place} --columns NAMES`, or `wdskit split`."
            raise SelectionError(f"{msg}\n  {way}", folder=self.place)
        return self._columns[name]

    def __getitem__(self, name: str) -> Array | TextColumn:
        """Return the values of a column, one per sample: a read-only array, or a `TextColumn` for text.

        Raises:
            SelectionError: The column does not exist, or its file is missing or damaged.
            StorageError: A remote file cannot be copied.
        """
        column = self.column(name)
        column.check()
        return column.data if column.values is None else TextColumn(column.data, column.values)

    def __contains__(self, name: object) -> bool:
        """Return whether a column has this name."""
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the columns, in the order in which the columns were made."""
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    def __repr__(self) -> str:
        """Return a text with the folder and the names of the columns."""
        return f"Columns({self.place!r}: {', '.join(self)})"

    def of_split(self, name: str) -> NDArray[np.bool_]:
        """Return which samples have the text `name` in the column `split`: bool (num_samples,).

        Raises:
            SelectionError: The split does not exist (the message lists the existing splits), or its column is damaged.
            StorageError: A remote file cannot be copied.
        """
        splits = self._columns.get(SPLIT_COLUMN)
        known = (splits.values or ()) if splits else ()
        if splits is None or name not in known:
            there = f"The folder has {', '.join(known)}" if known else "The folder has no split"
            own = f"A split of `wdskit pack --split` has its own shards: {self.place.rstrip('/')}/{name}-*.tar"
            msg = f"{self.place}: there is no split {name!r}. {there}.\n  Make it with `wdskit split`. {own}."
            raise SelectionError(msg, folder=self.place)
        splits.check()
        return np.equal(splits.data, known.index(name))


def columns(folder: str | Path) -> Columns:
    """Open the columns of a folder with an index. The folder is a path or a URL.

    `columns("data/train")["cls"]` is an array with one value per sample, in the order of the index.

    Raises:
        FolderIndexError: The index of the folder is missing or damaged, or `columns.json` is not a plain file.
        SelectionError: `columns.json` is damaged, or was made for other shards. A folder without it has no columns.
        StorageError: The remote folder cannot be read, or its files cannot be copied to the local disk.
    """
    if is_local(str(folder)):
        return Columns(read_index(folder))
    from wdskit.dataset.remote import read_copy

    url = str(folder).rstrip("/")
    return read_copy(url, [COLUMNS_NAME], lambda copy: Columns(read_index(url, copy=copy)))


def list_columns(folder: Path, url: str = "", wanted: str = "") -> tuple[str, dict[str, Column]]:
    """Return (index, columns) of the `columns.json` of a local folder: the hex digest of the index for which the
    columns were made, and the columns by name; ("", {}) without such a file. If the columns of the index before are
    listed, too, and it is `wanted`, return these.

    Args:
        folder: The folder. If it is the local copy of a remote folder, `url` is the URL of the remote folder.
        url: See `folder`.
        wanted: Hex digest of the index to which the columns shall belong.

    Raises:
        SelectionError: `columns.json` is damaged, or of another version.
        FolderIndexError: `columns.json` is a link, is not a plain file of at most 1 GiB, or cannot be read.
    """
    place = url or str(folder)
    try:
        data = read_own(folder / COLUMNS_NAME, limit=MAX_INDEX_BYTES)
    except OSError as err:
        msg = f"{place}/{COLUMNS_NAME}: it cannot be read: {err.strerror}."
        raise FolderIndexError(msg, folder=place) from err
    if data is None:
        return "", {}
    try:
        document = json.loads(data)
        if document.pop("sha256") != _digest_of(document) or document["version"] != _VERSION:
            raise ValueError("another version of wdskit wrote it")  # noqa: TRY301
        before = document.get("before", document)
        document = before if before["index"] == wanted else document
        columns = [
            Column(
                name=item["name"],
                source=item["source"],
                dtype=item["dtype"],
                num_samples=document["num_samples"],
                sha256=item["sha256"],
                values=tuple(item["values"]) if "values" in item else None,
                folder=folder,
                url=url,
            )
            for item in document["columns"]
        ]
        return document["index"], {column.name: column for column in columns}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        msg = f"{place}/{COLUMNS_NAME}: it is damaged, or another version of wdskit wrote it."
        remedy = f"Remove it, and run `wdskit index {place} --columns NAMES`."
        raise SelectionError(f"{msg}\n  {remedy}", folder=place) from err


class ColumnView:
    """The values of a column for a list of shards, which may be in several folders. A pickle does not contain the
    values.

    Args:
        runs: At least one run of neighbouring samples of a folder, in order. Each run is (column, first, count): the
            `Column` of the folder, the position of the first sample in this column, and the number of samples.
    """

    def __init__(self, runs: Sequence[tuple[Column, int, int]]) -> None:
        self._runs = list(runs)
        self._starts = np.cumsum([0, *(count for _, _, count in runs)])

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._starts[-1])

    def take(self, numbers: Ints) -> Array:
        """Return the stored values of the samples `numbers`, int64 (n,), counted from 0 over all runs. The result is
        (n,). A text is stored as its position in the folder's `Column.values`. Errors: see `Column.data`.
        """
        if len(self._runs) == 1:
            column, first, _ = self._runs[0]
            return column.data[first + numbers]
        runs = np.searchsorted(self._starts, numbers, side="right") - 1
        found = np.empty(len(numbers), dtype=np.result_type(*(column.dtype for column, _, _ in self._runs)))
        for run in np.unique(runs).tolist():
            rows = np.flatnonzero(runs == run)
            column, first, _ = self._runs[run]
            found[rows] = column.data[first + numbers[rows] - self._starts[run]]
        return found

    def all(self) -> Array:
        """Return the stored values of all samples in order, (len(self),). A text is stored as its position in the
        folder's `Column.values`. Errors: see `Column.data`.
        """
        parts = [column.data[first : first + count] for column, first, count in self._runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
