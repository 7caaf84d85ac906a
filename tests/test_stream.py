"""The stream: draws, splits, epochs, in this process and in workers of every kind."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter

import pytest
import shards
import webdataset
from shards import draw, even, fail_on_7, nothing, number_of, write_numbers, write_shard

import wdskit
from wdskit import ConfigError, Pipeline, PipelineError, SampleError, ShardError

START_METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


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


def test_the_same_seed_gives_the_same_order_and_another_seed_another(six):
    pipe = numbers(six, seed=4).shuffle(10)
    assert epochs_of(pipe, 2, workers=2) == epochs_of(pipe, 2, workers=2)
    assert epochs_of(pipe, 1, workers=0) != epochs_of(numbers(six, seed=5).shuffle(10), 1, workers=0)


def test_set_epoch_after_the_fact_gives_that_epoch(six):
    pipe = numbers(six, seed=4).shuffle(10)
    epochs = epochs_of(pipe, 4, workers=2)
    loader = pipe.loader(workers=2)
    for epoch in (2, 0, 3):
        loader.set_epoch(epoch)
        assert list(loader) == epochs[epoch]


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_are_the_same_under_every_start_method_and_persistence(six, start_method, persistent):
    pipe = numbers(six, seed=2).shuffle(6).with_epoch(15)
    kinds = {"start_method": start_method, "persistent_workers": persistent}
    num = 4 if persistent else 2  # without, each has its own processes
    workers = 1 if start_method == "spawn" else 2  # one takes 2 s to load torch
    assert epochs_of(pipe, num, workers=workers, **kinds) == epochs_of(pipe, num, workers=workers)


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


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_len_counts_the_short_batches_of_every_worker(six, workers, n):
    loader = numbers(six).with_epoch(n).batched(4).loader(workers=workers)
    assert len(list(loader)) == len(loader)


def test_the_stream_goes_on_where_the_last_epoch_ended(six):
    for workers, persistent in itertools.product((0, 1, 2), (True, False)):
        epochs = epochs_of(numbers(six, seed=3).with_epoch(13), 3, workers=workers, persistent_workers=persistent)
        assert sorted(itertools.chain(*epochs)) == list(range(39)) or workers > 1
        counted = Counter(itertools.chain(*epochs_of(numbers(six, seed=3).with_epoch(13), 12, workers=workers)))
        assert set(counted) == set(range(39))


def test_no_sample_is_lost_or_repeated_at_an_epoch_boundary(six):
    """What a buffer holds at the end of an epoch comes in the next, from workers that are gone too."""
    for persistent, threads in itertools.product((True, False), (1, 3)):
        pipe = numbers(six, seed=3).shuffle(7, initial=7).with_epoch(5)
        loader = pipe.loader(workers=1, persistent_workers=persistent, threads=threads)
        seen = [number for _ in range(16) for number in loader]
        counts = Counter(seen)
        assert len(seen) == 80
        assert max(counts.values()) <= 3
        assert len(counts) == 39


def test_ranks_and_workers_draw_disjointly(six):
    read = []
    for rank in range(2):
        pipe = split(six, seed=6).to_tuple("__url__").with_epoch(30)
        for worker in range(2):
            built = pipe.build(rank=rank, world_size=2)
            built.run.worker, built.run.num_workers = worker, 2
            stages = built.pipeline[:3]
            built.run.begin(0, draw=0, stop_draw=24)
            draws = stages[0]()
            for stage in stages[1:]:
                draws = stage(draws)
            read.append([item["__draw__"] for item in draws])
    assert sorted(itertools.chain(*read)) == list(range(24))
    assert [len(part) for part in read] == [6, 6, 6, 6]
    assert read[1] == [2, 6, 10, 14, 18, 22]


def test_two_ranks_of_two_workers_reach_every_sample_and_repeat_by_seed(six):
    def run(seed):
        pipe = numbers(six, seed=seed, resampled=True).shuffle(20).with_epoch(40)
        return [epochs_of(pipe, 8, rank=rank, world_size=2, workers=2) for rank in range(2)]

    one = run(1)
    assert one == run(1)
    assert one != run(2)
    assert one[0] != one[1]
    for rank in one:
        assert len({tuple(epoch) for epoch in rank}) == 8
    assert set(itertools.chain(*itertools.chain(*one))) == set(range(39))


def test_after_a_break_the_same_epoch_starts_again(six):
    for workers, persistent in ((0, True), (2, True), (2, False)):
        loader = numbers(six, seed=3).shuffle(7).with_epoch(12).loader(workers=workers, persistent_workers=persistent)
        first = list(loader)
        second = list(itertools.islice(loader, 5))
        again = list(loader)
        third = list(loader)
        assert again[:5] == second
        assert loader.epoch == 3
        assert [first, again, third] == epochs_of(numbers(six, seed=3).shuffle(7).with_epoch(12), 3, workers=workers)


def test_random_numbers_depend_on_the_position_only(six):
    def drawn(**settings):
        epochs = epochs_of(split(six, seed=8).map(draw), 2, **settings)
        return [sorted(epoch) for epoch in epochs]

    base = drawn(workers=0)
    assert drawn(workers=3) == base
    assert drawn(workers=2, threads=4) == base
    assert base[0] != base[1]
    assert len({number for _, number in base[0] + base[1]}) == 78


def test_threads_change_nothing(six):
    pipe = split(six, seed=8).shuffle(9).map(draw).with_epoch(11)
    base = epochs_of(pipe, 6, workers=2)
    for persistent in (True, False):
        assert epochs_of(pipe, 6, workers=2, threads=3, persistent_workers=persistent) == base


def test_a_missing_splitter_is_refused_unless_it_is_meant(six):
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        Pipeline().stream(six).split_by_worker().with_epoch(3).loader(rank=0, world_size=2, workers=0)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        Pipeline().stream(six).split_by_node().with_epoch(3).loader(workers=2)
    loader = Pipeline().stream(six, split="none").map(number_of).loader(workers=2)
    assert Counter(loader) == Counter([*range(39), *range(39)])


def test_a_stream_over_ranks_needs_with_epoch(six):
    with pytest.raises(PipelineError, match="with_epoch"):
        numbers(six).loader(rank=0, world_size=2, workers=0)


def test_workers_without_a_shard_are_named(six):
    with pytest.raises(PipelineError, match="6 shards cannot feed 1 ranks x 7 workers"):
        numbers(six).loader(workers=7)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pipeline_that_drops_everything_says_so(six, workers):
    endless = split(six).select(nothing).shuffle(5).with_epoch(3).loader(workers=workers)
    with pytest.raises(PipelineError, match="dropped all"):
        list(endless)
    ending = split(six).select(nothing).loader(workers=workers)
    with pytest.raises(PipelineError, match="is empty"):
        list(ending)


def test_empty_shards_say_so_instead_of_looping(tmp_path):
    pattern = write_numbers(tmp_path, [0, 0])
    with pytest.raises(PipelineError, match="hold no sample"):
        list(numbers(pattern).with_epoch(2).loader(workers=0))


def test_select_and_slice_count_per_rank(six):
    for workers in (0, 1, 2, 3):
        assert sorted(split(six).select(even).map(number_of).loader(workers=workers)) == list(range(0, 39, 2))
        assert len(list(numbers(six).slice(10).loader(workers=workers))) == 10
        assert len(list(numbers(six).slice(3, 12, 2).loader(workers=workers))) == 5


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_keep_their_type_and_facts_on_the_way_from_a_worker(six, workers):
    with pytest.raises(SampleError, match=r"n000007: map failed: ValueError: seven") as caught:
        list(split(six).map(fail_on_7).loader(workers=workers))
    assert caught.value.key == "n000007"
    assert caught.value.stage == "map"


def test_a_cut_shard_yields_whole_samples_then_raises(tmp_path):
    path = write_shard(tmp_path / "a.tar", {f"k{at}": {"cls": b"%d" % at, "txt": b"x" * 600} for at in range(5)})
    path.write_bytes(path.read_bytes()[: 4 * 2560 + 700])
    samples = iter(Pipeline().stream(str(path)).loader(workers=0))
    seen = [next(samples) for _ in range(3)]
    with pytest.raises(ShardError, match="3 samples read"):
        next(samples)
    assert [sample["__key__"] for sample in seen] == ["k0", "k1", "k2"]
    assert all(len(sample["txt"]) == 600 for sample in seen)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
def test_build_is_a_data_pipeline_that_takes_webdatasets_stages(six):
    built = numbers(six, seed=1).stage(webdataset.filters.map(lambda number: number + 1000)).build()
    assert isinstance(built, webdataset.DataPipeline)
    assert sorted(built) == list(range(1000, 1039))
    mixed = Pipeline().stage(webdataset.SimpleShardList(sorted_urls(six))).stage(webdataset.tarfile_to_samples())
    assert [int(sample["cls"]) for sample in mixed.build()] == list(range(39))
    del mixed
    gc.collect()


def sorted_urls(pattern):
    from wdskit.dataset.patterns import list_shards

    return list(list_shards(pattern).urls)


def test_built_pipelines_work_in_torchs_own_loader(six):
    from torch.utils.data import DataLoader

    built = numbers(six, seed=1).shuffle(6).with_epoch(10).build()
    for persistent in (True, False):
        built.set_epoch(0)
        plain = DataLoader(built, batch_size=None, num_workers=2, persistent_workers=persistent)
        epochs = [[int(item) for item in plain] for _ in range(3)]
        assert [len(epoch) for epoch in epochs] == [10, 10, 10]
        built.set_epoch(2)
        assert [int(item) for item in plain] == epochs[2]


def test_lambdas_are_refused_by_name_where_they_cannot_go(six):
    pipe = split(six).map(lambda sample: sample)
    with pytest.raises(PipelineError, match="lambda"):
        pipe.loader(workers=1, start_method="spawn")
    assert len(list(pipe.loader(workers=1, start_method="fork"))) == 39


def test_a_second_live_iterator_is_refused(six):
    loader = numbers(six).loader(workers=0)
    first = iter(loader)
    next(first)
    second = iter(loader)  # nothing happens before the first item is asked for
    with pytest.raises(PipelineError, match="iterated already"):
        next(second)
    third = iter(loader)
    del first
    assert len(list(third)) == 39


def test_len_is_refused_where_it_is_unknown_and_must_be_true(six):
    with pytest.raises(TypeError, match="with_epoch or with_length"):
        len(numbers(six).loader(workers=0))
    assert len(numbers(six).with_length(39).loader(workers=0)) == 39
    with pytest.raises(PipelineError, match="with_length says 7"):
        numbers(six).with_epoch(8).with_length(7).loader(workers=0)


def test_weights_draw_parts_by_their_shares(tmp_path):
    rare = write_numbers(tmp_path / "a", [5, 5])
    often = write_numbers(tmp_path / "b", [5])
    pipe = split(f"{rare}::{often}", resampled=True, weights=[1.0, 9.0]).to_tuple("__url__").with_epoch(3000)
    urls = Counter(url for (url,) in pipe.loader(workers=0))
    assert urls[str(tmp_path / "b" / "s-000.tar")] > 2400
    with pytest.raises(ConfigError, match="1 `weights` for 2 parts"):
        split(f"{rare}::{often}", resampled=True, weights=[1.0]).loader(workers=0)


def test_check_sha256_finds_a_flipped_payload_bit_before_training(tmp_path):
    from wdskit.dataset.index import write_index
    from wdskit.shards.index import scan_shard

    path = write_shard(tmp_path / "a.tar", {f"k{at}": {"txt": b"x" * 100} for at in range(3)})
    write_index(tmp_path, [scan_shard(str(path), name="a.tar").entry])
    data, before = bytearray(path.read_bytes()), path.stat()
    data[600] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # else it would be found without
    assert len(list(Pipeline().stream(str(path)).loader(workers=0))) == 3
    with pytest.raises(ShardError, match="sha256"):
        list(Pipeline().stream(str(path), check="sha256").loader(workers=0))
    path.write_bytes(data + bytes(512))
    with pytest.raises(ShardError, match="index says"):
        list(Pipeline().stream(str(path)).loader(workers=0))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_stream_that_is_open_when_python_exits_says_nothing(python, tmp_path, six, threads):
    """A script's own function keeps the loader alive until its module is taken apart."""
    script = f"""
import wdskit
def keep(sample):
    return sample
pipe = wdskit.Pipeline().stream({str(six)!r}, resampled=True).map(keep).with_epoch(3)
loader = pipe.loader(workers=0, threads={threads})
for epoch in (0, 1, 5):
    loader.set_epoch(epoch)
    assert len(list(loader)) == 3
"""
    (tmp_path / "script.py").write_text(script)
    done = python.start(tmp_path / "script.py").wait()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_module_of_test_stages_is_what_workers_import():
    assert shards.draw.__module__ == "shards"
    assert wdskit.Pipeline is Pipeline
