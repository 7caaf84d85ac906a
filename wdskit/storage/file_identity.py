"""Detect that a file was replaced or rewritten: compare its size, its modification time and its inode."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from typing_extensions import Self


class FileIdentity(NamedTuple):
    """Size in bytes, modification time in ns, and inode of a file. A replaced or rewritten file differs in one."""

    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int | str | os.PathLike[str]) -> Self:
        """Return the identity of a file, given by descriptor or path. Raises OSError if the file does not exist."""
        status = os.stat(file)  # noqa: PTH116 (a descriptor too)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def check(self, file: int | str) -> None:
        """Check that a file, given by descriptor or path, has this identity.

        Raises:
            FileChanged: The file was replaced or rewritten.
            OSError: The file does not exist.
        """
        now = self.of(file)
        if now.num_bytes != self.num_bytes:
            raise FileChanged(f"the file has {now.num_bytes} bytes now, but had {self.num_bytes} when packing began")
        if now != self:
            raise FileChanged("the file was replaced or rewritten after packing began")

    @contextlib.contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Open the file `path`, yield its descriptor, and close the descriptor after the block.

        The open file is checked before the block and, if the block raises no error, after the block.

        Raises:
            FileChanged: The file was replaced before it was opened, or rewritten before the end of the block.
            OSError: The file does not exist, or may not be read.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.check(fd)
            yield fd
            self.check(fd)
        finally:
            os.close(fd)


class FileChanged(ValueError):
    """A file was replaced or rewritten since its identity was read."""
