"""Runs scripts, each in a fork of this process, which has loaded what they all need: that takes 3 s, a fork 20 ms.

Run as a program: it reads the path of a script from each line of its input, and prints the script's exit status when
it has ended; what it printed is in PATH.out and PATH.err then.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

TIMEOUT_S = 240


def next_script() -> str | None:
    """The script that this process is to run, in a child; in the parent None, when there are no more."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return line.rstrip("\n")
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


def run(path: str) -> None:
    """Run it as Python would: as `__main__`, with its files, and to the interpreter's end."""
    for number, name in enumerate((os.devnull, f"{path}.out", f"{path}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    signal.alarm(TIMEOUT_S)
    sys.argv = [path]
    sys.path[0] = str(Path(path).parent)
    code = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    names = vars(sys.modules["__main__"])
    names.clear()
    names.update({"__name__": "__main__", "__file__": path})
    exec(code, names)


if __name__ == "__main__":
    import wdskit

    _ = wdskit.Pipeline, wdskit.make_loader, wdskit.pack, wdskit.plan, wdskit.bench
    script = next_script()
    if script is not None:
        run(script)
