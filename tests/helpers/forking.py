"""Run scripts, each in a fork of a process that has loaded wdskit: loading takes 3 s of CPU, a fork 20 ms.

As a program, this module reads the path of a script from each line of its input. It prints the process of the script,
and the exit status when the script has ended. The output of the script is then in PATH.out and PATH.err.
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
    """A script that was started.

    Attributes:
        pid: The script's process, which leads a process group of its own.
    """

    def __init__(self, path: Path, answers: TextIO) -> None:
        self._path = path
        self._answers = answers
        self.pid = self._answer("started")

    def _answer(self, to: str) -> int:
        """Return the number of the next answer, of kind `to`: an exit status must not become a pid (0 is a group)."""
        what, number = self._answers.readline().split()
        assert what == to, f"another script is still running: {what} {number}"
        return int(number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end; return exit status and output. If PATH.out is a pipe, output that was not read is lost."""
        code = self._answer("ended")
        out, err = (Path(f"{self._path}.{name}") for name in ("out", "err"))
        return subprocess.CompletedProcess(
            [str(self._path)], code, "" if out.is_fifo() else out.read_text(), err.read_text()
        )


class Interpreter:
    """Starts scripts, one at a time.

    Args:
        folder: Working folder of the interpreter; each script runs in the folder of its file.
        environment: Environment of the interpreter and the scripts.
        options: Command line options of Python.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *options: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, *options, __file__]
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)

    def run(self, path: Path, text: str) -> subprocess.CompletedProcess[str]:
        """Write a script and run it to its end."""
        path.write_text(text, encoding="utf-8")
        return self.start(path).wait()

    def start(self, path: Path) -> Script:
        """Start a script. If PATH.out is a named pipe, the output can be read while the script runs."""
        requests, answers = cast("TextIO", self._process.stdin), cast("TextIO", self._process.stdout)
        print(path, file=requests, flush=True)
        return Script(path, answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the interpreter with an empty line: closing its input has no effect, as forked processes hold it open."""
        print(file=self._process.stdin, flush=True)
        self._process.__exit__(None, None, None)


def next_script() -> str | None:
    """Return the path of a script in the child that runs it, and None in the parent after the last script."""
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
    """Run a script as Python does in the script's folder: as `__main__`, up to the end of the interpreter."""
    os.setsid()
    signal.alarm(TIMEOUT_S)  # kills a script that hangs
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
    gc.freeze()  # at its end, no child walks through the loaded objects
    script = next_script()
    if script is not None:
        run(script)
