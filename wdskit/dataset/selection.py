"""Selections: for each shard of a folder, the samples of a subset such as the split `train`.

A selection is stored next to the index as `<name>.selection`, made to be mapped. Little-endian. Header of 128 bytes:
magic `WDSKSEL1`; as uint64 the number of shards, of selected samples, and of bytes of the recipe; 32 bytes that
identify the shards it was made for (`BinaryIndex.digest`); 32 bytes sha256 of these 64 bytes, the ends, the checks and
the recipe; zeros. Then the ends (uint64 a shard: samples selected up to and with it), the checks (8 bytes a shard:
blake2b of its numbers), the numbers (uint32 a sample: its number in its shard, rising), and last the recipe, a text
with the command that made the selection. Opening reads 16 bytes a shard; the numbers of a shard are compared with its
check when they are first read.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wdskit.dataset.binary import BinaryIndex
from wdskit.errors import SelectionError
from wdskit.files import DISK, Disk, publish
from wdskit.limits import MAX_RECIPE_BYTES

_SUFFIX = ".selection"
_MAGIC = b"WDSKSEL1"
_HEADER = struct.Struct("<8sQQQ32s32s32s")
_CHECK_BYTES = 8

_NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,39}")
_COMMANDS = {"split": "split", "reshard": "reshard --selection"}
_HARMLESS = re.compile(r"[\w@%+=:,./ -]+")  # nothing in it that a shell acts on: a selection may come from anywhere
_WRITE_BYTES = 1 << 20


def write_selection(
    folder: Path, name: str, samples_per_shard: Sequence[ArrayLike], *, recipe: str = "", disk: Disk = DISK
) -> None:
    """Publish a selection of the samples of an indexed folder.

    Args:
        folder: Local folder with its index.
        name: A name that `check_selection_name` accepts. A selection of this name is replaced.
        samples_per_shard: For each shard, in the order of the index, the numbers of its samples, rising.
        recipe: The command that makes it; one line.
        disk: Performs the file operations; tests replace it.

    Raises:
        FolderIndexError: The folder's index is missing or damaged.
        SelectionError: The name is invalid.
        ValueError: The numbers do not rise or exceed the samples of a shard, or the recipe is not one line.
    """
    path = selection_path(folder, name)
    index = BinaryIndex(folder)
    if len(samples_per_shard) != len(index):
        raise ValueError(f"{path}: it is for {len(samples_per_shard)} shards, but the index lists {len(index)}")
    text = recipe.encode()
    if len(text) > MAX_RECIPE_BYTES or not recipe.isprintable():
        raise ValueError(f"{path}: the recipe is not a line of at most {MAX_RECIPE_BYTES} bytes")
    counts = np.zeros(len(index), dtype="<u8")
    checks = bytearray()
    for shard, numbers in enumerate(_pack_numbers(index, samples_per_shard)):
        counts[shard] = len(numbers) // 4
        checks += _check(numbers)
    ends = np.cumsum(counts, dtype="<u8").tobytes()
    head = struct.pack("<8sQQQ32s", _MAGIC, len(index), int(counts.sum()), len(text), index.digest)
    digest = hashlib.sha256(head + ends + checks + text).digest()
    with publish(path, disk=disk) as temp:
        pending = bytearray(head + digest + bytes(32) + ends + checks)
        for numbers in _pack_numbers(index, samples_per_shard):  # a few bytes each
            pending += numbers
            if len(pending) >= _WRITE_BYTES:
                temp.write(bytes(pending))
                pending.clear()
        temp.write(pending + text)


def _pack_numbers(index: BinaryIndex, samples_per_shard: Sequence[ArrayLike]) -> Iterator[bytes]:
    """Return the numbers of each shard as stored in the file."""
    for shard, samples in enumerate(samples_per_shard):
        numbers = np.asarray(samples)
        numbers = numbers if numbers.size else numbers.astype(np.int64)
        most = min(int(index.counts[shard]), 1 << 32)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not _are_samples(numbers, most):
            msg = (
                f"{index.name(shard)}: these are not ascending numbers of its {index.counts[shard]} samples: {numbers}"
            )
            raise ValueError(msg)
        yield numbers.astype("<u4").tobytes()


def _are_samples(numbers: NDArray[np.integer], num_samples: int) -> bool:
    """Return whether the numbers rise and are below the number of samples of the shard."""
    if not numbers.size:
        return True
    return bool(numbers[0] >= 0 and numbers[-1] < num_samples and (numbers[1:] > numbers[:-1]).all())


def _check(numbers: bytes) -> bytes:
    return hashlib.blake2b(numbers, digest_size=_CHECK_BYTES).digest()


def read_selection(folder: str | Path, name: str) -> Selection:
    """Open a selection of a local folder; raises as `Selection` does."""
    return Selection(Path(folder), name)


class Selection:
    """A mapped selection. Safe to share between threads; a pickle holds only the path, and opens the file again.

    Args:
        folder: Local folder with its index.
        name: Name of the selection.
        expected: The required `digest`, None for any.

    Attributes:
        counts: Selected samples of each shard, in the order of the index, int64 (num_shards,).
        num_samples: Selected samples of all shards.
        recipe: The command that made it.
        digest: Hex digits that identify the shards and the selected samples.

    Raises:
        SelectionError: It is missing, damaged, of another version, or was made for other shards than the index lists.
        FolderIndexError: The folder's index is missing or damaged.
    """

    def __init__(self, folder: Path, name: str, expected: str | None = None) -> None:
        self.folder = folder
        self.name = name
        self._path = selection_path(folder, name)
        self._index = BinaryIndex(folder)
        with _open(self._path) as file:
            head = _parse_head(self._path, file)
            if head.shards != self._index.digest:
                raise _error(
                    self._path, "it was made for other shards than those in the folder's index now", head.recipe
                )
            body = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)[_HEADER.size :]
        self.num_samples = head.num_samples
        self.recipe = head.recipe
        self.digest = head.digest.hex()
        ends = body[: 8 * head.num_shards].view("<u8")
        self.counts: NDArray[np.int64] = np.diff(ends, prepend=np.uint64(0)).astype(np.int64)
        if head.num_shards != len(self._index) or np.any(self.counts > self._index.counts) or np.any(self.counts < 0):
            raise self._forged()
        self._starts = ends.astype(np.int64) - self.counts
        self._checks = body[8 * head.num_shards :][: _CHECK_BYTES * head.num_shards].reshape(-1, _CHECK_BYTES)
        self._numbers = body[(8 + _CHECK_BYTES) * head.num_shards :][: 4 * head.num_samples].view("<u4")
        if int(self.counts.sum()) != head.num_samples:
            raise self._forged()
        self._checked = np.zeros(head.num_shards, dtype=np.bool_)
        if expected not in (None, self.digest):
            msg = f"{self._path}: it was replaced while it was in use. Start again."
            raise SelectionError(msg, folder=str(folder))

    def __reduce__(self) -> tuple[object, tuple[Path, str, str]]:
        """Pickle the path and the digest: a million shards are not copied into every worker."""
        return Selection, (self.folder, self.name, self.digest)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self.counts)

    @functools.cached_property
    def shards(self) -> list[str]:
        """The file names of the shards, in the order of the index."""
        return [name for names in self._index.names() for name in names]

    def samples(self, shard: int) -> NDArray[np.int64]:
        """Return the numbers of a shard's selected samples, rising, owned by the caller; raises as `take` does."""
        if not 0 <= shard < len(self):
            raise IndexError(f"{self._path}: shard {shard} is out of range: there are {len(self)}")
        return self.take(np.full(self.counts[shard], shard), np.arange(self.counts[shard]))

    def take(self, shards: ArrayLike, places: ArrayLike) -> NDArray[np.int64]:
        """Return the numbers of many selected samples: for each i the `places[i]`-th selected sample of `shards[i]`.

        Args:
            shards: int (n,), numbers of shards.
            places: int (n,), each at least 0 and below `counts` of its shard.

        Raises:
            IndexError: A shard or place is out of range.
            SelectionError: The numbers are damaged.
        """
        wanted, at = np.asarray(shards, dtype=np.int64), np.asarray(places, dtype=np.int64)
        if np.any((wanted < 0) | (wanted >= len(self))) or np.any((at < 0) | (at >= self.counts[wanted])):
            raise IndexError(f"{self._path}: a shard or a place in it is out of range")
        for shard in np.unique(wanted[~self._checked[wanted]]):
            self._check_shard(int(shard))
        numbers: NDArray[np.int64] = self._numbers[self._starts[wanted] + at].astype(np.int64)
        return numbers

    def _check_shard(self, shard: int) -> None:
        """Compare the numbers of a shard with their check, once."""
        start = int(self._starts[shard])
        numbers = self._numbers[start : start + int(self.counts[shard])]
        if _check(numbers.tobytes()) != self._checks[shard].tobytes():
            problem = f"the numbers of the samples of {self._index.name(shard)} are damaged"
            raise _error(self._path, problem, self.recipe)
        if not _are_samples(numbers, int(self._index.counts[shard])):
            raise self._forged()
        self._checked[shard] = True

    def _forged(self) -> SelectionError:
        """Return the error for invalid numbers whose digests are right: they cannot be damage."""
        return _error(self._path, "its numbers are not those of samples", self.recipe)


class SelectionHead(NamedTuple):
    """The header of a selection; its folder may hold other shards now.

    Attributes:
        num_shards: Shards that it was made for.
        num_samples: Samples that it selects.
        recipe: How it was made: a command of wdskit with its arguments, the folder left out.
        shards: `BinaryIndex.digest` of the shards that it was made for.
        digest: 32 bytes that say which samples of which shards it selects.
    """

    num_shards: int
    num_samples: int
    recipe: str
    shards: bytes
    digest: bytes


def check_selection_name(name: str) -> None:
    """Raise `SelectionError` if the name of a selection is invalid."""
    if not _NAME.fullmatch(name):
        raise SelectionError(
            f"{name!r} is not a valid name for a selection. Use a-z, 0-9, _ and -, at most 40 characters."
        )


def selection_name(name: str) -> str:
    """The name of a selection's file."""
    check_selection_name(name)
    return f"{name}{_SUFFIX}"


def selection_path(folder: Path, name: str) -> Path:
    """Return the path of a selection, next to the index."""
    return folder / selection_name(name)


def list_selections(folder: Path) -> list[str]:
    """The names of a folder's selections, sorted."""
    return sorted(name for path in folder.glob(f"*{_SUFFIX}") if (name := selection_of(path.name)))


def selection_of(file: str) -> str:
    """The name of the selection that a file of this name holds, "" where it holds none."""
    name = file.removesuffix(_SUFFIX)
    return name if name != file and _NAME.fullmatch(name) else ""


def read_head(folder: Path, name: str) -> SelectionHead:
    """Read the header of a selection; raise `SelectionError` if it is missing, damaged, or of another version."""
    path = selection_path(folder, name)
    with _open(path) as file:
        return _parse_head(path, file)


def _open(path: Path) -> BinaryIO:
    """Open the file of a selection; if it does not exist, the error names the existing selections."""
    try:
        return path.open("rb")
    except FileNotFoundError as err:
        there = ", ".join(list_selections(path.parent))
        problem = f"there is no such selection. The folder has {there}" if there else "the folder has no selection"
        raise _error(path, problem) from err
    except OSError as err:
        raise SelectionError(f"{path}: cannot be read: {err.strerror}.", folder=str(path.parent)) from err


def _parse_head(path: Path, file: BinaryIO) -> SelectionHead:
    """Header, ends, checks and recipe of a selection, compared with their digest."""
    num_bytes = os.fstat(file.fileno()).st_size
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise _error(path, f"it has {num_bytes} bytes, less than its header")
    magic, num_shards, num_samples, num_recipe_bytes, shards, expected, rest = _HEADER.unpack(header)
    if magic != _MAGIC and magic.startswith(_MAGIC[:-1]):
        version = magic[-1:].decode("latin-1")
        raise _error(path, f"it has format version {version!r}, but this wdskit reads version '1'")
    table_bytes = (8 + _CHECK_BYTES) * num_shards
    size = _HEADER.size + table_bytes + 4 * num_samples + num_recipe_bytes
    if magic != _MAGIC or any(rest) or num_bytes != size or num_recipe_bytes > MAX_RECIPE_BYTES:
        raise _error(path, "it is damaged")
    digest = hashlib.sha256(header[:64])
    digest.update(file.read(table_bytes))  # read: mapped pages count as memory
    file.seek(num_bytes - num_recipe_bytes)
    recipe = file.read(num_recipe_bytes)
    digest.update(recipe)
    if digest.digest() != expected:
        raise _error(path, "it is damaged")
    return SelectionHead(num_shards, num_samples, recipe.decode(errors="replace"), shards, expected)


def _error(path: Path, problem: str, recipe: str = "") -> SelectionError:
    """Return the error of a selection, with the command that makes it again if it is known and safe to paste."""
    command, _, arguments = recipe.partition(" ")
    if _HARMLESS.fullmatch(recipe):
        again = f"Run `wdskit {command} {path.parent} {arguments}` again."
    elif command in _COMMANDS:
        again = f"Run `wdskit {_COMMANDS[command]}` again with the same arguments."
    else:
        again = f"Make it with {' or '.join(f'`wdskit {each}`' for each in _COMMANDS.values())}."
    return SelectionError(f"{path}: {problem}.\n  {again}", folder=str(path.parent))
