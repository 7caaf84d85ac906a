"""Files for other readers next to the shards: their exact text, when they may be replaced, and that `verify` reports
files that do not match.
"""

from __future__ import annotations

import json
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from braceexpand import braceexpand
from disks import FailingDisk, HastyDisk, WatchedDisk, killed
from folders import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from shards import bytes_in, write_shard
from tar_corpus import END, long_name, member, pax, record

from wdskit import ConfigError, FolderIndexError, StorageError, export, pack, verify
from wdskit.shards import export as exporting
from wdskit.shards.export import KINDS, RECORD_NAME, _collapse, describe_outdated, split_of
from wdskit.shards.index import index_folder
from wdskit.tar.names import split_name

GOLDEN_TARS = sorted((GOLDEN / "tar").glob("[!g]*.tar"))
GOLDEN_TARS += sorted((GOLDEN / "tar").glob("gnu*.tar"))  # tarfile opens no empty archive

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [
        {"__key__": f"k{n}", "cls": n, "txt": "x" * 600, "json": {"n": n, "caption": f"c{n}"}}
        for n in range(start, stop)
    ]


def packed(folder: Path, *, kinds=KINDS, **options: Any) -> Path:
    """Two shards of two and one samples, with files of these kinds."""
    pack(rows(0, 3), folder, max_samples=2, disk=HastyDisk(), **options)
    if kinds:
        export(folder, kinds, disk=HastyDisk())
    return folder


def exported(folder: Path) -> dict[str, bytes]:
    """The files for other readers."""
    ours = (".tar", ".tar.idx", RECORD_NAME)
    return {name: data for name, data in bytes_in(folder).items() if not name.endswith(ours) and "index." not in name}


def index_of(folder: Path) -> None:
    index_folder(folder, disk=HastyDisk())


# Content.

TEXTS = {
    "t-000000.idx": "v1.2 2\n"
    "cls 512 1 k0.cls json 1536 22 k0.json txt 2560 600 k0.txt\n"
    "cls 4096 1 k1.cls json 5120 22 k1.json txt 6144 600 k1.txt\n",
    "sizes.json": '{\n"t-000000.tar": 2,\n"t-000001.tar": 1\n}\n',
    ".nv-meta/.info.json": "{\n"
    '  "energon_version": "7.4.1",\n'
    '  "shard_counts": {\n'
    '    "t-000000.tar": 2,\n'
    '    "t-000001.tar": 1\n'
    "  }\n}\n",
    ".nv-meta/split.yaml": 'split_parts:\n  train:\n  - "t-{000000..000001}.tar"\n  val: []\n  test: []\nexclude: []\n',
    ".nv-meta/dataset.yaml": "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
}


def test_the_files_are_exactly_those_of_the_formats(tmp_path):
    folder = packed(tmp_path / "t")
    found = exported(folder)
    for name, text in TEXTS.items():
        assert found[name].decode() == text
    assert json.loads(found["_info.json"]) == {
        "splits": {
            "train": {
                "name": "train",
                "num_samples": 3,
                "filenames": ["t-000000.tar", "t-000001.tar"],
                "shard_lengths": [2, 1],
                "alt_label": "",
            }
        }
    }
    assert len(found) == len(TEXTS) + 2
    assert verify(folder).is_clean


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_written_alone(tmp_path, kind):
    whole = exported(packed(tmp_path / "whole" / "t"))
    folder = packed(tmp_path / "one" / "t", kinds=kind)
    assert exported(folder)
    assert exported(folder).items() <= whole.items()


@pytest.mark.parametrize("path", GOLDEN_TARS, ids=lambda path: path.stem)
def test_offsets_are_those_of_the_data_whatever_the_headers(tmp_path, path):
    """This holds for all archives that can be indexed: with pax and GNU headers, folders and global headers."""
    (tmp_path / "a.tar").write_bytes(path.read_bytes())
    try:
        index_of(tmp_path)
    except FolderIndexError:
        return
    export(tmp_path, "dali", disk=HastyDisk())
    with tarfile.open(path, "r:") as archive:
        wanted = {(info.offset_data, info.size) for info in archive if info.isfile() and split_name(info.name)}
    found = set()
    head, *lines = (tmp_path / "a.idx").read_text().splitlines()
    width = 4 if head.startswith("v1.2") else 3
    for line in lines:
        words = line.split()
        found |= {(int(words[at + 1]), int(words[at + 2])) for at in range(0, len(words), width)}
    assert found == wanted


def test_long_names_and_large_members_have_right_offsets(tmp_path):
    """DALI's own tool computes wrong offsets for these."""
    name = b"d" * 60 + b"/" + b"n" * 90
    parts = [long_name(name + b".a") + member("cut", b"1"), pax(record(b"path", name + b".b")) + member("x", b"22")]
    data = b"".join([*parts, member("z.bin", bytes(33 << 20)), member("z.txt", b"333"), END])
    (tmp_path / "a.tar").write_bytes(data)
    index_of(tmp_path)
    export(tmp_path, "dali", disk=HastyDisk())
    lines = (tmp_path / "a.idx").read_text().splitlines()
    large = len(b"".join(parts)) + 512
    key = name.decode()
    assert lines == [
        "v1.2 2",
        f"a 1536 1 {key}.a b 3584 2 {key}.b",
        f"bin {large} {33 << 20} z.bin txt {large + (33 << 20) + 512} 3 z.txt",
    ]
    assert [finding.kind for finding in verify(tmp_path).findings] == ["odd"]


def test_dalis_index_has_no_names_where_one_has_a_space(tmp_path):
    write_shard(tmp_path / "a.tar", {"a b": {"cls": b"1", "seg.png": b"xy"}, "c": {"cls": b"2"}})
    index_of(tmp_path)
    export(tmp_path, "dali", disk=HastyDisk())
    assert (tmp_path / "a.idx").read_text() == "v1.1 2\ncls 512 1 seg.png 1536 2\ncls 2560 1\n"
    write_shard(tmp_path / "a.tar", {"a": {"c d": b"1"}})
    index_of(tmp_path)
    with pytest.raises(FolderIndexError, match=r"a.tar: DALI's index cannot hold the field 'c d'"):
        export(tmp_path, "dali", disk=HastyDisk())


def test_members_of_no_sample_are_not_in_dalis_index(tmp_path):
    (tmp_path / "a.tar").write_bytes(member("README", b"x") + member("a.B", b"y") + END)
    index_of(tmp_path)
    export(tmp_path, "dali", disk=HastyDisk())
    assert (tmp_path / "a.idx").read_text() == "v1.2 1\nB 1536 1 a.B\n"


# Splits.


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-000000.tar", "train"),
        ("imagenet1k-validation-0003.tar", "validation"),
        ("val_7.tar", "val"),
        ("Test.tar", "test"),
        ("a-train-b-000.tar", "train"),
        ("photos-000000.tar", "train"),
        ("000.tar", "train"),
    ],
)
def test_the_split_is_the_last_word_of_a_shards_name(name, split):
    assert split_of(name) == split


def timm_splits(folder: Path) -> dict[str, Any]:
    splits: dict[str, Any] = json.loads((folder / "_info.json").read_bytes())["splits"]
    return splits


def test_a_folder_of_several_splits_and_a_split_by_name(tmp_path):
    for number, name in enumerate(["train-0", "train-1", "val-0", "train-2", "train-10", "dev-00", "test-0"]):
        write_shard(tmp_path / f"{name}.tar", {f"k{number}": {"cls": b"1"}} if name != "train-2" else {})
    index_of(tmp_path)
    export(tmp_path, "timm,energon", disk=HastyDisk())
    splits = timm_splits(tmp_path)
    assert {name: split["num_samples"] for name, split in splits.items()} == {"dev": 1, "test": 1, "train": 3, "val": 1}
    assert (tmp_path / ".nv-meta/split.yaml").read_text() == (
        'split_parts:\n  train:\n  - "train-{0..1}.tar"\n  - "train-10.tar"\n'
        '  val:\n  - "dev-00.tar"\n  - "val-0.tar"\n  test:\n  - "test-0.tar"\nexclude: []\n'
    )
    assert "train-2.tar" not in json.loads((tmp_path / ".nv-meta/.info.json").read_bytes())["shard_counts"]
    assert verify(tmp_path).is_clean
    export(tmp_path, "timm", split_name="all", disk=HastyDisk())
    assert list(timm_splits(tmp_path)) == ["all"]
    export(tmp_path, "timm", disk=HastyDisk())
    assert list(timm_splits(tmp_path)) == ["all"]


@given(st.lists(st.from_regex(r"[a-c0-9-]{0,6}\.tar", fullmatch=True), max_size=12))
def test_collapsed_names_are_the_same_names(names):
    assert [name for pattern in _collapse(names) for name in braceexpand(pattern)] == names


def test_runs_of_names_are_one_pattern():
    names = [f"a-{n:03d}.tar" for n in range(98, 103)]
    assert [*_collapse(names)] == ["a-{098..102}.tar"]
    assert [*_collapse([f"a-{n}.tar" for n in range(8, 12)])] == ["a-{8..9}.tar", "a-{10..11}.tar"]


def test_energon_would_read_a_brace_in_a_name_as_a_pattern(tmp_path):
    write_shard(tmp_path / "a{1,2}.tar", {"a": {"cls": b"1"}})
    index_of(tmp_path)
    with pytest.raises(FolderIndexError, match="energon reads a name with"):
        export(tmp_path, "energon", disk=HastyDisk())


# Files that are written again, kept, or refused.


@pytest.mark.parametrize("change", ["append", "index"])
def test_exports_of_a_folder_that_changed_are_reported_and_written_again_by_the_command(tmp_path, change):
    folder = packed(tmp_path / "t")
    before = exported(folder)
    if change == "index":
        write_shard(folder / "t-000002.tar", {"x": {"cls": b"1", "json": b"{}", "txt": b""}})
        index_of(folder)
    else:
        pack(rows(3, 4), folder, append=True, disk=HastyDisk())
    told = describe_outdated(folder)
    assert told == (
        f"The files for open_clip,timm,energon,dali are older than the index. Run `wdskit export {folder} --for "
        "open_clip,timm,energon,dali`."
    )
    assert exported(folder) == before
    [finding] = verify(folder).findings
    assert (finding.kind, f"{finding.problem}.") == ("outdated", told)
    export(folder, "timm", disk=HastyDisk())
    assert verify(folder).is_clean
    expected = {"t-000000.tar": 2, "t-000001.tar": 1, "t-000002.tar": 1}
    assert json.loads((folder / "sizes.json").read_text()) == expected
    [split] = json.loads((folder / "_info.json").read_text())["splits"].values()
    assert dict(zip(split["filenames"], split["shard_lengths"], strict=True)) == expected
    assert "{000000..000002}" in (folder / ".nv-meta/split.yaml").read_text()
    assert (folder / "t-000002.idx").exists()


def test_files_of_shards_that_are_gone_are_removed(tmp_path):
    folder = packed(tmp_path / "t")
    for name in ("t-000001.tar", "t-000001.tar.idx"):
        (folder / name).unlink()
    index_of(folder)
    export(folder, "dali", disk=HastyDisk())
    assert not (folder / "t-000001.idx").exists()
    assert verify(folder).is_clean


@pytest.mark.parametrize("name", [*TEXTS, "_info.json"])
def test_what_something_else_wrote_is_never_overwritten(tmp_path, name):
    """But files with equal bytes count as wdskit's, except DALI's files, which other tools write too."""
    whole = packed(tmp_path / "whole" / "t")
    folder = packed(tmp_path / "t", kinds=())
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"mine")
    if name.endswith(".yaml"):
        assert export(folder, KINDS, disk=HastyDisk()).kept == (name,)
    else:
        with pytest.raises(FolderIndexError, match=f"{name}: this file exists already, and wdskit did not write it"):
            export(folder, KINDS, disk=HastyDisk())
    assert (folder / name).read_bytes() == b"mine"
    (folder / name).write_bytes((whole / name).read_bytes())
    if name.endswith(".idx"):
        (folder / name).unlink()
    export(folder, KINDS, disk=HastyDisk())
    assert exported(folder) == exported(whole)


def test_splits_that_a_user_made_stay(tmp_path):
    folder = packed(tmp_path / "t")
    mine = "split_parts: {train: [t-000000.tar], val: [t-000001.tar], test: []}\n"
    (folder / ".nv-meta/split.yaml").write_text(mine)
    (folder / ".nv-meta/dataset.yaml").write_text("__module__: mine\n__class__: Mine\n")
    for _ in range(2):
        report = export(folder, "energon", disk=HastyDisk())
        assert report.kept == (".nv-meta/dataset.yaml", ".nv-meta/split.yaml")
        assert (folder / ".nv-meta/split.yaml").read_text() == mine
        assert "Mine" in (folder / ".nv-meta/dataset.yaml").read_text()
        assert verify(folder).is_clean


def test_shards_whose_files_would_have_one_name_are_refused(tmp_path):
    for number, name in enumerate(["a.tar", "a.tar.tar"]):
        write_shard(tmp_path / name, {f"k{number}": {"cls": b"1"}})
    index_of(tmp_path)
    with pytest.raises(FolderIndexError, match=r"would be a\.tar\.idx, which is the name of the offsets of a\.tar"):
        export(tmp_path, "dali", disk=HastyDisk())


def test_wrong_kinds_are_refused_before_anything_is_read(tmp_path):
    for kinds, message in [
        (["tf"], "'tf' is not a kind"),
        ("dali,x", "'x' is not a kind"),
        ("wids", "wids reads index"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export(tmp_path / "t", kinds)
    with pytest.raises(ConfigError, match="cannot be printed"):
        export(tmp_path / "t", "timm", split_name="a\x1b")
    with pytest.raises(ConfigError, match="no kind of file"):
        export(tmp_path / "t", ())
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "record",
    [
        "{", "[]", "1", "[" * 100_000,
        {"files": {"../../victim": []}}, {"files": {"victim": []}}, {"files": {"/victim.idx": []}},
        {"files": {"x/../y.idx": []}}, {"files": {"t-000000.tar.idx": []}},
        {"kinds": ["mosaic"]}, {"kinds": 1}, {"files": []}, {"index_sha256": 1},
    ],
)  # fmt: skip
def test_a_record_that_something_else_wrote_is_not_followed(tmp_path, record):
    """No file outside of the folder, and no file of another program, is replaced or removed."""
    folder = packed(tmp_path / "a" / "t", kinds=())
    (tmp_path / "victim").write_bytes(b"mine")
    (folder / "victim").write_bytes(b"mine")
    right = {"index_sha256": "", "kinds": ["timm"], "split_name": "", "files": {}}
    (folder / RECORD_NAME).write_text(record if isinstance(record, str) else json.dumps(right | record))
    verify(folder)
    export(folder, KINDS, disk=HastyDisk())
    assert verify(folder).is_clean
    assert (tmp_path / "victim").read_bytes() == (folder / "victim").read_bytes() == b"mine"


def test_a_folder_of_energon_that_is_a_link_is_refused(tmp_path):
    folder = packed(tmp_path / "t", kinds=())
    (tmp_path / "elsewhere").mkdir()
    (folder / ".nv-meta").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderIndexError, match="is a link"):
        export(folder, "energon", disk=HastyDisk())
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "elsewhere" / ".info.json").write_text("mine")
    record = {"index_sha256": "", "kinds": ["timm"], "split_name": "", "files": {".nv-meta/.info.json": []}}
    (folder / RECORD_NAME).write_text(json.dumps(record))
    with pytest.raises(FolderIndexError, match="is a link"):
        export(folder, "timm", disk=HastyDisk())
    assert (tmp_path / "elsewhere" / ".info.json").read_text() == "mine"


# Faults.


def interrupted(folder: Path, interrupt: Callable[[Callable[[Any], None], int], None]) -> None:
    """Interrupt an export of all kinds at each disk operation: `verify` reports it, and the next call writes all."""
    packed(folder / "whole" / "t", kinds=())

    def fresh(name: str) -> Path:
        (folder / name / "t").mkdir(parents=True)
        for path in (folder / "whole" / "t").iterdir():
            if path.is_file():
                (folder / name / "t" / path.name).write_bytes(path.read_bytes())
        return folder / name / "t"

    disk = WatchedDisk()
    export(fresh("right"), KINDS, disk=disk)
    right = bytes_in(folder / "right" / "t")
    assert len(disk.operations) > 50
    for number in range(0, len(disk.operations), 1 if ALL else 4):
        path = fresh(f"{number}")
        interrupt(lambda disk: export(path, KINDS, disk=disk), number)  # noqa: B023
        left = {name: data for name, data in bytes_in(path).items() if not name.endswith("-temp")}
        is_begun, is_whole = RECORD_NAME in left, left == right
        assert left.items() - {(RECORD_NAME, left.get(RECORD_NAME))} <= right.items()
        assert [one.kind for one in verify(path, workers=1).findings] == ["outdated"] * (is_begun and not is_whole)
        export(path, KINDS, disk=HastyDisk())
        assert bytes_in(path) == right


def fail(run: Callable[[Any], None], number: int) -> None:
    with pytest.raises(StorageError, match="cannot be written: Input/output error"):
        run(FailingDisk(number, 5))


def kill(run: Callable[[Any], None], number: int) -> None:
    assert killed(run, number, half=True)


@pytest.mark.parametrize("interrupt", [fail, kill])
def test_an_export_that_was_interrupted_is_reported_and_done_by_the_next_call(tmp_path, interrupt):
    interrupted(tmp_path, interrupt)


def test_a_record_that_is_written_only_at_the_end_is_caught(tmp_path, monkeypatch):
    """Mutant: files that it left are taken for files of another program."""
    true_publish = exporting.publish_bytes

    def late(path, data, *, disk):
        if path.name != RECORD_NAME or b'"index_sha256": ""' not in data:
            true_publish(path, data, disk=disk)

    monkeypatch.setattr(exporting, "publish_bytes", late)
    with pytest.raises((AssertionError, FolderIndexError)):
        interrupted(tmp_path, kill)


# Findings of `verify`.


def test_every_file_that_does_not_match_is_a_finding(tmp_path):
    """A missing, empty, different or damaged file is a finding; of the two files that users edit, a missing one."""
    folder = packed(tmp_path / "t")
    rng = random.Random(0)
    for name, data in exported(folder).items():
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(7)
        for wrong in (None, b"", b"{}", data[: len(data) // 2], bytes(flipped)):
            if wrong is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(wrong)
            findings = verify(folder, workers=1).findings
            is_users = name.endswith(".yaml") and wrong is not None
            expected = [] if is_users else [("outdated", str(folder / name))]
            assert [(finding.kind, finding.file) for finding in findings] == expected
        (folder / name).write_bytes(data)
    assert verify(folder).is_clean


# The command line.


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, run):
    packed(tmp_path / "t", kinds=())
    monkeypatch.chdir(tmp_path)
    code, out, err = run("export", "t", "--for", "energon, dali", "--split-name", "val")
    assert (code, out, err) == (0, "Exported t for energon, dali: 5 files.", "")
    assert "val:\n  - " in (tmp_path / "t/.nv-meta/split.yaml").read_text()
    (tmp_path / "t/.nv-meta/split.yaml").write_text("mine")
    code, out, _ = run("export", "t", "--for", "timm", "--json")
    assert json.loads(out)["kept"] == [".nv-meta/split.yaml"]
    assert json.loads(out)["kinds"] == ["timm", "energon", "dali"]
    code, out, err = run("export", "t", "--for", "tf")
    assert (code, out) == (1, "")
    assert err.startswith("export: 'tf' is not a kind of file for another reader. Known are open_clip,")


def test_a_list_of_exports_that_wdskit_did_not_write_is_a_finding(tmp_path):
    folder = packed(tmp_path / "t")
    (folder / RECORD_NAME).rename(tmp_path / "list")
    (folder / RECORD_NAME).symlink_to(tmp_path / "list")
    [finding] = verify(folder).findings
    assert (finding.kind, finding.file) == ("outdated", str(folder / RECORD_NAME))
    assert finding.problem == "this is a link"
