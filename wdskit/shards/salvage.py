"""The whole samples of one damaged shard, as ranges of its bytes.

Behind damage the reading goes on at the next sample that the .idx promises, or else at the next valid header. What
damage may have touched is not saved: the sample before it, because bytes may be missing in it (an .idx that is right
again behind the damage proves that none are), and the sample behind it, because its first members may be missing (the
.idx, or the fields that all others have, prove that none are).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from wdskit.dataset.keys import split_name
from wdskit.errors import DecodeError, ShardError
from wdskit.limits import BLOCK_BYTES, MAX_CHECKED_BYTES, MAX_PIXELS
from wdskit.shards.checking import Check, field_check
from wdskit.shards.findings import ImageCheck, shorten
from wdskit.shards.resync import headers_after, is_header, is_plain_key, known_starts
from wdskit.storage.urls import LocalFile
from wdskit.tar.header import REGULAR_TYPES, padded, parse_header
from wdskit.tar.reader import TarReader
from wdskit.tar.window import Passed
from wdskit.tar.writer import END_BYTES


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
    problem: str = ""  # why it cannot be saved whatever stands around it
    doubt: str = ""  # why it may not be whole
    is_second: bool = False  # what is in doubt is its beginning
    is_proven: bool = True  # it is known to be a sample, and no member of a tar inside of one


@dataclass
class Salvage:
    """What can be saved of a shard.

    Attributes:
        groups: Its whole samples, in order.
        lost: What is not saved, in the order of the bytes.
    """

    groups: list[Group] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)


def salvage(
    path: str, file: LocalFile, *, images: ImageCheck, max_pixels: int = MAX_PIXELS, with_offsets: bool = True
) -> Salvage:
    """Find the whole samples of a shard.

    Args:
        path: The shard, for messages, and for its .idx.
        file: The same, open.
        images: How images are checked; a sample with one that is not right is lost.
        max_pixels: Most pixels of an image.
        with_offsets: Whether to ask the .idx; there is no need to where the shard is known to be what it was.

    Raises:
        StorageError: It cannot be read.
    """
    starts: frozenset[int] = known_starts(path) if with_offsets else frozenset()
    walk = _Walk(path, file, starts, images, max_pixels)
    found = walk.run()
    if starts and not walk.agrees:  # another shard's, or an older one's
        return _Walk(path, file, frozenset(), images, max_pixels).run()
    return found


class _Walk:
    """The state of one walk through a shard."""

    def __init__(self, path: str, file: LocalFile, starts: frozenset[int], images: ImageCheck, max_pixels: int) -> None:
        self._path = path
        self._file = file
        self._images: ImageCheck = images
        self._max_pixels = max_pixels
        self._checks: dict[str, Check | None] = {}
        self._starts = starts
        self._sorted = sorted(starts)
        self._groups: list[Group] = []
        self._found = Salvage()
        self._loose: list[Loss] = []  # members of no sample that no sample stands before
        self._expected = 0  # where the next member's header should be
        self._is_plain = True  # no extension header, directory or gap so far

    @property
    def agrees(self) -> bool:
        """Whether all samples that stand between others start where the .idx says."""
        whole = [group for group in self._groups if not group.doubt]
        return all(group.start in self._starts and self._next(group.start) >= group.stop for group in whole)

    def _next(self, start: int) -> int:
        """The next offset of the .idx behind one of them; -1 behind the last, which is no sample's start."""
        number = bisect_right(self._sorted, start)
        return self._sorted[number] if number < len(self._sorted) else -1

    def run(self) -> Salvage:
        at: int | None = 0
        while at is not None:
            at = self._run_from(at)
        self._judge()
        if self._found.lost:
            self._found.lost += self._loose
        self._found.lost.sort(key=lambda loss: (loss.start, loss.stop))
        return self._found

    def _run_from(self, base: int) -> int | None:
        """Read members from a header on; where to go on after damage, None at the end."""
        at = base

        def read(size: int) -> bytes:
            nonlocal at
            part = self._file.read_at(at, size)
            at += len(part)
            return part

        reader = TarReader(read, shard=self._path, hold_bytes=MAX_CHECKED_BYTES)
        first = len(self._groups)
        try:
            self._collect(reader, base)
        except ShardError as err:
            following, in_place = self._resync(base + (reader.stop or err.offset))
            damage = self._expected
            if following is None and is_header(self._file.read_at(damage, BLOCK_BYTES)):
                in_place = True  # a whole header, and the shard stops inside of its member
            self._close(first, damage)
            self._doubt_ends(first, base, damage, err.problem, in_place=in_place)
            stop = self._file.num_bytes if following is None else following
            self._found.lost.append(Loss(self._path, damage, stop, None, err.problem))
            return following
        stop = base + reader.stop
        self._close(first, stop)
        if self._sorted and self._sorted[-1] > stop:
            problem = f"the shard ends where its .idx goes on to byte {self._sorted[-1]}"
            self._doubt_ends(first, base, stop, problem, in_place=False)
            self._found.lost.append(Loss(self._path, stop, stop, None, problem))
        else:
            self._doubt_ends(first, base, None, "", in_place=True)
        return None

    def _collect(self, reader: TarReader, base: int) -> None:
        current: Group | None = None
        self._expected = base
        is_proven = not base or base in self._starts
        for name, offset, data in reader:
            start = base + offset
            if start != self._expected:
                self._is_plain = False
            self._expected = start + BLOCK_BYTES + padded(data.num_bytes if isinstance(data, Passed) else len(data))
            split = split_name(name)
            if split is None:
                if current is None:
                    self._loose.append(
                        Loss(self._path, start, self._expected, None, f"{shorten(name)!r} is of no sample")
                    )
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
        if name not in self._checks:
            self._checks[name] = field_check(name, self._images, self._max_pixels)
        check = self._checks[name]
        if check and not isinstance(data, Passed):
            try:
                check(data)
            except DecodeError as err:
                group.problem = group.problem or f"{name}: {err}"

    def _close(self, first: int, stop: int) -> None:
        """The last group ends where the reading did."""
        for group in self._groups[first:][-1:]:
            group.stop = group.stop or stop

    def _doubt_ends(self, first: int, base: int, damage: int | None, problem: str, *, in_place: bool) -> None:
        """Note which of the groups that were read in one go may not be whole: the last before damage, and the first
        behind.
        """
        groups = self._groups[first:]
        if groups and base and groups[0].start not in self._starts:
            groups[0].doubt, groups[0].is_second = "its first members may be missing", True
        if groups and damage is not None:
            ends = damage in self._starts or self._starts_another(damage, groups[-1].key)
            if not in_place or not ends:
                groups[-1].doubt, groups[-1].is_second = f"bytes may be missing in it, before this: {problem}", False

    def _starts_another(self, at: int, key: str) -> bool:
        """Whether a valid header stands here that says by itself that it is of another sample."""
        block = self._file.read_at(at, BLOCK_BYTES)
        if not is_header(block) or block[156] not in REGULAR_TYPES:
            return False
        split = split_name(parse_header(block).name.decode("utf-8", "replace"))
        return split is not None and split[0] != key

    def _resync(self, damage: int) -> tuple[int | None, bool]:
        """Where to go on, None for nowhere, and whether it is certain that no bytes are missing before: at the next
        sample of the .idx that has a valid header, else at the next valid header.
        """
        if damage >= self._file.num_bytes:  # cut; of zeros nobody knows whether they belong to the end marker
            rest = self._file.read_at(self._expected, BLOCK_BYTES)
            return None, not rest or any(rest)
        for number in range(bisect_right(self._sorted, damage), len(self._sorted)):
            start = self._sorted[number]
            if is_header(self._file.read_at(start, BLOCK_BYTES)):
                return start, True
        if self._sorted and self._sorted[-1] + END_BYTES == self._file.num_bytes > damage + END_BYTES:
            return None, True  # the end marker is where it should be, and no sample before it
        return next(headers_after(self._file, damage), None), False

    def _judge(self) -> None:
        """Keep the groups that are whole for certain, and list the others."""
        certain = {tuple(group.fields) for group in self._groups if not group.doubt}
        proven = {tuple(group.fields) for group in self._groups if group.is_proven and not group.doubt}
        seen: dict[str, Group] = {}
        for group in self._groups:
            usual = self._is_plain and certain == {tuple(group.fields)} and is_plain_key(group.key)
            if group.doubt and not (group.is_second and usual):
                group.problem = group.problem or group.doubt
            if proven and not group.is_proven and tuple(group.fields) not in proven:
                group.problem = group.problem or "its fields are those of no sample before the damage"
            twin = seen.setdefault(group.key, group)
            if twin is not group:
                if twin.fields != group.fields:
                    twin.problem = twin.problem or "its members are not side by side"
                group.problem = group.problem or "its key came before"
        for group in self._groups:
            if group.problem:
                reason = shorten(group.problem)
                self._found.lost.append(Loss(self._path, group.start, group.stop, shorten(group.key), reason))
            else:
                self._found.groups.append(group)
