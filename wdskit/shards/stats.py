"""Count samples, fields, classes, images and JSON keys: `wdskit stats`. Each shard is read in one pass."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wdskit.codecs.checks import read_header
from wdskit.codecs.fields import decode_field, is_json_field
from wdskit.codecs.formats import is_image_field
from wdskit.dataset.classes import CLASS_FIELD
from wdskit.dataset.index import ShardEntry
from wdskit.dataset.patterns import split_url
from wdskit.dataset.remote import open_remote_shards
from wdskit.dataset.shard import IndexedShard, LocalShard, offsets_path
from wdskit.errors import DecodeError
from wdskit.limits import MAX_CHECKED_BYTES, MAX_LISTED
from wdskit.order.keys import philox
from wdskit.shards.lazy_shard import LazyField, LazyShard, field_size, fields_of
from wdskit.shards.listing import Target, find_target, read_target_classes
from wdskit.shards.parallel import Progress, file_sizes, read_shards
from wdskit.shards.sampling import check_seed, choose_samples, parse_share
from wdskit.shards.tally import BadField, ImageStats, JsonKeyStats, NumberStats, NumberTally, Tally, count_values
from wdskit.storage.urls import is_local, local_path, open_ranges, shown_url
from wdskit.text import shorten


@dataclass(frozen=True)
class FieldStats:
    """One field, such as `jpg`: the number of samples with the field, and statistics of its size in bytes, without tar
    headers and padding.
    """

    name: str
    num_samples: int
    sizes: NumberStats


@dataclass(frozen=True)
class ClassStats:
    """One class: its number in `cls`, and its name in classes.json; None if classes.json does not name it.

    `num_samples` is 0 for a class that only classes.json has.
    """

    number: int
    name: str | None
    num_samples: int


@dataclass(frozen=True)
class ShardStats:
    """Result of `stats`.

    Attributes:
        path: The path or URL that the user wrote, without secrets.
        sample: The share of the samples that was read, such as `10%`; None if all samples were read.
        seed: The seed that chose the share.
        num_samples: Samples in all shards.
        num_read: Samples that were read. Fields, classes, images and keys are counted in these samples only.
        num_bytes: Bytes of the shards' files.
        num_ignored: Members that belong to no sample; None if only a share was read.
        shard_samples: Statistics of the number of samples per shard.
        shard_bytes: Statistics of the size of the shards' files.
        shard_least: Name of the first shard with the fewest samples.
        shard_most: Name of the first shard with the most samples.
        sample_sizes: Statistics of the bytes of a sample's fields, without tar headers and padding.
        fields: The fields, sorted by name; at most 1,000.
        num_more_fields: How often samples have a field that `fields` does not list.
        classes: Classes of the field `cls`, sorted by number; None if no sample has a valid `cls`, or if there are over
            100,000 classes.
        images: The image fields, sorted by name.
        json_keys: The keys, sorted by field, then in the order in which they first appear; at most 1,000 of a field.
        num_more_keys: How many values have a key that `json_keys` does not list.
        num_bad: Fields that cannot be read: images without a valid header, invalid JSON or `cls`.
        bad: The first `MAX_LISTED` fields that cannot be read.
    """

    path: str
    sample: str | None
    seed: int
    num_shards: int
    num_samples: int
    num_read: int
    num_bytes: int
    num_ignored: int | None
    shard_samples: NumberStats
    shard_bytes: NumberStats
    shard_least: str
    shard_most: str
    sample_sizes: NumberStats
    fields: tuple[FieldStats, ...]
    num_more_fields: int
    classes: tuple[ClassStats, ...] | None
    images: tuple[ImageStats, ...]
    json_keys: tuple[JsonKeyStats, ...]
    num_more_keys: int
    num_bad: int
    bad: tuple[BadField, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as dicts, lists, texts and numbers, which `wdskit stats --json` prints."""
        return dataclasses.asdict(self)


def choose_classes(classes: Sequence[ClassStats], limit: int) -> list[ClassStats]:
    """Return the `limit // 2` largest and the `limit // 2` smallest classes, the largest class first. If there are at
    most `limit` classes, return all classes in their order. `limit` must be at least 2.
    """
    if len(classes) <= limit:
        return list(classes)
    ranked = sorted(classes, key=lambda one: -one.num_samples)
    return [*ranked[: limit // 2], *ranked[-(limit // 2) :]]


def stats(
    path: str | Path,
    *,
    sample: str | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ShardStats:
    """Count the samples, fields, classes, images and JSON keys of shards: `wdskit stats`.

    Only tar headers, labels, JSON and the headers of images are read from local shards. Remote shards are read from end
    to end, unless `sample` is set and all shards of a folder or pattern are in an index. The result does not depend on
    `workers`.

    Memory: a few MB for any number of samples, plus 16 bytes per sample of one shard in each process.

    Args:
        path: A shard, a folder, or a pattern; several joined by `::`.
        sample: Share of the samples of each shard to read, such as `10%`; None reads all samples.
        seed: Chooses the samples of the share.
        workers: Number of processes that read. Default: the number of CPUs, fewer for little data.
        progress: Called after each shard with the bytes read so far and the bytes of all shards (None if unknown).

    Raises:
        ShardError: A shard is invalid, or several shards cannot be read for any reason; the message lists them. A field
            that cannot be read is counted and not an error.
        StorageError: No shard was found, or one shard cannot be read.
        FolderIndexError: The folder's index or an .idx does not match the files, or `classes.json` is invalid.
        ConfigError: `sample` is not a percentage over 0 % and at most 100 %, or `seed` is not from 0 to 2**64 - 1.
        WdskitError: A worker process was killed.
    """
    return collect(path, sample=sample, seed=seed, workers=workers, progress=progress)[0]


def collect(
    path: str | Path,
    *,
    sample: str | None,
    seed: int,
    num_shown: int = 0,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[ShardStats, tuple[tuple[str, int], ...]]:
    """Return the result of `stats`, and the places of at most `num_shown` random samples that have an image.

    A place is the URL of the shard and the byte offset of the sample. For the other arguments and the errors, see
    `stats`.
    """
    share = None if sample is None else parse_share(sample)
    check_seed(seed)
    target = find_target(str(path))
    urls = target.urls
    entries: Sequence[ShardEntry | None] = target.entries or [None] * len(urls)
    jobs = [
        StatsJob(number, url, entry, share, seed, num_shown)
        for number, (url, entry) in enumerate(zip(urls, entries, strict=True))
    ]
    tally = Tally()
    counts: list[int] = []
    shard_samples, shard_bytes = NumberTally(), NumberTally()
    sizes = file_sizes(urls, entries)
    results = read_shards(tally_shard, jobs, sizes, path=str(path), workers=workers, progress=progress)
    for one in results:
        counts.append(one.tally.num_samples)
        shard_samples.add(one.tally.num_samples)
        shard_bytes.add(one.num_bytes)
        tally.merge(one.tally)
        tally.shown = heapq.nsmallest(num_shown, (*tally.shown, *one.tally.shown))
    sample_sizes = tally.sizes.result()
    fields = sorted(tally.fields.items())
    result = ShardStats(
        path=shown_url(target.path),
        sample=sample,
        seed=seed,
        num_shards=len(counts),
        num_samples=tally.num_samples,
        num_read=sample_sizes.count,
        num_bytes=shard_bytes.total,
        num_ignored=None if share else tally.num_ignored,
        shard_samples=shard_samples.result(),
        shard_bytes=shard_bytes.result(),
        shard_least=split_url(urls[counts.index(min(counts))])[1],
        shard_most=split_url(urls[counts.index(max(counts))])[1],
        sample_sizes=sample_sizes,
        fields=tuple(FieldStats(name, one.sizes.counts.total(), one.sizes.result()) for name, one in fields),
        num_more_fields=tally.num_more_fields,
        classes=_classes(target, tally.classes or {}),
        images=tuple(one.images(name) for name, one in fields if one.formats),
        json_keys=tuple(
            dataclasses.replace(key, field=name, types=dict(sorted(key.types.items())))
            for name, one in fields
            for key in one.keys.values()
        ),
        num_more_keys=sum(one.num_more_keys for _, one in fields),
        num_bad=tally.num_bad,
        bad=tuple(tally.bad),
    )
    return result, tuple((urls[shard], start) for _, shard, start in tally.shown)


def _classes(target: Target, counts: Mapping[int, int]) -> tuple[ClassStats, ...] | None:
    """Return all classes in `counts` or in classes.json, sorted by number; None if `counts` is empty.

    `counts` has the number of samples by class number.
    """
    if not counts:
        return None
    names = dict(enumerate(read_target_classes(target) or ()))
    return tuple(ClassStats(number, names.get(number), counts.get(number, 0)) for number in sorted({*counts, *names}))


class StatsJob(NamedTuple):
    """One shard to count. A job is sent to a worker process."""

    number: int  # of the shard, from 0, in the order of the shards
    url: str
    entry: ShardEntry | None  # in the index, None without an index
    share: Fraction | None  # of the samples to read, None for all
    seed: int  # chooses the samples to read and the samples to show
    num_shown: int  # most samples with an image to choose


class TallyResult(NamedTuple):
    """The counts of a shard, and the size of its file."""

    tally: Tally
    num_bytes: int


def tally_shard(job: StatsJob) -> TallyResult:
    """Count the samples and fields of a shard, and choose samples to show.

    Raises:
        ShardError: The shard is invalid.
        StorageError: The shard cannot be read.
        FolderIndexError: The shard's .idx belongs to another shard.
    """
    tally = Tally()
    with_image = array("Q")
    reads_ranges = not is_local(job.url) and job.share is not None and job.entry is not None
    with LazyShard(job.url, start=0 if reads_ranges else None) as shard:
        for key, start, fields in _samples(shard, job, tally):
            if _add_sample(shard, job.url, key, fields, tally):
                with_image.append(start)
        num_bytes = shard.num_bytes
    draws = philox("stats-shown", job.seed, job.number).random_raw(len(with_image))
    for at in np.argsort(draws, kind="stable")[: job.num_shown].tolist():  # `collect` keeps the smallest draws
        tally.shown.append((int(draws[at]), job.number, with_image[at]))
    return TallyResult(tally, num_bytes)


def _samples(shard: LazyShard, job: StatsJob, tally: Tally) -> Iterator[tuple[str, int, Mapping[str, LazyField]]]:
    """Yield key, byte offset and fields of each sample that `job` selects.

    Store the number of all samples in `tally`. If all samples are read, store the number of ignored members too.
    """
    reader = shard.reader
    if job.share is None:
        for sample in shard:
            yield sample["__key__"], reader.starts[-1], dict(fields_of(sample))
        tally.num_samples, tally.num_ignored = reader.num_samples, reader.num_ignored
        return
    indexed: IndexedShard
    if not is_local(job.url) and job.entry is not None:
        indexed = open_remote_shards([(job.url, job.entry)])[0]
    elif is_local(job.url) and offsets_path(local_path(job.url)).exists():
        indexed = LocalShard(local_path(job.url), idx_sha256=job.entry.idx_sha256 if job.entry else None)
    else:
        for _ in shard:
            pass
        offsets = np.array([*reader.starts, reader.stop], dtype=np.int64)
        indexed = IndexedShard(job.url, open_ranges(job.url), offsets, is_trusted=True)
    tally.num_samples = num_samples = len(indexed)
    with indexed:
        for number in choose_samples(num_samples, job.share, seed=job.seed, shard=job.number, purpose="stats").tolist():
            key, views = indexed.read(number)
            yield key, indexed.offsets[number], views


def _add_sample(shard: LazyShard, url: str, key: str, fields: Mapping[str, LazyField], tally: Tally) -> bool:
    """Count a sample's fields in `tally`, and the fields that cannot be read also in `tally.num_bad`. Return True if
    the sample has an image with a valid header.
    """
    has_image = False
    for name, payload in fields.items():
        field = tally.find_field(name)
        if field is None:
            tally.num_more_fields += 1
            continue
        field.sizes.add(field_size(payload))
        try:
            if is_image_field(name):
                field.add_image(read_header(functools.partial(shard.part, payload, 0)))
                has_image = True
            elif name == CLASS_FIELD:
                tally.classes = count_values(tally.classes, [_decode(shard, name, payload)])
            elif is_json_field(name):
                field.add_json(_decode(shard, name, payload))
        except DecodeError as err:
            tally.num_bad += 1
            if len(tally.bad) < MAX_LISTED:
                problem = shorten(str(err).removeprefix(f"{name}: "))
                tally.bad.append(BadField(url, shorten(key), name, problem))
    tally.sizes.add(sum(map(field_size, fields.values())))
    return has_image


def _decode(shard: LazyShard, name: str, payload: LazyField) -> Any:
    size = field_size(payload)
    if size > MAX_CHECKED_BYTES:
        raise DecodeError(f"it has {size} bytes, too many to read")
    return decode_field(name, shard.part(payload, 0, size))
