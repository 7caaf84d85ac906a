"""The kind of a source, and sources from a pipe."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from images import make_folder
from shards import bytes_in, samples_in

import wdskit
from wdskit import PackError, RowError


def pack(source, dest, **options):
    if ".jsonl" in str(source) or ".csv" in str(source) or ".tsv" in str(source):
        options["allow_no_image"] = True
    return wdskit.pack(source, dest, **options)


"""Most tables here do not test images."""

RUN = [sys.executable, "-c", "from wdskit.cli import main; main()"]


def piped(data: bytes, *words: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*RUN, "pack", "-", *words], input=data, cwd=cwd, capture_output=True, check=False)


# Lists of paths.


def test_a_list_on_stdin_is_packed_in_its_order(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 2, "dog": 1})
    listed = b"./photos/dog/0000.jpg\nphotos/cat//0001.jpg\n\n"
    done = piped(listed, "out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"source   standard input: list of paths")
    samples = samples_in(tmp_path / "out")
    assert list(samples) == ["photos/dog/0000", "photos/cat/0001"]
    assert samples["photos/cat/0001"]["json"] == b'{"path":"photos/cat//0001.jpg"}'


def test_a_list_may_stand_in_a_file(tmp_path, monkeypatch):
    make_folder(tmp_path / "photos", {"cat": 2})
    monkeypatch.chdir(tmp_path)
    Path("list").write_text("photos/cat/0001.jpg\nphotos/cat/0000.jpg")
    pack("list", "out", from_="list", shuffle=1)
    assert samples_in(Path("out")).keys() == {"photos/cat/0000", "photos/cat/0001"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"photos/cat/0000.jpg\nphotos/gone.jpg\n", b"standard input:2: photos/gone.jpg: No such file"),
        (b"photos/cat\n", b"standard input:1: 'photos/cat' does not have the extension of an image"),
        (b"\n\n/etc/\xff.jpg\n", b"standard input:3: its column 'path' holds '/etc/\\udcff.jpg', not a path"),
        (b"x" * 100_000, b"standard input:1: this is longer than the 4096 bytes"),
        (b"a\0b.jpg\n", b"its column 'path' holds 'a\\x00b.jpg', not a path"),
        (b"", b"standard input: there is nothing to pack"),
    ],
)
def test_a_bad_path_is_an_error_that_names_its_line(tmp_path, data, message):
    make_folder(tmp_path / "photos", {"cat": 1})
    done = piped(data, "out", cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_jsonl_may_come_through_stdin(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 1})
    done = piped(
        b'{"image": "photos/cat/0000.jpg", "n": 1}\n{"key": "b"}\n',
        "out",
        "--from",
        "table",
        "--allow-no-image",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(samples_in(tmp_path / "out")) == ["photos/cat/0000", "b"]
    done = piped(b"bad\n", "other", "--from", "table", cwd=tmp_path)
    assert done.stderr.startswith(b"standard input:1: it is not JSON")


# Tables of other suffixes.

TABLE = {"key": ["a", "b"], "image": ["images/0000.jpg", ""], "text": ['say "hi', "x, y"]}


def test_tsv_has_no_quotes(tmp_path):
    make_folder(tmp_path / "images", {".": 1})
    lines = ["\t".join(TABLE), *("\t".join(row) for row in zip(*TABLE.values(), strict=True))]
    (tmp_path / "m.tsv").write_text("\r\n".join(lines))
    pack(tmp_path / "m.tsv", tmp_path / "out")
    rows = [json.loads(sample["json"]) for sample in samples_in(tmp_path / "out").values()]
    assert rows == [dict(zip(TABLE, row, strict=True)) for row in zip(*TABLE.values(), strict=True)]


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv", "m.tsv"])
def test_a_compressed_table_is_the_table(tmp_path, name):
    separator = {"m.csv": b",", "m.tsv": b"\t"}.get(name)
    text = b'{"key":"a","n":"1"}\n' if separator is None else separator.join([b"key", b"n\na", b"1\n"])
    (tmp_path / name).write_bytes(text)
    (tmp_path / f"{name}.GZ").write_bytes(gzip.compress(text))
    pack(tmp_path / name, tmp_path / "plain", pattern="s-%d.tar")
    pack(tmp_path / f"{name}.GZ", tmp_path / "packed", pattern="s-%d.tar")
    assert bytes_in(tmp_path / "plain") == bytes_in(tmp_path / "packed")


def test_a_compressed_table_cut_or_flipped_anywhere_is_an_error(tmp_path):
    whole = gzip.compress(b'{"key":"a"}\n{"key":"b"}\n', mtime=0)
    path = tmp_path / "m.jsonl.gz"
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(PackError, match=r"stops before its end|cannot be read"):
            pack(path, tmp_path / "out")
    for at in range(10, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((PackError, RowError)):
            pack(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv", "m.tsv", "m.jsonl.gz"])
def test_a_line_without_end_is_not_taken_into_memory(tmp_path, name):
    data = b"key\n" + b"x" * (5 << 20)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(PackError, match=r"m\S+:2: this line is longer than the 4194304 bytes"):
        pack(tmp_path / name, tmp_path / "out", skip_bad=True)


# The kind of a source.


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("photos", {"from_": "table"}, "photos: cannot be read: Is a directory"),
        ("m.txt", {"from_": "folder"}, "m.txt: cannot be listed: Not a directory"),
        ("m.txt", {"from_": "films"}, "from: 'films' is not a kind of source. The kinds are folder, table, list"),
        ("m.txt", {}, "m.txt: this is neither a folder nor a file with a known suffix"),
        ("gone", {"from_": "list"}, "gone: cannot be read: No such file or directory"),
        ("-", {"from_": "folder"}, "-: cannot be listed: No such file or directory"),
        ("-", {"workers": 2}, "rows that can be read only once"),
    ],
)
def test_what_a_source_cannot_be_is_told(tmp_path, monkeypatch, name, options, problem):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos", {"cat": 1})
    Path("m.txt").write_text("x")
    with pytest.raises(PackError, match=problem):
        pack(name, tmp_path / "out", **options)
    assert not Path("out").exists()


def test_rows_from_python_are_of_no_other_kind(tmp_path):
    with pytest.raises(PackError, match="`from` is for a path"):
        pack([], tmp_path / "out", from_="table")


def test_a_summary_says_what_a_source_was_taken_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos", {"cat": 1})
    Path("m.jsonl").write_text('{"key": "a"}\n')
    Path("paths").write_text("photos/cat/0000.jpg\n")
    found = {
        "photos": pack("photos", "a").source,
        "m.jsonl": pack("m.jsonl", "b").source,
        "paths": pack("paths", "c", from_="list").source,
        "a/*.tar": pack("a/*.tar", "d").source,
        "a": pack("a", "e", dry_run=True).source,
    }
    assert found == {
        "photos": "photos: image folder",
        "m.jsonl": "m.jsonl: table of text",
        "paths": "paths: list of paths",
        "a/*.tar": "a/*.tar: tars",
        "a": "a: tars",
    }
    assert pack([{"__key__": "a", "cls": 1}], "f").source == ""
