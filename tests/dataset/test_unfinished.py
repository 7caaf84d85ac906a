"""A folder that `pack` has not finished is never taken for a whole one, wherever the run was stopped."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import ALL, HastyDisk, Stopped, WatchedDisk
from shards import bytes_in

from wdskit import (
    FolderIndexError,
    Pipeline,
    WdskitError,
    columns,
    finish_pack,
    info,
    pack,
    reshard,
    select,
    split,
    verify,
)
from wdskit.dataset import shard_table as table
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER
from wdskit.dataset.unfinished_runs import DESCRIPTION_NAME, find_unfinished, run_folders
from wdskit.shards.index import index_folder

OPTIONS: dict[str, Any] = {"max_samples": 2, "pattern": "p-%02d.tar"}


class StoppingDisk(WatchedDisk, HastyDisk):
    """A disk that stops the run at operation number `stop_at`, from 0; no later operation reaches the disk."""

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
    """Stop a run at an operation; return whether the run ended before that."""
    try:
        pack(given, folder, **OPTIONS, **options, disk=StoppingDisk(at))
    except Stopped:
        return False
    return True


def is_told(folder: Path) -> bool:
    return [one.kind for one in verify(folder, workers=1).findings if one.kind == "unfinished"] == ["unfinished"]


@pytest.mark.parametrize("kind", ["planned", "stream", "append"])
def test_a_run_that_was_stopped_anywhere_is_told_and_cannot_be_indexed(tmp_path, kind):
    """The same run can still be resumed, and ends with the same bytes."""
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
        filled = [name for name in there if name.startswith(RUN_FOLDER) and name.endswith(".tar")]
        told = find_unfinished(folder)
        if is_over or not filled:
            assert is_over or not [name for name in there if name.startswith("p-0")][2 * len(before) :] or told
            continue
        assert told is not None
        assert told.num_shards == (None if kind == "stream" else 3)
        assert told.num_filled == len(filled)
        with pytest.raises(FolderIndexError, match=r"\n.*Run the same `wdskit pack` again"):
            index_folder(folder, disk=HastyDisk())
        assert bytes_in(folder) == there
        if told.is_publishing and list(folder.glob("*.tar")):  # only then its shards are in the folder
            assert is_told(folder)
        elif before:
            assert info(str(folder)).unfinished == f"{told.problem}. {told.remedy}"
        else:
            with pytest.raises(FolderIndexError, match="no shard matches: a run here is unfinished"):
                info(str(folder))
        num_told += 1
    assert num_told > 15
    pack(given(), tmp_path / "20", **OPTIONS, **more, disk=HastyDisk())
    assert bytes_in(tmp_path / "20") == bytes_in(whole)


def test_nothing_is_told_of_a_run_that_is_over(tmp_path):
    """This includes a run that was stopped between its index and the removal of its staging folder."""
    for at in itertools.count():
        folder = tmp_path / f"{at}"
        is_over = stop(folder, rows(0, 3), at)
        if is_over or (folder / INDEX_NAME).exists():
            assert verify(folder, workers=1).is_clean
            assert info(str(folder)).unfinished is None
        if is_over:
            index_folder(folder, disk=HastyDisk())
            break
    assert not run_folders(folder)
    assert run_folders(tmp_path / f"{at - 3}")


NOT_FINISHED = "no shard matches: a run here is unfinished"


def stop_publishing(folder: Path) -> None:
    """Stop a run so that two of three shards have their final names, and no index exists."""
    for at in itertools.count():
        if len(list(folder.glob("*.tar"))) == 2:
            break
        shutil.rmtree(folder, ignore_errors=True)
        stop(folder, rows(0, 6), at)
    assert not (folder / INDEX_NAME).exists()


def test_reshard_takes_no_part_for_the_whole(tmp_path):
    """Neither the shards of an unfinished pack nor of an unfinished reshard; shards named one by one are accepted."""
    stop(tmp_path / "a", rows(0, 6), 45)
    assert run_folders(tmp_path / "a")
    for source in (str(tmp_path / "a"), str(tmp_path / "a" / "p-*.tar")):
        with pytest.raises(FolderIndexError, match=NOT_FINISHED):
            reshard(source, tmp_path / "b", disk=HastyDisk())
    stop_publishing(tmp_path / "d")
    for source in (str(tmp_path / "d"), str(tmp_path / "d" / "p-*.tar")):
        for command in (reshard, pack):
            with pytest.raises(FolderIndexError, match=r"d: `wdskit pack` was stopped here while it moved its shards"):
                command(source, tmp_path / "b", disk=HastyDisk())
    assert reshard(str(tmp_path / "d" / "p-00.tar"), tmp_path / "b", disk=HastyDisk()).num_samples == 2
    with pytest.raises(Stopped):
        reshard(str(tmp_path / "b"), tmp_path / "c", max_samples=1, disk=StoppingDisk(36))
    told = find_unfinished(tmp_path / "c")
    assert told is not None
    assert (told.command, told.num_filled, told.num_shards) == ("reshard", 1, 2)
    with pytest.raises(FolderIndexError, match="Run the same `wdskit reshard` again"):
        index_folder(tmp_path / "c", disk=HastyDisk())


def test_parts_that_are_missing_are_told_until_finish(tmp_path):
    pack(rows(0, 6), tmp_path, **OPTIONS, part="1/3", disk=HastyDisk())
    told = find_unfinished(tmp_path)
    assert told is not None
    assert told.problem == "a run of `wdskit pack` here is unfinished: 1 of 3 shards are filled"
    assert told.remedy == f"Run the parts that are missing, then `wdskit pack-finish {tmp_path}`."
    pack(rows(0, 6), tmp_path, **OPTIONS, part="0/3", disk=HastyDisk())
    pack(rows(0, 6), tmp_path, **OPTIONS, part="2/3", disk=HastyDisk())
    assert find_unfinished(tmp_path)
    finish_pack(tmp_path, disk=HastyDisk())
    assert verify(tmp_path).is_clean


def test_columns_do_not_change_while_an_addition_is_unfinished(tmp_path):
    """The added shards have the values of the columns that the folder had when the addition began."""
    pack(rows(0, 4), tmp_path, **OPTIONS, columns="cls", disk=HastyDisk())
    split(tmp_path, "a=0.5,b=0.5", disk=HastyDisk())
    before = (tmp_path / "columns.json").read_bytes()
    pack(rows(4, 8), tmp_path, **OPTIONS, append=True, part="0/2", disk=HastyDisk())
    for change in (
        lambda: split(tmp_path, "a=0.5,b=0.5", seed=2, overwrite=True),
        lambda: select(str(tmp_path), "few", filter="cls == 0"),
        lambda: index_folder(tmp_path, columns="other=cls"),
    ):
        with pytest.raises(FolderIndexError, match="Run the parts that are missing, then `wdskit pack-finish"):
            change()
    assert (tmp_path / "columns.json").read_bytes() == before
    pack(rows(4, 8), tmp_path, **OPTIONS, append=True, part="1/2", disk=HastyDisk())
    finish_pack(tmp_path, disk=HastyDisk())
    made = {name: np.array(columns(tmp_path)[name]).tolist() for name in columns(tmp_path)}
    assert list(made) == ["cls", "split"]
    index_folder(tmp_path)
    assert {name: np.array(columns(tmp_path)[name]).tolist() for name in columns(tmp_path)} == made


def test_what_is_being_replaced_is_whole_until_all_is_filled(tmp_path):
    pack(rows(0, 5), tmp_path, **OPTIONS, disk=HastyDisk())
    stop(tmp_path, rows(10, 16), 45, overwrite=True)
    assert is_told(tmp_path)
    assert info(str(tmp_path)).num_samples == 5
    assert len(list(Pipeline().exact(str(tmp_path)).loader(workers=0))) == 5
    shutil.rmtree(tmp_path / RUN_FOLDER)  # the run is given up
    assert verify(tmp_path).is_clean


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"options": 1, "shards": [1], "parts": 0}'])
def test_a_description_that_does_not_read_counts_as_a_run(tmp_path, text):
    pack(rows(0, 3), tmp_path, **OPTIONS, disk=HastyDisk())
    (tmp_path / RUN_FOLDER / ("0" * 16)).mkdir(parents=True)
    (tmp_path / RUN_FOLDER / ("0" * 16) / DESCRIPTION_NAME).write_text(text)
    assert is_told(tmp_path)
    with pytest.raises(FolderIndexError, match=rf"remove .*/{RUN_FOLDER} first"):
        index_folder(tmp_path)
    shutil.rmtree(tmp_path / RUN_FOLDER)
    index_folder(tmp_path)


def test_nobody_is_sent_to_index_what_is_not_finished(tmp_path, run):
    stop(tmp_path / "filling", rows(0, 6), 45)
    stop_publishing(tmp_path / "publishing")
    for name, problem in (("filling", "here is unfinished"), ("publishing", "was stopped here while")):
        for command in ("verify", "info"):
            code, out, err = run(command, str(tmp_path / name))
            assert code == (0 if (name, command) == ("publishing", "info") else 1)
            told = " ".join((out + err).split())
            assert problem in told
            assert "wdskit index" not in told


@pytest.mark.parametrize("is_once", [False, True], ids=["planned", "stream"])
def test_a_stream_of_a_part_is_refused_wherever_the_run_was_stopped(tmp_path, is_once):
    """This holds for a folder and for a glob; shards named one by one are read."""
    for at in itertools.count(0, 3):
        folder = tmp_path / str(at)
        is_done = stop(folder, iter(rows(0, 5)) if is_once else rows(0, 5), at)
        shards = sorted(map(str, folder.glob("*.tar")))
        for pattern in (
            (str(folder), f"{folder}/*.tar", [f"{folder}/p-*.tar"]) if find_unfinished(folder) or shards else ()
        ):
            pipe = Pipeline().stream(pattern)
            if is_done or (folder / INDEX_NAME).exists():
                assert len(list(pipe.loader(workers=0))) == 5
                continue
            told = r"`wdskit pack` was stopped here while it moved|a run .*here is unfinished"
            with pytest.raises(FolderIndexError, match=told):
                pipe.loader(workers=0)
            with pytest.raises(FolderIndexError, match=told):
                Pipeline().exact(pattern).loader(workers=0)
        if shards:
            assert list(Pipeline().stream(shards).loader(workers=0))
        if is_done:
            break


READS = [(os, "stat"), (os, "lstat"), (os, "open"), (os, "listdir"), (os, "scandir"), (io, "open")]


def interrupted(folder: Path, at: int, work: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Read all samples, and call `work` before file operation number `at` in the folder, if there is one."""
    number = itertools.count()
    is_busy = False

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **more: Any) -> Any:
            nonlocal is_busy
            if not is_busy and not isinstance(path, int) and str(folder) in str(path) and next(number) == at:
                is_busy = True
                work()
                is_busy = False
            return function(path, *args, **more)

        return call

    for module, name in READS:
        patch.setattr(module, name, watched(getattr(module, name)))
    found = {sample["__key__"] for sample in Pipeline().exact(str(folder)).loader(workers=0)}
    assert found in ({row["__key__"] for row in rows(0, 5)}, {row["__key__"] for row in rows(10, 16)})


def test_a_folder_whose_replacement_ends_in_the_middle_of_a_read_is_read_or_refused(tmp_path, monkeypatch):
    """For each step of the replacement, it is completed before each file operation of the reader."""
    given = rows(10, 16)

    ended = []

    def finish() -> None:
        ended.append(folder)
        pack(given, folder, **OPTIONS, overwrite=True, disk=HastyDisk())

    num_read = num_refused = 0
    for step in itertools.count(0 if ALL else 40, 1 if ALL else 18):
        start = tmp_path / f"{step}"
        pack(rows(0, 5), start, **OPTIONS, disk=HastyDisk())
        is_over = stop(start, given, step, overwrite=True)
        for at in itertools.count(0 if ALL else step % 3, 1 if ALL else 3):
            folder = shutil.copytree(start, tmp_path / "copy" / f"{step}-{at}")
            with monkeypatch.context() as patch:
                try:
                    interrupted(folder, at, finish, patch)
                    num_read += 1
                except WdskitError:
                    num_refused += 1
            shutil.rmtree(folder)
            if folder not in ended:
                break
        if is_over:
            break
    assert num_read > 5
    assert num_refused > 5


def test_a_replacement_that_ends_after_its_index_was_missed_is_read(tmp_path, monkeypatch):
    for step in itertools.count(60):
        folder = tmp_path / f"{step}"
        pack(rows(0, 5), folder, **OPTIONS, disk=HastyDisk())
        assert not stop(folder, rows(10, 16), step, overwrite=True)
        if not (folder / INDEX_NAME).exists():
            break

    def ended(path: Path) -> object:
        pack(rows(10, 16), folder, **OPTIONS, overwrite=True, disk=HastyDisk())
        return find_unfinished(path)

    monkeypatch.setattr(table, "find_unfinished", ended)
    assert len(list(Pipeline().exact(str(folder)).loader(workers=0))) == 6


class KilledBeforeTheEnd(HastyDisk):
    """Stops before the journal of a published run is removed."""

    def remove(self, path: Any) -> None:
        if Path(path).name == INDEX_NAME and RUN_FOLDER in str(path):
            raise Stopped
        super().remove(path)


def test_columns_do_not_change_before_a_published_run_has_removed_its_journal(tmp_path):
    """The same command performs the journal again, with the columns of the run."""
    with pytest.raises(Stopped):
        pack(rows(0, 6), tmp_path, **OPTIONS, columns="cls", disk=KilledBeforeTheEnd())
    assert len(list(Pipeline().exact(str(tmp_path)).loader(workers=0))) == 6
    for change in (
        lambda: split(tmp_path, "a=0.5,b=0.5"),
        lambda: select(str(tmp_path), "few", filter="cls == 0"),
        lambda: index_folder(tmp_path, columns="other=cls"),
    ):
        with pytest.raises(FolderIndexError, match="Run the same `wdskit pack` again"):
            change()
    pack(rows(0, 6), tmp_path, **OPTIONS, columns="cls", disk=HastyDisk())
    split(tmp_path, "a=0.5,b=0.5")
    pack(rows(0, 6), tmp_path, **OPTIONS, columns="cls", disk=HastyDisk())
    assert list(columns(tmp_path)) == ["cls", "split"]
