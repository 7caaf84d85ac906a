"""The command `wdskit bench`: its figures as JSON, its options and its exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from shards import write_numbers

from wdskit.shards.index import index_folder

CONFIG = """\
version: 1
pipelines:
  train:
    - exact: data
    - decode
    - batched: {global_size: 4}
  mapped:
    - exact: data
    - map: first_of_two
    - batched: 4
  flow:
    - stream: data
    - batched: 4
loader: {workers: 1, prefetch: 2}
"""

QUICK = ("--seconds", "0.01", "--repeats", "1", "--workers", "0,1", "--threads", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with `data` of 10 samples and `a.yaml`; one CPU."""
    write_numbers(tmp_path / "data", [6, 4])
    index_folder(tmp_path / "data", workers=1)
    (tmp_path / "a.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    return tmp_path


def test_json_has_every_number(folder: Path, run) -> None:
    code, out, err = run("bench", "a.yaml", "--pipeline", "train", "--json", *QUICK)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [each["setting"] for each in document["loaders"]] == [[0, 1], [1, 1]]
    assert document["bare_samples_per_s"] > 0


def test_overrides_and_plugins_count(folder: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--set", "loader.workers=0", *QUICK)
    code, out, _ = run("bench", "a.yaml", "--pipeline", "train", *words)
    assert code == 0
    assert "Batches of 4, on" in out
    assert " 0 x 1 now " in out
    (folder / "two_firsts.py").write_text(
        "import wdskit\n\n@wdskit.register('first_of_two')\ndef first_of_two(sample):\n    return sample\n"
    )
    code, _, err = run("bench", "a.yaml", "--pipeline", "mapped", *QUICK)
    assert (code, "first_of_two: no function with this name is registered" in err) == (1, True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = run("bench", "a.yaml", "--pipeline", "mapped", "--plugin", "two_firsts", *QUICK)
    assert (code, err) == (0, "")
    code, _, err = run("bench", "a.yaml", "--pipeline", "mapped", "--plugin", "no_such_module", *QUICK)
    assert (code, err.startswith("--plugin no_such_module: cannot be imported")) == (2, True)


@pytest.mark.parametrize("words", [("--workers", "x"), ("--workers", ""), ("--threads", "0,1"), ("--workers", "-1")])
def test_a_list_that_is_none_is_a_wrong_command_line(words: tuple[str, str], folder: Path, run) -> None:
    code, out, err = run("bench", "a.yaml", *words)
    assert (code, out) == (2, "")
    assert "is not a list of whole numbers" in err
