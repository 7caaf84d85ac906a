"""A folder that `pack` has begun and not finished never passes for a whole one, wherever the run was stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, Stopped, WatchedDisk
from shards import bytes_in

from wdskit import FolderIndexError, Pipeline, finish_pack, info, pack, reshard, verify
from wdskit.cli import app
from wdskit.dataset.index import INDEX_NAME
from wdskit.dataset.unfinished import RECORD_NAME, find_unfinished
from wdskit.shards.index import index_folder

OPTIONS: dict[str, Any] = {"max_samples": 2, "pattern": "p-%02d.tar"}


class StoppingDisk(WatchedDisk, HastyDisk):
    """Stops the run at operation number `stop_at`, from 0; nothing reaches the disk any more."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self.stop_at = stop_at

    def before(self, name, *args):
        if len(self.operations) >= self.stop_at:
            raise Stopped
        super().before(name, *args)


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(start, stop)]


def stop(folder: Path, given: Any, at: int, **options: Any) -> bool:
    """Whether the run came to its end before."""
    try:
        pack(given, folder, **OPTIONS, **options, disk=StoppingDisk(at))
    except Stopped:
        return False
    return True


def is_told(folder: Path) -> bool:
    return [one.kind for one in verify(folder, workers=1).findings if one.kind == "unfinished"] == ["unfinished"]


@pytest.mark.parametrize("kind", ["planned", "stream", "append"])
def test_a_run_that_was_stopped_anywhere_is_told_and_cannot_be_indexed(tmp_path, kind):
    """And so the same run still goes on, and ends in the same bytes."""
    before = rows(50, 53) if kind == "append" else []

    def given() -> Any:
        return iter(rows(0, 5)) if kind == "stream" else rows(0, 5)

    def prepared(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if before:
            pack(before, folder, **OPTIONS, disk=HastyDisk())
        return folder

    whole = prepared("whole")
    more: dict[str, Any] = {"append": kind == "append"}
    pack(given(), whole, **OPTIONS, **more, disk=HastyDisk())
    num_told = 0
    for at in itertools.count(0, 2):
        folder = prepared(f"{at}")
        if stop(folder, given(), at, **more):
            break
        there = bytes_in(folder)
        is_over = there.get(INDEX_NAME) == (whole / INDEX_NAME).read_bytes()
        new = [name for name in there if name.endswith(".tar")][len(before) // 2 + len(before) % 2 :]
        if is_over or not new:
            continue
        assert is_told(folder)
        assert "p-0" in "".join(new)
        told = find_unfinished(folder)
        assert told is not None
        assert told.num_shards == (None if kind == "stream" else 3)
        assert kind == "stream" or told.num_there == len(new)
        with pytest.raises(FolderIndexError, match=r"is not finished: .*\n.*Run the same `wdskit pack` again"):
            index_folder(folder, disk=HastyDisk())
        assert bytes_in(folder) == there
        if not before:  # else the index that is there does not fit the folder, which is an error
            assert info(str(folder)).unfinished == f"{told.problem}. {told.remedy}"
        num_told += 1
    assert num_told > 15
    pack(given(), tmp_path / "20", **OPTIONS, **more, disk=HastyDisk())
    assert bytes_in(tmp_path / "20") == bytes_in(whole)


def test_nothing_is_told_of_a_run_that_is_over(tmp_path):
    """Nor where it was stopped between its index and the removal of its record."""
    for at in itertools.count():
        folder = tmp_path / f"{at}"
        is_over = stop(folder, rows(0, 3), at)
        if is_over or (folder / INDEX_NAME).exists():
            assert verify(folder, workers=1).is_clean
            assert info(str(folder)).unfinished is None
            index_folder(folder, disk=HastyDisk())
        if is_over:
            break
    assert not (folder / RECORD_NAME).exists()
    assert (tmp_path / f"{at - 1}" / RECORD_NAME).exists() or list((tmp_path / f"{at - 1}").glob(".wdskit-pack*.log"))


def test_reshard_takes_no_part_for_the_whole(tmp_path):
    """Neither what `pack` has come to, nor what it has itself; shards that are named one by one are taken."""
    stop(tmp_path / "a", rows(0, 6), 25)
    for source in (str(tmp_path / "a"), str(tmp_path / "a" / "p-*.tar")):
        for command in (reshard, pack):
            with pytest.raises(FolderIndexError, match=r"a: `wdskit pack` has begun here and is not finished: 1 of 3 "):
                command(source, tmp_path / "b", disk=HastyDisk())
    assert reshard(str(tmp_path / "a" / "p-00.tar"), tmp_path / "b", disk=HastyDisk()).num_samples == 2
    with pytest.raises(Stopped):
        reshard(str(tmp_path / "b"), tmp_path / "c", max_samples=1, disk=StoppingDisk(25))
    assert is_told(tmp_path / "c")
    told = find_unfinished(tmp_path / "c")
    assert told is not None
    assert (told.command, told.num_there, told.num_shards) == ("reshard", 1, 2)
    with pytest.raises(FolderIndexError, match="Run the same `wdskit reshard` again"):
        index_folder(tmp_path / "c", disk=HastyDisk())


def test_parts_that_are_missing_are_told_until_finish(tmp_path):
    pack(rows(0, 6), tmp_path, **OPTIONS, part="1/3", disk=HastyDisk())
    told = find_unfinished(tmp_path)
    assert told is not None
    assert told.problem == "`wdskit pack` has begun here and is not finished: 1 of 3 shards are there"
    assert told.remedy == f"Run the parts that are missing, then `wdskit pack-finish {tmp_path}`."
    pack(rows(0, 6), tmp_path, **OPTIONS, part="0/3", disk=HastyDisk())
    pack(rows(0, 6), tmp_path, **OPTIONS, part="2/3", disk=HastyDisk())
    assert is_told(tmp_path)
    finish_pack(tmp_path, disk=HastyDisk())
    assert verify(tmp_path).is_clean


def test_what_a_run_that_replaces_has_left_can_still_be_indexed(tmp_path):
    """Its index is gone, and its shards are whole: that is the way back. `verify` tells of the run all the same."""
    pack(rows(0, 5), tmp_path, **OPTIONS, disk=HastyDisk())
    stop(tmp_path, rows(10, 12), 8, overwrite=True)
    assert not (tmp_path / INDEX_NAME).exists()
    assert is_told(tmp_path)
    index_folder(tmp_path, disk=HastyDisk())
    assert verify(tmp_path).is_clean


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"options": 1, "shards": [1], "replaces": 0}'])
def test_a_record_that_does_not_read_counts_as_a_run(tmp_path, text):
    pack(rows(0, 3), tmp_path, **OPTIONS, disk=HastyDisk())
    (tmp_path / RECORD_NAME).write_text(text)
    assert verify(tmp_path).is_clean  # its index is written last
    (tmp_path / INDEX_NAME).unlink()
    assert is_told(tmp_path)
    with pytest.raises(FolderIndexError, match=rf"remove {RECORD_NAME} first"):
        index_folder(tmp_path)
    (tmp_path / RECORD_NAME).unlink()
    index_folder(tmp_path)


def test_verify_does_not_send_anybody_to_index_what_is_not_finished(tmp_path, capsys):
    stop(tmp_path / "d", rows(0, 5), 25)
    for command, code in (("verify", 1), ("info", 0)):
        with pytest.raises(SystemExit) as end:
            app([command, str(tmp_path / "d")])
        told = " ".join(capsys.readouterr().out.split())
        assert end.value.code == code
        assert "`wdskit pack` has begun here and is not finished" in told
        assert "wdskit index" not in told


@pytest.mark.parametrize("is_once", [False, True], ids=["planned", "stream"])
def test_a_stream_of_a_part_is_refused_wherever_the_run_was_stopped(tmp_path, is_once):
    """As a folder and as a glob; shards that are named one by one are read."""
    for at in itertools.count(0, 3):
        folder = tmp_path / str(at)
        is_done = stop(folder, iter(rows(0, 5)) if is_once else rows(0, 5), at)
        shards = sorted(map(str, folder.glob("*.tar")))
        for pattern in (str(folder), f"{folder}/*.tar", [f"{folder}/p-*.tar"]) if shards else ():
            pipe = Pipeline().stream(pattern)
            if is_done or (folder / INDEX_NAME).exists():
                assert len(list(pipe.loader(workers=0))) == 5
                continue
            told = r"`wdskit pack` has begun here and is not finished"
            with pytest.raises(FolderIndexError, match=told) as err:
                pipe.loader(workers=0)
            of = "" if is_once else " of 3"
            assert f"finished: {len(shards)}{of} shard" in str(err.value)
            with pytest.raises(FolderIndexError, match=told):
                Pipeline().exact(pattern).loader(workers=0)
        if shards:
            assert list(Pipeline().stream(shards).loader(workers=0))
        if is_done:
            break
