"""Planned sources end to end: exact epochs, equal steps, the same batches from any position and with any workers."""

from __future__ import annotations

import contextlib
import functools
import json
from collections import UserDict
from pathlib import Path
from pkgutil import resolve_name

import pytest
from masks import mask_of
from shards import index_numbers, png_of, write_pictures, write_shard

from wdskit import (
    ConfigError,
    FolderIndexError,
    Pipeline,
    PipelineError,
    SampleError,
    ShardError,
)
from wdskit.shards.index import index_folder

COUNTS = [5, 1, 9, 0, 4, 7, 3]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """Indexed shards of uneven size with samples `cls`, numbered over all shards."""
    return index_numbers(tmp_path_factory.mktemp("numbers"), COUNTS)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> str:
    """Indexed shards of small pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [7, 0, 12, 5])
    index_folder(folder)
    return str(folder)


def labels(pipe):
    return pipe.decode().to_tuple("cls", "__key__", *mask_of(pipe))


def ranks_of(pipe, world_size: int, **settings) -> list:
    return [pipe.loader(rank=rank, world_size=world_size, workers=0, **settings) for rank in range(world_size)]


# Exact epochs, equal steps.


def test_dropped_samples_are_reported_once_when_the_loader_is_made(numbers, caplog):
    """Rank 0 reports more than 1 % of an epoch; padded samples, or draws with replacement, are not reported."""
    for loader in ranks_of(labels(Pipeline().exact(numbers)).batched(10), 2):
        list(loader)
    (reported,) = (record.message for record in caplog.records if "dropped" in record.message)
    assert reported.splitlines()[0] == (
        "pipeline: 9 of 29 samples are dropped in each epoch (31.0%): "
        "they do not fill a batch of 10 on each of 2 ranks."
    )
    caplog.clear()
    for pipe in (Pipeline().exact(numbers, tail="pad"), Pipeline().resampled(numbers), Pipeline().exact(numbers)):
        ranks_of(labels(pipe).batched(1 if pipe.stages[0].name == "exact" else 10), 1)
    assert not caplog.records


def test_a_loader_has_the_names_that_trainers_ask_for(numbers):
    loader = labels(Pipeline().exact(numbers)).batched(global_size=4).loader(workers=0, rank=1, world_size=2)
    assert (loader.batch_size, len(loader.dataset)) == (2, 29)
    assert Pipeline().exact(numbers).decode().to_tuple("cls").loader(workers=0).batch_size is None


def test_the_mask_is_where_to_tuple_names_it_or_a_field(numbers):
    pipe = Pipeline().sequential(numbers, range=[0, 3]).decode()
    (batch,) = pipe.to_dict("cls").batched(4).loader(workers=0)
    assert (batch["cls"].tolist(), batch["__valid__"].tolist()) == ([0, 1, 2, 2], [True] * 3 + [False])
    named = pipe.to_tuple("__valid__", "cls")
    assert list(named.loader(workers=0, rank=0, world_size=2)) == [(True, 0), (False, 2)]
    [(valid, cls)] = named.batched(4).loader(workers=0)
    assert (cls.tolist(), valid.tolist()) == ([0, 1, 2, 2], [True] * 3 + [False])
    [(double, valid)] = named.batched(4).map(lambda batch: (batch[1] * 2, batch[0])).loader(workers=0)
    assert (double.tolist(), valid.tolist()) == ([0, 2, 4, 4], [True] * 3 + [False])
    [batch] = named.batched(4, collate=lambda rows: UserDict(labels=[cls for _, cls in rows])).loader(workers=0)
    assert (type(batch), batch["labels"]) == (UserDict, [0, 1, 2, 2])
    assert batch["__valid__"].tolist() == [True] * 3 + [False]
    assert [sample["__valid__"] for sample in pipe.loader(workers=0, rank=1, world_size=2)] == [True, True]
    for moved in (named.map(lambda pair: pair[::-1]).batched(4), named.batched(4, collate=lambda _: ([0, 1], 2))):
        with pytest.raises(PipelineError, match="`__valid__` is at place 0, but a function after it"):
            list(moved.loader(workers=0))


@pytest.mark.parametrize("only", [None, ["cls"]], ids=["all", "columns"])
def test_a_mask_that_no_tuple_names_is_an_error_before_the_run_that_shows_the_line(numbers, only):
    for source in (Pipeline().sequential(numbers), Pipeline().exact(numbers, tail="pad")):
        message = r"Write `to_tuple: \[cls, __key__, __valid__\]`, or `tail: drop` in `\w+`"
        with pytest.raises(PipelineError, match=message):
            source.decode(only=only).to_tuple("cls", "__key__").batched(4).loader(workers=0)
    dropped = Pipeline().exact(numbers).decode(only=only).to_tuple("cls", "__valid__").batched(4)
    assert all(valid.tolist() == [True] * 4 for _, valid in dropped.loader(workers=0))


def test_with_epoch_counts_samples_or_batches_of_a_rank(numbers):
    pipe = labels(Pipeline().exact(numbers, lanes=4, window=5))
    loaders = ranks_of(pipe.batched(3).with_epoch(4), 2)
    seen = [[n for loader in loaders for cls, _ in loader for n in cls.tolist()] for _ in range(5)]
    assert [len(part) for part in seen] == [24] * 5
    before = ranks_of(pipe.with_epoch(12).batched(3), 2)
    assert [[n for loader in before for cls, _ in loader for n in cls.tolist()] for _ in range(5)] == seen
    with pytest.raises(PipelineError, match="with_epoch: 10 samples per rank are not a whole number of batches of 3"):
        pipe.with_epoch(10).batched(3).loader(workers=0)


# Batches, mixtures, ranges.


def test_a_global_batch_that_does_not_divide_is_refused(numbers):
    pipe = labels(Pipeline().exact(numbers)).batched(global_size=10)
    with pytest.raises(PipelineError, match=r"a global batch of 10 is not a multiple of 4 ranks\.\n  Choose"):
        pipe.loader(rank=0, world_size=4, workers=0)
    with pytest.raises(PipelineError, match="a global batch of 10 is not a multiple of 4 ranks"):
        Pipeline().stream(numbers).split_by_node().batched(global_size=10).with_epoch(2).loader(rank=0, world_size=4)


def test_shares_meet_without_gap_or_overlap(numbers):
    for cut in ("0.001%", "33%", "50%", "66.6%", "99.999%"):
        parts = []
        for bounds in (["0%", cut], [cut, "100%"]):
            with contextlib.suppress(FolderIndexError):  # the folder has no sample
                loader = labels(Pipeline().sequential(numbers, range=bounds)).loader(workers=0)
                parts += [cls for cls, _, valid in loader if valid]
        assert parts == list(range(29)), cut


# The error budget.


@pytest.fixture
def damaged(tmp_path) -> str:
    """A folder of 30 pictures; 4, 11 and 12 cannot be decoded, 20 has no label."""
    pictures = write_pictures(tmp_path / "good", [30])
    samples = {}
    for picture in pictures:
        fields = {
            "png": (b"no picture" if picture.number in {4, 11, 12} else png_of(picture.pixels)),
            "cls": b"%d" % picture.number,
        }
        if picture.number == 20:
            del fields["cls"]
        samples[picture.key] = fields
    folder = tmp_path / "bad"
    folder.mkdir()
    write_shard(folder / "b.tar", samples)
    index_folder(folder)
    return str(folder)


BAD = {4, 11, 12, 20}


def decoded(pipe):
    return pipe.decode("rgb8").resize([4, 4]).to_tuple("png", "cls", "__key__", *mask_of(pipe))


@pytest.mark.parametrize("settings", [{"workers": 0}, {"workers": 2}, {"workers": 0, "threads": 3}], ids=str)
def test_a_bad_sample_is_replaced_and_no_other_moves(damaged, tmp_path, settings):
    pipe = decoded(Pipeline().exact(damaged, seed=2, lanes=3, window=6))
    keys = [key for _, _, key in Pipeline().exact(damaged, seed=2, lanes=3, window=6).map(with_key).loader(workers=0)]
    errors = {"max_bad": 10, "dir": str(tmp_path / "listed")}
    loader = pipe.loader(errors=errors, **settings)
    found = [(int(label), key) for _, label, key in loader]
    moved = [at for at, ((_, key), expected) in enumerate(zip(found, keys, strict=True)) if key != expected]
    bad = [at for at, key in enumerate(keys) if int(key[1:]) in BAD]
    assert moved == bad
    for at in bad:  # the next good sample of the same 1,024 positions replaces it
        assert found[at][1] == next(keys[p % 30] for p in range(at + 1, at + 30) if p % 30 not in bad)
    lines = [
        json.loads(line) for line in (tmp_path / "listed" / "bad-pipeline-rank00000.jsonl").read_text().splitlines()
    ]
    assert [(line["epoch"], line["position"], line["key"]) for line in lines] == [(0, at, keys[at]) for at in bad]
    assert all("b.tar" in line["shard"] and "failed" in line["reason"] for line in lines)
    assert loader.state_dict()["bad"] == 0


def with_key(sample):
    return (None, None, sample["__key__"])


@pytest.mark.parametrize("error", [SystemError, MemoryError, RecursionError])
@pytest.mark.parametrize("target", ["wdskit.stages.fields.decode_field", "PIL.ImageFile.ImageFile.load"])
def test_what_befalls_the_process_is_never_forgiven_as_a_bad_sample(damaged, monkeypatch, error, target):
    fine, calls = resolve_name(target), []

    def fail_for_a_while(*args):
        calls.append(args)
        if 5 <= len(calls) < 90:  # a chunk of samples that fails is made again one by one
            raise error("by chance")
        return fine(*args)

    errors = {"max_bad": 30, "transforms": True}
    loader = decoded(Pipeline().exact(damaged)).loader(workers=0, errors=errors)
    monkeypatch.setattr(target, fail_for_a_while)
    with pytest.raises(SampleError, match=rf"\w+ failed: {error.__name__}: by chance"):
        list(loader)


def test_padded_evaluation_masks_bad_samples(damaged):
    loader = decoded(Pipeline().sequential(damaged)).batched(8).loader(workers=0, errors={"max_bad": 4})
    kept = [int(label) for _, labels, _, mask in loader for label in labels[mask]]
    assert kept == [n for n in range(30) if n not in BAD]


@pytest.mark.parametrize(("max_bad", "allowed"), [(3, 3), (4, 4), ("10%", 3), ("15%", 4), ("0.001%", 1)])
def test_more_bad_samples_than_allowed_are_an_error(damaged, max_bad, allowed):
    loader = decoded(Pipeline().exact(damaged)).loader(workers=0, errors={"max_bad": max_bad})
    if allowed >= 4:
        assert len(list(loader)) == 30
        assert len(list(loader)) == 30  # the budget counts per epoch
        return
    with pytest.raises(SampleError, match=f"has {allowed + 1} bad samples .* errors.max_bad allows {max_bad}"):
        list(loader)


@pytest.mark.parametrize("none", ["0%", "0.0%", "0.000%", 0])
def test_a_share_of_nothing_allows_none(damaged, none):
    """A share above 0 allows at least one bad sample."""
    with pytest.raises(SampleError, match=r"decode failed.*\n  Pack it again .*`errors: \{max_bad: 10\}`\.$"):
        list(decoded(Pipeline().exact(damaged)).loader(workers=0, errors={"max_bad": none}))
    with pytest.raises(ConfigError, match="`dir` does nothing without a budget"):
        decoded(Pipeline().exact(damaged)).loader(workers=0, errors={"max_bad": none, "dir": "bad"})


def test_a_state_of_one_rank_gives_its_bad_samples_to_that_rank_only(damaged):
    make = functools.partial(decoded(Pipeline().exact(damaged, seed=2)).batched(5).loader, workers=0)
    loader = make(errors={"max_bad": 4}, rank=0, world_size=2)
    states = [json.loads(json.dumps(loader.state_dict())) for _ in loader]
    state = next(state for state in states if state["bad"])
    for rank, world_size in ((0, 2), (1, 2), (0, 1), (0, 3)):
        other = make(errors={"max_bad": 4}, rank=rank, world_size=world_size)
        other.load_state_dict(state)
        assert other.state_dict()["bad"] == (state["bad"] if (rank, world_size) == (0, 2) else 0)


def test_a_shard_error_is_never_forgiven(damaged):
    loader = decoded(Pipeline().exact(damaged)).loader(workers=0, errors={"max_bad": 30, "transforms": True})
    with Path(damaged, "b.tar").open("r+b") as file:
        file.seek(0)
        file.write(b"x")
    with pytest.raises(ShardError):
        list(loader)
