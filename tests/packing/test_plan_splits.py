"""`pack --split`: each key gets the split that `wdskit split` gives, and each split is packed independently."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, WatchedDisk, run_child
from images import image_bytes
from shards import bytes_in, samples_in, selected

import wdskit
from wdskit import PackError, SelectionError, finish_pack, pack, reshard, split
from wdskit.dataset.index import read_index
from wdskit.packing import plan as plans
from wdskit.packing import plan as splits

SHARES = "train=0.7,val=0.3"
OPTIONS: dict[str, Any] = {"max_samples": 4, "split": SHARES, "disk": HastyDisk()}


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:03d}", "cls": n, "bin": bytes([n]) * (n * 7)} for n in range(start, stop)]


def keys_in(folder: Path, pattern: str) -> list[str]:
    names = sorted(path.name for path in folder.glob(pattern))
    return [key for name in names for key in wdskit_keys(folder / name)]


def wdskit_keys(shard: Path) -> list[str]:
    with wdskit.LocalShard(str(shard)) as one:
        return [one.key(number) for number in range(len(one))]


def shards_in(folder: Path, pattern: str = "*.tar*") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def check_splits_are_those_of_wdskit_split(tmp_path: Path) -> None:
    """Compare with `wdskit split` of the same rows, packed without splits."""
    pack(rows(0, 60), tmp_path / "whole", disk=HastyDisk())
    split(tmp_path / "whole", SHARES)
    shard = wdskit_keys(tmp_path / "whole" / "whole-000000.tar")
    pack(rows(0, 60), tmp_path / "out", **OPTIONS)
    for name in ("train", "val"):
        chosen = [shard[number] for number in selected(tmp_path / "whole", name)[0]]
        assert len(chosen) > 10
        assert keys_in(tmp_path / "out", f"{name}-*.tar") == chosen


def test_the_splits_are_those_of_wdskit_split(tmp_path):
    check_splits_are_those_of_wdskit_split(tmp_path)


def test_another_draw_than_that_of_wdskit_split_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "SPLIT_SEED", 1)
    with pytest.raises(AssertionError):
        check_splits_are_those_of_wdskit_split(tmp_path)


def test_a_key_keeps_its_split_whatever_else_is_packed(tmp_path):
    pack(rows(0, 40), tmp_path / "few", **OPTIONS)
    pack(rows(20, 90)[::-1], tmp_path / "many", **{**OPTIONS, "shuffle": 5, "split": {"train": 0.7, "val": 0.3}})
    few, many = ({*keys_in(tmp_path / name, "val-*.tar")} for name in ("few", "many"))
    both = {row["__key__"] for row in rows(20, 40)}
    assert few & both == many & both


@pytest.mark.parametrize(
    "how", [{}, {"shuffle": 3}, {"num_shards": 2, "max_samples": None}, {"num_shards": 3, "max_samples": None}]
)
def test_a_split_is_packed_as_if_it_were_alone(tmp_path, how):
    """Its shards do not change when rows of another split are added or removed."""
    pack(rows(0, 50), tmp_path / "out", **{**OPTIONS, **how})
    for name in ("train", "val"):
        mine = {*keys_in(tmp_path / "out", f"{name}-*.tar")}
        alone = [row for row in rows(0, 50) if row["__key__"] in mine]
        options = {**OPTIONS, **how, "split": None, "pattern": f"{name}-%06d.tar"}
        pack(alone, tmp_path / name, **options)
        assert shards_in(tmp_path / name) == shards_in(tmp_path / "out", f"{name}-*.tar*")
    names = [entry.name for entry in read_index(tmp_path / "out").entries]
    assert names == sorted(names)
    assert len(samples_in(tmp_path / "out")) == 50


def test_the_bytes_depend_on_no_workers_parts_memory_or_stop(tmp_path, monkeypatch):
    how = {**OPTIONS, "shuffle": 3}
    pack(rows(0, 40), tmp_path / "out", **how)
    whole = bytes_in(tmp_path / "out")

    class Killer(WatchedDisk):
        def after(self, name, *args):
            if name == "close" and self.operations.count("open_log") == 3:
                os.kill(os.getpid(), 9)

    assert run_child(lambda: pack(rows(0, 40), tmp_path / "stopped", **{**how, "disk": Killer()})) == -9
    with pytest.raises(PackError, match=r"\n  split was 'train=0.7,val=0.3' and is 'train=0.6,val=0.4'"):
        pack(rows(0, 40), tmp_path / "stopped", **{**how, "split": "train=0.6,val=0.4"})
    pack(rows(0, 40), tmp_path / "stopped", **how)
    for number in range(3):
        pack(rows(0, 40), tmp_path / "parts", **how, part=f"{number}/3")
    finish_pack(tmp_path / "parts")
    monkeypatch.setattr(splits, "_DRAWN_ROWS", 7)
    monkeypatch.setattr(plans, "ROWS_IN_MEMORY", 5)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"key": "{n:03d}", "cls": {n}}}\n' for n in range(40)))
    pack(tmp_path / "rows.jsonl", tmp_path / "disk", **how, allow_no_image=True)
    monkeypatch.undo()
    pack(tmp_path / "rows.jsonl", tmp_path / "two", **{**how, "workers": 2}, allow_no_image=True)
    assert bytes_in(tmp_path / "two") == bytes_in(tmp_path / "disk")
    assert keys_in(tmp_path / "two", "val-*.tar") == keys_in(tmp_path / "out", "val-*.tar")
    assert bytes_in(tmp_path / "stopped") == bytes_in(tmp_path / "parts") == whole


def test_what_is_added_goes_into_the_splits_behind_what_is_there(tmp_path):
    pack(rows(0, 20), tmp_path / "out", **OPTIONS)
    before = shards_in(tmp_path / "out")
    pack(rows(20, 60), tmp_path / "out", **OPTIONS, append=True)
    after = shards_in(tmp_path / "out")
    assert before.items() <= after.items()
    pack(rows(0, 60), tmp_path / "once", **OPTIONS)
    for name in ("train", "val"):
        assert keys_in(tmp_path / "out", f"{name}-*.tar") == keys_in(tmp_path / "once", f"{name}-*.tar")
        numbers = sorted(int(one[-10:-4]) for one in after if one.startswith(name) and one.endswith(".tar"))
        assert numbers == [*range(len(numbers))]


def test_a_pattern_of_a_planned_source_selects_a_split(tmp_path):
    pack(rows(0, 40), tmp_path / "out", **OPTIONS)
    pipe = wdskit.Pipeline().sequential(str(tmp_path / "out" / "val-*.tar")).to_tuple("__key__").batched(5)
    loader = pipe.loader(workers=0, threads=1, rank=0, world_size=1)
    keys = [key for batch in loader for key, valid in zip(batch[0], batch[-1].tolist(), strict=True) if valid]
    assert keys == keys_in(tmp_path / "out", "val-*.tar")


def test_bad_rows_go_before_they_are_split(tmp_path):
    broken = [*rows(0, 10), {"__key__": "bad", "jpg": tmp_path / "missing.jpg"}, *rows(10, 30)]
    with pytest.raises(PackError, match=r"missing\.jpg"):
        pack(broken, tmp_path / "out", **OPTIONS)
    pack(broken, tmp_path / "out", **OPTIONS, skip_bad=True)
    pack(rows(0, 30), tmp_path / "good", **OPTIONS)
    assert shards_in(tmp_path / "out") == shards_in(tmp_path / "good")


def test_a_split_that_is_split_again_has_other_shares_and_a_warning(tmp_path, caplog):
    """Its keys have the draws of the first split."""
    pack([{"__key__": f"k{n}", "cls": n} for n in range(1000)], tmp_path / "out", split="train=0.8,test=0.2")
    assert not caplog.text
    train = f"{tmp_path}/out/train-*.tar"
    reshard(train, tmp_path / "halves", split="train=0.5,val=0.5")
    assert "samples of one split cannot be split again: `wdskit split FOLDER ... --seed 1` draws anew" in caplog.text
    with pytest.raises(PackError, match=r"would be empty.\n  Choose a larger share.*`wdskit split FOLDER"):
        reshard(train, tmp_path / "tenth", split="train=0.9,val=0.1")
    with pytest.raises(PackError, match=r"leave it out\.$"):  # which chance explains
        pack(rows(0, 2), tmp_path / "two", split="train=0.6,val=0.4")


@pytest.mark.parametrize("more", [{}, {"dry_run": True}])
def test_a_split_without_samples_is_refused_but_not_in_an_addition(tmp_path, more):
    options = {**OPTIONS, "split": "train=0.999999,val=0.000001"}
    with pytest.raises(PackError, match=r"split: val \(share 0.000001\) of 9 samples would be empty.\n  Choose"):
        pack(rows(0, 9), tmp_path / "out", **options, **more)
    assert not [*tmp_path.rglob("*.tar")]
    with pytest.raises(PackError, match=r"split val: it has no samples, but num_shards asks for 2 shards"):
        pack(rows(0, 9), tmp_path / "other", **{**options, "max_samples": None}, num_shards=2)
    options["split"] = "train=0.5,val=0.5"
    pack(rows(0, 9), tmp_path / "out", **options)
    added = pack(rows(9, 10), tmp_path / "out", **options, append=True, **more)
    assert added.num_samples == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "a-%06d.tar"}, "`pattern` and `split` cannot be combined"),
        ({"split_name": "train"}, "`split_name` and `split` cannot be combined"),
        ({"num_shards": 200}, "split train: "),
    ],
)
def test_what_does_not_go_with_it_is_refused(tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        pack(rows(0, 30), tmp_path / "out", **{**OPTIONS, **options})
    assert not [*(tmp_path / "out").glob("*.tar")]
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_shares_that_are_none_and_rows_that_come_once_are_refused(tmp_path):
    with pytest.raises(SelectionError, match=r"add up to 0\.8"):
        pack(rows(0, 30), tmp_path / "out", split="train=0.7,val=0.1")
    with pytest.raises(PackError, match="split: rows that can be read only once"):
        pack(iter(rows(0, 30)), tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_images_that_are_resized_are_split_too(tmp_path):
    given = [{"__key__": f"{n:03d}", "jpg": image_bytes(number=n, size=(40, 30))} for n in range(12)]
    pack(given, tmp_path / "out", **OPTIONS, resize=16)
    pack(given, tmp_path / "as-it-is", **OPTIONS)
    for name in ("train", "val"):
        assert keys_in(tmp_path / "out", f"{name}-*.tar") == keys_in(tmp_path / "as-it-is", f"{name}-*.tar")
