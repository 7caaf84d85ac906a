"""What `wdskit pack` prints, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from images import image_bytes, make_folder

from wdskit.cli.pack import parse_size

SUMMARY = """\
folder   out
shards   2 (out-000000.tar to out-000001.tar)
samples  3
fields   cls, jpg, json
classes  2
bytes    12.8 kB
time     N s, N samples/s, N MB/s"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`photos` in the current folder: three images in two classes."""
    monkeypatch.chdir(tmp_path)
    return make_folder(tmp_path / "photos", {"cat": 2, "dog": 1})


def without_speeds(text: str) -> str:
    return re.sub(r"[\d.,]+(?= (s|samples/s|[kM]?B/s))", "N", text).replace("N kB/s", "N MB/s")


def test_a_summary_says_what_was_written(run, photos):
    code, out, err = run("pack", "photos", "out", "--max-samples", "2")
    assert (code, without_speeds(out), err) == (0, SUMMARY, "")


def test_rejected_rows_and_other_files_are_told(run, photos):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "0001.jpg").write_bytes(b"none\x1b[31m")
    code, out, err = run("pack", "photos", "out")
    assert (code, out) == (1, "")
    assert err.startswith("photos/cat/0001.jpg: ")
    assert err.endswith("use --skip-bad.")
    code, out, _ = run("pack", "photos", "out", "--skip-bad")
    assert code == 0
    assert "rejected    1, listed in rejected.jsonl" in out
    assert "not packed  1 file that is no image" in out
    assert out.splitlines()[-1].startswith("rejected: photos/cat/0001.jpg: ")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing", "out"], 1, "nothing: there is no such folder or file."),
        (["photos", "out", "--max-bytes", "lots"], 2, "'lots' is no size"),
        (["photos", "out", "--max-samples", "0"], 2, "Invalid value for '--max-samples'"),
        (["photos", "out", "--pattern", "a.tar"], 1, "pattern: 'a.tar' must be a file name with one %0Nd"),
        (["photos", "out", "--keys", "random"], 1, "keys: 'random'"),
        (["photos", "out", "--append"], 1, "index.json"),
        (["photos"], 2, "Missing argument 'DEST'"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_a_code(run, photos, words, code, message):
    got, out, err = run("pack", *words)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_packing_twice_is_refused_with_the_way_out(run, photos):
    assert run("pack", "photos", "out")[0] == 0
    code, _, err = run("pack", "photos", "out")
    assert (code, err) == (
        1,
        "out: this folder is packed and indexed already.\n  Pack into another folder, or add to it with --append.",
    )


def test_every_option_reaches_the_packer(run, photos):
    Path("m.csv").write_text("photo,name,cls\nphotos/cat/0000.jpg,x.y,5\nphotos/dog/0000.jpg,z,6\n")
    words = "m.csv out --max-samples 1 --max-bytes 20kB --shuffle 3 --workers 2 --pattern p-%02d.tar --skip-bad"
    options = "--keys hashed --image-column photo --key-column name"
    code, out, err = run("pack", *words.split(), *options.split())
    assert (code, err) == (0, "")
    assert "2 (p-00.tar to p-01.tar)" in out
    rows = [json.loads(line) for line in run("ls", "out/p-00.tar", "--json")[1].splitlines()]
    assert re.fullmatch(r"[0-9a-z]{16,}", rows[0]["key"])
    assert sorted(rows[0]["fields"]) == ["cls", "jpg", "json"]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("200MB", 200_000_000), ("1.5 GiB", 3 << 29), ("10kb", 10_000), ("7KiB", 7 << 10), (" 5 B ", 5)],
)
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert parse_size(text) == num_bytes


@given(st.text(max_size=12))
def test_any_other_text_is_no_size(text):
    try:
        assert 0 < parse_size(text) < 10**15
    except typer.BadParameter as err:
        assert "is no size" in str(err)  # noqa: PT017 (text that is a size is fine)


def test_a_terminal_sees_a_bar_with_speeds_and_the_time_left(tmp_path):
    """In a pseudo-terminal of 100 columns; the bar is gone when the summary is printed."""
    make_folder(tmp_path / "photos", {"cat": 300})
    (tmp_path / "photos" / "cat" / "large.jpg").write_bytes(image_bytes(size=(2000, 2000)))
    command = [sys.executable, "-c", "from wdskit.cli import main; main()", "pack", "photos", "out"]
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    packer = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the terminal is gone with its last process
            break
        shown += part
    os.close(parent)
    assert packer.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"packing .*/301 .* samples/s .*B/s .* left ", text)
    assert "samples  301" in text
