"""Rules for all worker processes, and the CPU time that they use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wdskit import processes
from wdskit.processes import block_sigint


@pytest.mark.parametrize("has_thread", [False, True])
def test_ctrl_c_waits_for_the_end_of_a_block(has_thread):
    """Another thread may receive the signal; Python runs the handler in the main thread at once."""
    stop = threading.Event()
    if has_thread:
        threading.Thread(target=stop.wait, daemon=True).start()
    handler = signal.getsignal(signal.SIGINT)
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with block_sigint():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(20):
                time.sleep(0.01)
            steps.append("end of the block")
        steps.append("after the block")
    assert steps == ["end of the block"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with block_sigint():
        pass
    stop.set()


def test_a_process_that_is_forked_in_a_block_of_another_thread_gets_ctrl_c(tmp_path):
    code = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(processes.__file__).parents[1])!r})
from wdskit.processes import block_sigint
def fork():
    child = os.fork()
    if not child:
        try:
            signal.raise_signal(signal.SIGINT)
            for _ in range(100):
                pass
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
codes = []
with block_sigint():
    thread = threading.Thread(target=fork)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT}})
    thread.start()
    thread.join()
print(codes)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("[7]\n", "")
