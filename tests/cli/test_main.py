"""The output of index and info, and their exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import write_members

import wdskit
from wdskit.cli.console import escape
from wdskit.native import describe_native
from wdskit.text import format_at_least, parse_bytes

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`train` in the current folder: two shards of two and three samples, with a README in the second."""
    folder = tmp_path / "train"
    folder.mkdir()
    sample = {"jpg": bytes(2500), "cls": b"1"}
    write_members(folder / "s-0.tar", {f"cat/{i}.{name}": data for i in range(2) for name, data in sample.items()})
    more = {f"dog/{i}.{name}": data for i in range(3) for name, data in {**sample, "json": b"{}"}.items()}
    write_members(folder / "s-1.tar", {"README": b"hello", **more})
    (folder / "classes.json").write_text('["cat", "dog"]')
    monkeypatch.chdir(tmp_path)
    return folder


INFO_SCANNED = """\
train
 samples           5
 size              26.6 kB (5.32 kB a sample)
 shards            2
 samples a shard   2 to 3, median 2.5
 classes           2: cat 0, dog 5
 based on          a full read

 field   shards   samples   mean size      size
────────────────────────────────────────────────
 cls        all       all         1 B       5 B
 jpg        all       all     2.50 kB   12.5 kB
 json    1 of 2    3 of 5         2 B       6 B

 shard     samples      size   fields
────────────────────────────────────────────
 s-0.tar         2   9.22 kB   cls jpg
 s-1.tar         3   17.4 kB   cls jpg json
No index: every shard was read. `wdskit index train` creates one.
Note: 1 member in no sample (`tar tf SHARD` lists all members)."""


def test_info_of_a_folder_without_an_index_reads_it(train: Path, run) -> None:
    assert run("info", "train") == (0, INFO_SCANNED, "")


def test_index_then_info_from_the_index(train: Path, run) -> None:
    code, out, err = run("index", "train")
    assert (code, err) == (0, "")
    first, second = out.split("\n")
    assert first.startswith("Indexed train: 2 shards, 5 samples, 26.6 kB in ")
    assert second == "Note: 1 member in no sample (`tar tf SHARD` lists all members)."
    code, out, err = run("info", "train")
    assert (code, err) == (0, "")
    assert " based on          the folder's index; names and sizes of the files agree\n" in out


def test_info_of_a_shard_lists_its_samples(train: Path, run) -> None:
    out = run("info", "train/s-1.tar", "--num", "2")[1]
    assert " dog/1        1     6144   jpg 2.50 kB, cls 1 B, json 2 B\n... and 1 more: --num 3\n" in out
    assert "dog/0" not in run("info", "train/s-1.tar", "--num", "0")[1]


def test_info_counts_the_values_of_columns_and_the_classes(train: Path, run) -> None:
    for name in ("s-0.tar", "s-1.tar"):
        members = {f"{name[2]}{number}.cls": b"%d" % (number % 3 - 1) for number in range(150)}
        members |= {f"{name[2]}{number}.json": b'{"n": %d, "x": %d.5}' % (number, number) for number in range(150)}
        write_members(train / name, dict(sorted(members.items())))
    run("index", "train", "--columns", "cls,n=json.n,x=json.x")
    text = run("info", "train")[1]
    assert " classes           3: cat 100, dog 100, -1 100\n" in text
    assert re.search(r"cls +int +cls +-1 100, 0 100, 1 100\n", text)
    assert re.search(r"n +int +json.n +0 to 149\n", text)
    assert re.search(r"x +float +json.x +0.5 to 149.5\n", text)
    summary = wdskit.info("train")
    assert summary.class_counts == {"cat": 100, "dog": 100, "-1": 100}
    assert summary.columns[0].values == {"-1": 100, "0": 100, "1": 100}


def test_json_of_every_command_parses(train: Path, run) -> None:
    folder = json.loads(run("info", "train", "--json")[1])
    assert folder["fields"]["json"] == {"num_shards": 1, "num_samples": 3, "num_bytes": 6}
    assert folder["samples_per_shard"] == {"min": 2, "median": 2.5, "max": 3}
    assert (folder["source"], folder["classes"]) == ("scan", ["cat", "dog"])
    write_members(train / "s-1.tar", {f"{number}.json": b'{"x": %de%d}' % (number, number) for number in (3, 999)})
    assert json.loads(run("index", "train", "--columns", "x=json.x", "--json")[1])["num_samples"] == 4
    assert '"limits": [3000.0, null]' in run("info", "train", "--json")[1]
    assert [shard["name"] for shard in folder["shards"]] == ["s-0.tar", "s-1.tar"]
    samples = json.loads(run("info", "train/s-0.tar", "--json")[1])["samples"]
    assert samples[1] == {"number": 1, "key": "cat/1", "offset": 4096, "fields": {"jpg": 2500, "cls": 1}}


def test_hostile_names_never_reach_the_terminal_raw(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x"
    folder.mkdir()
    write_members(folder / "a.tar", {"e\x1b[31m\u202evil.j\x07pg": b"1", "e\x1b]0;t\x9b.cls": b"2"})
    write_members(folder / "b.tar", {"k.jpg": b"1", "k.jpg\x1b": b"2", "j\x1b.jpg": b"2", "k.jpg2": b""})
    (folder / "classes.json").write_text(json.dumps(["\x1b[2J"]))
    for words in (("info", "x/a.tar"), ("info", "x\x1b"), ("info", "x")):
        for json_flag in ((), ("--json",)):
            _, out, err = run(*words, *json_flag)
            assert (out + err).replace("\n", "").isprintable()
    assert r"e\x1b[31m\u202evil        0        0   j\x07pg 1 B" in run("info", "x/a.tar")[1]
    code, _, err = run("info", "x/b.tar")
    assert code == 1
    assert "key 'k' is in two places" in err


def test_head_ends_info_silently(tmp_path: Path) -> None:
    """The pipe breaks while lines are written, or at the last flush."""
    for num_samples in (5, 5000):
        shard = tmp_path / "many.tar"
        write_members(shard, {f"{i:06d}.cls": b"1" for i in range(num_samples)})
        process = subprocess.Popen([*RUN, "info", shard, "--num", "5000"], **PIPES)
        process.stdout.close()
        assert process.communicate()[1] == b""


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "p.tar"
    os.mkfifo(pipe)
    process = subprocess.Popen([*RUN, "info", str(pipe)], **PIPES)
    with pipe.open("wb"):  # opens when the command reads; the command then waits for bytes that never come
        process.send_signal(signal.SIGINT)
        assert process.communicate() == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("words", [["info", "train"], ["--help"], ["config", "schema"], ["--version"]])
def test_a_full_or_closed_stdout_is_told_in_one_line(train: Path, words: list[str], monkeypatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, there are no bytes left for a second write
    with open("/dev/full", "wb") as full:  # noqa: PTH123 (a device)
        done = subprocess.run([*RUN, *words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"the output cannot be written: No space left on device.\n")
    done = subprocess.run(["sh", "-c", '"$0" "$@" >&-', *RUN, *words], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_of_a_full_disk_names_its_file(monkeypatch, capsys) -> None:
    monkeypatch.setattr("typer.main.get_command", Mock(side_effect=OSError(errno.ENOSPC, "full", "a.idx")))
    assert (wdskit.cli._run(), capsys.readouterr().err) == (1, "a.idx: full.\n")


def test_a_wrong_command_line_exits_2(run) -> None:
    for words in (("info",), ("info", "x", "--num", "-1"), ("inf",), ("index", "x", "--workers", "0"), ()):
        code, _, err = run(*words)
        assert code == 2
        assert "Traceback" not in err
    assert "Did you mean 'info'?" in run("inf")[2]


def test_version(run) -> None:
    assert run("--version") == (0, f"wdskit 0.1.0, {describe_native()}", "")


@given(st.text())
def test_escaped_text_is_printable_and_printable_text_stays(text: str) -> None:
    assert escape(text).isprintable()
    assert escape(escape(text)) == escape(text)


@given(st.integers(1, 10**17) | st.floats(1, 1e17))
def test_a_size_that_is_rounded_up_is_enough_and_hardly_more(num_bytes: float) -> None:
    assert num_bytes <= parse_bytes(format_at_least(num_bytes)) <= max(num_bytes + 1, 1.011 * num_bytes)


@pytest.mark.parametrize("text", ["0", "0.5", "0.0004 kB", "-1", "1e18", "nan", "1 KB2", "", "MB"])
def test_text_that_is_not_a_size_of_a_byte_or_more_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
