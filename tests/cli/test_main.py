"""The whole output of index and info, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folders import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from shards import write_members

import wdskit
from wdskit.cli import main
from wdskit.cli.console import escape, format_bytes, format_count, plural
from wdskit.native import describe_native
from wdskit.text import format_at_least, parse_bytes

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]


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

INFO_INDEXED = """\
train
 samples           5
 size              26.6 kB (5.32 kB a sample)
 shards            2
 samples a shard   2 to 3, median 2.5
 classes           2: cat, dog
 based on          the folder's index; names and sizes of the files agree

 field   shards
────────────────
 cls        all
 jpg        all
 json    1 of 2

 shard     samples      size   fields
────────────────────────────────────────────
 s-0.tar         2   9.22 kB   cls jpg
 s-1.tar         3   17.4 kB   cls jpg json"""


def test_info_of_a_folder_without_an_index_reads_it(train: Path, run) -> None:
    assert run("info", "train") == (0, INFO_SCANNED, "")


def test_index_then_info_from_the_index(train: Path, run) -> None:
    code, out, err = run("index", "train")
    assert (code, err) == (0, "")
    first, second = out.split("\n")
    assert first.startswith("Indexed train: 2 shards, 5 samples, 26.6 kB in ")
    assert second == "Note: 1 member in no sample (`tar tf SHARD` lists all members)."
    assert run("info", "train") == (0, INFO_INDEXED, "")


@pytest.mark.parametrize(
    "words", [["info", "train"], ["info", "train/s-1.tar"], ["verify", "train"], ["pack", "list.csv", "out"]],
)  # fmt: skip
def test_no_line_ends_in_spaces_where_it_goes_to_a_file(train: Path, capsys, monkeypatch, words) -> None:
    Path("x.jpg").write_bytes((GOLDEN / "tiny.jpg").read_bytes())
    Path("list.csv").write_text("image\nx.jpg\n")
    monkeypatch.setattr(sys, "argv", ["wdskit", *words])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert out.count("\n") > 2
    assert re.findall(r".*[ \t]$", out, re.MULTILINE) == []


def test_info_refuses_an_index_that_does_not_match(train: Path, run) -> None:
    run("index", "train")
    with (train / "s-0.tar").open("ab") as file:
        file.write(bytes(512))
    code, out, err = run("info", "train")
    assert (code, out) == (1, "")
    assert "s-0.tar: it has 9728 bytes, but the folder's index says 9216" in err
    assert "`wdskit index train`" in err
    assert run("info", "train/s-0.tar")[0] == 0  # the shard itself can still be read


INFO_SHARD = """\
train/s-1.tar
 samples    3
 size       17.4 kB (5.80 kB a sample)
 classes    2: cat 0, dog 3
 based on   a full read

 field   shards   samples   mean size      size
────────────────────────────────────────────────
 cls        all       all         1 B       3 B
 jpg        all       all     2.50 kB   7.50 kB
 json       all       all         2 B       6 B

 key     number   offset   fields
──────────────────────────────────────────────────────────
 dog/0        0     1024   jpg 2.50 kB, cls 1 B, json 2 B
 dog/1        1     6144   jpg 2.50 kB, cls 1 B, json 2 B
... and 1 more: --num 3
Note: 1 member in no sample (`tar tf SHARD` lists all members)."""


def test_info_of_a_shard_lists_its_samples(train: Path, run) -> None:
    assert run("info", "train/s-1.tar", "--num", "2") == (0, INFO_SHARD, "")
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


@pytest.mark.parametrize("words", [["info"], ["verify"]])
def test_several_folders_are_joined_by_two_colons_in_every_command(train: Path, run, words) -> None:
    """The first folder has no slash, and must not be taken for the scheme of a URL."""
    (train.parent / "more").mkdir()
    write_members(train.parent / "more" / "m-0.tar", {"cow/0.cls": b"2", "cow/0.jpg": bytes(2500)})
    code, out, err = run(*words, "train::more")
    assert err == ""
    assert (code, words[0]) in {(0, words[0]), (1, "verify")}
    assert "train::more" in out or "m-0.tar" in out or "6 samples" in out


def test_json_of_every_command_parses(train: Path, run) -> None:
    folder = json.loads(run("info", "train", "--json")[1])
    assert folder["fields"]["json"] == {"num_shards": 1, "num_samples": 3, "num_bytes": 6}
    assert folder["samples_per_shard"] == {"min": 2, "median": 2.5, "max": 3}
    assert (folder["source"], folder["classes"]) == ("scan", ["cat", "dog"])
    assert json.loads(run("index", "train", "--json")[1])["num_samples"] == 5
    assert [shard["name"] for shard in folder["shards"]] == ["s-0.tar", "s-1.tar"]
    samples = json.loads(run("info", "train/s-0.tar", "--json")[1])["samples"]
    assert samples[1] == {"number": 1, "key": "cat/1", "offset": 4096, "fields": {"jpg": 2500, "cls": 1}}


def test_what_is_no_shard_is_an_error(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(2000))
    (tmp_path / "b.tar").write_bytes(b"hello")
    gzip = "a.tar, byte 0: this is a gzip file, not a tar (0 samples read).\n  Shards are plain tars: unpack it first."
    assert run("info", "a.tar") == (1, "", gzip)
    assert run("info", "b.tar")[2].startswith("b.tar, byte 5: the shard stops inside a header")
    for command in ("info", "index"):
        code, out, err = run(command, "nothing")
        assert (code, out, err.startswith("nothing: there is no such")) == (1, "", True)
        code, out, err = run(command, "empty")
        assert (code, out, err.startswith(("empty: no shard", "empty: there are no shards"))) == (1, "", True)


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
        process = subprocess.Popen(
            [*RUN, "info", shard, "--num", "5000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
        assert err == b""


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_folder_that_may_not_be_entered_is_an_error(train: Path, run, monkeypatch, command: str) -> None:
    def refuse(path: str, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.path.isfile", lambda _: False)
    monkeypatch.setattr("os.listdir", refuse)
    code, out, err = run(command, str(train))
    assert code > 0
    assert out == ""
    assert err.strip() == f"{train}: cannot be read: Permission denied."


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path: Path) -> None:
    pipe = tmp_path / "p.tar"
    os.mkfifo(pipe)
    process = subprocess.Popen([*RUN, "info", str(pipe)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with pipe.open("wb"):  # opens when the command reads; the command then waits for bytes that never come
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("words", [["info", "train"], ["--help"], ["config", "schema"], ["--version"]])
def test_a_full_or_closed_stdout_is_told_in_one_line(train: Path, words: list[str], monkeypatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, there are no bytes left for a second write
    with open("/dev/full", "wb") as full:  # noqa: PTH123 (a device)
        done = subprocess.run([*RUN, *words], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"the output cannot be written: No space left on device.\n")
    done = subprocess.run(["sh", "-c", '"$0" "$@" >&-', *RUN, *words], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_index_tells_of_shards_whose_bytes_changed(train: Path, run) -> None:
    run("index", "train")
    with (train / "s-1.tar").open("r+b") as file:
        file.seek(512)
        file.write(b"H")
    out = run("index", "train")[1]
    assert "Note: 1 shard of the same size as before, but with other bytes, first s-1.tar." in out
    assert json.loads(run("index", "train", "--json")[1])["changed"] == []


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


def test_numbers_read_well() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9_994: "9.99 kB", 9_996: "10.0 kB", 99_960: "100 kB"}
    sizes |= {999_499: "999 kB", 999_500: "1.00 MB", 140 * 10**9: "140 GB", 5 * 10**18: "5,000 PB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    assert [format_count(count) for count in (0, 1281167, 2.5)] == ["0", "1,281,167", "2.5"]
    assert [plural(1, "shard"), plural(2, "shard"), plural(2, "class")] == ["1 shard", "2 shards", "2 classes"]
