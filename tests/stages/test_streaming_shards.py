"""Shards into samples in a stream: they are compared with their index during reading."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
from shards import nothing, number_of, write_numbers, write_shard
from tar_corpus import END, GNU, member, pax, record

from wdskit import Pipeline
from wdskit.dataset.samples import ShardReader
from wdskit.dataset.shard import offsets_path, read_offsets
from wdskit.errors import FolderIndexError, PipelineError, ShardError
from wdskit.shards.index import index_folder
from wdskit.stages import streaming


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


def write_over(path: Path, data: bytes) -> None:
    """Write other bytes into a file and keep inode and time, so that only the content differs."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def random_members(seed: int) -> list[tuple[str, bytes]]:
    """Return samples of one or two fields with few different sizes, in random order."""
    draws = random.Random(seed)
    members = []
    for number in range(6):
        members.append((f"k{seed}{number}.cls", b"%d" % seed * draws.choice([1, 600])))
        if draws.random() < 0.7:
            members.append((f"k{seed}{number}.txt", b"t" * draws.choice([1, 600])))
    return members


def test_a_shard_spliced_of_two_others_gives_samples_at_their_places_only(tmp_path):
    """The shard is the first part of one and the rest of another, with the size of the indexed shard."""
    num_wrong = 0
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one, other = tar_of(random_members(seed)), tar_of(random_members(seed + 50))
        (folder / "s.tar").write_bytes(one)
        index_folder(folder, workers=1)
        offsets = read_offsets(folder / "s.tar", num_bytes=len(one)).tolist()
        size = min(len(one), len(other))
        for cut in range(0, size, 512):
            spliced = (one[:cut] + other[cut:])[: len(one)].ljust(len(one), b"\0")
            write_over(folder / "s.tar", spliced)
            samples, error = read(stream(folder))
            reader = ShardReader(io.BytesIO(spliced).read, shard="s.tar")
            with contextlib.suppress(ShardError):
                assert [{**sample, "__url__": ""} for sample in reader][: len(samples)] == [
                    {**sample, "__url__": ""} for sample in samples
                ]
            assert reader.starts[: len(samples)] == offsets[: len(samples)]
            assert error is not None or reader.starts == offsets[:-1]
            num_wrong += error is not None
    assert num_wrong > 20


SAMPLES = {f"k{number}": {"cls": b"1", "jpg": bytes(700)} for number in range(5)}

CHANGES: dict[str, dict[str, dict[str, bytes]]] = {
    "a sample less": dict(itertools.islice(SAMPLES.items(), 4)),
    "a sample more": {**SAMPLES, "k5": {"cls": b"1", "jpg": bytes(700)}},
    "another field": {**SAMPLES, "k2": {"cls": b"1", "png": bytes(700)}},
    "a field less": {**SAMPLES, "k2": {"cls": b"1"}},
    "two in one": {"k0": {**SAMPLES["k0"], "b.cls": b"1", "b.jpg": bytes(700)}, **dict(list(SAMPLES.items())[2:])},
    "no jpg": {key: {"cls": b"1"} for key in SAMPLES},
}


@pytest.mark.parametrize("has_offsets", [True, False], ids=["offsets", "none"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_index_says_of_samples_is_compared_as_they_are_read(tmp_path, change, has_offsets):
    path = tmp_path / "s.tar"
    path.write_bytes(write_shard(tmp_path / "w", SAMPLES).read_bytes() + bytes(20_000))
    num_bytes = path.stat().st_size
    (tmp_path / "w").unlink()
    index_folder(tmp_path, workers=1)
    if not has_offsets:
        offsets_path(path).unlink()
    indexed, error = read(stream(tmp_path))
    assert (len(indexed), error) == (5, None)
    data = write_shard(tmp_path / "w", CHANGES[change]).read_bytes()
    (tmp_path / "w").unlink()
    write_over(path, data.ljust(num_bytes, b"\0"))
    samples, error = read(stream(tmp_path))
    if change == "a field less" and not has_offsets:
        assert error is None  # the data give no sign of it
        return
    assert isinstance(error, ShardError)
    assert error.samples_read == len(samples)
    assert samples == indexed[: len(samples)] or not has_offsets
    whole, nothing = read(stream(tmp_path, check="none"))
    assert nothing is None
    assert len(whole) == len(CHANGES[change])


def test_offsets_of_another_shard_are_refused(tmp_path):
    write_shard(tmp_path / "s.tar", SAMPLES)
    index_folder(tmp_path, workers=1)
    data = bytearray(offsets_path(tmp_path / "s.tar").read_bytes())
    data[9] ^= 2
    offsets_path(tmp_path / "s.tar").write_bytes(data)
    with pytest.raises(FolderIndexError, match=r"does not belong to s\.tar"):
        list(stream(tmp_path).loader(workers=0))


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
    path.write_bytes(tar_of(sorted(members)))
    index_folder(tmp_path, workers=1)
    write_over(path, tar_of(members))
    samples, error = read(stream(path))  # with the index of the intact shard
    assert samples == []
    assert isinstance(error, ShardError)


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
    assert len(list(stream(path, check="none").loader(workers=0))) == 5
    assert walks == [str(path)]


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


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


def test_empty_shards_say_so_instead_of_looping(tmp_path):
    pattern = write_numbers(tmp_path, [0, 0])
    with pytest.raises(PipelineError, match="hold no samples"):
        list(Pipeline().stream(pattern).map(number_of).with_epoch(2).loader(workers=0))


@pytest.mark.parametrize("options", [{}, {"shuffle_shards": False}, {"resampled": True}], ids=str)
def test_a_rank_that_gets_only_empty_shards_says_so_instead_of_looping(tmp_path, monkeypatch, options):
    """Ranks 0 and 2 read the two other shards for ever."""
    monkeypatch.setattr(streaming, "_MOST_EMPTY", 50)
    pattern = write_numbers(tmp_path, [5, 0, 0])
    pipe = Pipeline().stream(pattern, **options).split_by_node().map(number_of).with_epoch(4)
    if not options.get("shuffle_shards", True):
        with pytest.raises(PipelineError, match="this worker gets only shards that hold no samples"):
            list(pipe.loader(workers=0, rank=1, world_size=3))
    else:
        assert len(list(pipe.loader(workers=0, rank=1, world_size=3))) == 4


def test_an_epoch_that_can_have_no_batch_is_an_error(tmp_path):
    pattern = write_numbers(tmp_path, [9])
    loader = Pipeline().stream(pattern).map(number_of).with_epoch(5).batched(7, partial=False).loader(workers=0)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"epoch \d is empty"):
            list(loader)


def test_a_built_stream_of_shards_without_samples_is_an_error(tmp_path):
    pattern = write_numbers(tmp_path, [0, 0])
    for pipe in (Pipeline().stream(pattern), Pipeline().stream(write_numbers(tmp_path / "full", [3])).select(nothing)):
        with pytest.raises(PipelineError, match="epoch 0 is empty: the shards hold no samples"):
            list(pipe.build())


def test_a_cut_shard_yields_whole_samples_then_raises(tmp_path):
    path = write_shard(tmp_path / "a.tar", {f"k{at}": {"cls": b"%d" % at, "txt": b"x" * 600} for at in range(5)})
    path.write_bytes(path.read_bytes()[: 4 * 2560 + 700])
    samples = iter(Pipeline().stream(str(path)).loader(workers=0))
    seen = [next(samples) for _ in range(3)]
    with pytest.raises(ShardError, match="3 samples read"):
        next(samples)
    assert [sample["__key__"] for sample in seen] == ["k0", "k1", "k2"]
    assert all(len(sample["txt"]) == 600 for sample in seen)


def test_check_sha256_finds_a_flipped_payload_bit_before_training(tmp_path):
    from wdskit.dataset.index import write_index
    from wdskit.shards.index import scan_shard

    path = write_shard(tmp_path / "a.tar", {f"k{at}": {"txt": b"x" * 100} for at in range(3)})
    write_index(tmp_path, [scan_shard(str(path)).entry])
    data, before = bytearray(path.read_bytes()), path.stat()
    data[600] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # otherwise the time would show it
    assert len(list(Pipeline().stream(str(path)).loader(workers=0))) == 3
    with pytest.raises(ShardError, match="sha256"):
        list(Pipeline().stream(str(path), check="sha256").loader(workers=0))
    path.write_bytes(data + bytes(512))
    with pytest.raises(ShardError, match="index says"):
        list(Pipeline().stream(str(path)).loader(workers=0))
