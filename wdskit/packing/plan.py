"""The plan of a run: all rows of a source in one file, the spool, and the rows of each shard. It is complete before the
first shard is filled. A killed run that starts again, also with other options or rows, makes a new plan, and keeps each
filled shard whose digest is in it (`pack.fill_all`). But a local run that was killed during its commit is completed
first, as it was (`Folder.roll_forward`); another run then finds another data set, which is an error.

From the spool follow: unique keys (`check_keys`), the numbers of class names and one dtype for each `npy` column
(`read`), the splits and the division into shards (`divide`), and the digest of a job, which identifies everything that
decides the bytes of its shard (`digest`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from wdskit.codecs.fields import encode_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.keys import find_repeated, hash_key
from wdskit.errors import PackError, RowError
from wdskit.files import DISK, TEMP_PREFIX, TEMP_SUFFIX, Disk, write_all
from wdskit.limits import BLOCK_BYTES
from wdskit.order.base import permutation
from wdskit.packing.labels import NO_CLASS, ClassNames, read_label
from wdskit.packing.row import File, Label, LabelledJson, OnProgress, Row, SourceFiles, Values, bad_row, size_of
from wdskit.shards.shares import SPLIT_SEED, choose_splits, make_draw
from wdskit.tar.writer import END_BYTES, member_bytes
from wdskit.text import plural

Ints = NDArray[np.int64]

MAX_SAMPLES = 10_000  # the default limits of a shard
MAX_BYTES = 1_000_000_000
NO_LIMIT = 1 << 62

_HEAD = struct.Struct("<16sI")  # of a record: digest of the content, size of the places; then places and content
_DIGEST_BYTES = 16
_FLUSH_BYTES = 1 << 20
_REPORT_ROWS = 1000
_MAX_DIGITS = 20  # of a class number, with its sign


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a spool, which every process that sees the file can read.

    Attributes:
        path: The spool.
        starts: Where each record begins, int64 (n,).
        stops: Where each record ends, int64 (n,).
    """

    path: str
    starts: Ints
    stops: Ints

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. OSError: The spool cannot be read."""
        with open(self.path, "rb") as file:
            for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
                file.seek(start)
                data = file.read(stop - start)
                if len(data) < stop - start:
                    raise OSError(0, "the rows of this run were cut short", self.path)
                content = _HEAD.size + _HEAD.unpack_from(data)[1]
                yield Row.decode(data[_HEAD.size : content], data[content:])


class PlannedShard(NamedTuple):
    """One shard to write.

    Attributes:
        name: File name.
        numbers: Numbers of its rows in the spool, in order, int64 (n,).
        num_bytes: Bytes of the file, before samples are changed.
        digest: 32 hex digits that identify everything that decides the bytes of the shard.
    """

    name: str
    numbers: Ints
    num_bytes: int
    digest: str

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.numbers)


class Plan:
    """The rows of a source. `close` removes the spool.

    Args:
        folder: Folder for the spool.
        shares: Share of each split by its name; empty for no splits.
        skips_bad: Whether bad rows are left out; otherwise the first of them is an error.
        disk: Performs the file operations.

    Attributes:
        class_numbers: Class number of each class name: as in the allowed classes, or in sorted order of the UTF-8 bytes
            of the names; complete after `read`.
        dtypes: Dtype of each `npy` column.
        fields: Names of all fields.
        rejected: The error of each row that is left out, by its number. If the row could not be read, or had an invalid
            label, an empty row keeps its number in the spool.
        num_cleaned: Rows whose keys were changed.
    """

    def __init__(self, folder: Path, shares: Mapping[str, Fraction], *, skips_bad: bool, disk: Disk = DISK) -> None:
        self._path = folder / f"{TEMP_PREFIX}rows.{secrets.token_hex(4)}{TEMP_SUFFIX}"
        self._disk = disk
        self._fd = disk.open(self._path)
        self._pending = bytearray()
        self._ends, self._blocks, self._hashes = array("q", [0]), array("I"), array("Q")
        self._shares, self._draws, self._draw = shares, bytearray(), make_draw(SPLIT_SEED)
        self._skips_bad = skips_bad
        self._unsure: list[int] = []  # rows whose blocks depend on the digits of their class number
        self._first_label: tuple[Label, str] | None = None
        self._files = SourceFiles()
        self.class_numbers: dict[str, int] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.fields: set[str] = set()
        self.rejected: dict[int, RowError] = {}
        self.num_cleaned = 0

    def close(self) -> None:
        """Remove the spool."""
        self._files.close()
        self._disk.close(self._fd)
        self._disk.remove(self._path)

    def __len__(self) -> int:
        """Return the number of rows in the spool, including rows that are left out."""
        return len(self._blocks)

    def reject(self, number: int, err: RowError) -> None:
        """Leave out a row. RowError: Bad rows are not left out, so `err` is raised."""
        if not self._skips_bad:
            raise err
        self.rejected[number] = err

    def read(
        self, rows: Iterable[Row | RowError], classes: ClassNames | None, *, reads_labels: bool, on_progress: OnProgress
    ) -> None:
        """Write all rows to the spool.

        Args:
            rows: The rows. An error stands for a bad row.
            classes: The allowed classes; None numbers the names of all rows in sorted order.
            reads_labels: Whether the field `cls` is a label; False copies it.
            on_progress: Called from time to time.

        Raises:
            RowError: A row cannot be packed.
            OSError: The spool cannot be written.
        """
        dtypes: dict[str, set[np.dtype[Any]]] = {}
        names: set[str] = set()
        for given in rows:
            if len(self) % _REPORT_ROWS == 0:
                on_progress("reading", len(self), None)
            row = self._with_label(given, classes) if reads_labels and isinstance(given, Row) else given
            if isinstance(row, RowError):
                self.reject(len(self), row)
                row = Row("", {}, row.where)
            for name, data in row.fields.items():
                if type(data) is Label and isinstance(data.value, str):
                    names.add(data.value)
                elif type(data) is Values:
                    dtypes.setdefault(name, set()).add(data.array.dtype)
            self._add(row)
        self._flush()
        numbers = classes.numbers if classes else {name: at for at, name in enumerate(sorted(names, key=str.encode))}
        self.class_numbers = dict(numbers) if CLASS_FIELD in self.fields else {}
        self.dtypes = {name: np.result_type(*found) for name, found in dtypes.items()}
        has_mixed = any(len(found) > 1 for found in dtypes.values())
        changed = np.arange(len(self)) if has_mixed else np.array(self._unsure, np.int64)
        for number, row in zip(changed.tolist(), self.rows(changed), strict=True):
            try:
                self._count_blocks(number, with_dtypes(row, self.dtypes))
            except RowError as err:
                self.reject(number, err)

    def _with_label(self, row: Row, classes: ClassNames | None) -> Row | RowError:
        """Return the row with a `Label` in place of the bytes or the file of its field `cls`, without a blank `cls`. Of
        `classes`, the label is a name: an append that brings the first classes has the same rows when it runs again.

        Return an error if it is not a label, is not one of `classes`, or is a name where others are numbers.
        """
        data = row.fields.get(CLASS_FIELD)
        if data is None:
            return row
        try:
            value = self._files.read(data) if isinstance(data, File) else data
            label = value if isinstance(value, Label) else read_label(value)
            if label is not None and classes is not None:
                label = classes.named(label)
        except (OSError, ValueError) as err:
            return bad_row(row.where, f"its field {CLASS_FIELD!r}: {err}")
        if label is None:
            return row._replace(fields={name: data for name, data in row.fields.items() if name != CLASS_FIELD})
        if label.value != NO_CLASS:
            first, place = self._first_label = self._first_label or (label, row.where)
            if type(label.value) is not type(first.value):
                problem = f"labels are all numbers or all names, but its label is {label.value!r} after {first.value!r}"
                return bad_row(row.where, f"{problem} ({place}). If all are names, list them in --classes FILE")
        return row if label is data else row._replace(fields={**row.fields, CLASS_FIELD: label})

    def _add(self, row: Row) -> None:
        places, content = row.encode()
        self.fields.update(row.fields)
        digest = xxhash.xxh3_128_digest(content)
        self._pending += _HEAD.pack(digest, len(places))
        self._pending += places
        self._pending += content
        self._ends.append(self._ends[-1] + _HEAD.size + len(places) + len(content))
        self._blocks.append(sum([member_bytes(size_of(data)) for data in row.fields.values()]) // BLOCK_BYTES)
        labelled = row.fields.get("json")
        if type(labelled) is LabelledJson and -len(labelled) % BLOCK_BYTES < _MAX_DIGITS:
            self._unsure.append(len(self) - 1)
        self._hashes.append(int.from_bytes(hash_key(row.key), "little"))
        if self._shares:
            self._draws += self._draw(row.key)
        self.num_cleaned += row.is_cleaned
        if len(self._pending) > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        write_all(self._fd, memoryview(self._pending), self._disk)
        self._pending = bytearray()

    def _count_blocks(self, number: int, row: Row) -> None:
        """Count the blocks of a row again, where the dtype of a column or the class number decides them."""
        label = row.fields.get(CLASS_FIELD)
        value = label.value if isinstance(label, Label) else 0
        more = len(str(self.class_numbers[value] if isinstance(value, str) else value)) - 1
        sizes = [size_of(data) + (more if type(data) is LabelledJson else 0) for data in row.fields.values()]
        self._blocks[number] = sum(map(member_bytes, sizes)) // BLOCK_BYTES

    def check_keys(self, existing: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Raise RowError if two rows have one key, or if a row has the key of an existing sample. `existing` returns
        the place and the key of each existing sample.
        """
        hashes = np.frombuffer(self._hashes, np.uint64)
        others = np.fromiter((int.from_bytes(hash_key(key), "little") for _, key in existing()), np.uint64)
        repeated = find_repeated(hashes[self.kept] if self.rejected else hashes, others)
        first_with: dict[str, int] = {}
        for number in sorted({*np.flatnonzero(np.isin(hashes, repeated)).tolist()} - self.rejected.keys()):
            row = self.row(number)
            earlier = first_with.setdefault(row.key, number)
            places = (place for place, key in existing() if key == row.key)
            place = self.row(earlier).where if earlier != number else next(places, None)
            if place is not None:
                raise bad_row(row.where, f"its key {row.key!r} is also the key of {place}")

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows of the spool in shards, before changes."""
        return int(np.frombuffer(self._blocks, np.uint32).sum(dtype=np.int64)) * BLOCK_BYTES

    @property
    def kept(self) -> Ints:
        """Numbers of the rows that are not left out, int64 (n,)."""
        numbers = np.arange(len(self))
        return np.delete(numbers, sorted(self.rejected)) if self.rejected else numbers

    def rows(self, numbers: Ints) -> Rows:
        """Return the rows with these numbers, int64 (n,), in this order."""
        ends = np.frombuffer(self._ends, np.int64)
        return Rows(str(self._path), ends[numbers], ends[numbers + 1])

    def row(self, number: int) -> Row:
        """Return one row."""
        return next(iter(self.rows(np.array([number]))))

    def digest(self, numbers: Ints, options: bytes) -> str:
        """Return the digest of a job, 32 hex digits that identify the bytes of its shard: of the options, and of the
        content of its rows in order. The digest of all rows identifies a run.

        Raises:
            OSError: The spool cannot be read.
        """
        digest = hashlib.sha256(options)
        with self._path.open("rb") as file:
            for number in numbers:
                digest.update(os.pread(file.fileno(), _DIGEST_BYTES, self._ends[number]))
        return digest.hexdigest()[:32]

    def divide(
        self, limits: Limits, names: Callable[[str, int], str], *, shuffle: int | None, options: bytes, least: int = 1
    ) -> dict[str, list[PlannedShard]]:
        """Divide the rows into shards. Call it once, after all checks of keys.

        Args:
            limits: The limits of a shard.
            names: Takes the name of a split and the number of a shard in it, and returns the shard's file name.
            shuffle: Seed of the order of the rows; None keeps the order of the source.
            options: All options that decide the bytes of a shard, for its digest.
            least: The least number of shards of a split, without `limits.num_shards`: 0 if a split may get no row.

        Returns:
            The shards of each split, in order; without splits, of the split "".

        Raises:
            RowError: A row is larger than `max_bytes` allows.
            PackError: A split, or the whole, has fewer rows than shards.
        """
        self._hashes = array("Q")  # freed: divided arrays take as much
        parts = {"": self.kept}
        if self._shares:
            chosen = choose_splits(np.frombuffer(self._draws, "<u8"), self._shares)
            chosen[[*self.rejected]] = -1
            parts = {name: np.flatnonzero(chosen == number) for number, name in enumerate(self._shares)}
            del chosen, self._draws  # 160 MB for ten million rows
        divided = {}
        for split, part in parts.items():
            if len(part) < (num_shards := limits.num_shards or least):
                where = f"split: {split}" if split else "num_shards"
                raise PackError(f"{where}: {len(part)} samples cannot fill {plural(num_shards, 'shard')}.")
            numbers = part if shuffle is None else part[permutation(len(part), "pack-shuffle", shuffle)]
            divided[split] = [
                PlannedShard(names(split, at), rows, size, self.digest(rows, options))
                for at, (rows, size) in enumerate(self._cut(numbers, limits))
            ]
        return divided

    def _cut(self, numbers: Ints, limits: Limits) -> Iterator[tuple[Ints, int]]:
        """Yield the rows of each shard, and the bytes of its file."""
        ends = np.frombuffer(self._blocks, np.uint32)[numbers].astype(np.int64)
        np.cumsum(ends, out=ends)  # in place: `dtype=` would double the memory
        max_blocks = (limits.max_bytes - END_BYTES) // BLOCK_BYTES
        start = done = at = 0
        while start < len(ends):
            most = limits.max_samples
            if limits.num_shards is not None:
                most = -(-(len(ends) - start) // (limits.num_shards - at))  # rounded up
            stop = start + int(ends[start : start + most].searchsorted(done + max_blocks, side="right"))
            size = (int(ends[max(start, stop - 1)]) - done) * BLOCK_BYTES + END_BYTES
            if stop == start:
                problem = f"even alone in its shard it takes {size} bytes, more than max_bytes {limits.max_bytes}"
                raise bad_row(self.row(int(numbers[start])).where, problem)
            yield numbers[start:stop], size
            start, done, at = stop, int(ends[stop - 1]), at + 1


class Limits(NamedTuple):
    """The largest allowed size of a shard, and the number of shards.

    Attributes:
        max_samples: Most samples in a shard.
        max_bytes: Most bytes of a shard's file, with headers, padding and end marker; `NO_LIMIT` for none, as
            for samples that are changed, whose sizes are not known beforehand.
        num_shards: Number of shards, equal within one sample, in place of limits; None for as many as the limits ask.
    """

    max_samples: int
    max_bytes: int
    num_shards: int | None


def with_dtypes(row: Row, dtypes: Mapping[str, np.dtype[Any]]) -> Row:
    """Return the row with the arrays of its `npy` columns in the dtypes of the columns.

    Raises:
        RowError: A whole number would be rounded to a float.
    """
    fields = row.fields
    for name, dtype in dtypes.items():
        data = fields.get(name)
        if type(data) is Values and (given := data.array).dtype != dtype:
            array = given.astype(dtype)
            if not np.array_equal(array.astype(given.dtype), given, equal_nan=True):
                problem = f"its field {name!r} has whole numbers that would be rounded: other rows have fractions"
                raise bad_row(row.where, problem)
            fields = {**fields, name: Values(encode_field("npy", array))}
    return row if fields is row.fields else row._replace(fields=fields)
