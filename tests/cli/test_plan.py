"""The whole output of `wdskit plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shards import write_numbers

from wdskit.shards.index import index_folder

CONFIG = """\
version: 1
pipelines:
  train:
    - exact: {shards: "data/s-*.tar", lanes: 12, window: 10}
    - map: unheard_of
    - batched: 4
  mix:
    - exact:
        mixture:
          - {shards: data, weight: 5, range: ["0%", "50%"]}
          - {shards: data/s-001.tar, weight: 2}
        lanes: 12
    - batched: 4
    - with_epoch: 35
  val:
    - sequential: data
    - batched: 16
  flow:
    - stream: data
    - split_by_node
    - split_by_worker
    - batched: 4
    - with_epoch: 9
loader: {workers: 2}
"""

TRAIN = """\
 source    exact, 3 shards of 105 kB
 on        3 ranks, each with 2 workers
 epoch 0   100 samples
 steps     8, each a global batch of 4 x 3 = 12
 dropped   4 samples (4.00%)
 lanes     a node reads 4 of 12"""

DROPPED = """

Warning: 4 of 100 samples are dropped in each epoch (4.0%): they do not fill a batch of 4 on each of 3 ranks.
  Use smaller batches, or `tail: pad`, which uses all samples."""

MIXTURE = """\
 source    exact, 3 shards of 79.3 kB
 on        2 ranks, each with no worker
 epoch 1   280 samples
 steps     35, each a global batch of 4 x 2 = 8
 dropped   0 samples
 lanes     a node reads 12 of 12"""

VAL = """\
 source    sequential, 3 shards of 105 kB
 on        1 rank, each with 2 workers
 epoch 0   100 samples
 steps     7, each a global batch of 16 x 1 = 16
 padded    12 rows of the last step"""

FLOW = """\
 source   stream, 3 shards
 on       2 ranks, each with 2 workers
 steps    9 per rank and epoch"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with `data` of 40, 25 and 35 samples, and `a.yaml`."""
    write_numbers(tmp_path / "data", [40, 25, 35])
    index_folder(tmp_path / "data", workers=1)
    (tmp_path / "a.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_of_each_kind_of_pipeline(folder: Path, run) -> None:
    assert run("plan", "a.yaml", "--pipeline", "val") == (0, VAL, "")
    assert run("plan", "a.yaml", "--pipeline", "flow", "--world-size", "2") == (0, FLOW, "")
    words = ("--world-size", "3", "--gpus-per-node", "2")
    assert run("plan", "a.yaml", "--pipeline", "train", *words) == (0, TRAIN + DROPPED, "")
    code, out, err = run("plan", "a.yaml", "--pipeline", "mix", "--world-size", "2", "--workers", "0", "--epoch", "1")
    assert (code, out, err) == (0, MIXTURE, "")


def test_the_network_rate_of_workers_on_a_cluster(folder: Path, run) -> None:
    stages = [{"exact": "data"}, {"decode": "rgb8"}, {"random_resized_crop": 224}, {"batched": 4}]
    config = {"version": 1, "pipeline": stages, "loader": {"workers": 32, "on": "ray"}}
    (folder / "ray.yaml").write_text(json.dumps(config))
    line = " network   151 MB/s as uint8 for each 1,000 samples/s of a rank, 602 MB/s as float32"
    assert line in run("plan", "ray.yaml")[1].splitlines()
    sizes = [("decode=l8", 50_176), ("random_resized_crop=[10,20]", 600)]
    for setting, num_bytes in sizes:
        found = json.loads(run("plan", "ray.yaml", "--json", "--set", f"pipeline.{setting}")[1])
        assert found["network"] == {"uint8_bytes": num_bytes, "float32_bytes": 4 * num_bytes}
    stages[2] = {"resize": 256}  # the longer side has any length
    (folder / "ray.yaml").write_text(json.dumps(config))
    assert json.loads(run("plan", "ray.yaml", "--json")[1])["network"] is None


def test_warnings_stand_below(folder: Path, run) -> None:
    words = ("--world-size", "5", "--gpus-per-node", "1", "--set", "pipelines.train.batched=1")
    code, out, err = run("plan", "a.yaml", "--pipeline", "train", *words)
    assert (code, err) == (0, "")
    assert out.split("\n\n")[1] == (
        "Warning: a lane is read by 1.3 nodes on average, which read the same shards.\n"
        "  Before a run begins, set `lanes: 5`. A different number gives a different order."
    )


def test_the_plan_as_json_has_every_number(folder: Path, run) -> None:
    document = json.loads(run("plan", "a.yaml", "--pipeline", "mix", "--world-size", "2", "--json")[1])
    assert document["lanes"] == {"num_lanes": 12, "per_node": 12, "num_shared": 1.0, "fitting": [8]}
    assert (document["steps"], document["global_batch"], document["workers"]) == (35, 8, 2)
    flow = json.loads(run("plan", "a.yaml", "--pipeline", "flow", "--json")[1])
    assert flow == {"source": "stream", "world_size": 1, "workers": 2, "num_shards": 3, "batch": 4, "steps": 9}


def test_errors_end_a_plan_with_their_message(folder: Path, run) -> None:
    assert (
        run("plan", "a.yaml")[2]
        == "a.yaml: there are 4 pipelines; say which (`--pipeline` or `pipeline=`): `train`, `mix`, `val` and `flow`."
    )
    code, out, err = run("plan", "a.yaml", "--pipeline", "train", "--world-size", "30")
    assert (code, out) == (1, "")
    assert err.startswith("100 samples cannot fill one batch of 4 on each of 30 ranks")
    code, _, err = run("plan", "nothing.yaml")
    assert (code, err) == (1, "nothing.yaml: the configuration cannot be read: No such file or directory.")
    (folder / "data" / "index.json").unlink()
    code, _, err = run("plan", "a.yaml", "--pipeline", "val")
    assert (code, "`wdskit index data`" in err) == (1, True)
