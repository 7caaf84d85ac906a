"""Loaders' counters for Prometheus, as text and at a port, through prometheus_client (the extra `metrics`)."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from wdskit.errors import PipelineError
from wdskit.loader.meter import Meter, Totals
from wdskit.stages.timing import BUCKETS_AN_OCTAVE, NUM_BUCKETS, Histogram, edge_s

logger = logging.getLogger(__name__)

MAX_PORT = 65_535

_COUNTERS: dict[str, tuple[str, Callable[[Totals], float]]] = {
    "steps": ("Items that the consumer has received.", lambda of: of.steps),
    "samples": ("Samples in them.", lambda of: of.samples),
    "replaced_samples": ("Bad samples for which others stand.", lambda of: of.replaced),
    "read_bytes": ("Bytes read from shards for these samples.", lambda of: of.timings.bytes_read),
    "wait_seconds": (
        "Time that the consumer waited for items, the first of an epoch included.",
        lambda of: of.waits.total_s + of.first_wait_s,
    ),
    "work_seconds": ("Time that the consumer worked between items.", lambda of: of.work_s),
    "asked": ("Times that the consumer asked for an item while others were made ahead.", lambda of: of.waits.num),
    "ready_items": ("Items that were ready then, added up.", lambda of: of.ready),
}


class _Collector:
    """Counters of some loaders since they were made; one that is gone is left out.

    Attributes:
        meters: Of the loaders, by their names.
    """

    def __init__(self) -> None:
        self.meters: WeakValueDictionary[str, Meter] = WeakValueDictionary()

    def add(self, meter: Meter) -> None:
        """Note one more loader; its name gets a number behind it where another loader here has it."""
        names = itertools.chain([meter.name], (f"{meter.name}-{number}" for number in itertools.count(2)))
        meter.name = next(name for name in names if name not in self.meters)
        self.meters[meter.name] = meter

    def collect(self) -> Iterator[Any]:
        """One family of metrics after the other, as prometheus_client asks for them."""
        core = _client().metrics_core
        meters = (ref() for ref in self.meters.valuerefs())
        found = [([each.name, str(each.rank)], each.totals("life")) for each in meters if each is not None]
        for name, (meaning, value) in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"wdskit_{name}", meaning, labels=["loader", "rank"])
            for labels, totals in found:
                counter.add_metric(labels, value(totals))
            yield counter
        meaning = "Time that a stage took for a value: a sample, or behind batched a batch."
        stages = core.HistogramMetricFamily("wdskit_stage_seconds", meaning, labels=["loader", "rank", "stage"])
        for labels, totals in found:
            for stage, histogram in totals.timings.stages.items():
                stages.add_metric([*labels, stage], list(_buckets(histogram)), histogram.total_s)
        yield stages


def _buckets(histogram: Histogram) -> Iterable[tuple[str, int]]:
    """How many durations are at most 0.4 us, 1.6 us, 6.4 us, ... 107 s, and how many there are."""
    num, width = 0, 2 * BUCKETS_AN_OCTAVE
    for first in range(0, NUM_BUCKETS, width):
        num += sum(histogram.buckets.get(bucket, 0) for bucket in range(first, first + width))
        yield f"{edge_s(first + width):.3g}", num
    yield "+Inf", histogram.num


def metrics_text(meter: Meter) -> str:
    """All counters of a loader since it was made, in Prometheus's text format.

    Raises:
        PipelineError: prometheus_client is not installed.
    """
    client, collector = _client(), _Collector()
    collector.meters[meter.name] = meter
    registry = client.CollectorRegistry()
    registry.register(collector)
    text: bytes = client.generate_latest(registry)
    return text.decode()


_lock = threading.Lock()
_servers: dict[tuple[str, int], tuple[Any, _Collector]] = {}


def serve(meter: Meter, host: str, port: int) -> None:
    """Let a loader's counters be asked for at `http://host:port/metrics` for as long as the loader is there.

    The loaders of a process share the server of an address, which lives as long as the process.

    Args:
        meter: Of the loader. Its name gets a number behind it where another loader there has it.
        host: Address to listen at.
        port: Of rank 0; rank r has `port + r`. 0: any that is free; the log names it.

    Raises:
        PipelineError: The port cannot be had, or prometheus_client is not installed.
    """
    client = _client()
    port = port + meter.rank if port else 0
    if port > MAX_PORT:
        msg = f"stats: rank {meter.rank} would listen at port {port}, and there are none above {MAX_PORT}."
        raise PipelineError(f"{msg}\n  Choose a lower one for loader.stats.port.")
    with _lock:
        if (host, port) not in _servers:
            collector, registry = _Collector(), client.CollectorRegistry()
            registry.register(collector)
            try:
                _servers[host, port] = client.start_http_server(port, addr=host, registry=registry)[0], collector
            except OSError as err:
                msg = f"stats: port {port} of {host} cannot be had: {err.strerror or err}."
                raise PipelineError(f"{msg}\n  Choose another for loader.stats.port, or leave it out.") from err
        server, collector = _servers[host, port]
        collector.add(meter)
    logger.info("metrics of %s for Prometheus: http://%s:%d/metrics", meter.name, host, server.server_port)


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as err:
        msg = "stats: Prometheus's metrics need prometheus_client, which is not installed."
        raise PipelineError(f"{msg}\n  Run `pip install wdskit[metrics]`.") from err
    return prometheus_client


def _close_in_fork() -> None:
    """A worker process must not keep the port of a process that is gone."""
    global _lock  # noqa: PLW0603 (another thread of the parent may have held it)
    _lock = threading.Lock()
    for server, _ in _servers.values():
        server.socket.close()
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_fork)
