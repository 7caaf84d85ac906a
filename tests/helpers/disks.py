"""Disks that fail, kill, write few bytes at a time or lose power: stand-ins for `wdskit.testing.Disk`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from folders import ALL

from wdskit.testing import Disk, use_disk

CHILD_S = 240
"""Longest time of a child of `run_child`."""


def on(disk: Disk, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `pack` or another function that writes, with this disk."""
    with use_disk(disk):
        return function(*args, **options)


class HastyDisk(Disk):
    """A disk that flushes nothing, for tests that write thousands of files."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_folder(self, folder: Path) -> None:
        pass


class WatchedDisk(Disk):
    """A disk that calls `before` and `after` with each operation. Flushes are skipped: no test can see their effect,
    and a thousand flushes take a minute on a slow device.
    """

    def __init__(self) -> None:
        self.operations: list[str] = []

    def before(self, name: str, *args: Any) -> None:
        self.operations.append(name)

    def after(self, name: str, *args: Any) -> None:
        pass

    def _do(self, name: str, *args: Any) -> Any:
        self.before(name, *args)
        done = None if name.startswith("fsync") else getattr(Disk, name)(self, *args)
        self.after(name, *args)
        return done


def _watched(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._do(name, *args)


for _name in (
    *("open", "open_log", "write", "fsync", "close", "rename", "link", "fsync_folder"),
    *("remove", "make_folder", "remove_folder"),
):
    setattr(WatchedDisk, _name, _watched(_name))


class FailingDisk(WatchedDisk):
    """A disk whose operation number `fail_at`, from 0, fails with errno `code`; with `for_good`, all later ones too."""

    def __init__(self, fail_at: int, code: int, *, for_good: bool = False) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.code = code
        self.for_good = for_good

    def before(self, name: str, *args: Any) -> None:
        number = len(self.operations)
        super().before(name, *args)
        if number == self.fail_at or (self.for_good and number > self.fail_at):
            if name == "close":
                os.close(*args)  # Linux frees the descriptor even if close fails
            raise OSError(self.code, os.strerror(self.code))


class KillingDisk(WatchedDisk):
    """A disk that kills its process before operation number `kill_at`, from 0; with `half`, in the midst of a write."""

    def __init__(self, kill_at: int, *, half: bool = False) -> None:
        super().__init__()
        self.kill_at = kill_at
        self.half = half

    def before(self, name: str, *args: Any) -> None:
        if len(self.operations) >= self.kill_at:
            if self.half and name == "write":
                fd, data = args
                os.write(fd, data[: len(data) // 2])
            self.end(name, *args)
        super().before(name, *args)

    def end(self, name: str, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(BaseException):
    """The simulated end of a process, after which no operation reaches the disk."""


class StoppingDisk(KillingDisk):
    """A `KillingDisk` that keeps the process alive, but does no operation after `kill_at`."""

    def end(self, name: str, *args: Any) -> None:
        self.half = False
        if name == "close":
            os.close(*args)
        raise Stopped


def killed(work: Callable[[Disk], Any], number: int, *, half: bool = False, for_real: bool = ALL) -> bool:
    """Run `work` on a disk that kills it at operation `number`; return whether it was killed before its end.

    Without `for_real`, `work` is stopped in this process: with torch loaded, a fork takes eight times as long as
    packing ten rows.
    """
    if for_real:
        status = run_child(lambda: work(KillingDisk(number, half=half)))
        assert status in {0, -signal.SIGKILL}
        return status != 0
    try:
        work(StoppingDisk(number, half=half))
    except Stopped:
        return True
    return False


class SlowDisk(HastyDisk):
    """A disk that writes at most `most` bytes at a time, and takes `wait_s` for them."""

    def __init__(self, most: int = 1 << 30, wait_s: float = 0) -> None:
        self.most, self.wait_s = most, wait_s

    def write(self, fd: int, data: Any) -> int:
        time.sleep(self.wait_s)
        return super().write(fd, memoryview(data)[: self.most])


class _File:
    """The written bytes of a file, and the bytes that have certainly reached the device."""

    def __init__(self, data: bytes) -> None:
        self.written = data
        self.flushed = data

    def survivors(self) -> set[bytes]:
        """Return the possible contents after a power loss: all flushed bytes, and any part of the others."""
        if self.written == self.flushed:
            return {self.written}
        kept, size = len(self.flushed), len(self.written)
        halves = {self.written[: (kept + size) // 2]} if self.written.startswith(self.flushed) else set()
        return {self.flushed, self.written, self.flushed.ljust(size, b"\0")[:size]} | halves


class PowerLossDisk(WatchedDisk):
    """A working disk that knows what a power loss would leave at each moment.

    The bytes of a file are certain after the file is flushed, a name after its folder is flushed. Of all other
    operations any part may have happened, in any order. `check` is called after each operation. `stop_in` stops a run
    as a kill would; for the next run on the same disk, everything that was not flushed is still uncertain.
    """

    def __init__(self, check: Callable[[PowerLossDisk], None] = lambda disk: None) -> None:
        super().__init__()
        self._check = check
        self._live: dict[Path, _File | None] = {}
        self._certain: dict[Path, _File | None] = {}
        self._uncertain: dict[Path, list[_File | None]] = {}
        self._new_folders: set[Path] = set()
        self._open: dict[int, _File] = {}
        self._stop_at: int | None = None

    def stop_in(self, num_operations: int | None) -> None:
        """Stop the run after `num_operations` more operations; None lets it run."""
        self._stop_at = None if num_operations is None else len(self.operations) + num_operations

    def remains(self, folder: Path, rng: random.Random) -> dict[str, bytes]:
        """Return files that a power loss may leave in a folder now; `rng` draws for each file that is not certain."""
        there = {path for path in folder.rglob("*") if path.is_file() and path.name != ".wdskit.lock"}
        known = {path for path in self._live if path.is_relative_to(folder) and path.name != ".wdskit.lock"}
        remains = {}
        for path in sorted(there | known):
            data = rng.choice(sorted(self.survivors(path), key=lambda data: (data is not None, data or b"")))
            if data is not None:
                remains[path.relative_to(folder).as_posix()] = data
        return remains

    def survivors(self, path: Path) -> set[bytes | None]:
        """Return the possible contents of a path after a power loss now; None for no file."""
        self._note(path)
        found: set[bytes | None] = {None} if self._new_folders & {*path.parents} else set()
        for file in (self._certain[path], *self._uncertain.get(path, ())):
            found |= {None} if file is None else file.survivors()
        return found

    def _note(self, path: Path) -> None:
        """Store a path's content at its first use: files from before this disk are certain."""
        if path not in self._live:
            self._live[path] = self._certain[path] = _File(path.read_bytes()) if path.exists() else None

    def _name(self, path: Path, file: _File | None) -> None:
        self._live[path] = file
        self._uncertain.setdefault(path, []).append(file)

    def before(self, name: str, *args: Any) -> None:
        if self._stop_at is not None and len(self.operations) >= self._stop_at:
            if name == "close":
                os.close(*args)
            raise Stopped
        super().before(name, *args)
        for path in args:
            if isinstance(path, Path) and not path.is_dir():
                self._note(path)
        if name == "make_folder" and not args[0].exists():
            self._new_folders.add(args[0])

    def _do(self, name: str, *args: Any) -> Any:
        done = super()._do(name, *args)
        match name:
            case "open" | "open_log":
                file = self._live[args[0]]
                if file is None:
                    file = _File(b"")
                    self._name(args[0], file)
                file.written = file.written if name == "open_log" else b""
                self._open[done] = file
            case "write":
                self._open[args[0]].written += bytes(args[1][:done])
            case "fsync":
                self._open[args[0]].flushed = self._open[args[0]].written
            case "rename":
                self._name(args[1], self._live[args[0]])
                self._name(args[0], None)
            case "link":
                self._name(args[1], self._live[args[0]])
            case "remove":
                self._name(args[0], None)
            case "fsync_folder":
                for path in [path for path in self._uncertain if path.parent == args[0]]:
                    self._certain[path] = self._uncertain.pop(path)[-1]
                self._new_folders -= {path for path in self._new_folders if path.parent == args[0]}
        self._check(self)
        return done


def run_child(work: Callable[[], Any]) -> int:
    """Run `work` in a fork of this process; return its exit status, or minus the signal that killed it.

    A child that hangs, as on a lock that a thread held at the fork, is killed: it would keep the test's pipes open.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
