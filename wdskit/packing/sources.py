"""What is packed: the rows of a source, and which of them can be packed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from wdskit.errors import PackError, RowError, WdskitError
from wdskit.packing.fill import check_rows
from wdskit.packing.plan import row_bytes
from wdskit.packing.rows import Row, row_error
from wdskit.shards.parallel import map_shards

_CHECK_ROWS = 256  # rows that a process checks at a time
_TELL_ROWS = 1000
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
        classes: Number of each class by name; empty where the source has none.
        reader: What they come from; None where that has nothing to tell.
        rejected: The rows that `good_rows` has left out so far.
    """

    name: str
    rows: Iterable[Row | RowError]
    is_stream: bool = False
    classes: dict[str, int] = field(default_factory=dict)
    reader: object = None
    rejected: list[RowError] = field(default_factory=list)

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


def good_rows(source: Source, *, skip_bad: bool, workers: int, tell: Tell) -> Iterator[Row]:
    """The rows that can be packed, each with a key of its own.

    Raises:
        RowError: A row is bad, and bad rows are not to be skipped; or two rows have one key.
    """
    places: dict[str, str] = {}
    # What an error leaves suspended is closed at once, not when its traceback goes: a manifest is open in it.
    with contextlib.closing(_good(source, skip_bad=skip_bad, workers=workers, tell=tell)) as rows:
        for row in rows:
            if row.key in places:
                problem = f"its key {row.key!r} is that of {places[row.key]} too"
                raise row_error(row.where, problem, "Keys must be unique. Rename one, or give each row a key.")
            places[row.key] = row.where
            yield row


def _good(source: Source, *, skip_bad: bool, workers: int, tell: Tell) -> Generator[Row, None, None]:
    """The rows that can be packed; bad ones are raised, or noted as rejected."""
    with contextlib.ExitStack() as stack:
        if isinstance(source.rows, Generator):
            stack.callback(source.rows.close)
        rows = source.rows if source.is_stream else _counted(source.rows, tell)
        if skip_bad:
            rows = map(_checked, rows) if source.is_stream else _all_checked(list(rows), workers, tell)
        for row in rows:
            if isinstance(row, Row):
                yield row
            elif skip_bad:
                source.rejected.append(row)
            else:
                raise row


def _counted(rows: Iterable[Row | RowError], tell: Tell) -> Iterator[Row | RowError]:
    for number, row in enumerate(rows):
        if number % _TELL_ROWS == 0:
            tell(Progress("reading", number, 0, None, None))
        yield row


def _checked(row: Row | RowError) -> Row | RowError:
    """The row, or what is wrong with it."""
    return row if isinstance(row, RowError) else check_rows([row])[0] or row


def _all_checked(rows: list[Row | RowError], workers: int, tell: Tell) -> Iterator[Row | RowError]:
    """The rows, bad ones replaced by their errors, read in several processes."""
    good = [row for row in rows if isinstance(row, Row)]
    verdicts = itertools.chain.from_iterable(_verdicts(good, workers, tell))
    return (row if isinstance(row, RowError) else next(verdicts) or row for row in rows)


def _verdicts(rows: list[Row], workers: int, tell: Tell) -> Iterator[list[RowError | None]]:
    """What is wrong with each row, in pieces."""
    pieces = [rows[at : at + _CHECK_ROWS] for at in range(0, len(rows), _CHECK_ROWS)]
    sizes = [sum(map(row_bytes, piece)) for piece in pieces]
    num_rows = num_bytes = 0
    for piece, size, result in zip(pieces, sizes, map_shards(check_rows, pieces, workers=workers), strict=True):
        if isinstance(result, WdskitError):
            raise result
        num_rows += len(piece)
        num_bytes += size
        tell(Progress("checking", num_rows, num_bytes, len(rows), sum(sizes)))
        yield result
