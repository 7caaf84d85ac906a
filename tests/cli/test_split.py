"""The output of `wdskit split`, and of `wdskit info` for splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shards import selected, write_shard

from wdskit.shards.index import index_folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`data` in the current folder: 60 samples of 9 patients in two shards."""
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(2):
        samples = {
            f"k{shard}-{at:02d}": {"json": json.dumps({"patient": {"id": at % 9}}).encode(), "cls": b"1"}
            for at in range(30)
        }
        write_shard(folder / f"s-{shard}.tar", samples)
    index_folder(folder, workers=1)
    monkeypatch.chdir(tmp_path)
    return folder


BY_KEY = """\

 split   samples    share   wanted
───────────────────────────────────
 train        55   91.67%   80.00%
 val           2    3.33%   10.00%
 test          3    5.00%   10.00%"""


def test_the_table_of_a_split(data: Path, run) -> None:
    code, out, err = run("split", "data", "train=0.8,val=0.1,test=0.1")
    assert (code, err) == (0, "")
    first, rest = out.split("\n", 1)
    assert first.startswith("Split data by key: 60 samples in ")
    assert rest == BY_KEY
    assert run("split", "data", "train=80%,val=10%,test=10%")[1].split("\n", 1)[1] == BY_KEY


def test_the_result_as_json(data: Path, run) -> None:
    document = json.loads(run("split", "data", "train=0.5,rest=0.5", "--by", "json:patient.id", "--json")[1])
    assert document == {
        "folder": "data",
        "num_samples": 60,
        "splits": {
            "train": {"num_samples": 20, "wanted_ratio": 0.5},
            "rest": {"num_samples": 40, "wanted_ratio": 0.5},
        },
    }
    assert sum(map(len, selected(data, "rest"))) == 40


def test_info_lists_the_columns_and_what_is_wrong_with_them(data: Path, run) -> None:
    assert "column" not in run("info", "data")[1]
    run("split", "data", "train=0.8,val=0.1,test=0.1")
    document = json.loads(run("info", "data", "--json")[1])["columns"]
    assert document["split"] == {
        "source": "split train=0.8,val=0.1,test=0.1",
        "kind": "text",
        "values": {"test": 3, "train": 55, "val": 2},
        "limits": None,
    }
    [path] = data.glob("split.*.npy")
    right = path.read_bytes()
    path.write_bytes(right[:-1])
    assert "damaged" in run("info", "data")[2]
    path.write_bytes(right)
    (data / "index.json").rename(data / "index.json.old")
    write_shard(data / "s-2.tar", {"more": {"cls": b"1"}})
    columns = (data / "columns.json").rename(data / "kept")
    index_folder(data, workers=1)
    path.write_bytes(right)
    columns.rename(data / "columns.json")
    assert "made for other shards" in run("info", "data")[2]
    for path in ("data/s-0.tar", "data/s-*.tar"):
        assert "column" not in run("info", path)[1]
