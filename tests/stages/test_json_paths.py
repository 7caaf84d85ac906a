"""Paths in JSON in place of field names; lists of JSON in batches; and `multi_hot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import HastyDisk, on

import wdskit
from wdskit import Pipeline, Ragged, SampleError, pack

BOXES = [[[1, 2, 3, 4]], [], [[0.5, 1, 2, 3], [4, 5, 6, 7]], [[9, 9, 9, 9]]]
LABELS = [[0, 2], [], [1], [2]]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    rows = []
    for number, (boxes, labels) in enumerate(zip(BOXES, LABELS, strict=True)):
        document = {
            "caption": f"text {number}", "boxes": boxes, "labels": labels, "a": {"b": number, "length": 77},
            "vector": [number, 1.5], "names": ["x", "y"], "flags": [True], "mixed": [1, [2]],
        }  # fmt: skip
        rows.append({"__key__": f"k{number}", "json": document, "meta.json": {"json": {"n": number}}, "txt": "abc"})
    on(HastyDisk(), pack, rows, tmp_path / "data")
    return str(tmp_path / "data")


def batch_of(pipe: Pipeline) -> Any:
    [batch] = pipe.batched(4).loader(workers=0)
    return batch


def test_paths_name_values_in_every_stage_that_names_fields(folder: str):
    source = Pipeline().sequential(folder, tail="drop").decode()
    names = ["json.caption", "json.a.b", "meta.json.json.n", "json.caption.length", "json.a.length", "nope;json.a.b"]
    caption, number, deep, length, own, either = batch_of(source.to_tuple(*names))
    assert caption == [f"text {n}" for n in range(4)]
    assert number.tolist() == deep.tolist() == either.tolist() == [0, 1, 2, 3]
    assert length.tolist() == [6] * 4
    assert own.tolist() == [77] * 4  # the object has this member
    found = batch_of(source.to_dict("json.caption", "json.a.b"))
    assert found == {"json.caption": caption, "json.a.b": found["json.a.b"]}
    found = batch_of(source.rename(text="json.caption", txt="txt").to_dict("text", "json", "txt"))
    assert found["text"] == caption
    assert found["json"][2]["caption"] == "text 2"


def test_whole_numbers_that_no_array_holds_exactly_stay_a_list(tmp_path: Path):
    lists = [[2**63, -1], [2**60, 0.5], [2**70]]
    on(HastyDisk(), pack, [{"__key__": str(n), "json": {"x": each}} for n, each in enumerate(lists)], tmp_path / "data")
    pipe = Pipeline().sequential(str(tmp_path / "data"), tail="drop").decode().to_tuple("json.x")
    [(found,)] = pipe.batched(3).loader(workers=0)
    assert found == lists


def test_a_part_behind_a_list_of_objects_is_that_member_of_each(tmp_path: Path):
    found = [[], [{"bbox": [1, 2, 3, 4], "id": 7, "name": "x"}], [{"bbox": [5, 6, 7, 8.5], "id": 9, "name": "y"}] * 2]
    rows = [{"__key__": f"k{number}", "json": {"annotations": each}} for number, each in enumerate(found)]
    on(HastyDisk(), pack, rows, tmp_path / "data", columns="n=json.annotations.length")
    pipe = Pipeline().sequential(str(tmp_path / "data"), tail="drop").decode()
    paths = [f"json.annotations.{name}" for name in ("bbox", "id", "name")]
    [(boxes, labels, names)] = pipe.to_tuple(*paths).batched(3).loader(workers=0)
    assert names == [[], ["x"], ["y"] * 2]
    assert [each.tolist() for each in boxes] == [[], [[1, 2, 3, 4]], [[5, 6, 7, 8.5]] * 2]
    assert [each.tolist() for each in labels] == [[], [7], [9, 9]]
    assert wdskit.columns(tmp_path / "data")["n"].tolist() == [0, 1, 2]
    with pytest.raises(SampleError, match=r"no field `json.annotations.area`"):
        list(pipe.to_tuple("json.annotations.area").loader(workers=0))


def test_a_field_of_the_very_name_wins(folder: str):
    def add(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "json.caption": "own", "json.a": {"b": "no JSON field by its name"}}

    pipe = Pipeline().sequential(folder, tail="drop").decode().map(add)
    own, number = batch_of(pipe.to_tuple("json.caption", "json.a.b"))
    assert own == ["own"] * 4
    assert number.tolist() == [0, 1, 2, 3]


def test_lists_of_numbers_are_arrays_and_ragged_where_their_lengths_differ(folder: str):
    pipe = Pipeline().sequential(folder, tail="drop").decode()
    boxes, labels, vector, names, flags, mixed = batch_of(
        pipe.to_tuple("json.boxes", "json.labels", "json.vector", "json.names", "json.flags", "json.mixed")
    )
    assert isinstance(boxes, Ragged)
    assert boxes.values.dtype == torch.float64
    assert [each.tolist() for each in boxes] == [np.array(each, float).reshape(-1, 4).tolist() for each in BOXES]
    assert [tuple(each.shape) for each in boxes] == [(1, 4), (0, 4), (2, 4), (1, 4)]
    assert isinstance(labels, Ragged)
    assert labels.values.dtype == torch.int64
    assert [each.tolist() for each in labels] == LABELS
    assert vector.tolist() == [[n, 1.5] for n in range(4)]
    assert names == [["x", "y"]] * 4
    assert flags == [[True]] * 4
    assert mixed == [[1, [2]]] * 4


@pytest.mark.parametrize("name", ["json.nope", "json.caption.more", "json.a.b.length", "other.json.x"])
def test_a_path_that_leads_nowhere_is_a_missing_field(folder: str, name: str):
    pipe = Pipeline().exact(folder).decode()
    for stage in (pipe.to_tuple(name), pipe.to_dict(name), pipe.rename(x=name)):
        with pytest.raises(SampleError, match=rf"no field `{name}`; the sample has: json, meta.json, txt"):
            list(stage.loader(workers=0))


def test_a_path_before_decode_says_so(folder: str):
    with pytest.raises((SampleError, wdskit.PipelineError), match="`json` is not decoded yet"):
        list(Pipeline().exact(folder).to_tuple("json.caption").loader(workers=0))


def test_multi_hot_has_a_1_for_each_label(folder: str):
    pipe = Pipeline().sequential(folder, tail="drop").decode()
    found, caption = batch_of(pipe.multi_hot(source="json.labels", classes=3).to_tuple("multi_hot", "json.caption"))
    assert found.dtype == torch.float32
    assert found.tolist() == [[float(n in labels) for n in range(3)] for labels in LABELS]
    assert caption == [f"text {n}" for n in range(4)]
    [found] = batch_of(pipe.multi_hot(source="json.names", classes=["y", "z", "x"], to="y").to_tuple("y"))
    assert found.tolist() == [[1, 0, 1]] * 4
    for settings, told in (
        ({"source": "json.labels", "classes": 2}, "`json.labels` has 2, which is not one of the classes"),
        ({"source": "json.names", "classes": ["x"]}, "`json.names` has 'y', which is not one of the classes"),
        ({"source": "json.flags", "classes": 2}, "`json.flags` has True"),
        ({"source": "json.nope", "classes": 2}, "no field `json.nope`"),
    ):
        with pytest.raises(SampleError, match=told):
            batch_of(pipe.multi_hot(**settings).to_tuple("multi_hot"))
