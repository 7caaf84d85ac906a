"""Rows are samples in the requested order, and only the index is read for them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from shards import write_numbers, write_shard

import wdskit
from tests.view.conftest import NUM_SAMPLES
from wdskit.dataset.index import ShardEntry, write_index
from wdskit.errors import ConfigError, FolderIndexError, PipelineError, StorageError
from wdskit.files import DISK
from wdskit.shards.filters import Expression
from wdskit.view.samples import open_folder, open_order

CONFIG = """\
version: 1
pipelines:
  train:
    - exact: {{shards: {shards}, seed: 7, lanes: 3, window: 5}}
    - to_tuple: __key__
    - batched: 4
  val:
    - sequential: {{shards: {shards}}}
    - to_tuple: __key__
    - batched: 4
  stream:
    - stream: {{shards: {shards}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_numbers(tmp_path / "d", [11, 0, 20, 6])
    wdskit.index_folder(tmp_path / "d")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(shards=tmp_path / "d"))
    return path


@pytest.mark.parametrize("pipeline", ["train", "val"])
@pytest.mark.parametrize(("world_size", "size"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_rows_are_what_a_rank_gets(config: Path, pipeline: str, world_size: int, size: int) -> None:
    """This holds in every epoch, on nodes of any size, without padding."""
    overrides = ["loader.workers=0", f"loader.ranks_per_node={size}"]
    for rank in range(world_size):
        loader = wdskit.make_loader(config, pipeline=pipeline, rank=rank, world_size=world_size, overrides=overrides)
        for epoch in range(2):
            loader.set_epoch(epoch)
            expected = []
            for keys, *valid in loader:
                expected += [key for at, key in enumerate(keys) if not valid or valid[0][at]]
            ranks = {"rank": rank, "world_size": world_size, "gpus_per_node": size}
            shown = open_order(config, pipeline=pipeline, **ranks, epoch=epoch)
            assert [shown.read(row).key for row in range(len(shown))] == expected


def test_rows_of_a_folder_are_in_the_order_of_its_index_or_of_a_split(config: Path) -> None:
    folder = config.parent / "d"
    shown = open_folder(str(folder))
    assert [shown.read(row).key for row in range(len(shown))] == [f"n{number:06d}" for number in range(37)]
    wdskit.split(folder, "a=0.5,b=0.5")
    parts = [open_folder(str(folder), split=name) for name in ("a", "b")]
    keys = [[part.read(row).key for row in range(len(part))] for part in parts]
    assert keys == [sorted(each) for each in keys]
    assert sorted(keys[0] + keys[1]) == [f"n{number:06d}" for number in range(37)]
    shutil.copytree(folder, folder.with_name("e"))
    both = open_folder(f"{folder}::{folder.with_name('e')}")
    assert (len(both), both.read(37).key) == (74, "n000000")
    with pytest.raises(ConfigError, match="view: split: 'a b!' is not a valid name"):
        open_folder(str(folder), split="a b!")


@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
@pytest.mark.parametrize("is_odd", [False, True])
def test_many_samples_are_what_each_of_them_is(tmp_path: Path, monkeypatch, most_bytes: int, is_odd: bool) -> None:
    """This holds for samples read together or separately, with equal or different fields."""
    monkeypatch.setattr("wdskit.view.samples._BYTES_AT_ONCE", most_bytes)
    samples = {f"k{at}": {"cls": b"%d" % at, **({"txt": b"x"} if is_odd and at % 2 else {})} for at in range(600)}
    write_shard(tmp_path / "s.tar", samples)
    wdskit.index_folder(tmp_path)
    shown = open_folder(str(tmp_path))
    rows = [*range(0, 600, 7), *range(600)]
    for row, sample in zip(rows, shown.read_each(rows), strict=True):
        assert not isinstance(sample, Exception)
        assert (sample.row, sample.key) == (row, f"k{row}")
        assert {name: bytes(data) for name, data in sample.fields.items()} == samples[f"k{row}"]


def test_a_search_ends_when_its_time_is_over(folder: Path) -> None:
    shown = open_folder(str(folder))
    rows, start = [], 0
    while start is not None:
        found = shown.find(start, text="k01", limit=100, seconds=0.0)
        assert found.stop is None or found.stop == start + 1
        rows, start = rows + found.rows, found.stop
    assert rows == [*range(10, 20)]
    odd = shown.find(0, expression=Expression("cls == 1"), limit=2, seconds=60.0)
    assert (odd.rows, odd.stop) == ([1, 3], 4)
    assert shown.find(NUM_SAMPLES - 1, text="nothing", limit=1, seconds=60.0).stop is None


def test_a_million_samples_open_at_once(tmp_path: Path) -> None:
    """Their shards do not exist, so they cannot be opened."""
    entries = [ShardEntry(f"s-{number:06d}.tar", 1000, 10**9, "00" * 32, ("jpg",)) for number in range(1000)]
    for entry in entries:
        (tmp_path / entry.name).touch()
    write_index(tmp_path, entries, disk=DISK)
    start = time.perf_counter()
    assert len(open_folder(str(tmp_path))) == 10**6
    assert time.perf_counter() - start < 2


def test_what_cannot_be_shown_says_why(config: Path) -> None:
    write_numbers(config.parent / "bare", [3])
    with pytest.raises(FolderIndexError, match="wdskit index"):
        open_folder(str(config.parent / "bare"))
    with pytest.raises(StorageError, match=r"there is no such shard or folder. Did you mean `.*bare`\?"):
        open_folder(str(config.parent / "bar"))
    with pytest.raises(PipelineError, match="only a run shows the order of a stream"):
        open_order(config, pipeline="stream")
    with pytest.raises(PipelineError, match=r"rank 2 is not one of 2\. The ranks are 0 to 1"):
        open_order(config, pipeline="train", rank=2, world_size=2)
    with pytest.raises(ConfigError, match="there are 3 pipelines; say which"):
        open_order(config)
