"""Check one shard in one pass, and report its faults as findings. The check continues after each fault."""

from __future__ import annotations

import contextlib
import functools
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.checks import Check, ImageCheck, field_check
from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASSES_NAME
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.keys import hash_key
from wdskit.dataset.patterns import ABSENT, LISTED_ABSENT
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import IDX_SUFFIX, IndexedShard, digest_offsets, offsets_path, parse_offsets, read_offsets
from wdskit.errors import DecodeError, FolderIndexError, ShardError, StorageError
from wdskit.files import Buffer
from wdskit.limits import MAX_CHECKED_BYTES, MAX_IDX_BYTES, MAX_LISTED, MAX_PIXELS
from wdskit.shards.index import DigestedFile
from wdskit.shards.sampling import choose_samples
from wdskit.storage.urls import is_local, open_ranges, open_stream, read_bytes, shown_url
from wdskit.tar.window import LargeData
from wdskit.text import shorten

Kind = Literal[
    "structure", "digest", "bytes", "samples", "fields", "missing", "unlisted", "unreadable", "index", "offsets",
    "name", "repeated", "odd", "json", "image", "skew", "unfinished", "label", "unchecked", "beside",
]  # fmt: skip
"""The kind of a finding.

`structure`: the tar is damaged or its members are in a wrong order. `digest`, `bytes`, `fields`: the shard differs from
the index. `samples`: their number differs from the index, or the shards have no samples. `missing`: a listed shard does
not exist. `unlisted`: the index lacks a shard that was named. `unreadable`: a file cannot be read. `index`: index.json,
the columns or classes.json are damaged. `offsets`: the .idx is damaged. `name`: a member has an unsafe or invalid name.
`repeated`: a key comes twice. `odd`: samples have other fields than most. `json`, `image`: a field cannot be decoded.
`skew`: workers get different numbers of samples. `unfinished`: a run of `pack` in the folder is active or was stopped.
`label`: a `cls` is not a whole number, or not the number of a class in classes.json. `unchecked`: the columns of a
remote folder could not be read or copied. `beside`: a folder has tars that its index does not list, which are not part
of the data.
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

_UNSAFE_KEYS = {
    "it is an absolute path": re.compile(r"\A/"),
    "it leads outside the folder that it is unpacked into": re.compile(r"(\A|/)\.\./"),
    "it holds a control character": re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]"),
}


class FindingList:
    """The findings of one file. The first `MAX_LISTED` of each kind are listed; further findings are only counted."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._findings: list[Finding] = []
        self._counts: dict[Kind, int] = {}

    def add(self, kind: Kind, problem: str, *, offset: int | None = None, key: str | None = None) -> None:
        """Add a finding, or only count it if `MAX_LISTED` findings of its kind are listed."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= MAX_LISTED:
            self._findings.append(Finding(kind, self.file, shorten(problem), offset, key and shorten(key)))

    def listed(self) -> tuple[Finding, ...]:
        """Return the listed findings in order. `more` of the last finding of each kind counts the unlisted findings."""
        found = list(self._findings)
        for kind, count in self._counts.items():
            if count > MAX_LISTED:
                last = max(at for at, one in enumerate(found) if one.kind == kind)
                found[last] = replace(found[last], more=count - MAX_LISTED)
        return tuple(found)


@dataclass(frozen=True)
class CheckJob:
    """One shard to check. A job is sent to a worker process.

    Attributes:
        path: Path or URL of the shard.
        number: Number of the shard, from 0, in the order of the shards.
        entry: The shard's entry in the folder's index; None without an index.
        has_offsets: Whether the shard must have an .idx.
        images: How images are checked: `none`, `structure` or `decode`.
        share: Share of the samples whose images are checked; None for all samples.
        seed: Chooses the samples of the share.
        max_pixels: Limit for the pixels of an image.
        num_classes: Number of classes in the folder's classes.json; None without this file.
    """

    path: str
    number: int = 0
    entry: ShardEntry | None = None
    has_offsets: bool = False
    images: ImageCheck = "none"
    share: Fraction | None = None
    seed: int = 0
    max_pixels: int = MAX_PIXELS
    num_classes: int | None = None


@dataclass
class FieldSet:
    """Samples of a shard with the same fields: their number, and the key of the first sample."""

    count: int
    key: str


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
        field_sets: Samples with each set of fields. `OTHER_FIELDS` has the samples beyond `MAX_FIELD_SETS` sets.
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
    field_sets: dict[Fields, FieldSet] = field(default_factory=dict)


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
        self._findings = FindingList(self._shown)
        self._report = ShardReport(job.path)
        self._hashes = bytearray()
        self._stop = 0  # end of the last whole sample
        self._check_of = functools.lru_cache(maxsize=MAX_FIELD_SETS)(
            lambda name: field_check(name, job.images if job.share is None else "none", job.max_pixels)
        )

    def run(self) -> ShardReport:
        """Check the shard and its .idx, and return the report."""
        job, report = self._job, self._report
        try:
            if is_local(job.path) and not stat.S_ISREG(Path(job.path).stat().st_mode):  # a pipe would block
                self._findings.add("unreadable", "this is not a file")
            else:
                shard = DigestedFile(open_stream(job.path))
                with contextlib.closing(shard.file):
                    try:
                        self._read(shard)
                    finally:
                        report.num_bytes = shard.num_bytes
                self._compare_entry(shard)
        except StorageError as err:
            report.is_whole = False
            if err.status == HTTPStatus.NOT_FOUND:
                self._findings.add("missing", ABSENT if job.entry is None else LISTED_ABSENT)
                report.findings = self._findings.listed()
                return report
            self._findings.add("unreadable", str(err))
        except OSError as err:
            self._findings.add("unreadable", f"it cannot be opened: {err.strerror}")
        report.findings = self._findings.listed()
        if job.has_offsets:
            problem = compare_offsets(job.path, report, entry=job.entry)
            report.findings += (Finding("offsets", f"{self._shown}{IDX_SUFFIX}", problem),) if problem else ()
        return report

    def _read(self, shard: DigestedFile) -> None:
        """Check every member. If the job has a `share`, check the images of this share of the samples afterwards.
        StorageError: The shard cannot be read.
        """
        report = self._report
        reader = ShardReader(
            shard.read,
            shard=self._job.path,
            on_member=self._check_member,
            on_sample=self._count,
            on_fault=lambda start, key, problem: self._findings.add("name", problem, offset=start, key=key),
            hold_bytes=MAX_CHECKED_BYTES,
        )
        try:
            for _ in reader:
                pass
            self._stop = reader.stop
            report.is_whole = True
        except ShardError as err:
            self._findings.add("structure", f"{err.problem} ({reader.num_samples} samples read)", offset=err.offset)
        finally:
            report.num_samples, report.num_ignored = reader.num_samples, reader.num_ignored
            report.starts = np.array([*reader.starts, self._stop], dtype=np.uint64)
            report.hashes = np.frombuffer(bytes(self._hashes), dtype=np.uint64)
        while shard.read(DRAIN_BYTES):
            pass
        if self._job.share is not None and self._job.images != "none":
            self._check_share(self._job.share)

    def _check_member(self, _: str, split: tuple[str, str] | None, start: int, data: bytes) -> None:
        """Add a finding if the data of a member is invalid JSON, an invalid image or an invalid label.

        `split` is (key, field); None for a member that belongs to no sample. `start` is the member's offset.
        """
        if split is not None:
            check = self._check_of(split[1])
            if check:
                self._check_field(check, split[1], data, start, split[0])
            if split[1] == "cls" and not isinstance(data, LargeData):
                self._check_label(data, start, split[0])

    def _check_label(self, data: bytes, start: int, key: str) -> None:
        """Add a finding if a label is not a whole number or, in a folder with classes.json, not the number of a class.
        The label -1 is valid: no class.
        """
        num_classes = self._job.num_classes
        try:
            number = decode_field("cls", data)
        except DecodeError as err:
            self._findings.add("label", str(err), offset=start, key=key)
            return
        if num_classes is not None and not (isinstance(number, int) and -1 <= number < num_classes):
            problem = f"cls: {number} is not the number of one of the {num_classes} classes in {CLASSES_NAME}"
            self._findings.add("label", problem, offset=start, key=key)

    def _check_field(self, check: Check, name: str, data: Buffer, start: int, key: str) -> None:
        """Check a JSON field or an image with `check`, and add a finding if it is invalid. `LargeData` are only
        counted in `num_large`. `start` and `key` are for the finding.
        """
        if isinstance(data, LargeData):
            self._report.num_large += 1
            return
        is_image = not is_json_field(name)
        self._report.num_images += is_image
        try:
            check(data)
        except DecodeError as err:
            problem = f"{name}: {err}" if is_image else str(err)
            self._findings.add("image" if is_image else "json", problem, offset=start, key=key)

    def _check_share(self, share: Fraction) -> None:
        """Read a share of the samples a second time, and check their images. A sample that is too large is only counted
        in `num_large`.
        """
        job, starts = self._job, self._report.starts.astype(np.int64)
        chosen = choose_samples(len(starts) - 1, share, seed=job.seed, shard=job.number)
        with IndexedShard(job.path, open_ranges(job.path), starts, is_trusted=True) as shard:
            for number in chosen.tolist():
                start = int(starts[number])
                if starts[number + 1] - start > 2 * MAX_CHECKED_BYTES:
                    self._report.num_large += 1
                    continue
                try:
                    key, fields = shard.read(number)
                except ShardError as err:
                    problem = f"reading its images again: {err.problem}"
                    self._findings.add("structure", problem, offset=err.offset)
                    continue
                for name, data in fields.items():
                    check = field_check(name, job.images, job.max_pixels) if is_image_field(name) else None
                    if check:
                        self._check_field(check, name, data, start, key)

    def _count(self, number: int, start: int, stop: int, sample: Mapping[str, object]) -> None:  # noqa: ARG002
        """Count a whole sample in the report, and add a finding if its key is unsafe. `start` and `stop` are its byte
        offsets in the shard.
        """
        key = str(sample["__key__"])
        if ".." in key or key[0] == "/" or not key.isprintable():  # faster than three regular expressions
            for problem, pattern in _UNSAFE_KEYS.items():
                if pattern.search(key):
                    self._findings.add("name", problem, offset=start, key=key)
        self._stop = stop
        self._hashes += hash_key(key)
        report = self._report
        fields = tuple(sorted(sample.keys() - _OWN_FIELDS))
        is_known = fields in report.field_sets or len(report.field_sets) < MAX_FIELD_SETS
        names = fields if is_known else OTHER_FIELDS
        report.field_sets.setdefault(names, FieldSet(0, shorten(key))).count += 1

    def _compare_entry(self, shard: DigestedFile) -> None:
        """Add a finding for each difference between the file and its index entry. Of a damaged shard, compare only the
        size and the digest. Do nothing without an index entry.
        """
        entry = self._job.entry
        if entry is None:
            return
        digest = shard.sha256.hexdigest()
        if shard.num_bytes != entry.num_bytes:
            self._findings.add("bytes", f"it has {shard.num_bytes} bytes, the index says {entry.num_bytes}")
        elif digest != entry.sha256:
            self._findings.add("digest", f"its sha256 is {digest}, the index says {entry.sha256}")
        if not self._report.is_whole:
            return
        num_samples, field_sets = self._report.num_samples, self._report.field_sets
        if num_samples != entry.num_samples:
            self._findings.add("samples", f"it has {num_samples} samples, the index says {entry.num_samples}")
        fields = sorted({name for names in field_sets for name in names})
        if fields != sorted(entry.fields) and OTHER_FIELDS not in field_sets:
            problem = f"its fields are {', '.join(fields)}; the index says {', '.join(entry.fields)}"
            self._findings.add("fields", problem)


def compare_offsets(path: str, report: ShardReport, *, entry: ShardEntry | None) -> str:
    """Compare a shard's .idx with the shard and its index entry. Return the fault; "" if the .idx is valid.

    Args:
        path: Path or URL of the shard.
        report: The report of the shard, with the offset of each sample. In a damaged shard, only the offsets before the
            damage are compared.
        entry: The shard's index entry; None without an index.
    """
    num_bytes = report.num_bytes if entry is None else entry.num_bytes
    starts, is_whole = report.starts, report.is_whole
    if is_local(path) and offsets_path(path).exists() and not offsets_path(path).is_file():
        return "this is not a file"
    try:
        if is_local(path):
            offsets = read_offsets(path, num_bytes=num_bytes)
        else:
            data = read_bytes(f"{path}{IDX_SUFFIX}", limit=MAX_IDX_BYTES)
            offsets = parse_offsets(data, path, num_bytes=num_bytes)
    except (FolderIndexError, StorageError) as err:
        return str(err).removeprefix(f"{path}{IDX_SUFFIX}: ").partition("\n")[0].rstrip(".")
    num = len(offsets) - 1
    if is_whole and num != len(starts) - 1:
        return f"it has the offsets of {num} samples, the shard has {len(starts) - 1}"
    if not is_whole and entry is not None and entry.num_samples != num:
        return f"it has the offsets of {num} samples, the index says {entry.num_samples}"
    known = min(len(offsets), len(starts) - (not is_whole))
    wrong = np.flatnonzero(offsets[:known] != starts.astype(np.int64)[:known])
    if len(wrong):
        at = int(wrong[0])
        what = "the last sample ends" if at == len(starts) - 1 else f"sample {at} starts"
        return f"it says {offsets[at]}, but {what} at byte {starts[at]}"
    if entry and entry.idx_sha256 not in (None, digest_offsets(offsets.tolist())):  # loaders refuse such an .idx
        return "its sha256 is not the one in the index"
    return ""
