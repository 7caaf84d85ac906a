"""Shards into samples in a stream."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from shards import nothing, number_of, write_numbers, write_shard
from tar_corpus import END, GNU, member, pax, record

from wdskit import Pipeline
from wdskit.dataset.samples import ShardReader
from wdskit.errors import PipelineError, ShardError


def stream(path: Path | str, **settings: Any) -> Pipeline:
    return Pipeline().stream(str(path), shuffle_shards=False, **settings)


def read(pipe: Pipeline) -> tuple[list[dict[str, bytes]], Exception | None]:
    """Return the samples, and the error after them or None."""
    samples: list[dict[str, bytes]] = []
    try:
        samples.extend(
            {name: data for name, data in sample.items() if name != "__url__"} for sample in pipe.loader(workers=0)
        )
    except ShardError as err:
        return samples, err
    return samples, None


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


SAMPLES = {f"k{number}": {"cls": b"1", "jpg": bytes(700)} for number in range(5)}

GROUPED = {
    "by extension": [f"k{number}.{field}" for field in ("cls", "jpg") for number in range(4)],
    "two and one": [f"k{number}.{field}" for number in range(4) for field in ("cls", "txt")]
    + [f"k{number}.jpg" for number in range(4)],
    "one at the end": ["k0.cls", "k0.jpg", "k1.cls", "k1.jpg", "k0.txt"],
}


@pytest.mark.parametrize("size", [10, 50_000], ids=["small", "large"])
@pytest.mark.parametrize("grouping", GROUPED)
def test_members_of_a_key_that_are_apart_are_an_error_before_the_first_sample(tmp_path, grouping, size):
    path = tmp_path / "s.tar"
    members = [(name, bytes(size)) for name in GROUPED[grouping]]
    path.write_bytes(tar_of(members))
    for epoch in range(2):
        samples, error = read(stream(path).with_epoch(5) if epoch else stream(path))
        assert samples == []
        assert "is in two places" in str(error)


UNREADABLE = {
    "sparse": member("x.bin", b"", kind=b"S", magic=GNU),
    "sparse by pax": pax(record(b"GNU.sparse.major", b"1")) + member("x.bin", b""),
    "a link": member("x.bin", b"", kind=b"2", link=b"y"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_keys_that_continue_after_a_member_that_is_no_file_give_no_part_of_a_sample(tmp_path, kind):
    names = ["a.cls", "b.cls", "a.txt"]
    first, second, third = (member(name, b"1") for name in names)
    path = tmp_path / "s.tar"
    path.write_bytes(first + second + UNREADABLE[kind] + third + END)
    samples, error = read(stream(path))
    assert samples == []
    assert isinstance(error, ShardError)
    assert (error.samples_read, error.offset) == (0, len(first + second))
    one_after_the_other = io.BytesIO(first + UNREADABLE[kind] + third + second + END)  # as read from a store
    with pytest.raises(ShardError) as caught:
        samples += ShardReader(one_after_the_other.read, shard="s.tar")
    assert samples == []
    assert (caught.value.samples_read, caught.value.offset) == (0, len(first))


def test_damage_behind_whole_samples_is_told_behind_them(tmp_path):
    """Reading ahead does not lose samples before the damage."""
    path = write_shard(tmp_path / "s.tar", SAMPLES)
    path.write_bytes(path.read_bytes()[:5000])
    samples, error = read(stream(path))
    assert len(samples) == 1
    assert isinstance(error, ShardError)
    assert error.samples_read == 1


def test_a_shard_is_looked_through_once(tmp_path, monkeypatch):
    path = write_shard(tmp_path / "s.tar", SAMPLES)
    walks: list[str] = []
    monkeypatch.setattr("wdskit.stages.streaming.refuse_divided", lambda file, *, shard: walks.append(shard))
    loader = stream(path).loader(workers=0)
    for _ in range(3):
        assert len(list(loader)) == 5
    assert walks == [str(path)]


@pytest.mark.parametrize("options", [{}, {"resampled": True}, {"shuffle_shards": False}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_filter_may_keep_one_shard_of_many(tmp_path, options, world_size):
    """This holds for any draws."""
    pattern = write_numbers(tmp_path, [2] * 12)
    pipe = Pipeline().stream(pattern, **options).split_by_node().map(number_of).select(lambda number: number >= 22)
    rank = 11 % world_size  # the rank that reads the last shard without a shuffle
    items = list(pipe.with_epoch(40).loader(workers=0, rank=rank, world_size=world_size))
    assert set(items) == {22, 23}


def test_a_row_of_empty_shards_is_no_end(tmp_path):
    """One shard in twenty has samples; with random draws it may not come for long."""
    pattern = write_numbers(tmp_path, [0] * 19 + [1])
    assert list(Pipeline().stream(pattern, resampled=True).map(number_of).with_epoch(20).loader(workers=0)) == [0] * 20


def test_a_stream_of_shards_without_samples_is_an_error(tmp_path):
    pattern = write_numbers(tmp_path, [0, 0])
    for pipe in (Pipeline().stream(pattern), Pipeline().stream(write_numbers(tmp_path / "full", [3])).select(nothing)):
        with pytest.raises(PipelineError, match="epoch 0 is empty: the shards hold no samples"):
            list(pipe.loader(workers=0))
