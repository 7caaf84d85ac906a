"""Making batches."""

from __future__ import annotations

import pytest
from shards import write_pictures

from wdskit import Pipeline, PipelineError, SampleError


@pytest.fixture(scope="module")
def pattern(tmp_path_factory):
    """The pattern of ten pictures in shards of 4, 3 and 3."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, [4, 3, 3])
    return f"{folder}/p-*.tar"


def test_a_batch_that_does_not_fit_names_its_first_and_last_sample(pattern):
    pipe = Pipeline().stream(pattern, shuffle_shards=False).decode("rgb8")
    with pytest.raises(SampleError, match=r"p-000\.tar: k000 to k002: batched: sample is a dict of .*jpg"):
        list(pipe.batched(3).loader(workers=0))
    with pytest.raises(SampleError, match=r"p-000\.tar: k000 to .*p-001\.tar: k005: batched: sample is a dict of "):
        list(pipe.batched(6).loader(workers=0))


def test_a_function_after_batched_keeps_the_rows_that_the_mask_counts(tmp_path):
    from shards import write_numbers

    from wdskit.shards.index import index_folder

    write_numbers(tmp_path, [7])
    index_folder(tmp_path, workers=1)
    base = Pipeline().sequential(str(tmp_path)).decode().to_dict("cls", "__key__")
    with pytest.raises(PipelineError, match=r"a function made 2 rows of 4 in `\w+`. `tail: pad` adds a mask of 4 rows"):
        list(base.batched(4).map(lambda b: {"cls": b["cls"][:2]}).loader(workers=0))
    assert len(list(base.batched(4).map(lambda b: {**b, "share": 0.5}).loader(workers=0))) == 2
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
