"""Ragged batches: arrays of different lengths end to end, whichever way the batch is made."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shards import write_shard

from tests.codecs.test_columns import npy
from wdskit import ConfigError, Pipeline, PipelineError, Ragged, WdskitError, load_config
from wdskit.shards.index import index_folder
from wdskit.stages.collate import collate
from wdskit.stages.memory import FRESH
from wdskit.stages.ragged import make_ragged

LENGTHS = [3, 0, 1, 7, 2, 2, 5, 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ragged")
    samples = {
        f"k{at}": {
            "npy": npy(np.arange(length, dtype=np.int32) + 100 * at),
            "box.npy": npy(np.full((length, 4), at, np.float32)),
            "f.npy": npy(np.asfortranarray(np.full((length, 2), at, ">i2"))),
            "one.npy": npy(np.float32(at)),
            "cls": b"%d" % at,
        }
        for at, length in enumerate(LENGTHS)
    }
    write_shard(path / "s.tar", samples)
    index_folder(path, workers=1)
    return str(path)


def both(pipe: Pipeline) -> list[Any]:
    """The batches by columns, which are those that are made sample by sample."""
    built = pipe.build(rank=0, world_size=1)
    apart = pipe.build(rank=0, world_size=1)
    apart.columns = None
    batches, others = list(built), list(apart)
    assert built.columns.num_made == len(batches)
    for batch, other in zip(batches, others, strict=True):
        columns = [each.values() if isinstance(each, dict) else each for each in (batch, other)]
        for a, b in zip(*columns, strict=True):
            assert type(a) is type(b)
            if isinstance(a, Ragged):
                assert a.values.dtype == b.values.dtype
                assert torch.equal(a.values, b.values)
                assert torch.equal(a.offsets, b.offsets)
    return batches


def test_the_values_of_a_dict_s_fields_stand_end_to_end(folder: str) -> None:
    pipe = Pipeline().sequential(folder, tail="drop").decode().batched(4, ragged=["npy", "box.npy", "f.npy"])
    for number, batch in enumerate(both(pipe)):
        lengths = LENGTHS[4 * number : 4 * number + 4]
        assert batch["npy"].offsets.tolist() == np.cumsum([0, *lengths]).tolist()
        assert batch["npy"].offsets.dtype == torch.int64
        assert batch["npy"].values.dtype == torch.int32
        assert batch["box.npy"].values.shape == (sum(lengths), 4)
        assert batch["f.npy"].values.dtype == torch.int16
        for at, length in enumerate(lengths):
            assert batch["npy"][at].tolist() == [100 * (4 * number + at) + place for place in range(length)]
        assert [row.tolist() for row in batch["npy"]] == [batch["npy"][at].tolist() for at in range(4)]
        assert len(batch["npy"]) == 4
        assert isinstance(batch["one.npy"], torch.Tensor)


def test_a_field_is_found_in_tuples_by_its_name(folder: str) -> None:
    pipe = Pipeline().sequential(folder, tail="drop").decode()
    for batch in both(pipe.to_tuple("x;npy", "cls", "npy").batched(2, ragged="npy")):
        assert [type(column) for column in batch] == [Ragged, torch.Tensor, Ragged]
    with pytest.raises(PipelineError, match=r"batched: ragged: no field `json` in to_tuple, which has npy, cls\."):
        pipe.to_tuple("npy", "cls").batched(2, ragged="json").build(rank=0, world_size=1)


def test_a_padded_tail_has_a_mask_and_streams_have_ragged_fields_too(folder: str) -> None:
    [*_, last] = both(Pipeline().sequential(folder).decode().to_tuple("npy").batched(5, ragged="npy"))
    assert len(last[0]) == len(last[1]) == 5
    stream = Pipeline().stream(f"{folder}/*.tar").decode().to_tuple("npy").batched(3, ragged=["npy"]).loader(workers=0)
    assert [len(batch[0]) for batch in stream] == [3, 3, 2]
    rows = Pipeline().stream(f"{folder}/*.tar").decode().to_tuple("npy", "cls").batched(2, ragged=["npy"]).unbatched()
    assert [len(row[0]) for row in rows.loader(workers=0)] == LENGTHS


def test_it_travels_from_workers_and_is_written_in_yaml(folder: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    stages = (
        f"[{{sequential: {{shards: {folder!r}}}}}, decode, {{to_tuple: npy}}, {{batched: {{size: 4, ragged: [npy]}}}}]"
    )
    config.write_text(f"version: 1\npipeline: {stages}\nloader: {{workers: 1}}\n")
    pipe = Pipeline(load_config(config).pipeline())
    assert pipe.stages[-1].written() == {"batched": {"size": 4, "ragged": ("npy",)}}
    batches = list(pipe.loader(workers=1))
    assert [type(batch[0]) for batch in batches] == [Ragged, Ragged]
    lengths = [batch[0].offsets.diff().tolist() for batch in batches]
    assert (
        lengths == [batch[0].offsets.diff().tolist() for batch in pipe.loader(workers=0)] == [LENGTHS[:4], LENGTHS[4:]]
    )
    config.write_text("version: 1\npipeline: [{sequential: a}, {batched: {size: 4, ragged: [npy], collate: f}}]\n")
    with pytest.raises(ConfigError, match="`ragged` does nothing where a `collate` of your own"):
        load_config(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ragged": "jpg"}, "ragged: no field `jpg`; the samples have: cls, one.npy"),
        ({"ragged": "cls"}, "`cls` is a int in sample 0. Ragged fields are arrays"),
        ({"ragged": "one.npy"}, "`one.npy` is one number in sample 0"),
        ({"ragged": "__key__"}, "`__key__` is a str in sample 0"),
    ],
)
def test_what_cannot_be_ragged_is_refused_with_its_name(folder: str, fields: Any, message: str) -> None:
    pipe = Pipeline().sequential(folder).decode().to_dict("cls", "one.npy", "__key__")
    built = pipe.batched(4, **fields).build(rank=0, world_size=1)
    with pytest.raises(WdskitError, match=message):
        next(iter(built))


def test_arrays_that_differ_in_more_than_their_length_are_refused() -> None:
    for other in (np.zeros((1, 3)), np.zeros((1, 2), np.float32), np.zeros(2)):
        with pytest.raises(PipelineError, match=r"slot 0 is \(1, 2\) of torch.float64 in sample 0 but .* in sample 1"):
            collate([(np.zeros((1, 2)),), (other,)], ragged=frozenset({0}))
    with pytest.raises(PipelineError, match=r"slot 0 in sample 0: can't convert np\.ndarray"):
        collate([(np.array(["a"]),)], ragged=frozenset({0}))


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=6))
def test_any_rows_come_back(rows: list[list[int]]) -> None:
    for make in (lambda row: np.array(row, dtype=np.int16), lambda row: torch.tensor(row, dtype=torch.int16)):
        ragged = make_ragged([make(row) for row in rows], "x", FRESH)
        copy = pickle.loads(pickle.dumps(ragged))
        assert [row.tolist() for row in copy] == [copy[at].tolist() for at in range(len(copy))] == rows
        assert copy[-1].tolist() == rows[-1]
        assert ragged.to(torch.float32).values.dtype == torch.float32
        for at in (len(rows), -len(rows) - 1):
            with pytest.raises(IndexError, match="is out of range"):
                ragged[at]
