"""What is packed: the rows of a source, and which of them can be packed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from wdskit.errors import PackError, RowError
from wdskit.packing.fill import check_rows
from wdskit.packing.folder import read_folder
from wdskit.packing.rows import Row, key_taken, python_rows
from wdskit.packing.tables import SUFFIXES, Manifest

_SHOWN_REJECTS = 3


class Progress(NamedTuple):
    """How far packing is.

    Attributes:
        stage: What is done now: rows are listed ("reading"), with `skip_bad` their files are checked, in an addition
            their keys are compared with those that are there, and shards are written ("packing").
        num_samples: Samples that this stage is done with.
        num_bytes: Bytes that they take in their shards.
        total_samples: Samples in all, None where that is unknown.
        total_bytes: Bytes that all take, None where that is unknown.
    """

    stage: Literal["reading", "checking", "comparing", "packing"]
    num_samples: int
    num_bytes: int
    total_samples: int | None
    total_bytes: int | None


Tell = Callable[[Progress], None]


@dataclass
class Source:
    """Rows, and what is known of where they come from.

    Attributes:
        name: For messages.
        rows: Each row, or what is wrong with it.
        is_stream: The rows can be read once only, and are read while shards are written.
        is_held: Whoever gave the rows has them in memory, so that a plan of them need not go to disk.
        classes: Number of each class by name; empty where the source has none.
        num_other: Files of an image folder that are no images.
        rejected: The rows that were left out so far.
    """

    name: str
    rows: Iterable[Row | RowError]
    is_stream: bool = False
    is_held: bool = False
    classes: dict[str, int] = field(default_factory=dict)
    num_other: int = 0
    rejected: list[RowError] = field(default_factory=list)

    def nothing(self) -> PackError:
        """The error for a source without a row that can be packed."""
        msg = f"{self.name}: there is nothing to pack"
        if not self.rejected:
            return PackError(f"{msg}.")
        first = "\n".join(f"  {err.where}: {err.problem}" for err in self.rejected[:_SHOWN_REJECTS])
        return PackError(f"{msg}: none of its {len(self.rejected)} rows is good. The first are bad because:\n{first}")


def find_source(source: Any, *, keys: str, image_column: str | None, key_column: str | None) -> Source:
    """What kind of source this is, and its rows.

    Raises:
        PackError: It is not there, of no known kind, or an option does not belong to it.
    """
    if not isinstance(source, (str, os.PathLike)):
        if image_column is not None or key_column is not None:
            raise PackError("the rows: image and key columns belong to a manifest, not to rows from Python.")
        if not isinstance(source, Iterable):
            raise PackError(f"{source!r} is no source. Give a folder, a manifest, or an iterable of rows.")
        is_stream = not isinstance(source, Sequence)
        return Source("the rows", python_rows(source, keys=keys), is_stream=is_stream, is_held=not is_stream)
    path = os.fsdecode(source)
    if not os.path.exists(path):
        raise PackError(f"{path or 'an empty path'}: there is no such folder or file.")
    if os.path.isfile(path) and path.lower().endswith(SUFFIXES):
        return Source(path, Manifest(path, image_column, key_column).rows(keys=keys))
    if not os.path.isdir(path):
        msg = f"{path}: this is neither a folder nor a manifest ({', '.join(SUFFIXES)})."
        raise PackError(f"{msg}\n  Write it as one of these, or give its rows from Python.")
    if image_column is not None or key_column is not None:
        raise PackError(f"{path}: image and key columns belong to a manifest ({', '.join(SUFFIXES)}).")
    folder = read_folder(path)
    return Source(path, folder.rows(keys=keys), classes=folder.classes, num_other=folder.num_other)


def streamed_rows(source: Source, *, skip_bad: bool) -> Generator[Row, None, None]:
    """The rows of a stream that can be packed, each with a key of its own, while they come.

    Raises:
        RowError: A row is bad, and bad rows are not to be skipped; or two rows have one key.
    """
    places: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        # What an error leaves suspended is closed at once, not when its traceback goes: a manifest is open in it.
        if isinstance(source.rows, Generator):
            stack.callback(source.rows.close)
        for row in map(_checked, source.rows) if skip_bad else source.rows:
            if isinstance(row, Row):
                if row.key in places:
                    raise key_taken(row, places[row.key])
                places[row.key] = row.where
                yield row
            elif skip_bad:
                source.rejected.append(row)
            else:
                raise row


def _checked(row: Row | RowError) -> Row | RowError:
    """The row, or what is wrong with it."""
    return row if isinstance(row, RowError) else check_rows([row])[0] or row
