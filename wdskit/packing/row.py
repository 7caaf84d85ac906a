"""A row is what is packed as one sample: its key, its fields, and its place for messages.

`Row.make` cleans, refuses or hashes the key, as `--keys` says. A field is bytes, or stands for bytes that are known
later: a part of a file (`SourceFiles.read`, also for `reshard`), a label that the plan numbers, or an array whose dtype
the whole column decides. `Row.encode` writes a row as two byte strings: the places, and everything
that decides the bytes of the sample. Only the second byte string enters the digest of a shard.

A bad row is a `RowError` (`bad_row`). It ends the run. With `--skip-bad` the row is left out and listed in
`rejected.jsonl` (`plan.Plan.reject` and `pack.leave_out_bad`), but not if its key is repeated (`plan.Plan.check_keys`)
or it is larger than a shard.
"""

from __future__ import annotations

import marshal
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from wdskit.codecs.fields import decode_field
from wdskit.dataset.keys import check_field, check_member_name, clean_key, hashed_key
from wdskit.errors import RowError
from wdskit.limits import MAX_READ_BYTES, MAX_USTAR_SIZE_BYTES
from wdskit.text import shorten

SAME_FIELD = {"jpeg": "jpg"}
"""Extensions that become another field name, so that all samples of one kind have one field."""

_MAX_OPEN = 128
_MAX_HELD_BYTES = (1 << 31) - 1  # of a field in memory, which marshal can write
_MARSHAL = 2  # this version writes equal values as equal bytes; later ones depend on reference counts


OnProgress = Callable[[str, int, int | None], None]
"""Called with the stage ("reading", "checking" for bad rows, or "packing"), with the number of samples that the stage
has completed, and with the number of all its samples (None if unknown).
"""


class File(NamedTuple):
    """A part of a file: the bytes of a field, read when the row is packed.

    Attributes:
        path: Path of the file.
        offset: Where the field begins in the file.
        num_bytes: Size of the field.
        file_bytes: Size of the file when the row was made.
        mtime_ns: Modification time of the file when the row was made.
    """

    path: str
    offset: int
    num_bytes: int
    file_bytes: int
    mtime_ns: int

    @classmethod
    def whole(cls, path: str) -> Self:
        """Return the whole file `path` as a field.

        Raises:
            OSError: The file does not exist, or is a folder, a pipe or a device.
        """
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a file", path)
        return cls(path, 0, status.st_size, status.st_size, status.st_mtime_ns)


class Label(NamedTuple):
    """The class of a sample: a whole number, or a name that the plan numbers."""

    value: int | str


class LabelledJson(bytes):
    """JSON in which a NUL stands for the number of the row's class. No other NUL can be in JSON."""


class Values(bytes):
    """An `npy` file of a column of arrays. The plan gives all arrays of the column one dtype."""

    @property
    def array(self) -> NDArray[Any]:
        """The array."""
        return np.asarray(decode_field("npy", self))


Field: TypeAlias = bytes | File | Label
_KINDS = (bytes, LabelledJson, Values)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a source becomes rows.

    Attributes:
        image: Column with the image of a table's row; None for the first of `records.IMAGE_COLUMNS` that it has.
        key: Column with the key; None for the column `key`, else the path of the image or of another file, else the
            number of the row.
        fields: Column from which each further field is made, by field name.
        keys: "clean", "given" or "hashed", as `Row.make` takes it.
        sidecars: Extensions of files that belong to the main file of the same name: `json`, `seg.png`.
        files: Extensions of main files in place of images: `wav`.
        images: Folder of the images that COCO annotations name; None for the folder of the annotations.
    """

    image: str | None = None
    key: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    keys: Literal["clean", "given", "hashed"] = "clean"
    sidecars: Sequence[str] = ()
    files: Sequence[str] = ()
    images: str | None = None


class Row(NamedTuple):
    """One sample to pack.

    Attributes:
        key: Key of the sample.
        fields: Field by name, sorted by name, which is the order of the members in the shard.
        where: Place of the row, for messages: a file, or a table and its line.
        is_cleaned: True if the key was changed to one that all readers accept.
    """

    key: str
    fields: dict[str, Field]
    where: str
    is_cleaned: bool = False

    @classmethod
    def make(cls, key: str, fields: Mapping[str, Field], where: str, *, keys: str, source: str) -> Self:
        """Return a row whose key and fields every reader reads back unchanged.

        Args:
            key: The key as the source has it.
            fields: Field by name.
            where: Place of the row, for messages.
            keys: "clean" replaces odd characters of a key by `_`, "given" refuses them, "hashed" makes the key a hash
                of `source` and the key.
            source: Name of the file or folder that the row comes from, without its place on this machine.

        Raises:
            KeyRuleError: The key or a field name is invalid.
            ValueError: A field has 8 GiB or more, or 2 GiB of bytes in memory, or the row has no field.
        """
        if not fields:
            raise ValueError("it has no field")
        given = key
        if keys == "hashed":
            key = hashed_key(f"{source}/{given}")
        elif keys == "clean":
            key = clean_key(given)
        check_member_name(key, max(fields, key=len))
        for name, data in fields.items():
            check_field(name)
            most = MAX_USTAR_SIZE_BYTES if type(data) is File else _MAX_HELD_BYTES
            if size_of(data) > most:
                raise ValueError(f"its field {name!r} has {size_of(data)} bytes, more than {most}")
        return cls(key, dict(sorted(fields.items())), where, key != given)

    def encode(self) -> tuple[bytes, bytes]:
        """Return (places, content) of a row as bytes. Rows with equal content give equal samples: a file counts
        as the same, also under another path, if its size and its modification time are the same.
        """
        paths = [data.path for data in self.fields.values() if isinstance(data, File)]
        content = self.key, [(name, *_encode(data)) for name, data in self.fields.items()]
        return marshal.dumps([self.where, *paths], _MARSHAL), marshal.dumps(content, _MARSHAL)

    @classmethod
    def decode(cls, places: bytes, content: bytes) -> Self:
        """Return the row that `encode` encoded. `is_cleaned` is False."""
        where, *paths = marshal.loads(places)  # noqa: S302 (the run's own file, in a folder that it has locked)
        key, encoded = marshal.loads(content)  # noqa: S302
        at = iter(paths)
        fields: dict[str, Field] = {}
        for name, value, *more in encoded:
            if len(more) == 3:
                fields[name] = File(next(at), value, *more)
            else:
                fields[name] = _KINDS[more[0]](value) if more else Label(value)
        return cls(key, fields, where)


def _encode(data: Field) -> tuple[Any, ...]:
    """Return offset, sizes and time of a file; a label; or bytes and their kind."""
    if isinstance(data, File):
        return data[1:]
    return (data.value,) if isinstance(data, Label) else (bytes(data), _KINDS.index(type(data)))


def bad_row(where: str, problem: str) -> RowError:
    """Return the error of the row at `where`, shortened if `problem` quotes a large value."""
    where = where.replace("\n", "\\n")
    problem = shorten(problem.removeprefix(f"{where}: ").rstrip("."))
    return RowError(f"{where}: {problem}.", where=where, problem=problem)


def field_of(path: str) -> str:
    """Return the field name of a file: its extension in lower case, `jpg` for `jpeg`, or "" without an extension."""
    _, dot, extension = path.rpartition("/")[2].lstrip(".").rpartition(".")  # os.path.splitext takes 3 times as long
    extension = extension.lower() if dot else ""
    return SAME_FIELD.get(extension, extension)


def size_of(data: Field) -> int:
    """Return the bytes of a field. A label counts as one byte: every number fits the same block of a tar."""
    if isinstance(data, File):
        return data.num_bytes
    return 1 if isinstance(data, Label) else len(data)


class SourceFiles:
    """Reads fields from files. The last 128 files stay open until `close`, because a tar has many fields."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def close(self) -> None:
        """Close all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def read(self, part: File) -> bytes:
        """Return the bytes of a field.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file changed since the row was made.
        """
        path, offset, num_bytes, file_bytes, mtime_ns = part
        fd = self._fds.get(path)
        if fd is None:
            if len(self._fds) == _MAX_OPEN:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        data = b""  # one read may return less: on a network disk, or over `MAX_READ_BYTES`
        while more := os.pread(fd, min(num_bytes - len(data), MAX_READ_BYTES), offset + len(data)):
            data += more
        status = os.fstat(fd)
        if (len(data), status.st_size, status.st_mtime_ns) != (num_bytes, file_bytes, mtime_ns):
            raise ValueError(f"{path}: the file was changed after packing began")
        return data
