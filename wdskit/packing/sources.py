"""What is packed: the rows of a source, and which of them can be packed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from wdskit.errors import PackError, RowError
from wdskit.packing.duplicates import Duplicate
from wdskit.packing.rows import Row
from wdskit.packing.treatment import Treatment

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
        kind: What kind of source it is, for people.
        is_stream: The rows can be read once only, and are read while shards are written.
        is_held: Whoever gave the rows has them in memory, so that a plan of them need not go to disk.
        classes: Number of each class by name; empty where the source has none.
        reader: What they come from; None where that has nothing to tell.
        rejected: The rows that were left out so far.
        duplicates: The rows whose images an earlier one has, where that was asked for.
    """

    name: str
    rows: Iterable[Row | RowError]
    kind: str = ""
    is_stream: bool = False
    is_held: bool = False
    classes: dict[str, int] = field(default_factory=dict)
    reader: object = None
    rejected: list[RowError] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)

    @property
    def num_other(self) -> int:
        """Files of a folder, or members of archives, that are in no row so far."""
        return getattr(self.reader, "num_other", 0)

    def nothing(self) -> PackError:
        """The error for a source without a row that can be packed."""
        msg = f"{self.name}: there is nothing to pack"
        if not self.rejected:
            return PackError(f"{msg}.")
        first = "\n".join(f"  {err.where}: {err.problem}" for err in self.rejected[:_SHOWN_REJECTS])
        return PackError(f"{msg}: none of its {len(self.rejected)} rows is good. The first are bad because:\n{first}")


def streamed_rows(source: Source, treatment: Treatment, *, skip_bad: bool) -> Generator[Row, None, None]:
    """The rows of a stream that can be packed, while they come.

    Raises:
        RowError: A row is bad, and bad rows are not to be skipped.
    """
    with contextlib.ExitStack() as stack:
        # What an error leaves suspended is closed at once, not when its traceback goes: a manifest is open in it.
        if isinstance(source.rows, Generator):
            stack.callback(source.rows.close)
        for row in (_checked(row, treatment) for row in source.rows) if skip_bad else source.rows:
            if isinstance(row, Row):
                yield row
            elif skip_bad:
                source.rejected.append(row)
            else:
                raise row


def _checked(row: Row | RowError, treatment: Treatment) -> Row | RowError:
    """The row, or what is wrong with it."""
    if isinstance(row, Row):
        try:
            row.read(treatment)
        except RowError as err:
            return err
    return row
