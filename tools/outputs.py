"""What the benchmarks compare before they print a figure: the members of shards, by tarfile and hashlib."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

Digests = dict[str, str]
"""sha256 by a member's name."""


def digests_of(shards: Iterable[Path]) -> Digests:
    """The files in all these shards, without `./` before their names. SystemExit where a name comes twice."""
    found: Digests = {}
    for path in shards:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                name = member.name.removeprefix("./")
                file = tar.extractfile(member)
                assert file is not None
                if name in found:
                    raise SystemExit(f"{path}: {name} comes twice")
                found[name] = hashlib.sha256(file.read()).hexdigest()
    return found


def must_equal(what: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """End the benchmark, naming the first difference: its figures would be of something else."""
    if found == expected:
        return
    name = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
    state = "missing" if name not in found else "not expected" if name not in expected else "different"
    raise SystemExit(f"{what}: {name} is {state} ({len(found)} of {len(expected)} are there). No figure is printed.")
