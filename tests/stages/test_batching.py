"""Making batches."""

from __future__ import annotations

import pytest
from shards import write_pictures

from wdskit import Pipeline, SampleError


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
