"""Whether a file is still the one that was read before: its size, its time of change and its inode; of an object its
ETag.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from typing_extensions import Self


class FileIdentity(NamedTuple):
    """Identifies a file: it differs after the file was replaced or rewritten."""

    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | str | os.PathLike[str]) -> Self:
        """The identity of an open file, by its descriptor, or of one by its path; `OSError` without one."""
        status = os.stat(file)  # noqa: PTH116 (a descriptor too)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, file: int | str) -> None:
        """Raise `FileChanged` if a file was replaced or rewritten, `OSError` if it does not exist."""
        now = self.of(file)
        if now.num_bytes != self.num_bytes:
            raise FileChanged(f"the file has {now.num_bytes} bytes now, but had {self.num_bytes} when packing began")
        if now != self:
            raise FileChanged("the file was replaced or rewritten after packing began")

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Open the file, and compare its identity before and after the block. Raises as `check` does."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.check(fd)
            yield fd
            self.check(fd)
        finally:
            os.close(fd)


class FileChanged(ValueError):
    """A file is not the one that was read before."""
