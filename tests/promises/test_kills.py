"""A run may end at any moment: by a kill, a full or broken disk, or a power loss.

A reader then sees the old data set or the new one, or no data set where none was, never a mixture. The same call again
gives the bytes of a run that nobody disturbed, and leaves nothing but the files of the data set.

Disks that stop, fail or forget are subclasses of `wdskit.testing.Disk`. WDSKIT_ALL=1 tries every operation and
kills 200 times; otherwise a part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disks import FailingDisk, HastyDisk, KillingDisk, PowerLossDisk, SlowDisk, Stopped, WatchedDisk, on, run_child
from folders import ALL
from formats import (
    WORK_FOLDER,
    data_names,
    files_in,
    jpeg,
    make_photos,
    read_folder,
    write_files,
    write_tar,
)
from writing import pack, reshard

from wdskit import PackError, WdskitError, columns
from wdskit.testing import Disk

Files = dict[str, bytes]


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700, "json": {"n": n}} for n in range(start, stop)]


BAD_ROW = {"__key__": "bad", "jpg": b"no image"}


@dataclass(frozen=True)
class Run:
    """A run to disturb.

    Attributes:
        call: Runs it: the folder of the sources, DEST and the disk.
        before: Makes the data set that DEST holds before.
    """

    call: Callable[[Path, Path, Disk], Any]
    before: Callable[[Path, Path], Any] = field(default=lambda base, dest: None)


def _in_parts(source: Any, dest: Path, disk: Disk, **options: Any) -> None:
    for part in ("1/2", "0/2"):
        on(disk, pack, source, dest, part=part, **options)
    on(disk, pack, source, dest, **options)


def _six_rows(base: Path, dest: Path) -> None:
    on(HastyDisk(), pack, rows(0, 6), dest, max_samples=4, columns="cls")


def _photos(base: Path, dest: Path) -> None:
    on(HastyDisk(), pack, base / "photos", dest, max_samples=4)


RUNS = {
    "new": Run(lambda base, dest, disk: on(disk, pack, base / "photos", dest, max_samples=2, shuffle=7)),
    "rows": Run(
        lambda base, dest, disk: on(disk, pack, [*rows(0, 5), BAD_ROW], dest, max_samples=2, skip_bad=True)
    ),
    "generator": Run(lambda base, dest, disk: on(disk, pack, iter(rows(0, 5)), dest, max_samples=2)),
    "columns": Run(
        lambda base, dest, disk: on(disk, pack, rows(0, 5), dest, max_samples=3, columns=["cls", "json.n"])
    ),
    "append": Run(
        lambda base, dest, disk: on(disk, pack, rows(6, 11), dest, max_samples=2, append=True), _six_rows
    ),
    "append classes": Run(
        lambda base, dest, disk: on(disk, pack, base / "more", dest, max_samples=2, append=True, classes=dest), _photos
    ),
    "parts": Run(lambda base, dest, disk: _in_parts(rows(0, 7), dest, disk, max_samples=2)),
    "append in parts": Run(
        lambda base, dest, disk: _in_parts(rows(6, 11), dest, disk, max_samples=2, append=True), _six_rows
    ),
    "reshard": Run(lambda base, dest, disk: on(disk, reshard, base / "in.tar", dest, max_samples=3, drop="txt")),
    "reshard append": Run(
        lambda base, dest, disk: on(disk, reshard, base / "in.tar", dest, append=True, max_samples=3), _six_rows
    ),
}  # fmt: skip
FEW = ["new", "append", "parts", "reshard"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("kills")
    make_photos(base / "photos", {"cat": 4, "dog": 3})
    write_files(base / "more", {"dog/new0.jpg": jpeg(70), "cat/new1.jpg": jpeg(71), "cat/new2.jpg": jpeg(72)})
    write_tar(
        base / "in.tar", {f"k{n}": {"txt": b"t%d" % n, "cls": b"%d" % n, "bin": bytes(300 * n)} for n in range(8)}
    )
    return base


@dataclass(frozen=True)
class Whole:
    """Files of DEST before and after a run that nobody disturbed; `num_operations` of that run."""

    before: Files
    after: Files
    num_operations: int
    copy: Path

    def look(self, dest: Path) -> str:
        """Return what a reader sees now: "old", "new" or "none". Listed files are compared with their digests."""
        if not (dest / "index.json").exists():
            assert "index.json" not in self.before
            return "none"
        labels = [fields.get("cls") for fields in read_folder(dest).values()]
        assert "cls" not in columns(dest) or [b"%d" % label for label in columns(dest)["cls"]] == labels
        files = {name: (dest / name).read_bytes() for name in [*_listed(dest), "index.json"]}
        for name, whole in (("old", self.before), ("new", self.after)):
            if files["index.json"] == whole.get("index.json"):
                assert files.items() <= whole.items()
                return name
        raise AssertionError("this index.json is neither the old nor the new one")

    def check_done(self, dest: Path) -> None:
        assert files_in(dest) == self.after
        assert not os.path.lexists(dest / WORK_FOLDER)


def _listed(dest: Path) -> list[str]:
    """Return the files that a reader needs besides index.json; rejected.jsonl is a list for people."""
    return [name for name in data_names(dest) if name != "rejected.jsonl"]


def disturb(name: str, base: Path, tmp_path: Path) -> Whole:
    """Make the folder before a run, and run it once without being disturbed."""
    run, copy, whole = RUNS[name], tmp_path / "before" / "d", tmp_path / "whole" / "d"
    run.before(base, copy)
    before = files_in(copy)
    _copy(copy, whole)
    disk = WatchedDisk()
    run.call(base, whole, disk)
    assert {*files_in(whole)} >= {"index.json", *data_names(whole)}
    assert not {name for name in files_in(whole) if "temp" in name or name.startswith(WORK_FOLDER)}
    return Whole(before, files_in(whole), len(disk.operations), copy)


def _copy(source: Path, target: Path) -> Path:
    if source.exists():
        shutil.copytree(source, target)
    return target


def kill(work: Callable[[Disk], Any], disk: KillingDisk) -> bool:
    """Run `work` in a fork until the disk kills it; return whether it did."""
    status = run_child(lambda: work(disk))
    assert status in {0, -signal.SIGKILL}
    return status != 0


def sweep_kills(
    name: str, base: Path, tmp_path: Path, make_disk: type[KillingDisk] = KillingDisk, step: int = 1
) -> None:
    """Kill a run before each operation, or each `step`-th, in the middle of a write where the operation is one."""
    whole = disturb(name, base, tmp_path)
    assert whole.num_operations > 15
    seen = set()
    for number in reversed(range(step // 2, whole.num_operations, step)):  # a wrong end is found first
        dest = _copy(whole.copy, tmp_path / f"{number}" / "d")
        assert kill(lambda disk: RUNS[name].call(base, dest, disk), make_disk(number, half=True))  # noqa: B023
        seen.add(whole.look(dest))
        RUNS[name].call(base, dest, HastyDisk())
        whole.check_done(dest)
        shutil.rmtree(dest.parent)
    assert seen >= {"old" if whole.before else "none"}


def test_every_operation_of_the_disk_is_watched() -> None:
    """Otherwise the sweeps below miss it. `begin_flush` is only a hint for the kernel."""
    operations = {name for name in vars(Disk) if not name.startswith("_")}
    assert operations - {"begin_flush"} <= {name for name in vars(WatchedDisk) if not name.startswith("_")}


@pytest.mark.parametrize("name", RUNS)
def test_run_killed_at_any_disk_operation_is_completed_by_the_same_call(tmp_path: Path, base: Path, name: str) -> None:
    sweep_kills(name, base, tmp_path, step=1 if ALL else 6 if name in FEW else 11)


@pytest.mark.parametrize("name", RUNS if ALL else ["append", "parts"])
def test_the_second_call_may_be_killed_too(tmp_path: Path, base: Path, name: str) -> None:
    """Calls in one folder are killed, each at a later operation, until one completes."""
    whole = disturb(name, base, tmp_path)
    dest = _copy(whole.copy, tmp_path / "out" / "d")
    number = 0
    while kill(lambda disk: RUNS[name].call(base, dest, disk), KillingDisk(number, half=True)):
        whole.look(dest)
        number += 1 if ALL else 2
    whole.check_done(dest)
    assert number > 10


def test_a_call_after_a_kill_does_not_fill_whole_shards_again(tmp_path: Path, base: Path) -> None:
    """It needs fewer operations than a new run."""
    whole = disturb("rows", base, tmp_path)
    dest = tmp_path / "out" / "d"
    half = whole.num_operations * 2 // 3
    assert kill(lambda disk: RUNS["rows"].call(base, dest, disk), KillingDisk(half, half=True))
    again = WatchedDisk()
    RUNS["rows"].call(base, dest, again)
    assert again.operations.count("write") < whole.num_operations // 4
    whole.check_done(dest)


@pytest.mark.parametrize("name", RUNS)
def test_a_finished_run_that_is_called_again_changes_nothing(tmp_path: Path, base: Path, name: str) -> None:
    whole = disturb(name, base, tmp_path)
    dest = tmp_path / "whole" / "d"
    times = {path: path.stat().st_mtime_ns for path in dest.iterdir() if path.name in whole.after}
    RUNS[name].call(base, dest, HastyDisk())
    whole.check_done(dest)
    assert times == {path: path.stat().st_mtime_ns for path in dest.iterdir() if path.name in whole.after}


@pytest.mark.parametrize("change", ["option", "rows", "files"])
def test_a_changed_run_after_a_kill_gives_the_bytes_of_the_changed_run(tmp_path: Path, base: Path, change: str) -> None:
    """Nothing of the first run is left, and nothing of it is read into a shard."""
    photos = _copy(base / "photos", tmp_path / "photos")
    sources: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
        "option": (rows(0, 7), {"max_samples": 2}, rows(0, 7), {"max_samples": 3}),
        "rows": (rows(0, 7), {"max_samples": 2}, rows(1, 7), {"max_samples": 2}),
        "files": (photos, {"max_samples": 2}, photos, {"max_samples": 2}),
    }
    first, options, second, others = sources[change]
    watched = WatchedDisk()
    on(watched, pack, first, tmp_path / "watched" / "d", **options)
    numbers = range(0, len(watched.operations) - 12, 3 if ALL else 17)
    for number in numbers:
        shutil.rmtree(photos)
        _copy(base / "photos", photos)
        dest = tmp_path / f"{number}" / "d"
        assert kill(lambda disk: on(disk, pack, first, dest, **options), KillingDisk(number, half=True))  # noqa: B023
        if change == "files":
            (photos / "cat" / "0001.jpg").write_bytes(jpeg(1000 + number))
        if (dest / "index.json").exists() or (dest / WORK_FOLDER / "commit.json").exists():
            with pytest.raises(WdskitError, match="another data set"):  # the first run is completed
                on(HastyDisk(), pack, second, dest, **others)
            continue
        on(HastyDisk(), pack, second, dest, **others)
        on(HastyDisk(), pack, second, tmp_path / f"{number}" / "new" / "d", **others)
        assert files_in(dest) == files_in(tmp_path / f"{number}" / "new" / "d")
        assert not os.path.lexists(dest / WORK_FOLDER)


def test_a_source_that_was_moved_is_the_same_and_one_that_was_touched_is_another(tmp_path: Path, base: Path) -> None:
    """So a run can be completed on another machine, where the source has another path."""
    photos = _copy(base / "photos", tmp_path / "photos")
    whole = WatchedDisk()
    on(whole, pack, photos, tmp_path / "whole" / "d", max_samples=2)
    dest = tmp_path / "d"
    half = len(whole.operations) * 2 // 3
    assert kill(lambda disk: on(disk, pack, photos, dest, max_samples=2), KillingDisk(half))
    moved, again = photos.rename(tmp_path / "moved"), WatchedDisk()
    on(again, pack, moved, dest, max_samples=2)
    assert again.operations.count("write") < whole.operations.count("write") // 2
    assert files_in(dest) == files_in(tmp_path / "whole" / "d")
    done = on(HastyDisk(), pack, moved, dest, max_samples=2, dry_run=True)
    assert (done.was_done, done.num_samples) == (True, 7)
    assert on(HastyDisk(), pack, moved, dest, max_samples=2).was_done
    os.utime(moved / "cat" / "0001.jpg")
    with pytest.raises(PackError, match="another data set"):
        on(HastyDisk(), pack, moved, dest, max_samples=2)


# Disks that fail.


def message_of(call: Callable[[], Any]) -> str | None:
    """Return the message of a call's WdskitError; None without an error."""
    try:
        call()
    except WdskitError as err:
        return str(err)
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_failing_disk_operation_is_an_error_and_the_next_call_completes(
    tmp_path: Path, base: Path, name: str, code: int, *, for_good: bool
) -> None:
    """The message names a file of DEST and the reason. Only the removal of remains may fail without a word."""
    whole = disturb(name, base, tmp_path)
    step = 1 if ALL else 9 if name in FEW else 23
    for number in range((code + for_good) % step, whole.num_operations, step):
        dest = _copy(whole.copy, tmp_path / f"{number}" / "d")
        message = message_of(lambda: RUNS[name].call(base, dest, FailingDisk(number, code, for_good=for_good)))  # noqa: B023
        if message is None:
            assert whole.look(dest) == "new"
        else:
            assert os.strerror(code) in message
            assert str(dest.parent) in message
            assert whole.look(dest) in {"old", "new", "none"}
        RUNS[name].call(base, dest, HastyDisk())
        whole.check_done(dest)
        shutil.rmtree(dest.parent)


@pytest.mark.parametrize("name", FEW)
def test_disk_that_writes_few_bytes_at_a_time_changes_no_byte(tmp_path: Path, base: Path, name: str) -> None:
    whole = disturb(name, base, tmp_path)
    dest = _copy(whole.copy, tmp_path / "out" / "d")
    RUNS[name].call(base, dest, SlowDisk(311))
    whole.check_done(dest)


def test_full_disk_of_the_kernel_is_an_error_with_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk and gives real errors."""
    program = """
import pathlib, resource, signal, sys, wdskit
if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    pathlib.Path(sys.argv[1] + ".bin").write_bytes(bytes(9000))
    rows = [{"__key__": f"{n}", "bin": pathlib.Path(sys.argv[1] + ".bin")} for n in range(9)]
    try:
        wdskit.pack(rows, sys.argv[1], workers=1, max_samples=int(sys.argv[2]))
    except wdskit.WdskitError as err:
        print(err)
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "d")]
    done = subprocess.run([*command, "9"], check=True, capture_output=True, text=True)
    assert str(tmp_path / "d") in done.stdout
    assert os.strerror(errno.EFBIG) in done.stdout
    done = subprocess.run([*command, "1"], check=True, capture_output=True, text=True)
    assert done.stdout == ""
    assert len(read_folder(tmp_path / "d")) == 9


# Power losses.


def check_every_moment(name: str, base: Path, tmp_path: Path, make_disk: type[PowerLossDisk] = PowerLossDisk) -> None:
    """Check at each operation what a power loss may leave: a possible index.json has all its files for certain."""
    whole = disturb(name, base, tmp_path)
    dest = _copy(whole.copy, tmp_path / "out" / "d")
    listed = {
        state: _listed(tmp_path / state / "d") if (tmp_path / state / "d").exists() else []
        for state in ("before", "whole")
    }

    def check(disk: PowerLossDisk) -> None:
        for index in disk.survivors(dest / "index.json"):
            assert index in {whole.before.get("index.json"), whole.after["index.json"]}
            for state, files in (("before", whole.before), ("whole", whole.after)):
                if index is not None and index == files.get("index.json"):
                    assert all(disk.survivors(dest / one) == {files[one]} for one in listed[state])

    disk = make_disk(check)
    RUNS[name].call(base, dest, disk)
    assert all(disk.survivors(dest / one) == {data} for one, data in whole.after.items())


def lose_power(
    name: str, base: Path, tmp_path: Path, num_states: int, make_disk: type[PowerLossDisk] = PowerLossDisk
) -> None:
    """Draw states that power losses leave, after runs that were stopped, and run again in each."""
    whole = disturb(name, base, tmp_path)
    rng = random.Random(name)
    for number in range(num_states):
        live, dest = _copy(whole.copy, tmp_path / f"live{number}" / "d"), tmp_path / f"left{number}" / "d"
        disk = make_disk()
        for _ in range(rng.choice([1, 1, 2, 3])):
            if files_in(live) == whole.after:
                break
            disk.stop_in(rng.randrange(whole.num_operations + 1))
            with contextlib.suppress(Stopped):
                RUNS[name].call(base, live, disk)
        dest.mkdir(parents=True)
        write_files(dest, disk.remains(live, rng))
        whole.look(dest)
        RUNS[name].call(base, dest, HastyDisk())
        whole.check_done(dest)


@pytest.mark.parametrize("name", RUNS)
def test_power_loss_leaves_the_old_or_the_new_data_set(tmp_path: Path, base: Path, name: str) -> None:
    check_every_moment(name, base, tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_run_after_a_power_loss_gives_the_same_bytes(tmp_path: Path, base: Path, name: str) -> None:
    lose_power(name, base, tmp_path, 100 if ALL else 6)


# Mutants: disks that stand for mistakes in wdskit. The sweeps above must catch each.


class NoFsync(PowerLossDisk):
    """Files are not flushed."""

    def fsync(self, fd: int) -> None:
        pass


class NoShardFsync(PowerLossDisk):
    """The entry of a shard is flushed before the shard is."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shards: set[int] = set()

    def open(self, path: Path) -> int:
        fd: int = super().open(path)
        (self._shards.add if ".tar" in path.name and ".json" not in path.name else self._shards.discard)(fd)
        return fd

    def fsync(self, fd: int) -> None:
        if fd not in self._shards:
            super().fsync(fd)


class NoFolderFsync(PowerLossDisk):
    """The names in folders are not flushed."""

    def fsync_folder(self, folder: Path) -> None:
        pass


class EarlyIndex(KillingDisk):
    """index.json gets its name before the shards."""

    def __init__(self, kill_at: int, *, half: bool = False) -> None:
        super().__init__(kill_at, half=half)
        self._waiting: list[tuple[str, Path, Path]] = []

    def rename(self, source: Path, target: Path) -> None:
        self._move("rename", source, target)

    def link(self, source: Path, target: Path) -> None:
        self._move("link", source, target)

    def _move(self, name: str, source: Path, target: Path) -> None:
        is_final = target.parent.name == "d"
        if is_final and ".tar" in target.name:
            self._waiting.append((name, source, target))
            return
        self._do(name, source, target)
        if is_final and target.name == "index.json":
            for move in self._waiting:
                self._do(*move)
            self._waiting.clear()


@pytest.mark.parametrize("mutant", [NoFsync, NoShardFsync, NoFolderFsync])
def test_run_without_a_flush_is_caught(tmp_path: Path, base: Path, mutant: type[PowerLossDisk]) -> None:
    with pytest.raises((AssertionError, WdskitError, ValueError, OSError)):
        check_every_moment("rows", base, tmp_path / "moments", mutant)
    with pytest.raises((AssertionError, WdskitError, ValueError, OSError)):
        lose_power("rows", base, tmp_path / "states", 60, mutant)


@pytest.mark.parametrize("name", ["rows", "append"])
def test_index_that_comes_before_its_shards_is_caught(tmp_path: Path, base: Path, name: str) -> None:
    with pytest.raises((AssertionError, FileNotFoundError)):
        sweep_kills(name, base, tmp_path, EarlyIndex, 2)


# Real kills of commands.

WDSKIT = [sys.executable, "-c", "from wdskit.cli import main; main()"]
NUM_KILLS = 200 if ALL else 1


def start(words: list[str], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*WDSKIT, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, cwd=cwd
    )


def complete(words: list[str], cwd: Path) -> None:
    done = start(words, cwd)
    assert (done.communicate()[1], done.returncode) == (b"", 0)


def kill_at_random(processes: list[subprocess.Popen[bytes]], dest: Path, rng: random.Random, num_files: int) -> int:
    """Kill each process with its workers: when a random number of files is there, or after a random time."""
    num_killed = 0
    for process in processes:
        target, deadline = rng.randrange(1, num_files), time.monotonic() + 60
        while process.poll() is None and sum(1 for _ in dest.rglob("*")) < target:
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() / 100)
        num_killed += process.poll() is None
        with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its workers
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return num_killed


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_photos(tmp_path_factory.mktemp("many") / "photos", {"cat": 40, "dog": 30})


def test_command_with_workers_that_is_killed_is_completed_by_the_same_command(tmp_path: Path, many: Path) -> None:
    words = ["pack", str(many), "d", "--max-samples", "4", "--shuffle", "3", "--workers", "2"]
    (tmp_path / "whole").mkdir()
    complete(words, tmp_path / "whole")
    whole = files_in(tmp_path / "whole" / "d")
    rng, num_killed = random.Random(0), 0
    for number in range(NUM_KILLS):
        cwd = tmp_path / f"{number}"
        cwd.mkdir()
        for _ in range(rng.choice([1, 2]) if ALL else 1):
            num_killed += kill_at_random([start(words, cwd)], cwd / "d", rng, len(whole))
            if (cwd / "d" / "index.json").exists():
                read_folder(cwd / "d")
        complete(words, cwd)
        assert files_in(cwd / "d") == whole
        shutil.rmtree(cwd)
    assert num_killed >= NUM_KILLS // 2


def test_parts_that_run_at_once_and_are_killed_are_completed_by_the_same_commands(tmp_path: Path, many: Path) -> None:
    words = ["pack", str(many), "d", "--max-samples", "4", "--workers", "1"]
    (tmp_path / "whole").mkdir()
    complete(words, tmp_path / "whole")
    whole = files_in(tmp_path / "whole" / "d")
    rng, num_killed = random.Random(1), 0
    for number in range(NUM_KILLS):
        cwd = tmp_path / f"{number}"
        cwd.mkdir()
        parts = [[*words, "--part", f"{part}/3"] for part in range(3)]
        num_killed += kill_at_random([start(part, cwd) for part in parts], cwd / "d", rng, len(whole))
        assert not (cwd / "d" / "index.json").exists()
        again = [start(part, cwd) for part in parts]
        assert [(process.communicate()[1], process.returncode) for process in again] == [(b"", 0)] * 3
        complete(words, cwd)
        assert files_in(cwd / "d") == whole
        shutil.rmtree(cwd)
    assert num_killed >= NUM_KILLS // 2


def test_two_runs_at_once_the_second_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    def slowly() -> Iterator[dict[str, Any]]:
        for number, row in enumerate(rows(0, 4)):
            if number == 2:
                with pytest.raises(WdskitError, match=f"{tmp_path / 'd'}.*(writing|in use|another|other)"):
                    pack(rows(5, 7), tmp_path / "d")
            yield row

    pack(slowly(), tmp_path / "d")
    assert len(read_folder(tmp_path / "d")) == 4


# What is in the way.


def test_another_data_set_is_not_replaced(tmp_path: Path) -> None:
    pack(rows(0, 4), tmp_path / "d")
    before = files_in(tmp_path / "d")
    with pytest.raises(PackError, match="d"):
        pack(rows(0, 5), tmp_path / "d")
    assert files_in(tmp_path / "d") == before


@pytest.mark.parametrize("name", ["d-000000.tar", "d-000001.tar.idx"])
def test_foreign_file_in_the_way_is_an_error_that_names_it_and_stays(tmp_path: Path, name: str) -> None:
    write_files(tmp_path / "d", {name: "mine"})
    with pytest.raises(PackError, match=name):
        pack(rows(0, 4), tmp_path / "d", max_samples=2)
    assert files_in(tmp_path / "d") == {name: b"mine"}


@pytest.mark.parametrize("kind", ["link", "file", "folder with files"])
def test_foreign_work_folder_is_refused_and_nothing_outside_is_touched(tmp_path: Path, kind: str) -> None:
    """Wdskit removes nothing but files that it made."""
    write_files(tmp_path / "mine", {"index.json": "{}", "a/b.txt": "mine", "d-000000.tar": "mine"})
    (tmp_path / "d").mkdir()
    if kind == "link":
        (tmp_path / "d" / WORK_FOLDER).symlink_to(tmp_path / "mine")
    elif kind == "file":
        (tmp_path / "d" / WORK_FOLDER).write_text("mine")
    else:
        write_files(tmp_path / "d" / WORK_FOLDER, {"mine/notes.txt": "mine"})
    before = files_in(tmp_path)
    with pytest.raises(WdskitError, match=r"\.wdskit"):
        pack(rows(0, 4), tmp_path / "d")
    assert before.items() <= files_in(tmp_path).items()
    assert not (tmp_path / "d" / "index.json").exists()
