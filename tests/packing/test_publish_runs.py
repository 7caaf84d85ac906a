"""Runs that are stopped, changed, restarted, replaced, divided into parts or repeated for one shard."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disks import HastyDisk, KillingDisk, Stopped, StoppingDisk, WatchedDisk, final_name, killed, run_child
from images import make_folder
from pack_cases import staged
from shards import bytes_in, samples_in

import wdskit
from wdskit import FolderIndexError, PackError, finish_pack, pack, split
from wdskit.dataset.index import RUN_FOLDER, read_index
from wdskit.dataset.lock import lock_folder, share_folder
from wdskit.packing import publish, run_journal
from wdskit.packing.options import parse_part
from wdskit.packing.run_journal import DESCRIPTION_NAME, JOURNAL_NAME, RunDescription, read_description, read_filled

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))
OPTIONS: dict[str, Any] = {"max_samples": 2, "pattern": "p-%02d.tar"}


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(start, stop)]


def packed(folder: Path, given: Any, **options: Any) -> dict[str, bytes]:
    """Return the files of an uninterrupted run."""
    pack(given, folder, **{**OPTIONS, **options}, disk=HastyDisk())
    return bytes_in(folder)


def stop(folder: Path, given: Any, num_shards: int, **options: Any) -> dict[str, bytes]:
    """Kill a run when it has published this number of shards and logged them; return the remaining files."""

    class Killer(StoppingDisk):
        def after(self, name, *args):
            if name == "close" and self.operations.count("open_log") == num_shards + 1:  # the log is created first
                self.kill_at = len(self.operations)

    with pytest.raises(Stopped):
        pack(given, folder, **{**OPTIONS, **options}, disk=Killer(sys.maxsize))
    assert len(list(staged(folder).glob("*.tar"))) == num_shards
    return bytes_in(folder)


def visible(folder: Path) -> list[str]:
    return [name for name in bytes_in(folder) if not name.startswith(".")]


# Resuming.


def test_what_is_published_is_not_read_again(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 9})
    whole = packed(tmp_path / "whole", source)
    stop(tmp_path / "out", source, 3)
    read = []
    disk = WatchedDisk()
    disk.before = lambda name, *args: read.append(args[0].name) if name == "open" else None
    pack(source, tmp_path / "out", **OPTIONS, disk=disk)
    assert bytes_in(tmp_path / "out") == whole
    names = [final_name(name) for name in read]
    assert [name for name in names if name.endswith(".tar")] == ["p-03.tar", "p-04.tar"]


def test_a_stopped_run_may_go_on_with_other_workers_and_from_disk(tmp_path, monkeypatch):
    source = make_folder(tmp_path / "photos", {"cat": 9})
    whole = packed(tmp_path / "whole", source, shuffle=3)
    stop(tmp_path / "out", source, 2, shuffle=3)
    monkeypatch.setattr("wdskit.packing.plan.ROWS_IN_MEMORY", 2)
    pack(source, tmp_path / "out", **OPTIONS, shuffle=3, workers=2)
    assert bytes_in(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["cut", "gone", "offsets", "log", "noise"])
def test_what_is_no_longer_there_is_packed_again(tmp_path, damage):
    """Examples are a cut shard, missing shards and offsets, and a missing or damaged log."""
    whole = packed(tmp_path / "whole", rows(0, 9))
    stop(tmp_path / "out", rows(0, 9), 3)
    shard, log = staged(tmp_path / "out") / "p-01.tar", staged(tmp_path / "out") / "shards.log"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:1024])
    elif damage == "gone":
        shard.unlink()
    elif damage == "offsets":
        shard.with_name("p-01.tar.idx").unlink()
    elif damage == "log":
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[:-40] + b'\n[]\n["x"]\n7\n\xff\n{"a": 1}\n')
    pack(rows(0, 9), tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") == whole


def test_a_stream_goes_on_and_writes_nothing_twice(tmp_path):
    whole = packed(tmp_path / "whole", iter(rows(0, 9)))
    assert run_child(lambda: pack(iter(rows(0, 9)), tmp_path / "out", **OPTIONS, disk=KillingDisk(45))) == -9
    there = {*read_filled(staged(tmp_path / "out"))}
    assert there
    disk = WatchedDisk()
    opened = []
    disk.before = lambda name, *args: opened.append(args[0].name) if name == "open" else None
    pack(iter(rows(0, 9)), tmp_path / "out", **OPTIONS, disk=disk)
    assert bytes_in(tmp_path / "out") == whole
    assert not there & {*map(final_name, opened)}


# Changed sources and options.

CHANGES = {
    "max_samples": ({"max_samples": 3}, "max_samples was 2 and is 3."),
    "shuffle": ({"shuffle": 1}, "shuffle was None and is 1."),
    "pattern": ({"pattern": "q-%02d.tar"}, "pattern was 'p-%02d.tar' and is 'q-%02d.tar'."),
    "keys": ({"keys": "hashed"}, "keys was 'given' and is 'hashed'."),
    "num_shards": ({"num_shards": 5}, "num_shards was None and is 5."),
    "skip_bad": ({"skip_bad": True}, "skip_bad was False and is True."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_option_is_refused_by_its_name(tmp_path, change):
    options, message = CHANGES[change]
    left = stop(tmp_path / "out", rows(0, 9), 2)
    with pytest.raises(PackError) as caught:
        pack(rows(0, 9), tmp_path / "out", **{**OPTIONS, **options})
    assert "out: a different run was stopped here; 2 of its shards are there.\n" in str(caught.value)
    assert f"\n  {message}\n" in str(caught.value)
    assert "--restart" in str(caught.value)
    assert bytes_in(tmp_path / "out") == left
    pack(rows(0, 9), tmp_path / "out", **{**OPTIONS, **options}, restart=True)
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", rows(0, 9), **options)


OTHER_ROWS = "the rows of the source are different: a file was changed"


def test_another_row_is_refused(tmp_path):
    """The row was added or removed, or has another content, key or position."""
    nine = rows(0, 9)
    cases = [
        (rows(0, 10), "the source had 9 rows and has 10."),
        (rows(0, 8), "the source had 9 rows and has 8."),
        ([*nine[:4], {**nine[4], "cls": 5}, *nine[5:]], OTHER_ROWS),
        ([*nine[:7], nine[8], nine[7]], OTHER_ROWS),
        ([{**nine[0], "__key__": "x"}, *nine[1:]], OTHER_ROWS),
    ]
    left = stop(tmp_path / "out", nine, 2)
    for given, message in cases:
        with pytest.raises(PackError) as caught:
            pack(given, tmp_path / "out", **OPTIONS)
        assert message in str(caught.value)
        assert bytes_in(tmp_path / "out") == left
    given = cases[3][0]
    pack(given, tmp_path / "out", **OPTIONS, restart=True)
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", given)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_that_was_written_again_is_told(tmp_path, monkeypatch, on_disk):
    if on_disk:
        monkeypatch.setattr("wdskit.packing.plan.ROWS_IN_MEMORY", 2)
    source = make_folder(tmp_path / "photos", {"cat": 9})
    stop(tmp_path / "out", source, 2)
    os.utime(source / "cat" / "0005.jpg", (1, 1))
    with pytest.raises(PackError, match=OTHER_ROWS):
        pack(source, tmp_path / "out", **OPTIONS)


def test_another_version_is_refused(tmp_path, monkeypatch):
    stop(tmp_path / "out", rows(0, 9), 2)
    monkeypatch.setattr(RunDescription.__init__, "__defaults__", ((0,), "9.9", 0))
    with pytest.raises(PackError, match=rf"wdskit was {wdskit.__version__} and is 9\.9"):
        pack(rows(0, 9), tmp_path / "out", **OPTIONS)


def test_a_run_that_has_published_nothing_is_forgotten(tmp_path):
    """Its staging folder is removed."""
    assert run_child(lambda: pack(rows(0, 9), tmp_path / "out", **OPTIONS, disk=KillingDisk(22))) == -9
    assert (staged(tmp_path / "out") / DESCRIPTION_NAME).exists()
    pack(rows(0, 5), tmp_path / "out", **OPTIONS)
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", rows(0, 5))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"wdskit_run": 1}', "[" * 9999, '{"wdskit_run": 2, "shards": 5}'])
def test_a_description_that_cannot_be_read_is_an_error(tmp_path, text):
    (tmp_path / "out" / RUN_FOLDER / ("0" * 16)).mkdir(parents=True)
    (tmp_path / "out" / RUN_FOLDER / ("0" * 16) / DESCRIPTION_NAME).write_text(text)
    with pytest.raises(
        PackError, match=r"run.json: this version of wdskit cannot read this description of a run.\n.*remove"
    ):
        pack(rows(0, 5), tmp_path / "out", **OPTIONS)


def test_a_description_is_small_deterministic_and_read_back(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 9})
    for name in ("a", "b"):
        stop(tmp_path / name, source, 2)
    a, b = staged(tmp_path / "a"), staged(tmp_path / "b")
    data = (a / DESCRIPTION_NAME).read_bytes()
    assert (a.name, data) == (b.name, (b / DESCRIPTION_NAME).read_bytes())
    found = read_description(a)
    assert found.to_json() == data
    assert found.digest == a.name
    assert len(data) < 5000
    assert [shard.name for shard in found.shards] == [f"p-{n:02d}.tar" for n in range(5)]


# Restarts.


def test_beginning_anew_removes_what_the_run_wrote_and_nothing_else(tmp_path):
    packed(tmp_path / "same", rows(0, 9))
    stop(tmp_path / "out", rows(0, 9), 3)
    (tmp_path / "out" / "p-00.tar").write_bytes((tmp_path / "same" / "p-00.tar").read_bytes())  # a copy by the user
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(PackError, match=r"p-00.tar: this file exists already and is in the way"):
        pack(rows(0, 4), tmp_path / "out", max_samples=1, pattern="p-%02d.tar", restart=True)
    assert visible(tmp_path / "out") == ["notes.txt", "p-00.tar"]
    (tmp_path / "out" / "p-00.tar").unlink()
    pack(rows(0, 4), tmp_path / "out", max_samples=1, pattern="p-%02d.tar", restart=True)
    assert list(samples_in(tmp_path / "out")) == ["00", "01", "02", "03"]
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def with_duplicates(folder: Path) -> Path:
    """Five images, two of which are equal."""
    source = make_folder(folder, {"cat": 4})
    (source / "cat" / "0009.jpg").write_bytes((source / "cat" / "0002.jpg").read_bytes())
    return source


def test_wherever_a_run_was_stopped_another_one_may_begin_anew(tmp_path):
    """No file of the first run is left, not even a list of all shards, which it wrote just before the index."""
    source = with_duplicates(tmp_path / "photos")
    disk = WatchedDisk()
    pack(source, tmp_path / "whole", duplicates="report", disk=disk, **OPTIONS)
    assert "duplicates.jsonl" in bytes_in(tmp_path / "whole")
    wanted = packed(tmp_path / "wanted", source, shuffle=1)
    first = disk.operations.index("open_log")  # the first logged shard
    for number in range(first, len(disk.operations), 1 if ALL else 5):
        folder = tmp_path / f"{number}"
        run = KillingDisk(number)
        run_child(lambda: pack(source, folder, duplicates="report", disk=run, **OPTIONS))  # noqa: B023
        if not (folder / "index.json").exists() and not (staged(folder) / JOURNAL_NAME).exists():
            pack(source, folder, shuffle=1, restart=True, disk=HastyDisk(), **OPTIONS)
            assert bytes_in(folder) == wanted


def test_a_stream_may_begin_anew(tmp_path):
    assert run_child(lambda: pack(iter(rows(0, 9)), tmp_path / "out", **OPTIONS, disk=KillingDisk(60))) == -9
    with pytest.raises(PackError, match="max_samples was 2 and is 1"):
        pack(iter(rows(0, 9)), tmp_path / "out", **{**OPTIONS, "max_samples": 1})
    pack(iter(rows(0, 9)), tmp_path / "out", **{**OPTIONS, "max_samples": 1}, restart=True)
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", iter(rows(0, 9)), max_samples=1)


def test_an_addition_that_was_stopped_may_begin_anew(tmp_path):
    packed(tmp_path / "out", rows(0, 3))
    before = bytes_in(tmp_path / "out")
    stopped = stop(tmp_path / "whole", rows(0, 9), 4)
    assert run_child(lambda: pack(rows(3, 9), tmp_path / "out", append=True, **OPTIONS, disk=KillingDisk(50))) == -9
    assert before.items() <= bytes_in(tmp_path / "out").items()
    with pytest.raises(PackError, match="the source had 6 rows and has 4"):
        pack(rows(3, 7), tmp_path / "out", append=True, **OPTIONS)
    pack(rows(3, 7), tmp_path / "out", append=True, restart=True, **OPTIONS)
    assert list(samples_in(tmp_path / "out")) == [f"{n:02d}" for n in range(7)]
    assert not [name for name in bytes_in(tmp_path / "out") if name.startswith(".")]
    assert stopped


# Replacing.


def with_split(folder: Path) -> None:
    packed(folder, [*rows(20, 27), 5], skip_bad=True)
    split(folder, "a=0.5,b=0.5", disk=HastyDisk())


def test_a_packed_folder_is_replaced_only_when_that_is_said(tmp_path):
    whole = packed(tmp_path / "whole", rows(0, 5))
    with_split(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = bytes_in(tmp_path / "out")
    with pytest.raises(PackError, match=r"packed and indexed already, .*\n  skip_bad was .*\n.*replace it with --over"):
        pack(rows(0, 5), tmp_path / "out", **OPTIONS)
    with pytest.raises(wdskit.RowError):
        pack([*rows(0, 4), 5], tmp_path / "out", overwrite=True, **OPTIONS)
    pack(rows(0, 5), tmp_path / "out", overwrite=True, dry_run=True, **OPTIONS)
    assert bytes_in(tmp_path / "out") == before  # a plan that fails, or a dry run, replaces nothing
    pack(rows(0, 5), tmp_path / "out", overwrite=True, **OPTIONS)
    assert bytes_in(tmp_path / "out") == {**whole, "notes.txt": b"mine"}
    pack(iter(rows(0, 5)), tmp_path / "out", overwrite=True, **OPTIONS)
    assert bytes_in(tmp_path / "out") == {**whole, "notes.txt": b"mine"}
    assert packed(tmp_path / "new", rows(0, 5), overwrite=True) == whole


def test_the_list_of_duplicates_is_replaced_too(tmp_path):
    source = with_duplicates(tmp_path / "photos")
    assert "duplicates.jsonl" in packed(tmp_path / "out", source, duplicates="report")
    assert packed(tmp_path / "out", source, overwrite=True) == packed(tmp_path / "new", source)


def test_strange_shards_are_not_replaced(tmp_path):
    packed(tmp_path / "out", rows(0, 5))
    (tmp_path / "out" / "other.tar").write_text("mine")
    before = bytes_in(tmp_path / "out")
    with pytest.raises(PackError, match=r"other.tar: this shard is in no index"):
        pack(rows(0, 9), tmp_path / "out", overwrite=True, **OPTIONS)
    assert bytes_in(tmp_path / "out") == before


@pytest.mark.parametrize("given", [rows(0, 5), None], ids=["planned", "stream"])
def test_replacing_may_be_killed_at_each_operation(tmp_path, given):
    """An index never exists next to shards that it does not list, and the same call then completes."""
    make = (lambda: given) if given else (lambda: iter(rows(0, 5)))
    whole = packed(tmp_path / "whole", make())
    with_split(tmp_path / "old")
    old = bytes_in(tmp_path / "old")
    number, ended = 0, False
    while not ended:
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "old", folder)
        ended = not killed(lambda disk: pack(make(), folder, overwrite=True, **OPTIONS, disk=disk), number, half=True)  # noqa: B023
        left = {name: data for name, data in bytes_in(folder).items() if not name.startswith(".")}
        if "index.json" in left:
            assert left in (old, whole)
        if bytes_in(folder) != whole:
            pack(make(), folder, overwrite=True, **OPTIONS, disk=HastyDisk())
            assert bytes_in(folder) == whole
        number += 1 if ALL else 3
    assert number > 40


def test_what_is_replaced_stays_whole_until_all_is_filled(tmp_path):
    """After that the replacement is final: the next pack into the folder completes it first."""
    with_split(tmp_path / "old")
    old = bytes_in(tmp_path / "old")
    num_kept = num_decided = number = 0
    while True:
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "old", folder)
        ended = not killed(lambda disk: pack(rows(0, 5), folder, overwrite=True, **OPTIONS, disk=disk), number)  # noqa: B023
        if not (staged(folder) / JOURNAL_NAME).exists() and not ended and read_index(folder).num_samples == 7:
            finals = {name: data for name, data in bytes_in(folder).items() if not name.startswith(".")}
            assert finals == old
            with pytest.raises(PackError, match="packed and indexed already"):
                pack(rows(0, 5), folder, **OPTIONS, disk=HastyDisk())
            num_kept += 1
        else:
            assert pack(rows(0, 5), folder, **OPTIONS, disk=HastyDisk()).was_done
            assert list(samples_in(folder)) == [f"{n:02d}" for n in range(5)]
            assert not list(folder.glob("*.npy"))
            read_index(str(folder)).check_files()
            num_decided += 1
        if ended:
            break
        number += 1 if ALL else 3
    assert num_kept > 10
    assert num_decided > 5


def test_a_folder_that_was_not_replaced_after_all_can_be_added_to(tmp_path):
    """The run is killed before it removes the old index. Shards filled for the replacement are removed on request."""
    packed(tmp_path / "old", rows(20, 24))
    for number in itertools.count(0, 1 if ALL else 4):
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{number}")
        killed(lambda disk: pack(rows(0, 5), folder, overwrite=True, **OPTIONS, disk=disk), number)  # noqa: B023
        if (staged(folder) / JOURNAL_NAME).exists() or read_index(folder).num_samples == 5:
            break
        if (staged(folder) / "shards.log").exists() and (staged(folder) / "shards.log").stat().st_size:
            with pytest.raises(PackError, match="a different run was stopped here"):
                pack(rows(30, 31), folder, append=True, **OPTIONS, disk=HastyDisk())
        pack(rows(30, 31), folder, append=True, restart=True, **OPTIONS, disk=HastyDisk())
        assert list(samples_in(folder)) == ["20", "21", "22", "23", "30"]
        assert not [name for name in bytes_in(folder) if name.startswith(".")]
    assert number > 20


# Parts.


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_in_any_order_make_what_one_run_makes(tmp_path, num_parts):
    source = make_folder(tmp_path / "photos", {"cat": 6, "dog": 5})
    (source / "cat" / "0001.jpg").write_bytes(b"bad")
    options = {"skip_bad": True, "shuffle": 2}
    whole = packed(tmp_path / "whole", source, **options)
    order = [*range(num_parts)][::-1] if num_parts % 2 else [*range(num_parts)]
    for place, part in enumerate(order):
        done = pack(source, tmp_path / "out", part=f"{part}/{num_parts}", **OPTIONS, **options, disk=HastyDisk())
        assert [entry.name for entry in done.entries] == [f"p-{n:02d}.tar" for n in range(part, 5, num_parts)]
        assert not (tmp_path / "out" / "index.json").exists()
        if place + 1 < min(num_parts, 5):
            with pytest.raises(PackError, match=r"shards are missing: p-0.*\n.*--part"):
                finish_pack(tmp_path / "out")
    result = finish_pack(tmp_path / "out", disk=HastyDisk())
    assert bytes_in(tmp_path / "out") == whole
    assert result.num_samples == 10
    assert finish_pack(tmp_path / "out").was_done


def test_missing_parts_are_named(tmp_path):
    pack(rows(0, 12), tmp_path / "out", part="1/4", **OPTIONS)
    (staged(tmp_path / "out") / "p-05.tar").unlink()
    with pytest.raises(PackError) as caught:
        finish_pack(tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path}/out: 5 of 6 shards are missing: p-00.tar, p-02.tar, p-03.tar, p-04.tar, p-05.tar.\n"
        "  Run the same command again with --part 0/4, 1/4, 2/4, 3/4."
    )


def test_a_run_without_parts_does_what_is_left(tmp_path):
    whole = packed(tmp_path / "whole", rows(0, 12))
    pack(rows(0, 12), tmp_path / "out", part="1/4", **OPTIONS)
    pack(rows(0, 12), tmp_path / "out", part="0/3", **OPTIONS)  # other parts, after the first ones are complete
    pack(rows(0, 12), tmp_path / "out", workers=2, **OPTIONS)
    assert bytes_in(tmp_path / "out") == whole


def test_an_addition_may_be_made_in_parts(tmp_path):
    for name in ("whole", "out"):
        packed(tmp_path / name, rows(0, 3))
    whole = packed(tmp_path / "whole", rows(3, 9), append=True)
    for part in range(2):
        pack(rows(3, 9), tmp_path / "out", append=True, part=f"{part}/2", **OPTIONS)
    finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == whole


def test_a_part_of_something_else_is_refused_and_the_first_may_begin_anew(tmp_path):
    pack(rows(0, 12), tmp_path / "out", part="0/2", **OPTIONS)
    with pytest.raises(PackError, match="the source had 12 rows and has 9"):
        pack(rows(0, 9), tmp_path / "out", part="1/2", **OPTIONS)
    for part in range(2):  # with the same arguments, as in an array of jobs: the second removes nothing
        pack(rows(0, 9), tmp_path / "out", part=f"{part}/2", restart=True, **OPTIONS)
    finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", rows(0, 9))


def test_parts_run_beside_each_other_and_nothing_else_does(tmp_path):
    pack(rows(0, 12), tmp_path / "out", part="0/3", **OPTIONS)
    with share_folder(tmp_path / "out"):
        pack(rows(0, 12), tmp_path / "out", part="1/3", **OPTIONS)
        for call in (
            lambda: pack(rows(0, 12), tmp_path / "out", **OPTIONS),
            lambda: finish_pack(tmp_path / "out"),
        ):
            with pytest.raises(FolderIndexError, match="another wdskit process is writing"):
                call()
        with pytest.raises(PackError, match="divided into 3 parts, some of which are running"):
            pack(rows(0, 12), tmp_path / "out", part="2/4", **OPTIONS)
        with pytest.raises(PackError, match="other parts of that run are running"):
            pack(rows(0, 9), tmp_path / "out", part="2/3", restart=True, **OPTIONS)
    with lock_folder(tmp_path / "out"), pytest.raises(FolderIndexError, match="another wdskit process is writing"):
        pack(rows(0, 12), tmp_path / "out", part="2/3", **OPTIONS)
    with (
        lock_folder(tmp_path / "out" / RUN_FOLDER, "part-2-of-3.lock"),
        pytest.raises(FolderIndexError, match="part 2/3 is running already"),
    ):
        pack(rows(0, 12), tmp_path / "out", part="2/3", **OPTIONS)
    pack(rows(0, 12), tmp_path / "out", part="2/3", **OPTIONS)
    finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", rows(0, 12))


def test_parts_that_start_at_once_are_all_done(tmp_path):
    source = make_folder(tmp_path / "photos", {"cat": 40})
    whole = packed(tmp_path / "whole", source)
    command = [sys.executable, "-c", "from wdskit.cli import main; main()", "pack", source, tmp_path / "out"]
    command += ["--max-samples", "2", "--pattern", "p-%02d.tar"]
    parts = [
        subprocess.Popen([*command, "--part", f"{part}/3", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for part, words in enumerate(([], ["--workers", "2"], []))
    ]
    assert [part.communicate()[1] for part in parts] == [b""] * 3
    finish_pack(tmp_path / "out", disk=HastyDisk())
    assert bytes_in(tmp_path / "out") == whole


def test_a_part_removes_its_own_temporary_files_and_not_those_of_a_running_part(tmp_path):
    pack(rows(0, 12), tmp_path / "out", part="0/3", **OPTIONS)
    own, other = (staged(tmp_path / "out") / f".p-0{number}.tar.0badcafe.wdskit-temp" for number in (4, 5))
    for path in (own, other):
        path.write_bytes(b"half")
    with share_folder(tmp_path / "out"):
        pack(rows(0, 12), tmp_path / "out", part="1/3", **OPTIONS)
    assert not own.exists()
    assert other.exists()
    pack(rows(0, 12), tmp_path / "out", part="2/3", **OPTIONS)
    finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == packed(tmp_path / "whole", rows(0, 12))


def test_a_part_and_finishing_may_be_killed_at_each_operation(tmp_path):
    whole = packed(tmp_path / "whole", rows(0, 7))
    for what in ("part", "finish"):
        number, ended = 0, False
        while not ended:
            folder = tmp_path / f"{what}{number}"

            def part(at: int, disk: Any) -> None:
                pack(rows(0, 7), folder, part=f"{at}/2", **OPTIONS, disk=disk)  # noqa: B023

            part(1, HastyDisk())
            if what == "finish":
                part(0, HastyDisk())
            run = (lambda disk: part(0, disk)) if what == "part" else (lambda disk: finish_pack(folder, disk=disk))  # noqa: B023
            ended = not killed(run, number, half=True)
            left = {name: data for name, data in bytes_in(folder).items() if not name.startswith(".")}
            assert left.items() <= whole.items()
            assert "index.json" not in left or left == whole
            if bytes_in(folder) != whole:
                part(0, HastyDisk())
                finish_pack(folder, disk=HastyDisk())
                assert bytes_in(folder) == whole
            number += 1
        assert number > 10


@pytest.mark.parametrize("text", ["", "1", "8/8", "-1/8", "1/0", "1 / 2", "a/b", "1/2/3", "٣/8"])
def test_what_is_no_part_is_refused(text, tmp_path):
    with pytest.raises(PackError, match=r"is not a part. The parts of 8 are 0/8 to 7/8"):
        pack(rows(0, 3), tmp_path / "out", part=text)
    assert parse_part("07/8") == (7, 8)


@pytest.mark.parametrize("text", ["3/3", "9/3"])
def test_a_part_beyond_the_last_is_told_how_many_there_are(text, tmp_path):
    with pytest.raises(PackError, match=rf"'{text}' is not a part. The parts of 3 are 0/3 to 2/3\."):
        pack(rows(0, 3), tmp_path / "out", part=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "0/2", "overwrite": True}, "overwrite and part cannot be combined"),
        ({"append": True, "overwrite": True}, "append and overwrite cannot be combined"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        pack(rows(0, 3), tmp_path / "out", **options)
    with pytest.raises(PackError, match=r"only once|cannot be combined"):
        pack(iter(rows(0, 3)), tmp_path / "out", **options)


def test_finishing_what_was_not_begun_is_an_error(tmp_path):
    with pytest.raises(PackError, match="there is no such folder"):
        finish_pack(tmp_path / "out")
    with pytest.raises(PackError, match="no part of a run was packed here"):
        finish_pack(tmp_path)


def test_a_run_that_is_not_divided_is_not_finished_without_its_lists(tmp_path):
    """All its shards exist and are logged, but `classes.json` is missing."""
    source = make_folder(tmp_path / "photos", {"cat": 3})
    left = stop(tmp_path / "out", source, 2)
    with pytest.raises(
        PackError, match=r"the run that was stopped here is not divided into parts.\n  Run the same command again"
    ):
        finish_pack(tmp_path / "out")
    assert bytes_in(tmp_path / "out") == left
    assert packed(tmp_path / "out", source) == packed(tmp_path / "whole", source)


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "offsets"])
def test_a_lost_or_damaged_shard_is_filled_again_by_overwrite(tmp_path, damage):
    whole = packed(tmp_path / "out", rows(0, 9), shuffle=1)
    shard = tmp_path / "out" / "p-02.tar"
    if damage == "gone":
        shard.unlink()
    elif damage == "offsets":
        shard.with_name("p-02.tar.idx").unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[600] ^= 1
        shard.write_bytes(data[: 1000 if damage == "cut" else None])
    pack(rows(0, 9), tmp_path / "out", overwrite=True, shuffle=1, **OPTIONS)
    assert bytes_in(tmp_path / "out") == whole


# Mutants.


def test_replacing_that_removes_the_index_last_is_caught(tmp_path, monkeypatch):
    true_remove = publish.Destination._remove
    monkeypatch.setattr(publish.Destination, "_remove", lambda dest, names: len(names) > 1 and true_remove(dest, names))
    with pytest.raises((AssertionError, FolderIndexError)):
        test_replacing_may_be_killed_at_each_operation(tmp_path, rows(0, 5))


def test_a_run_that_trusts_its_log_more_than_the_disk_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(run_journal, "has_shard", lambda folder, entry: True)
    with pytest.raises((AssertionError, FolderIndexError, PackError)):
        test_what_is_no_longer_there_is_packed_again(tmp_path, "gone")


def test_a_run_that_sees_no_change_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "differences", lambda *_: [])
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_another_row_is_refused(tmp_path)


def test_a_log_line_is_json(tmp_path):
    stop(tmp_path / "out", rows(0, 9), 2)
    lines = (staged(tmp_path / "out") / "shards.log").read_text().split("\n")
    assert [json.loads(line)[0] for line in lines if line] == ["p-00.tar", "p-01.tar"]


def test_restart_gives_up_an_overwrite_that_was_stopped(tmp_path):
    """The folder still holds all of the first run, so nothing else has to be done."""
    folder = tmp_path / "out"
    expected = packed(folder, rows(0, 9))
    stop(folder, rows(0, 9), 2, max_samples=1, overwrite=True)
    assert not wdskit.verify(str(folder)).is_clean
    assert pack(rows(0, 9), folder, **OPTIONS, restart=True).was_done
    assert bytes_in(folder) == expected
    assert not (folder / RUN_FOLDER).exists()
    assert wdskit.verify(str(folder)).is_clean
