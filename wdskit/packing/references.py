"""Where the bytes of a field are until they are packed: references, small and plain enough to stand in a plan.

Each kind is a frozen dataclass of texts and whole numbers that has `num_bytes` and `read`. `KINDS` names them all, so
that a plan can be written and read back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes of a file, read when they are packed.

    Attributes:
        path: The file.
        num_bytes: Its size when the plan was made.
        mtime_ns: When it was last changed then: for the plan of a run that was stopped, which is to go on.
    """

    path: str
    num_bytes: int
    mtime_ns: int = 0

    def read(self) -> bytes:
        """The file's bytes.

        Raises:
            OSError: It cannot be read.
            ValueError: It has another size than planned.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = []
            left = self.num_bytes + 1  # the byte too many shows that it grew
            while left and (part := os.read(fd, left)):
                parts.append(part)
                left -= len(part)
            if left != 1:
                now = os.fstat(fd).st_size
                raise ValueError(f"it has {now} bytes now and had {self.num_bytes} when packing began")
        finally:
            os.close(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)


Reference: TypeAlias = FileBytes
FieldBytes: TypeAlias = bytes | Reference

KINDS: dict[str, type[Reference]] = {"file": FileBytes}
"""The kinds of reference, by the name that a plan gives them."""
