"""Packing under failing disks and kills: no final name holds unfinished bytes, and the same command then completes.

Each sweep is a function of a way to pack. Each sweep must also catch broken ways to pack. WDSKIT_ALL_FAULTS=1
(`make faults`) tries every combination; otherwise a part of them is tried.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import pytest
from disks import FailingDisk, HastyDisk, PowerLossDisk, Stopped, StoppingDisk, WatchedDisk, killed
from images import make_folder
from pack_cases import (
    Scenario,
    check_remains,
    copy,
    make_scenarios,
    remains_of,
    rows,
)
from shards import WorkerKillingDisk, bytes_in, samples_in

from wdskit import PackError, WdskitError, pack
from wdskit.dataset import lock
from wdskit.dataset.index import read_index
from wdskit.dataset.lock import share_lock_until_exit
from wdskit.files import TEMP_SUFFIX, Disk, TempFile
from wdskit.packing import fill, publish, run_journal
from wdskit.packing.publish import Destination

ALL = bool(os.environ.get("WDSKIT_ALL_FAULTS"))

Packer = Callable[..., Any]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory) -> dict[str, Scenario]:
    return make_scenarios(tmp_path_factory.mktemp("faults"))


SCENARIOS = (
    "rows",
    "folder",
    "addition",
    "replacing",
    "parts",
    "added parts",
    "stream",
    "overwriting",
)


def sweep(
    scenario: Scenario,
    tmp_path: Path,
    interrupt: Callable[[Callable[[Disk], None], int], None],
    packer: Packer | None = None,
    *,
    step: int = 1,
) -> None:
    """Interrupt a run at each of its operations, or each `step`-th, check the remaining files, and run it again."""
    packer = packer or type(scenario).pack
    scenario.prepare(tmp_path / "before")
    copy(tmp_path / "before", tmp_path / "whole")
    before = remains_of(tmp_path / "before")
    disk = WatchedDisk()
    scenario.pack(tmp_path / "whole", disk)
    after = bytes_in(tmp_path / "whole")
    assert len(disk.operations) > 15
    for number in range(0, len(disk.operations), step):
        folder = tmp_path / f"{number}"
        copy(tmp_path / "before", folder)
        interrupt(lambda disk: packer(scenario, folder, disk), number)  # noqa: B023
        remains = remains_of(folder)
        scenario.check(remains, before, after)
        if remains != after:  # also if only a run journal is left
            scenario.pack(folder, HastyDisk())
            assert bytes_in(folder) == after


def fail(code: int, *, for_good: bool) -> Callable[[Callable[[Disk], None], int], None]:
    """Let operation n fail, and with `for_good` all later ones. Check the error, and that no temporary file stays if
    the disk allows it.
    """

    def interrupt(run: Callable[[Disk], None], number: int) -> None:
        disk = FailingDisk(number, code, for_good=for_good)
        folders = []
        disk.after = lambda name, *args: folders.extend([args[0]] if name == "fsync_folder" else [])
        with pytest.raises(PackError, match=rf"{number}(/[^ ]*)?: cannot be written: {re.escape(os.strerror(code))}"):
            run(disk)
        if not for_good and folders:
            assert not list(folders[-1].glob(".*temp"))

    return interrupt


def kill(*, half: bool, for_real: bool = ALL) -> Callable[[Callable[[Disk], None], int], None]:
    """Kill the process at operation n; with a write also in the middle of it."""

    def interrupt(run: Callable[[Disk], None], number: int) -> None:
        assert killed(run, number, half=half, for_real=for_real)

    return interrupt


CODES = [errno.ENOSPC, errno.EIO, errno.EINTR, errno.EMFILE, errno.EDQUOT, errno.EROFS]
FAULTS = [
    ("rows", errno.EIO, 2),
    ("folder", errno.ENOSPC, 3),
    ("addition", errno.EMFILE, 3),
    ("stream", errno.EINTR, 4),
    ("replacing", errno.ENOSPC, 8),
    ("parts", errno.EINTR, 8),
]
ALL_FAULTS = [(name, code, 1) for name in SCENARIOS for code in CODES]


@pytest.mark.parametrize(("name", "code", "step"), ALL_FAULTS if ALL else FAULTS)
@pytest.mark.parametrize("for_good", [False, True])
def test_each_disk_operation_may_fail(tmp_path, scenarios, name, code, step, for_good):
    sweep(scenarios[name], tmp_path, fail(code, for_good=for_good), step=step)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("half", [False, True] if ALL else [True])
def test_it_may_be_killed_at_each_disk_operation(tmp_path, scenarios, name, half):
    """The kill comes before the operation, or in the middle of a write."""
    sweep(scenarios[name], tmp_path, kill(half=half), step=1 if ALL or name == "rows" else 5)


@pytest.mark.parametrize(("name", "step"), [("rows", 7), ("addition", 11)])
def test_what_a_stopped_run_leaves_a_killed_process_leaves(tmp_path, scenarios, name, step):
    """The tests above stop some runs in this process instead of a real kill; both leave the same files."""
    sweep(scenarios[name], tmp_path, kill(half=True, for_real=True), step=step)


def test_these_are_more_than_200_points(tmp_path, scenarios):
    """One kind of kill alone has more than 200 points, and so has each error."""
    num_points = 0
    for name, scenario in scenarios.items():
        scenario.prepare(tmp_path / name)
        disk = WatchedDisk()
        scenario.pack(tmp_path / name, disk)
        num_points += len(disk.operations)
    assert scenarios.keys() == {*SCENARIOS}
    assert num_points > 600


@pytest.mark.parametrize("name", ["rows", "addition", "replacing"])
def test_a_disk_without_hard_links_is_as_safe(tmp_path, scenarios, name, monkeypatch):
    def no_link(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    sweep(scenarios[name], tmp_path, kill(half=True), step=1 if ALL else 3)


def kill_again_and_again(scenario: Scenario, tmp_path: Path) -> int:
    """Kill runs in the same folder, each at a later operation, until one completes. Return how many were killed."""
    scenario.prepare(tmp_path / "whole")
    before = remains_of(tmp_path / "whole")
    scenario.pack(tmp_path / "whole", HastyDisk())
    after = bytes_in(tmp_path / "whole")
    folder = tmp_path / "out"
    scenario.prepare(folder)
    number = 0
    while killed(lambda disk: scenario.pack(folder, disk), number, half=True):
        scenario.check(remains_of(folder), before, after)
        number += 1
    assert bytes_in(folder) == after
    return number


@pytest.mark.parametrize("name", SCENARIOS if ALL else ["addition"])
def test_a_second_run_may_be_killed_too(tmp_path, scenarios, name):
    """A third run too. Filled shards are not filled again."""
    assert kill_again_and_again(scenarios[name], tmp_path) > 15


# Mutants: ways to pack that these sweeps must catch.


@contextlib.contextmanager
def in_place(path: Path, *, disk: Disk):
    """Publish without a temporary file and rename."""
    path.unlink(missing_ok=True)
    fd = disk.open(path)
    yield TempFile(fd, disk)
    disk.close(fd)


def bytes_in_place(path: Path, data: bytes, *, disk: Disk):
    with in_place(path, disk=disk) as file:
        file.write(data)


def test_a_journal_that_is_not_published_whole_is_caught(tmp_path, scenarios, monkeypatch):
    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(publish, "publish_bytes", bytes_in_place)
            scenario.pack(folder, disk)

    with pytest.raises((AssertionError, PackError)):
        sweep(scenarios["rows"], tmp_path, kill(half=True), mutant)


def test_shards_that_are_noted_before_they_are_filled_are_caught(tmp_path, scenarios, monkeypatch):
    """In this mutant nothing compares the sizes of shards."""
    scenarios["rows"].prepare(tmp_path / "known")
    scenarios["rows"].pack(tmp_path / "known", HastyDisk())
    known = read_index(tmp_path / "known").by_name
    true_start = Destination.start

    def hasty(dest, shards):
        true_start(dest, shards)
        for shard in shards:
            dest.add(known[shard.name])

    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(Destination, "start", hasty)
            patch.setattr(fill, "publish", in_place)
            scenario.pack(folder, disk)

    monkeypatch.setattr(run_journal, "has_shard", lambda folder, entry: (folder / entry.name).exists())
    with pytest.raises((AssertionError, PackError)):
        sweep(scenarios["rows"], tmp_path, kill(half=True), mutant)


@pytest.mark.parametrize("name", ["rows", "addition"])
def test_an_index_that_comes_first_is_caught(tmp_path, scenarios, name, monkeypatch):
    scenarios[name].prepare(tmp_path / "known")
    scenarios[name].pack(tmp_path / "known", HastyDisk())
    true_start = Destination.start

    def hasty(dest, shards):
        true_start(dest, shards)
        (dest.folder / "index.json").write_bytes((tmp_path / "known" / "index.json").read_bytes())

    def mutant(scenario, folder, disk):
        with monkeypatch.context() as patch:
            patch.setattr(Destination, "start", hasty)
            scenario.pack(folder, disk)

    with pytest.raises(AssertionError):
        sweep(scenarios[name], tmp_path, kill(half=False), mutant)


def test_offsets_that_come_first_are_caught(tmp_path, scenarios, monkeypatch):
    true_link = publish.Destination._link_all

    def mutant(scenario, folder, disk):
        waiting: list[list[str]] = []

        def hasty(dest, path, names):
            waiting.append(names)
            if len(waiting) == 2:
                true_link(dest, path, waiting[1])
                true_link(dest, path, waiting[0])

        with monkeypatch.context() as patch:
            patch.setattr(publish.Destination, "_link_all", hasty)
            scenario.pack(folder, disk)

    with pytest.raises(AssertionError):
        sweep(scenarios["rows"], tmp_path, kill(half=False), mutant)


# Power losses.


def check_power(scenario: Scenario, tmp_path: Path, make_disk: type[PowerLossDisk] = PowerLossDisk) -> None:
    """Check all possible states after a power loss at any moment: a final name has only the whole file, and an index
    exists only with all other files.
    """
    scenario.prepare(tmp_path / "whole")
    before = remains_of(tmp_path / "whole")
    scenario.pack(tmp_path / "whole", HastyDisk())
    after = bytes_in(tmp_path / "whole")
    folder = tmp_path / "out"
    scenario.prepare(folder)

    def check(disk: PowerLossDisk) -> None:
        found = {name: disk.survivors(folder / name) for name in after}
        for name, data in after.items():
            assert found[name] <= {before.get(name), data}
        if after["index.json"] in found["index.json"]:
            assert all(found[name] == {after[name]} for name in after if name != "index.json")

    disk = make_disk(check)
    scenario.pack(folder, disk)
    assert all(disk.survivors(folder / name) == {data} for name, data in after.items())


@pytest.mark.parametrize("name", ["rows", "folder", "addition"])
def test_a_power_loss_at_any_moment_leaves_whole_files(tmp_path, scenarios, name):
    check_power(scenarios[name], tmp_path)


class NoFsync(PowerLossDisk):
    def fsync(self, fd):
        pass


class NoFolderFsync(PowerLossDisk):
    def fsync_folder(self, folder):
        pass


@pytest.mark.parametrize("make_disk", [NoFsync, NoFolderFsync])
def test_packing_without_a_flush_is_caught(tmp_path, scenarios, make_disk):
    with pytest.raises(AssertionError):
        check_power(scenarios["rows"], tmp_path, make_disk)


# Full disks, by the kernel.


def test_a_full_disk_is_an_error_with_its_name(tmp_path):
    """A limit on the size of files replaces a full disk, and gives real errors of the kernel."""
    program = """
import resource, signal, sys, wdskit
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    wdskit.pack([{"__key__": f"{n}", "bin": bytes(9000)} for n in range(9)], sys.argv[1], max_samples=int(sys.argv[2]))
except wdskit.PackError as err:
    print(err)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "out"), "9"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert re.fullmatch(r".*/out/.*/out-000000.tar: cannot be written: File too large.\n", done.stdout)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".wdskit.lock"]
    command[-1] = "1"
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == ""
    assert len(samples_in(tmp_path / "out")) == 9


# Worker processes.


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("faults") / "photos", {"cat": 12})


KILLED = "a worker process was killed"
OPERATIONS_OF_A_SHARD = 12  # open, write, fsync, close, rename and fsync_folder of the shard, and of its offsets


@pytest.mark.parametrize("number", range(OPERATIONS_OF_A_SHARD) if ALL else [1, 9])
def test_a_worker_that_is_killed_is_an_error_and_no_hang(tmp_path, photos, number):
    options = {"max_samples": 2, "pattern": "p-%02d.tar", "workers": 2}
    disk = WatchedDisk()
    pack(photos, tmp_path / "reference", **{**options, "workers": 1}, disk=disk)
    assert disk.operations.count("link") == 6 * 2 + 1
    with pytest.raises(WdskitError, match=KILLED):
        pack(photos, tmp_path / "out", **options, disk=WorkerKillingDisk(number, half=True))
    remains = bytes_in(tmp_path / "out")
    check_remains(remains, {}, bytes_in(tmp_path / "reference"))
    assert not [name for name in remains if name.endswith("temp")]  # the worker's temporary file is removed
    pack(photos, tmp_path / "out", **options)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


def test_a_disk_that_fails_in_a_worker_is_an_error(tmp_path, photos):
    with pytest.raises(PackError, match=r"p-00.tar: cannot be written: No space left on device"):
        pack(photos, tmp_path / "out", max_samples=2, pattern="p-%02d.tar", workers=2, disk=WorkerFailingDisk())
    assert list(bytes_in(tmp_path / "out")) == []


class WorkerFailingDisk(HastyDisk):
    """A disk that is full for workers only."""

    def write(self, fd, data):
        if parent_process() is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_when_the_packer_is_stopped_no_worker_lives_on(tmp_path, number):
    """Workers inherit a pipe, which ends when all processes have ended. After Ctrl-C no temporary file stays."""
    source = make_folder(tmp_path / "photos", {"cat": 400})
    command = [sys.executable, "-c", "from wdskit.cli import main; main()", "pack", str(source), str(tmp_path / "out")]
    packer = subprocess.Popen(
        [*command, "--max-samples", "1", "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_files(packer, tmp_path / "out", 1)
    packer.send_signal(number)
    out, err = packer.communicate(timeout=60)
    assert packer.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in out + err
    assert not (tmp_path / "out" / "index.json").exists()
    if number == signal.SIGINT:
        assert not [name for name in remains_of(tmp_path / "out") if name.endswith(TEMP_SUFFIX)]


def wait_for_files(packer: subprocess.Popen, folder: Path, number: int) -> None:
    """Wait until the folder has this number of files, temporary files included."""
    deadline = time.monotonic() + 60
    while len([path for path in folder.rglob("*") if ".tar" in path.name]) < number:
        assert packer.poll() is None
        assert time.monotonic() < deadline


PROGRAM = """
import sys
from pathlib import Path
import wdskit

if __name__ == "__main__":
    rows = [{"__key__": f"{n:03d}", "bin": Path(sys.argv[1])} for n in range(60)]
    wdskit.pack(rows, sys.argv[2], max_samples=2, pattern="p-%02d.tar", workers=3)
"""


@pytest.mark.parametrize("number", range(1, 25) if ALL else [1, 9])
def test_a_run_that_starts_when_another_is_killed_does_not_meet_its_workers(tmp_path, number):
    """Workers live some milliseconds longer than the main process, long enough to publish a temporary file of the next
    run. Without the folder's second lock, one of seven runs failed here.
    """
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * 8000)
    (tmp_path / "program.py").write_text(PROGRAM)
    options = {"max_samples": 2, "pattern": "p-%02d.tar", "disk": HastyDisk()}
    large = [{"__key__": f"{n:03d}", "bin": tmp_path / "large.bin"} for n in range(60)]
    packer = subprocess.Popen([sys.executable, tmp_path / "program.py", tmp_path / "large.bin", tmp_path / "out"])
    wait_for_files(packer, tmp_path / "out", number)
    packer.kill()
    packer.wait()
    pack(large, tmp_path / "out", **options)
    pack(large, tmp_path / "reference", **options)
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


def starts_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a run starts while another run's worker lives, which ends when the run requests the lock."""
    options = {"max_samples": 1, "pattern": "p-%02d.tar"}
    with pytest.raises(Stopped):
        pack(rows(0, 3), tmp_path / "out", **options, disk=StoppingDisk(60))
    [log] = (tmp_path / "out").glob(".wdskit-run/*/shards.log")
    ask, asked = os.pipe()
    held, holds = os.pipe()
    child = os.fork()
    if child == 0:
        share_lock_until_exit(log)
        os.write(holds, b".")
        os.close(asked)
        os.read(ask, 1)  # ends when the parent writes or has ended
        (tmp_path / "ended").touch()
        os._exit(0)
    os.read(held, 1)
    flock = fcntl.flock

    def on_progress(fd, kind):
        os.write(asked, b".")
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", on_progress)
    too_early = []
    see = lambda now: too_early.append(not (tmp_path / "ended").exists())  # noqa: E731
    pack(rows(0, 3), tmp_path / "out", **options, progress=see)
    os.close(asked)
    os.waitpid(child, 0)
    for fd in (ask, held, holds):
        os.close(fd)
    return too_early[-1]


def test_a_run_waits_for_the_workers_of_one_before_it(tmp_path, monkeypatch):
    assert not starts_too_early(tmp_path, monkeypatch)


def test_a_run_that_does_not_wait_is_caught(tmp_path, monkeypatch):
    """The mutant does not wait for workers of another run."""
    monkeypatch.setattr(publish, "wait_for_workers", lambda folder: None)
    monkeypatch.setattr(lock, "_take_lock", lambda *_, **__: True)
    assert starts_too_early(tmp_path, monkeypatch)


def test_one_process_may_pack_into_a_folder_again_and_again(tmp_path):
    """A process does not wait for its own locks, with or without workers, nor with more workers than shards."""
    for n, workers in enumerate([2, 4, 1, 2]):
        pack(rows(2 * n, 2 * n + 2), tmp_path / "out", max_samples=1 + n % 2, workers=workers, append=n > 0)
    assert len(samples_in(tmp_path / "out")) == 8


def test_errors_of_packing_are_wdskits(tmp_path):
    """`except WdskitError` catches all of them."""
    with pytest.raises(WdskitError):
        pack(rows(0, 1), tmp_path / "out", disk=FailingDisk(0, errno.EROFS))
