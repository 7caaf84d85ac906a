"""Selections by a filter or a share, and the output of `wdskit reshard`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from disks import HastyDisk
from shards import samples_in, selected, write_shard

from wdskit import FolderIndexError, Pipeline, SelectionError, pack, reshard, select, split, verify
from wdskit.dataset.columns import list_columns
from wdskit.shards.index import index_folder


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`data` in the current folder: 40 samples in four shards."""
    rows = [{"__key__": f"k{n:02d}", "cls": n % 4, "json": {"n": n}} for n in range(40)]
    pack(rows, tmp_path / "data", max_samples=10, disk=HastyDisk())
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def keys_of(folder: Path, name: str) -> set[str]:
    keys = list(samples_in(folder))
    return {keys[10 * shard + number] for shard, numbers in enumerate(selected(folder, name)) for number in numbers}


def test_a_selection_holds_what_a_copy_would(data, tmp_path):
    for number, options in enumerate(({"filter": "json.n % 3 == 0 and cls < 2"}, {"sample": "40%", "seed": 2})):
        result = select("data", f"s{number}", **options)
        copied = reshard("data", tmp_path / f"copy{number}", disk=HastyDisk(), **options)
        assert keys_of(data, f"s{number}") == set(samples_in(tmp_path / f"copy{number}"))
        assert result.num_samples == copied.num_samples
        assert result.num_samples + result.num_filtered + result.num_sampled_out == 40


def test_a_planned_source_reads_the_selection(data):
    select("data", "big", filter="json.n >= 30")
    pipe = Pipeline().sequential("data", split="big").decode().to_tuple("__key__", "cls").batched(4)
    keys = [key for batch in pipe.loader(workers=0) for key, valid in zip(batch[0], batch[-1], strict=True) if valid]
    assert keys == [f"k{n}" for n in range(30, 40)]


def test_of_shards_that_are_not_named_nothing_is_selected(data):
    select("data/data-00000{1..2}.tar", "some", filter="cls == 0", workers=2)
    chosen = {"k12", "k16", "k20", "k24", "k28"}
    assert keys_of(data, "some") == chosen
    index_folder(data)  # which makes the columns again
    assert keys_of(data, "some") == chosen
    pack([{"__key__": "new", "cls": 0, "json": {"n": 0}}], data, append=True, disk=HastyDisk())
    assert selected(data, "some")[-1] == []
    select("data/data-00000{1..2}.tar", "some", filter="cls == 0")
    assert sum(map(len, selected(data, "some"))) == 5
    select("data", "some", filter="cls == 0")  # more shards
    assert sum(map(len, selected(data, "some"))) == 11
    for shards in ("data/data-000003.tar", "data/data-00000{0..2}.tar"):
        with pytest.raises(SelectionError, match="'some' selects samples of other shards too, such as data-00000"):
            select(shards, "some", filter="cls == 0")
    select("data/data-000003.tar", "some", filter="cls == 0", overwrite=True)
    assert keys_of(data, "some") == {"k32", "k36"}


def test_a_shard_of_a_selection_that_was_renamed_is_named(data, caplog):
    select("data/data-00000{1..2}.tar", "some", filter="cls == 0")
    (data / "data-000001.tar").rename(data / "other.tar")
    index_folder(data)
    select("data/data-000002.tar::data/other.tar", "some", filter="cls == 0")
    assert keys_of(data, "some") == {"k12", "k16", "k20", "k24", "k28"}
    assert [record.getMessage() for record in caplog.records] == [
        "columns: some selects samples of data-000001.tar, which is not in the folder. If it was renamed, select again."
    ]


def test_another_selection_of_the_name_is_not_replaced_unasked(data):
    select("data", "one", filter="cls == 0")
    before = (data / "columns.json").read_bytes()
    select("data", "one", filter="cls == 0")
    assert (data / "columns.json").read_bytes() == before
    with pytest.raises(SelectionError, match=r"another column has the name 'one': filter cls == 0"):
        select("data", "one", filter="cls == 1")
    select("data", "one", filter="cls == 1", overwrite=True)
    assert len(keys_of(data, "one")) == 10
    with pytest.raises(SelectionError, match="not a valid name for a column"):
        select("data", "../x", filter="cls == 1")
    with pytest.raises(SelectionError, match="named twice"):
        select("data::data", "two", filter="cls == 1")
    split("data", "train=0.5,val=0.5")
    with pytest.raises(SelectionError, match="it has a split 'val' already"):
        select("data", "val", filter="cls == 1")
    with pytest.raises(SelectionError, match="it has a column 'one' already"):
        split("data", "one=0.5,val=0.5", overwrite=True)


def test_a_selection_needs_an_index(tmp_path):
    (tmp_path / "theirs").mkdir()
    write_shard(tmp_path / "theirs" / "a.tar", {"k": {"cls": b"1"}})
    with pytest.raises(FolderIndexError, match="has no index, which a selection needs"):
        select(str(tmp_path / "theirs"), "one", filter="cls == 1")


SUMMARY = """\
folder    out
read      40 samples in 4 shards
filtered  20
written   20 samples
shards    2 (out-000000.tar to out-000001.tar), 10 samples each"""


def test_the_summary_of_a_copy(data, run):
    code, out, err = run("reshard", "data", "out", "--filter", "cls < 2", "--num-shards", "2")
    assert (code, err) == (0, "")
    assert "\n".join(line for line in out.splitlines()[:5]) == SUMMARY
    code, out, _ = run("reshard", "data", "other", "--drop", "cls", "--dry-run")
    assert "planned  40 samples" in out
    assert out.endswith("Nothing was written (--dry-run).")
    code, out, _ = run("reshard", "data", "more", "--sample", "50%", "--json")
    told = json.loads(out)
    assert told["num_samples"] + told["num_sampled_out"] == told["num_source_samples"] == 40


def test_the_summary_of_a_selection(data, run):
    assert run("reshard", "data", "--selection", "few", "--filter", "cls == 3") == (
        0, "Selected 10 of 40 samples in 4 shards as few.\nfiltered: 30", ""
    )  # fmt: skip
    others = (["--shuffle", "1"], ["--restart"], ["--export", "dali"], ["--export", "timm", "--split-name", "x"])
    for words in (["out", "--selection", "x"], [], *(["--selection", "x", *other] for other in others)):
        code, _, err = run("reshard", "data", *words)
        assert code == 2
        assert "Invalid value" in err
    code, _, err = run("reshard", "data", "out", "--filter", "open('x')")
    assert code == 1
    assert err.startswith("filter at 1: \"open('x')\": there is no function open(); there are abs, ")


def test_two_spellings_of_a_folder_are_one(tmp_path, monkeypatch):
    """They share one lock and one selection, and a shard that is named twice is an error."""
    folder = tmp_path / "sel"
    folder.mkdir()
    for name in "ab":
        write_shard(folder / f"{name}.tar", {f"{name}{n}": {"cls": b"%d" % n} for n in range(3)})
    index_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for number, other in enumerate(("./sel/b.tar", "sel/../sel/b.tar", "link/b.tar", str(folder / "b.tar"))):
        result = select(f"sel/a.tar::{other}", f"some{number}", filter="cls > 0")
        assert (result.folders, result.num_samples) == ((Path("sel"),), 4)
        assert list(map(len, selected("sel", f"some{number}"))) == [2, 2]
        with pytest.raises(SelectionError, match="a shard is named twice"):
            select(f"sel/b.tar::{other}", "twice", filter="cls > 0")
        assert verify(f"sel/a.tar::sel/b.tar::{other}").is_clean


def test_a_selection_of_no_sample_is_refused_and_not_written(tmp_path):
    pack([{"__key__": "a", "json": {"n": 1}}], tmp_path / "out")
    with pytest.raises(SelectionError, match="none of the 1 samples is selected"):
        select(str(tmp_path / "out"), "large", filter="json.n > 1")
    assert not list_columns(tmp_path / "out")
