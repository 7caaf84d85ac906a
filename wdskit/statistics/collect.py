"""`wdskit stats`: one pass over each shard, of headers, labels and JSON, and of images no more than their headers."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.keys import find_repeated, is_among
from wdskit.dataset.patterns import Target, find_shards
from wdskit.dataset.samples import HeaderReader, read_sample, read_span
from wdskit.dataset.shard import LocalShard, offsets_path
from wdskit.errors import DecodeError, StorageError
from wdskit.limits import MAX_CHECKED_BYTES, MAX_LISTED
from wdskit.order.keys import philox
from wdskit.shards.inspect import read_target_classes
from wdskit.shards.parallel import Progress, read_shards
from wdskit.shards.shares import choose_samples, parse_share
from wdskit.statistics.counts import MAX_FIELDS, Counts, ImageTally, JsonTally, Numbers, Tally
from wdskit.statistics.report import CLASS_FIELD, NUM_SHOWN, check_report, write_report
from wdskit.statistics.result import BadField, ClassStats, Duplicates, ShardStats
from wdskit.storage.urls import LocalFile, is_local, local_path
from wdskit.tar.walk import Span
from wdskit.text import shorten

MAX_CONTENTS = 10  # that come more than once and are listed
MAX_PLACES = 4  # of one content

Payload = Span | memoryview
Fields = dict[str, Payload]


def stats(
    path: str | Path,
    *,
    sample: str | None = None,
    seed: int = 0,
    digests: bool = False,
    html: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ShardStats:
    """Count what local shards hold: `wdskit stats`.

    Headers are read, and labels and JSON; of an image no more than its own header, so that most of the bytes stay on
    the disk unless digests are asked for. The result does not depend on `workers`.

    Memory: a few MB, whatever the number of samples; in each process 16 bytes a sample of one shard, and with `digests`
    16 bytes for each sample in all.

    Args:
        path: A shard, a folder, or a pattern; several joined by `::`.
        sample: Read this share of the samples of each shard only, such as `10%`.
        seed: Chooses them, and the images of the report.
        digests: Digest the images, and find samples whose images are the same bytes.
        html: Write a report to this file, with bars and some of the images; needs jinja2.
        workers: Processes that read; default: the CPUs, fewer for little data.
        progress: Called after each shard, with the bytes so far and the bytes in all.

    Raises:
        ShardError: A shard is invalid; where several are, all are listed. Bad fields are counted instead.
        StorageError: There is nothing, it is not local, or it cannot be read; or the report cannot be written.
        FolderIndexError: The folder's index does not match its files.
        ConfigError: `sample` is no share, or jinja2 is missing.
    """
    if html is not None:
        check_report(html)
    num_shown = NUM_SHOWN if html is not None else 0
    result, shown = collect(
        path, sample=sample, seed=seed, digests=digests, num_shown=num_shown, workers=workers, progress=progress
    )
    if html is not None:
        write_report(result, shown, html)
    return result


def collect(
    path: str | Path,
    *,
    sample: str | None,
    seed: int,
    digests: bool,
    num_shown: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[ShardStats, tuple[tuple[str, int], ...]]:
    """The statistics, and shard and offset of `num_shown` samples with an image, drawn by the seed."""
    share = parse_share(sample) if sample else None
    target = find_shards(str(path))
    for url in target.urls:
        if not is_local(url):
            raise StorageError(f"{url}: only local shards can be counted. Run this where the files are.", url=url)
    shas = [entry.idx_sha256 for entry in target.entries] if target.entries else [None] * len(target.urls)
    jobs = [
        StatsJob(number, url, share, seed, digests, num_shown, sha)
        for number, (url, sha) in enumerate(zip(target.urls, shas, strict=True))
    ]
    sizes = [Path(local_path(url)).stat().st_size for url in target.urls]
    tally, counts = Tally(), []
    contents: list[Contents] = []
    found_all = read_shards(tally_shard, jobs, sizes, path=str(path), workers=workers, progress=progress)
    for found, content in found_all:
        counts.append(found.num_samples)
        tally.merge(found)
        tally.shown = heapq.nsmallest(num_shown, (*tally.shown, *found.shown))
        if digests:
            contents.append(content)
    result = ShardStats(
        path=target.path,
        sample=sample,
        seed=seed,
        num_shards=len(counts),
        num_samples=tally.num_samples,
        num_read=tally.num_read,
        num_bytes=sum(sizes),
        num_ignored=tally.num_ignored,
        shard_samples=Numbers.of(counts).result(),
        shard_bytes=Numbers.of(sizes).result(),
        shard_least=Path(target.urls[counts.index(min(counts))]).name,
        shard_most=Path(target.urls[counts.index(max(counts))]).name,
        sample_sizes=tally.sizes.result(),
        fields=tally.field_stats(),
        num_more_fields=tally.num_more_fields,
        classes=_classes(target, tally.classes),
        images=tuple(one.result(name) for name, one in sorted(tally.images.items())),
        json_keys=tuple(key for name, keys in sorted(tally.json.items()) for key in keys.result(name)),
        num_more_keys=sum(keys.num_more for keys in tally.json.values()),
        num_bad=tally.num_bad,
        bad=tuple(tally.bad),
        duplicates=find_duplicates(target.urls, contents) if digests else None,
    )
    return result, tuple((target.urls[shard], start) for _, shard, start in tally.shown)


def _classes(target: Target, counts: Counts[int]) -> tuple[ClassStats, ...] | None:
    """The classes that samples have, and those that only classes.json names."""
    if not counts.total or not counts.is_exact:
        return None
    names = read_target_classes(target) or ()
    numbers = sorted({*counts.by_value, *range(len(names))})
    return tuple(
        ClassStats(number, names[number] if 0 <= number < len(names) else None, counts.by_value.get(number, 0))
        for number in numbers
    )


@dataclass(frozen=True)
class StatsJob:
    """One shard to look at. It is sent to a worker process.

    Attributes:
        number: Its place among the shards.
        url: Path or file URL.
        share: Of its samples to read, None for all.
        seed: Chooses them, and the samples to show.
        digests: Whether to digest what the samples hold.
        num_shown: Samples with an image to choose.
        idx_sha256: What the index says of its offsets.
    """

    number: int
    url: str
    share: Fraction | None = None
    seed: int = 0
    digests: bool = False
    num_shown: int = 0
    idx_sha256: str | None = None


class Contents(NamedTuple):
    """Where digests are wanted, of each sample that was read: its offset, and 64 bits of what it holds; uint64 each."""

    starts: NDArray[np.uint64]
    digests: NDArray[np.uint64]


def tally_shard(job: StatsJob) -> tuple[Tally, Contents]:
    """Look at a shard.

    Raises:
        ShardError: The shard is invalid.
        StorageError: It cannot be read.
        FolderIndexError: Its offsets are another shard's.
    """
    with contextlib.closing(LocalFile(job.url)) as file:
        return _Pass(job, file).run()


class _Pass:
    """The state of one pass."""

    def __init__(self, job: StatsJob, file: LocalFile) -> None:
        self._job = job
        self._tally = Tally()
        self._file = file

    def run(self) -> tuple[Tally, Contents]:
        """Read all samples of the job."""
        starts, with_image, digests = array("Q"), array("Q"), bytearray()
        for key, start, fields in self._samples():
            if self._add_sample(key, fields):
                with_image.append(start)
            if self._job.digests:
                starts.append(start)
                digests += self._digest(fields)
        draws = philox("stats-shown", self._job.seed, self._job.number).random_raw(len(with_image))
        for at in np.argsort(draws, kind="stable")[: self._job.num_shown].tolist():  # the least of all shards are shown
            self._tally.shown.append((int(draws[at]), self._job.number, with_image[at]))
        return self._tally, Contents(np.array(starts, np.uint64), np.frombuffer(bytes(digests), np.uint64))

    def _samples(self) -> Iterator[tuple[str, int, Fields]]:
        """Key, start and fields of the samples to be read."""
        job, share = self._job, self._job.share
        if share is None:
            reader = HeaderReader(self._file, shard=job.url)
            for sample in reader:
                del sample["__url__"]
                yield sample.pop("__key__"), reader.starts[-1], sample
            self._tally.num_samples, self._tally.num_ignored = reader.num_samples, reader.num_ignored
            return
        self._tally.num_ignored = None
        with contextlib.ExitStack() as stack:
            edges: Sequence[int]
            read: Callable[[int], tuple[str, Mapping[str, Payload]]]
            if offsets_path(local_path(job.url)).exists():
                path, sha256 = local_path(job.url), job.idx_sha256
                shard = stack.enter_context(LocalShard(path, idx_sha256=sha256))
                edges, read = shard.offsets.tolist(), shard.read
            else:
                reader = HeaderReader(self._file, shard=job.url)
                for _ in reader:
                    pass
                edges = [*reader.starts, reader.stop]
                read = lambda number: read_sample(self._file, edges[number], edges[number + 1])  # noqa: E731
            count = self._tally.num_samples = len(edges) - 1
            chosen = choose_samples(count, share, seed=job.seed, shard=job.number, purpose="stats")
            for number in chosen.tolist():
                key, fields = read(number)
                yield key, edges[number], dict(fields)

    def _add_sample(self, key: str, fields: Fields) -> bool:
        """Count a sample; whether it has an image with a header."""
        tally = self._tally
        total = 0
        has_image = False
        for name, payload in fields.items():
            size = _size(payload)
            total += size
            if name not in tally.fields:
                if len(tally.fields) >= MAX_FIELDS:
                    tally.num_more_fields += 1
                    continue
                tally.fields[name] = Numbers()
            tally.fields[name].add(size)
            try:
                has_image |= self._add_value(name, payload, size)
            except DecodeError as err:
                tally.num_bad += 1
                if len(tally.bad) < MAX_LISTED:
                    problem = shorten(str(err).removeprefix(f"{name}: "))
                    tally.bad.append(BadField(self._job.url, shorten(key), name, problem))
        tally.num_read += 1
        tally.sizes.add(total)
        return has_image

    def _add_value(self, name: str, payload: Payload, size: int) -> bool:
        """Count what a field holds, where that is counted; whether it is an image."""
        if is_image_field(name):
            header = read_header(lambda num_bytes: self._read(payload, min(size, num_bytes)))
            self._tally.images.setdefault(name, ImageTally()).add(header)
            return True
        if name != CLASS_FIELD and not is_json_field(name):
            return False
        if size > MAX_CHECKED_BYTES:
            raise DecodeError(f"it has {size} bytes, too many to be looked at")
        value = decode_field(name, self._read(payload, size))
        if name == CLASS_FIELD:
            assert isinstance(value, int)
            self._tally.classes.add(value)
        else:
            self._tally.json.setdefault(name, JsonTally()).add(value)
        return False

    def _read(self, payload: Payload, stop: int, start: int = 0) -> bytes:
        """The bytes of a field from `start` to `stop`."""
        if isinstance(payload, Span):
            return read_span(self._file, Span(payload.offset + start, stop - start))
        return bytes(payload[start:stop])

    def _digest(self, fields: Fields) -> bytes:
        """64 bits of the images' bytes, or of all fields where there is none."""
        digest = hashlib.sha256()
        for name in sorted(filter(is_image_field, fields)) or sorted(fields):
            size = _size(fields[name])
            digest.update(size.to_bytes(8, "big"))
            for start in range(0, size, 1 << 20):
                digest.update(self._read(fields[name], min(size, start + (1 << 20)), start))
        return digest.digest()[:8]


def _size(payload: Payload) -> int:
    return payload.size if isinstance(payload, Span) else len(payload)


def find_duplicates(urls: Sequence[str], parts: Sequence[Contents]) -> Duplicates:
    """Count the samples that hold what an earlier one holds, and name the first.

    They are found among digests of 64 bits: two different contents have one digest once in 370,000 data sets of 10**7
    samples. 16 bytes a sample are held (digest and offset) and 8 more while they are sorted.

    Raises:
        ShardError: A shard changed since then.
        StorageError: It cannot be read any more.
    """
    repeated = find_repeated(*(part.digests for part in parts))
    if not len(repeated):
        return Duplicates(0, 0, ())
    places: dict[int, list[tuple[str, str]]] = {}
    num_samples = 0
    for url, part in zip(urls, parts, strict=True):
        at = np.flatnonzero(is_among(part.digests, repeated))
        num_samples += len(at)
        for digest, start in zip(part.digests[at].tolist(), part.starts[at].tolist(), strict=True):
            if digest not in places and len(places) >= MAX_CONTENTS:
                continue
            known = places.setdefault(digest, [])
            if len(known) < MAX_PLACES:
                with contextlib.closing(LocalFile(url)) as file:
                    known.append((url, shorten(read_sample(file, start)[0])))
    return Duplicates(num_samples - len(repeated), len(repeated), tuple(map(tuple, places.values())))
