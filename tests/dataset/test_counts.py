"""Counts that open_clip and timm keep beside shards are read as they read them, and refused where they are wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import write_numbers

from wdskit import ConfigError, FolderIndexError, Pipeline, PipelineError, StorageError
from wdskit.dataset.counts import TimmSplit, parse_factors, read_sizes, read_timm_info

SIZES = """{
  "cc3m-train-0000.tar": 5046,
  "cc3m-train-0001.tar": 0,
  "cc3m-train-0002.tar": "4999"
}"""

INFO = """{
  "splits": {
    "train": {
      "name": "train",
      "num_samples": 12,
      "filenames": ["imagenet-train-0000.tar", "imagenet-train-0001.tar"],
      "shard_lengths": [7, 5],
      "alt_label": ""
    },
    "validation": {
      "name": "validation",
      "num_samples": 0,
      "filenames": ["val/imagenet-0000.tar"],
      "shard_lengths": [0],
      "alt_label": "synset"
    }
  },
  "description": "what else stands there is passed over"
}"""


def test_sizes_of_open_clip_are_read(tmp_path: Path) -> None:
    """Numbers as text too, which open_clip takes."""
    (tmp_path / "sizes.json").write_text(SIZES)
    counts = read_sizes(str(tmp_path))
    assert list(counts.items()) == [
        ("cc3m-train-0000.tar", 5046),
        ("cc3m-train-0001.tar", 0),
        ("cc3m-train-0002.tar", 4999),
    ]


@pytest.mark.parametrize("name", ["_info.json", "info.json"])
def test_splits_of_timm_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(INFO)
    train = TimmSplit("train", {"imagenet-train-0000.tar": 7, "imagenet-train-0001.tar": 5}, "")
    validation = TimmSplit("validation", {"val/imagenet-0000.tar": 0}, "synset")
    assert read_timm_info(str(tmp_path)) == {"train": train, "validation": validation}
    assert (train.num_samples, validation.num_samples) == (12, 0)


def test_the_first_of_timms_names_comes_first(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text("{")
    (tmp_path / "_info.json").write_text(INFO)
    assert len(read_timm_info(str(tmp_path))) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/sizes\.json: cannot be opened"):
        read_sizes(str(tmp_path))
    with pytest.raises(StorageError, match=r"/_info\.json: cannot be opened"):
        read_timm_info(str(tmp_path))


names = st.text(st.characters(categories=["L", "N"]), min_size=1).map(lambda stem: f"{stem}.tar")


@given(st.dictionaries(names, st.integers(0, (1 << 63) - 1)))
def test_any_counts_are_read_as_they_were_written(tmp_path_factory, counts: dict[str, int]) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "sizes.json").write_text(json.dumps(counts))
    assert read_sizes(str(folder)) == counts
    lengths = {name: count % 1000 for name, count in counts.items()}
    split = {"name": "x", "num_samples": sum(lengths.values()), "filenames": list(lengths)}
    (folder / "_info.json").write_text(
        json.dumps({"splits": {"x": {**split, "shard_lengths": list(lengths.values())}}})
    )
    assert read_timm_info(str(folder))["x"] == TimmSplit("x", lengths, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is no JSON: Expecting value"),
        ("[" * 100_000, "it is no JSON: "),
        ("[1]", "it holds [1], not an object"),
        ("\xff", "it is no JSON: "),
        ('{"a.tar": 1, "b.tar": 2, "a.tar": 1}', "it is no JSON: 'a.tar' stands there twice"),
        ('{"a.tar": -1}', "the count of 'a.tar' is -1, not a whole number, 0 or more"),
        ('{"a.tar": 1.5}', "is 1.5, not a whole number"),
        ('{"a.tar": true}', "is True, not a whole number"),
        ('{"a.tar": null}', "is None, not a whole number"),
        ('{"a.tar": NaN}', "is nan, not a whole number"),
        ('{"a.tar": "1e3"}', "is '1e3', not a whole number"),
        ('{"a.tar": "\u0661"}', "not a whole number"),
        ('{"a.tar": 9223372036854775808}', "not a whole number"),
        ('{"a.tar": "' + "9" * 5000 + '"}', "not a whole number"),
        ('{"../a.tar": 1}', "'../a.tar' is not the name of a file in this folder"),
        ('{"x/a.tar": 1}', "'x/a.tar' is not the name of a file in this folder"),
        ('{"": 1}', "'' is not the name of a file in this folder"),
        ('{"..": 1}', "'..' is not the name of a file"),
        ('{"a\\u001b[2J.tar": 1}', "is not the name of a file"),
        ('{"a\\ud800.tar": 1}', "is not the name of a file"),
    ],
)
def test_sizes_that_are_wrong_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "sizes.json").write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
    with pytest.raises(FolderIndexError) as caught:
        read_sizes(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}/sizes.json: ")
    assert told in str(caught.value)
    assert str(caught.value).endswith("or run `wdskit index` on the shards.")
    assert caught.value.folder == str(tmp_path)
    assert len(str(caught.value)) < 1000


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": 11}, "split 'train': `num_samples` is 11, its shards have 12 in all"),
    ({"num_samples": "12"}, "`num_samples` is '12', its shards have 12"),
    ({"num_samples": None}, "`num_samples` is None"),
    ({"filenames": ["a.tar"]}, "1 `filenames`, 2 `shard_lengths`"),
    ({"filenames": "ab"}, "are not a list of names and one of numbers"),
    ({"filenames": [1, 2]}, "are not a list of names and one of numbers"),
    ({"shard_lengths": None}, "are not a list of names and one of numbers"),
    ({"shard_lengths": [7, True]}, "are not a list of names and one of numbers"),
    ({"shard_lengths": [13, -1]}, "the length of 'imagenet-train-0001.tar' is -1, not a whole number"),
    ({"filenames": ["a.tar", "a.tar"]}, "'a.tar' stands there twice"),
    ({"filenames": ["a.tar", "../b.tar"]}, "'../b.tar' is not the path of a file below this folder"),
    ({"filenames": ["a.tar", "/b.tar"]}, "'/b.tar' is not the path of a file below this folder"),
    ({"filenames": ["a.tar", "x//b.tar"]}, "is not the path of a file below this folder"),
    ({"name": "val"}, "its `name` is another"),
    ({"alt_label": 3}, "its `alt_label` is no text"),
]


@pytest.mark.parametrize(("change", "told"), CHANGES, ids=[told for _, told in CHANGES])
def test_splits_that_are_wrong_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    document = json.loads(INFO)
    document["splits"]["train"].update(change)
    (tmp_path / "_info.json").write_text(json.dumps(document))
    with pytest.raises(FolderIndexError) as caught:
        read_timm_info(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}/_info.json: split 'train': ")
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["{}", '{"splits": []}', '{"splits": {"train": 3}}', '{"splits": null}'])
def test_an_info_without_splits_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "_info.json").write_text(text)
    with pytest.raises(FolderIndexError, match=r"`splits` is .*, not an object|split 'train': 3 is no split"):
        read_timm_info(str(tmp_path))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    for length in range(len(INFO)):
        (tmp_path / "_info.json").write_text(INFO[:length])
        with pytest.raises(FolderIndexError, match="it is no JSON"):
            read_timm_info(str(tmp_path))


# --- upsampling factors


def test_factors_are_read_one_a_part() -> None:
    assert parse_factors("1::1::1", 3) == (1, 1, 1)
    assert parse_factors("0::1e-3::0", 3) == (0, 0.001, 0)


def test_a_stream_takes_factors_as_open_clip_writes_them(tmp_path):
    """Of each shard: of 3 and of 1, with 1::2, the last is drawn in two of five draws."""
    many, one = write_numbers(tmp_path / "a", [1, 1, 1]), write_numbers(tmp_path / "b", [1])
    pipe = Pipeline().stream(f"{many}::{one}", resampled=True, upsampling="1::2").to_tuple("__url__")
    urls = Counter(url for (url,) in pipe.with_epoch(4000).loader(workers=0))
    assert abs(urls[f"{tmp_path}/b/s-000.tar"] - 1600) < 120
    assert all(abs(urls[f"{tmp_path}/a/s-00{n}.tar"] - 800) < 100 for n in range(3))
    for options, problem in [
        ({"upsampling": "1::2"}, "`upsampling` need draws with replacement"),
        ({"upsampling": "1", "resampled": True}, "1 factors for 2 parts"),
        ({"upsampling": "1::x", "resampled": True}, "is no upsampling factor"),
        ({"upsampling": "1::2", "weights": [1, 2], "resampled": True}, "exclude each other"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            Pipeline().stream(f"{many}::{one}", **options)


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ("1::2", "'1::2': 2 factors for 3 parts of shards. Write one for each, as 1::2."),
        ("1", "1 factors for 3 parts"),
        ("1::2::3::4", "4 factors for 3 parts"),
        ("", "'' is no upsampling factor"),
        ("1::2::", "'' is no upsampling factor"),
        ("1::x::2", "'x' is no upsampling factor: a number, 0 or more"),
        ("1::-1::2", "'-1' is no upsampling factor"),
        ("1::nan::2", "'nan' is no upsampling factor"),
        ("1::inf::2", "'inf' is no upsampling factor"),
        ("1:2:3", "'1:2:3' is no upsampling factor"),
        ("0::0::0", "with all factors 0 nothing is drawn"),
    ],
)
def test_factors_that_do_not_fit_are_refused(factors: str, told: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_factors(factors, 3)
    assert told in str(caught.value)
