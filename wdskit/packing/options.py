"""The options of `pack` that are passed on together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from wdskit.errors import PackError
from wdskit.export.api import parse_exports
from wdskit.packing.plan import Limits
from wdskit.packing.ray import check_address
from wdskit.packing.transforms import UNTOUCHED, Transforms, transform_versions
from wdskit.shards.shares import Shares, format_shares


@dataclass(frozen=True)
class PackOptions:
    """As `pack` takes them.

    Raises:
        PackError: One is out of range.
        ConfigError: `also` holds what is no kind.
    """

    limits: Limits
    shuffle: int | None
    skip_bad: bool
    keys: str
    append: bool
    workers: int
    dry_run: bool = False
    overwrite: bool = False
    restart: bool = False
    part: tuple[int, int] | None = None
    only: int | None = None
    also: Sequence[str] = ()
    split_name: str = ""
    split: Shares | None = None
    on: str | None = None
    transforms: Transforms = UNTOUCHED
    threads: int = 1
    command: str = "pack"

    def __post_init__(self) -> None:
        if self.keys not in ("given", "clean", "hashed"):
            raise PackError(f"keys: {self.keys!r} is none of 'given', 'clean' and 'hashed'.")
        if type(self.workers) is not int or self.workers < 1:
            raise PackError(f"workers: {self.workers!r} is no number of processes; 1 is this one.")
        if type(self.threads) is not int or self.threads < 1:
            raise PackError(f"threads: {self.threads!r} is no number of threads; 1 is this one.")
        if self.shuffle is not None and (type(self.shuffle) is not int or not 0 <= self.shuffle < 1 << 64):
            raise PackError(f"shuffle: the seed {self.shuffle!r} must be 0 or more, and below 2**64.")
        parse_exports(self.exports, split_name=self.split_name)

        given = {name: getattr(self, name) for name in ("append", "overwrite", "dry_run", "part", "only")}
        asked = [name for name, value in given.items() if value is not None and value is not False]
        for one, other in itertools.combinations(asked, 2):
            if {one, other} not in ({"append", "part"}, {"append", "dry_run"}, {"overwrite", "dry_run"}):
                raise PackError(f"{one} and {other} do not go together. Leave one of them out.")
        if self.only is not None and (type(self.only) is not int or self.only < 0):
            raise PackError(f"only: {self.only!r} is no number of a shard; the first is 0.")
        if self.on is not None:
            check_address(self.on)
            if self.workers > 1:
                raise PackError("workers and on do not go together: the cluster has workers of its own.")
            if self.only is not None:
                raise PackError("only and on do not go together: one shard is filled here.")
        if self.split is not None:
            if self.only is not None:
                raise PackError("only and split do not go together: each split has a shard of that number.")
            if self.split_name:
                raise PackError("split_name and split do not go together: the shards are called after their splits.")

    @property
    def may_add(self) -> bool:
        """Whether there is a word for adding to a folder."""
        return self.command == "pack"

    def described(self) -> dict[str, object]:
        """Those that a shard could depend on, by name."""
        split = None if self.split is None else format_shares(self.split)
        return {
            **self.limits.described(),
            "split": split,
            "shuffle": self.shuffle,
            "skip_bad": self.skip_bad,
            "append": self.append,
        } | {
            **asdict(self.transforms),
            **{f"version of {name}": version for name, version in transform_versions(self.transforms).items()},
        }

    def check_stream(self) -> None:
        """Refuse what needs a plan: rows come once only.

        Raises:
            PackError: Names the option.
        """
        asked = {
            "workers": self.workers > 1,
            "shuffle": self.shuffle is not None,
            "num_shards": self.limits.num_shards is not None,
            "multiple_of": self.limits.multiple_of is not None,
            "dry_run": self.dry_run,
            "duplicates": self.transforms.duplicates != "keep",
            "part": self.part is not None,
            "only": self.only is not None,
            "split": self.split is not None,
            "on": self.on is not None,
        }
        for what, is_asked in asked.items():
            if is_asked:
                msg = f"{what}: rows that can be read once only are packed in one pass."
                raise PackError(f"{msg} Give a list, or leave it out.")


def parse_part(text: str) -> tuple[int, int]:
    """Number of a part, from 0, and how many there are: `3/8` is the fourth of eight.

    Raises:
        PackError: It is none.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if part >= parts:
        parts = parts or 8
        raise PackError(f"part: {text!r} is no part. Those of {parts} are 0/{parts} to {parts - 1}/{parts}.")
    return part, parts
