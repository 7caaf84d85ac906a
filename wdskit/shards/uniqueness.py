"""Keys that stand in more than one place, found among 64-bit hashes and confirmed by reading them again.

16 bytes a sample are held (hash and offset) and 8 more while they are sorted: 240 MB for 10**7 keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wdskit.dataset.keys import split_name
from wdskit.errors import WdskitError
from wdskit.limits import MAX_CHECKED_BYTES
from wdskit.shards.findings import MAX_LISTED, Finding, shorten
from wdskit.shards.reports import ShardReport
from wdskit.storage.urls import LocalFile
from wdskit.tar.reader import locate_members

MAX_PLACES = 3
"""Places of one key that are looked up."""


def find_repeats(folder: str, reports: Sequence[ShardReport]) -> tuple[Finding, ...]:
    """One finding for each key that comes twice, up to `MAX_LISTED`.

    Args:
        folder: What the findings name where the key cannot be read again.
        reports: All shards that should have no key in common.
    """
    repeated = repeated_hashes([one.hashes for one in reports])
    if not len(repeated):
        return ()
    places: dict[int, list[tuple[ShardReport, int]]] = {}
    for report in reports:
        for number in np.flatnonzero(is_among(report.hashes, repeated)).tolist():
            known = places.get(int(report.hashes[number]))
            if known is None and len(places) < MAX_LISTED:
                places[int(report.hashes[number])] = [(report, number)]
            elif known is not None and len(known) < MAX_PLACES:
                known.append((report, number))
    found = [finding for known in places.values() if (finding := _confirm(folder, known))]
    more = len(repeated) - len(places)
    if found and more > 0:
        last = found[-1]
        found[-1] = Finding("repeated", last.file, last.problem, last.offset, last.key, more)
    return tuple(found)


def repeated_hashes(parts: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Hashes that come more than once, sorted."""
    if not parts:
        return np.empty(0, dtype=np.uint64)
    hashes = np.concatenate(parts)
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def is_among(hashes: NDArray[np.uint64], among: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of the hashes are among others, of which there is one at least and which are sorted."""
    at = np.minimum(np.searchsorted(among, hashes), len(among) - 1)
    return np.asarray(among[at] == hashes)


def _confirm(folder: str, places: Sequence[tuple[ShardReport, int]]) -> Finding | None:
    """The finding, unless the keys differ and only their hashes are equal: once in 400,000 data sets of 10**7 keys."""
    seen: dict[str, ShardReport] = {}
    for report, number in places:
        key = read_key(report, number)
        if key is None:
            problem = f"sample {number} has a key that another sample has, and cannot be read again"
            return Finding("repeated", report.path or folder, problem, int(report.starts[number]))
        if key in seen:
            where = "in two places that are not side by side" if seen[key] is report else f"in {seen[key].path} too"
            return Finding("repeated", report.path, f"it stands {where}", int(report.starts[number]), shorten(key))
        seen[key] = report
    return None


def read_key(report: ShardReport, number: int) -> str | None:
    """The key of a sample, from its headers; None where it cannot be had any more."""
    start, stop = int(report.starts[number]), int(report.starts[number + 1])
    if stop <= start or stop - start > MAX_CHECKED_BYTES:
        stop = start + MAX_CHECKED_BYTES
    try:
        file = LocalFile(report.path)
        try:
            data = file.read_at(start, stop - start)
        finally:
            file.close()
        members = locate_members(data, shard=report.path, offset=start, stop=len(data))
        return next(split[0] for name, _, _ in members if (split := split_name(name)))
    except (WdskitError, StopIteration):
        return None
