"""The stream: draws, splits, epochs, in this process and in workers of every kind."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from shards import draw, even, fail_on_7, nothing, number_of

from wdskit import Pipeline, PipelineError, SampleError

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
    pipe = numbers(six, seed=2).shuffle(size, initial=initial).with_epoch(39)
    epochs = epochs_of(pipe, 4, workers=workers)
    assert all(sorted(epoch) == list(range(39)) for epoch in epochs)
    assert size == 1 or len({tuple(epoch) for epoch in epochs}) == 4


def test_set_epoch_after_the_fact_gives_that_epoch(six):
    pipe = numbers(six, seed=4).shuffle(10)
    epochs = epochs_of(pipe, 4, workers=2)
    loader = pipe.loader(workers=2)
    for epoch in (2, 0, 3):
        loader.set_epoch(epoch)
        assert list(loader) == epochs[epoch]


@pytest.mark.parametrize("start_method", START_METHODS)
def test_epochs_are_the_same_under_every_start_method(six, start_method):
    pipe = numbers(six, seed=2).shuffle(6).with_epoch(15)
    workers = 1 if start_method == "spawn" else 2  # a worker takes 2 s to load torch
    assert epochs_of(pipe, 4, workers=workers, start_method=start_method) == epochs_of(pipe, 4, workers=workers)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("resampled", [False, True])
def test_with_epoch_yields_n_a_rank_whatever_the_workers(six, workers, resampled):
    pipe = numbers(six, resampled=resampled).shuffle(5).with_epoch(10)
    loader = pipe.loader(workers=workers, rank=1, world_size=2)
    assert len(loader) == 10
    assert [len(list(loader)) for _ in range(3)] == [10, 10, 10]
    batches = numbers(six, resampled=resampled).batched(4).with_epoch(5).loader(workers=workers, rank=1, world_size=2)
    assert len(batches) == 5
    assert [[len(batch) for batch in batches] for _ in range(2)] == [[4] * 5] * 2


def test_after_a_break_the_stream_starts_anew_with_draws_of_the_next_epoch(six):
    """This holds for any batches that workers have ready, and any place of the stream."""
    pipe = numbers(six, seed=3).shuffle(7).with_epoch(12)
    for workers in (0, 2):
        fresh = pipe.loader(workers=workers)
        fresh.set_epoch(2)
        expected = [list(fresh) for _ in range(2)]
        for nap in (0, 0.2):
            loader = pipe.loader(workers=workers)
            list(loader)
            list(itertools.islice(loader, 5))
            time.sleep(nap * bool(workers))
            assert [loader.epoch, list(loader), list(loader), loader.epoch] == [2, *expected, 4]


def test_workers_that_are_not_persistent_start_each_epoch_anew(six):
    pipe = numbers(six, seed=3).shuffle(7).with_epoch(12)
    loader = pipe.loader(workers=2, persistent_workers=False)
    for epoch in range(3):
        fresh = pipe.loader(workers=2)
        fresh.set_epoch(epoch)
        assert list(loader) == list(fresh)


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
    with pytest.raises(PipelineError, match="is empty"):
        list(ending)


def test_an_epoch_of_bad_samples_only_says_so(six):
    loader = split(six).to_tuple("nope").batched(4).loader(workers=0, errors={"max_bad": 100})
    with pytest.raises(PipelineError, match=r"epoch 0 is empty: .*dropped all of them \(39 bad samples\)"):
        list(loader)


def test_select_counts_per_rank(six):
    for workers in (0, 1, 2, 3):
        assert sorted(split(six).select(even).map(number_of).loader(workers=workers)) == list(range(0, 39, 2))


def test_a_shard_that_is_named_twice_is_read_twice(six):
    expected = Counter([*range(39), *range(39)])
    for workers in (0, 2):
        assert Counter(numbers([six, six.replace("/six", "/./six")]).loader(workers=workers)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_on_which_select_fails_are_skipped_within_the_budget(six, workers):
    pipe = split(six).select(fail_on_7).map(number_of)
    with pytest.raises(SampleError, match="select failed: ValueError: seven"):
        list(pipe.loader(workers=workers, errors={"max_bad": 5}))
    loader = pipe.loader(workers=workers, errors={"max_bad": 5, "transforms": True})
    assert 7 not in list(loader)
    assert loader.stats().replaced == 1


def test_lambdas_are_refused_by_name_where_they_cannot_go(six):
    pipe = split(six).map(lambda sample: sample)
    with pytest.raises(PipelineError, match="lambda"):
        pipe.loader(workers=1, start_method="spawn")
    assert len(list(pipe.loader(workers=1, start_method="fork"))) == 39


def test_a_second_iterator_ends_the_first(six):
    loader = numbers(six).loader(workers=0)
    first = iter(loader)
    next(first)
    second = iter(loader)  # nothing happens before the first item is requested
    next(first)
    assert len(list(second)) == 39
    with pytest.raises(
        PipelineError, match="this iteration has ended: the loader was closed, or a new iteration began"
    ):
        next(first)


def test_len_is_refused_where_it_is_unknown_and_must_be_true(six):
    with pytest.raises(TypeError, match="with_epoch or with_length"):
        len(numbers(six).loader(workers=0))
    assert len(numbers(six).with_length(39).loader(workers=0)) == 39
    assert len(numbers(six).with_epoch(8).with_length(7).loader(workers=0)) == 7


@pytest.mark.parametrize("add", [lambda p: p.batched(2), lambda p: p.map(number_of), lambda p: p.shuffle(3)])
def test_nothing_follows_with_epoch(six, add):
    """It counts the items of a rank, so that all ranks take as many steps."""
    with pytest.raises(PipelineError, match=r"`with_epoch` at \[3\] concerns the output of the whole pipeline"):
        add(split(six).with_epoch(4)).check()


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
    shards = list(itertools.islice(built.source.draws(), 24))
    for number, own in enumerate(draws):  # the samples of a shard follow each other
        rank, worker = divmod(number, 2)
        assert [url for url, _ in itertools.groupby(own)][:3] == shards[rank + 2 * worker :: 4][:3]


def test_a_worker_without_a_shard_has_no_items(six):
    assert sorted(split(six).map(number_of).loader(workers=7)) == list(range(39))


def test_a_missing_splitter_is_refused(six):
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        Pipeline().stream(six).split_by_worker().with_epoch(3).loader(rank=0, world_size=2, workers=0)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        Pipeline().stream(six).split_by_node().with_epoch(3).loader(workers=2)


def test_a_stream_over_ranks_needs_with_epoch(six):
    with pytest.raises(PipelineError, match="with_epoch"):
        split(six).map(number_of).loader(rank=0, world_size=2, workers=0)
