"""Prometheus: its text, and the port at which it asks."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import urllib.request
import weakref
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from shards import number_of, write_numbers

from tests.loader.test_meter import Run, timings_of
from wdskit import Pipeline, PipelineError, make_loader
from wdskit.loader.metrics import metrics_text, serve

HOST = "127.0.0.1"


def parse(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name, loader, rank and stage; each family is introduced once, by its help and its type."""
    found: dict[tuple[str, ...], float] = {}
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families) == 12
    for family in families:
        assert family.documentation.endswith(".")
        assert family.type == ("summary" if family.name == "wdskit_stage_seconds" else "counter")
        for sample in family.samples:
            labels = (sample.labels[name] for name in ("loader", "rank", "stage") if name in sample.labels)
            key = (sample.name, *labels)
            assert key not in found
            found[key] = sample.value
    return found


def ask(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


def loaders_at(url: str) -> set[str]:
    return {key[1] for key in parse(ask(url)) if len(key) == 3}


def num_sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            found += str(link.readlink()).startswith("socket:")
    return found


@pytest.fixture
def urls(caplog):
    """Where the log says that metrics are, one a loader."""
    caplog.set_level(logging.INFO, logger="wdskit.loader.metrics")
    return lambda: [record.message.rpartition(" ")[2] for record in caplog.records if "metrics of" in record.message]


@pytest.fixture
def meter():
    run = Run()
    run.epoch(0, 4, timings=timings_of(read=1e-3, **{"decode-crop": 0.5}), replaced=1)
    run.epoch(1, 4, timings=timings_of(read=1e-3))
    return run.meter


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """Shards of 40 samples in all."""
    return write_numbers(tmp_path_factory.mktemp("numbers"), [20, 20])


def test_counters_are_those_of_the_loaders_life(meter):
    found = parse(metrics_text(meter))
    sums = {key[0]: value for key, value in found.items() if len(key) == 3}
    assert sums == {
        "wdskit_steps_total": 8,
        "wdskit_samples_total": 80,
        "wdskit_replaced_samples_total": 4,
        "wdskit_read_bytes_total": 8000,
        "wdskit_fetched_bytes_total": 0,
        "wdskit_range_bytes_total": 0,
        "wdskit_cache_bytes_total": 0,
        "wdskit_storage_retries_total": 0,
        "wdskit_storage_wait_seconds_total": 0,
        "wdskit_wait_seconds_total": 2 * 5.0 + 6 * 0.5,
        "wdskit_work_seconds_total": 6 * 1.5,
    }
    assert {key[1:3] for key in found} == {("train", "3")}


def test_stages_have_a_sum_of_seconds_and_a_count(meter):
    found = parse(metrics_text(meter))
    for stage, num, total_s in (("read", 8, 8e-3), ("decode-crop", 4, 2.0)):
        assert found["wdskit_stage_seconds_sum", "train", "3", stage] == pytest.approx(total_s)
        assert found["wdskit_stage_seconds_count", "train", "3", stage] == num


def test_names_that_need_it_are_escaped():
    run = Run()
    run.meter.name = 'a"b\\c\nd'
    run.epoch(0, 2, timings=timings_of(**{'m"ap': 1.0}))
    assert ("wdskit_steps_total", 'a"b\\c\nd', "3") in parse(metrics_text(run.meter))


def test_without_prometheus_client_the_message_says_how_to_install_it(numbers, monkeypatch):
    """Only for what needs it: the same loader runs, and logs."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    pipe = Pipeline().stream(numbers, seed=1).batched(4)
    loader = pipe.loader(workers=0, stats=5)
    assert len(list(loader)) == 10
    for needs_it in (loader.prometheus_text, lambda: pipe.loader(workers=0, stats={"port": 0})):
        with pytest.raises(PipelineError, match=r"not installed\.\n  Install it: `pip install '\.\[metrics\]'`"):
            needs_it()


def test_loaders_share_an_address_under_names_of_their_own(urls):
    runs = [Run() for _ in range(3)]
    for run in runs:
        serve(run.meter, HOST, 0)
    (url,) = set(urls())
    assert [run.meter.name for run in runs] == ["train", "train-2", "train-3"]
    assert loaders_at(url) == {"train", "train-2", "train-3"}
    del run, runs[1]
    gc.collect()
    assert loaders_at(url) == {"train", "train-3"}
    another = Run()
    serve(another.meter, HOST, 0)
    assert another.meter.name == "train-2"


def test_a_port_that_another_program_has_is_an_error(meter):
    meter.rank = 0
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        message = (
            rf"stats: rank 0 cannot listen at port {port} of 127.0.0.1 \(.*Address already in use\)\.\n  Choose another"
        )
        with pytest.raises(PipelineError, match=message):
            serve(meter, HOST, port)


def test_each_rank_has_its_own_port_and_none_above_the_last(numbers, meter, urls):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    serve(meter, HOST, port - 3)
    assert urls() == [f"http://{HOST}:{port}/metrics"]
    pipe = Pipeline().stream(numbers).split_by_node().with_epoch(2)
    with pytest.raises(PipelineError, match="stats: rank 1 cannot listen at port 65536 of "):
        pipe.loader(workers=0, rank=1, world_size=2, stats={"port": 65535})


def test_a_forked_process_holds_no_listening_socket(meter, urls):
    """Else the port would stay taken as long as a worker lives, behind a training that was killed."""
    serve(meter, HOST, 0)
    before = num_sockets()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"%d" % num_sockets())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        assert int(answers.read()) < before
    os.waitpid(child, 0)
    assert ask(urls()[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_is_served_while_it_is_there(numbers, workers, urls):
    """While its processes run and when they have ended, forked with the socket open."""
    pipe = Pipeline().stream(numbers, seed=1).split_by_worker().map(number_of).batched(4)
    loader = pipe.loader(workers=workers, stats={"every": 5, "port": 0})
    assert len(list(loader)) == 10
    (url,) = urls()
    text = ask(url)
    assert set(loader.prometheus_text().splitlines()) <= set(text.splitlines())
    assert 'wdskit_samples_total{loader="pipeline",rank="0"} 40.0\n' in text
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert "pipeline" not in loaders_at(url)


def test_loaders_of_one_configuration_share_the_port(numbers, urls):
    stages = [{"stream": numbers}, {"batched": 4}]
    config = {"pipelines": {"first": stages, "second": stages}, "loader": {"workers": 0, "stats": {"port": 0}}}
    first, second = (make_loader(config, pipeline=name) for name in ("first", "second"))
    list(second)
    (url,) = set(urls())
    text = ask(url)
    assert 'wdskit_samples_total{loader="first",rank="0"} 0.0\n' in text
    assert 'wdskit_samples_total{loader="second",rank="0"} 40.0\n' in text
    assert first.stats().loader == "first"
