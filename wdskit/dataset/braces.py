"""Split the shard patterns of a user at `::`, and expand braces. The name of an existing file is never split or
expanded.

`parse_factors` parses the upsampling factors that open_clip takes for the `::`-parts.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import reprlib
from collections.abc import Iterator, Sequence

from wdskit.errors import PipelineError, StorageError
from wdskit.limits import MAX_SHARD_NAMES
from wdskit.storage.urls import scheme_of

_JOINT = re.compile(r"::(?![^\[\]/]*\])")  # but not inside http://[::1]/
_BRACES = re.compile(  # the tokens of a brace pattern: a range of numbers or letters, an escape, a brace, a comma
    r"\{(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.-?(\d+))?\}|\\.|[{},]"
)
_MAX_DIGITS = 18


def expand_parts(shards: str | Sequence[str]) -> list[Iterator[str]]:
    """Return one iterator for each `::`-part of `shards`, in order. Each iterator yields the paths, URLs, globs and
    folders of its part, with braces expanded. In a list, each item may have several parts.

    Raises:
        StorageError: At the call: a pattern is empty, its braces do not match, it names more than 2,000,000 shards, or
            its URL is invalid or has an unsupported scheme.
    """
    items = [shards] if isinstance(shards, str) else shards
    return [expand_braces(part) for item in items for part in split_parts(item)]


def expand_patterns(shards: str | Sequence[str]) -> Iterator[str]:
    """Return an iterator over the paths, URLs, globs and folders of all `::`-parts in order, with braces expanded. The
    call raises StorageError if a pattern is empty or invalid, or names more than 2,000,000 shards.
    """
    return itertools.chain.from_iterable(expand_parts(shards))


def split_parts(item: str) -> list[str]:
    """Return the parts of a text that `::` separates. The name of an existing file is not split. The `::` of an
    IPv6 address in brackets does not separate: `http://[::1]/a.tar` is one part.
    """
    return [item] if "::" in item and os.path.lexists(item) else _JOINT.split(item)


def expand_braces(pattern: str) -> Iterator[str]:
    """Return an iterator over the names of a brace pattern such as `a-{000..127}.tar`, in order. The name of an
    existing file and a pattern without braces are yielded unchanged.

    Raises:
        StorageError: At the call: the pattern is empty, its braces do not match, it names more than 2,000,000 shards,
            or its URL is invalid or has an unsupported scheme.
    """
    if not pattern:
        raise StorageError("a shard pattern is empty. Name a path, a glob, a brace pattern or a folder.")
    scheme_of(pattern)
    if "{" not in pattern or os.path.lexists(pattern):
        return iter((pattern,))
    import braceexpand

    try:
        if _count_names(pattern) <= MAX_SHARD_NAMES:
            return braceexpand.braceexpand(pattern)
    except (ValueError, RecursionError) as err:
        msg = f"{pattern}: its braces do not match. Write {{000000..000127}} or {{a,b}}."
        raise StorageError(msg, url=pattern) from err
    msg = f"{pattern}: it names more than {MAX_SHARD_NAMES} shards. Name fewer, or a folder or a glob."
    raise StorageError(msg, url=pattern)


def _count_names(pattern: str) -> int:
    """Return how many names a brace pattern has at most. `MAX_SHARD_NAMES + 1` stands for any larger number. Raises
    ValueError if the braces do not match.
    """
    limit = MAX_SHARD_NAMES + 1
    open_braces = [[0, 1]]  # for each open brace: number of names of its complete alternatives, and of the current one
    for match in _BRACES.finditer(pattern):
        part, inner = match[0], open_braces[-1]
        if part == "{":
            open_braces.append([0, 1])
        elif part == "}":
            del open_braces[-1]
            if not open_braces:
                break
            open_braces[-1][1] = min(limit, open_braces[-1][1] * sum(inner))
        elif part == "," and len(open_braces) > 1:
            inner[:] = min(limit, sum(inner)), 1
        elif len(part) > 2:
            inner[1] = min(limit, inner[1] * _count_range(*match.groups()))
    if len(open_braces) != 1:
        raise ValueError("unbalanced braces")
    return open_braces[0][1]


def _count_range(first: str | None, last: str | None, first_letter: str, last_letter: str, step: str | None) -> int:
    """Return how many names a range in braces has at most: `{first..last..step}`, or
    `{first_letter..last_letter..step}` if `first` or `last` is None. `step` is None if the range has no step. If a
    number has more than `_MAX_DIGITS` characters, return `MAX_SHARD_NAMES + 1`.
    """
    if first is None or last is None:
        return abs(ord(last_letter) - ord(first_letter)) + 1
    if max(map(len, (first, last, step or ""))) > _MAX_DIGITS:
        return MAX_SHARD_NAMES + 1
    return abs(int(last) - int(first)) // (int(step or 1) or 1) + 1


def parse_factors(factors: str, num_parts: int) -> tuple[float, ...]:
    """Parse open_clip's `--train-data-upsampling-factors`, such as `1::2`. Return `num_parts` factors, one for each
    `::`-part of the shards.

    Raises:
        PipelineError: The number of factors is not `num_parts`, a factor is negative or not a finite number, or all
            factors are 0.
    """
    found = []
    for text in factors.split("::"):
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not 0 <= factor < math.inf:
            msg = f"{reprlib.repr(text)} is not an upsampling factor: a number, 0 or more."
            raise PipelineError(f"{msg} Write one for each part, as 1::2.")
        found.append(factor)
    if len(found) != num_parts:
        msg = f"{reprlib.repr(factors)}: {len(found)} factors for {num_parts} parts of shards."
        raise PipelineError(f"{msg} Write one for each, as 1::2.")
    if not any(found):
        raise PipelineError(f"{reprlib.repr(factors)}: all factors are 0, so nothing would be drawn. Write 1::2.")
    return tuple(found)
