"""Options that are given twice, and pages that are in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, on

from wdskit import pack


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    rows = [{"__key__": f"{n:02d}", "cls": n % 3, "json": {"n": n, "text": "t"}} for n in range(12)]
    on(HastyDisk(), pack, rows, tmp_path / "data", max_samples=4)
    monkeypatch.chdir(tmp_path)
    return "data"


@pytest.mark.parametrize(
    "command",
    [
        ("reshard", "data", "out", "--where", "cls == 1", "--where", "json.n > 3"),
        ("index", "data", "--columns", "cls", "--columns", "json.n"),
        ("plan", "c.yaml", "--world-size", "2", "--world-size", "4"),
    ],
)
def test_an_option_that_would_have_only_its_last_value_is_refused(
    run: Any, data: str, command: tuple[str, ...]
) -> None:
    code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert f"'{command[-2]}': it is given twice" in err
    assert not Path("out").exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "shard", "page"])
def test_a_page_replaces_what_has_its_name_and_nothing_behind_a_link(run: Any, data: str, kind: str) -> None:
    shard = Path("data/data-000000.tar")
    file = shard if kind == "shard" else Path("file.html")
    if kind == "link":
        file.symlink_to(shard)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "page":
        file.write_bytes(b"<!DOCTYPE html><p>old")
    before = shard.read_bytes()
    code, _, err = run("view", "data", "--out", file, "--no-open")
    assert shard.read_bytes() == before
    if kind == "shard":
        assert (code, err) == (1, "data/data-000000.tar: the name of a page ends in .html.")
    else:
        assert code == 0
        assert file.read_bytes().startswith(b"<!doctype html>\n<html")
        assert not file.is_symlink()
