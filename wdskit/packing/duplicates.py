"""Rows whose images are byte for byte those of an earlier row.

The pass over all rows keeps 8 bytes of each digest: 90 MB of ten million rows. Rows that are equal in these are read
again, and their whole digests compared.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import find_repeated, is_among
from wdskit.errors import RowError, WdskitError
from wdskit.limits import BLOCK_BYTES
from wdskit.packing.ahead import read_ahead
from wdskit.packing.row import OnProgress, Progress, Row
from wdskit.packing.store import Spool
from wdskit.packing.transforms import Transforms
from wdskit.shards.parallel import map_shards

HASH_BYTES = 8
_CHECK_ROWS = 256  # that a process checks at a time


class Duplicate(NamedTuple):
    """A row whose images an earlier one has.

    Attributes:
        number: Of the row, in the order of the source.
        key: Its key.
        where: Its place.
        first_key: Key of the first row with these images.
        first_where: Place of that row.
        sha256: Digest of the image; of several images, of their digests in the order of their names.
    """

    number: int
    key: str
    where: str
    first_key: str
    first_where: str
    sha256: str

    def to_dict(self) -> dict[str, str]:
        """Its line in `duplicates.jsonl`."""
        return {name: value for name, value in self._asdict().items() if name != "number"}


def image_digest(fields: Iterable[tuple[str, bytes]], image_fields: Sequence[str] = ()) -> bytes | None:
    """sha256 of a row's image as it came; of several, of their digests, sorted by name; None where it has no image.

    Only the images of `image_fields` count; all where none is named.
    """
    digests = [
        hashlib.sha256(data).digest()
        for name, data in fields
        if is_image_field(name) and (not image_fields or name in image_fields)
    ]
    if len(digests) > 1:
        return hashlib.sha256(b"".join(digests)).digest()
    return digests[0] if digests else None


class Digests:
    """The first bytes of the digest of each row's images, by the number of the row; they are added in its order."""

    def __init__(self) -> None:
        self._hashes = array("Q")

    def add(self, number: int, digest: bytes | None) -> None:
        """Note a row; one without an image, or that was left out, is 0, and like no other."""
        self._hashes.extend([0] * (number - len(self._hashes)))
        self._hashes.append(0 if digest is None else int.from_bytes(digest[:HASH_BYTES], "big") | 1)

    def suspects(self) -> NDArray[np.int64]:
        """Numbers of the rows that share these bytes with another, in their order."""
        hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        return np.flatnonzero(is_among(hashes, find_repeated(hashes)) & (hashes != 0))


def find_duplicates(
    digests: Digests, row_at: Callable[[int], Row], image_fields: Sequence[str] = ()
) -> list[Duplicate]:
    """The rows whose images an earlier one has, in their order.

    Raises:
        RowError: A file cannot be read any more.
    """
    firsts: dict[bytes, tuple[str, str]] = {}
    found = []
    for number in digests.suspects().tolist():
        row = row_at(number)
        digest = image_digest(row.read_fields(), image_fields)
        if digest is None:
            continue
        this = row.key, row.where
        first = firsts.setdefault(digest, this)
        if first is not this:
            found.append(Duplicate(number, *this, *first, digest.hex()))
    return found


def look_at_rows(
    spool: Spool, transforms: Transforms, workers: int, on_progress: OnProgress, *, transform: bool
) -> Iterator[tuple[int, RowError | bytes | None]]:
    """What is wrong with each row, or where nothing is and duplicates count, the digest of its images.

    With `transform` they are transformed as packing will; otherwise they are read only, in `workers` processes.

    Yields:
        Number of the row and what was found, in their order.
    """
    check = functools.partial(_check_rows, transforms=transforms, transform=transform)
    blocks = np.frombuffer(spool.blocks, dtype=np.uint32)
    total = int(blocks.sum(dtype=np.int64)) * BLOCK_BYTES
    number = num_bytes = 0
    for verdicts in map_shards(check, _Pieces(spool), workers=workers):
        if isinstance(verdicts, WdskitError):
            raise verdicts
        yield from enumerate(verdicts, start=number)
        num_bytes += int(blocks[number : number + len(verdicts)].sum(dtype=np.int64)) * BLOCK_BYTES
        number += len(verdicts)
        on_progress(Progress("checking", number, num_bytes, len(spool), total))


class _Pieces(Sequence[Any]):
    """All rows of a spool, some hundred at a time; each piece is made when it is asked for."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._starts = range(0, len(spool), _CHECK_ROWS)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        start = self._starts[number]
        return self._spool.take(np.arange(start, min(start + _CHECK_ROWS, len(self._spool))))


def _check_rows(rows: Iterable[Row], *, transforms: Transforms, transform: bool) -> list[RowError | bytes | None]:
    verdicts: list[RowError | bytes | None] = []
    for row in read_ahead(rows):
        try:
            fields = row.read_fields()
            if transform:
                row.transform(fields, transforms)
        except RowError as err:
            verdicts.append(err)
        else:
            verdicts.append(image_digest(fields, transforms.image_fields) if transforms.duplicates != "keep" else None)
    return verdicts
