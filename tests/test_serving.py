"""Prometheus: its text, and the port at which it asks."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from tests.test_stats import Run, timings_of
from wdskit import PipelineError
from wdskit.loader import serving
from wdskit.loader.prometheus import CONTENT_TYPE, metrics_text
from wdskit.loader.serving import ports, serve

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)+)\} (\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\[\\n"])*)"')
HOST = "127.0.0.1"


def parse(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels; each family is introduced once, by its help and its type."""
    found: dict[tuple[str, ...], float] = {}
    families: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ", 3)[3].endswith(".")
            families.append(line.split()[2])
            continue
        if line.startswith("# TYPE "):
            assert line.split()[2] == families[-1]
            assert line.split()[3] in {"counter", "histogram"}
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1].startswith(families[-1])
        labels = dict(LABEL.findall(match[2]))
        key = (match[1], *(value for name, value in labels.items()))
        assert key not in found
        found[key] = float(match[3])
    assert len(families) == len(set(families))
    assert text.endswith("\n")
    return found


def ask(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("Content-Type", ""), text


def threads_of_servers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "wdskit-metrics"]


def num_sockets() -> int:
    """Open sockets of this process, other programs' left out."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            found += str(link.readlink()).startswith("socket:")
    return found


@pytest.fixture
def stats():
    run = Run()
    run.epoch(0, 4, timings=timings_of(read=1e-3, **{"decode-crop": 0.5}), replaced=1)
    run.epoch(1, 4, timings=timings_of(read=1e-3))
    return run.stats


def test_counters_are_those_of_the_loaders_life(stats):
    found = parse(metrics_text([stats]))
    sums = {key[0]: value for key, value in found.items() if len(key) == 3}
    assert sums == {
        "wdskit_steps_total": 8,
        "wdskit_samples_total": 80,
        "wdskit_replaced_samples_total": 4,
        "wdskit_read_bytes_total": 8000,
        "wdskit_wait_seconds_total": 2 * 5.0 + 6 * 0.5,
        "wdskit_work_seconds_total": 6 * 1.5,
        "wdskit_asked_total": 6,
        "wdskit_ready_items_total": 6,
    }
    assert {key[1:3] for key in found} == {("train", "3")}


def test_stages_are_histograms_in_seconds(stats):
    found = parse(metrics_text([stats]))
    for stage, num, total_s in (("read", 8, 8e-3), ("decode-crop", 4, 2.0)):
        buckets = {
            key[4]: value for key, value in found.items() if key[0] == "wdskit_stage_seconds_bucket" and key[3] == stage
        }
        edges = [float(edge) for edge in buckets]
        assert edges == sorted(edges)
        assert list(buckets.values()) == sorted(buckets.values())
        assert edges[-1] == float("inf")
        assert list(buckets.values()) == [num if edge >= total_s / num else 0 for edge in edges]
        assert found["wdskit_stage_seconds_sum", "train", "3", stage] == pytest.approx(total_s)
        assert found["wdskit_stage_seconds_count", "train", "3", stage] == num


def test_names_that_need_it_are_escaped():
    run = Run()
    run.stats.name = 'a"b\\c\nd'
    run.epoch(0, 2, timings=timings_of(**{'m"ap': 1.0}))
    assert ("wdskit_steps_total", r"a\"b\\c\nd", "3") in parse(metrics_text([run.stats]))


def test_it_is_served_until_it_is_closed(stats):
    sockets = num_sockets()
    close = serve(stats, HOST, 0)
    port = ports()[0]
    assert ask(port) == (200, CONTENT_TYPE, metrics_text([stats]))
    assert ask(port, "/")[0] == 200
    assert ask(port, "/metrics?x=1")[0] == 200
    assert ask(port, "/other")[0] == 404
    close()
    close()
    assert (ports(), threads_of_servers(), num_sockets()) == ([], [], sockets)
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_loaders_share_an_address_under_names_of_their_own():
    runs = [Run() for _ in range(3)]
    closing = [serve(run.stats, HOST, 0) for run in runs]
    assert [run.stats.name for run in runs] == ["train", "train-2", "train-3"]
    assert len(ports()) == len(threads_of_servers()) == 1
    loaders = {key[1] for key in parse(ask(ports()[0])[2])}
    assert loaders == {"train", "train-2", "train-3"}
    closing[1]()
    assert {key[1] for key in parse(ask(ports()[0])[2])} == {"train", "train-3"}
    another = Run()
    closing[1] = serve(another.stats, HOST, 0)
    assert another.stats.name == "train-2"
    for close in closing:
        close()
    assert not ports()


def test_a_client_that_says_nothing_keeps_nobody_waiting_for_long(stats, monkeypatch):
    monkeypatch.setattr(serving._Handler, "timeout", 0.1)
    close = serve(stats, HOST, 0)
    with socket.create_connection((HOST, ports()[0])) as silent:
        assert ask(ports()[0])[0] == 200
        assert silent.fileno() >= 0
        close()
    assert not threads_of_servers()


def test_a_port_that_another_program_has_is_an_error(stats):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            PipelineError, match=rf"stats: port {port} of 127.0.0.1 cannot be had: Address already in use"
        ):
            serve(stats, HOST, port)
    assert not ports()
    assert not threads_of_servers()


def test_a_forked_process_holds_no_socket(stats):
    """Else the port would stay taken as long as a worker lives."""
    close = serve(stats, HOST, 0)
    sockets = num_sockets()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"%d %d" % (sockets - num_sockets(), len(ports())))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        assert answers.read() == b"3 0"  # the listening one and the pair that wakes the thread
    os.waitpid(child, 0)
    assert ask(ports()[0])[0] == 200
    close()


def test_a_server_that_is_closed_by_its_own_thread_ends(stats):
    """The garbage collector may run there, and take the last loader."""
    closed = threading.Event()

    class Closing:
        name = "train"

        def __init__(self):
            self.rank = 0

        def totals(self, window):
            close()
            closed.set()
            return stats.totals(window)

    close = serve(Closing(), HOST, 0)
    thread = next(each for each in threading.enumerate() if each.name == "wdskit-metrics")
    port = ports()[0]
    assert ask(port)[0] == 200
    assert closed.is_set()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        ask(port)
