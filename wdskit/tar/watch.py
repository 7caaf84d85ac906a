"""Telling somebody where the data of each member lie, while somebody else reads the members."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wdskit.tar.header import padded
from wdskit.tar.reader import TarReader
from wdskit.tar.window import size_of

OnMember = Callable[[str, int, bytes], None]
"""Told of each member: its name, the offset of its data, and the data (or `Passed`)."""


class WatchedReader:
    """The members of a `TarReader`, each told before it is passed on.

    Args:
        reader: Gives them.
        on_member: Who is told.
    """

    def __init__(self, reader: TarReader, on_member: OnMember) -> None:
        self._reader = reader
        self._on_member = on_member

    @property
    def stop(self) -> int:
        """As the reader's."""
        return self._reader.stop

    def __iter__(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield what the reader yields, and raise what it raises."""
        for name, start, data in self._reader:
            self._on_member(name, self._reader.offset - padded(size_of(data)), data)
            yield name, start, data
