"""Some samples of a source shard: which of them stay, and how long they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from typing_extensions import Self

from wdskit.codecs.fields import decode_field
from wdskit.dataset.samples import read_span
from wdskit.errors import DecodeError, RowError, SelectionError, ShardError
from wdskit.limits import BLOCK_BYTES, MAX_NAME_BYTES
from wdskit.packing.row import row_error
from wdskit.packing.samples.changes import Changes, Sample, find_fields
from wdskit.packing.samples.choice import Choice
from wdskit.packing.samples.headers import Bools, Ints, Look, Words, hash_keys
from wdskit.shards.filters import ExpressionError, MissingValue
from wdskit.shards.split import SPLIT_SEED, draws_of, make_draw
from wdskit.storage.urls import RangeFile
from wdskit.tar.walk import Span
from wdskit.tar.writer import member_bytes


@dataclass
class Gone:
    """How many samples do not stay, by the reason."""

    num_sampled_out: int = 0
    num_filtered: int = 0
    num_missing: int = 0

    def __iadd__(self, other: Gone) -> Self:
        """Count those of another shard too."""
        self.num_sampled_out += other.num_sampled_out
        self.num_filtered += other.num_filtered
        self.num_missing += other.num_missing
        return self

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_sampled_out + self.num_filtered + self.num_missing


class Batch:
    """Neighbours in a shard that have been looked at.

    Args:
        file: The shard, open.
        path: Its path, for messages.
        number: Which sample of the shard the first one is.
        starts: Where each starts in the file.
        stops: Where each ends.
        base: Where in the file stands what `look` takes for 0.
        look: What was seen.

    Attributes:
        num_cleaned: Samples whose keys `become` changed, by `keys="clean"`.

    Raises:
        ShardError: A sample is none.
    """

    def __init__(
        self, file: RangeFile, path: str, number: int, starts: Ints, stops: Ints, base: int, look: Look
    ) -> None:
        self._file = file
        self._path = path
        self._number = number
        self._starts = starts
        self._stops = stops
        self._base = base
        self._look = look
        self.num_cleaned = 0
        self._first_members = np.searchsorted(look.members.rows, np.arange(len(starts) + 1))
        self._odd = {row: self._find(row)[0] for row in np.flatnonzero(~look.plain).tolist()}

    @property
    def num_ignored(self) -> int:
        """Members that belong to no sample."""
        return sum(sample.num_ignored for sample in self._odd.values())

    @property
    def fields(self) -> set[str]:
        """Names of all fields."""
        members = self._look.members
        found = {members.names[field] for field in np.unique(members.fields).tolist()}
        return found.union(*(sample.fields for sample in self._odd.values()))

    def key(self, row: int) -> str:
        """The key of a sample."""
        odd = self._odd.get(row)
        return self._look.key(row) if odd is None else odd.key

    def fields_of(self, row: int) -> Mapping[str, Span]:
        """The fields of a sample, and where in the file they are."""
        start = int(self._starts[row])
        odd = self._odd.get(row)
        if odd is not None:
            return {name: Span(start + first, last - first) for name, (first, last) in odd.fields.items()}
        members = self._look.members
        which = slice(self._first_members[row], self._first_members[row + 1])
        places = zip(members.starts[which].tolist(), members.sizes[which].tolist(), strict=True)
        names = (members.names[field] for field in members.fields[which].tolist())
        return {name: Span(self._base + at + BLOCK_BYTES, size) for name, (at, size) in zip(names, places, strict=True)}

    def choose(self, choice: Choice, gone: Gone) -> Bools:
        """Which samples stay; the others are counted.

        Raises:
            SelectionError: The filter has no answer for one.
        """
        keep = np.ones(len(self._starts), dtype=np.bool_)
        if choice.threshold is None and choice.filter is None:
            return keep
        for row in range(len(keep)):
            key = self.key(row)
            if choice.threshold is not None and choice.draw(key) >= choice.threshold:
                keep[row] = False
                gone.num_sampled_out += 1
            elif choice.filter is not None:
                keep[row] = self._holds(row, key, choice, gone)
        return keep

    def _holds(self, row: int, key: str, choice: Choice, gone: Gone) -> bool:
        assert choice.filter is not None
        fields = self.fields_of(row)
        values: dict[str, object] = {}

        def read(name: str) -> object:
            if name not in values:
                values[name] = decode_field(name, read_span(self._file, fields[name]))
            return values[name]

        try:
            holds = choice.filter.holds(key, fields, read)
        except MissingValue as err:
            if choice.skip_missing:
                gone.num_missing += 1
                return False
            remedy = (
                "Test for it first ('txt' in fields, json.get('n', 0)), or leave such samples out with --missing skip."
            )
            raise self._unanswered(key, choice, err, remedy) from err
        except (ExpressionError, DecodeError) as err:
            raise self._unanswered(key, choice, err, "Correct the filter or the sample.") from err
        gone.num_filtered += not holds
        return holds

    def _unanswered(self, key: str, choice: Choice, err: Exception, remedy: str) -> SelectionError:
        assert choice.filter is not None
        folder = self._path.rpartition("/")[0] or "."
        msg = f"{self._path}: sample {key!r}: the filter {choice.filter.text!r} cannot be evaluated: {err}.\n  {remedy}"
        return SelectionError(msg, folder=folder, shard=self._path, key=key)

    def become(self, changes: Changes, keep: Bools) -> tuple[Ints, Words, Bools]:
        """How long the samples become, 64 bits for the key of each then, and whether they are copied as they are.

        Raises:
            RowError: One that stays cannot be written so.
        """
        look = self._look
        sizes, hashes, copied = self._stops - self._starts, look.hashes.copy(), look.exact.copy()
        slow = ~look.plain | changes.rewrites_all
        if not changes.rewrites_all and (changes.named or not look.exact.all()):
            self._measure(changes, sizes, copied, slow)
        rows = np.flatnonzero(slow & keep).tolist()
        copied[slow] = False
        if rows:
            keys: list[bytes] = []
            for row in rows:
                key, sizes[row] = self._rewrite(row, changes)
                keys.append(key.encode())
            hashes[rows] = hash_keys(keys)
        return sizes, hashes, copied

    def draws(self, changes: Changes, keep: Bools) -> Words:
        """What decides the splits of the samples that stay."""
        draw = make_draw(SPLIT_SEED)
        keys = map(self.key, np.flatnonzero(keep).tolist())
        return draws_of(draw(changes.new_key(key)) for key in keys)

    def _measure(self, changes: Changes, sizes: Ints, copied: Bools, slow: Bools) -> None:
        """Fill in the sizes of plain samples; those that cannot be written so are marked as slow, to say why."""
        members = self._look.members
        news = [changes.new_name(name) for name in members.names]
        changed = np.array([new != old for new, old in zip(news, members.names, strict=True)], dtype=np.bool_)
        stays = np.array([new is not None for new in news], dtype=np.bool_)[members.fields]
        copied[members.rows[changed[members.fields]]] = False
        rows, fields = members.rows[stays], members.fields[stays]
        added = BLOCK_BYTES + -(-members.sizes[stays] // BLOCK_BYTES) * BLOCK_BYTES
        plain = self._look.plain
        total = np.bincount(rows, weights=added, minlength=len(sizes)).astype(np.int64)
        sizes[plain] = total[plain]
        slow |= plain & (total == 0)
        lengths = np.array([len(new or "") for new in news], dtype=np.int64)[fields]
        slow[rows[self._look.key_sizes[rows] + 1 + lengths > MAX_NAME_BYTES]] = True
        if len(set(news) - {None}) < sum(new is not None for new in news):
            slow |= plain  # two of them become one name, which no sample may have twice

    def _rewrite(self, row: int, changes: Changes) -> tuple[str, int]:
        """The key of a sample, and how long it becomes."""
        sample, data = self._find(row)
        try:
            key, fields = changes.rewrite(sample, memoryview(data))
        except (ValueError, RowError) as err:
            raise self._cannot(row, sample.key, err) from err
        self.num_cleaned += changes.keys == "clean" and key != sample.key
        return key, sum(member_bytes(len(field)) for _, field in fields)

    def _cannot(self, row: int, key: str, err: Exception) -> RowError:
        where = f"{self._path}: sample {self._number + row} ({key!r})"
        return row_error(where, str(err), "Change what is renamed, dropped or kept; odd keys: --keys hashed.")

    def _find(self, row: int) -> tuple[Sample, bytes]:
        """A sample by the strict reader, and its bytes."""
        start = int(self._starts[row])
        data = read_span(self._file, Span(start, int(self._stops[row]) - start))
        try:
            return find_fields(data, shard=self._path, offset=start), data
        except ValueError as err:
            problem = f"sample {self._number + row}: {err}"
            remedy = "The shard or its .idx changed. Run `wdskit index` on its folder if the shard is right."
            raise ShardError(shard=self._path, offset=start, problem=problem, remedy=remedy) from err
