"""Making batches, and dividing them into samples again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from shards import draw, fail_on_7, listed, write_numbers, write_pictures

from wdskit import Pipeline, PipelineError, SampleError


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    """The pattern of ten pictures in shards of 4, 3 and 3."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [4, 3, 3])
    return f"{folder}/p-*.tar"


@pytest.fixture
def six(tmp_path):
    """Six shards of 4 to 9 samples, 39 in all."""
    return write_numbers(tmp_path / "six", [4, 5, 6, 7, 8, 9])


def test_unbatched_undoes_batched(pattern):
    """This holds for tuples, dicts and bare values. The samples get back their own positions and names."""
    base = Pipeline().stream(pattern, seed=2).decode("rgb8").rename(image="jpg;png").to_tensor()
    for pipe in (base, base.to_tuple("image", "cls", "txt", "json"), base.map(take_number_of_tensor)):
        for size in (1, 3, 10, 11):
            once = list(pipe.loader(workers=0))
            twice = list(pipe.batched(size).unbatched().loader(workers=0))
            assert len(once) == len(twice) == 10
            assert all(map(equal_but_for_numbers, once, twice))


def take_number_of_tensor(sample):
    return float(sample["json"]["number"])


def equal_but_for_numbers(sample: Any, unbatched: Any) -> bool:
    """Return whether samples are equal; numbers may be tensors without axes."""
    if isinstance(sample, dict):
        return list(sample) == list(unbatched) and all(equal_but_for_numbers(sample[k], unbatched[k]) for k in sample)
    if isinstance(sample, tuple):
        return all(map(equal_but_for_numbers, sample, unbatched))
    if isinstance(sample, torch.Tensor):
        return torch.equal(sample, unbatched)
    return sample == (unbatched.item() if isinstance(unbatched, torch.Tensor) else unbatched)


def test_positions_survive_batching(six):
    """Random numbers are those without batching, and differ between samples, after any number of batchings."""
    base = list(listed(six, seed=8).map(draw).loader(workers=0))
    for sizes in ([4], [8, 4], [5, 3, 1, 7]):
        pipe = listed(six, seed=8)
        for size in sizes:
            pipe = pipe.batched(size).unbatched()
        assert list(pipe.map(draw).loader(workers=0)) == base


def test_errors_behind_unbatched_name_their_own_sample(six):
    with pytest.raises(SampleError, match=r"s-001\.tar: n000007: map failed") as caught:
        list(listed(six).batched(6).unbatched().map(fail_on_7).loader(workers=0))
    assert caught.value.key == "n000007"


def twice(batch):
    return {name: [*column, *column] for name, column in batch.items()}


def test_batches_changed_by_a_function_can_be_unbatched(six):
    drawn = list(listed(six).batched(5).map(twice).unbatched().map(draw).loader(workers=0))
    assert Counter(number for number, _ in drawn) == Counter([*range(39), *range(39)])
    assert len({tossed for _, tossed in drawn}) == 78


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: {**batch, "n": 3}, r"columns of a batch differ in length: .*'n': 'no column'"),
        (lambda batch: {**batch, "n": "abcd"}, r"'n': 'no column'"),
        (lambda batch: {**batch, "n": torch.tensor(1)}, r"'n': 'no column'"),
        (lambda batch: {**batch, "n": [1]}, r"'cls': 4, 'n': 1"),
        (lambda batch: 5, r"unbatched failed: TypeError: 'int' object is not iterable"),
    ],
    ids=["number", "text", "tensor", "short", "no batch"],
)
def test_what_is_no_batch_is_not_unbatched(six, function, message):
    with pytest.raises((PipelineError, SampleError), match=f"s-000.tar: n000000 to n000003: .*{message}"):
        list(listed(six).batched(4).map(function).unbatched().loader(workers=0))


def test_a_batch_that_does_not_fit_names_its_first_and_last_sample(pattern):
    pipe = Pipeline().stream(pattern, shuffle_shards=False).decode("rgb8")
    with pytest.raises(
        SampleError, match=r"p-000\.tar: k000 to k002: batched: sample 1 \(`k001`\) has different fields"
    ):
        list(pipe.batched(3).loader(workers=0))
    with pytest.raises(SampleError, match=r"p-000\.tar: k000 to .*p-001\.tar: k005: batched: sample 1 "):
        list(pipe.batched(6).loader(workers=0))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_function_after_batched_keeps_the_rows_that_the_mask_counts(tmp_path, kind):
    from shards import write_numbers

    from wdskit.shards.index import index_folder

    write_numbers(tmp_path, [7])
    index_folder(tmp_path, workers=1)
    base = Pipeline().sequential(str(tmp_path)).decode()
    base = base.to_dict("cls", "__key__") if kind == "dict" else base.to_tuple("cls", "__key__")
    fewer = (lambda b: {"cls": b["cls"][:2]}) if kind == "dict" else (lambda b: (b[0][:2], b[1]))
    with pytest.raises(PipelineError, match=r"a function made 2 rows of 4 in `\w+`. `tail: pad` adds a mask of 4 rows"):
        list(base.batched(4).map(fewer).loader(workers=0))
    more = (lambda b: {**b, "share": 0.5}) if kind == "dict" else (lambda b: (*b, torch.tensor(0.5)))
    assert len(list(base.batched(4).map(more).loader(workers=0))) == 2
    dropped = Pipeline().exact(str(tmp_path)).decode().to_dict("cls").batched(4).map(lambda b: {"cls": b["cls"][:2]})
    assert [len(batch["cls"]) for batch in dropped.loader(workers=0)] == [2]


def test_a_field_under_the_name_of_the_mask_is_refused(tmp_path):
    from shards import write_numbers

    from wdskit.shards.index import index_folder

    write_numbers(tmp_path, [6])
    index_folder(tmp_path, workers=1)
    base = Pipeline().sequential(str(tmp_path)).map(lambda s: {**s, "__valid__": True})
    for pipe in (base, base.batched(4), base.batched(4).map(dict)):
        with pytest.raises(PipelineError, match="`__valid__` is the mask that `tail: pad` adds"):
            list(pipe.loader(workers=0))
