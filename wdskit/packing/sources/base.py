"""The class of all sources, which yields rows."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from wdskit.errors import DecodeError, KeyRuleError, RowError
from wdskit.packing.row import Field, Reading, Row, bad_row, make_row
from wdskit.packing.sources.records import keep_key


class Source(ABC):
    """A source of rows. It knows no option of the run.

    Args:
        path: Path, URL or pattern of the source; "" for rows from Python.
        how: How it becomes rows.

    Attributes:
        copies: Whether fields are copied as they are, also `cls`.
        keeps_keys: Whether `json` gets the key of the source, if the key is changed. Other sources have the path there.
        classes: Class names of the source's labels in the order of their numbers; None if its rows name them.
        num_other: Files or members so far that belong to no row.
        notes: Sentences for the user, complete after the last row.
    """

    copies: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = False

    def __init__(self, path: str, how: Reading) -> None:
        self.path = path
        self.how = how
        self.name = os.path.basename(os.path.normpath(path)) if path else ""
        self.classes: Sequence[str] | None = None
        self.num_other = 0
        self.notes: list[str] = []

    @abstractmethod
    def rows(self) -> Iterator[Row | RowError]:
        """Yield each row, or the error of a row that cannot be packed, in an order that depends on the source alone.

        Raises:
            PackError: The source cannot be read as a whole.
        """

    def row(
        self, where: str, make: Callable[..., tuple[str, dict[str, Field]]], *args: Any, name: str | None = None
    ) -> Row | RowError:
        """Return the row at `where` with the key and the fields that `make(*args)` returns. Any error of its values
        becomes the error of this row.

        `name` is the name of the file that holds the row; None for the name of the source.
        """
        try:
            key, fields = make(*args)
            row = make_row(key, fields, where, keys=self.how.keys, source=self.name if name is None else name)
            return keep_key(row, key) if self.keeps_keys else row
        except KeyError as err:
            return bad_row(where, f"it has no {err}")
        except OSError as err:
            return bad_row(where, f"{err.filename}: {err.strerror}")
        except (DecodeError, KeyRuleError, RecursionError, TypeError, ValueError) as err:
            return bad_row(where, str(err))
