"""Loaders' counters for Prometheus, as text and at a port, through prometheus_client (the extra `metrics`)."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from wdskit.errors import PipelineError
from wdskit.loader.meter import Meter
from wdskit.loader.stats import LoaderStats
from wdskit.text import install_extra

logger = logging.getLogger(__name__)

_COUNTERS: dict[str, tuple[str, Callable[[LoaderStats], float]]] = {
    "steps": ("Items that the consumer has received.", lambda of: of.steps),
    "samples": ("Samples in them.", lambda of: of.samples),
    "replaced_samples": ("Bad samples that were replaced by others.", lambda of: of.replaced),
    "read_bytes": ("Bytes read from shards for these samples.", lambda of: of.bytes_read),
    "fetched_bytes": ("Bytes that came from a store.", lambda of: of.traffic.fetched),
    "range_bytes": ("Bytes of samples read from a store.", lambda of: of.traffic.by_ranges),
    "cache_bytes": ("Bytes of samples read from the cache.", lambda of: of.traffic.from_cache),
    "storage_retries": ("Requests to a store that were retried.", lambda of: of.traffic.retries),
    "storage_wait_seconds": ("Time that threads waited for a store.", lambda of: of.traffic.wait_s),
    "wait_seconds": ("Time that the consumer waited, first items included.", lambda of: of.wait_s + of.first_wait_s),
    "work_seconds": ("Time that the consumer worked between items.", lambda of: of.elapsed_s - of.wait_s),
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
        found = [each.stats("life") for each in meters if each is not None]
        for name, (meaning, value) in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"wdskit_{name}", meaning, labels=["loader", "rank"])
            for stats in found:
                counter.add_metric([stats.loader, str(stats.rank)], value(stats))
            yield counter
        meaning = "Values that a stage processed (samples, or batches after batched) and the time that this took."
        stages = core.SummaryMetricFamily("wdskit_stage_seconds", meaning, labels=["loader", "rank", "stage"])
        for stats in found:
            for name, stage in stats.stages.items():
                stages.add_metric([stats.loader, str(stats.rank), name], stage.num, stage.total_s)
        yield stages


def metrics_text(meter: Meter) -> str:
    """All counters of a loader since it was made, in Prometheus's text format.

    Raises:
        PipelineError: prometheus_client is not installed.
    """
    client, collector = _client(), _Collector()
    collector.add(meter)
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
    with _lock:
        if (host, port) not in _servers:
            collector, registry = _Collector(), client.CollectorRegistry()
            registry.register(collector)
            try:
                _servers[host, port] = client.start_http_server(port, addr=host, registry=registry)[0], collector
            except (OSError, OverflowError) as err:
                msg = f"stats: rank {meter.rank} cannot listen at port {port} of {host} ({err})."
                raise PipelineError(f"{msg}\n  Choose another for loader.stats.port, or leave it out.") from err
        server, collector = _servers[host, port]
        collector.add(meter)
    logger.info("metrics of %s for Prometheus: http://%s:%d/metrics", meter.name, host, server.server_port)


def _client() -> ModuleType:
    try:
        import prometheus_client
    except ImportError as err:
        msg = "stats: Prometheus's metrics need prometheus_client, which is not installed."
        raise PipelineError(f"{msg}\n  {install_extra('metrics')}") from err
    return prometheus_client


def _close_in_fork() -> None:
    """A worker process must not keep the port of a process that is gone."""
    global _lock  # noqa: PLW0603 (another thread of the parent may have held it)
    _lock = threading.Lock()
    for server, _ in _servers.values():
        server.socket.close()
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_fork)
