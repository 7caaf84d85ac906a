"""Hostile names, which would write elsewhere or control a terminal: files, members, paths in tables and lists, keys."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from images import image_bytes, make_folder
from shards import samples_in

NAMES = [
    "../evil", "../../evil", "/etc/evil", "/tmp/evil", "a/../../evil", "./../wicked", "..\\evil", "C:\\evil", "a//b",
    "\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J", "a\nb", "a\rb", "a\tb", "a\bb", "a\x7fb", "a\x9b31mb", "\u202egpj",
    "a\u200bb", "a/./b",
    "a\u2028b", "a\u0085b", "a b", ".hidden", "a.b.c", "__meta__", "a\\b", "é" * 60, "a" * 200, "\udcff", "a\x00b",
    "~root", "$HOME", "`id`", "$(id)", "-rf", "--help", "%s%n", "{0..9}", "*", "|id",
]  # fmt: skip
SAFE = ("~root", "$HOME", "`id`", "$(id)", "-rf", "--help", "%s%n", "*", "|id", "a\u200bb", "\u202egpj")
"""Names that only a shell or a person could misread, not a reader or a terminal: they are packed."""


def in_folder(folder: Path) -> str:
    for name in NAMES:
        if "/" not in name and "\0" not in name:
            path = folder / "photos" / f"{name}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(image_bytes())
    return "photos"


def in_tar(folder: Path) -> str:
    with tarfile.open(folder / "a.tar", "w", format=tarfile.PAX_FORMAT) as file:
        for name in NAMES:
            if "\udcff" not in name and "\0" not in name:  # this reader takes them for a damaged tar
                info = tarfile.TarInfo(f"{name}.txt")
                info.size = 1
                file.addfile(info, io.BytesIO(b"x"))
    return "a.tar"


def in_zip(folder: Path) -> str:
    with zipfile.ZipFile(folder / "a.zip", "w") as file:
        for name in NAMES:
            if "\udcff" not in name and "\0" not in name:
                info = zipfile.ZipInfo("x")
                info.filename = f"{name}.txt"
                file.writestr(info, b"x")
    return "a.zip"


def in_table(folder: Path) -> str:
    make_folder(folder / "images", {".": 1})
    lines = [{"image": f"{name}.jpg", "n": number} for number, name in enumerate(NAMES)]
    (folder / "m.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"image": "images/0000.jpg"}']))
    return "m.jsonl"


def in_keys(folder: Path) -> str:
    lines = [{"key": name, "n": number} for number, name in enumerate(NAMES)]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return "m.jsonl"


def in_list(folder: Path) -> str:
    in_folder(folder)
    paths = [os.fsencode(f"photos/{name}.jpg") for name in NAMES]
    (folder / "list").write_bytes(b"\n".join(path for path in paths if b"\n" not in path))
    return "list"


def files_below(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "make", [in_folder, in_tar, in_zip, in_table, in_keys, in_list], ids=lambda make: make.__name__
)
def test_no_name_leaves_the_folder_or_acts_on_the_terminal(tmp_path, monkeypatch, run, make):
    assert len(NAMES) >= 30
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    source = make(work)
    monkeypatch.chdir(work)
    before = files_below(tmp_path)
    more = ["--from", "list"] if make is in_list else ["--allow-no-image"] * (make is not in_folder)
    for keys in ("given", "hashed"):
        for name, options in (("stops", []), ("skips", ["--skip-bad"])):
            out = work / f"{name}-{keys}"
            code, shown, told = run("pack", source, out.name, "--keys", keys, *options, *more)
            for text in (shown, told):
                assert all(line.isprintable() for line in text.split("\n")), text
            if name == "skips":
                assert code == 0, told
            if (out / "index.json").exists():
                assert all(set(key.split("/")).isdisjoint({"", ".", ".."}) for key in samples_in(out))
            elsewhere = files_below(tmp_path) - before - files_below(out) - {str(out)}
            assert elsewhere == set()
            before |= files_below(out) | {str(out)}


def test_names_that_only_a_shell_would_take_for_more_are_packed_as_they_are(tmp_path, monkeypatch, run):
    source = in_keys(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run("pack", source, "out", "--skip-bad", "--allow-no-image")[0] == 0
    assert list(samples_in(tmp_path / "out")) == [name for name in NAMES if name in SAFE]
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == len(NAMES) - len(SAFE)
