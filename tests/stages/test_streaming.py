"""The stream: draws, splits, epochs, in this process and in workers of every kind."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset
from shards import draw, even, listed, nothing, number_of, write_numbers, write_shard
from torch.utils.data import DataLoader

from wdskit import Pipeline, PipelineError, StorageError
from wdskit.errors import ShardError

START_METHODS = ["fork", "spawn", "forkserver"]


def split(pattern, **options):
    return Pipeline().stream(pattern, **options).split_by_node().split_by_worker()


def numbers(pattern, **options):
    return split(pattern, **options).map(number_of)


def epochs_of(pipe, num_epochs, *, rank=0, world_size=1, **settings):
    loader = pipe.loader(rank=rank, world_size=world_size, **settings)
    return [list(loader) for _ in range(num_epochs)]


def test_a_pass_holds_every_sample_once_in_another_order_each_epoch(six):
    for workers in (0, 1, 2, 3):
        first, second = epochs_of(numbers(six, seed=1).shuffle(10), 2, workers=workers)
        assert sorted(first) == sorted(second) == list(range(39))
        assert first != second


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("size", "initial"), [(1, None), (5, 1), (38, 38), (39, None), (40, None), (5000, None)])
def test_with_epoch_of_all_samples_holds_each_once_whatever_the_buffer(six, size, initial, workers):
    pipe = numbers(six, seed=2).shuffle(size, initial=initial)
    for each in (pipe, pipe.shuffle(9)):
        epochs = epochs_of(each.with_epoch(39), 4, workers=workers)
        assert all(sorted(epoch) == list(range(39)) for epoch in epochs)
        assert size == 1 or len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("start_method", START_METHODS)
def test_epochs_are_the_same_under_every_start_method(six, start_method):
    pipe = numbers(six, seed=2).shuffle(6).with_epoch(15)
    workers = 1 if start_method == "spawn" else 2  # a worker takes 2 s to load torch
    assert epochs_of(pipe, 4, workers=workers, start_method=start_method) == epochs_of(pipe, 4, workers=workers)


def test_random_numbers_depend_on_the_position_only(six):
    def drawn(**settings):
        epochs = epochs_of(split(six, seed=8).map(draw), 2, **settings)
        return [sorted(epoch) for epoch in epochs]

    base = drawn(workers=0)
    assert drawn(workers=3) == base
    assert base[0] != base[1]
    assert len({number for _, number in base[0] + base[1]}) == 78


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_that_drops_everything_says_so(six, workers):
    ending = split(six).select(nothing).loader(workers=workers)
    with pytest.raises(PipelineError, match="epoch 0 ended after 0 items"):
        list(ending)


def test_an_epoch_of_bad_samples_only_says_so(six):
    loader = split(six).to_tuple("nope").batched(4).loader(workers=0, errors={"max_bad": 100})
    with pytest.raises(PipelineError, match=r"epoch 0 ended after 0 items: .*dropped them: 39 were bad"):
        list(loader)


def test_select_counts_per_rank(six):
    for workers in (0, 1, 2, 3):
        assert sorted(split(six).select(even).map(number_of).loader(workers=workers)) == list(range(0, 39, 2))


def test_a_shard_that_is_named_twice_is_read_twice(six):
    expected = Counter([*range(39), *range(39)])
    for workers in (0, 2):
        assert Counter(numbers([six, six.replace("/six", "/./six")]).loader(workers=workers)) == expected


def test_a_second_iterator_ends_the_first(six):
    loader = numbers(six).loader(workers=0)
    first = iter(loader)
    next(first)
    second = iter(loader)  # nothing happens before the first item is requested
    next(first)
    assert len(list(second)) == 39
    with pytest.raises(PipelineError, match="this iteration has ended"):
        next(first)


def leave_at_5(sample):
    return os._exit(0) if sample["__key__"].endswith("5") else sample


def test_a_worker_that_ends_before_its_tensors_are_fetched_is_an_error(six):
    pipe = split(six, shuffle_shards=False).map(leave_at_5).decode().to_tuple("cls").batched(2)
    with pytest.raises(PipelineError, match=r"^a worker of the stream: "):
        for _ in pipe.loader(workers=1, prefetch=9):
            while multiprocessing.active_children():
                time.sleep(0.001)


def test_len_is_refused_where_it_is_unknown_and_must_be_true(six):
    with pytest.raises(TypeError, match="with_epoch or with_length"):
        len(numbers(six).loader(workers=0))
    assert len(numbers(six).with_length(39).loader(workers=0)) == 39
    assert len(numbers(six).with_epoch(8).with_length(7).loader(workers=0)) == 7


def test_a_stream_that_is_open_when_python_exits_says_nothing(python, tmp_path, six):
    """A function of the script keeps the loader alive until the module is destroyed."""
    script = f"""
import wdskit
def keep(sample):
    return sample
pipe = wdskit.Pipeline().stream({str(six)!r}, resampled=True).map(keep).with_epoch(3)
loader = pipe.loader(workers=0)
for epoch in (0, 1, 5):
    loader.set_epoch(epoch)
    assert len(list(loader)) == 3
left = pipe.loader(workers=0)
for sample in left:
    break
"""
    (tmp_path / "script.py").write_text(script)
    done = python.start(tmp_path / "script.py").wait()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- draws of shards


def test_ranks_and_workers_draw_disjointly(six):
    draws = []
    for rank, worker in itertools.product(range(2), repeat=2):
        built = split(six, seed=6).to_tuple("__url__").with_epoch(30).build(rank=rank, world_size=2)
        built.run.worker, built.run.num_workers = worker, 2
        draws.append([sample["__url__"] for sample, _ in itertools.islice(built.pipeline[0](), 30)])
    shards = [built.source.shards.urls[at] for at in itertools.islice(built.source.draws(), 24)]
    for number, own in enumerate(draws):  # the samples of a shard follow each other
        rank, worker = divmod(number, 2)
        assert [url for url, _ in itertools.groupby(own)][:3] == shards[rank + 2 * worker :: 4][:3]


def test_a_worker_without_a_shard_has_no_items(six):
    assert sorted(split(six).map(number_of).loader(workers=7)) == list(range(39))


def test_a_stream_over_ranks_needs_with_epoch(six):
    with pytest.raises(PipelineError, match="with_epoch"):
        split(six).map(number_of).loader(rank=0, world_size=2, workers=0)


# --- what a shard holds


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
        with pytest.raises(PipelineError, match="epoch 0 ended after 0 items: the shards have no more samples"):
            list(pipe.loader(workers=0))
    for endless in ({"resampled": True}, {"shuffle_shards": False}):
        with pytest.raises(StorageError, match="have no sample"):
            list(Pipeline().stream(pattern, **endless).with_epoch(3).loader(workers=0))


# --- stages and loaders of others


def plus_100(source):
    for sample in source:
        yield int(sample["cls"]) + 100


def test_callables_are_stages(six):
    assert list(listed(six).stage(plus_100).loader(workers=0)) == list(range(100, 139))
    with pytest.raises(PipelineError, match=r"a pipeline starts with a source of wdskit"):
        Pipeline().stage(plus_100).map(number_of).loader(workers=0)


def test_another_stage_of_webdataset_is_no_splitter(six):
    pipe = Pipeline().stream(six).stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        pipe.loader(rank=0, world_size=2, workers=0)
    by_node = Pipeline().stream(six).split_by_node().stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        by_node.loader(rank=0, world_size=2, workers=2)


@pytest.mark.parametrize(("persistent", "start_method"), [(False, "fork"), (True, "fork"), (True, "spawn")])
def test_all_workers_of_torchs_loader_are_in_one_epoch(six, persistent, start_method):
    """Also after passes in this process, after a `break`, and after `set_epoch`."""
    built = Pipeline().stream(six, seed=1).split_by_worker().map(number_of).build()
    assert sorted(built) == list(range(39))
    settings = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": start_method}
    loader = DataLoader(built, batch_size=None, **settings)
    for number, _ in enumerate(loader):
        if number == 33:
            break
    epochs = [[int(item) for item in loader] for _ in range(3)]
    assert all(sorted(epoch) == list(range(39)) for epoch in epochs)
    assert len({*map(tuple, epochs)}) == 3
    built.set_epoch(2)
    assert [int(item) for item in loader] == epochs[0]
    assert [int(item) for item in loader] == epochs[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_all_ranks_have_equal_steps_and_reach_all_samples(six, world_size, workers):
    pipe = Pipeline().stream(six, seed=3).split_by_node().split_by_worker().shuffle(7).map(number_of).batched(2)
    seen: set[int] = set()
    for rank in range(world_size):
        with pipe.with_epoch(5).loader(rank=rank, world_size=world_size, workers=workers) as loader:
            for _ in range(24):
                items = list(loader)
                assert len(items) == len(loader) == 5
                seen |= {number for item in items for number in item.tolist()}
    assert seen == {*range(39)}
