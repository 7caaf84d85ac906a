"""Split a folder of shards: `wdskit split` writes the column `split`.

The draw of a sample is a hash of the seed and of the sample's key, or of a value in its JSON: an integer from 0 to
2**64 - 1. The shares divide this range among the splits. So a sample keeps its split in another shard or folder, and
all samples of one patient get the same split.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.fields import JSON_FIELDS, decode_field
from wdskit.dataset.columns import SPLIT_COLUMN, Columns, NewColumn, Texts, add_columns, check_split_name
from wdskit.dataset.index import Index, read_index, refuse_commit
from wdskit.dataset.lock import lock_folder
from wdskit.dataset.patterns import FolderShards, check_found
from wdskit.dataset.samples import HeaderReader, read_span
from wdskit.errors import DecodeError, FolderIndexError, SelectionError, StorageError
from wdskit.files import DISK, Disk, remove_temp_files
from wdskit.shards.parallel import Progress, choose_workers, local_folder, read_shards
from wdskit.storage.urls import LocalFile
from wdskit.text import as_int, plain_value, plural

SPLIT_SEED = 0
"""Default seed of `wdskit split`. `pack --split` uses this seed, so both give a key the same split."""

_SHARE = re.compile(r"(\d{1,18}(\.\d{1,18})?|\.\d{1,18})%?|\d{1,18}/0{0,9}[1-9]\d{0,17}", re.ASCII)
_MAX_SPLITS = 100
_EXAMPLE = "Write train=0.8,val=0.1,test=0.1."

Shares = Mapping[str, Fraction]
"""Share of each split by its name. Each share is over 0, their sum is 1, and their order divides the range of draws."""

_SAMPLE_BYTES = 1 << 10  # counted per sample: a process starts (0.5 s) for about 65,000 samples of 30 us each
_SHOWN_CHARS = 60
_MAX_CHARS = 1000


@dataclass(frozen=True)
class SplitPart:
    """One split.

    Attributes:
        wanted_ratio: The share that the caller asked for.
        num_groups: Number of different JSON values among the samples of the split; None for a split by key.
    """

    name: str
    wanted_ratio: float
    num_samples: int
    num_groups: int | None


@dataclass(frozen=True)
class SplitReport:
    """Result of `split`.

    Attributes:
        folder: The folder that was split, as the caller wrote it.
        parts: The splits, in the order of their shares.
        num_missing: Samples without the JSON value to split by; 0 for a split by key.
    """

    folder: str
    parts: tuple[SplitPart, ...]
    num_missing: int

    @property
    def num_samples(self) -> int:
        """Number of samples in all splits, which is the number of samples of the folder."""
        return sum(part.num_samples for part in self.parts)


def split(
    folder: str | Path,
    shares: str | Mapping[str, object],
    *,
    by: str = "key",
    seed: int = 0,
    missing: str | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> SplitReport:
    """Assign each sample of an indexed folder to a split, and write the splits as the column `split`: `wdskit split`.

    A sample's split depends only on the seed, the shares, and its key or the value that `by` names. The split stays the
    same if shards are added, reordered or packed again with other sizes. For changed shards, `wdskit index` writes the
    column again.

    Args:
        folder: A local folder with an index.
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping of names to shares. The shares add up to 1.
        by: `key`, or a JSON field and the path of a value in it (`json:patient.id`). Samples with the same value get
            the same split.
        seed: 0 <= seed < 2**64; a different seed gives a different split.
        missing: The split for samples without the value that `by` names. Default: such a sample is an error.
        overwrite: Whether to replace splits with other shares, another seed or another `by`.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data. The result does not
            depend on this number.
        progress: Called after each shard with the bytes read so far and the bytes of all shards.
        disk: Performs the file operations; tests replace it.

    Raises:
        SelectionError: The shares, `by`, `seed` or `missing` are invalid, samples lack the value, a split would get no
            sample, or the folder has another split and `overwrite` is not set.
            Or the list of columns is damaged, or several shards are invalid.
        FolderIndexError: The folder has no index, its index does not match its shards, a run of `pack` was stopped here
            while it moved its shards into place, or another process is writing.
        ShardError: One shard is invalid.
        StorageError: The folder does not exist, or cannot be read or written.
        WdskitError: A worker process was killed.
    """
    parsed = parse_shares(shares)
    split_key = parse_by(by, seed=as_int(seed), may_miss=missing is not None)
    if missing is not None and missing not in parsed:
        raise SelectionError(f"missing: there is no split {missing!r} among {format_shares(parsed)}.")
    source = _source(parsed, split_key, missing)
    path = local_folder(folder, command="split", done="split")
    with lock_folder(path):
        refuse_commit(path)
        index = read_index(path)
        check_found([FolderShards(index.folder, index, index.names)], with_sizes=True)
        _refuse_others(path, Columns(index), source, overwrite=overwrite)
        drawn = _draw_all(path, index, split_key, workers, progress)
        chosen = [choose_splits(draws, parsed) for draws, _ in drawn]
        if missing is not None:
            for numbers, shard in zip(chosen, drawn, strict=True):
                numbers[shard.missing] = list(parsed).index(missing)
        counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *chosen]), minlength=len(parsed)).tolist()
        _refuse_empty(path, parsed, dict(zip(parsed, counts, strict=True)))
        names = tuple(sorted(parsed))
        codes = np.array([names.index(name) for name in parsed])
        try:
            remove_temp_files(path, disk=disk)
            parts = [Texts(codes[numbers], names) for numbers in chosen]
            add_columns(index, {SPLIT_COLUMN: NewColumn(source, parts)}, disk=disk)
        except OSError as err:
            raise StorageError(f"{path}: the split cannot be written: {err.strerror}.", url=str(path)) from err
    return SplitReport(
        folder=str(folder),
        parts=tuple(
            SplitPart(
                name=name,
                wanted_ratio=float(share),
                num_samples=counts[number],
                num_groups=_count_groups(drawn, [one == number for one in chosen]) if split_key.field else None,
            )
            for number, (name, share) in enumerate(parsed.items())
        ),
        num_missing=sum(int(shard.missing.sum()) for shard in drawn),
    )


def _refuse_empty(folder: Path, shares: Shares, counts: Mapping[str, int]) -> None:
    """Raise SelectionError if a split gets no sample."""
    name = next((name for name, count in counts.items() if not count), None)
    if name is None:
        return
    msg = f"{folder}: split {name!r} (share {format_share(shares[name])}) would be empty, so nothing was written."
    divided = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    msg += f"\n  {plural(sum(counts.values()), 'sample')} would be divided into {divided}."
    raise SelectionError(f"{msg} Choose a larger share or another seed, or leave it out.", folder=str(folder))


def _source(shares: Shares, split_key: SplitKey, missing: str | None) -> dict[str, Any]:
    """Return the definition of a split, stored with its column. Shares that mean the same give the same definition.

    `missing` is the name of the split for samples without the value; None if such a sample is an error.
    """
    source: dict[str, Any] = {"split": format_shares(shares)}
    source |= {"by": split_key.text} if split_key.field else {}
    source |= {"missing": missing} if missing else {}
    return source | ({"seed": split_key.seed} if split_key.seed else {})


def _refuse_others(folder: Path, known: Columns, source: dict[str, Any], *, overwrite: bool) -> None:
    """Raise SelectionError if the folder has another split and `overwrite` is False. `source` is the definition of the
    new split.
    """
    if SPLIT_COLUMN in known and not overwrite and dict(known.column(SPLIT_COLUMN).source) != source:
        other = ", ".join(f"{name} {value}" for name, value in known.column(SPLIT_COLUMN).source.items())
        msg = f"{folder}: another split is already here and would be replaced: {other}."
        raise SelectionError(f"{msg}\n  Replace it with --overwrite.", folder=str(folder))


def _draw_all(
    folder: Path, index: Index, split_key: SplitKey, workers: int | None, progress: Progress | None
) -> list[ShardDraws]:
    """Return the draws of the samples of each shard.

    Raises:
        FolderIndexError: A shard has another number of samples than its index entry.
        SelectionError: A sample lacks the value to split by, or several shards are invalid.
        ShardError, StorageError: One shard is invalid or cannot be read.
    """
    entries = index.entries
    num_workers = choose_workers(len(entries), index.num_samples * _SAMPLE_BYTES) if workers is None else workers
    results = read_shards(
        partial(draw_shard, split_key=split_key),
        [str(folder / entry.name) for entry in entries],
        [entry.num_bytes for entry in entries],
        path=str(folder),
        workers=num_workers,
        progress=progress,
        problem="cannot be split, so nothing was written",
        error=partial(SelectionError, folder=str(folder)),
    )
    drawn = list(results)
    for entry, found in zip(entries, drawn, strict=True):
        if len(found.draws) != entry.num_samples:
            msg = f"{folder / entry.name}: it has {len(found.draws)} samples, but the folder's index says"
            msg += f" {entry.num_samples}.\n  If the shard is right, run `wdskit index {folder}`."
            raise FolderIndexError(msg, folder=str(folder))
    return drawn


def _count_groups(drawn: list[ShardDraws], parts: list[NDArray[np.bool_]]) -> int:
    """Return the number of different JSON values among the samples of one split.

    `parts` has a mask for each shard, bool (num_samples,): true for the samples of the split.
    """
    pairs = zip(drawn, parts, strict=True)
    groups = [np.unique(shard.draws[chosen & ~shard.missing]) for shard, chosen in pairs]
    return len(np.unique(np.concatenate([np.zeros(0, np.uint64), *groups])))


@dataclass(frozen=True)
class SplitKey:
    """What decides the split of a sample: its key, or a value in its JSON.

    Attributes:
        field: The JSON field; None if the key decides.
        path: Path of the value in the JSON.
        seed: Seed of the draws.
        may_miss: Whether samples may lack the value.
    """

    field: str | None
    path: tuple[str, ...]
    seed: int
    may_miss: bool = False

    @property
    def text(self) -> str:
        """The option `by` of `split`: `key` or `json:patient.id`."""
        return "key" if self.field is None else f"{self.field}:{'.'.join(self.path)}"

    def text_in(self, value: Any) -> str | None:
        """Return the value at `path` in the JSON `value`, as `canonical_text` does. ValueError: It is a list or an
        object.
        """
        for part in self.path:
            value = value.get(part) if isinstance(value, dict) else None
        return canonical_text(value)


class ShardDraws(NamedTuple):
    """The draws of a shard's samples.

    Attributes:
        draws: uint64 (num_samples,).
        missing: bool (num_samples,), true for a sample without the value to split by. The draw of such a sample is not
            used.
    """

    draws: NDArray[np.uint64]
    missing: NDArray[np.bool_]


def parse_by(by: str, *, seed: int, may_miss: bool) -> SplitKey:
    """Parse the option `by`: `key`, or a JSON field and the path of a value in it, such as `json:patient.id`.

    `seed` and `may_miss` are stored in the result.

    Raises:
        SelectionError: `by` has another form, `may_miss` is set for `key`, or the seed is not from 0 to 2**64 - 1.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise SelectionError(f"seed: {seed!r} must be a whole number, 0 or more, and below 2**64.")
    if by == "key":
        if may_miss:
            raise SelectionError("missing: every sample has a key, so it has no effect. Leave it out.")
        return SplitKey(None, (), seed)
    field, colon, way = by.partition(":")
    path = tuple(way.split("."))
    is_json = bool(colon) and field.rpartition(".")[2] in JSON_FIELDS
    if not is_json or "" in path or len(by) > _MAX_CHARS or not by.isprintable():
        raise SelectionError(f"by: {by!r} is neither `key` nor a value of a JSON field. Write key or json:patient.id.")
    return SplitKey(field, path, seed, may_miss)


def draw_shard(path: str, split_key: SplitKey) -> ShardDraws:
    """Return the draw of each sample of a local shard, in order, and which samples lack the value to split by.

    Only headers and the field `split_key.field` are read.

    Raises:
        SelectionError: A value is missing although `split_key.may_miss` is False, is a list or an object, or cannot be
            read. The error names shard, key and field.
        ShardError: The shard is invalid.
        StorageError: The shard cannot be read.
    """
    draw = make_draw(split_key.seed)
    digests: list[bytes] = []
    missing: list[bool] = []
    with contextlib.closing(LocalFile(path)) as file:
        for sample in HeaderReader(file, shard=path):
            text = sample["__key__"] if split_key.field is None else _text_of(file, path, sample, split_key)
            missing.append(text is None)
            digests.append(draw(text or ""))
    return ShardDraws(draws_of(digests), np.array(missing, dtype=np.bool_))


def _text_of(file: LocalFile, path: str, sample: dict[str, Any], split_key: SplitKey) -> str | None:
    """Return the JSON value that decides a sample's split, converted by `canonical_text`. Return None if the value is
    missing or empty, and `split_key.may_miss` is True. `path` is the path of the shard, for messages.

    Raises the SelectionErrors of `draw_shard`.
    """
    name, remedy = str(split_key.field), ""
    cause: Exception | None = None
    try:
        text = split_key.text_in(decode_field(name, read_span(file, sample[name])) if name in sample else None)
        if text is not None or split_key.may_miss:
            return text
        problem = f"{split_key.text} is missing or empty" if name in sample else f"it has no field {name}"
        remedy = "\n  To put the samples without it in one split, name that split with --missing."
    except DecodeError as err:
        problem, cause = str(err), err
    except ValueError as err:
        problem, cause = f"{split_key.text} {err}", err
    key, folder = sample["__key__"], str(Path(path).parent)
    msg = f"{path}: sample {key!r}: {problem}.{remedy}"
    raise SelectionError(msg, folder=folder, shard=path, key=key, field=split_key.text) from cause


def canonical_text(value: Any) -> str | None:
    """Convert a JSON value to text: 17, 17.0, "17" and "17.0" to the same, as `plain_value` does, and true and "true".

    Return None for null, NaN and blank text.

    Raises:
        ValueError: The value is a list or an object.
    """
    # Two versions of a table may differ in types. A group in two splits is worse than two groups with the same split.
    value = plain_value(value)
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | str | float):
        return str(value)
    shown = json.dumps(value)
    shown = f"{shown[:_SHOWN_CHARS]}..." if len(shown) > _SHOWN_CHARS else shown
    kind, remedy = ("an object", "a value inside it") if isinstance(value, dict) else ("a list", "a single value")
    msg = f"is {kind}, {shown}. Name {remedy}"
    raise ValueError(msg)


def make_draw(seed: int) -> Callable[[str], bytes]:
    """Return a function that hashes a text with `seed` to 8 bytes. `draws_of` converts the bytes to a draw."""
    keyed = hashlib.blake2b(digest_size=8, person=b"wdskit split", salt=seed.to_bytes(16, "little"))

    def draw(text: str) -> bytes:
        one = keyed.copy()
        one.update(text.encode("utf-8", "surrogatepass"))
        return one.digest()

    return draw


def draws_of(digests: Iterable[bytes]) -> NDArray[np.uint64]:
    """Convert hashes of 8 bytes to draws from 0 to 2**64 - 1: uint64 (num_digests,)."""
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def parse_shares(shares: str | Mapping[str, object]) -> Shares:
    """Parse the names and shares of splits. Return the share of each split, in the given order.

    Args:
        shares: `train=0.8,val=0.1,test=0.1`, or a mapping. A share is a decimal, a fraction (`1/3`) or a percentage
            (`80%`); the float 0.1 means exactly 1/10.

    Raises:
        SelectionError: A share is not a number over 0 and at most 1, a name is invalid or comes twice, the sum is not
            1, or there are over 100 splits.
    """
    pairs = _split_text(shares) if isinstance(shares, str) else list(shares.items()) or _split_text("")
    if len(pairs) > _MAX_SPLITS:
        raise SelectionError(f"{len(pairs)} shares are more than the {_MAX_SPLITS} splits that a folder can have.")
    found: dict[str, Fraction] = {}
    for name, value in pairs:
        check_split_name(name)
        if name in found:
            raise SelectionError(f"the shares name {name!r} twice. {_EXAMPLE}")
        found[name] = _parse_share(name, value)
    total = sum(found.values(), Fraction(0))
    if total != 1:
        msg = f"the shares {format_shares(found)} add up to {format_share(total)}, not to 1."
        if total < 1:
            msg += f"\n  Name the rest too: add unused={format_share(1 - total)}."
        raise SelectionError(msg)
    return found


def _split_text(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for part in text.split(","):
        name, equals, share = part.partition("=")
        if not equals:
            raise SelectionError(f"{part.strip()!r} is not NAME=SHARE. {_EXAMPLE}")
        pairs.append((name.strip(), share.strip()))
    return pairs


def _parse_share(name: str, value: object) -> Fraction:
    """Parse the share of split `name`. The float 0.1 gives exactly 1/10. SelectionError: `value` is not a share."""
    share = Fraction(0)
    if isinstance(value, int | Fraction) and not isinstance(value, bool):
        share = Fraction(value)
    else:
        text = format(Decimal(repr(float(value))), "f") if isinstance(value, float) else str(value)
        if _SHARE.fullmatch(text):
            share = Fraction(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share <= 1:
        raise SelectionError(f"{name}={value} is not a share: a share is more than 0 and at most 1. {_EXAMPLE}")
    return share


def format_share(share: Fraction) -> str:
    """Return the shortest exact text of a share: a decimal if one exists, otherwise a fraction."""
    for digits in range(19):
        scaled = share * 10**digits
        if scaled.denominator == 1:
            number = f"{scaled.numerator:0{digits + 1}d}"
            return f"{number[:-digits]}.{number[-digits:]}" if digits else number
    return f"{share.numerator}/{share.denominator}"


def format_shares(shares: Shares) -> str:
    """Return the text from which `parse_shares` returns the same shares."""
    return ",".join(f"{name}={format_share(share)}" for name, share in shares.items())


def bounds_of(shares: Shares) -> NDArray[np.uint64]:
    """Return the smallest draw of each split after the first split: uint64 (num_splits - 1,), ascending."""
    sums = list(accumulate(shares.values()))[:-1]
    return np.array([int(total * (1 << 64)) for total in sums], dtype=np.uint64)


def choose_splits(draws: NDArray[np.uint64], shares: Shares) -> NDArray[np.int64]:
    """Return the split of each draw, as its position in `shares`: int64 (num_draws,)."""
    return np.searchsorted(bounds_of(shares), draws, side="right")
