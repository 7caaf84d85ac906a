"""Runs that are killed while they publish: the next command completes them. The same command on a finished folder.

WDSKIT_ALL_FAULTS=1 (`make faults`) kills each kind of run at each operation; otherwise at a part of them.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import ALL, FailingDisk, HastyDisk, KillingDisk, PowerLossDisk, WatchedDisk, killed, run_child
from images import make_folder
from pack_cases import Scenario, copy, make_scenarios, remains_of, rows, without_temp_files
from shards import bytes_in, samples_in

from wdskit import PackError, RowError, ShardError, finish_pack, pack
from wdskit.dataset.index import INDEX_NAME, RUN_FOLDER
from wdskit.files import Disk
from wdskit.packing import publish
from wdskit.packing.run_journal import JOURNAL_NAME, RunDescription

OPTIONS: dict[str, Any] = {"max_samples": 2, "pattern": "p-%02d.tar"}
NAMES = ["rows", "folder", "addition", "replacing", "parts", "added parts", "stream", "overwriting"]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, Scenario]:
    return make_scenarios(tmp_path_factory.mktemp("ends"))


class EndDisk(WatchedDisk):
    """A disk that stores after which operation the journal, and the folder's index, have their names."""

    journal_at = index_at = 0

    def before(self, name, *args):
        super().before(name, *args)
        if name == "rename" and args[1].name == JOURNAL_NAME:
            self.journal_at = len(self.operations)
        if name == "rename" and args[1].name == INDEX_NAME and RUN_FOLDER not in args[1].parts:
            self.index_at = len(self.operations)


def ends_of(
    run: Callable[[Path, Disk], None], before: Path, base: Path, *, step: int = 1
) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """Kill a run at each operation after its journal, or each `step`-th, to its last one. Yield each folder, and the
    files that it should have.
    """
    copy(before, base / "whole")
    disk = EndDisk()
    run(base / "whole", disk)
    after = bytes_in(base / "whole")
    assert disk.index_at - disk.journal_at > 5
    assert len(disk.operations) - disk.index_at > 5
    for number in range(disk.journal_at, len(disk.operations), step):
        folder = base / f"{number}"
        copy(before, folder)
        assert killed(lambda disk: run(folder, disk), number)  # noqa: B023
        assert number < disk.index_at or without_temp_files(remains_of(folder)) == after
        yield folder, after


@pytest.mark.parametrize("name", NAMES)
def test_the_same_command_ends_it_and_leaves_nothing(tmp_path, scenarios, name):
    scenarios[name].prepare(tmp_path / "before")
    step = 1 if ALL or name in ("rows", "addition") else 4
    for folder, after in ends_of(scenarios[name].pack, tmp_path / "before", tmp_path, step=step):
        scenarios[name].pack(folder, HastyDisk())
        assert bytes_in(folder) == after


def packs(given: Any, **options: Any) -> Callable[[Path, Disk], None]:
    """A function that packs a list, or an iterator over a tuple."""

    def run(folder: Path, disk: Disk) -> None:
        pack(list(given) if isinstance(given, list) else iter(given), folder, disk=disk, **{**OPTIONS, **options})

    return run


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (rows(0, 5), {"split": "a=0.5,b=0.5", "pattern": None}),
        (rows(0, 5), {"shuffle": 1}),
        (rows(0, 5), {"overwrite": True}),
        (tuple(rows(0, 5)), {"overwrite": True}),
    ],
)
def test_splits_and_streams_too(tmp_path, given, options):
    done = []
    for folder, after in ends_of(packs(given, **options), tmp_path / "nothing", tmp_path, step=1 if ALL else 4):
        rows_again = given if isinstance(given, list) else iter(given)
        done.append(pack(rows_again, folder, disk=HastyDisk(), **{**OPTIONS, **options}).was_done)
        assert bytes_in(folder) == after
    assert all(done) or "overwrite" in options


@pytest.mark.parametrize("make", [list, tuple], ids=["planned", "stream"])
def test_an_addition_that_was_over_is_ended_or_added_to(tmp_path, make):
    """The same addition is complete; another addition begins."""
    packs(rows(0, 3))(tmp_path / "before", HastyDisk())
    run = packs(make(rows(3, 6)), append=True)
    for folder, after in ends_of(run, tmp_path / "before", tmp_path, step=1 if ALL else 3):
        shutil.copytree(folder, tmp_path / f"{folder.name}-other")
        packs(make(rows(3, 6)), append=True)(folder, HastyDisk())
        assert bytes_in(folder) == after
        packs(make(rows(6, 8)), append=True)(tmp_path / f"{folder.name}-other", HastyDisk())
        assert list(samples_in(tmp_path / f"{folder.name}-other")) == [f"{n:02d}" for n in range(8)]
        assert not [name for name in bytes_in(tmp_path / f"{folder.name}-other") if name.startswith(".")]


@pytest.fixture
def over(tmp_path) -> Callable[..., Path]:
    """A function that makes a folder whose run was killed while it published, and then completed."""

    def make(given: Any, **options: Any) -> Path:
        (tmp_path / "over").mkdir()
        folder, _ = next(ends_of(packs(given, **options), tmp_path / "nothing", tmp_path / "over"))
        finish_pack(folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (rows(0, 5), {"max_samples": 3}, "max_samples was 2 and is 3."),
        (rows(0, 5), {"max_samples": 3, "restart": True}, "max_samples was 2 and is 3."),
        (rows(0, 6), {}, "the source had 5 rows and has 6."),
        ([*rows(0, 4), {"__key__": "x", "cls": 1}], {}, "the rows of the source are different"),
        (tuple(rows(0, 5)), {}, "only one of the two sources can be read more than once"),
        (rows(0, 5), {"part": "0/2", "shuffle": 1}, "shuffle was None and is 1."),
    ],
)
def test_another_run_is_refused_with_the_difference(over, given, options, message):
    folder = over(rows(0, 5))
    left = bytes_in(folder)
    for _ in range(2):
        with pytest.raises(PackError, match=rf"packed and indexed already, by a different run:\n  {message}"):
            packs(given, **options)(folder, HastyDisk())
        assert {name: data for name, data in bytes_in(folder).items() if "-0-of-2." not in name} == left


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (rows(0, 7), "its rows made 2 shards, and these rows make more"),
        (rows(0, 3), r"p-01.tar: its rows now give other bytes"),
        (rows(0, 2), "its rows made 2 shards, and these rows make 1."),
        ([*rows(0, 2), {"__key__": "x", "cls": 1}, *rows(3, 4)], r"p-01.tar: its rows now give other bytes"),
    ],
)
def test_other_rows_that_come_once_are_refused_too(over, given, message):
    folder = over(tuple(rows(0, 4)))
    left = bytes_in(folder)
    with pytest.raises(PackError, match=message):
        packs(tuple(given))(folder, HastyDisk())
    assert bytes_in(folder) == left


def test_other_bad_rows_are_refused_too(over):
    folder = over([*rows(0, 5), {"__key__": "bad"}], skip_bad=True)
    left = bytes_in(folder)
    with pytest.raises(PackError, match=r"rejected.jsonl: this file exists already and is in the way"):
        packs([*rows(0, 5), {"__key__": "worse"}], skip_bad=True)(folder, HastyDisk())
    assert bytes_in(folder) == left


@pytest.mark.parametrize("make", [list, tuple], ids=["planned", "stream"])
def test_another_one_replaces_it_where_that_is_said(over, make):
    folder = over(rows(0, 5), export=("dali", "timm"))
    packs(make(rows(7, 9)), overwrite=True)(folder, HastyDisk())
    assert list(samples_in(folder)) == ["07", "08"]
    assert list(bytes_in(folder)) == ["index.bin", "index.json", "p-00.tar", "p-00.tar.idx"]


def test_a_shard_that_is_lost_since_is_told(over):
    folder = over(rows(0, 5))
    (folder / "p-01.tar").unlink()
    with pytest.raises(PackError, match=r"p-01.tar or its .idx is gone, or has a different size"):
        packs(rows(0, 5))(folder, HastyDisk())
    pack(rows(0, 5), folder, overwrite=True, disk=HastyDisk(), **OPTIONS)
    packs(rows(0, 5))(folder.with_name("same"), HastyDisk())
    assert bytes_in(folder) == bytes_in(folder.with_name("same"))


@pytest.mark.parametrize("make", [list, tuple], ids=["planned", "stream"])
def test_a_shard_that_was_damaged_since_does_not_pass_for_what_was_packed(over, make):
    """The damage keeps the size. A shard whose time alone changed is accepted."""
    folder = over(make(rows(0, 5)))
    shard = folder / "p-01.tar"
    data = shard.read_bytes()
    shard.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
    with pytest.raises(ShardError, match=r"p-01.tar, .*its sha256 is .*, but the index says"):
        packs(make(rows(0, 5)))(folder, HastyDisk())
    shard.write_bytes(data)
    left = bytes_in(folder)
    packs(make(rows(0, 5)))(folder, HastyDisk())
    assert bytes_in(folder) == left


def test_parts_of_it_are_done_and_leave_the_end_to_finish(over):
    folder = over(rows(0, 5))
    for part, names in (("0/2", ["p-00.tar", "p-02.tar"]), ("1/2", ["p-01.tar"])):
        result = pack(rows(0, 5), folder, part=part, disk=HastyDisk(), **OPTIONS)
        assert [entry.name for entry in result.entries] == names
        assert result.was_done
    assert finish_pack(folder, disk=HastyDisk()).was_done
    packs(rows(0, 5))(folder.with_name("same"), HastyDisk())
    assert bytes_in(folder) == bytes_in(folder.with_name("same"))


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_of_another_addition_may_begin_behind_it(tmp_path, workers):
    """They remove no lock that another part holds, and no file that the index lists."""
    packs(rows(0, 3))(tmp_path / "before", HastyDisk())
    folder, _ = next(ends_of(packs(rows(3, 6), append=True), tmp_path / "before", tmp_path))
    for part in ("0/2", "1/2"):
        pack(rows(6, 11), folder, append=True, part=part, restart=True, workers=workers, **OPTIONS)
    finish_pack(folder)
    assert list(samples_in(folder)) == [f"{n:02d}" for n in range(11)]
    assert not [name for name in bytes_in(folder) if name.startswith(".")]
    assert pack(rows(6, 11), folder, append=True, **OPTIONS).was_done
    with pytest.raises(RowError, match=r"'06' is in .* already"):
        pack(rows(6, 12), folder, append=True, **OPTIONS)


def test_a_look_changes_nothing(over):
    folder = over(rows(0, 5))
    left = bytes_in(folder)
    with pytest.raises(PackError, match="packed and indexed already"):
        packs(rows(0, 5), dry_run=True)(folder, HastyDisk())
    packs(rows(0, 5), dry_run=True, overwrite=True)(folder, HastyDisk())
    assert bytes_in(folder) == left


def test_the_command_says_so_and_ends_with_0(tmp_path, run):
    """The run was killed at its end, or the command runs again."""
    source = str(make_folder(tmp_path / "photos", {"cat": 3}))
    disk = EndDisk()
    pack(source, tmp_path / "whole", disk=disk, **OPTIONS)
    out = str(tmp_path / "out")
    words = ["pack", source, out, "--max-samples", "2", "--pattern", "p-%02d.tar"]
    for command in (words, ["pack-finish", out]):
        shutil.rmtree(out, ignore_errors=True)
        killed = KillingDisk(disk.index_at)
        assert run_child(lambda: pack(source, out, disk=killed, **OPTIONS)) == -signal.SIGKILL  # noqa: B023
        for _ in range(2):
            code, printed, err = run(*command)
            assert (code, err) == (0, "")
            assert printed.splitlines()[-1] == f"Nothing to do: {out} already holds all of it."
        assert bytes_in(Path(out)) == bytes_in(tmp_path / "whole")


def test_a_disk_that_fails_at_the_end_is_an_error_and_the_next_run_ends_it(tmp_path, scenarios):
    disk = EndDisk()
    packs(rows(0, 5))(tmp_path / "whole", disk)
    for number in range(disk.journal_at, len(disk.operations)):
        folder = tmp_path / f"{number}"
        with pytest.raises(PackError, match=rf"{number}: cannot be written: Input/output error"):
            packs(rows(0, 5))(folder, FailingDisk(number, 5, for_good=True))
        packs(rows(0, 5))(folder, HastyDisk())
        assert bytes_in(folder) == bytes_in(tmp_path / "whole")


def check_power(tmp_path: Path) -> None:
    """Check that no power loss brings back the journal's index after the journal may be removed: a later run may have
    published another index by then.
    """
    folder = tmp_path / "out"
    seen = []

    def check(disk: PowerLossDisk) -> None:
        for path in folder.glob(f"{RUN_FOLDER}/*"):
            seen.append(path) if (path / JOURNAL_NAME).exists() else None
        if seen and not seen[0].joinpath("run.json").exists():
            assert disk.survivors(seen[0] / INDEX_NAME) == {None}

    packs(rows(0, 5), part="0/1")(folder, HastyDisk())
    finish_pack(folder, disk=PowerLossDisk(check))
    assert seen
    assert not (folder / RUN_FOLDER).exists()


def test_no_power_loss_brings_back_a_journal_that_was_done(tmp_path):
    check_power(tmp_path)


# Mutants.


def test_an_index_that_may_come_back_is_caught(tmp_path, monkeypatch):
    class Forgetful(PowerLossDisk):
        def fsync_folder(self, folder):
            if RUN_FOLDER not in folder.parts:
                super().fsync_folder(folder)

    monkeypatch.setattr("tests.packing.test_run_journal.PowerLossDisk", Forgetful)
    with pytest.raises(AssertionError):
        check_power(tmp_path)


def test_an_end_that_looks_at_nothing_is_caught(over, monkeypatch):
    folder = over(rows(0, 5))
    monkeypatch.setattr(publish, "differences", lambda *_: [])
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), pytest.raises(PackError):
        packs(rows(0, 6))(folder, HastyDisk())


def test_the_order_of_options_does_not_change_the_digest_of_a_run():
    options = {"max_samples": 2, "shuffle": None, "fields": {"txt": "caption", "cls": "label"}}
    other = {"fields": {"cls": "label", "txt": "caption"}, "shuffle": None, "max_samples": 2}
    run = RunDescription(options, 9, "rows", None)
    assert run.digest == RunDescription(other, 9, "rows", None).digest
    assert run.digest != RunDescription({**other, "max_samples": 3}, 9, "rows", None).digest
