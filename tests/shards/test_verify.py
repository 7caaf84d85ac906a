"""Findings of `verify` for whole shards with faults, for hostile shards, and on the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from disks import HastyDisk, on
from hypothesis import given, settings
from hypothesis import strategies as st
from images import image_bytes
from shards import write_shard
from tar_corpus import END, member

from wdskit import (
    PackError,
    Pipeline,
    StorageError,
    WdskitError,
    info,
    pack,
    reshard,
    split,
    verify,
)
from wdskit.dataset.index import read_index, write_index
from wdskit.errors import FolderIndexError, ShardError
from wdskit.shards import verify as uniqueness
from wdskit.shards import verify_shard as checking
from wdskit.shards.index import index_folder
from wdskit.storage import requests
from wdskit.storage.urls import LocalFile

JPG, PNG = image_bytes("JPEG"), image_bytes("PNG")


def told(result) -> list[tuple[str, str]]:
    """Return the kind of each finding and the name of its file."""
    return [(finding.kind, Path(finding.file).name) for finding in result.findings]


def shards(folder: Path, *parts: dict[str, dict[str, bytes]], index: bool = True) -> Path:
    """A function that writes shards `s-0.tar`, `s-1.tar`, ... with an index."""
    folder.mkdir(exist_ok=True)
    for number, samples in enumerate(parts):
        write_shard(folder / f"s-{number}.tar", samples)
    if index:
        on(HastyDisk(), index_folder, folder)
    return folder


@pytest.mark.parametrize("num", [1 << 30, 1 << 40, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("part", ["num_bytes", "num_samples"])
def test_an_index_that_claims_what_no_file_has_costs_no_memory(tmp_path, num, part):
    folder = shards(tmp_path / "s", *numbered(3, 2))
    first, second = read_index(folder).entries
    write_index(folder, [dataclasses.replace(first, **{part: num}), second], disk=HastyDisk())
    uses = {
        "verify": lambda: verify(folder, workers=1),
        "info": lambda: info(str(folder)),
        "split": lambda: split(folder, "train=0.5,val=0.5", workers=1),
        "reshard": lambda: reshard(str(folder), tmp_path / "out"),
        "exact": lambda: next(iter(Pipeline().exact(str(folder)).to_tuple("cls").batched(2).loader(workers=0))),
        "sequential": lambda: next(
            iter(Pipeline().sequential(str(folder)).to_tuple("cls", "__valid__").batched(2).loader(workers=0))
        ),
    }
    for name, use in uses.items():
        tracemalloc.start()
        try:
            with contextlib.suppress(WdskitError):
                use()
            assert tracemalloc.get_traced_memory()[1] < 100 << 20, name
        finally:
            tracemalloc.stop()
    result = verify(folder, workers=1)
    assert ("bytes" if part == "num_bytes" else "samples", "s-0.tar") in told(result)


def numbered(*counts: int) -> list[dict[str, dict[str, bytes]]]:
    start = np.cumsum([0, *counts]).tolist()
    return [{f"k{n}": {"cls": b"%d" % n} for n in range(a, b)} for a, b in itertools.pairwise(start)]


@pytest.mark.parametrize("key", ["/etc/a", "../a", "a/../../b", "a\x1b[31m", "/a\u2028"])
def test_keys_that_are_traps_are_found(tmp_path, key):
    folder = shards(tmp_path / "d", {"k": {"txt": b"1"}, key: {"txt": b"1"}}, index=False)
    assert [(one.kind, one.key, one.offset) for one in verify(folder).findings] == [("name", key, 1024)]


def test_a_missing_a_new_and_a_renamed_shard_are_found(tmp_path):
    folder = shards(tmp_path / "d", *numbered(2, 2, 2))
    (folder / "s-0.tar").unlink()
    (folder / "s-1.tar").rename(folder / "new.tar")
    assert told(verify(folder)) == [
        ("beside", "index.json"),
        ("missing", "s-0.tar"),
        ("missing", "s-1.tar"),
    ]
    assert not verify(folder).is_clean
    assert told(verify(folder / "new.tar"))[1:] == [("unlisted", "new.tar")]


def test_files_that_the_index_does_not_list_are_a_note(tmp_path):
    folder = shards(tmp_path / "d", *numbered(2, 2))
    for name in ("a.tar", "b.tar", ".c.tar"):
        (folder / name).touch()
    found = verify(folder)
    assert found.is_clean
    assert found.num_shards == 2
    [note] = found.findings
    assert note.problem == "2 other tars beside the index, not part of the data, first a.tar"
    assert info(str(folder)).num_others == 2


def test_an_unfinished_run_is_found(tmp_path):
    """With an index, the shards of the index are checked."""
    folder = shards(tmp_path / "d", *numbered(2, 2))
    (folder / ".wdskit").mkdir()
    assert told(verify(folder)) == [("unfinished", "d")]
    assert info(str(folder)).is_unfinished
    (folder / "index.json").unlink()
    with pytest.raises(FolderIndexError, match="a run of `wdskit pack` here is unfinished"):
        verify(folder)


@pytest.mark.parametrize("path", ["none", "none/*.tar", "s-{0..1}", "pipe:cat x", "", "a" * 300, "x/" * 3000])
def test_what_is_not_there_or_not_local_cannot_be_verified(tmp_path, monkeypatch, path, run):
    monkeypatch.setattr(requests, "WAIT_S", 0.001)
    monkeypatch.chdir(tmp_path)
    for function in (verify, info, index_folder):
        with pytest.raises(StorageError):
            function(path)
    code, out, err = run("verify", path)
    assert (code, out, bool(err)) == (2, "", True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root has every right
    with pytest.raises(StorageError, match=r"^none\.tar: the folder \. may not be read\.$"):
        verify("none.tar")


@pytest.mark.parametrize("place", ["same shard", "two shards"])
def test_a_key_that_comes_twice_is_found(tmp_path, place):
    if place == "two shards":
        first, second = {"a": {"cls": b"1"}, "b": {"cls": b"2"}}, {"c": {"cls": b"3"}, "a": {"cls": b"4"}}
        folder = shards(tmp_path / "d", first, second)
    else:
        folder = tmp_path / "d"
        folder.mkdir()
        names = ["a.cls", "b.cls", "a.cls"]
        (folder / "s-0.tar").write_bytes(b"".join(member(name, b"1") for name in names) + END)
    [finding] = verify(folder).findings
    assert (finding.kind, finding.key) == ("repeated", "a")
    assert finding.offset == (1024 if place == "two shards" else 2048)
    where = "in two places that are not side by side" if place == "same shard" else f"also in {folder / 's-0.tar'}"
    assert where in finding.problem


def test_keys_whose_hashes_collide_are_told_apart(tmp_path, monkeypatch):
    """Equal hashes alone are not a finding; without the comparison of keys they would be."""
    monkeypatch.setattr(checking, "hash_key", lambda key: bytes(8))
    folder = shards(tmp_path / "d", *numbered(2, 1))
    assert verify(folder, workers=1).is_clean
    monkeypatch.setattr(uniqueness, "read_key", lambda report, number: "same")
    assert [kind for kind, _ in told(verify(folder, workers=1))] == ["repeated"]


def test_samples_with_other_fields_are_notes_and_no_fault(tmp_path, run):
    """Shards of `pack` may have samples without a caption; `verify` reports this and passes."""
    rows = [{"__key__": f"k{n}", "jpg": JPG, **({"txt": "a"} if n % 3 else {})} for n in range(9)]
    pack(rows, tmp_path / "d")
    assert verify(tmp_path / "d").is_clean
    status, out, _ = run("verify", str(tmp_path / "d"))
    assert status == 0
    assert "Note: " in out
    assert "its fields are image; most have image, txt" in out
    assert "clean, 1 note." in out


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("jpg", JPG, ()),
        ("jpg", PNG, ("structure", "decode")),
        ("png", JPG, ("structure", "decode")),
        ("jpg", JPG[:-1], ("structure", "decode")),
        ("png", PNG[:40] + b"x" + PNG[41:], ("structure", "decode")),
        ("left.jpg", b"none", ("structure", "decode")),
        ("webp", b"RIFF\x04\0\0\0WAVE", ("structure", "decode")),
        ("bin", b"none", ()),
    ],
)
def test_images_are_checked_as_asked(tmp_path, name, data, found):
    folder = shards(tmp_path / "d", {"a": {name: data}})
    for images in ("none", "structure", "decode"):
        kinds = [kind for kind, _ in told(verify(folder, images=images))]
        assert kinds == ["content"] * (images in found)


# Hostile files.


@settings(max_examples=60)
@given(
    data=st.lists(
        st.sampled_from([member("a.cls", b"1"), member("b.json", b"{"), END, bytes(512), b"x" * 700]), max_size=8
    )
)
def test_noise_never_stops_a_verification_or_what_saves_the_samples_before_the_damage(data, tmp_path_factory):
    """The saved samples can be read."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "a.tar").write_bytes(b"".join(data))
    kinds = {finding.kind for finding in verify(folder, workers=1).findings}
    try:
        result = on(HastyDisk(), pack, folder / "a.tar", folder / "to", skip_bad=True, workers=1)
    except (PackError, ShardError):  # or a sample in two places
        return
    assert result.rejected or not kinds & {"structure", "content", "repeated"}
    assert not {finding.kind for finding in verify(folder / "to", workers=1).findings} & {"structure", "repeated"}


def test_a_pipe_a_folder_and_a_dead_link_in_place_of_files_are_found(tmp_path):
    folder = shards(tmp_path / "d", *numbered(1, 1, 1, 1))
    for number, make in enumerate([os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")]):
        (folder / f"s-{number}.tar").unlink()
        make(folder / f"s-{number}.tar")
    (folder / "s-3.tar.idx").unlink()
    os.mkfifo(folder / "s-3.tar.idx")
    found = told(verify(folder))
    assert {("unreadable", "s-0.tar"), ("unreadable", "s-1.tar"), ("missing", "s-2.tar")} < set(found)
    assert ("offsets", "s-3.tar.idx") in found


def test_a_disk_that_fails_in_one_shard_is_a_finding_and_the_others_are_read(tmp_path, monkeypatch):
    """Each read fails in turn."""
    folder = shards(tmp_path / "d", *numbered(2, 2, 2))
    reads: list[str] = []
    read = LocalFile.read

    def failing(self, size):
        reads.append(self.url)
        if len(reads) == fail_at and self.url.endswith(".tar"):
            raise StorageError(f"{self.url}: reading failed: Input/output error.", url=self.url)
        return read(self, size)

    monkeypatch.setattr(LocalFile, "read", failing)
    fail_at = 0
    verify(folder, workers=1)
    for fail_at in range(1, len(reads) + 1):
        url = reads[fail_at - 1]
        reads_before, reads[:] = list(reads), []
        result = verify(folder, workers=1)
        failed = [f"{url}: reading failed: Input/output error."] if url.endswith(".tar") else []
        assert [str(finding) for finding in result.findings] == failed
        assert result.num_shards == 3
        reads[:] = reads_before


# The command line.


def test_findings_are_lines_and_exit_1(tmp_path, monkeypatch, run):
    folder = shards(tmp_path / "d", *numbered(3, 2))
    monkeypatch.chdir(tmp_path)
    with (folder / "s-1.tar").open("r+b") as file:
        file.truncate(1600)
    write_shard(folder / "s-2.tar", {"README x": {"jpg": b"none"}})
    code, out, err = run("verify", "d::d/s-2.tar", "--workers", "1")
    out = out.replace("Note: d/s-2", "d/s-2")
    assert (code, err) == (1, "")
    promise = "the name says JPEG, but it is not an image of a known format"
    assert out.splitlines()[:6] == [
        "Note: d/index.json: 1 other tar beside the index, not part of the data, first s-2.tar",
        "d/s-2.tar: the folder's index does not list this shard",
        "d/s-1.tar, byte 1600: the shard stops inside a member of 1 bytes (0 samples read)",
        "d/s-1.tar: it has 1600 bytes, the index says 3072",
        f"d/s-2.tar, byte 0: key 'README x': jpg: {promise}; it starts with b'none'",
        "d/s-2.tar: key 'README x': its fields are image; most have cls (1 sample; this is the first)",
    ]
    assert out.splitlines()[-1].startswith("Verified d::d/s-2.tar: ")


def test_shards_without_samples_are_not_clean(tmp_path):
    for name in ("s", "t"):
        (tmp_path / f"{name}.tar").write_bytes(END)
    for _ in range(2):
        assert told(verify(tmp_path)) == [("samples", tmp_path.name)]
        on(HastyDisk(), index_folder, tmp_path)
    write_shard(tmp_path / "t.tar", {"a": {"cls": b"1"}})
    on(HastyDisk(), index_folder, tmp_path)
    assert told(verify(tmp_path)) == []


# Labels.


def test_labels_are_compared_with_the_classes_of_their_folder(tmp_path):
    shard = write_shard(
        tmp_path / "a.tar", {f"k{n}": {"cls": data} for n, data in enumerate((b"0", b"-1", b"2", b"1"))}
    )
    index_folder(tmp_path)
    assert verify(tmp_path).findings == ()
    for names, problem in (
        ('["cat", "dog"]', "cls: 2 is not the number of one of the 2 classes in classes.json"),
        ("[]", "0"),
    ):
        (tmp_path / "classes.json").write_text(names)
        for target in (tmp_path, shard):
            found = verify(target).findings[0]
            assert (found.kind, problem in found.problem) == ("content", True)
        assert found.key == ("k2" if "cat" in names else "k0")
    (tmp_path / "classes.json").write_text('{"cat": 0, "dog": 1, "eel": 2}')
    assert verify(tmp_path).findings == ()


def test_a_field_that_no_loader_can_decode_is_a_finding(tmp_path):
    fields = {
        "a": {"cls": b"cat"},
        "b": {"cls": b"1.0"},
        "d": {"cls2": b"x"},
        "e": {"txt": b"\xff"},
        "f": {"npy": b"x"},
    }
    write_shard(tmp_path / "a.tar", {**fields, "c": {"cls": b"1"}, "g": {"bin": b"\xff"}})
    found = [(found.kind, found.key) for found in verify(tmp_path / "a.tar").findings if found.kind != "odd"]
    assert found == [("content", key) for key in fields]
