"""The record of a run in the folder that it packs into, from before its first shard until its index is there.

`.wdskit-pack.json` says what is packed: options, version, digests of the plan, the shards. A run that finds one goes on
with it, or says what has changed since. `.wdskit-pack.log` has a line for each shard that was published, so that no
later run packs it again; each part of a run in parts writes a log of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdskit import __version__
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.offsets import offsets_path
from wdskit.dataset.unfinished import RECORD_NAME
from wdskit.errors import PackError
from wdskit.packing.plan import Names
from wdskit.packing.planning import PlannedShard

RECORD_VERSION = 1
_LOG = ".wdskit-pack{}.log"
_SHOWN = 5


@dataclass(frozen=True)
class RunRecord:
    """What is packed.

    Attributes:
        options: All options that a shard could depend on, by name; `command` where it is not `pack`.
        num_rows: Rows of the source, of `reshard` its shards; None for rows that can be read once only.
        block_rows: Rows that each digest is over.
        blocks: Hex digests of the rows in the order of the source, bad ones included.
        shards: What is planned; None for rows that can be read once only.
        found: Names of these shards, and of lists beside them, that something else had written before.
        replaces: Files of the data set that this one replaces, while they are being removed.
        wdskit: Version.
        parts: Into how many parts it is divided; 0 where it is not, which writes its lists at its end.
    """

    options: Mapping[str, Any]
    num_rows: int | None
    block_rows: int
    blocks: tuple[str, ...]
    shards: tuple[PlannedShard, ...] | None
    found: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    wdskit: str = __version__
    parts: int = 0

    @property
    def unit(self) -> str:
        """What its source is made of: rows, or of `reshard` shards."""
        return "shard" if self.options.get("command") == "reshard" else "row"

    def to_json(self) -> bytes:
        """The file."""
        document = {"wdskit_pack": RECORD_VERSION, **dataclasses.asdict(self)}
        return (json.dumps(document, ensure_ascii=True, indent=1, default=str) + "\n").encode()

    @property
    def digest(self) -> str:
        """What the lines of its logs begin with: the same as long as it packs the same."""
        same = dataclasses.replace(self, found=(), replaces=(), parts=0)
        return hashlib.sha256(same.to_json()).hexdigest()[:16]


def read_record(folder: Path) -> RunRecord | None:
    """The record in a folder, None where there is none.

    Raises:
        PackError: It cannot be read.
    """
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_bytes())
        if document.pop("wdskit_pack") != RECORD_VERSION:
            raise ValueError  # noqa: TRY301
        shards = document.pop("shards")
        planned = None if shards is None else tuple(PlannedShard(*shard) for shard in shards)
        lists: dict[str, Any] = {name: tuple(document.pop(name)) for name in ("blocks", "found", "replaces")}
        return RunRecord(shards=planned, **lists, **document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        msg = f"{path}: it is no record of a run that this wdskit can read."
        raise PackError(f"{msg}\n  Pack into another folder, or remove it and the shards of that run.") from err


def differences(old: RunRecord, new: RunRecord, where_of: Callable[[int], str]) -> list[str]:
    """What differs, a sentence each.

    Args:
        old: The record of a run that was stopped.
        new: That of this one.
        where_of: Where a row of this one comes from, by its number.
    """
    was, now = _plain(old.options), _plain(new.options)
    commands = [options.pop("command", "pack") for options in (was, now)]
    if commands[0] != commands[1]:
        return ["it was `wdskit {}` and is `wdskit {}`.".format(*commands)]
    told = [] if old.wdskit == new.wdskit else [f"wdskit was {old.wdskit} and is {new.wdskit}."]
    told += [
        f"{name} was {was.get(name)!r} and is {now.get(name)!r}."
        for name in sorted({*was, *now})
        if was.get(name) != now.get(name)
    ]
    if (old.num_rows is None) != (new.num_rows is None):
        return [*told, "only one of both sources can be read more than once."]
    if old.num_rows != new.num_rows:
        told.append(f"the source had {old.num_rows} {old.unit}s and has {new.num_rows}.")
    if old.block_rows == new.block_rows:
        told += _other_rows(old, new, where_of)
    if not told and old.shards != new.shards:
        told.append("its shards would be others.")
    return told


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are read back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(options), default=str))
    return plain


def _other_rows(old: RunRecord, new: RunRecord, where_of: Callable[[int], str]) -> Iterator[str]:
    pairs = zip(old.blocks, new.blocks, strict=False)
    others = [number for number, (a, b) in enumerate(pairs) if a != b]
    if not others:
        return
    first = others[0] * new.block_rows
    where = f"{new.unit} {first} ({where_of(first)})"
    if new.block_rows == 1:
        yield f"{where} is another, the first of {len(others)}."
    else:
        most = len(others) * new.block_rows
        yield f"the first other {new.unit} is one of {new.block_rows} from {where} on, of up to {most} in all."


def log_path(folder: Path, part: tuple[int, int] | None = None) -> Path:
    """Where a run, or a part of it (its number, and how many there are), lists what it has published."""
    return folder / _LOG.format("" if part is None else f"-{part[0]}-of-{part[1]}")


def log_paths(folder: Path) -> list[Path]:
    """All such lists in a folder."""
    return sorted(folder.glob(_LOG.format("*")))


def log_line(record: RunRecord, entry: ShardEntry) -> str:
    """The line of a shard that was published."""
    told = entry.name, entry.num_samples, entry.num_bytes, entry.sha256, entry.fields, entry.idx_sha256
    return json.dumps([record.digest, *told])


def read_logs(folder: Path, record: RunRecord) -> dict[str, ShardEntry]:
    """The shards that runs of this record have published and that are there with their size, by name."""
    found: dict[str, ShardEntry] = {}
    for path in log_paths(folder):
        for line in path.read_bytes().splitlines():
            entry = _parse(line, record.digest)
            if entry is not None and is_there(folder, entry):
                found[entry.name] = entry
    return found


def _parse(line: bytes, digest: str) -> ShardEntry | None:
    """An entry; None where the line was cut short or belongs to another run."""
    try:
        owner, name, num_samples, num_bytes, sha256, fields, idx_sha256 = json.loads(line)
    except (ValueError, TypeError):
        return None
    return ShardEntry(name, num_samples, num_bytes, sha256, tuple(fields), idx_sha256) if owner == digest else None


def is_there(folder: Path, entry: ShardEntry) -> bool:
    """Whether a shard and its offsets have the sizes that they had."""
    sizes = {folder / entry.name: entry.num_bytes, offsets_path(folder / entry.name): 8 * (entry.num_samples + 1)}
    return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


def shards_of(folder: Path, record: RunRecord) -> list[str]:
    """Names of a run's shards; of a stream of those that are there without a gap."""
    if record.shards is not None:
        return [shard.name for shard in record.shards]
    pattern, number = Names(record.options["pattern"]), record.options["first"]
    names = []
    while (folder / pattern[number]).exists():
        names.append(pattern[number])
        number += 1
    return names


def changed(folder: Path, told: Sequence[str], num_shards: int) -> PackError:
    """The error of a run that is not the one that was stopped here."""
    msg = f"{folder}: a run that was stopped here was another one; {num_shards} of its shards are there.\n  "
    remedy = "Do the same again to go on with it, or begin anew with --restart, which removes these shards."
    return PackError(f"{msg}{shown(told)}\n  {remedy}")


def shown(told: Sequence[str]) -> str:
    """The first of several sentences, as further lines of a message."""
    more = [f"... and {len(told) - _SHOWN} more."] if len(told) > _SHOWN else []
    return "\n  ".join([*told[:_SHOWN], *more])
