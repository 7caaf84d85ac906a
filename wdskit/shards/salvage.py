"""The whole samples of one damaged shard, as ranges of its bytes: those that its headers or its .idx prove whole."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wdskit.codecs.checks import Check, ImageCheck, field_check
from wdskit.dataset.keys import split_name
from wdskit.dataset.shard import offsets_path
from wdskit.errors import DecodeError, ShardError, StorageError
from wdskit.limits import BLOCK_BYTES, MAX_CHECKED_BYTES, MAX_IDX_BYTES, MAX_PIXELS
from wdskit.storage.urls import LocalFile, read_bytes
from wdskit.tar.header import (
    GNU_LONG_NAME_TYPE,
    PAX_TYPE,
    REGULAR_TYPES,
    HeaderError,
    checksum_holds,
    parse_header,
)
from wdskit.tar.reader import TarReader
from wdskit.tar.window import Passed
from wdskit.tar.writer import END_BYTES
from wdskit.text import shorten

COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Loss:
    """Bytes of a shard that were not saved.

    Attributes:
        file: The shard.
        start: First byte.
        stop: Behind the last; the same as `start` where nothing is there.
        key: Of the sample they belong to; None for bytes of which no sample is known.
        reason: Why.
    """

    file: str
    start: int
    stop: int
    key: str | None
    reason: str

    def __str__(self) -> str:
        what = "" if self.key is None else f"key {self.key!r}: "
        return f"{self.file}, bytes {self.start} to {self.stop}: {what}{self.reason}"


@dataclass
class Group:
    """Members side by side that share a key."""

    key: str
    start: int
    stop: int = 0
    fields: list[str] = field(default_factory=list)
    problem: str = ""  # why it cannot be saved
    is_proven: bool = True  # nothing before it was damaged, or the .idx says that it starts here


@dataclass
class Salvage:
    """What can be saved of a shard: its whole samples, and what is not saved, both in the order of the bytes."""

    groups: list[Group] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)


def salvage(
    path: str, file: LocalFile, *, images: ImageCheck, max_pixels: int = MAX_PIXELS, with_offsets: bool = True
) -> Salvage:
    """Find the samples of a shard that its headers or its .idx prove whole.

    Behind damage the reading goes on at the next sample of the .idx that has a valid header. An .idx that contradicts
    the headers is not believed; without one, the reading goes on at the next block that is a valid header. Then the
    sample before the damage is lost, unless the header of another follows it, and so is the first one behind, whose
    first members may be missing.

    Args:
        path: The shard, for messages, and for its .idx.
        file: The same, open.
        images: How images are checked; a sample with one that fails is lost.
        max_pixels: Most pixels of an image.
        with_offsets: Whether to ask the .idx; there is no need to where the shard is known to be what it was.

    Raises:
        StorageError: It cannot be read.
    """
    starts = _known_starts(path) if with_offsets else []
    check = functools.lru_cache(maxsize=1024)(lambda name: field_check(name, images, max_pixels))
    walk = _Walk(path, file, starts, check)
    found = walk.run()
    return found if walk.agrees else _Walk(path, file, [], check).run()


class _Walk:
    """The state of one walk through a shard."""

    def __init__(self, path: str, file: LocalFile, starts: list[int], check: Callable[[str], Check | None]) -> None:
        self._path = path
        self._file = file
        self._starts = starts
        self._spans = dict(itertools.pairwise(starts))
        self._check = check
        self._groups: list[Group] = []
        self._lost: list[Loss] = []
        self._loose: list[Loss] = []  # members of no sample that no sample stands before
        self._behind = 0  # the last member that was read: where the next header should be
        self.agrees = True  # the .idx with the headers

    def run(self) -> Salvage:
        at: int | None = 0
        while at is not None:
            at = self._run_from(at)
        self._judge()
        bad = [one for one in self._groups if one.problem]
        lost = [Loss(self._path, one.start, one.stop, shorten(one.key), shorten(one.problem)) for one in bad]
        lost += self._lost
        lost += self._loose if lost else []
        lost.sort(key=lambda loss: (loss.start, loss.stop))
        return Salvage([one for one in self._groups if not one.problem], lost)

    def _run_from(self, base: int) -> int | None:
        """Read members from a header on; where to go on behind damage, None at the end."""
        at = base

        def read(size: int) -> bytes:
            nonlocal at
            part = self._file.read_at(at, size)
            at += len(part)
            return part

        reader = TarReader(read, shard=self._path, hold_bytes=MAX_CHECKED_BYTES)
        first = len(self._groups)
        problem, following, is_in_place = "", None, True
        try:
            self._collect(reader, base)
            self._behind = base + reader.stop
        except ShardError as err:
            problem = err.problem
            damage = base + (reader.stop or err.offset)
            following = self._resume(damage)
            is_in_place = following in self._spans or (following is None and self._ends_in_place(damage))
        stop = self._behind
        end = self._file.num_bytes if following is None else following
        if not problem and self._starts and self._starts[-1] > stop:
            problem = f"the shard ends where its .idx goes on to byte {self._starts[-1]}"
            is_in_place, end = False, stop
        groups = self._groups[first:]
        for group in groups[-1:]:
            group.stop = stop
            if problem and not ((is_in_place or self._ends(group)) and self._fits(group)):
                group.problem = group.problem or f"bytes may be missing in it, before this: {problem}"
        for group in groups[:1]:
            if base and base not in self._spans:
                group.problem = group.problem or "its first members may be missing"
        self.agrees &= all(self._fits(one) for one in groups if not one.problem)
        if problem:
            self._lost.append(Loss(self._path, stop, max(stop, end), None, problem))
        return following

    def _collect(self, reader: TarReader, base: int) -> None:
        current: Group | None = None
        self._behind = base
        is_proven = not base or base in self._spans
        for name, offset, data in reader:
            start = base + offset
            self._behind = base + reader.offset
            split = split_name(name)
            if split is None:
                if current is None:
                    problem = f"{shorten(name)!r} is of no sample"
                    self._loose.append(Loss(self._path, start, self._behind, None, problem))
                continue
            if current is None or split[0] != current.key:
                if current is not None:
                    current.stop = start
                current = Group(split[0], start, is_proven=is_proven)
                self._groups.append(current)
            self._add(current, split[1], data)

    def _add(self, group: Group, name: str, data: bytes) -> None:
        if name in group.fields or name.startswith("__"):
            group.problem = f"it has the field {name!r} twice, or that is a name which readers keep for themselves"
        group.fields.append(name)
        check = self._check(name)
        if check and not isinstance(data, Passed):
            try:
                check(data)
            except DecodeError as err:
                group.problem = group.problem or f"{name}: {err}"

    def _ends_in_place(self, damage: int) -> bool:
        """Whether no byte is missing behind damage, because the shard ends where the .idx says."""
        return bool(self._starts) and self._starts[-1] + END_BYTES == self._file.num_bytes > damage + END_BYTES

    def _fits(self, group: Group) -> bool:
        """Whether a group is a sample of the .idx, where there is one."""
        return not self._spans or self._spans.get(group.start) == group.stop

    def _ends(self, group: Group) -> bool:
        """Whether the header of another sample stands behind a group; or nothing, where the .idx says so."""
        block = self._file.read_at(group.stop, BLOCK_BYTES)
        if self._starts and group.stop == self._starts[-1]:
            return not block or self._file.read_at(group.stop, END_BYTES) == bytes(END_BYTES)
        if self._starts and len(block) < BLOCK_BYTES:  # cut; of zeros nobody knows whether they are an end marker's
            return not block or any(block)
        if not _is_header(block) or block[156] not in REGULAR_TYPES:
            return False
        split = split_name(parse_header(block).name.decode("utf-8", "replace"))
        return split is not None and split[0] != group.key

    def _resume(self, damage: int) -> int | None:
        """Where to go on: at the next sample of the .idx, or else the next block, that is a valid header."""
        for start in self._starts[bisect_right(self._starts, damage) : -1]:
            if _is_header(self._file.read_at(start, BLOCK_BYTES)):
                return start
        if self._starts and (self._starts[-1] <= damage or self._ends_in_place(damage)):
            return None
        following = _next_header(self._file, damage)
        if self._starts and following is not None:
            self.agrees = False  # what stands there is not where the .idx says
            return None
        return following

    def _judge(self) -> None:
        """Note problems that show over the whole shard: keys that are repeated, and tars inside of a sample."""
        proven = {tuple(group.fields) for group in self._groups if group.is_proven and not group.problem}
        seen: dict[str, Group] = {}
        for group in self._groups:
            if proven and not group.is_proven and tuple(group.fields) not in proven:
                group.problem = group.problem or "its fields are those of no sample before the damage"
            twin = seen.setdefault(group.key, group)
            if twin is not group:
                if twin.fields != group.fields:
                    twin.problem = twin.problem or "its members are not side by side"
                group.problem = group.problem or "its key came before"


def _known_starts(shard: str) -> list[int]:
    """Where the .idx says that samples start and the last one ends; nothing where it does not read.

    They are not compared with the shard's size, for it may be cut.
    """
    path = offsets_path(shard)
    try:
        data = read_bytes(str(path), limit=MAX_IDX_BYTES) if path.is_file() else b""
    except StorageError:
        return []
    starts = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8")
    if len(data) % 8 or np.any(starts[1:] <= starts[:-1]) or np.any(starts % np.uint64(BLOCK_BYTES)):
        return []
    found: list[int] = starts.tolist()
    return found


def _is_header(block: bytes) -> bool:
    """Whether a member can start with this block: all of a header is right, its checksum exactly."""
    if len(block) < BLOCK_BYTES or not any(block):
        return False
    try:
        kind = parse_header(block).typeflag
        return kind in REGULAR_TYPES | {PAX_TYPE, GNU_LONG_NAME_TYPE} and checksum_holds(block)
    except HeaderError:
        return False


def _next_header(file: LocalFile, at: int) -> int | None:
    """The next block behind `at` that is a valid ustar header."""
    at = (at // BLOCK_BYTES + 1) * BLOCK_BYTES
    while data := file.read_at(at, COPY_BYTES):
        for place in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            if data.startswith(b"ustar", place + 257) and _is_header(data[place : place + BLOCK_BYTES]):
                return at + place
        at += COPY_BYTES
    return None
