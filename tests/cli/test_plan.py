"""The output of `wdskit plan`."""

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
  long:
    - exact: {shards: data, tail: pad}
    - bucketed: {by: cls, edges: [20, 70, 99], budget: 800}
loader: {workers: 2}
"""

TRAIN = """\
 source    exact, 3 shards of 105 kB
 on        3 ranks, each with 2 workers
 epoch 0   100 samples
 steps     8, each a global batch of 4 x 3 = 12
 dropped   4 samples (4.00%)
 a rank    reads 4 of 12 lanes, 2 shards, 34.0 kB"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with `data` of 40, 25 and 35 samples, and `a.yaml`."""
    write_numbers(tmp_path / "data", [40, 25, 35])
    index_folder(tmp_path / "data", columns="cls", workers=1)
    (tmp_path / "a.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan_of_each_kind_of_pipeline(folder: Path, run) -> None:
    words = ("--world-size", "3", "--gpus-per-node", "2")
    assert run("plan", "a.yaml", "--pipeline", "train", *words) == (0, TRAIN, "")
    lines = [line.split() for line in run("plan", "a.yaml", "--pipeline", "long")[1].splitlines()]
    assert lines[-5] == ["bucket", "samples", "global", "batch", "steps", "padded"]
    assert lines[-3:] == [["20", "21", "40", "1", "19"], ["70", "50", "8", "7", "6"], ["99", "29", "8", "4", "3"]]


def test_the_plan_as_json_has_every_number(folder: Path, run) -> None:
    document = json.loads(run("plan", "a.yaml", "--pipeline", "mix", "--world-size", "2", "--json")[1])
    assert (document["num_lanes"], document["rank_lanes"], document["rank_shards"]) == (12, 12, 3)
    assert (document["steps"], document["global_batch"], document["workers"]) == (35, 8, 2)


def test_errors_end_a_plan_with_their_message(folder: Path, run) -> None:
    for option, value, problem in (
        ("--world-size", "30", "100 samples cannot fill one batch of 4 on each of 30 ranks"),
        ("--epoch", str(10**18), f"epoch={10**18}: a whole number is needed, 0 to {10**9}."),
    ):
        code, out, err = run("plan", "a.yaml", "--pipeline", "train", option, value)
        assert (code, out, err[: len(problem)]) == (1, "", problem)
    problem = "nothing.yaml: the configuration cannot be read: No such file or directory."
    assert run("plan", "nothing.yaml") == (1, "", problem)
    (folder / "data" / "index.json").unlink()
    code, _, err = run("plan", "a.yaml", "--pipeline", "val")
    assert (code, "wdskit index" in err) == (1, True)
