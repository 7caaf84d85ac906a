"""Rules for all worker processes, and the CPU time that they use."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

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
