"""Packing under failing disks and kills: no final name holds unfinished bytes, and the same command then goes on."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disks import FailingDisk, HastyDisk, KillingDisk, PowerLossDisk, WatchedDisk, run_child
from images import make_folder

from wdskit import PackError, WdskitError, pack

ROWS = [{"__key__": f"{n:02d}", "cls": n, "bin": bytes([n]) * 700} for n in range(6)]
OPTIONS = {"max_samples": 2, "pattern": "p-%02d.tar", "skip_bad": True}
SOURCE = [*ROWS, {"__key__": "bad"}]


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".wdskit.lock"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "out"
    pack(SOURCE, folder, **OPTIONS)
    return bytes_in(folder)


def count_operations(folder: Path) -> int:
    disk = WatchedDisk()
    pack(SOURCE, folder, disk=disk, **OPTIONS)
    return len(disk.operations)


def check_remains(folder: Path, reference: dict[str, bytes]) -> None:
    """What an interrupted run leaves under final names is whole, and an index is there only when all else is."""
    remains = bytes_in(folder) if folder.exists() else {}
    finals = {name: data for name, data in remains.items() if not name.startswith(".")}
    assert all(reference[name] == data for name, data in finals.items())
    if "index.json" in finals:
        assert finals == reference
    for name in finals:
        if name.endswith(".idx"):
            assert name.removesuffix(".idx") in finals


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("for_good", [False, True])
def test_each_disk_operation_may_fail(tmp_path, reference, code, for_good):
    """Whichever it is: an error that says so, whole files only, and the same command then gives the same bytes."""
    total = count_operations(tmp_path / "count")
    assert total > 40
    for number in range(total):
        folder = tmp_path / f"{number}"
        with pytest.raises(PackError, match=f"{re.escape(str(folder))}.*{os.strerror(code)}"):
            pack(SOURCE, folder, disk=FailingDisk(number, code, for_good=for_good), **OPTIONS)
        check_remains(folder, reference)
        if not (folder / "index.json").exists():
            pack(SOURCE, folder, disk=HastyDisk(), **OPTIONS)
        assert bytes_in(folder) == reference


@pytest.mark.parametrize("half", [False, True])
def test_it_may_be_killed_at_each_disk_operation(tmp_path, reference, half):
    total = count_operations(tmp_path / "count")
    for number in range(total):
        folder = tmp_path / f"{number}"
        disk = KillingDisk(number, half=half)
        assert run_child(lambda: pack(SOURCE, folder, disk=disk, **OPTIONS)) == -signal.SIGKILL  # noqa: B023
        check_remains(folder, reference)
        if not (folder / "index.json").exists():
            pack(SOURCE, folder, disk=HastyDisk(), **OPTIONS)
        assert bytes_in(folder) == reference


def test_a_power_loss_at_any_moment_leaves_whole_files(tmp_path, reference):
    """Of all that may be found after it, under any final name and in any combination of unflushed names."""
    folder = tmp_path / "out"

    def check(disk: PowerLossDisk) -> None:
        for name, data in reference.items():
            assert disk.survivors(folder / name) <= {None, data}
        if disk.survivors(folder / "index.json") == {reference["index.json"]}:
            assert all(disk.survivors(folder / name) == {data} for name, data in reference.items())
        if None not in disk.survivors(folder / "index.bin"):
            assert all(disk.survivors(folder / name) == {reference[name]} for name in reference if ".tar" in name)

    disk = PowerLossDisk(check)
    pack(SOURCE, folder, disk=disk, **OPTIONS)
    assert all(disk.survivors(folder / name) == {data} for name, data in reference.items())


def test_a_packer_that_writes_its_index_first_is_caught(tmp_path, reference, monkeypatch):
    """Mutant: the sweep of kills above must see it."""
    from wdskit.packing import api

    def hasty(rows, target, *args, disk, **kwargs):
        (target.folder / "index.json").write_bytes(reference["index.json"])
        return true_fill(rows, target, *args, disk=disk, **kwargs)

    true_fill = api._fill
    monkeypatch.setattr(api, "_fill", hasty)
    folder = tmp_path / "out"
    run_child(lambda: pack(SOURCE, folder, disk=KillingDisk(12), **OPTIONS))
    with pytest.raises(AssertionError):
        check_remains(folder, reference)


def test_a_packer_that_writes_in_place_is_caught(tmp_path, reference, monkeypatch):
    """Mutant: no draft, no rename."""
    import contextlib

    from wdskit.files import Draft
    from wdskit.packing import fill

    @contextlib.contextmanager
    def in_place(path, *, disk):
        fd = disk.open(path)
        yield Draft(fd, disk)
        disk.close(fd)

    monkeypatch.setattr(fill, "publish", in_place)
    folder = tmp_path / "out"
    with pytest.raises(AssertionError):
        for number in range(12):
            run_child(lambda: pack(SOURCE, folder, disk=KillingDisk(number, half=True), **OPTIONS))  # noqa: B023
            check_remains(folder, reference)


def test_a_full_disk_is_an_error_with_its_name(tmp_path):
    """A limit on the size of files stands in for a disk that is full, with a kernel's own errors."""
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
    assert done.stdout == f"{tmp_path}/out/out-000000.tar: cannot be written: File too large.\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".wdskit.lock"]
    command[-1] = "1"
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == ""


WORKERS = """
import os, signal, sys, time
from pathlib import Path
import wdskit
from wdskit.packing import fill

source, dest = sys.argv[1:3]
if __name__ == "__main__":
    try:
        wdskit.pack(source, dest, max_samples=2, pattern="p-%02d.tar", workers=2)
    except wdskit.WdskitError as err:
        print(err)
        sys.exit(1)
elif sys.argv[3:] == ["die"]:
    true_fill = fill.fill_shard
    def fill_and_die(job, **options):
        if job.path.name == "p-02.tar":
            os.kill(os.getpid(), signal.SIGKILL)
        return true_fill(job, **options)
    import wdskit.packing.api
    fill.fill_shard = wdskit.packing.api.fill_shard = fill_and_die
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("faults") / "photos", {"cat": 12})


def test_a_worker_that_is_killed_is_an_error_and_no_hang(tmp_path, photos):
    script = tmp_path / "program.py"
    script.write_text(WORKERS)
    command = [sys.executable, str(script), str(photos), str(tmp_path / "out")]
    done = subprocess.run([*command, "die"], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (
        1,
        "a worker process was killed, perhaps for its memory. Try again with fewer workers.\n",
    )
    assert not (tmp_path / "out" / "index.json").exists()
    subprocess.run(command, check=True, timeout=60)
    pack(photos, tmp_path / "reference", max_samples=2, pattern="p-%02d.tar")
    assert bytes_in(tmp_path / "out") == bytes_in(tmp_path / "reference")


def children_of(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in tasks.read_text().split()} if tasks.exists() else set()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_when_the_packer_is_stopped_no_worker_lives_on(tmp_path, number):
    source = make_folder(tmp_path / "photos", {"cat": 400})
    command = [sys.executable, "-c", "from wdskit.cli import main; main()", "pack", str(source), str(tmp_path / "out")]
    packer = subprocess.Popen(
        [*command, "--max-samples", "1", "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("*.tar")):
        assert packer.poll() is None
        assert time.monotonic() < deadline
    workers = children_of(packer.pid)
    assert workers
    packer.send_signal(number)
    out, err = packer.communicate(timeout=60)
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline
    assert packer.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in out + err
    assert not (tmp_path / "out" / "index.json").exists()


def test_errors_of_packing_are_wdskits(tmp_path):
    """Whoever catches `WdskitError` catches them all."""
    with pytest.raises(WdskitError):
        pack(SOURCE, tmp_path / "out", disk=FailingDisk(0, errno.EROFS), **OPTIONS)
