"""What `verify` found: plain values for people, scripts and tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from wdskit.limits import MAX_LISTED
from wdskit.text import plural, shorten

Kind = Literal[
    "structure", "digest", "bytes", "samples", "fields", "missing", "unlisted", "unreadable", "index", "offsets",
    "name", "repeated", "odd", "json", "image", "skew", "outdated", "unfinished", "label",
]  # fmt: skip
"""What a finding is about.

`structure` the tar or the order of its members; `digest`, `bytes`, `samples`, `fields` differ from the index, or there
are no samples at all; `missing` and `unlisted` shards; `unreadable` files; `index` index.json or index.bin themselves;
`offsets` the .idx; `name` a member whose name no sample should have; `repeated` keys in two shards, or twice in one;
`odd` samples without the fields of the others; `json`, `image` a field that does not read; `skew` shards that do not
feed all workers alike; `outdated` files for other readers (`wdskit export`) that do not match the shards or the
index; `unfinished` a folder with a run of `pack` that is not finished;
`label` a `cls` that is not a whole number, or not the number of a class in classes.json.
"""

NOTES: frozenset[Kind] = frozenset({"odd"})
"""Kinds that are worth a look and no fault: samples may have other fields than most."""


@dataclass(frozen=True)
class Finding:
    """One fault, or a note.

    Attributes:
        kind: What it is about.
        file: Path of the shard or index file, or of the folder if it concerns all shards.
        problem: What is wrong, with the value.
        offset: Byte in the file, if known.
        key: Key of the sample, if it concerns one.
        more: Number of further findings of this kind in this file, which are not listed.
    """

    kind: Kind
    file: str
    problem: str
    offset: int | None = None
    key: str | None = None
    more: int = 0

    def __str__(self) -> str:
        place = "" if self.offset is None else f", byte {self.offset}"
        key = "" if self.key is None else f"key {self.key!r}: "
        more = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.file}{place}: {key}{self.problem}{more}"


@dataclass(frozen=True)
class VerifyResult:
    """What `wdskit.verify` did and found.

    Attributes:
        path: As the user wrote it.
        num_shards: Shards that were read.
        num_samples: Whole samples that were read; of a damaged shard, those before the damage.
        num_bytes: Bytes that were read.
        num_images: Images that were checked.
        num_large: Members that are too large to check; only their bytes were compared with the digest.
        num_ignored: Members that belong to no sample.
        is_indexed: Whether there was an index to compare with.
        findings: All faults and notes, in the order of the shards.
    """

    path: str
    num_shards: int
    num_samples: int
    num_bytes: int
    num_images: int
    num_large: int
    num_ignored: int
    is_indexed: bool
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        """Return one line: the path, what was read, and the number of faults."""
        num_faults = sum(1 + finding.more for finding in self.findings if finding.kind not in NOTES)
        read = f"{plural(self.num_samples, 'sample')} in {plural(self.num_shards, 'shard')}"
        return f"VerifyResult({self.path}: {read}, {'clean' if self.is_clean else plural(num_faults, 'fault')})"

    @property
    def is_clean(self) -> bool:
        """Whether no fault was found; there may be notes (`NOTES`)."""
        return all(finding.kind in NOTES for finding in self.findings)


class FindingList:
    """Collects the findings of one file; of each kind the first few, and the number of the rest."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._found: list[Finding] = []
        self._counts: dict[Kind, int] = {}

    def add(self, kind: Kind, problem: str, *, offset: int | None = None, key: str | None = None) -> None:
        """Note one."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= MAX_LISTED:
            self._found.append(Finding(kind, self.file, shorten(problem), offset, key and shorten(key)))

    def listed(self) -> tuple[Finding, ...]:
        """The findings in the order in which they came; the last listed of a kind says how many were not."""
        found = list(self._found)
        for kind, count in self._counts.items():
            if count > MAX_LISTED:
                last = max(at for at, one in enumerate(found) if one.kind == kind)
                found[last] = replace(found[last], more=count - MAX_LISTED)
        return tuple(found)
