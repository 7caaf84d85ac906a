"""One pass over one shard for `wdskit stats`: headers, labels and JSON; of images no more than their headers."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdskit.codecs.checks import is_json_field
from wdskit.codecs.fields import decode_field
from wdskit.codecs.headers import read_header
from wdskit.codecs.images import is_image_field
from wdskit.dataset.offsets import offsets_path
from wdskit.dataset.samples import HeaderReader, read_sample, read_span
from wdskit.dataset.shard import LocalShard
from wdskit.errors import DecodeError
from wdskit.limits import MAX_CHECKED_BYTES, MAX_LISTED
from wdskit.order.keys import permutation, philox
from wdskit.shards.statistics_counts import Numbers
from wdskit.shards.statistics_json import JsonTally
from wdskit.shards.statistics_sums import MAX_FIELDS, ImageTally, Tally
from wdskit.shards.statistics_types import BadField
from wdskit.storage.urls import LocalFile, local_path
from wdskit.tar.walk import Span
from wdskit.text import shorten

Payload = Span | memoryview
Fields = dict[str, Payload]

CLASS_FIELD = "cls"


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


@dataclass(frozen=True)
class ShardTally:
    """What a pass found.

    Attributes:
        tally: Numbers.
        starts: Offset of each sample that was read, where digests or samples to show were wanted.
        digests: 64 bits of what each of them holds, where they were wanted.
    """

    tally: Tally
    starts: NDArray[np.uint64]
    digests: NDArray[np.uint64]


def tally_shard(job: StatsJob, *, on_read: Callable[[int], None] | None = None) -> ShardTally:
    """Look at a shard.

    Args:
        job: The shard.
        on_read: Called now and then with the number of bytes that are behind since the last call.

    Raises:
        ShardError: The shard is not right.
        StorageError: It cannot be read.
        FolderIndexError: Its offsets are another shard's.
    """
    return _Pass(job, on_read).run()


class _Pass:
    """The state of one pass."""

    def __init__(self, job: StatsJob, on_read: Callable[[int], None] | None) -> None:
        self._job = job
        self._on_read = on_read
        self._tally = Tally()
        self._starts = array("Q")
        self._with_image = array("Q")  # starts of the samples that may be shown
        self._digests = bytearray()
        self._file: LocalFile

    def run(self) -> ShardTally:
        """Read and tell."""
        self._file = LocalFile(self._job.url)
        try:
            behind = 0
            for key, start, fields in self._samples():
                self._look_at_sample(key, start, fields)
                if self._on_read and start - behind >= 1 << 20:
                    self._on_read(start - behind)
                    behind = start
        finally:
            self._file.close()
        if self._on_read:
            self._on_read(Path(local_path(self._job.url)).stat().st_size - behind)
        self._choose_shown()
        starts = np.array(self._starts, dtype=np.uint64)
        return ShardTally(self._tally, starts, np.frombuffer(bytes(self._digests), dtype=np.uint64))

    def _samples(self) -> Iterator[tuple[str, int, Fields]]:
        """Key, start and fields of the samples to be read."""
        if self._job.share is None:
            reader = HeaderReader(self._file, shard=self._job.url)
            for sample in reader:
                yield sample.pop("__key__"), reader.starts[-1], _without_url(sample)
            self._tally.num_samples, self._tally.num_ignored = reader.num_samples, reader.num_ignored
            return
        self._tally.num_ignored = None
        if offsets_path(local_path(self._job.url)).exists():
            with LocalShard(local_path(self._job.url), idx_sha256=self._job.idx_sha256) as shard:
                self._tally.num_samples = len(shard)
                for number in self._chosen(len(shard)):
                    key, fields = shard.read(number)
                    yield key, shard.offsets[number], dict(fields)
            return
        reader = HeaderReader(self._file, shard=self._job.url)
        for _ in reader:
            pass
        self._tally.num_samples = reader.num_samples
        edges = [*reader.starts, reader.stop]
        for number in self._chosen(reader.num_samples):
            key, found = read_sample(self._file, edges[number], edges[number + 1])
            yield key, edges[number], dict(found)

    def _chosen(self, count: int) -> list[int]:
        """Numbers of the samples to read: the share of each shard within one, and of equal shards in all."""
        share, number = self._job.share or Fraction(1), self._job.number
        quota = ceil(share * (number + 1) * count) - ceil(share * number * count)
        return sorted(permutation(count, "stats", self._job.seed, number)[:quota].tolist())

    def _look_at_sample(self, key: str, start: int, fields: Fields) -> None:
        tally = self._tally
        tally.num_read += 1
        total = 0
        has_image = False
        for name, payload in fields.items():
            size = payload.size if isinstance(payload, Span) else len(payload)
            total += size
            known = tally.fields.get(name)
            if known is None:
                if len(tally.fields) >= MAX_FIELDS:
                    tally.num_more_fields += 1
                    continue
                known = tally.fields[name] = Numbers()
            known.add(size)
            has_image |= self._look_at_field(key, name, payload, size)
        tally.sizes.add(total)
        if self._job.digests or self._job.num_shown:
            self._starts.append(start)
        if self._job.digests:
            self._digests += self._digest(fields)
        if has_image:
            self._with_image.append(start)

    def _look_at_field(self, key: str, name: str, payload: Payload, size: int) -> bool:
        """Whether it is an image that has a header."""
        is_image = is_image_field(name)
        is_json = not is_image and is_json_field(name)
        if not (is_image or is_json or name == CLASS_FIELD):
            return False
        try:
            if is_image:
                self._look_at_image(name, payload)
                return True
            value = self._decode(name, payload, size)
            if is_json:
                self._tally.json.setdefault(name, JsonTally()).add(value)
            else:
                self._tally.classes.add(value)
        except DecodeError as err:
            self._tally.num_bad += 1
            if len(self._tally.bad) < MAX_LISTED:
                problem = shorten(str(err).removeprefix(f"{name}: "))
                self._tally.bad.append(BadField(self._job.url, shorten(key), name, problem))
        return False

    def _decode(self, name: str, payload: Payload, size: int) -> Any:
        if size > MAX_CHECKED_BYTES:
            raise DecodeError(f"it has {size} bytes, too many to be looked at")
        return decode_field(name, self._read(payload))

    def _look_at_image(self, name: str, payload: Payload) -> None:
        header = read_header(lambda size: self._read(payload, size))
        images = self._tally.images.get(name)
        if images is None:
            images = self._tally.images[name] = ImageTally()
        images.formats.add(header.format)
        images.modes.add(header.mode)
        images.widths.add(header.width)
        images.heights.add(header.height)
        images.pixels.add(header.width * header.height)
        images.aspects.add((2000 * header.width + header.height) // (2 * header.height))
        images.resolutions.add((header.width, header.height))

    def _read(self, payload: Payload, size: int | None = None) -> bytes:
        """The first bytes of a field, or all."""
        if isinstance(payload, memoryview):
            return bytes(payload[:size])
        return read_span(self._file, payload if size is None else Span(payload.offset, min(size, payload.size)))

    def _digest(self, fields: Fields) -> bytes:
        """64 bits of the images' bytes, or of all fields where there is none."""
        digest = hashlib.sha256()
        for name in sorted(filter(is_image_field, fields) if any(map(is_image_field, fields)) else fields):
            payload = fields[name]
            size = payload.size if isinstance(payload, Span) else len(payload)
            digest.update(size.to_bytes(8, "big"))
            for offset in range(0, size, 1 << 20):
                part = min(1 << 20, size - offset)
                if isinstance(payload, Span):
                    digest.update(read_span(self._file, Span(payload.offset + offset, part)))
                else:
                    digest.update(payload[offset : offset + part])
        return digest.digest()[:8]

    def _choose_shown(self) -> None:
        """Draw from the samples with an image: the least draws of all shards are shown."""
        draws = philox("stats-shown", self._job.seed, self._job.number).random_raw(len(self._with_image))
        for at in np.argsort(draws, kind="stable")[: self._job.num_shown].tolist():
            self._tally.shown.append((int(draws[at]), self._job.number, self._with_image[at]))


def _without_url(sample: dict[str, Any]) -> Fields:
    del sample["__url__"]
    return sample
