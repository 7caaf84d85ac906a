"""In all pipelines of a configuration, a label means the same class."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from shards import index_numbers

import wdskit
from wdskit import make_loader


def folder_of(path: Path, classes: Any) -> str:
    index_numbers(path, [4, 4])
    if classes is not None:
        (path / "classes.json").write_text(json.dumps(classes))
    return str(path)


def write_config(path: Path, train: str, val: str, more: str = "") -> Path:
    text = f"version: 1\npipelines:\n  train: [{{stream: {{shards: '{train}/*.tar'}}}}, {{batched: 2}}]\n"
    path.write_text(f"{text}  val: [{{sequential: {{shards: '{val}/s-{{000..001}}.tar'{more}}}}}, {{batched: 2}}]\n")
    return path


CASES = {
    "exchanged": (["cat", "dog"], ["dog", "cat"], False),
    "one more in front": (["cat", "dog"], ["ant", "cat", "dog"], False),
    "the same": (["cat", "dog"], ["cat", "dog"], True),
    "one more at the end": (["cat", "dog", "owl"], ["cat", "dog"], True),
    "unknown": (["cat", "dog"], None, True),
}


@pytest.mark.parametrize("case", CASES)
def test_pipelines_that_number_classes_differently_are_refused(tmp_path: Path, case: str, run) -> None:
    train, val, is_good = CASES[case]
    folders = folder_of(tmp_path / "a", train), folder_of(tmp_path / "b", val)
    config = write_config(tmp_path / "c.yaml", *folders)
    code, _, err = run("config", "check", str(config))
    assert code == (0 if is_good else 1)
    if not is_good:
        assert re.search(r"b/classes.json: class 0 is '\w+', but 'cat' in .*a/classes.json", err)
    allowed = write_config(tmp_path / "d.yaml", *folders, ", classes: any")
    assert run("config", "check", str(allowed))[0] == 0


def test_a_loader_touches_only_the_data_of_its_own_pipeline(tmp_path: Path, monkeypatch, caplog) -> None:
    """Neither wdskit.plan: `config check` compares the classes of all pipelines."""
    folders = folder_of(tmp_path / "a", ["cat", "dog"]), folder_of(tmp_path / "b", ["dog", "cat"])
    config = write_config(tmp_path / "c.yaml", *folders)
    is_open = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_open and event in {"open", "os.listdir", "os.scandir"} and str(arguments[0]).startswith(folders[1]):
            touched.append(f"{event} {arguments[0]}")

    touched: list[str] = []
    sys.addaudithook(note)
    is_open = True
    assert len(list(make_loader(config, pipeline="train", workers=0))) == 4
    assert touched == []
    assert not caplog.records
    wdskit.plan(config, pipeline="val")
    is_open = False
    assert touched != []


@pytest.mark.parametrize("unnamed", ["train", "val"])
def test_labels_without_names_beside_a_pipeline_that_has_names_are_warned_of(tmp_path, unnamed, caplog, run) -> None:
    folders = {name: folder_of(tmp_path / name, None if name == unnamed else ["cat"]) for name in ("train", "val")}
    config = write_config(tmp_path / "c.yaml", **folders)
    assert run("config", "check", str(config))[0] == 0
    [line] = [record.getMessage() for record in caplog.records if "is not known" in record.getMessage()]
    assert line.startswith(f"{folders[unnamed]} has labels but no classes.json, which ")
    (tmp_path / unnamed / "classes.json").write_text('["cat"]')
    caplog.clear()
    assert run("config", "check", str(config))[0] == 0
    assert not caplog.records


def test_a_pipeline_whose_folder_is_not_here_is_not_compared(tmp_path: Path, run) -> None:
    config = write_config(tmp_path / "c.yaml", folder_of(tmp_path / "a", ["cat"]), str(tmp_path / "nowhere"))
    assert run("config", "check", str(config))[0] == 0
