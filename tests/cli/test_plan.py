"""What `wdskit plan` prints, whole."""

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
 source         exact, 3 shards of 105 kB
 on             3 ranks, each with 2 workers
 threads        1: your functions run in one thread per process unless `threads` is set
 epoch 0        100 samples
 steps          8, each a global batch of 4 x 3 = 12
 dropped        4 samples (4.00%)
 lanes          a node reads 4 of 12
 a rank reads   1 to 2 shards, 33.6 kB to 34.0 kB
 at once        a node of 1 rank reads from 2 shards, in windows of 36.1 kB"""

DROPPED = """

Warning: 4 of 100 samples are dropped in each epoch (4.0%): they do not fill a batch of 4 on each of 3 ranks.
  Use smaller batches, or `tail: pad`, which uses all samples."""

MIXTURE = """\
 source         exact, 3 shards of 79.3 kB
 on             2 ranks, each with no worker
 epoch 1        280 samples
 steps          35, each a global batch of 4 x 2 = 8
 dropped        0 samples
 lanes          a node reads 12 of 12
 a rank reads   3 shards, 148 kB
 at once        a node of 2 ranks reads from 3 shards, in windows of 79.3 kB

 part                   shards   samples      size    share   repeats
──────────────────────────────────────────────────────────────────────
 data range 0% to 50%        2        50   52.6 kB   71.43%      4.00
 data/s-001.tar              1        25   26.6 kB   28.57%      3.20"""

VAL = """\
 source         sequential, 3 shards of 105 kB
 on             1 rank, each with 2 workers
 epoch 0        100 samples
 steps          7, each a global batch of 16 x 1 = 16
 padded         12 rows of the last step
 a rank reads   3 shards, 105 kB
 at once        a node of 1 rank reads from 2 shards, in windows of 17.0 kB"""

FLOW = """\
 source           stream, 3 shards
 on               2 ranks, each with 2 workers
 steps            9 per rank and epoch
 a rank draws     1 to 2 shards in a pass over all
 a worker draws   0 to 1 shards in a pass over all"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the current folder: `data` of 40, 25 and 35 samples, and `a.yaml`."""
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


QUALITY = """\

 classes             4, as if the data were sorted by them; 8 steps
 in a rank's batch   2.0, at least 1; uniform 2.8
 in a global batch   4.0; uniform 3.9
With data sorted by class, a rank's batch holds 72% of the classes that a uniform draw would hold: far from \
uniform.
  Pack with `--shuffle SEED`, which mixes classes in every shard, or use more lanes or a larger window."""


def test_quality_stands_below_and_a_picture_beside(folder: Path, run) -> None:
    words = ("--world-size", "3", "--gpus-per-node", "2", "--quality", "--classes", "4", "--plot", "a.png")
    code, out, err = run("plan", "a.yaml", "--pipeline", "train", *words)
    assert (code, err) == (0, "")
    assert out == TRAIN + "\n" + QUALITY + DROPPED
    assert (folder / "a.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads(run("plan", "a.yaml", "--pipeline", "train", "--quality", "--json")[1])
    assert document["quality"]["num_classes"] == 100
    code, out, err = run("plan", "a.yaml", "--pipeline", "flow", "--quality")
    assert (code, out) == (1, "")
    assert err.startswith("the order of a stream comes from its shuffle buffers")


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
    assert [part["name"] for part in document["parts"]] == ["data range 0% to 50%", "data/s-001.tar"]
    assert len(document["rank_bytes"]) == 3
    flow = json.loads(run("plan", "a.yaml", "--pipeline", "flow", "--json")[1])
    assert (flow["source"], flow["rank_shards"], flow["worker_shards"]) == ("stream", [3, 3], [1, 2])


def test_errors_end_a_plan_with_their_message(folder: Path, run) -> None:
    assert (
        run("plan", "a.yaml")[2]
        == "a.yaml: there are 4 pipelines; say which (`--pipeline NAME`): `train`, `mix`, `val` and `flow`."
    )
    code, out, err = run("plan", "a.yaml", "--pipeline", "train", "--world-size", "30")
    assert (code, out) == (1, "")
    assert err.startswith("100 samples cannot fill one batch of 4 on each of 30 ranks")
    code, _, err = run("plan", "nothing.yaml")
    assert (code, err) == (1, "nothing.yaml: the configuration cannot be read: No such file or directory.")
    (folder / "data" / "index.bin").unlink()
    code, _, err = run("plan", "a.yaml", "--pipeline", "val")
    assert (code, "`wdskit index data`" in err) == (1, True)


def test_names_never_reach_the_terminal_raw(folder: Path, run) -> None:
    write_numbers(folder / "x\u202e", [3])
    index_folder(folder / "x\u202e", workers=1)
    mixture = [{"shards": "x\u202e", "weight": 1}, {"shards": "data", "weight": 1}]
    source = {"exact": {"mixture": mixture}}
    (folder / "b.yaml").write_text(json.dumps({"version": 1, "pipeline": [source, {"with_epoch": 4}]}))
    code, out, err = run("plan", "b.yaml", "--world-size", "2")
    assert (code, err) == (0, "")
    assert out.replace("\n", "").isprintable()
    assert "x\\u202e" in out
