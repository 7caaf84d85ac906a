"""Which samples are taken over: a share of all keys, and those for which a filter holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from wdskit.errors import PackError
from wdskit.shards.filters import Expression
from wdskit.shards.sampling import parse_share

_PURPOSE = b"wdskit sample"
_DRAWS = 1 << 64


@dataclass(frozen=True)
class Choice:
    """Which samples stay. The first that says no counts: the share, then the filter.

    Attributes:
        threshold: Of a key's draw, below which it stays; None for all.
        seed: Of the draws, 0 <= seed < 2**64.
        filter: What must hold; None for nothing.
        skip_missing: Whether a sample without what the filter asks for goes, instead of being an error.
    """

    threshold: int | None = None
    seed: int = 0
    filter: Expression | None = None
    skip_missing: bool = False

    @property
    def is_all(self) -> bool:
        """Whether every sample stays."""
        return self.threshold is None and self.filter is None

    def draw(self, key: str) -> int:
        """0 to 2**64 - 1, from the seed and the key alone: a key is in or out for ever, wherever it stands."""
        salt = self.seed.to_bytes(16, "little")
        data = key.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=_PURPOSE, salt=salt).digest(), "little")


def threshold_of(share: Fraction) -> int | None:
    """The draw below which a share of all keys lies; None for all of them."""
    return None if share == 1 else int(share * _DRAWS)


def make_choice(*, filter: str | None, missing: str, sample: str | None, seed: int) -> Choice:  # noqa: A002
    """The choice that options describe.

    Raises:
        PackError: One of them is wrong, or would change nothing.
        SelectionError: The filter is no expression.
        ConfigError: The share is none.
    """
    check_word("missing", missing, ("error", "skip"))
    if missing == "skip" and filter is None:
        raise PackError("missing: it has no effect without a filter. Leave it out.")
    check_seed("seed", seed)
    if seed and sample is None:
        raise PackError("seed: it belongs to --sample. For the order of the samples, use --shuffle SEED.")
    threshold = None if sample is None else threshold_of(parse_share(sample))
    return Choice(threshold, seed, None if filter is None else Expression(filter), missing == "skip")


def check_word(option: str, word: str, known: Sequence[str]) -> None:
    """Refuse a word that an option does not know."""
    if word not in known:
        raise PackError(f"{option}: {word!r} is not one of {', '.join(map(repr, known))}.")


def check_seed(option: str, seed: int | None) -> None:
    """Refuse what is no seed; None is none."""
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
        raise PackError(f"{option}: the seed {seed!r} must be 0 or more, and below 2**64.")


def check_workers(workers: int) -> None:
    """Refuse what is no number of processes."""
    if type(workers) is not int or workers < 1:
        raise PackError(f"workers: {workers!r} is not a number of processes; it is 1 or more.")
