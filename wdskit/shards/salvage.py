"""The whole samples of one damaged shard, as ranges of its bytes: those that its headers or its .idx prove whole.

Behind damage the reading goes on at the next sample of the .idx that has a valid header. An .idx that contradicts the
headers is not believed; without one, the reading goes on at the next block that is a valid header. Then the sample
before the damage is lost, unless the header of another follows it, and so is the first one behind, whose first members
may be missing.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wdskit.codecs.checks import ImageCheck, field_check
from wdskit.dataset.keys import split_name
from wdskit.dataset.samples import ShardReader, read_from
from wdskit.dataset.shard import offsets_path
from wdskit.errors import DecodeError, ShardError, StorageError
from wdskit.limits import BLOCK_BYTES, MAX_CHECKED_BYTES, MAX_IDX_BYTES, MAX_PIXELS
from wdskit.shards.payloads import PIECE_BYTES
from wdskit.storage.urls import LocalFile, read_bytes
from wdskit.tar.header import GNU_LONG_NAME_TYPE, PAX_TYPE, REGULAR_TYPES, HeaderError, checksum_holds, parse_header
from wdskit.tar.window import Passed
from wdskit.tar.writer import END_BYTES
from wdskit.text import shorten


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
    """The members of one key that stand side by side."""

    key: str
    start: int
    stop: int
    fields: tuple[str, ...]
    problem: str  # why it cannot be saved, "" where it can
    is_proven: bool  # nothing before it was damaged, or the .idx says that it starts here

    def refuse(self, problem: str) -> None:
        """Note why it cannot be saved; the first reason counts."""
        self.problem = self.problem or problem


class Walk:
    """One walk through a shard, with the offsets of its .idx, none where that is not believed.

    Attributes:
        agrees: Whether the headers say what the .idx says.
    """

    def __init__(self, path: str, file: LocalFile, starts: list[int], images: ImageCheck) -> None:
        self._path = path
        self._file = file
        self._starts = starts
        self._spans = dict(itertools.pairwise(starts))
        self._check = functools.lru_cache(maxsize=1024)(lambda name: field_check(name, images, MAX_PIXELS))
        self._groups: list[Group] = []
        self._lost: list[Loss] = []
        self._base = self._behind = 0  # where the reading began, and the next header should be
        self._fault = ""  # of a field of the current sample
        self.agrees = True
        at: int | None = 0
        while at is not None:
            at = self._read_from(at)
        self._judge()

    def result(self) -> tuple[list[Group], list[Loss]]:
        """The whole samples, and what is lost, both in the order of the bytes."""
        for one in self._groups:
            if one.problem:
                self._lost.append(Loss(self._path, one.start, one.stop, shorten(one.key), shorten(one.problem)))
        self._lost.sort(key=lambda loss: (loss.start, loss.stop))
        return [one for one in self._groups if not one.problem], self._lost

    def _read_from(self, base: int) -> int | None:
        """Read members from a header on; where to go on behind damage, None at the end."""
        reader = self._reader = ShardReader(
            read_from(self._file, base),
            shard=self._path,
            on_member=self._look,
            on_sample=self._add,
            on_fault=self._note,
            hold_bytes=MAX_CHECKED_BYTES,
        )
        self._base = self._behind = base
        first = len(self._groups)
        problem, following = "", None
        damage = self._file.num_bytes
        try:
            for _ in reader:
                pass
            self._behind = end = base + reader.stop
            if self._starts and self._starts[-1] > end:
                problem = f"the shard ends, but its .idx continues to byte {self._starts[-1]}"
        except ShardError as err:
            if reader.partial is not None:
                self._add(0, reader.partial[0], self._behind - base, reader.partial[1])
            problem = err.problem
            damage = base + (reader.stop or err.offset)
            following = self._resume(damage)
            end = self._file.num_bytes if following is None else following
        groups = self._groups[first:]
        if problem:
            self._lost.append(Loss(self._path, self._behind, max(self._behind, end), None, problem))
            if groups and not self._is_whole(groups[-1], damage, following):
                groups[-1].refuse(f"bytes may be missing before this: {problem}")
        if groups and base and base not in self._spans:
            groups[0].refuse("its first members may be missing")
        self.agrees &= all(self._fits(one) for one in groups if not one.problem)
        return following

    def _look(self, name: str, split: tuple[str, str] | None, start: int, data: bytes) -> str:  # noqa: ARG002
        """What is wrong with the contents of a field, which stands in the sample in their place."""
        self._behind = self._base + self._reader.offset
        check = None if split is None or isinstance(data, Passed) else self._check(split[1])
        try:
            if check:
                check(data)
        except DecodeError as err:
            return f"{split and split[1]}: {err}"
        return ""

    def _note(self, start: int, key: str, problem: str) -> None:  # noqa: ARG002
        self._fault = problem

    def _add(self, number: int, start: int, stop: int, sample: Mapping[str, Any]) -> None:  # noqa: ARG002
        fields = {name: problem for name, problem in sample.items() if not name.startswith("__")}
        problem = self._fault or next(filter(None, fields.values()), "")
        self._fault = ""
        is_proven = not self._base or self._base in self._spans
        place = self._base + start, self._base + stop
        self._groups.append(Group(sample["__key__"], *place, tuple(fields), problem, is_proven))

    def _ends_in_place(self, damage: int) -> bool:
        """Whether no byte is missing behind damage, because the shard ends where the .idx says."""
        return bool(self._starts) and self._starts[-1] + END_BYTES == self._file.num_bytes > damage + END_BYTES

    def _fits(self, group: Group) -> bool:
        """Whether a group is a sample of the .idx, where there is one."""
        return not self._spans or self._spans.get(group.start) == group.stop

    def _is_whole(self, group: Group, damage: int, following: int | None) -> bool:
        """Whether no byte is missing in the last group before damage: what is behind it is where it should be."""
        if not self._fits(group):
            return False
        if following in self._spans or (following is None and self._ends_in_place(damage)):
            return True
        block = self._file.read_at(group.stop, END_BYTES)
        if self._starts and group.stop == self._starts[-1]:
            return block in (b"", bytes(END_BYTES))
        if self._starts and len(block) < BLOCK_BYTES:  # cut; of zeros nobody knows whether they are an end marker's
            return not block or any(block)
        if not _is_header(block[:BLOCK_BYTES]) or block[156] not in REGULAR_TYPES:
            return False
        split = split_name(parse_header(block[:BLOCK_BYTES]).name.decode("utf-8", "replace"))
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
        proven = {group.fields for group in self._groups if group.is_proven and not group.problem}
        seen: dict[str, Group] = {}
        for group in self._groups:
            if proven and not group.is_proven and group.fields not in proven:
                group.refuse("no sample before the damage has these fields")
            twin = seen.setdefault(group.key, group)
            if twin is not group:
                if twin.fields != group.fields:
                    twin.refuse("its members are not side by side")
                group.refuse("its key appeared before")


def known_starts(shard: str) -> list[int]:
    """Where the .idx says that samples start and the last one ends, which may be behind the end of a shard that was
    cut; nothing where it does not read.
    """
    path = offsets_path(shard)
    try:
        data = read_bytes(str(path), limit=MAX_IDX_BYTES) if path.is_file() else b""
    except StorageError:
        return []
    starts: list[int] = np.frombuffer(data[: len(data) // 8 * 8], dtype="<u8").tolist()
    is_rising = all(one < other for one, other in itertools.pairwise(starts))
    return starts if is_rising and not len(data) % 8 and not any(start % BLOCK_BYTES for start in starts) else []


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
    while data := file.read_at(at, PIECE_BYTES):
        for place in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            if data.startswith(b"ustar", place + 257) and _is_header(data[place : place + BLOCK_BYTES]):
                return at + place
        at += PIECE_BYTES
    return None
