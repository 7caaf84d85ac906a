"""Check one shard in one pass, and report its faults as findings. The check continues after each fault."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.checks import ImageCheck, check_image_field
from wdskit.codecs.fields import decode_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD, CLASSES_NAME
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.keys import hash_key
from wdskit.dataset.patterns import ABSENT, LISTED_ABSENT
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import IDX_SUFFIX, DigestedFile, offsets_path, parse_offsets
from wdskit.errors import DecodeError, FolderIndexError, ShardError, StorageError
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES, MAX_IDX_BYTES, MAX_LISTED
from wdskit.storage.urls import is_local, open_stream, read_bytes, shown_url
from wdskit.tar.window import LargeData
from wdskit.text import shorten

Kind = Literal[
    "structure", "digest", "bytes", "samples", "fields", "missing", "unlisted", "unreadable", "index", "offsets",
    "name", "repeated", "odd", "content", "unfinished", "unchecked", "beside",
]  # fmt: skip
"""The kind of a finding.

`structure`: the tar is damaged or its members are in a wrong order. `digest`, `bytes`, `fields`: the shard differs from
the index. `samples`: their number differs from the index, or the shards have no samples. `missing`: a listed shard does
not exist. `unlisted`: the index lacks a shard that was named. `unreadable`: a file cannot be read. `index`: index.json,
the columns or classes.json are damaged. `offsets`: the .idx is damaged. `name`: a member has an unsafe or invalid name.
`repeated`: a key comes twice. `odd`: samples have other fields than most. `content`: a field cannot be decoded, or a
`cls` is not the number of a class in classes.json. `unfinished`: a run of `pack` in the folder is active or was
stopped. `unchecked`: the columns of a remote folder could not be read or copied. `beside`: a folder has tars that its
index does not list, which are not part of the data.
"""

NOTES: frozenset[Kind] = frozenset({"odd", "unchecked", "beside"})
"""Kinds that are not faults."""


@dataclass(frozen=True)
class Finding:
    """One fault or note.

    Attributes:
        kind: The kind of the fault or note.
        file: Path of the shard or index file, or of the folder if the finding concerns all shards.
        problem: What is wrong, with the value.
        offset: Byte offset in the file; None if unknown.
        key: Key of the sample; None if the finding does not concern one sample.
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


Fields = tuple[str, ...]
"""Sorted names of fields."""

_OWN_FIELDS = {"__key__", "__url__"}

MAX_FIELD_SETS = 100
"""Most sets of fields that are counted separately in one shard."""

OTHER_FIELDS: Fields = ("...",)
"""Replaces all field sets after the first `MAX_FIELD_SETS`."""

DRAIN_BYTES = 1 << 20

_UNSAFE_KEY = re.compile(r"(\A|/)\.\./|\A/|[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class CheckJob:
    """One shard to check. A job is sent to a worker process.

    Attributes:
        path: Path or URL of the shard.
        entry: The shard's entry in the folder's index; None without an index.
        images: How images are checked: `none`, `structure` or `decode`.
        num_classes: Number of classes in the folder's classes.json; None without this file.
    """

    path: str
    entry: ShardEntry | None = None
    images: ImageCheck = "none"
    num_classes: int | None = None


@dataclass
class ShardReport:
    """Result of checking one shard.

    Attributes:
        path: Path or URL of the shard.
        num_samples: Whole samples; in a damaged shard, the samples before the damage.
        num_bytes: Bytes of the file that were read.
        is_whole: Whether the shard was read to its end marker without damage.
        num_images: Images that were checked.
        num_large: Members over `limits.MAX_CHECKED_BYTES`, whose content was not checked.
        num_ignored: Members that belong to no sample.
        findings: The faults of the shard.
        starts: Byte offset of each sample, and the end of the last sample: uint64 (num_samples + 1,).
        hashes: Hash of each sample's key: uint64 (num_samples,).
        field_sets: For each set of fields, the number of its samples and the key of the first one. `OTHER_FIELDS` has
            the samples beyond `MAX_FIELD_SETS` sets.
    """

    path: str
    num_samples: int = 0
    num_bytes: int = 0
    is_whole: bool = False
    num_images: int = 0
    num_large: int = 0
    num_ignored: int = 0
    findings: tuple[Finding, ...] = ()
    starts: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, np.uint64))
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    field_sets: dict[Fields, tuple[int, str]] = field(default_factory=dict)


def check_shard(job: CheckJob) -> ShardReport:
    """Read a shard from end to end, and report all faults. A shard that cannot be read is a finding, not an error.

    After damage to the tar's structure, no more samples are checked, but the digest covers the whole file.
    """
    return _ShardCheck(job).run()


class _ShardCheck:
    """The state of the check of one shard."""

    def __init__(self, job: CheckJob) -> None:
        self._job = job
        self._shown = shown_url(job.path)
        self._findings: dict[Kind, list[Finding]] = {}
        self._report = ShardReport(job.path)
        self._hashes = bytearray()
        self._stop = 0  # end of the last whole sample

    def run(self) -> ShardReport:
        """Check the shard and its .idx, and return the report."""
        job, report = self._job, self._report
        is_absent = False
        try:
            shard = DigestedFile(open_stream(job.path, takes_pipe=False))
            with contextlib.closing(shard.file):
                try:
                    self._read(shard)
                finally:
                    report.num_bytes = shard.num_bytes
            self._compare_entry(shard)
        except StorageError as err:
            report.is_whole, is_absent = False, err.status == HTTPStatus.NOT_FOUND
            absent = ABSENT if job.entry is None else LISTED_ABSENT
            problem = absent if is_absent else str(err).removeprefix(f"{self._shown}: ")
            self._add("missing" if is_absent else "unreadable", problem)
        must_have = job.entry is not None and self._shown == job.path  # no query hides the end of the name
        has_offsets = must_have or (is_local(job.path) and offsets_path(job.path).exists())
        if has_offsets and not is_absent and (problem := compare_offsets(job.path, report, entry=job.entry)):
            self._findings["offsets"] = [Finding("offsets", f"{self._shown}{IDX_SUFFIX}", problem)]
        report.findings = tuple(one for found in self._findings.values() for one in found)
        return report

    def _add(self, kind: Kind, problem: str, *, offset: int | None = None, key: str | None = None) -> None:
        """Add a finding, or only count it if `MAX_LISTED` findings of its kind are listed."""
        known = self._findings.setdefault(kind, [])
        if len(known) < MAX_LISTED:
            known.append(Finding(kind, self._shown, shorten(problem), offset, key and shorten(key)))
        else:
            known[-1] = replace(known[-1], more=known[-1].more + 1)

    def _read(self, shard: DigestedFile) -> None:
        """Check every member. StorageError: The shard cannot be read."""
        report = self._report
        reader = ShardReader(
            shard.read,
            shard=self._job.path,
            on_member=self._check_member,
            on_sample=self._count,
            on_fault=lambda start, key, problem: self._add("name", problem, offset=start, key=key),
            hold_bytes=MAX_CHECKED_BYTES,
        )
        try:
            for _ in reader:
                pass
            self._stop = reader.stop
            report.is_whole = True
        except ShardError as err:
            self._add("structure", f"{err.problem} ({reader.num_samples} samples read)", offset=err.offset)
        finally:
            report.num_samples, report.num_ignored = reader.num_samples, reader.num_ignored
            report.starts = np.array([*reader.starts, self._stop], dtype=np.uint64)
            report.hashes = np.frombuffer(bytes(self._hashes), dtype=np.uint64)
        while shard.read(DRAIN_BYTES):
            pass

    def _check_member(self, _: str, split: tuple[str, str] | None, start: int, data: Buffer) -> None:
        """Decode the data of a member, and add a finding if that fails or gives the number of no class. The label -1 is
        valid: no class. `LargeData` are only counted.

        `split` is (key, field); None for a member that belongs to no sample. `start` is the member's offset.
        """
        if split is None:
            return
        key, name = split
        if isinstance(data, LargeData):
            self._report.num_large += 1
            return
        num_classes = self._job.num_classes
        try:
            if not is_image_field(name):
                value = decode_field(name, data)
            elif self._job.images != "none":
                self._report.num_images += 1
                check_image_field(name, data, self._job.images)
        except DecodeError as err:
            self._add("content", f"{name}: {str(err).removeprefix(f'{name}: ')}", offset=start, key=key)
            return
        if num_classes is not None and name == CLASS_FIELD and value not in range(-1, num_classes):
            problem = f"cls: {value} is not the number of one of the {num_classes} classes in {CLASSES_NAME}"
            self._add("content", problem, offset=start, key=key)

    def _count(self, number: int, start: int, stop: int, sample: Mapping[str, object]) -> None:  # noqa: ARG002
        """Count a whole sample in the report, and add a finding if its key is unsafe. `start` and `stop` are its byte
        offsets in the shard.
        """
        key = str(sample["__key__"])
        if _UNSAFE_KEY.search(key):
            problem = "it is an absolute path, leads out of its folder, or holds a control character"
            self._add("name", problem, offset=start, key=key)
        self._stop = stop
        self._hashes += hash_key(key)
        field_sets = self._report.field_sets
        names = tuple(sorted(sample.keys() - _OWN_FIELDS))
        if names not in field_sets and len(field_sets) >= MAX_FIELD_SETS:
            names = OTHER_FIELDS
        count, first = field_sets.get(names, (0, shorten(key)))
        field_sets[names] = count + 1, first

    def _compare_entry(self, shard: DigestedFile) -> None:
        """Add a finding for each difference between the file and its index entry. Of a damaged shard, compare only the
        size and the digest. Do nothing without an index entry.
        """
        entry, report = self._job.entry, self._report
        if entry is None:
            return
        digest = shard.sha256.hexdigest()
        if shard.num_bytes != entry.num_bytes:
            self._add("bytes", f"it has {shard.num_bytes} bytes, the index says {entry.num_bytes}")
        elif digest != entry.sha256:
            self._add("digest", f"its sha256 is {digest}, the index says {entry.sha256}")
        if report.is_whole and report.num_samples != entry.num_samples:
            self._add("samples", f"it has {report.num_samples} samples, the index says {entry.num_samples}")
        fields = sorted({name for names in report.field_sets for name in names})
        if report.is_whole and fields != sorted(entry.fields) and OTHER_FIELDS not in report.field_sets:
            self._add("fields", f"its fields are {', '.join(fields)}; the index says {', '.join(entry.fields)}")


def compare_offsets(path: str, report: ShardReport, *, entry: ShardEntry | None) -> str:
    """Compare a shard's .idx with the shard and its index entry. Return the fault; "" if the .idx is valid.

    Args:
        path: Path or URL of the shard.
        report: The report of the shard, with the offset of each sample. In a damaged shard, only the offsets before the
            damage are compared.
        entry: The shard's index entry; None without an index.
    """
    try:
        data = read_bytes(f"{path}{IDX_SUFFIX}", limit=MAX_IDX_BYTES)
        sha256 = entry.idx_sha256 if entry else None
        offsets = parse_offsets(data, path, num_bytes=1 << 63, sha256=sha256).astype(np.uint64)
    except (StorageError, FolderIndexError) as err:  # loaders refuse such an .idx
        return str(err).removeprefix(f"{path}{IDX_SUFFIX}: ").partition("\n")[0].rstrip(".")
    starts = report.starts[: None if report.is_whole else -1]
    num = min(len(offsets), len(starts))
    wrong = np.flatnonzero(offsets[:num] != starts[:num])
    if len(wrong) or (report.is_whole and len(offsets) != len(starts)):
        at = int(wrong[0]) if len(wrong) else num
        return f"offset {at} of its {len(offsets)} differs from the shard, which has {len(report.starts) - 1} samples"
    return ""
