"""Parse the user's text: upsampling factors, one for each part. `test_patterns` tests braces."""

from __future__ import annotations

from collections import Counter

import pytest
from shards import write_numbers

from wdskit import ConfigError, Pipeline, PipelineError
from wdskit.stages.stream_source import parse_factors


def test_factors_are_read_one_a_part() -> None:
    assert parse_factors("1::1::1", 3) == (1, 1, 1)
    assert parse_factors("0::1e-3::0", 3) == (0, 0.001, 0)


def test_a_stream_takes_factors_as_open_clip_writes_them(tmp_path):
    """A factor counts for each shard: with 3 shards, 1 shard and factors 1::2, two of five draws are the last shard."""
    many, one = write_numbers(tmp_path / "a", [1, 1, 1]), write_numbers(tmp_path / "b", [1])
    pipe = Pipeline().stream(f"{many}::{one}", resampled=True, upsampling="1::2").to_tuple("__url__")
    urls = Counter(url for (url,) in pipe.with_epoch(4000).loader(workers=0))
    assert abs(urls[f"{tmp_path}/b/s-000.tar"] - 1600) < 120
    assert all(abs(urls[f"{tmp_path}/a/s-00{n}.tar"] - 800) < 100 for n in range(3))
    for options, problem in [
        ({"upsampling": "1::2"}, "`upsampling` needs sampling with replacement"),
        ({"upsampling": "1", "resampled": True}, "1 factors for 2 parts"),
        ({"upsampling": "1::x", "resampled": True}, "is not an upsampling factor"),
        ({"upsampling": "1::2", "weights": [1, 2], "resampled": True}, "exclude each other"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            Pipeline().stream(f"{many}::{one}", **options)


@pytest.mark.parametrize(
    ("factors", "problem"),
    [
        ("1::2", "'1::2': 2 factors for 3 parts of shards. Write one for each, as 1::2."),
        ("1", "1 factors for 3 parts"),
        ("1::2::3::4", "4 factors for 3 parts"),
        ("", "'' is not an upsampling factor"),
        ("1::2::", "'' is not an upsampling factor"),
        ("1::x::2", "'x' is not an upsampling factor: a number, 0 or more"),
        ("1::-1::2", "'-1' is not an upsampling factor"),
        ("1::nan::2", "'nan' is not an upsampling factor"),
        ("1::inf::2", "'inf' is not an upsampling factor"),
        ("1:2:3", "'1:2:3' is not an upsampling factor"),
        ("0::0::0", "all factors are 0, so nothing would be drawn"),
    ],
)
def test_factors_that_do_not_fit_are_refused(factors: str, problem: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_factors(factors, 3)
    assert problem in str(caught.value)
