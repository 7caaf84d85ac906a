"""The plan of a run: all rows of a source, which rows are packed, and the rows of each shard.

The plan is complete before the first row is packed. It is a SQLite database. With more than `ROWS_IN_MEMORY` rows, the
database is a temporary file, which the processes that fill shards also read. Always in memory are the size of each row,
in 4 bytes, and with splits the row's split, in one byte.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sqlite3
import struct
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from wdskit.codecs.fields import decode_field, follow_path, is_json_field, is_path
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.errors import DecodeError, PackError, RowError, WdskitError
from wdskit.files import temp_path
from wdskit.limits import BLOCK_BYTES
from wdskit.order.keys import permutation
from wdskit.packing.division import Limits, PlannedShard, RowRange, RowTooLarge, divide, row_bytes
from wdskit.packing.references import KINDS, FieldBytes, Reference, SourceFiles
from wdskit.packing.remote_prefetch import read_ahead
from wdskit.packing.row import OnProgress, Progress, Row, key_taken, row_error, size_of
from wdskit.packing.sources import Duplicate, Source
from wdskit.packing.transforms import UNTOUCHED, Transforms
from wdskit.shards.column_values import Source as ColumnSource
from wdskit.shards.parallel import map_shards
from wdskit.shards.split import SPLIT_SEED, Shares, choose_splits, draws_of, make_draw

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

ROWS_IN_MEMORY = 50_000
"""Largest number of rows of a plan in memory, which takes about 15 MB. A plan with more rows is on disk."""

_HELD_BYTES = 4 << 20
"""Largest size in memory of the fields that are not references, such as images of a table. A larger plan is on disk."""

_PENDING_BYTES = 1 << 19
"""Bytes of fields that are not references, which a plan on disk collects before it inserts their rows."""

_TEMP_VARIABLE = "SQLITE_TMPDIR"  # the folder of SQLite's temporary files (sqlite.org/tempfiles.html)
_BATCH_ROWS = 1000  # rows per insertion, and per report of the progress
_CHECK_ROWS = 256  # rows per task of a process that checks rows
_DRAWN_ROWS = 4096  # keys per call of `choose_splits`
_SHOWN_MISSING = 5  # rows without a required field that are logged one by one

_SCHEMA = """
CREATE TABLE rows (
    number INTEGER PRIMARY KEY,  -- number of the row in its source
    key TEXT,                    -- NULL for a row that is not packed
    record BLOB                  -- NULL for rows that the caller has in memory
);
CREATE TABLE taken (key TEXT);   -- keys of the shards that are added to
"""


# Rows as bytes.

_HEAD = struct.Struct("<I")  # size of the JSON in a record
_KIND_OF: dict[type[Reference], str] = {kind: name for name, kind in KINDS.items()}


def encode_row(row: Row) -> bytes:
    """Return the record of a row, without `is_cleaned`.

    The record has the size of a JSON document, the document, and the bytes of the fields that are not references. The
    document has the row's key and place. Then it has the name and the size of each field or, for a reference, the name,
    the kind and the values of the reference.
    """
    document: list[Any] = [row.key, row.where]
    own = []
    for name, data in row.fields:
        if isinstance(data, bytes):
            document.append((name, len(data)))
            own.append(data)
        else:
            document.append((name, _KIND_OF[type(data)], *data))
    try:
        encoded = orjson.dumps(document)
    except TypeError:  # the name of a file is not UTF-8
        encoded = json.dumps(document).encode()
    return b"".join((_HEAD.pack(len(encoded)), encoded, *own))


def decode_row(record: bytes) -> Row:
    """Return the row of a record from `encode_row`. `is_cleaned` is False."""
    at = _HEAD.size + _HEAD.unpack_from(record)[0]
    encoded = record[_HEAD.size : at]
    try:
        key, where, *described = orjson.loads(encoded)
    except orjson.JSONDecodeError:  # the name of a file is not UTF-8
        key, where, *described = json.loads(encoded)
    fields: list[tuple[str, FieldBytes]] = []
    for name, kind, *values in described:
        if values:
            fields.append((name, KINDS[kind](*values)))
        else:
            fields.append((name, record[at : at + kind]))
            at += kind
    return Row(key, tuple(fields), where)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a plan that is in memory, as the records of `encode_row`. They can be pickled for another process."""

    records: Sequence[bytes]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order."""
        return map(decode_row, self.records)


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a plan that is in a file. Each iteration reads the rows one by one.

    They can be pickled for another process that sees the file.

    Attributes:
        path: The plan's file.
        numbers: The numbers of the rows, int64 (n,).
    """

    path: str
    numbers: Ints

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in the order of `numbers`.

        Raises:
            OSError: The file of the plan is missing or damaged.
        """
        uri = _uri(self.path, "mode=ro&immutable=1")  # no process writes to the file any more
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
                yield from map(decode_row, _records(connection, self.numbers))
        except sqlite3.Error as err:
            raise OSError(0, f"the plan of this run cannot be read: {err}", self.path) from err


def _records(connection: sqlite3.Connection, numbers: Ints) -> Iterator[bytes]:
    """Yield the records of the rows with these numbers, in this order.

    Raises sqlite3.DatabaseError if a row is missing.
    """
    chosen: list[int] = numbers.tolist()
    sql = "SELECT record FROM rows WHERE number"
    if chosen and (np.diff(numbers) == 1).all():  # one query takes a fifth of the time
        cursor = connection.execute(f"{sql} BETWEEN ? AND ? ORDER BY number", (chosen[0], chosen[-1]))
        results = (cursor.fetchone() for _ in chosen)
    else:
        results = (connection.execute(f"{sql} = ?", (number,)).fetchone() for number in chosen)
    for number, result in zip(chosen, results, strict=True):
        if result is None:
            raise sqlite3.DatabaseError(f"row {number} is missing")
        yield result[0]


Rows = Sequence[Row] | StoredRows | FileRows
"""Rows in memory or in a plan on disk. They can be iterated any number of times."""


# The database.


class Plan:
    """The rows of a source, in order, and which of them are packed. `close` removes the plan.

    Args:
        get_folder: Returns the folder for the plan. Called only if the plan is too large for memory, or after an error.
        name: Name of the plan's file in this folder.
        is_held: True if the caller keeps the rows in memory, so that the plan does not store them.
        shares: Share of each split; None without splits.
        sha256: Known digests, in hex, of files that rows refer to, by path.

    Attributes:
        blocks: Number of 512-byte blocks that each row takes in its shard, by row number.
        num_fields: For each tuple of field names, the number of packed rows with exactly these fields.
        kept: Numbers of the rows that are packed, int64 (n,), sorted; None if all rows are packed.
        splitter: Draws the split of each row; None without splits.

    Raises, in all methods:
        PackError: The plan cannot be written or read.
    """

    def __init__(
        self,
        get_folder: Callable[[], Path],
        *,
        name: str = "wdskit-plan",
        is_held: bool = False,
        shares: Shares | None = None,
        sha256: Mapping[str, str] | None = None,
    ) -> None:
        self.blocks = array("I")
        self.num_fields: Counter[tuple[str, ...]] = Counter()
        self.kept: Ints | None = None
        self._database = Database(get_folder, name, _SCHEMA)
        # Two files: other processes read the rows without locks while digests are written.
        schema = "CREATE TABLE digests (number INTEGER PRIMARY KEY, digest BLOB)"  # sha256 of the images of a row
        self._digests = Database(get_folder, f"{name}-digests", schema)
        self._held: list[Row] | None = [] if is_held else None
        self._pending: list[tuple[int, str, bytes | None]] = []
        self._held_bytes, self._max_held_bytes = 0, _HELD_BYTES
        self._digest = hashlib.sha256()
        self._sha256 = sha256 or {}
        self._last_file: Reference | None = None
        self.splitter = None if shares is None else Splitter(shares)

    def __len__(self) -> int:
        """Return the number of rows, including the rows that are not packed."""
        return len(self.blocks)

    def close(self) -> None:
        """Remove the plan from memory and from the disk."""
        self._database.close()
        self._digests.close()

    @property
    def digest(self) -> str:
        """16 hex digits that identify the rows of the source and their order: keys, fields and files.

        A file counts by its known sha256, or else by its modification time and its inode or ETag, but not by its path.
        """
        return self._digest.hexdigest()[:16]

    @property
    def has_labels(self) -> bool:
        """True if a packed row has the field `cls`."""
        return any(count and CLASS_FIELD in names for names, count in self.num_fields.items())

    def add(self, row: Row) -> None:
        """Append a row."""
        number = len(self.blocks)
        self.blocks.append(row_bytes(row) // BLOCK_BYTES)
        self.num_fields[tuple([name for name, _ in row.fields])] += 1
        if self.splitter is not None:
            self.splitter.add(row.key)
        self._digest.update(orjson.dumps([row.key, [(name, size_of(data)) for name, data in row.fields]]))
        own = [data for _, data in row.fields if isinstance(data, bytes)]
        for value in own:
            self._digest.update(value)
        for _, data in row.fields:
            if not isinstance(data, bytes) and (self._last_file is None or data.path != self._last_file.path):
                self._last_file = data
                self._digest.update((self._sha256.get(data.path) or f"{data[-2:]}").encode())
        if self._held is not None:
            self._held.append(row)
            self._pending.append((number, row.key, None))
        else:
            self._pending.append((number, row.key, encode_row(row)))
            self._held_bytes += sum(map(len, own))
        if len(self._pending) == _BATCH_ROWS or self._held_bytes > self._max_held_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the added rows to the database. Call this method after the last `add`."""
        if self._held_bytes > self._max_held_bytes or len(self) > ROWS_IN_MEMORY:
            self._database.move_to_disk()
            self._held_bytes, self._max_held_bytes = 0, _PENDING_BYTES
        self._database.insert("INSERT INTO rows (number, key, record) VALUES (?, ?, ?)", self._pending)
        self._pending = []

    def take(self, numbers: Ints) -> Rows:
        """Return the rows with these numbers, int64 (n,), in this order. Another process can receive the result."""
        if self._held is not None:
            return tuple([self._held[number] for number in numbers.tolist()])
        path = self._database.publish()
        return StoredRows(self._database.records(numbers)) if path is None else FileRows(path, numbers)

    def __getitem__(self, number: int) -> Row:
        """Return the row with this number."""
        if self._held is not None:
            return self._held[number]
        return decode_row(self._database.records(np.array([number]))[0])

    def leave_out(self, numbers: Iterable[int]) -> None:
        """Mark rows as not packed. `numbers` has each row once, and no row that is marked already."""
        numbers = [*numbers]
        for number in numbers:
            self.num_fields[tuple([name for name, _ in self[number].fields])] -= 1
        self._database.insert("UPDATE rows SET key = NULL WHERE number = ?", [(number,) for number in numbers])
        if numbers:
            self.kept = np.setdiff1d(np.arange(len(self)) if self.kept is None else self.kept, numbers)

    @property
    def num_kept(self) -> int:
        """Number of packed rows."""
        return len(self) if self.kept is None else len(self.kept)

    def add_digests(self, digests: Iterable[tuple[int, bytes]]) -> None:
        """Store digests for `find_duplicates`. An item has the number of a row and the digest of its images."""
        if len(self) > ROWS_IN_MEMORY:
            self._digests.move_to_disk()
        self._digests.insert("INSERT INTO digests VALUES (?, ?)", digests)

    def find_duplicates(self) -> Iterator[Duplicate]:
        """Yield each row whose images have the digest of an earlier row, in order. Call `add_digests` first."""
        self._digests.make_index("CREATE INDEX by_digest ON digests (digest)")
        repeated = self._digests.query(
            """SELECT number, first, digests.digest FROM digests JOIN (
                   SELECT digest, min(number) AS first FROM digests GROUP BY digest HAVING count(*) > 1
               ) AS repeated ON digests.digest = repeated.digest
               WHERE number > first ORDER BY number"""
        )
        for number, first, digest in repeated:
            row, earlier = self[number], self[first]
            yield Duplicate(number, row.key, row.where, earlier.key, earlier.where, digest.hex())

    def check_unique(self, *, keep_first: bool = False) -> None:
        """Check that all packed rows have different keys. With `keep_first`, leave out later rows with a repeated key.

        Raises:
            RowError: Without `keep_first`: a row has the key of an earlier row. The error names the first such row.
        """
        self._database.make_index("CREATE INDEX keys ON rows (key) WHERE key IS NOT NULL")
        later = self._database.query(
            """SELECT number, first FROM (
                   SELECT number, min(number) OVER (PARTITION BY key) AS first FROM rows WHERE key IS NOT NULL
               ) WHERE number > first ORDER BY number LIMIT ?""",
            -1 if keep_first else 1,
        )
        if keep_first:
            self.leave_out(number for number, _ in later)
        elif later:
            raise key_taken(self[later[0][0]], self[later[0][1]].where)

    def find_row_with_key(self, keys: Iterable[str]) -> Row | None:
        """Return the first packed row whose key is in `keys`; None without such a row. Call `check_unique` before."""
        self._database.insert("INSERT INTO taken VALUES (?)", ((key,) for key in keys))
        [(number,)] = self._database.query("SELECT min(number) FROM taken JOIN rows USING (key)")
        return None if number is None else self[number]


class Database:
    """A SQLite database in memory, which can move to a temporary file. Only one process may write to it.

    Args:
        get_folder: Returns the folder for the file. It is called when the database moves, and after an error.
        name: Name of the file.
        schema: SQL that makes the tables.

    Raises, in all methods:
        PackError: The database cannot be read or written.
    """

    def __init__(self, get_folder: Callable[[], Path], name: str, schema: str) -> None:
        self._get_folder = get_folder
        self._name = name
        self._path: Path | None = None
        self._connection = _connect("file::memory:")
        self._connection.executescript(schema)
        self._connection.execute("BEGIN")
        self._num_published = -1

    def close(self) -> None:
        """Remove the database from memory and from the disk."""
        self._connection.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def move_to_disk(self) -> None:
        """Move the database to its file, if it is in memory."""
        if self._path is not None:
            return
        path = temp_path(self._get_folder() / self._name)
        with self._errors():
            path.unlink(missing_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._path = path
            self._connection.execute("COMMIT")
            old, self._connection = self._connection, _connect(_uri(path, "nolock=1"))
            old.backup(self._connection)
            old.close()
            self._connection.execute("BEGIN")

    def publish(self) -> str | None:
        """Commit all changes, so that other processes can read the file. Return the file's path; None if the database
        is in memory.
        """
        if self._path is None:
            return None
        if self._connection.total_changes != self._num_published:
            with self._errors():
                self._connection.execute("COMMIT")
                self._connection.execute("PRAGMA shrink_memory").close()
                self._connection.execute("BEGIN")
            self._num_published = self._connection.total_changes
        return os.fspath(self._path)

    def records(self, numbers: Ints) -> list[bytes]:
        """Return the column `record` of the rows with these numbers in the table `rows`, in the order of `numbers`."""
        with self._errors():
            return [*_records(self._connection, numbers)]

    def insert(self, sql: str, values: Iterable[Sequence[Any]]) -> int:
        """Run a statement once with each item of `values` as its parameters. Return the number of changed rows."""
        with self._errors():
            return self._connection.executemany(sql, values).rowcount

    def make_index(self, sql: str) -> None:
        """Run a statement that makes an index. SQLite's temporary files are next to the database file, if it exists."""
        temp_folder = os.environ.get(_TEMP_VARIABLE)
        try:
            if self._path is not None:
                os.environ[_TEMP_VARIABLE] = os.fspath(self._path.parent)
            with self._errors():
                self._connection.execute(sql)
        finally:
            if temp_folder is not None:
                os.environ[_TEMP_VARIABLE] = temp_folder
            else:
                os.environ.pop(_TEMP_VARIABLE, None)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds. `values` are the parameters of the query."""
        with self._errors():
            return self._connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert the errors of SQLite and of the disk in the `with` block to a PackError."""
        try:
            yield
        except (sqlite3.Error, OSError) as err:
            problem = getattr(err, "strerror", None) or err
            msg = f"{self._get_folder()}: the plan of this run cannot be written there: {problem}."
            raise PackError(f"{msg}\n  Free some space there, or pack into a folder on another disk.") from err


def _uri(path: str | Path, options: str) -> str:
    """Return the URI of a file for SQLite. `options` are the parameters of the URI, such as `nolock=1`."""
    # The parameters of both callers turn off locks, which some disks lack.
    return f"file:{urllib.parse.quote(os.fsencode(os.path.abspath(path)))}?{options}"


def _connect(uri: str) -> sqlite3.Connection:
    """Return a connection to a database. The caller must begin and commit each transaction."""
    # With isolation_level=None, sqlite3 commits nothing on its own: a commit costs writes.
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=16)
    # No journal and no flush: after a crash, the plan is made again.
    for setting in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384"):
        connection.execute(f"PRAGMA {setting}").close()
    return connection


class StreamedKeys:
    """Finds repeated keys of rows that can be read only once. `close` removes the stored keys.

    Args:
        get_folder: Returns the folder for a file of the keys. Called only for more than `ROWS_IN_MEMORY` keys, or after
            an error.

    Raises, in all methods:
        PackError: The file of the keys cannot be read or written.
    """

    def __init__(self, get_folder: Callable[[], Path]) -> None:
        schema = "CREATE TABLE keys (key TEXT PRIMARY KEY, place BLOB) WITHOUT ROWID"
        self._database = Database(get_folder, "wdskit-keys", schema)
        self._num_keys = 0

    def close(self) -> None:
        """Remove the stored keys from memory and from the disk."""
        self._database.close()

    def add(self, key: str, place: str) -> str | None:
        """Add a key and the place of its row. Return the place of an earlier equal key; None if the key is new."""
        self._num_keys += 1
        if self._num_keys > ROWS_IN_MEMORY:
            self._database.move_to_disk()
        if self._database.insert(
            "INSERT OR IGNORE INTO keys VALUES (?, ?)", [(key, place.encode(errors="surrogatepass"))]
        ):
            return None
        ((earlier,),) = self._database.query("SELECT place FROM keys WHERE key = ?", key)
        return bytes(earlier).decode(errors="surrogatepass")


# Reading the rows.


def read_rows(
    source: Source,
    plan: Plan,
    *,
    transforms: Transforms = UNTOUCHED,
    skip_bad: bool,
    keep_first: bool = False,
    workers: int,
    on_progress: OnProgress,
) -> None:
    """Read all rows of a source into a plan, and decide which rows are packed.

    Args:
        source: The source. `source.rejected` gets the errors of the rows that are left out because they cannot be
            packed or lack a required field. `source.duplicates` gets the rows with repeated images.
        plan: An empty plan.
        transforms: The transforms of each row, the required fields, and what to do with duplicates.
        skip_bad: Leave out rows that cannot be packed, instead of raising an error. The files of all rows are read to
            find such rows.
        keep_first: Leave out rows with the key of an earlier row, instead of raising an error.
        workers: Number of processes that read files, for `skip_bad` and for duplicates.
        on_progress: Called with the progress.

    Raises:
        RowError: Without `skip_bad`, a row cannot be packed. Without `keep_first`, two rows have the same key.
        PackError: No row is left, an option names a field that no row has, an option is for images and no row has an
            image, or the plan cannot be written.
        WdskitError: A process that reads files was killed, or an object in a store cannot be read.
    """
    bad: list[tuple[int, RowError]] = []
    with contextlib.ExitStack() as stack:
        # After an error, close the generator now: it holds a manifest open until the traceback is freed.
        if isinstance(source.rows, Generator):
            stack.callback(source.rows.close)
        for row in required_rows(_counted(source.rows, on_progress), transforms, source.rejected):
            if isinstance(row, Row):
                plan.add(row)
            elif skip_bad:
                bad.append((len(plan), row))
            else:
                raise row
    plan.flush()
    if len(plan):
        transforms.check_used(name for names in plan.num_fields for name in names)
    if skip_bad or transforms.duplicates != "keep":
        _check_all(source, plan, transforms, bad, skip_bad=skip_bad, workers=workers, on_progress=on_progress)
    source.rejected += [err for _, err in sorted(bad, key=lambda each: each[0])]
    if not plan.num_kept:
        raise source.no_rows_error()
    plan.check_unique(keep_first=keep_first)


def _paths_in(row: Row, transforms: Transforms) -> Iterator[str]:
    """Yield the required paths into JSON, such as `json.caption`, that exist in the row.

    `transforms.require` has the required paths. A field that is not valid JSON has no paths.
    Raises RowError or StorageError if a JSON field cannot be read.
    """
    wanted = [name for names in transforms.require for name in names.split(";") if is_path(name)]
    for name, source in row.fields if wanted else ():
        paths = [path for path in wanted if path.startswith(f"{name}.")] if is_json_field(name) else []
        if not paths:
            continue
        with contextlib.closing(SourceFiles()) as files, contextlib.suppress(DecodeError):
            value = decode_field(name, row.read_field(source, files))
            for path in paths:
                with contextlib.suppress(KeyError):
                    follow_path(value, path[len(name) + 1 :].split("."))
                    yield path


def required_rows(
    rows: Iterable[Row | RowError], transforms: Transforms, rejected: list[RowError]
) -> Generator[Row | RowError, None, None]:
    """Yield the rows, and apply `transforms.missing` to each row without a required field.

    "error" yields a RowError instead of the row. "warn" logs the row and yields it. "skip" leaves out the row and adds
    its error to `rejected`. A RowError is also yielded instead of a row whose JSON is needed and cannot be read.

    Args:
        rows: Rows, and errors of rows that cannot be packed. The errors are yielded unchanged.
        transforms: The transforms, with the names of the required fields, as the fields are named after packing.
        rejected: Gets the errors of the rows that are left out.

    Raises:
        StorageError: An object in a store has JSON that is needed, and cannot be read.
    """
    if not transforms.require:
        yield from rows
        return
    num_missing = 0
    try:
        for row in rows:
            if isinstance(row, RowError):
                yield row
                continue
            names = packed_names([name for name, _ in row.fields], transforms)
            derived = [f"json.{name}" for name in transforms.derive if any(map(is_image_field, names))]
            try:
                lacks = transforms.lacks([*names, *derived, *_paths_in(row, transforms)])
            except RowError as unreadable:  # a JSON field
                yield unreadable
                continue
            if lacks is None:
                yield row
                continue
            problem = f"it has no {lacks.replace(';', ' or ')}; it has {', '.join(names)}"
            err = row_error(row.where, problem, "Give it one, or use --missing warn or skip.")
            if transforms.missing == "skip":
                rejected.append(err)
            elif transforms.missing == "warn":
                num_missing += 1
                if num_missing <= _SHOWN_MISSING:
                    _log.warning("%s: %s.", err.where, err.problem)
                yield row
            else:
                yield err
    finally:
        if isinstance(rows, Generator):
            rows.close()
    if num_missing > _SHOWN_MISSING:
        _log.warning("%d rows in total lack a required field.", num_missing)


def packed_names(names: Sequence[str], transforms: Transforms) -> Sequence[str]:
    """Return the sorted names that the fields of a row get when the row is packed. `names` are the old names.

    A name that depends on the bytes of the field stays unchanged. If the transforms refuse these fields, `names` is
    returned unchanged.
    """
    try:
        return transforms.field_names(names)
    except DecodeError:  # raised when the row is read
        return names


def _counted(rows: Iterable[Row | RowError], on_progress: OnProgress) -> Iterator[Row | RowError]:
    for number, row in enumerate(rows):
        if number % _BATCH_ROWS == 0:
            on_progress(Progress("reading", number, 0, None, None))
        yield row


def _check_all(
    source: Source,
    plan: Plan,
    transforms: Transforms,
    bad: list[tuple[int, RowError]],
    *,
    skip_bad: bool,
    workers: int,
    on_progress: OnProgress,
) -> None:
    """Read the files of all rows, to find rows that cannot be packed and rows with repeated images.

    With `skip_bad`, rows that cannot be packed are left out, and `bad` gets their numbers and errors. If
    `transforms.duplicates` is not "keep", each row with the images of an earlier row is added to `source.duplicates`;
    if it is "drop", this row is also left out.

    Raises:
        RowError: A row cannot be read, and `skip_bad` is False.
        WdskitError: A process was killed, or an object in a store cannot be read.
    """
    check = functools.partial(_check_rows, transforms=transforms, transform=skip_bad)
    blocks = np.frombuffer(plan.blocks, dtype=np.uint32)
    total = int(blocks.sum(dtype=np.int64)) * BLOCK_BYTES
    number = num_bytes = 0
    unreadable: list[tuple[int, RowError]] = []
    starts = range(0, len(plan), _CHECK_ROWS)
    batches = (plan.take(np.arange(start, min(start + _CHECK_ROWS, len(plan)))) for start in starts)
    with contextlib.closing(map_shards(check, batches, workers=workers)) as checked:
        for verdicts in checked:
            if isinstance(verdicts, WdskitError):
                raise verdicts
            numbered = [*enumerate(verdicts, start=number)]
            errors = [(at, verdict) for at, verdict in numbered if isinstance(verdict, RowError)]
            if errors and not skip_bad:
                raise errors[0][1]
            unreadable += errors
            plan.add_digests((at, verdict) for at, verdict in numbered if isinstance(verdict, bytes))
            num_bytes += int(blocks[number : number + len(verdicts)].sum(dtype=np.int64)) * BLOCK_BYTES
            number += len(verdicts)
            on_progress(Progress("checking", number, num_bytes, len(plan), total))
    bad += unreadable
    plan.leave_out(at for at, _ in unreadable)
    if transforms.duplicates != "keep":
        source.duplicates += plan.find_duplicates()
        if transforms.duplicates == "drop":
            plan.leave_out(duplicate.number for duplicate in source.duplicates)


def _check_rows(rows: Iterable[Row], *, transforms: Transforms, transform: bool) -> list[RowError | bytes | None]:
    """Read each row, and with `transform` also transform it. Return one result for each row.

    Returns:
        A RowError for a row that cannot be packed. Otherwise the digest of the row's images, if `transforms` searches
        for duplicates and the row has an image. Otherwise None.

    Raises:
        StorageError: An object in a store cannot be read, or was replaced.
    """
    verdicts: list[RowError | bytes | None] = []
    for row in read_ahead(rows):
        try:
            fields = row.read_fields()
            if transform:
                row.transform(fields, transforms)
        except RowError as err:
            verdicts.append(err)
        else:
            verdicts.append(image_digest(fields, transforms.image_fields) if transforms.duplicates != "keep" else None)
    return verdicts


def image_digest(fields: Iterable[tuple[str, bytes]], image_fields: Sequence[str] = ()) -> bytes | None:
    """Return the sha256 (32 bytes) of a row's image; None if the row has no image.

    `fields` has name and bytes of each field, before transforms. For several images, the result is the sha256 of their
    joined digests, in the order of `fields`. If `image_fields` is not empty, only images of these fields count.
    """
    digests = [
        hashlib.sha256(data).digest()
        for name, data in fields
        if is_image_field(name) and (not image_fields or name in image_fields)
    ]
    if len(digests) > 1:
        return hashlib.sha256(b"".join(digests)).digest()
    return digests[0] if digests else None


# Dividing the rows.


class Splitter:
    """Draws the split of each row from the row's key. `shares` has the share of each split, by name: at most 100
    splits.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._draw = make_draw(SPLIT_SEED)
        self._draws: list[bytes] = []
        self._splits = array("B")

    def add(self, key: str) -> None:
        """Add the key of the next row."""
        self._draws.append(self._draw(key))
        if len(self._draws) == _DRAWN_ROWS:
            self._choose()

    def _choose(self) -> None:
        if self._draws:
            self._splits.frombytes(choose_splits(draws_of(self._draws), self.shares).astype(np.uint8).tobytes())
            self._draws = []

    def rows_of(self, split: int, kept: Ints | None) -> Ints:
        """Return the numbers of the rows of a split, int64 (n,), sorted.

        `split` is the position of the split in `shares`, from 0. Only rows in `kept` are returned; None means all rows.
        """
        self._choose()
        splits = np.frombuffer(self._splits, dtype=np.uint8)
        if kept is None:
            return np.flatnonzero(splits == split)
        rows: Ints = kept[splits[kept] == split]
        return rows


def divide_plan(plan: Plan, *, limits: Limits, shuffle: int | None) -> tuple[Ints | None, dict[str, list[RowRange]]]:
    """Divide the rows of a plan into shards. The rows of each split are shuffled and divided separately.

    Args:
        plan: The plan with all rows.
        limits: The limits of a shard.
        shuffle: Seed of the shuffled order; None keeps the order of the source.

    Returns:
        Numbers of the rows in packing order, int64 (n,), or None for all rows in the order of the source. And the
        shards of each split, by the split's name, as places in the packing order. A split without rows has no shards.
        Without splits, there is one item with an empty name.

    Raises:
        RowError: A row is larger than `limits.max_bytes` allows.
        PackError: The rows cannot be divided into the requested number of shards.
    """
    if plan.splitter is None:
        order, spans = _divide_rows(plan, plan.kept, limits=limits, shuffle=shuffle)
        return order, {"": spans}
    orders, shards, start = [], {}, 0
    for number, name in enumerate(plan.splitter.shares):
        rows = plan.splitter.rows_of(number, plan.kept)
        if not len(rows) and limits.num_shards is not None:
            msg = f"split {name}: it has no samples, but num_shards asks for {limits.num_shards} shards."
            raise PackError(msg)
        try:
            order, spans = _divide_rows(plan, rows, limits=limits, shuffle=shuffle)
        except RowError:
            raise
        except PackError as err:
            raise PackError(f"split {name}: {err}") from err
        assert order is not None
        orders.append(order)
        shards[name] = [RowRange(start + span.start, start + span.stop, span.num_bytes) for span in spans]
        start += len(rows)
    return np.concatenate(orders), shards


def _divide_rows(
    plan: Plan, kept: Ints | None, *, limits: Limits, shuffle: int | None
) -> tuple[Ints | None, list[RowRange]]:
    """Return the packing order of the rows in `kept`, and their shards as places in this order.

    For `kept` and for the order, None means all rows in the order of the source.
    Raises RowError if a row is too large for a shard, PackError if the number of shards in `limits` is not possible.
    """
    order = kept
    if kept is not None and not len(kept):
        return kept, []
    if shuffle is not None:
        order = permutation(len(plan) if kept is None else len(kept), "pack-shuffle", shuffle)
        order = order if kept is None else kept[order]
    blocks = np.frombuffer(plan.blocks, dtype=np.uint32)
    try:
        return order, divide(blocks if order is None else blocks[order], limits)
    except RowTooLarge as err:
        problem = f"even alone in its shard it takes {err.num_bytes} bytes, more than max_bytes {limits.max_bytes}"
        where = plan[int(_rows_at(order, err.place, err.place + 1)[0])].where
        raise row_error(where, problem, "Raise --max-bytes.") from None


def _rows_at(order: Ints | None, start: int, stop: int) -> Ints:
    """Return the numbers of the rows at the places [start, stop) of the packing order; None is the source's order."""
    return np.arange(start, stop) if order is None else order[start:stop]


@dataclass(frozen=True)
class PackPlan:
    """The planned shards of a run: `wdskit pack --dry-run`.

    Attributes:
        shards: The planned shards of all parts, in order.
        num_fields: Number of samples with each field, by field name, sorted by name.
        first_key: Key of the first sample.
        last_key: Key of the last sample.
        splits: The shards of each split, by its name; empty without splits.
    """

    shards: tuple[PlannedShard, ...]
    num_fields: Mapping[str, int]
    first_key: str
    last_key: str
    splits: Mapping[str, tuple[PlannedShard, ...]] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards; 0 if the sizes are not known yet."""
        return sum(shard.num_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """A shard to fill.

    Attributes:
        path: The file to write.
        rows: The rows of the shard in order; they are iterated once.
        num_bytes: The bytes that the file will have; 0 if the size is not known.
        transforms: The transforms of the samples.
        threads: Number of samples that are read and transformed at the same time.
        sha256: Digest of the existing shard, in hex. If set, nothing is written: the rows are only compared with it.
        columns: How each column is computed, by name. The values are written next to the shard.
    """

    path: Path
    rows: Iterable[Row]
    num_bytes: int
    transforms: Transforms = UNTOUCHED
    threads: int = 1
    sha256: str | None = None
    columns: Mapping[str, ColumnSource] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardJobs:
    """The shards to fill, in order. A job is made when the iteration comes to it, because its rows take memory.

    Attributes:
        plan: The plan with all rows.
        order: Numbers of the packed rows in packing order; None for all rows in the order of the source.
        spans: The rows of each shard, as places in `order`.
        shards: Name, samples and bytes of each shard.
        splits: The shards of each split, by its name; empty without splits.
        transforms: The transforms of the samples.
        threads: Number of samples of a shard that are transformed at the same time.
        folder: The folder in which the shards are filled.
        columns: How each column is computed, by name.
    """

    plan: Plan
    order: Ints | None
    spans: Sequence[RowRange]
    shards: tuple[PlannedShard, ...]
    splits: Mapping[str, tuple[PlannedShard, ...]]
    transforms: Transforms
    threads: int
    folder: Path
    columns: Mapping[str, ColumnSource]

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.spans)

    def __iter__(self) -> Iterator[ShardJob]:
        """Yield the jobs in order."""
        for span, shard in zip(self.spans, self.shards, strict=True):
            yield ShardJob(
                path=self.folder / shard.name,
                rows=self.plan.take(_rows_at(self.order, span.start, span.stop)),
                num_bytes=shard.num_bytes,
                transforms=self.transforms,
                threads=self.threads,
                columns=self.columns,
            )

    def subset(self, numbers: Sequence[int], folder: Path) -> ShardJobs:
        """Return the jobs with these numbers, in this order, for shards in `folder`. The result has no `splits`."""
        spans = [self.spans[number] for number in numbers]
        shards = tuple(self.shards[number] for number in numbers)
        return replace(self, spans=spans, shards=shards, splits={}, folder=folder)

    def describe(self) -> PackPlan:
        """Return the planned shards, with their fields and their first and last key. There must be a shard."""
        num_fields: Counter[str] = Counter()
        for names, count in self.plan.num_fields.items():
            num_fields.update(dict.fromkeys(packed_names(names, self.transforms), count))
        first, last = (self.plan[int(_rows_at(self.order, at, at + 1)[0])] for at in (0, self.spans[-1].stop - 1))
        return PackPlan(self.shards, dict(sorted((+num_fields).items())), first.key, last.key, self.splits)
