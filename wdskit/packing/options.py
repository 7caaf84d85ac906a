"""The options of `pack` that are passed on together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wdskit.errors import PackError
from wdskit.packing.plan import Limits
from wdskit.shards.also import parse_also


@dataclass(frozen=True)
class PackOptions:
    """As `pack` takes them.

    Raises:
        PackError: One is out of range.
        ConfigError: `also` holds what is no kind.
    """

    limits: Limits
    pattern: str | None
    shuffle: int | None
    skip_bad: bool
    keys: str
    append: bool
    workers: int
    dry_run: bool
    also: Sequence[str] = ()
    split_name: str = ""

    def __post_init__(self) -> None:
        if self.keys not in ("given", "hashed"):
            raise PackError(f"keys: {self.keys!r} is neither 'given' nor 'hashed'.")
        if type(self.workers) is not int or self.workers < 1:
            raise PackError(f"workers: {self.workers!r} is no number of processes; 1 is this one.")
        if self.shuffle is not None and (type(self.shuffle) is not int or not 0 <= self.shuffle < 1 << 64):
            raise PackError(f"shuffle: the seed {self.shuffle!r} must be 0 or more, and below 2**64.")
        parse_also(self.also, split_name=self.split_name)

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
        }
        for what, is_asked in asked.items():
            if is_asked:
                msg = f"{what}: rows that can be read once only are packed in one pass."
                raise PackError(f"{msg} Give a list, or leave it out.")
