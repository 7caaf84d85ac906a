"""Rows from a list of images' paths, as `find` writes it to a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from wdskit.codecs.formats import is_image_field
from wdskit.errors import PackError, RowError
from wdskit.packing.facts import to_json
from wdskit.packing.records import key_of_path
from wdskit.packing.references import FieldBytes
from wdskit.packing.rows import Row, field_of, file_bytes, make_row, row_error
from wdskit.packing.walking import utf8_name

STDIN = "-"
_MAX_PATH_BYTES = 4096  # Linux's PATH_MAX
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class PathList:
    """A list of paths, relative to the current folder.

    Attributes:
        path: The list's file; `-` is standard input.
        end: What ends a path: a newline, or NUL as `find -print0` writes it.
    """

    path: str
    end: bytes = b"\n"

    def rows(self, *, keys: str) -> Iterator[Row | RowError]:
        """A row a path, in their order: the image, and `json` with its path. Empty lines are passed over.

        Raises:
            PackError: The list cannot be read, or something in it is too long for a path.
        """
        name = "standard input" if self.path == STDIN else self.path
        try:
            with open_list(self.path) as file:
                for number, path in enumerate(self._paths(file, name), start=1):
                    if path:
                        try:
                            yield _row(os.fsdecode(path), f"{name}:{number}", keys)
                        except RowError as err:
                            yield err
        except OSError as err:
            raise PackError(f"{name}: cannot be read: {err.strerror}.") from err

    def _paths(self, file: IO[bytes], name: str) -> Iterator[bytes]:
        """The paths, as they come: a pipe is not waited for longer than it takes."""
        rest, number = b"", 1
        while part := os.read(file.fileno(), _READ_BYTES):
            *whole, rest = (rest + part).split(self.end)
            yield from whole
            number += len(whole)
            if len(rest) > _MAX_PATH_BYTES:
                msg = f"{name}:{number}: this is longer than the {_MAX_PATH_BYTES} bytes that a path may have."
                raise PackError(f"{msg}\n  One path a line; or NUL behind each, with --from list0.")
        if rest:
            yield rest


@contextlib.contextmanager
def open_list(path: str) -> Iterator[IO[bytes]]:
    """A file, or standard input, which is left open."""
    if path == STDIN:
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as file:
            yield file


def _row(path: str, where: str, keys: str) -> Row:
    try:
        text = utf8_name(path)
    except UnicodeDecodeError as err:
        raise row_error(where, f"the path {path!r} is no UTF-8", "Rename it.") from err
    field = field_of(path)
    if "\x00" in path or not is_image_field(field):
        raise row_error(where, f"{path!r} has no extension of an image", "List images only: find -name '*.jpg'.")
    fields: dict[str, FieldBytes] = {"json": to_json({"path": text}), field: file_bytes(path, where)}
    return make_row(key_of_path(text), fields, where, keys=keys, path=text)
