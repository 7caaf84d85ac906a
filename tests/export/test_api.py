"""Files for other readers beside the shards: their exact text, where they come from, who may replace them, and that
`verify` sees when they do not match.
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

from wdskit import ConfigError, FolderIndexError, PackError, StorageError, WdskitError, pack, verify
from wdskit.dataset.index import read_index, read_other_counts
from wdskit.dataset.keys import split_name
from wdskit.export import api
from wdskit.export.api import KINDS
from wdskit.export.energon import collapse
from wdskit.export.timm import split_of
from wdskit.shards import index as indexing
from wdskit.shards.index import index_folder

GOLDEN_TARS = sorted((GOLDEN / "tar").glob("[!g]*.tar"))
GOLDEN_TARS += sorted((GOLDEN / "tar").glob("gnu*.tar"))  # tarfile opens no empty one

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [
        {"__key__": f"k{n}", "cls": n, "txt": "x" * 600, "json": {"n": n, "caption": f"c{n}"}}
        for n in range(start, stop)
    ]


def packed(folder: Path, *, export=KINDS, **options: Any) -> Path:
    """Two shards of two and one samples."""
    pack(rows(0, 3), folder, export=export, max_samples=2, disk=HastyDisk(), **options)
    return folder


def beside(folder: Path) -> dict[str, bytes]:
    """What stands there for other readers only."""
    ours = (".tar", ".tar.idx")
    return {name: data for name, data in bytes_in(folder).items() if not name.endswith(ours) and "index." not in name}


# What they hold.

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
    found = beside(folder)
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


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_written_alone_and_listed_in_the_index(tmp_path, kind):
    whole = beside(packed(tmp_path / "whole", pattern="t-%d.tar"))
    folder = packed(tmp_path / "one", export=[kind], pattern="t-%d.tar")
    assert beside(folder).items() <= whole.items()
    assert bool(beside(folder)) == (kind != "wids")
    assert read_index(folder).exports.kinds == (kind,)
    assert json.loads((folder / "index.json").read_bytes())["export"] == {"kinds": [kind]}


@pytest.mark.parametrize("workers", [1, 2])
def test_packing_and_indexing_write_the_same_bytes(tmp_path, workers):
    folder = packed(tmp_path / "t", workers=workers)
    (tmp_path / "u").mkdir()
    for path in folder.glob("*.tar"):
        (tmp_path / "u" / path.name).write_bytes(path.read_bytes())
    index_folder(tmp_path / "u", export=reversed(KINDS), workers=workers, disk=HastyDisk())
    assert bytes_in(tmp_path / "u") == bytes_in(folder)
    assert verify(folder).is_clean


def test_rows_from_a_generator_have_them_too(tmp_path):
    pack(iter(rows(0, 3)), tmp_path / "t", export=KINDS, max_samples=2, disk=HastyDisk())
    assert bytes_in(tmp_path / "t") == bytes_in(packed(tmp_path / "u" / "t"))


@pytest.mark.parametrize("path", GOLDEN_TARS, ids=lambda path: path.stem)
def test_offsets_are_those_of_the_data_whatever_the_headers(tmp_path, path):
    """Of all archives that can be indexed, with pax and GNU headers, folders and global headers between."""
    (tmp_path / "a.tar").write_bytes(path.read_bytes())
    try:
        index_folder(tmp_path, export=["dali"], disk=HastyDisk())
    except FolderIndexError:
        assert not (tmp_path / "index.json").exists()
        return
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
    """Where DALI's own tool counts wrong; and a member that is not held in memory when it is verified."""
    name = b"d" * 60 + b"/" + b"n" * 90
    parts = [long_name(name + b".a") + member("cut", b"1"), pax(record(b"path", name + b".b")) + member("x", b"22")]
    data = b"".join([*parts, member("z.bin", bytes(33 << 20)), member("z.txt", b"333"), END])
    (tmp_path / "a.tar").write_bytes(data)
    index_folder(tmp_path, export=["dali"], disk=HastyDisk())
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
    index_folder(tmp_path, export=["dali"], disk=HastyDisk())
    assert (tmp_path / "a.idx").read_text() == "v1.1 2\ncls 512 1 seg.png 1536 2\ncls 2560 1\n"
    write_shard(tmp_path / "a.tar", {"a": {"c d": b"1"}})
    with pytest.raises(FolderIndexError, match=r"a.tar: DALI's index cannot hold the field 'c d'"):
        index_folder(tmp_path, disk=HastyDisk())


def test_members_of_no_sample_are_not_in_dalis_index(tmp_path):
    (tmp_path / "a.tar").write_bytes(member("README", b"x") + member("a.B", b"y") + END)
    index_folder(tmp_path, export=["dali"], disk=HastyDisk())
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
    index_folder(tmp_path, export=["timm", "energon"], disk=HastyDisk())
    splits = timm_splits(tmp_path)
    assert {name: split["num_samples"] for name, split in splits.items()} == {"dev": 1, "test": 1, "train": 3, "val": 1}
    assert (tmp_path / ".nv-meta/split.yaml").read_text() == (
        'split_parts:\n  train:\n  - "train-{0..1}.tar"\n  - "train-10.tar"\n'
        '  val:\n  - "dev-00.tar"\n  - "val-0.tar"\n  test:\n  - "test-0.tar"\nexclude: []\n'
    )
    assert "train-2.tar" not in json.loads((tmp_path / ".nv-meta/.info.json").read_bytes())["shard_counts"]
    assert verify(tmp_path).is_clean
    index_folder(tmp_path, split_name="all", disk=HastyDisk())
    assert list(timm_splits(tmp_path)) == ["all"]
    index_folder(tmp_path, disk=HastyDisk())
    assert list(timm_splits(tmp_path)) == ["all"]


@given(st.lists(st.from_regex(r"[a-c0-9-]{0,6}\.tar", fullmatch=True), max_size=12))
def test_collapsed_names_are_the_same_names(names):
    assert [name for pattern in collapse(names) for name in braceexpand(pattern)] == names


def test_runs_of_names_are_one_pattern():
    names = [f"a-{n:03d}.tar" for n in range(98, 103)]
    assert collapse(names) == ["a-{098..102}.tar"]
    assert collapse([f"a-{n}.tar" for n in range(8, 12)]) == ["a-{8..9}.tar", "a-{10..11}.tar"]


def test_energon_would_read_a_brace_in_a_name_as_a_pattern(tmp_path):
    write_shard(tmp_path / "a{1,2}.tar", {"a": {"cls": b"1"}})
    with pytest.raises(FolderIndexError, match="energon reads a name with"):
        index_folder(tmp_path, export=["energon"], disk=HastyDisk())


# What is renewed, what is left, what is refused.


def test_an_addition_renews_what_is_kept(tmp_path):
    folder = packed(tmp_path / "t")
    pack(rows(3, 4), folder, append=True, disk=HastyDisk())
    assert verify(folder).is_clean
    expected = {"t-000000.tar": 2, "t-000001.tar": 1, "t-000002.tar": 1}
    assert read_other_counts(str(folder)) == {"sizes.json": expected, "_info.json": expected}
    assert timm_splits(folder)["train"]["num_samples"] == 4
    assert "{000000..000002}" in (folder / ".nv-meta/split.yaml").read_text()
    assert (folder / "t-000002.idx").exists()


def test_an_addition_cannot_ask_for_other_kinds(tmp_path):
    folder = packed(tmp_path / "t", export=["timm"])
    for options in ({"export": ["dali"]}, {"split_name": "x"}, {"export": ["none"]}):
        with pytest.raises(PackError, match=r"Run `wdskit index .* --export"):
            pack(rows(3, 4), folder, append=True, disk=HastyDisk(), **options)


def test_indexing_again_renews_what_is_kept_and_adds_kinds(tmp_path):
    folder = packed(tmp_path / "t", export=["open_clip"])
    write_shard(folder / "t-000000.tar", {"x": {"cls": b"1", "json": b"{}", "txt": b""}})
    assert index_folder(folder, disk=HastyDisk()).disagreeing == {}
    assert json.loads((folder / "sizes.json").read_bytes())["t-000000.tar"] == 1
    assert index_folder(folder, export=["dali"], disk=HastyDisk()).index.exports.kinds == ("open_clip", "dali")
    assert index_folder(folder, export=["none"], disk=HastyDisk()).index.exports.kinds == ()
    assert (folder / "sizes.json").exists()
    assert verify(folder).is_clean


@pytest.mark.parametrize("name", [*TEXTS, "_info.json"])
def test_what_something_else_wrote_is_never_overwritten(tmp_path, name):
    """But a run that was killed left the same bytes, and is gone on with."""
    whole = packed(tmp_path / "whole", pattern="t-%06d.tar")
    folder = packed(tmp_path / "t", export=())
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"mine")
    if name.endswith(".yaml"):
        index_folder(folder, export=KINDS, disk=HastyDisk())
    else:
        with pytest.raises(WdskitError, match=r"is in the way|holds something else"):
            index_folder(folder, export=KINDS, disk=HastyDisk())
    assert (folder / name).read_bytes() == b"mine"
    (folder / name).write_bytes((whole / name).read_bytes())
    index_folder(folder, export=KINDS, disk=HastyDisk())
    assert bytes_in(folder) == bytes_in(whole)


def test_packing_never_overwrites_either(tmp_path):
    (tmp_path / "t").mkdir()
    for name in ("t-000000.idx", "sizes.json"):
        (tmp_path / "t" / name).write_bytes(b"mine")
        with pytest.raises(WdskitError, match=f"{name}: this file exists already"):
            packed(tmp_path / "t")
        assert not (tmp_path / "t" / "index.json").exists()
        (tmp_path / "t" / name).unlink()
    packed(tmp_path / "t")


def test_splits_that_a_user_made_stay(tmp_path):
    folder = packed(tmp_path / "t")
    mine = "split_parts: {train: [t-000000.tar], val: [t-000001.tar], test: []}\n"
    (folder / ".nv-meta/split.yaml").write_text(mine)
    (folder / ".nv-meta/dataset.yaml").write_text("__module__: mine\n__class__: Mine\n")
    index_folder(folder, disk=HastyDisk())
    assert (folder / ".nv-meta/split.yaml").read_text() == mine
    assert "Mine" in (folder / ".nv-meta/dataset.yaml").read_text()
    assert verify(folder).is_clean
    pack(rows(3, 4), folder, append=True, disk=HastyDisk())
    [finding] = verify(folder).findings
    assert finding.problem == "energon: t-000002.tar is not in any of its parts"


def test_shards_whose_files_would_have_one_name_are_refused(tmp_path):
    for number, name in enumerate(["a.tar", "a.tar.tar"]):
        write_shard(tmp_path / name, {f"k{number}": {"cls": b"1"}})
    with pytest.raises(FolderIndexError, match=r"would be a\.tar\.idx, which is one of a\.tar"):
        index_folder(tmp_path, export=["dali"], disk=HastyDisk())


def test_wrong_kinds_are_refused_before_anything_is_read(tmp_path):
    wrong = [(["tf"], "'tf' is not a kind"), ("dali,x", "'x' is not a kind"), (["none", "dali"], "cannot be combined")]
    for kinds, message in wrong:
        with pytest.raises(ConfigError, match=message):
            pack([], tmp_path / "t", export=kinds)
    with pytest.raises(ConfigError, match="cannot be printed"):
        pack([], tmp_path / "t", split_name="a\x1b")
    assert not (tmp_path / "t").exists()


def test_a_kind_that_a_newer_version_keeps_is_told(tmp_path):
    folder = packed(tmp_path / "t", export=["timm"])
    text = (folder / "index.json").read_text().replace('["timm"]', '["timm", "mosaic"]')
    (folder / "index.json").write_text(text)
    assert any("'mosaic'" in finding.problem for finding in verify(folder).findings)
    with pytest.raises(ConfigError, match="'mosaic' is not a kind"):
        index_folder(folder, disk=HastyDisk())
    for wrong in ('["timm", 1]', '"timm"', '["a\\u001b"]'):
        (folder / "index.json").write_text(text.replace('["timm", "mosaic"]', wrong))
        with pytest.raises(FolderIndexError, match="`export` is"):
            read_index(folder)


# Faults.


def interrupted(folder: Path, interrupt: Callable[[Callable[[Any], None], int], None]) -> None:
    """Index with all kinds, interrupted at each disk operation; what is there then is right, and the index the last."""
    pack(rows(0, 1), folder / "whole", disk=HastyDisk())
    tars = {path.name: path.read_bytes() for path in (folder / "whole").glob("*.tar")}
    kinds = ["timm", "energon", "dali"]

    def fresh(name: str) -> Path:
        (folder / name).mkdir()
        for tar, data in tars.items():
            (folder / name / tar).write_bytes(data)
        return folder / name

    disk = WatchedDisk()
    index_folder(fresh("right"), export=kinds, workers=1, disk=disk)
    right = bytes_in(folder / "right")
    assert len(disk.operations) > 50
    for number in range(0, len(disk.operations), 1 if ALL else 3):
        path = fresh(f"{number}")
        interrupt(lambda disk: index_folder(path, export=kinds, workers=1, disk=disk), number)  # noqa: B023
        left = {name: data for name, data in bytes_in(path).items() if not name.endswith("-temp")}
        assert left.items() <= right.items()
        assert "index.json" not in left or left == right
        index_folder(path, export=kinds, disk=HastyDisk())
        assert bytes_in(path) == right


def fail(run: Callable[[Any], None], number: int) -> None:
    with pytest.raises(StorageError, match="cannot be written: Input/output error"):
        run(FailingDisk(number, 5))


def kill(run: Callable[[Any], None], number: int) -> None:
    assert killed(run, number, half=True)


@pytest.mark.parametrize("interrupt", [fail, kill])
def test_an_index_stands_only_beside_all_that_it_lists(tmp_path, interrupt):
    interrupted(tmp_path, interrupt)


def test_an_index_before_them_is_caught(tmp_path, monkeypatch):
    """A mutant of `index_folder`."""
    true_publish = indexing.export_folder

    def hasty(folder, entries, *, exports, disk, **options):
        indexing.write_index(folder, entries, exports=exports, disk=disk)
        true_publish(folder, entries, exports=exports, disk=disk, **options)

    monkeypatch.setattr(indexing, "export_folder", hasty)
    with pytest.raises(AssertionError):
        interrupted(tmp_path, kill)


# What `verify` sees.


def missed(folder: Path) -> list[str]:
    """Files beside the shards of which a missing, an empty, a foreign or a damaged one goes unnoticed."""
    unseen = []
    rng = random.Random(0)
    for name, data in beside(folder).items():
        flips = []
        for _ in range(4):
            flipped = bytearray(data)
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(7)
            flips.append(bytes(flipped))
        for wrong in (None, b"", b"{}", b"[" * 10_000, data[: len(data) // 2], *flips):
            if wrong is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(wrong)
            found = [finding for finding in verify(folder, workers=1).findings if finding.file.endswith(name)]
            changes_nothing = wrong in flips and not name.endswith(".idx")
            is_users = name.endswith("dataset.yaml") and wrong
            if not found and not changes_nothing and not is_users:
                unseen.append(name)
        (folder / name).write_bytes(data)
    return unseen


def test_every_file_that_does_not_match_is_a_finding(tmp_path):
    """Flipped bits too, where a change of one byte is a change of what it says: in DALI's index."""
    folder = packed(tmp_path / "t")
    assert missed(folder) == []
    assert verify(folder).is_clean


def test_a_verification_that_does_not_look_at_them_is_caught(tmp_path, monkeypatch):
    folder = packed(tmp_path / "t")
    monkeypatch.setattr(api, "shard_export_names", lambda *args: ())
    assert set(missed(folder)) == {name for name in beside(folder) if name.startswith("t-")}


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("sizes.json", '"t-000000.tar": 2', '"t-000000.tar": 3', "open_clip: it says that t-000000.tar has 3 samples"),
        ("sizes.json", "t-000001", "t-000007", "open_clip: t-000001.tar is missing from it"),
        (".nv-meta/.info.json", "2", "5", "energon: its counts are not those of the index"),
        (".nv-meta/split.yaml", "000001", "000002", "energon: it names t-000002.tar, which has no samples here"),
        (".nv-meta/split.yaml", "000000..000001", "1..999999999", "energon: it cannot be read"),
        ("t-000000.idx", "cls 512", "cls 513", "dali: its offsets, sizes or names are not the shard's"),
    ],
)
def test_what_does_not_match_is_told(tmp_path, name, old, new, problem):
    folder = packed(tmp_path / "t")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    [finding] = verify(folder).findings
    assert (finding.kind, finding.file) == ("beside", str(folder / name))
    assert finding.problem.startswith(problem)


def test_a_shard_that_changed_is_told_by_its_files_too(tmp_path):
    folder = packed(tmp_path / "t", export=["dali"])
    write_shard(folder / "t-000001.tar", {"k9": {"cls": b"1"}})
    files = {Path(finding.file).name for finding in verify(folder).findings}
    assert files == {"t-000001.tar", "t-000001.tar.idx", "t-000001.idx"}


# The command line.


def test_index_says_what_is_kept(tmp_path, monkeypatch, run):
    packed(tmp_path / "t", export=())
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("index", "t", "--export", "energon, dali", "--split-name", "val")
    assert code == 0
    assert out.splitlines()[1] == "Files for other readers: energon, dali."
    assert "val:\n  - " in (tmp_path / "t/.nv-meta/split.yaml").read_text()
    code, out, _ = run("index", "t", "--json")
    assert json.loads(out)["export"] == ["energon", "dali"]
    code, out, err = run("index", "t", "--export", "tf")
    assert (code, out) == (1, "")
    assert err.startswith("export: 'tf' is not a kind of file for another reader. There are: wids, open_clip,")
