"""Every reader at real sizes: it returns the samples that were written."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from folders import ALL
from real_sizes import NUM_LARGE, Samples, large, rows, small, without_json

from wdskit import LocalShard, Pipeline, pack

BATCH = 40
Way = tuple[int, int, str | None]
"""Worker processes, threads, and the start method."""

SHORT: list[Way] = [(0, 1, None), (1, 4, "fork"), (2, 2, "fork")]
LONG: list[Way] = [*SHORT, (0, 4, None), (1, 4, "spawn"), (2, 2, "spawn"), (2, 2, "forkserver")]
WAYS = LONG if ALL else SHORT

Digests = dict[str, str]


@pytest.fixture(scope="module")
def large_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "large"
    pack([*rows(without_json(large()))], folder, num_shards=2)
    return folder


@pytest.fixture(scope="module")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "small"
    pack([*rows(without_json(small()))], folder, num_shards=5)
    return folder


def digests_of(samples: Samples) -> Digests:
    return {key: digest_of(fields["jpg"], int(fields["cls"])) for key, fields in samples.items()}


def digest_of(image: bytes, label: int) -> str:
    return f"{hashlib.sha256(image).hexdigest()} {label}"


def exact(shards: str) -> Pipeline:
    return Pipeline().exact(shards, seed=3)


def sequential(shards: str) -> Pipeline:
    return Pipeline().sequential(shards)


def resampled(shards: str) -> Pipeline:
    return Pipeline().resampled(shards, seed=3)


def stream(shards: str) -> Pipeline:
    return Pipeline().stream(shards, seed=3).split_by_node().split_by_worker().shuffle(100)


def read(pipeline: Pipeline, way: Way) -> Iterator[tuple[str, str]]:
    """Return keys and digests, in order."""
    workers, threads, start_method = way
    settings = {"start_method": start_method} if start_method else {}
    threads = 1 if pipeline.stages[0].name == "stream" else threads
    pads = pipeline.stages[0].name == "sequential"
    pipeline = pipeline.to_tuple("__key__", "jpg", "cls", *(["__valid__"] if pads else [])).batched(BATCH)
    for keys, images, labels, *mask in pipeline.loader(workers=workers, threads=threads, **settings):
        for key, image, label, *valid in zip(keys, images, labels, *mask, strict=True):
            if all(valid):
                yield key, digest_of(image, int(label))


SOURCES: dict[str, Callable[[str], Pipeline]] = {
    "exact": exact, "sequential": sequential, "resampled": resampled, "stream": stream,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_large_samples(large_shards: Path, name: str, way: Way) -> None:
    check(read(SOURCES[name](str(large_shards / "*.tar")), way), digests_of(large()), name)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_small_samples(small_shards: Path, name: str, way: Way) -> None:
    check(read(SOURCES[name](str(small_shards / "*.tar")), way), digests_of(small()), name)


def check(found: Iterator[tuple[str, str]], expected: Mapping[str, str], name: str) -> None:
    items = [*found]
    assert all(digest == expected[key] for key, digest in items)
    assert len(items) == len(expected)
    if name == "sequential":
        assert [key for key, _ in items] == [*expected]
    elif name == "resampled":
        assert len(Counter(key for key, _ in items)) > len(expected) // 3
    else:
        assert {key for key, _ in items} == expected.keys()


@pytest.mark.parametrize("size", ["large", "small"])
def test_samples_by_number(large_shards: Path, small_shards: Path, size: str) -> None:
    folder, samples = (large_shards, large()) if size == "large" else (small_shards, small())
    found = {}
    for path in sorted(folder.glob("*.tar")):
        shard = LocalShard(path)
        for number in np.random.default_rng(0).permutation(len(shard)).tolist():
            key, sample = shard.read(number)
            found[key] = digest_of(sample["jpg"], int(bytes(sample["cls"])))
        shard.close()
    assert found == digests_of(samples)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Real JPEGs of 60 to 135 KB, and the middle of each one, decoded separately."""
    chance = np.random.default_rng(5)
    images, crops = [], {}
    for number in range(NUM_LARGE):
        pixels = chance.integers(0, 256, (2 * int(chance.integers(115, 165)), 256, 3), dtype=np.uint8)
        data = simplejpeg.encode_jpeg(pixels, quality=85)
        assert 40_000 < len(data) < 140_000
        images.append({"__key__": f"p{number:03d}", "jpg": data, "cls": number})
        decoded = simplejpeg.decode_jpeg(data)
        top = (decoded.shape[0] - 224) // 2
        crops[f"p{number:03d}"] = decoded[top : top + 224, 16:240].transpose(2, 0, 1)
    folder = tmp_path_factory.mktemp("photos") / "photos"
    pack(images, folder)
    return folder, crops


def held_batches(photos: Path, way: Way):
    """Return every batch of an epoch. All are kept, so that no batch may reuse the memory of another."""
    workers, threads, start_method = way
    pipeline = Pipeline().exact(str(photos / "*.tar"), seed=1).decode("rgb8").center_crop(224)
    pipeline = pipeline.to_tuple("__key__", "jpg", "cls").batched(BATCH)
    settings = {"start_method": start_method} if start_method else {}
    return [*pipeline.loader(workers=workers, threads=threads, **settings)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_pixels_of_batches_that_are_kept(photos: tuple[Path, dict[str, np.ndarray]], way: Way) -> None:
    folder, crops = photos
    seen = set()
    for keys, images, labels in held_batches(folder, way):
        for key, image, label in zip(keys, images.numpy(), labels.tolist(), strict=True):
            assert label == int(key[1:])
            assert np.array_equal(image, crops[key])
            seen.add(key)
    assert seen == crops.keys()
