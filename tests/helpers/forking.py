"""Runs scripts, each in a fork of a process that has loaded what they all need: that takes 3 s of CPU, a fork 20 ms.

As a program it reads the path of a script from each line of its input, and prints the script's process, and its exit
status when it has ended. What the script prints is in PATH.out and PATH.err then.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO, cast

from typing_extensions import Self

TIMEOUT_S = 240


class Script:
    """One that was started.

    Attributes:
        pid: Its process, which leads a group of its own.
    """

    def __init__(self, path: Path, answers: TextIO) -> None:
        self._path = path
        self._answers = answers
        self.pid = self._answer("started")

    def _answer(self, to: str) -> int:
        """A number, which is never that of a script before, on which a test has not waited: 0 names a whole group."""
        what, number = self._answers.readline().split()
        assert what == to, f"another script is still running: {what} {number}"
        return int(number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it printed; where it had a pipe, what was left in there is lost."""
        code = self._answer("ended")
        out, err = (Path(f"{self._path}.{name}") for name in ("out", "err"))
        return subprocess.CompletedProcess(
            [str(self._path)], code, "" if out.is_fifo() else out.read_text(), err.read_text()
        )


class Interpreter:
    """Starts scripts, one at a time.

    Args:
        folder: Where it starts; each script runs in its own folder.
        environment: As what.
        options: Of Python's.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, *options, __file__]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)

    def run(self, path: Path, text: str) -> subprocess.CompletedProcess[str]:
        """Write one, and run it to its end."""
        path.write_text(text, encoding="utf-8")
        return self.start(path).wait()

    def start(self, path: Path) -> Script:
        """Start one. Where PATH.out is a named pipe, what it prints can be read while it runs."""
        requests, answers = cast("TextIO", self._process.stdin), cast("TextIO", self._process.stdout)
        print(path, file=requests, flush=True)
        return Script(path, answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by a word: a process that was forked here meanwhile holds the other end of its input too."""
        print(file=self._process.stdin, flush=True)
        self._process.__exit__(None, None, None)


def next_script() -> str | None:
    """The script that this process is to run, in a child; in the parent None, when there are no more."""
    for path in iter(lambda: sys.stdin.readline().rstrip("\n"), ""):
        files = [os.open(name, os.O_RDWR | os.O_CREAT, 0o666) for name in (os.devnull, f"{path}.out", f"{path}.err")]
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(files) + 1)
            return path
        for file in files:
            os.close(file)
        print("started", pid, flush=True)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def run(path: str) -> None:
    """Run it as Python would in its folder: as `__main__`, with its files, and to the interpreter's end."""
    os.setsid()
    signal.alarm(TIMEOUT_S)  # what hangs is killed
    os.chdir(Path(path).parent)
    sys.argv = [path]
    sys.path[0] = str(Path(path).parent)
    code = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update({"__name__": "__main__", "__file__": path, "__spec__": None, "__package__": None, "__doc__": None})
    exec(code, names)


if __name__ == "__main__":
    import wdskit

    _ = wdskit.Pipeline, wdskit.make_loader, wdskit.pack, wdskit.plan, wdskit.bench
    gc.collect()
    gc.freeze()  # no child looks at what is loaded when it ends
    script = next_script()
    if script is not None:
        run(script)
