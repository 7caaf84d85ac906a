"""Settings of the command line that meet: repeated options, closed streams, files in the way, extreme numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, on
from formats import read_folder

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
        ("reshard", "data", "out", "--keep", "cls", "--keep", "json"),
        ("index", "data", "--columns", "cls", "--columns", "json.n"),
        ("info", "data", "--num", "1", "--num", "2"),
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


def test_options_that_are_lists_may_be_repeated(run: Any, data: str) -> None:
    code, _, err = run("pack", "data", "out", "--field", "a.txt=text", "--field", "b.json=n")
    assert (code, err) == (0, "")
    assert {"a.txt", "b.json"} <= {*next(iter(read_folder(Path("out")).values()))}


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


@pytest.mark.parametrize("closed", ["<&-", "2>&-", ">&-"])
@pytest.mark.parametrize("command", ["verify data", "pack none out", "info data --json"])
def test_closed_streams_are_like_the_null_device(data: str, command: str, closed: str) -> None:
    line = f"exec {sys.executable} -m wdskit.cli {command} {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (1 if command.startswith("pack") else 0)
    assert "Traceback" not in done.stderr
    assert closed == "2>&-" or done.returncode == 0 or "none: there is no such folder" in done.stderr


def test_output_that_is_too_large_is_an_error_with_its_reason(data: str) -> None:
    line = f"ulimit -f 0; exec {sys.executable} -m wdskit.cli info data > out"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: File too large.\n")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (("view", "data", "--no-open", "--seed", str(2**64)), f"seed: {2**64} must be a whole number"),
        (("split", "data", "a=1", "--seed", str(2**64)), f"seed: {2**64} must be a whole number"),
        (("index", ""), "an empty path: there is no such folder"),
        (("view", "", "--no-open"), "view: shards: "),
    ],
)
def test_a_value_out_of_range_and_an_empty_path_are_errors_in_words(
    run: Any, data: str, command: Any, text: str
) -> None:
    code, out, err = run(*command)
    assert code in {1, 2}
    assert (out, err[: len(text)]) == ("", text)
