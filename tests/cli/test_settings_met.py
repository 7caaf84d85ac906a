"""Options that are given twice or are too large, and pages that are in the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer.main
from disks import HastyDisk, on

from wdskit import PackError, pack
from wdskit.cli import app


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    rows = [{"__key__": f"{n:02d}", "cls": n % 3, "json": {"n": n, "text": "t"}} for n in range(12)]
    on(HastyDisk(), pack, rows, tmp_path / "data", max_samples=4)
    monkeypatch.chdir(tmp_path)
    return "data"


def test_an_option_that_would_have_only_its_last_value_is_refused(run: Any, data: str) -> None:
    for command in (
        ("reshard", data, "out", "--where", "cls == 1", "--where", "json.n > 3"),
        ("index", data, "--columns", "cls", "--columns", "json.n"),
        ("plan", "c.yaml", "--world-size", "2", "--world-size", "4"),
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, "")
        assert f"'{command[-2]}': it is given twice" in err
        assert not Path("out").exists()


def test_a_setting_that_the_source_does_not_read_is_refused(data: str) -> None:
    settings = {"image": "a", "key": "a", "fields": "txt=a", "sidecars": "txt", "files": "wav", "images": "."}
    Path("photos").mkdir()
    Path("c.json").write_text('{"images": []}')
    columns, own = {"image", "key", "fields"}, {"fields", "images"}
    read: Any = {"t.csv": columns, "t.parquet": columns, "c.json": own, "data/*.tar": {"fields"}, (): set()}
    for source, names in (read | {"photos": {"sidecars", "files"}}).items():
        for name in settings.keys() - names:
            with pytest.raises(PackError, match=f"{name}: it has no effect on this kind of source"):
                pack(source, "out", **{name: settings[name]})


@pytest.mark.parametrize("number", [2**62, 10**30])
def test_a_whole_number_is_taken_or_refused_with_its_value(run: Any, data: str, number: int) -> None:
    words = {"split": ["a=.5,b=.5"], "view": ["--no-open", "--out", "a.html"]}
    for name in ("index", "info", "pack", "reshard", "split", "verify", "view"):
        for option in typer.main.get_command(app).commands[name].params:
            if option.metavar in {"N", "SEED"}:
                dest = words.get(name) or [f"{name}-{option.name}"] * (name in {"pack", "reshard"})
                code, _, err = run(name, data, *dest, option.opts[0], str(number))
                assert not err if code == 0 else str(number) in err.replace(",", "")


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
