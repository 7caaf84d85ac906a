"""The destination of `pack`: refusals, additions, and files that are never replaced."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from disks import HastyDisk
from images import make_folder
from shards import bytes_in, samples_in

from wdskit import FolderIndexError, PackError, RowError, ShardError, StorageError, WdskitError, pack
from wdskit.dataset.index import read_index
from wdskit.dataset.lock import lock_folder
from wdskit.files import Disk
from wdskit.packing import publish
from wdskit.shards.index import index_folder


def numbered(start: int, stop: int) -> list[dict[str, object]]:
    return [{"__key__": f"{n}", "cls": n} for n in range(start, stop)]


def lose_index(folder: Path) -> None:
    """Remove the index, as after a run that was killed just before it."""
    for name in ("index.json", "index.bin"):
        (folder / name).unlink()


# Folders that are made, and folders that cannot be.


def test_missing_folders_are_made(tmp_path):
    pack(numbered(0, 1), tmp_path / "a" / "b" / "out")
    assert list(samples_in(tmp_path / "a" / "b" / "out")) == ["0"]


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    pack(numbered(0, 1), tmp_path / "out")
    assert "out-000000.tar" in bytes_in(tmp_path / "real")


@pytest.mark.parametrize(
    ("dest", "problem"),
    [
        ("", "'' is not a folder to pack into. Write . for this one"),
        ("a\x00b", "is not a folder to pack into"),
        ("file", "file: this is a file, not a folder to pack into"),
        ("file/below", "file/below: cannot be written"),
        ("link", "link: cannot be written"),
        ("s3://bucket", "the URL does not name a folder of a bucket"),
        ("http://host/train", "only buckets of s3://, gs://, az:// can be written to"),
        ("n" * 300, "cannot be written: File name too long"),
    ],
)
def test_what_is_no_folder_is_an_error(tmp_path, monkeypatch, dest, problem):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("link").symlink_to("nowhere/out")
    with pytest.raises(WdskitError, match=problem):
        pack(numbered(0, 1), dest, pattern="p-%d.tar")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize("operation", ["open", "make_folder"])
def test_a_folder_that_may_not_be_written_is_an_error(tmp_path, operation):
    class Refusing(Disk):
        pass

    def refuse(self, path):
        raise PermissionError(errno.EACCES, "Permission denied")

    setattr(Refusing, operation, refuse)
    with pytest.raises(PackError, match=rf"{tmp_path}/out.*: cannot be written: Permission denied"):
        pack(numbered(0, 1), tmp_path / "out", disk=Refusing())


def test_a_folder_whose_lock_may_not_be_taken_is_an_error(tmp_path):
    (tmp_path / "out" / ".wdskit.lock").mkdir(parents=True)
    with pytest.raises(StorageError, match="lock: cannot be written"):
        pack(numbered(0, 1), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".wdskit.lock"]  # nothing is in the way of others
    (tmp_path / "out" / ".wdskit-run").mkdir()  # of another run, which has just begun
    with pytest.raises(StorageError, match="lock: cannot be written"):
        pack(numbered(0, 1), tmp_path / "out")
    assert (tmp_path / "out" / ".wdskit-run").is_dir()


# The source's own folder.


@pytest.mark.parametrize("dest", ["photos", "photos/shards", "photos/cat/shards", "link/shards", "photos/../photos/x"])
def test_a_folder_inside_the_source_is_refused(tmp_path, monkeypatch, dest):
    """The folder would be a class when the same command runs again."""
    make_folder(tmp_path / "photos", {"cat": 1, "dog": 1})
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("photos")
    with pytest.raises(PackError, match=f"^{dest}: it is inside the source photos, and would be packed with it"):
        pack("photos", dest)
    assert sorted(path.name for path in Path("photos").iterdir()) == ["cat", "dog"]


def test_a_folder_beside_the_source_or_above_it_is_fine(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 1})
    pack(source, tmp_path / "photos-packed")
    pack(source, tmp_path)
    assert samples_in(tmp_path).keys() == samples_in(tmp_path / "photos-packed").keys() == {"cat/0000"}


def test_a_manifest_may_stand_in_the_folder_that_is_written(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"key": "x"}\n')
    pack(tmp_path / "m.jsonl", tmp_path, pattern="m-%d.tar", allow_no_image=True)
    assert list(samples_in(tmp_path)) == ["x"]
    assert (tmp_path / "m.jsonl").read_text() == '{"key": "x"}\n'


def test_a_manifest_that_is_called_as_the_list_of_rejected_rows_is_not_touched(tmp_path):
    path = tmp_path / "rejected.jsonl"
    for text in ('{"key": "x"}\n', '{"key": "x"}\nbad\n'):
        path.write_text(text)
        with pytest.raises(PackError, match=r"rejected.jsonl: this file exists already and is in the way"):
            pack(path, tmp_path, pattern="m-%d.tar", skip_bad=True, allow_no_image=True)
        assert path.read_text() == text
    assert list(bytes_in(tmp_path)) == ["rejected.jsonl"]


# Existing files.


def test_an_indexed_folder_is_refused_before_the_source_is_read(tmp_path):
    pack(numbered(0, 1), tmp_path / "out")
    before = bytes_in(tmp_path / "out")

    def rows():
        raise AssertionError("read")
        yield

    with pytest.raises(
        PackError,
        match=r"packed and indexed already, .*\n  max_samples was 10000 and is 3.\n(.*\n)*.*--append",
    ):
        pack(rows(), tmp_path / "out", max_samples=3)
    assert bytes_in(tmp_path / "out") == before
    with pytest.raises(PackError, match="only one of the two sources can be read more than once"):
        pack(rows(), tmp_path / "out")


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "out" / "notes").mkdir(parents=True)
    (tmp_path / "out" / "README.md").write_text("mine")
    (tmp_path / "out" / "notes" / "x.tar").write_text("mine")
    (tmp_path / "out" / ".x.tar").write_text("mine")
    pack(numbered(0, 1), tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert (tmp_path / "out" / "notes" / "x.tar").read_text() == "mine"
    assert list(samples_in(tmp_path / "out")) == ["0"]


@pytest.mark.parametrize("make", [list, iter])
def test_a_shard_that_no_index_would_know_is_an_error(tmp_path, make):
    """The error comes before a file is written."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.tar").write_bytes(b"mine")
    with pytest.raises(PackError, match=r"other.tar: this shard is in no index, and is not one of those being packed"):
        pack(make(numbered(0, 3)), tmp_path / "out")
    assert [*bytes_in(tmp_path / "out")] == ["other.tar"]


@pytest.mark.parametrize("name", ["classes.json", "rejected.jsonl", "out-000000.tar"])
@pytest.mark.parametrize("kind", ["text", "folder", "empty"])
def test_what_something_else_has_written_is_never_replaced(tmp_path, name, kind):
    source = make_folder(tmp_path / "photos", {"cat": 2})
    (source / "cat" / "0001.jpg").write_bytes(b"bad")
    path = tmp_path / "out" / name
    path.mkdir(parents=True) if kind == "folder" else path.parent.mkdir()
    if kind != "folder":
        path.write_text("mine" if kind == "text" else "")
    with pytest.raises(PackError, match=f"out(/{name})?: (this file exists already|cannot be written: Is a directory)"):
        pack(source, tmp_path / "out", skip_bad=True)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != ".wdskit.lock"] == [name]
    assert path.is_dir() if kind == "folder" else path.read_text() == ("mine" if kind == "text" else "")


def test_a_list_of_rejected_rows_of_another_run_is_not_left_for_this_ones(tmp_path):
    pack([*numbered(0, 1), 5], tmp_path / "out", skip_bad=True)
    lose_index(tmp_path / "out")
    for path in (tmp_path / "out").glob("*.tar*"):
        path.unlink()
    with pytest.raises(PackError, match=r"rejected.jsonl: this file exists already"):
        pack(numbered(0, 1), tmp_path / "out")
    pack([*numbered(0, 1), 5], tmp_path / "out", skip_bad=True)


@pytest.mark.parametrize("make", [list, iter])
@pytest.mark.parametrize("rows", [numbered(0, 6), numbered(5, 11)], ids=["same", "other"])
def test_shards_whose_index_is_lost_are_never_overwritten(tmp_path, rows, make):
    """They are not taken for the shards of this run either: `wdskit index` makes them a data set again."""
    pack(numbered(0, 6), tmp_path / "out", max_samples=2)
    lose_index(tmp_path / "out")
    left = bytes_in(tmp_path / "out")
    for options in ({"max_samples": 2}, {"max_samples": 1}):
        with pytest.raises(PackError, match=r"out-000000.tar: this .*\n.*folder, or run `wdskit index .*out`"):
            pack(make(rows), tmp_path / "out", **options)
    with pytest.raises(PackError, match=r"out-000000.tar: this shard is in no index"):
        pack(make(rows), tmp_path / "out", pattern="x-%d.tar")
    assert bytes_in(tmp_path / "out") == left
    index_folder(tmp_path / "out")
    assert list(samples_in(tmp_path / "out")) == ["0", "1", "2", "3", "4", "5"]


def test_drafts_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".out-000007.tar.wdskit-temp").write_bytes(b"half")
    pack(numbered(0, 1), tmp_path / "out")
    assert ".out-000007.tar.wdskit-temp" not in bytes_in(tmp_path / "out")


# Additions.


def test_a_packed_folder_is_added_to_only_when_that_is_said(tmp_path):
    pack(numbered(0, 2), tmp_path / "out", max_samples=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar*")}
    with pytest.raises(RowError, match=r"row 0 \('1'\): its key '1' is in .*out already"):
        pack(numbered(1, 3), tmp_path / "out", append=True)
    result = pack(numbered(2, 4), tmp_path / "out", append=True)
    assert [entry.name for entry in result.entries] == ["out-000002.tar"]
    assert (result.num_samples, read_index(str(tmp_path / "out")).num_samples) == (2, 4)
    assert list(samples_in(tmp_path / "out")) == ["0", "1", "2", "3"]
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in before.items())
    read_index(str(tmp_path / "out")).check_files()


def test_many_additions_are_one_data_set(tmp_path):
    for n in range(5):
        pack(numbered(n, n + 1), tmp_path / "out", append=n > 0, pattern="a-%d.tar" if n % 2 else "b-%02d.tar")
    assert [entry.name for entry in read_index(str(tmp_path / "out")).entries] == [
        "b-00.tar", "a-0.tar", "b-01.tar", "a-1.tar", "b-02.tar",
    ]  # fmt: skip
    assert list(samples_in(tmp_path / "out")) == ["0", "1", "2", "3", "4"]


def test_new_shards_are_numbered_behind_all_that_are_there(tmp_path):
    """A number between the others is free if a shard was removed."""
    pack(numbered(0, 3), tmp_path / "out", max_samples=1)
    for path in (tmp_path / "out").glob("out-000001.tar*"):
        path.unlink()
    index_folder(tmp_path / "out")
    result = pack(numbered(3, 5), tmp_path / "out", max_samples=1, append=True)
    assert [entry.name for entry in result.entries] == ["out-000003.tar", "out-000004.tar"]
    assert list(samples_in(tmp_path / "out")) == ["0", "2", "3", "4"]


def test_added_classes_must_be_the_same(tmp_path):
    pack(make_folder(tmp_path / "a", {"cat": 1, "dog": 1}), tmp_path / "out")
    classes = (tmp_path / "out" / "classes.json").read_bytes()
    more = make_folder(tmp_path / "b", {"cat": 3})
    (more / "cat" / "0000.jpg").unlink()
    with pytest.raises(PackError, match=r"classes.json: its classes \(2\) differ from those that you add \(1\)"):
        pack(more, tmp_path / "out", append=True)
    (more / "dog").mkdir()
    pack(more, tmp_path / "out", append=True)
    assert [fields["cls"] for fields in samples_in(tmp_path / "out").values()] == [b"0", b"1", b"0", b"0"]
    assert (tmp_path / "out" / "classes.json").read_bytes() == classes
    with pytest.raises(PackError, match=r"its classes \(2\) differ from those that you add \(0\)"):
        pack(numbered(0, 1), tmp_path / "out", append=True)


@pytest.mark.parametrize("text", ["", "[" * 100_000, "{"])
def test_classes_that_are_no_json_are_an_error(tmp_path, text):
    pack(numbered(0, 1), tmp_path / "out")
    (tmp_path / "out" / "classes.json").write_text(text)
    with pytest.raises(FolderIndexError, match=r"classes.json: it is not JSON"):
        pack(numbered(1, 2), tmp_path / "out", append=True)


def test_adding_to_a_folder_without_an_index_is_an_error(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(PackError, match=r"append: it has no index.*\n.*run `wdskit index "):
        pack(numbered(0, 1), tmp_path / "out", append=True)


@pytest.mark.parametrize("change", ["cut", "gone"])
def test_adding_to_shards_that_do_not_match_their_index_is_an_error(tmp_path, change):
    pack(numbered(0, 2), tmp_path / "out", max_samples=1)
    shard = tmp_path / "out" / "out-000001.tar"
    if change == "cut":
        os.truncate(shard, 1024)
    else:
        shard.unlink()
    with pytest.raises(FolderIndexError, match=r"it does not match the shards: out-000001.tar (is not there|has 1024)"):
        pack(numbered(2, 3), tmp_path / "out", append=True)


def test_adding_to_a_damaged_shard_is_an_error(tmp_path):
    pack(numbered(0, 2), tmp_path / "out", max_samples=1)
    shard = tmp_path / "out" / "out-000001.tar"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ShardError, match=r"out-000001.tar, byte 0"):
        pack(numbered(2, 3), tmp_path / "out", append=True)


def test_rejected_rows_of_an_addition_are_added_too(tmp_path):
    pack([{"__key__": "a", "cls": 1}, 5], tmp_path / "out", skip_bad=True)
    pack([{"__key__": "b", "cls": 1}, 6, None], tmp_path / "out", skip_bad=True, append=True)
    pack([{"__key__": "c", "cls": 1}], tmp_path / "out", skip_bad=True, append=True)
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"where": "row 1", "reason": "it is of type int"},
        {"where": "row 1", "reason": "it is of type int"},
        {"where": "row 2", "reason": "it is of type NoneType"},
    ]


# Two runs at once.


def test_two_packers_do_not_meet(tmp_path):
    (tmp_path / "out").mkdir()
    with lock_folder(tmp_path / "out"), pytest.raises(FolderIndexError, match="another wdskit process"):
        pack(numbered(0, 1), tmp_path / "out")
    assert list(bytes_in(tmp_path / "out")) == []


def test_of_packers_started_at_once_each_gives_the_same_or_a_message(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 150})
    pack(source, tmp_path / "reference", max_samples=3, pattern="p-%d.tar", disk=HastyDisk())
    command = [sys.executable, "-c", "from wdskit.cli import main; main()", "pack", source, tmp_path / "out"]
    command += ["--max-samples", "3", "--pattern", "p-%d.tar"]
    packers = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    messages = [packer.communicate()[1] for packer in packers]
    assert 0 in [packer.returncode for packer in packers]
    for packer, message in zip(packers, messages, strict=True):
        told = "another wdskit process is writing" in message or "indexed already" in message
        assert (packer.returncode, told) in {(0, False), (1, True)}
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


@pytest.mark.parametrize("options", [{}, {"append": True}, {"overwrite": True}], ids=["same", "append", "overwrite"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_index_of_the_folder_is_parsed_once(tmp_path, monkeypatch, options, is_stream):
    make = (lambda *ends: iter(numbered(*ends))) if is_stream else numbered
    pack(make(0, 3), tmp_path / "out")
    read = []
    monkeypatch.setattr(publish, "read_index", lambda folder: read.append(folder) or read_index(folder))
    pack(make(3, 5) if options else make(0, 3), tmp_path / "out", **options)
    assert read == [tmp_path / "out"]
