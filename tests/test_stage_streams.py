"""Pipelines as a whole: reuse, stages that hold samples back or drop them, with_epoch, and stages that are not ours."""

from __future__ import annotations

import functools

import pytest
import torch
import webdataset
from shards import listed, nothing, number_of, write_numbers

from wdskit import Pipeline, PipelineError
from wdskit.pipeline.settings import load_config


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


# --- reuse


def test_a_pipeline_never_changes(six):
    """Longer ones are new ones; several loaders of one run side by side."""
    base = listed(six)
    before = base.stages
    short, batched = base.map(number_of), base.batched(3, collate=len)
    first, second = short.loader(workers=0), short.loader(workers=0)
    pairs = list(zip(first, second, strict=True))
    assert pairs == [(number, number) for number in range(39)]
    assert list(batched.loader(workers=0)) == [3] * 13
    assert base.stages is before
    assert len(short.stages) == len(batched.stages) == len(before) + 1


def test_pipelines_can_be_joined_from_parts(six):
    source, tail = listed(six), Pipeline().map(number_of).batched(13).stages
    (one, two, three) = Pipeline((*source.stages, *tail)).loader(workers=0)
    assert [*one, *two, *three] == list(range(39))


def test_lists_that_the_caller_changes_later_change_nothing(six):
    shards, fields, weights = [six], ["cls", "__key__"], [1.0]
    pipe = Pipeline().stream(shards, resampled=True, weights=weights).to_tensor(fields=fields)
    config = {"pipeline": [{"stream": shards}, {"rename": {"a": "b"}}, {"to_tuple": fields}]}
    loaded = load_config(config).pipelines["pipeline"]
    stages = str(pipe.stages), str(loaded)
    for values in (shards, fields, weights):
        values.append(values[0])
    config["pipeline"][1]["rename"]["c"] = "d"
    assert (str(pipe.stages), str(loaded)) == stages


def test_two_iterators_of_one_built_pipeline_cannot_mix(six):
    """They would share one place in the stream, and each would skip what the other has read."""
    for pipe in (listed(six).map(number_of), listed(six).map(number_of).with_epoch(20)):
        built = pipe.build()
        slow = iter(built)
        assert next(slow) == 0
        fast = iter(built)
        assert [next(fast) for _ in range(6)] == list(range(6))
        with pytest.raises(PipelineError, match="another iterator"):
            next(slow)
        assert next(fast) == 6


# --- streams that stages hold up, or that never give anything


def test_stages_that_hold_or_skip_many_samples_are_no_silence(six):
    """More than all shards have: 5 passes."""
    base = listed(six).map(number_of)
    for pipe in (
        base.batched(4).shuffle(100, initial=50),
        base.slice(200, None),
        base.slice(0, None, 150),
        base.batched(200),
        base.batched(4).slice(40, None),
        base.batched(2).unbatched().shuffle(200, initial=200),
    ):
        assert len(list(pipe.with_epoch(3).loader(workers=0))) == 3


@pytest.mark.parametrize("options", [{}, {"resampled": True}, {"shuffle_shards": False}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_filter_that_keeps_one_shard_of_many_is_no_silence(tmp_path, options, world_size):
    """Whatever the luck of the draws: silence is what every shard has kept, not a row of unlucky ones."""
    pattern = write_numbers(tmp_path, [2] * 12)
    pipe = Pipeline().stream(pattern, **options).split_by_node().map(number_of).select(lambda number: number >= 22)
    rank = 11 % world_size  # who reads the last shard where they are not shuffled
    items = list(pipe.with_epoch(40).loader(workers=0, rank=rank, world_size=world_size))
    assert set(items) == {22, 23}


@pytest.mark.parametrize("options", [{}, {"resampled": True}, {"shuffle_shards": False}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_filter_that_keeps_nothing_is_told_on_every_rank(tmp_path, options, world_size):
    pattern = write_numbers(tmp_path, [2] * 12)
    pipe = Pipeline().stream(pattern, **options).split_by_node().select(nothing).with_epoch(1)
    for rank in range(world_size):
        with pytest.raises(PipelineError, match="dropped all of the last"):
            list(pipe.loader(workers=0, rank=rank, world_size=world_size))


def test_a_row_of_empty_shards_is_no_end(tmp_path):
    """One shard in twenty holds anything; draws are random, so it may stay away for long."""
    pattern = write_numbers(tmp_path, [0] * 19 + [1])
    assert list(Pipeline().stream(pattern, resampled=True).map(number_of).with_epoch(20).loader(workers=0)) == [0] * 20


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_slice_behind_with_epoch_leaves_the_next_epoch_where_it_is(six, workers, persistent):
    """The stream goes on by n each epoch, whatever threads have read ahead."""
    pipe = listed(six).with_epoch(10).map(number_of).slice(4)
    for threads in (1, 3):
        loader = pipe.loader(workers=workers, threads=threads, persistent_workers=persistent)
        assert [list(loader) for _ in range(3)] == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]


def toss(value, rng):
    return value, int(rng.integers(1 << 40))


BEHIND = {
    "shuffle": lambda p: p.with_epoch(12).shuffle(6, initial=6).map(toss),
    "batches": lambda p: p.with_epoch(12).batched(2).shuffle(4, initial=4).unbatched().map(float).map(toss),
    "foreign": lambda p: p.with_epoch(12).stage(reversed_list).map(toss),
}


def reversed_list(source):
    return reversed(list(source))


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind_with_epoch_begins_anew_each_epoch(six, name):
    """Other picks and other random numbers each epoch; the same ones when an epoch is repeated, and in new workers."""
    pipe = BEHIND[name](Pipeline().stream(six, seed=3).split_by_worker().map(number_of))
    loader = pipe.loader(workers=1)
    epochs = [list(loader) for _ in range(4)]
    assert len({number for epoch in epochs for _, number in epoch}) == 48
    for settings in ({"persistent_workers": False}, {"threads": 3}, {"threads": 2, "persistent_workers": False}):
        other = pipe.loader(workers=1, **settings)
        assert [list(other) for _ in range(4)] == epochs
    again = pipe.loader(workers=0)
    assert list(again) == epochs[0]
    for item in again:
        assert item == epochs[1][0]
        break
    assert [list(again) for _ in range(3)] == epochs[1:]


def test_a_shuffle_behind_with_epoch_picks_in_another_order_each_epoch(six):
    """Seen against the order that it was given."""
    pipe = listed(six).map(number_of).with_epoch(13).shuffle(13, initial=13)
    loader = pipe.loader(workers=0)
    picks = [tuple(number - 13 * epoch for number in loader) for epoch in range(3)]
    assert [sorted(pick) for pick in picks] == [list(range(13))] * 3
    assert len({*picks, tuple(range(13))}) == 4


def test_a_stage_that_is_not_ours_before_with_epoch_cannot_repeat_an_epoch(six):
    """What it holds cannot be read again, and that is said."""
    pipe = listed(six).stage(plus_100).with_epoch(12)
    loader = pipe.loader(workers=0)
    assert [list(loader) for _ in range(2)] == [list(range(100, 112)), list(range(112, 124))]
    assert next(iter(loader)) == 124
    with pytest.raises(PipelineError, match=r"cannot be read again.*\n  Finish every epoch, and keep the workers"):
        list(loader)
    with pytest.raises(PipelineError, match="workers that do not persist cannot take over"):
        pipe.loader(workers=1, persistent_workers=False)


# --- stages that are not ours


def plus_100(source):
    for sample in source:
        yield int(sample["cls"]) + 100


class Rerun(torch.utils.data.IterableDataset):
    """A source of torch's."""

    def __iter__(self):
        return iter([{"__key__": str(number), "cls": number} for number in range(5)])


def test_callables_and_datasets_are_stages(six):
    assert list(listed(six).stage(plus_100).loader(workers=0)) == list(range(100, 139))
    assert list(Pipeline().stage(Rerun()).map_dict(cls=str).to_tuple("cls").loader(workers=0)) == [
        (str(number),) for number in range(5)
    ]


def test_webdatasets_splitters_are_read_as_ours(six, monkeypatch):
    """Theirs count from where the stream goes on, and ask the environment for the rank; neither holds in workers."""
    theirs = Pipeline().stream(six, seed=2).stage(webdataset.split_by_node).stage(webdataset.split_by_worker)
    ours = Pipeline().stream(six, seed=2).split_by_node().split_by_worker()
    for rank in range(2):
        loaders = [
            pipe.map(number_of).with_epoch(9).loader(rank=rank, world_size=2, workers=2, persistent_workers=False)
            for pipe in (theirs, ours)
        ]
        first, second = ([list(loader) for _ in range(3)] for loader in loaders)
        assert first == second


def test_a_partial_of_webdatasets_splitter_is_one_too(six):
    """It takes shards, so they are not opened before it; its own group is left to it."""
    splitter = functools.partial(webdataset.split_by_node, group=None)
    built = Pipeline().stream(six).stage(splitter).split_by_worker().map(number_of).build()
    assert built.pipeline[1] is splitter
    assert sorted(built) == list(range(39))


def test_another_stage_of_webdataset_is_no_splitter(six):
    pipe = Pipeline().stream(six).stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_node is missing"):
        pipe.loader(rank=0, world_size=2, workers=0)
    by_node = Pipeline().stream(six).split_by_node().stage(webdataset.filters.map(number_of)).with_epoch(3)
    with pytest.raises(PipelineError, match="split_by_worker is missing"):
        by_node.loader(rank=0, world_size=2, workers=2)


def test_webdatasets_own_batches_shuffle_and_decode_run_inside(six):
    pipe = listed(six).stage(webdataset.shuffle(10)).stage(webdataset.decode()).to_tuple("cls")
    items = list(pipe.stage(webdataset.batched(4)).build())
    assert sorted(int(number) for (column,) in items for number in column) == list(range(39))
